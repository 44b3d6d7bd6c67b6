"""What the formula of activations predicts is what a forward pass leaves in memory."""

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lmforge.cluster import ranks as cluster
from lmforge.cluster.environment import Place
from lmforge.cluster.ranks import Ranks
from lmforge.model import build
from lmforge.model.activations import block_bytes, saved_bytes
from lmforge.model.foreign_config import ForeignConfig
from lmforge.model.initial import initialise
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.train.memory import Activations
from lmforge.train.parity import SMALL, Task
from tests.model.conftest import draw, drawn_config  # noqa: F401 - a fixture

RANKS = Ranks(Place(), torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    yield
    cluster.stop()


def sharded(shape: ModelConfig, dtype: torch.dtype, recompute: str) -> Spread:
    """A model under fsdp2 on this one rank: as under it on many, weights are in the compute dtype in the forward pass."""
    return spread(
        build(shape, seed=None, device="meta"),
        NextToken().loss,
        ranks=RANKS,
        dtype=dtype,
        strategy=Strategy(engine="fsdp2", recompute=recompute, recompute_every=2),
        fill=partial(initialise, seed=0),
    )


def measured(trained: Spread, rows: int, length: int) -> int:
    batch = Task(rows=rows, length=length).batch(0, trained.model.config.vocab_size)
    trained.scored(batch)[0].backward()  # what is gathered has its memory from here on
    watching = Activations()
    with watching:
        total, _ = trained.scored(batch)
    assert total.requires_grad
    return watching.bytes_alive()


@pytest.mark.parametrize("recompute", ["none", "full", "blocks", "operators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_activations_are_those_of_the_formula(
    model_type: str,
    dtype: torch.dtype,
    recompute: str,
    draw: random.Random,  # noqa: F811
) -> None:
    shape = drawn_config(model_type, draw, num_hidden_layers=3, max_position_embeddings=600)
    print(shape)
    trained = sharded(shape, dtype, recompute)
    dropout = draw.random() < 0.5
    trained.model.dropout = 0.1 if dropout else 0.0
    print(f"dropout {dropout}")
    for rows, length in ((4, 64), (1, 530)):
        predicted = saved_bytes(shape, rows, length, number_bytes=dtype.itemsize, recompute=recompute, dropout=dropout)
        assert predicted == pytest.approx(measured(trained, rows, length), rel=0.02), (rows, length)


def test_what_is_recomputed_is_not_held() -> None:
    held = {how: measured(sharded(SMALL, torch.float32, how), 4, 64) for how in ("none", "blocks", "operators", "full")}
    assert held["none"] > held["blocks"] > held["operators"] > held["full"]
    assert held["none"] - held["full"] > 3 * block_bytes(SMALL, 4, 64, number_bytes=4)


def test_nothing_is_alive_once_the_backward_pass_has_used_it() -> None:
    trained = sharded(SMALL, torch.float32, "none")
    batch = Task(rows=4).batch(0, SMALL.vocab_size)
    trained.scored(batch)[0].backward()  # gradients exist from here on
    watching = Activations()
    with watching:
        total, metrics = trained.scored(batch)
        assert watching.bytes_alive() > 1e6
    total.backward()
    del total, metrics
    assert watching.bytes_alive() < 1000


def test_a_wrapped_model_has_no_formula() -> None:
    wrapped = ForeignConfig(100, 32, 2, 4, model_type="gpt_neox")
    with pytest.raises(ValueError, match="no formula for the activations of gpt_neox"):
        saved_bytes(wrapped, 1, 64, number_bytes=4)
