"""`lmforge compare`: where runs begin to differ by more than rounding, by which bound, and what differs in them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmforge.bench.bounds import BOUND_STEPS, BOUNDS, EQUAL_BITS, FP32, WEIGHTS_OF_SMALL_EPSILON
from lmforge.cli import run as command
from lmforge.runs import Run
from tests.conftest import Command, Refusal

# By name: the number of ranks, and options besides those of `tiny_run`; further lines resume the run.
RUNS: dict[str, list[tuple[int, str]]] = {
    "again": [(1, "")],
    "two": [(2, "")],
    "parts": [(1, "--train.micro_batch_size 1")],
    "resumed": [(2, "--train.steps 3 --schedule.decay_steps 4"), (1, "--schedule.decay_steps 4")],
    "unbroken": [(1, "--schedule.decay_steps 4")],
    "lr": [(1, "--optimizer.lr 0.0101")],
    "seed": [(1, "--train.seed 5")],
    "rare": [(1, "--log.every_steps 2")],
    "longer": [(1, "--train.steps 8")],
}
Runs = dict[str, Path]


@pytest.fixture(scope="module")
def runs(tiny_run: Path, tiny_options: list[str], lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("compared")
    for name, lines in RUNS.items():
        for ranks, words in lines:
            done = lmforge("pretrain", *tiny_options, "--run.folder", folder, "--run.name", name, *words.split(), ranks=ranks)
            assert done.returncode == 0, done.stderr
    return {"one": tiny_run} | {name: folder / name for name in RUNS}


@pytest.fixture
def compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> Any:
    """`compared("one", "two", "--weights")`: the exit status, and what JSON says of the last run."""

    def compare(*words: str) -> tuple[int, dict[str, Any]]:
        status = command(["compare", *(str(runs.get(word, word)) for word in words), "--output", "json"])
        return status, json.loads(capsys.readouterr().out)[-1]

    return compare


def test_the_same_command_again_has_equal_bits_in_every_metric_and_weight(compared: Any) -> None:
    status, result = compared("one", "again", "--weights")
    assert (status, result["differs"], result["bound"]["reason"]) == (0, {}, EQUAL_BITS.reason)
    assert {name: each["steps"] for name, each in result["compared"].items()} == {
        "loss": 6,
        "val/loss": 2,
        "grad_norm": 6,
        "weights": 3,
    }
    assert all(each["largest"]["difference"] == 0 for each in result["compared"].values())
    assert re.search(r"/again agrees with \S+/tiny bit for bit: loss at 6 steps, ", result["verdict"])


@pytest.mark.parametrize(
    ("name", "differing"), [("two", {"ranks": [[1], [2]]}), ("parts", {"train.micro_batch_size": [None, 1]})]
)
def test_another_split_of_the_batches_agrees_to_rounding(compared: Any, name: str, differing: dict[str, Any]) -> None:
    status, result = compared("one", name, "--weights")
    assert (status, result["differs"]) == (0, differing)
    assert result["bound"]["setup"] == FP32.setup
    largest = {metric: each["largest"]["difference"] for metric, each in result["compared"].items()}
    # Epsilon is small, so the weights have a bound of their own.
    assert 0 < largest.pop("weights") <= result["bound"]["weights"] == WEIGHTS_OF_SMALL_EPSILON
    assert 0 < max(largest.values()) <= FP32.loss
    assert " to rounding: " in result["verdict"]


def test_a_run_resumed_on_other_ranks_agrees_with_one_that_was_not(compared: Any) -> None:
    status, result = compared("unbroken", "resumed", "--weights")
    assert (status, result["differs"]) == (0, {"ranks": [[1], [1, 2]]})
    assert result["bound"]["setup"] == FP32.setup


def test_another_learning_rate_shows_at_the_step_after_the_first_update_and_no_bound_applies(compared: Any) -> None:
    status, result = compared("one", "lr")
    assert (status, result["bound"]) == (1, None)
    assert result["differs"] == {"optimizer.lr": [0.01, 0.0101]}
    assert result["compared"]["loss"]["first"]["step"] == 2
    assert re.search(
        r"/lr differs from .*/tiny from step 2 on: loss \S+ instead of \S+, by \d.*; no bound applies, as they do not compute"
        r" the same \(optimizer.lr 0.01 and 0.0101\)$",
        result["verdict"],
    )


def test_another_seed_is_another_plan_of_the_data(compared: Any) -> None:
    status, result = compared("one", "seed")
    assert (status, result["bound"]) == (1, None)
    assert result["differs"].keys() == {"train.seed", "data plan at step 2"}
    assert result["compared"]["loss"]["first"]["step"] == 1


def test_means_over_other_log_steps_are_not_compared_and_all_that_is_of_one_step_is(compared: Any) -> None:
    status, result = compared("one", "rare")
    assert (status, result["bound"]["setup"]) == (0, EQUAL_BITS.setup)
    assert {name: each["steps"] for name, each in result["compared"].items()} == {"val/loss": 2, "grad_norm": 3}


def test_a_longer_schedule_is_named_where_the_learning_rate_differs(compared: Any) -> None:
    status, result = compared("one", "longer")
    assert (status, result["bound"]) == (1, None)
    assert "(train.steps 6 and 8)" in result["verdict"]


def tampered(run: Path, copy: Path, step: int, metric: str, factor: float) -> Path:
    """A copy of a run in which a metric of a step is another."""
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == step and metric in line:
            line[metric] *= factor
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def test_each_run_is_compared_with_the_first_and_one_that_is_beyond_the_bound_is_named_with_both(
    runs: Runs, tmp_path: Path, lmforge: Command
) -> None:
    wrong = tampered(runs["two"], tmp_path / "wrong", 4, "grad_norm", 1 + 3e-6)
    done = lmforge("compare", runs["one"], runs["two"], wrong)
    assert done.returncode == 1, done.stderr
    verdicts = [line for line in done.stdout.splitlines() if " agrees " in line or " differs " in line]
    assert [line.split()[0] for line in verdicts] == [str(runs["two"]), str(wrong)]
    assert re.search(
        r"wrong differs from \S+ from step 4 on: grad_norm .* by [23].\de-06, and 1e-06 is the bound: ", verdicts[1]
    )
    assert "  ranks: [1] and [2]\n" in done.stdout
    assert re.search(
        r"^  loss: 6 steps compared, largest difference \d\.\de-0\d \(bound 1e-06\) at step \d$", done.stdout, re.M
    )


def test_a_bit_is_a_difference_where_nothing_differs(runs: Runs, tmp_path: Path, compared: Any) -> None:
    wrong = tampered(runs["one"], tmp_path / "wrong", 5, "loss", 1 + 2**-50)
    status, result = compared("one", str(wrong))
    assert status == 1
    assert " from step 5 on: loss " in result["verdict"]
    assert "where bits are to be equal: every sum is added in the same order" in result["verdict"]


def test_what_is_no_run_or_has_nothing_in_common_is_refused_in_one_line(runs: Runs, tmp_path: Path, refused: Refusal) -> None:
    assert "name two runs or more" in refused("compare", runs["one"])
    assert refused("compare", runs["one"], tmp_path) == f"{tmp_path}: not a run (it has no recipe.toml)"
    empty = tmp_path / "empty"
    shutil.copytree(runs["one"], empty, ignore=shutil.ignore_patterns("metrics.jsonl", "step-*"))
    assert refused("compare", runs["one"], empty).startswith(f"{empty}: no log step in common with {runs['one']}; ")
    shutil.copy(runs["one"] / "metrics.jsonl", empty)
    assert refused("compare", runs["one"], empty, "--weights") == (
        f"--weights: {runs['one']} and {empty} have no checkpoint of the same step"
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(runs["again"], damaged)
    for file in Run(damaged).checkpoint_path(4).glob("*.distcp"):
        file.write_bytes(b"\0" * file.stat().st_size)
    assert "does not hold what was written" in refused("compare", runs["one"], damaged, "--weights")


def test_the_bounds_that_the_page_gives_are_those_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")]
    for bound in BOUNDS:
        numbers = [f"{value:.2g}" if value else "0" for value in (bound.loss, bound.gradient_norm, bound.weights)]
        assert [bound.setup, *numbers, bound.reason] in rows
    text = " ".join(page.split())
    assert f"epsilon below 1e-3, as by default, the bound of weights is {WEIGHTS_OF_SMALL_EPSILON:.4f}" in text
    assert f"The bounds are of the first {BOUND_STEPS} steps" in text
