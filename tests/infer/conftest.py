"""Models that write what a test wants, and tokenizers to read it by."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.infer.opening import open_model
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig

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
        model = build(config, seed=0)
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
        ids = [*byte_tokenizer.encode(text), byte_tokenizer.separator_id]
        assert len(set(ids)) == len(ids) == len(text.encode()) + 1
        return scripted(dict(pairwise(ids)))

    return write


@pytest.fixture(scope="session")
def tiny_model_and_tokenizer(tiny_run: Path) -> tuple[LanguageModel, Tokenizer]:
    """The model that `tiny_run` trained: it writes noise, in bytes and all."""
    opened = open_model(tiny_run, torch.device("cpu"), torch.float32)
    return opened.model, opened.tokenizer
