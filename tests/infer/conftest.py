"""Models that write what a test wants, tokenizers to read it by, and servers of them."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.generate.model_loading import load_model
from lmforge.interop.export import export_folder
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.model.layers import LanguageModel

Scripted = Callable[..., LanguageModel]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A verb that a test ran in this process has taken all cores: the small models here want one."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A token a byte, so that a test spells what comes when."""
    return train_tokenizer([""], 261)


@pytest.fixture(scope="session")
def scripted() -> Scripted:
    """`scripted({token: its successor, …}, vocab_size=261)`: a real model whose likeliest next token is that of a table.

    Its embedding is the identity, its blocks add nothing, and its head turns a token into its successor. A token that
    is not in the table is followed by itself.
    """

    def write(successors: dict[int, int], vocab_size: int = 261) -> LanguageModel:
        width = vocab_size + vocab_size % 2
        config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            head_dim=2,
        )
        model = init_weights(build_model(config), 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.endswith("norm.weight"):
                    parameter.zero_()
            model.embeddings[0].weight.fill_diagonal_(1.0)
            for token in range(vocab_size):
                model.lm_head.weight[successors.get(token, token), token] += 1.0
        return model

    return write


@pytest.fixture(scope="session")
def spelling(byte_tokenizer: Tokenizer, scripted: Scripted) -> Callable[[str], LanguageModel]:
    """`spelling(text)`: a model that goes on after each byte of `text` with the next one, and then ends. No byte twice."""

    def write(text: str) -> LanguageModel:
        ids = [*byte_tokenizer.encode(text), byte_tokenizer.eos_token_id]
        assert len(set(ids)) == len(ids) == len(text.encode()) + 1
        return scripted(dict(pairwise(ids)))

    return write


@pytest.fixture(scope="session")
def tiny_model_and_tokenizer(tiny_run: Path) -> tuple[LanguageModel, Tokenizer]:
    """The model that `tiny_run` trained: it writes noise, in bytes and all."""
    opened = load_model(tiny_run, torch.device("cpu"), torch.float32)
    return opened.model, opened.tokenizer


@dataclass(frozen=True)
class Server:
    """A running `lmforge serve`: where it is, and its process."""

    url: str
    process: subprocess.Popen[str]

    def ask(self, path: str, body: object = None, *, key: str = "", **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer. `body` is sent as JSON, or as it is where it is bytes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"} | headers
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    def client(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's own client of this server."""
        return _client(f"{self.url}/v1", key)

    def is_idle(self) -> bool:
        """Whether nothing is being written within a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _, told = self.ask("/health")
            if (told["running"], told["waiting"]) == (0, 0):
                return True
            time.sleep(0.02)
        return False


@cache  # making one takes a while
def _client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def serving() -> Iterator[Callable[..., Server]]:
    """`serving(*words)`: `lmforge serve` in a process of its own. All are ended by Ctrl-C, and must end well."""
    servers: list[Server] = []

    def start(*words: object) -> Server:
        process = subprocess.Popen(
            # On a CPU that multiplies bf16 that would be taken, and a text would depend on those beside it.
            [sys.executable, "-m", "lmforge", "serve", *map(str, words), "--port", "0", "--device", "cpu", "--dtype", "fp32"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("http://"), f"{line!r}, status {process.wait(timeout=60)}"
        servers.append(Server(line.split()[0], process))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def models(scripted: Scripted, byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face folders that can chat: hello says `Hey <s>` and ends, endless says `ab` for ever and
    noise writes at random. In plain no one has said how to talk to it."""
    folder = tmp_path_factory.mktemp("models")
    byte_tokenizer.save(folder / "tokenizer")
    asked, ends = (byte_tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    assert asked
    assert ends
    hello, ab = byte_tokenizer.encode("Hey <s>"), byte_tokenizer.encode("ab")
    torch.manual_seed(0)
    noise = ModelConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    written = {
        "hello": scripted(dict(pairwise([asked, *hello, ends]))),
        "endless": scripted(dict(pairwise([asked, *ab, ab[0]]))),
        "noise": init_weights(build_model(noise), 1),
        "plain": init_weights(build_model(noise), 2),
    }
    for name, model in written.items():
        export_folder(model, model.config, folder / name, tokenizer_folder=folder / "tokenizer")
    plain = folder / "plain" / "tokenizer.json"
    plain.write_text(plain.read_text("utf-8").replace("<|assistant|>", "<|other|>"), "utf-8")
    return folder


@pytest.fixture(scope="session")
def server(serving: Callable[..., Server], models: Path, tiny_run: Path) -> Server:
    """Four models and a run of three checkpoints, 8 rows, and 2 that wait."""
    folders = [models / name for name in ("hello", "endless", "noise", "plain")]
    limits = {"--max_batch_size": 8, "--max_queue": 2, "--max_length": 20_000, "--max_models": 4}
    return serving(*folders, tiny_run, *(word for pair in limits.items() for word in pair))


@pytest.fixture(scope="session")
def narrow_server(serving: Callable[..., Server], models: Path) -> Server:
    """A server that asks for the key `sesame`, and takes little: a row, an open model, 9,000 tokens, 20,000 bytes."""
    limits = {"--max_batch_size": 1, "--max_queue": 1, "--max_length": 9_000, "--max_models": 1, "--max_body_bytes": 20_000}
    words = [word for pair in limits.items() for word in pair]
    return serving(models / "endless", models / "hello", "--api_key", "sesame", *words)
