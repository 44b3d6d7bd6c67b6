"""Servers of the models that tests/serve/decoding/conftest.py makes."""

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.hf.export import export_folder
from tests.serve.decoding.conftest import (  # noqa: F401 - fixtures
    Scripted,
    byte_tokenizer,
    models,
    one_thread,
    scripted,
    spelling,
)
from tests.support.browser import browser  # noqa: F401 - a fixture
from tests.support.preloaded import Forked, preloaded

if TYPE_CHECKING:
    import openai  # imported where it is used: a GPU's environment may lack it


# Of servers whose weights a trainer replaces, and of trainers in tests/post/rl.
KEY = {"LMFORGE_API_KEY": "the-trainers"}


@dataclass(frozen=True)
class Server:
    """A running `lmforge serve`: where it is, its process, and its key."""

    url: str
    process: Forked
    key: str = ""

    def ask(
        self, path: str, body: object = None, *, key: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and JSON of an answer. `body` is sent as JSON, or as it is where it is bytes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        key = self.key if key is None else key
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"} | headers
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read())

    def status(self, path: str, *, method: str, key: str) -> int:
        """That of an answer which need not be JSON."""
        request = urllib.request.Request(
            self.url + path, None, {"authorization": f"Bearer {key}"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            refused.close()
            return refused.code

    def client(self, key: str = "none") -> "openai.OpenAI":
        """OpenAI's own client of this server."""
        return _client(f"{self.url}/v1", key)

    def is_idle(self) -> bool:
        """Whether nothing is being written within a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            _, health = self.ask("/health")
            if (health["running"], health["waiting"]) == (0, 0):
                return True
            time.sleep(0.02)
        return False


@cache  # making one takes a while
def _client(url: str, key: str) -> "openai.OpenAI":
    import openai

    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """`serving(*words)`: `lmforge serve` in a process of its own.

    All are ended by Ctrl-C, and must end well.
    """
    servers: list[Server] = []

    def start(*words: object) -> Server:
        # On a CPU that multiplies bf16 that would be taken, and a text would depend on those beside
        # it.
        words = ("serve", *words, "--port", 0, "--device", "cpu", "--dtype", "fp32")
        key = KEY if "--weight_updates" in words else {}
        process = preloaded().start(words, tmp_path_factory.mktemp("server"), variables=key)
        while "\n" not in (printed := process.out.read_text()):
            assert process.poll() is None, process.errors.read_text()
            time.sleep(0.02)
        assert printed.startswith("http://"), printed
        servers.append(Server(printed.split()[0], process, *key.values()))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def server(serving: Callable[..., Server], models: Path, tiny_run: Path) -> Server:  # noqa: F811 - its fixture
    """Four models and a run of three checkpoints, 8 rows, and 2 that wait."""
    folders = [models / name for name in ("hello", "endless", "noise", "plain")]
    limits = {"--max_batch_size": 8, "--max_queue": 2, "--max_length": 20_000, "--max_models": 4}
    return serving(*folders, tiny_run, *(word for pair in limits.items() for word in pair))


@pytest.fixture(scope="session")
def blank_model(
    scripted: Scripted,  # noqa: F811
    byte_tokenizer: Tokenizer,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder whose model says ` b`, with a tokenizer that leaves out the blank where a text
    begins.
    """
    folder = tmp_path_factory.mktemp("served")
    byte_tokenizer.save(folder / "tokenizer")
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], strip]}
    file.write_text(json.dumps(content))
    end, (a, blank, b) = byte_tokenizer.eos_token_id, byte_tokenizer.encode("a b")
    model = scripted({end: blank, a: blank, blank: b, b: end})
    export_folder(model, model.config, folder / "blank", tokenizer_folder=folder / "tokenizer")
    return folder / "blank"


@pytest.fixture(scope="session")
def weights_server(serving: Callable[..., Server], models: Path) -> Server:  # noqa: F811 - its fixture
    """A server for trainers, of texts up to 4,000 tokens."""
    return serving(models / "endless", "--weight_updates", "--max_length", 4_000)


@pytest.fixture(scope="session")
def narrow_server(serving: Callable[..., Server], models: Path) -> Server:  # noqa: F811 - its fixture
    """A server that asks for the key `sesame`, and takes little: a row, an open model, 9,000
    tokens, 20,000 bytes.
    """
    limits = {
        "--max_batch_size": 1,
        "--max_queue": 1,
        "--max_length": 9_000,
        "--max_models": 1,
        "--max_body_bytes": 20_000,
    }
    words = [word for pair in limits.items() for word in pair]
    return serving(models / "endless", models / "hello", "--api_key", "sesame", *words)
