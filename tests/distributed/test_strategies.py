"""Every strategy computes what one process computes, and holds the share of memory that it promises."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmforge.bench.parity import ParityCase, strategy_cases
from lmforge.plan.activations import activation_bytes
from tests.distributed.conftest import Trials, with_needs
from tests.distributed.shapes import SHAPES, chosen_cases, shapes_on

# fp32 sums in another order, over 10 steps: of the loss and of the gradient's norm, and of weights to their tensor's largest.
TOLERANCE = 1e-6


def names(ranks: int) -> Iterator[str]:
    for shape in shapes_on(ranks):
        for case in chosen_cases(shape, ranks):
            yield f"{shape} {case.name}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of the trials' results, by the number of ranks."""
    return Trials(tmp_path_factory.mktemp("strategies"))


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


ALL = with_needs((ranks, name) for ranks in (1, 2, 3, 4) for name in names(ranks))


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_losses_gradient_norms_and_weights_are_those_of_one_process(measured: dict[int, Path], ranks: int, name: str) -> None:
    found = result(measured[ranks], name)
    assert found["losses"][-1] < found["losses"][0] - 0.05
    differences = {what: found[what] for what in ("loss", "gradient_norm", "weights")}
    if name.startswith(("gpt2", "split gpt2", "split tied")):
        del differences["weights"]  # a bias on the keys has no gradient but rounding; losses and norms tell the rest
    assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("ddp", 1),
        ("fsdp1 full-shard", 4),
        ("fsdp1 grad-shard", 4),
        ("fsdp1 hybrid-full-shard, groups of 2", 2),
        ("fsdp2 full-shard", 4),
        ("fsdp2 grad-shard", 4),
        ("fsdp2 no-shard", 1),
        ("fsdp2 hybrid-full-shard, groups of 2", 2),
        ("fsdp2 hybrid-grad-shard, groups of 2", 2),
        ("fsdp2, offload", 4),
    ],
)
def test_each_rank_holds_its_share_of_parameters_gradients_and_optimizer_states(
    measured: dict[int, Path], name: str, shards: int
) -> None:
    whole = json.loads((measured[1] / "llama fsdp2 full-shard-0.json").read_text())
    for rank in range(4):
        held = json.loads((measured[4] / f"llama {name}-{rank}.json").read_text())
        for what in ("parameters", "gradients", "optimizer"):
            assert held[what] == pytest.approx(whole[what] / shards, rel=0.02), (rank, what)


@pytest.mark.parametrize(
    "case", [case for case in strategy_cases(4, False) if case.strategy.model_parallel_size == 1], ids=lambda case: case.name
)
def test_each_rank_holds_the_activations_of_its_own_rows_whatever_is_sharded(
    measured: dict[int, Path], case: ParityCase
) -> None:
    shape, recompute = SHAPES["llama"], case.strategy.activation_checkpointing
    predicted = activation_bytes(shape, 4 // case.accumulation, 48, dtype_bytes=4, activation_checkpointing=recompute)
    for rank in range(4):
        held = json.loads((measured[4] / f"llama {case.name}-{rank}.json").read_text())
        assert held["activations"] == pytest.approx(predicted, rel=0.02), rank


# Of a model of 4 blocks: 7 units with embedding, head and root. One all-reduce counts the weight of the batch, and one the
# gradient's norm where it is sharded. The root and the head stay gathered for the backward pass.
GATHERED_TWICE, GATHERED_ONCE = 7 + 5, 7


@pytest.mark.parametrize(
    ("name", "gathers", "scatters", "reduces"),
    [
        ("ddp", 0, 0, 1 + 1),
        ("ddp, recompute full, 2 micro-batches", 0, 0, 1 + 1),
        ("fsdp1 full-shard", 7 + 6, 7, 2),
        ("fsdp1 grad-shard", GATHERED_ONCE, 7, 2),
        ("fsdp1 hybrid-full-shard, groups of 2", 7 + 6, 7, 2 + 7),
        ("fsdp2 full-shard", GATHERED_TWICE, 7, 2),
        ("fsdp2 grad-shard", GATHERED_ONCE, 7, 2),
        ("fsdp2 no-shard", 0, 0, 1 + 7),
        ("fsdp2 hybrid-full-shard, groups of 2", GATHERED_TWICE, 7, 2 + 7),
        ("fsdp2 hybrid-grad-shard, groups of 2", GATHERED_ONCE, 7, 2 + 7),
        ("fsdp2, recompute full", GATHERED_TWICE, 7, 2),
        ("fsdp2, recompute operators", GATHERED_TWICE, 7, 2),
        ("fsdp2, offload", GATHERED_TWICE, 7, 2),
        ("fsdp2, 2 micro-batches", 2 * GATHERED_TWICE, 2 * 7, 2),
        ("fsdp2, 2 micro-batches reduced once", 2 * GATHERED_TWICE, 7, 2),
        ("fsdp2, prefetch 2, no embedding unit", 6 + 4, 6, 2),
        # The all-reduce over copies of the model waits for the last micro-batch.
        ("fsdp2 hybrid-full-shard, groups of 2, 2 micro-batches", 2 * GATHERED_TWICE, 2 * 7, 2 + 7),
    ],
)
def test_a_step_takes_these_collectives_and_no_more(
    measured: dict[int, Path], name: str, gathers: int, scatters: int, reduces: int
) -> None:
    assert collectives(measured[4], name) == fsdp(gathers, scatters, reduces)


def collectives(folder: Path, name: str) -> dict[str, int]:
    counts = dict(result(folder, f"llama {name}")["collectives"])
    # fsdp1 has another kernel for gathering.
    gathers = counts.pop("allgather_base", 0) + counts.pop("allgather", 0)
    return {**counts, "allgather_base": gathers}


def fsdp(gathers: int, scatters: int, reduces: int) -> dict[str, int]:
    counts = {"allgather_base": gathers, "reduce_scatter_base": scatters, "allreduce": reduces}
    return {name: count for name, count in counts.items() if count or name == "allgather_base"}


# Within a copy of the model, besides what FSDP exchanges. Of a block's two halves each gathers the sequence once and deals
# it out once, forward and backward; what is not split (9 norms, embedding and head of an odd vocabulary) sums its gradient.
TENSOR = {"all_gather_into_tensor": 4 * 4, "reduce_scatter_tensor": 4 * 4, "all_reduce": 9 + 2}
# The documents once, keys and values of each block once, and back.
CONTEXT = {"all_gather_into_tensor": 1 + 4, "reduce_scatter_tensor": 4}


@pytest.mark.parametrize(
    ("name", "of_fsdp", "within"),
    [
        # Each rank scores its own tokens: one more sum.
        ("tensor 2", fsdp(GATHERED_TWICE, 7, 2 + 1), TENSOR),
        ("context 2", fsdp(GATHERED_TWICE, 7, 2), CONTEXT),
        ("context 2, recompute operators", fsdp(GATHERED_TWICE, 7, 2), {**CONTEXT, "all_gather_into_tensor": 1 + 2 * 4}),
        ("context 4, grad-shard", fsdp(GATHERED_ONCE, 7, 2), CONTEXT),
        # The first stage is embedding and two blocks. Each micro-batch gathers them on its way forward, and again on its way
        # back, where what another micro-batch left gathered is not gathered anew; gradients are summed once.
        ("pipeline 2, 4 micro-batches", fsdp(15, 3, 2), {"send": 4, "recv": 4}),
    ],
)
def test_within_a_copy_of_the_model_a_step_takes_these_and_no_more(
    measured: dict[int, Path], name: str, of_fsdp: dict[str, int], within: dict[str, int]
) -> None:
    assert collectives(measured[4], name) == {**of_fsdp, **within}


def test_what_is_compared_can_differ(measured: dict[int, Path]) -> None:
    assert result(measured[2], "llama ddp")["losses"] != result(measured[2], "tied ddp")["losses"]
    assert replace(strategy_cases(2, False)[0], accumulation=2) != strategy_cases(2, False)[0]
