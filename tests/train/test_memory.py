"""What the formula of activations predicts is what a forward pass leaves in memory."""

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from lmforge.bench.activation_tracker import ActivationTracker
from lmforge.bench.parity import SMALL_MODEL, ParityData
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo
from lmforge.interop.transformers_model import TransformersConfig
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.parallel_model import ParallelModel
from lmforge.parallel.parallelize import ParallelStrategy, parallelize
from lmforge.plan.activations import activation_bytes, block_activation_bytes
from tests.model.conftest import draw, drawn_config  # noqa: F401 - a fixture

RANKS = DistributedContext(RankInfo(), torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    yield
    cluster.destroy_distributed()


def sharded(shape: ModelConfig, dtype: torch.dtype, recompute: str) -> ParallelModel:
    """A model under fsdp2 on this one rank: as under it on many, weights are in the compute dtype in the forward pass."""
    return parallelize(
        build_model(shape, "meta"),
        NextTokenObjective().loss,
        dist_ctx=RANKS,
        dtype=dtype,
        strategy=ParallelStrategy(engine="fsdp2", activation_checkpointing=recompute, activation_checkpointing_every=2),
        init_weights=partial(init_weights, seed=0),
    )


def measured(trained: ParallelModel, rows: int, length: int) -> int:
    batch = ParityData(sequences=rows, sequence_length=length).batch(0, trained.model.config.vocab_size)
    trained.model_with_loss(batch)[0].backward()  # what is gathered has its memory from here on
    watching = ActivationTracker()
    with watching:
        total, _ = trained.model_with_loss(batch)
    assert total.requires_grad
    return watching.live_bytes()


@pytest.mark.parametrize("recompute", ["none", "full", "selective-blocks", "selective-ops"])
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
        predicted = activation_bytes(
            shape, rows, length, dtype_bytes=dtype.itemsize, activation_checkpointing=recompute, has_dropout=dropout
        )
        assert predicted == pytest.approx(measured(trained, rows, length), rel=0.02), (rows, length)


def test_what_is_recomputed_is_not_held() -> None:
    held = {
        how: measured(sharded(SMALL_MODEL, torch.float32, how), 4, 64)
        for how in ("none", "selective-blocks", "selective-ops", "full")
    }
    assert held["none"] > held["selective-blocks"] > held["selective-ops"] > held["full"]
    assert held["none"] - held["full"] > 3 * block_activation_bytes(SMALL_MODEL, 4, 64, dtype_bytes=4)


def test_nothing_is_alive_once_the_backward_pass_has_used_it() -> None:
    trained = sharded(SMALL_MODEL, torch.float32, "none")
    batch = ParityData(sequences=4).batch(0, SMALL_MODEL.vocab_size)
    trained.model_with_loss(batch)[0].backward()  # gradients exist from here on
    watching = ActivationTracker()
    with watching:
        total, metrics = trained.model_with_loss(batch)
        assert watching.live_bytes() > 1e6
    total.backward()
    del total, metrics
    assert watching.live_bytes() < 1000


def test_a_wrapped_model_has_no_formula() -> None:
    wrapped = TransformersConfig(100, 32, 2, 4, model_type="gpt_neox")
    with pytest.raises(ValueError, match="no formula for the activations of gpt_neox"):
        activation_bytes(wrapped, 1, 64, dtype_bytes=4)
