"""Models that generate the text that a test needs, and their tokenizers."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from lmforge.serve.decoding.model_loading import load_model

# lmforge's own, with a variable.
THINKING_TEMPLATE = """\
{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""

Scripted = Callable[..., LanguageModel]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A verb that a test ran in this process has taken all cores: the small models here want
    one.
    """
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A token a byte, so that a test spells what comes when."""
    return train_tokenizer([""], 261)


@pytest.fixture(scope="session")
def scripted() -> Scripted:
    """`scripted({token: its successor, …}, vocab_size=261)`: a real model whose likeliest next
    token is that of a table.

    Its embedding is the identity, its blocks add nothing, and its head turns a token into its
    successor. A token that is not in the table is followed by itself.
    """

    def write(successors: dict[int, int], vocab_size: int = 261, blocks: int = 1) -> LanguageModel:
        width = vocab_size + vocab_size % 2
        config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=2,
            num_hidden_layers=blocks,
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
    """`spelling(text)`: a model that goes on after each byte of `text` with the next one, and then
    ends. No byte twice.
    """

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


@pytest.fixture(scope="session")
def models(
    scripted: Scripted, byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of Hugging Face folders that can chat: hello says `Hey <s>` and ends, endless says
    `ab` for ever and noise writes at random. In plain no one has said how to talk to it.
    """
    folder = tmp_path_factory.mktemp("models")
    byte_tokenizer.save(folder / "tokenizer")
    assistant, ends = (byte_tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    assert assistant
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
        "hello": scripted(dict(pairwise([assistant, *hello, ends]))),
        "endless": scripted(dict(pairwise([assistant, *ab, ab[0]]))),
        "noise": init_weights(build_model(noise), 1),
        "plain": init_weights(build_model(noise), 2),
    }
    for name, model in written.items():
        export_folder(model, model.config, folder / name, tokenizer_folder=folder / "tokenizer")
    plain = folder / "plain" / "tokenizer.json"
    plain.write_text(plain.read_text("utf-8").replace("<|assistant|>", "<|other|>"), "utf-8")
    (folder / "noise" / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder
