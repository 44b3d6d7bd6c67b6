"""Every strategy computes the same as one process, and needs only the promised part of the memory.

`make test` runs a sample (shapes.SAMPLE); the whole matrix is marked slow.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from lmforge.lab.bench.bounds import FP32
from lmforge.lab.bench.parity import expert_parallel_cases, strategy_cases
from lmforge.lab.plan.prediction.step_config import StepConfig
from tests.distributed.conftest import SampledTrials, assert_is_one_process, sampled
from tests.distributed.shapes import (
    SAMPLE,
    SHAPES,
    chosen_cases,
    select_cases,
    settings_of,
    shapes_on,
)
from tests.lab.plan.step_program import predicted_activation_bytes, step_program


def all_cases() -> Iterator[tuple[int, str]]:
    for world_size in (1, 2, 3, 4, 6, 8):
        for shape in shapes_on(world_size):
            for case in chosen_cases(shape, world_size):
                yield world_size, f"{shape} {case.name}"


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> SampledTrials:
    return SampledTrials(tmp_path_factory.mktemp("strategies"), "plain")


@pytest.mark.parametrize(("world_size", "name"), sampled("plain", all_cases()))
def test_losses_gradient_norms_and_weights_are_those_of_one_process(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    result = trials.read(world_size, name)
    # It has learned, on the same batch, a hundred times more than what is compared may differ by.
    assert result["losses"][-1] < result["untrained"][-1] * (1 - 100 * FP32.loss)
    assert_is_one_process(result)


def on_two_and_four(cases: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(world size, name, value): each case on four ranks, and on two where they suffice and nothing
    else changes.
    """
    two = [
        name
        for name in cases
        if "groups of 2" not in name and not name.startswith(("context 4", "tensor", "pipeline"))
    ]
    return [(2, name, cases[name]) for name in two] + [(4, *item) for item in cases.items()]


# Over how many ranks each tensor is sharded; 4 stands for all of them.
SHARDS = {
    "ddp, checkpointing full, 2 micro-batches": 1,
    "fsdp1 full-shard": 4,
    "fsdp1 grad-shard": 4,
    "fsdp1 hybrid-full-shard, groups of 2": 2,
    "fsdp2 full-shard": 4,
    "fsdp2 grad-shard": 4,
    "fsdp2 no-shard": 1,
    "fsdp2 hybrid-full-shard, groups of 2": 2,
    "fsdp2 hybrid-grad-shard, groups of 2": 2,
    "fsdp2, CPU offload": 4,
}


@pytest.mark.parametrize(
    ("world_size", "name", "shards"), sampled("plain", on_two_and_four(SHARDS), shape="llama")
)
def test_each_rank_holds_its_part_of_parameters_gradients_and_optimizer_states(
    trials: SampledTrials, world_size: int, name: str, shards: int
) -> None:
    total = trials.read(1, "llama fsdp2 full-shard", rank=0)
    for rank in range(world_size):
        held = trials.read(world_size, f"llama {name}", rank)
        for key in ("parameters", "gradients", "optimizer"):
            assert held[key] == pytest.approx(total[key] / min(shards, world_size), rel=0.02), (
                rank,
                key,
            )


def test_experts_that_ranks_do_not_divide_are_sharded_over_all_of_them(
    trials: SampledTrials,
) -> None:
    """Five experts on two ranks, by the rows of each."""
    total = trials.read(2, "mixture fsdp1 full-shard", 0)["parameters"]
    for rank in range(2):
        assert trials.read(2, "mixture fsdp2, checkpointing full", rank)[
            "parameters"
        ] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize(
    ("world_size", "name"),
    sampled(
        "plain",
        [
            (size, case.name)
            for size in (2, 4)
            for case in strategy_cases(size, False)
            if case.options.model_parallel_size == 1 or case.name == "tensor 2"
            if not case.options.activation_offload  # on a CPU the host's copies are counted too
        ],
        shape="llama",
    ),
)
def test_each_rank_holds_the_activations_of_its_own_sequences_whatever_is_sharded(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    [case] = [case for case in strategy_cases(world_size, False) if case.name == name]
    size = 4 * case.options.model_parallel_size // case.accumulation
    kind = {"dtype": "fp32", "compiled": False, "on_gpu": False}
    step_config = StepConfig(
        SHAPES["llama"], case.options, world_size, world_size, size, case.accumulation, 48, **kind
    )
    predicted = predicted_activation_bytes(step_config)
    for rank in range(world_size):
        held = trials.read(world_size, f"llama {name}", rank)
        assert held["activations"] == pytest.approx(predicted, rel=0.02), rank


@pytest.mark.parametrize(
    ("world_size", "name"),
    sampled(
        "plain",
        [(2, "fsdp1 full-shard"), (2, "fsdp2, checkpointing full"), (2, "tensor 2"), (4, "ddp")],
        shape="mixture",
    ),
)
def test_each_rank_holds_the_activations_of_a_mixture_for_its_own_tokens(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    [case] = [case for case in strategy_cases(world_size, False) if case.name == name]
    size = 4 * case.options.model_parallel_size // case.accumulation
    kind = {"dtype": "fp32", "compiled": False, "on_gpu": False}
    step_config = StepConfig(
        SHAPES["mixture"], case.options, world_size, world_size, size, case.accumulation, 48, **kind
    )
    for rank in range(world_size):
        held = trials.read(world_size, f"mixture {name}", rank)
        assert held["activations"] == pytest.approx(
            predicted_activation_bytes(step_config), rel=0.02
        ), rank


@pytest.mark.parametrize(
    ("world_size", "name"),
    sampled(
        "plain",
        [(2, "experts 2, checkpointing full, 2 micro-batches"), (2, "experts 2 × tensor 2")],
        shape="experts",
    ),
)
def test_each_rank_of_expert_parallelism_holds_what_is_planned(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    [case] = [case for case in expert_parallel_cases(world_size) if case.name == name]
    size = 4 * case.options.model_parallel_size // case.accumulation
    kind = {"dtype": "fp32", "compiled": False, "on_gpu": False}
    step_config = StepConfig(
        SHAPES["experts"], case.options, world_size, world_size, size, case.accumulation, 48, **kind
    )
    planned = step_program(step_config).held()
    for rank in range(world_size):
        held = trials.read(world_size, f"experts {name}", rank)
        assert held["parameters"] == pytest.approx(planned["weights"], rel=0.02), rank
        assert held["optimizer"] == pytest.approx(planned["optimizer states"], rel=0.02), rank
        # Where it makes no difference which expert is busy.
        if case.options.activation_checkpointing == "full":
            assert held["activations"] == pytest.approx(
                predicted_activation_bytes(step_config), rel=0.02
            ), rank


# A model of 4 blocks has 7 units: blocks, embedding, head and root. One all-reduce counts the items
# of the batch, and one sums the gradient's norm where it is sharded. The root and the head stay
# gathered for the backward pass.
GATHERED_TWICE, GATHERED_ONCE = 7 + 5, 7
# All-gathers, reduce-scatters and all-reduces of a step.
COLLECTIVES = {
    "ddp": (0, 0, 1 + 1),
    "ddp, checkpointing full, 2 micro-batches": (0, 0, 1 + 1),
    "fsdp1 full-shard": (7 + 6, 7, 2),
    "fsdp1 grad-shard": (GATHERED_ONCE, 7, 2),
    "fsdp1 hybrid-full-shard, groups of 2": (7 + 6, 7, 2 + 7),
    "fsdp2 full-shard": (GATHERED_TWICE, 7, 2),
    "fsdp2 grad-shard": (GATHERED_ONCE, 7, 2),
    "fsdp2 no-shard": (0, 0, 1 + 7),
    "fsdp2 hybrid-full-shard, groups of 2": (GATHERED_TWICE, 7, 2 + 7),
    "fsdp2 hybrid-grad-shard, groups of 2": (GATHERED_ONCE, 7, 2 + 7),
    "fsdp2, checkpointing full": (GATHERED_TWICE, 7, 2),
    "fsdp2, checkpointing selective-ops": (GATHERED_TWICE, 7, 2),
    "fsdp2, CPU offload": (GATHERED_TWICE, 7, 2),
    "fsdp2, 2 micro-batches": (2 * GATHERED_TWICE, 2 * 7, 2),
    "fsdp2, 2 micro-batches reduced once": (2 * GATHERED_TWICE, 7, 2),
    # What stays gathered for the backward pass stays so for all micro-batches of a step.
    "fsdp2 grad-shard, 2 micro-batches": (GATHERED_ONCE, 2 * 7, 2),
    "fsdp2, prefetch 2, embedding not wrapped": (6 + 4, 6, 2),
    # The all-reduce over copies of the model waits for the last micro-batch.
    "fsdp2 hybrid-full-shard, groups of 2, 2 micro-batches": (2 * GATHERED_TWICE, 2 * 7, 2 + 7),
}


@pytest.mark.parametrize(
    ("world_size", "name", "counts"), sampled("plain", on_two_and_four(COLLECTIVES), shape="llama")
)
def test_a_step_takes_these_collectives_and_no_more(
    trials: SampledTrials, world_size: int, name: str, counts: tuple[int, int, int]
) -> None:
    assert collectives(trials, world_size, name) == fsdp(*counts)


def collectives(
    trials: SampledTrials, world_size: int, name: str, of: str = "llama "
) -> dict[str, int]:
    counts = dict(trials.read(world_size, f"{of}{name}")["collectives"])
    # fsdp1 gathers with another kernel.
    gathers = counts.pop("allgather_base", 0) + counts.pop("allgather", 0)
    return {**counts, "allgather_base": gathers}


def fsdp(gathers: int, scatters: int, reduces: int) -> dict[str, int]:
    counts = {"allgather_base": gathers, "reduce_scatter_base": scatters, "allreduce": reduces}
    return {name: count for name, count in counts.items() if count or name == "allgather_base"}


# Within a copy of the model, besides FSDP's. Each of a block's two halves gathers the sequence once
# and scatters it once, forward and backward; what is not split (9 norms, embedding and head of an
# odd vocabulary) sums its gradient.
TENSOR = {"all_gather_into_tensor": 4 * 4, "reduce_scatter_tensor": 4 * 4, "all_reduce": 9 + 2}
# The document ids once, keys and values of each block once, and back.
CONTEXT = {"all_gather_into_tensor": 1 + 4, "reduce_scatter_tensor": 4}
MODEL_PARALLEL_COLLECTIVES = {
    # Each rank scores its own tokens: one more sum.
    "tensor 2": {**fsdp(GATHERED_TWICE, 7, 2 + 1), **TENSOR},
    "context 2": {**fsdp(GATHERED_TWICE, 7, 2), **CONTEXT},
    "context 2, checkpointing selective-ops": {
        **fsdp(GATHERED_TWICE, 7, 2),
        **CONTEXT,
        "all_gather_into_tensor": 1 + 2 * 4,
    },
    "context 4, grad-shard": {**fsdp(GATHERED_ONCE, 7, 2), **CONTEXT},
    # The first stage is embedding and two blocks. Each micro-batch gathers them in its forward
    # pass, and again in its backward pass, unless another micro-batch left them gathered; gradients
    # are summed once.
    "pipeline 2, 4 micro-batches": {**fsdp(15, 3, 2), "send": 4, "recv": 4},
}


@pytest.mark.parametrize(
    ("world_size", "name", "counts"),
    sampled("plain", on_two_and_four(MODEL_PARALLEL_COLLECTIVES), shape="llama"),
)
def test_within_a_copy_of_the_model_a_step_takes_these_collectives_and_no_more(
    trials: SampledTrials, world_size: int, name: str, counts: dict[str, int]
) -> None:
    assert collectives(trials, world_size, name) == counts


def test_the_host_asks_once_for_each_mixture_and_micro_batch_where_tokens_go(
    trials: SampledTrials,
) -> None:
    counts = collectives(trials, 2, "checkpointing full, 2 micro-batches", "experts experts 2, ")
    mixtures = 3 * 2  # three of four layers, two micro-batches
    assert counts["exchange_counts"] == counts["sizes_by_rank"] == mixtures
    # There and back, in forward, recomputation and backward.
    assert counts["all_to_all_single"] == 6 * mixtures


def test_the_sample_has_every_engine_and_model_config() -> None:
    names = [
        case.values[1]
        for case in sampled("plain", all_cases())
        if not [mark for mark in case.marks if mark.name == "slow"]
    ]
    assert all(any(name.startswith(f"{shape} ") for name in names) for shape in SHAPES)
    for part in (
        "ddp",
        "fsdp1",
        "full-shard",
        "grad-shard",
        "no-shard",
        "hybrid",
        "tensor",
        "context",
        "pipeline",
        "offload",
    ):
        assert any(part in name for name in names), part


def test_the_sample_has_every_setting_of_the_cases_that_are_not_compiled() -> None:
    settings = {
        which: {
            setting
            for world_size in (1, 2, 3, 4)
            for cases in select_cases("plain", which, world_size).values()
            for case in cases
            if not case.compile_model
            for setting in settings_of(case)
        }
        for which in ("all", "sample")
    }
    assert len(settings["all"]) > 20
    assert settings["all"] == settings["sample"]
    named = {
        (size, shape, name)
        for size, shapes in SAMPLE.items()
        for shape, names in shapes.items()
        for name in names
    }
    chosen = {
        (size, shape, case.name)
        for size in SAMPLE
        for shape, cases in select_cases("plain", "sample", size).items()
        for case in cases
    }
    assert named == chosen, "a name in the sample that no case has"


def test_other_model_configs_have_other_losses(trials: SampledTrials) -> None:
    assert (
        trials.read(2, "tied ddp")["losses"] != trials.read(2, "qwen3 fsdp1 full-shard")["losses"]
    )
