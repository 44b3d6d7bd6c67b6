"""With dropout a run has the same masks, and so the same losses, under every strategy, recomputed
or resumed.
"""

import json

import pytest
import torch

from lmforge.cli import run as lmforge_here
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from tests.distributed.conftest import (
    RECIPE_STEPS,
    Recipe,
    SampledTrials,
    assert_is_one_process,
    losses,
    run_cases,
    sampled,
    weights,
)
from tests.distributed.shapes import dropout_cases, shapes_on

# fp32 sums in another order; with other masks losses differ from the second digit on.
CASES = [
    (size, f"{shape} {case.name}")
    for size in (1, 2, 3)
    for shape in shapes_on(size)
    for case in dropout_cases(shape, size)
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> SampledTrials:
    return SampledTrials(tmp_path_factory.mktemp("dropout"), "dropout")


@pytest.mark.parametrize(("world_size", "name"), sampled("dropout", CASES))
def test_masks_do_not_depend_on_the_strategy(
    trials: SampledTrials, world_size: int, name: str
) -> None:
    assert_is_one_process(trials.read(world_size, name))


@pytest.fixture(scope="module")
def runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Whole runs with dropout: on one rank, in micro-batches, on two, resumed there; and one
    without.
    """
    folder = tmp_path_factory.mktemp("dropout-runs")
    constant = ["--schedule.name", "constant"]
    drop = ["--model.dropout", "0.2", *constant]
    cut = ["--train.micro_batch_size", "3", "--parallel.activation_checkpointing", "full"]
    single = {"single": drop, "micro-batches": [*drop, *cut], "without": constant}
    run_cases(1, [recipe(folder, name, *more) for name, more in single.items()], folder)
    half = ["--train.steps", str(RECIPE_STEPS // 2)]
    run_cases(
        2,
        [
            recipe(folder, *each)
            for each in (["two", *drop], ["resumed", *drop, *half], ["resumed", *drop])
        ],
        folder,
    )
    return {name: Run(folder / name) for name in (*single, "two", "resumed")}


@pytest.mark.slow
def test_a_run_with_dropout_is_the_same_on_any_ranks_and_in_any_micro_batches(
    runs: dict[str, Run],
) -> None:
    for name in ("micro-batches", "two"):
        for metric in ("loss", "val/loss"):
            assert losses(runs[name], metric) == pytest.approx(
                losses(runs["single"], metric), rel=FP32.loss
            ), name


def test_a_resumed_run_with_dropout_has_the_same_bits(runs: dict[str, Run]) -> None:
    assert max(record["step"] for record in runs["resumed"].read_metrics()) == RECIPE_STEPS
    assert losses(runs["resumed"]) == losses(runs["two"])
    theirs = weights(runs["two"])
    assert all(
        torch.equal(tensor, theirs[name]) for name, tensor in weights(runs["resumed"]).items()
    )


def test_dropout_is_in_training_and_not_in_validation(
    runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    assert losses(runs["single"])[RECIPE_STEPS] != pytest.approx(
        losses(runs["without"])[RECIPE_STEPS], rel=1e-4
    )
    # Evaluation of the checkpoint has no dropout.
    assert (
        lmforge_here(["evaluate", str(runs["single"].path), "--sequences", "5", "--output", "json"])
        == 0
    )
    expected = json.loads(capsys.readouterr().out)["loss"]
    assert losses(runs["single"], "val/loss")[RECIPE_STEPS] == pytest.approx(
        expected, rel=FP32.loss
    )
