"""Runs whose experts are split over ranks: cut into legs of other degrees, decoding while they
train, refusals.
"""

import shutil
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from tests.distributed.conftest import (
    HERE,
    Recipe,
    assert_agree,
    losses,
    rounded,
    run_cases,
    weights,
)
from tests.seeds import fresh_seed
from tests.support.preloaded import on_ranks
from tests.support.rounding import OTHER_ROUNDING, assert_rounding_apart, weights_apart

MIXTURE = [
    "--model.preset",
    "nano-moe",
    "--model.num_experts",
    "4",
    "--model.num_experts_per_tok",
    "2",
    "--model.moe_intermediate_size",
    "20",
    "--model.router_aux_loss_coef",
    "0.1",
    "--checkpoint.every_steps",
    "2",
]


def degrees(**given: int) -> list[str]:
    return [
        word
        for name, degree in given.items()
        for word in (f"--parallel.{name}_parallel_degree", str(degree))
    ]


# A run of six steps in legs of two: on so many ranks, split so. A leg begins with a checkpoint of
# the one before it.
LEGS: list[tuple[int, list[str]]] = [
    (4, degrees(expert=4)),
    (2, [*degrees(expert=2, tensor=2), "--checkpoint.async_save", "false"]),
    (
        4,
        [
            *degrees(expert=2),
            "--parallel.sharding",
            "hybrid-full-shard",
            "--parallel.shard_degree",
            "2",
        ],
    ),
]


@pytest.fixture(scope="module")
def whole(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("experts")
    run_cases(1, [recipe(folder, "whole", *MIXTURE)], folder)
    run_cases(1, [recipe(folder, "whole rounded", *MIXTURE)], folder, **OTHER_ROUNDING)
    return Run(folder / "whole")


@pytest.fixture(scope="module")
def runs(whole: Run, recipe: Recipe) -> list[Run]:
    """That run, and runs that have one, two and three legs."""
    folder, runs = whole.path.parent, [whole]
    for number, (ranks, options) in enumerate(LEGS):
        run = Run(folder / f"leg-{number}")
        if number:
            shutil.copytree(
                runs[-1].path, run.path, ignore=shutil.ignore_patterns(".lock", "metrics.jsonl")
            )
            for step in range(2 * number + 1, 7):
                shutil.rmtree(run.checkpoint_path(step), ignore_errors=True)
        decoding = ["--sample.every_steps", "3"] if "tensor" not in " ".join(options) else []
        run_cases(ranks, [recipe(folder, run.path.name, *MIXTURE, *options, *decoding)], folder)
        runs.append(run)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LEGS)))
def test_a_run_in_legs_with_other_expert_parallel_degrees_is_the_run_of_one_process(
    runs: list[Run], number: int
) -> None:
    whole, leg = runs[0], runs[number + 1]
    assert [*losses(leg)] == [*range(2 * number + 1, 7)]
    assert losses(leg) == pytest.approx(
        {step: losses(whole)[step] for step in losses(leg)}, rel=2e-6
    )
    assert losses(whole)[6] < losses(whole)[1] - 0.01
    assert_rounding_apart(
        *(weights_apart(weights(run), weights(whole)) for run in (leg, rounded(whole)))
    )


@pytest.mark.slow
@pytest.mark.needs("a C++ compiler")
@pytest.mark.parametrize(
    "split", [{"expert": 2}, {"expert": 2, "context": 2}], ids=["experts", "context"]
)
def test_compiled_blocks_that_are_recomputed_while_samples_are_decoded_are_the_run_of_one_process(
    split: dict[str, int], whole: Run, recipe: Recipe, tmp_path: Path
) -> None:
    options = [
        *degrees(**split),
        "--train.compile",
        "on",
        "--parallel.activation_checkpointing",
        "selective-ops",
    ]
    run_cases(
        2, [recipe(tmp_path, "compiled", *MIXTURE, *options, "--sample.every_steps", "2")], tmp_path
    )
    assert_agree(Run(tmp_path / "compiled"), whole)


@pytest.mark.slow
def test_a_run_does_not_meet_the_groups_of_one_before_it_in_the_same_processes(
    whole: Run, recipe: Recipe, tmp_path: Path
) -> None:
    hybrid = ["--parallel.sharding", "hybrid-full-shard", "--parallel.shard_degree", "2"]
    cases = {
        "hybrid": [*degrees(expert=2), *hybrid],
        "context": degrees(expert=2, context=2),
        "all": degrees(expert=4),
    }
    words = [
        recipe(tmp_path, name, *MIXTURE, *more, "--sample.every_steps", "3")
        for name, more in cases.items()
    ]
    run_cases(4, words, tmp_path)
    for name in cases:
        assert_agree(Run(tmp_path / name), whole)


def test_tokens_go_to_the_ranks_of_their_experts_and_back_even_if_some_ranks_get_none(
    tmp_path: Path,
) -> None:
    on_ranks(4, HERE / "dispatch_on_ranks.py", tmp_path, fresh_seed())


@pytest.mark.slow
def test_routers_choose_by_their_master_weights_and_learn_as_in_fp32_under_fsdp2_in_bf16_for_one_more_collective_each_way(
    tmp_path: Path,
) -> None:
    on_ranks(2, HERE / "router_ranks.py", tmp_path, fresh_seed())
