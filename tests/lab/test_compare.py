"""`lmforge compare`: where runs begin to differ by more than rounding, by which bound, and what
differs in them.
"""

import json
import re
import shutil
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from lmforge.hf.stored_model import StoredModel
from lmforge.lab.bench.bounds import (
    BOUND_STEPS,
    BOUNDS,
    EQUAL_BITS,
    FP32,
    GPU,
    WEIGHTS_OF_SMALL_EPSILON,
)
from tests.conftest import Command, Refusal

# By name: the number of ranks, and options besides those of `tiny_run`; further lines resume the
# run.
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
    "biased": [(1, "--model.attention_bias true")],
    "biased-parts": [(1, "--model.attention_bias true --train.micro_batch_size 1")],
}
Runs = dict[str, Path]


@pytest.fixture(scope="module")
def runs(
    tiny_run: Path,
    tiny_options: list[str],
    lmforge: Command,
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    folder = tmp_path_factory.mktemp("compared")
    for name, lines in RUNS.items():
        for ranks, words in lines:
            done = lmforge(
                "pretrain",
                *tiny_options,
                "--run.folder",
                folder,
                "--run.name",
                name,
                *words.split(),
                ranks=ranks,
            )
            assert done.returncode == 0, done.stderr
    return {"one": tiny_run} | {name: folder / name for name in RUNS}


@pytest.fixture
def compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> Any:
    """`compared("one", "two", "--weights")`: the exit status, and what JSON says of the last
    run.
    """

    def compare(*words: str) -> tuple[int, dict[str, Any]]:
        status = command(
            ["compare", *(str(runs.get(word, word)) for word in words), "--output", "json"]
        )
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
    assert re.search(
        r"/again agrees with \S+/tiny bit for bit: loss at 6 steps, ", result["verdict"]
    )


@pytest.mark.parametrize(
    ("name", "differing"),
    [("two", {"ranks": [[1], [2]]}), ("parts", {"train.micro_batch_size": [None, 1]})],
)
def test_another_split_of_the_batches_agrees_to_rounding(
    compared: Any, name: str, differing: dict[str, Any]
) -> None:
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


def test_another_learning_rate_shows_at_the_step_after_the_first_update_and_no_bound_applies(
    compared: Any,
) -> None:
    status, result = compared("one", "lr")
    assert (status, result["bound"]) == (1, None)
    assert result["differs"] == {"optimizer.lr": [0.01, 0.0101]}
    assert result["compared"]["loss"]["first"]["step"] == 2
    assert re.search(
        r"/lr differs from .*/tiny from step 2 on: loss \S+ instead of \S+, by \d.*; no bound"
        r" applies, as they do not compute"
        r" the same \(optimizer.lr 0.01 and 0.0101\)$",
        result["verdict"],
    )


def test_another_seed_is_another_plan_of_the_data(compared: Any) -> None:
    status, result = compared("one", "seed")
    assert (status, result["bound"]) == (1, None)
    assert result["differs"].keys() == {"train.seed", "data plan at step 2"}
    assert result["compared"]["loss"]["first"]["step"] == 1


def test_means_over_other_log_steps_are_not_compared_and_all_that_is_of_one_step_is(
    compared: Any,
) -> None:
    status, result = compared("one", "rare")
    assert (status, result["bound"]["setup"]) == (0, EQUAL_BITS.setup)
    assert {name: each["steps"] for name, each in result["compared"].items()} == {
        "val/loss": 2,
        "grad_norm": 3,
    }


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
    verdicts = [
        line for line in done.stdout.splitlines() if " agrees " in line or " differs " in line
    ]
    assert [line.split()[0] for line in verdicts] == [str(runs["two"]), str(wrong)]
    assert re.search(
        r"wrong differs from \S+ from step 4 on: grad_norm .* by [23].\de-06, and 1e-06 is the"
        r" bound: ",
        verdicts[1],
    )
    assert "  ranks: [1] and [2]\n" in done.stdout
    assert re.search(
        r"^  loss: 6 steps compared, largest difference \d\.\de-0\d \(bound 1e-06\) at step \d$",
        done.stdout,
        re.M,
    )


def test_a_bit_is_a_difference_where_nothing_differs(
    runs: Runs, tmp_path: Path, compared: Any
) -> None:
    wrong = tampered(runs["one"], tmp_path / "wrong", 5, "loss", 1 + 2**-50)
    status, result = compared("one", str(wrong))
    assert status == 1
    assert " from step 5 on: loss " in result["verdict"]
    assert "where bits are to be equal: every sum is added in the same order" in result["verdict"]


@pytest.fixture
def add_to_weight(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`add_to_weight(value, name, "two")`: an element of a tensor is larger by `value` in all
    checkpoints of the named runs.
    """
    init, read = StoredModel.__init__, StoredModel.read
    folders: dict[int, Path] = {}

    def note(model: StoredModel, folder: Path, *rest: Any) -> None:
        folders[id(model)] = folder
        init(model, folder, *rest)

    def add(value: float, name: str, *names: str) -> None:
        def changed(model: StoredModel, tensor: str) -> torch.Tensor:
            found = read(model, tensor)
            if tensor == name and any(
                folders[id(model)].is_relative_to(runs[each]) for each in names
            ):
                found.view(-1)[1] += value
            return found

        monkeypatch.setattr(StoredModel, "__init__", note)
        monkeypatch.setattr(StoredModel, "read", changed)

    return add


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize(
    ("other", "with_it", "status"),
    [
        ("again", ["again"], 1),
        ("again", ["one"], 1),
        ("again", ["one", "again"], 0),
        ("two", ["two"], 1),
        ("two", ["one", "two"], 1),
    ],
)
def test_a_weight_that_is_not_finite_is_beyond_every_bound_and_equals_only_its_own_bits(
    compared: Any, add_to_weight: Any, value: float, other: str, with_it: list[str], status: int
) -> None:
    add_to_weight(value, "model.norm.weight", *with_it)
    actual, result = compared("one", other, "--weights")
    assert actual == status
    if status:
        assert " from step 2 on: weights model.norm.weight, by inf" in result["verdict"]


QUERY, KEY = (f"model.layers.0.self_attn.{name}_proj.bias" for name in "qk")


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [(QUERY, 0, 0), (QUERY, 0.01, 1), (QUERY, nan, 1), (KEY, 0.01, 0), (KEY, nan, 1)],
)
def test_a_bias_is_compared_relative_to_its_weight_and_one_on_keys_is_only_to_be_finite(
    compared: Any, add_to_weight: Any, name: str, value: float, status: int
) -> None:
    add_to_weight(value, name, "biased-parts")
    actual, result = compared("biased", "biased-parts", "--weights")
    assert (actual, result["bound"]["setup"]) == (status, FP32.setup)
    if status:
        assert f" from step 2 on: weights {name}, by " in result["verdict"]


def on_hardware(run: Path, copy: Path, **fields: Any) -> str:
    """A copy of a run whose starts recorded these fields; None: nothing."""
    shutil.copytree(run, copy)
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["kind"] == "start":
            event.update(fields)
            for name in [name for name in fields if fields[name] is None]:
                del event[name]
    (copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(copy)


def test_another_gpu_or_number_of_threads_is_another_split_and_is_named(
    runs: Runs, tmp_path: Path, compared: Any
) -> None:
    status, result = compared("one", on_hardware(runs["again"], tmp_path / "threads", threads=7))
    assert (status, result["differs"], result["bound"]["setup"]) == (
        0,
        {"threads": [[1], [7]]},
        FP32.setup,
    )
    assert result["reason"].endswith("(threads [1] and [7])")
    gpus = [
        on_hardware(runs["again"], tmp_path / name, device="cuda", gpu=name) for name in ("A", "B")
    ]
    status, result = compared(*gpus)
    assert (status, result["differs"], result["bound"]["setup"]) == (
        0,
        {"gpu": [["A"], ["B"]]},
        GPU.setup,
    )
    assert result["reason"].endswith('(gpu ["A"] and ["B"])')
    before = on_hardware(runs["again"], tmp_path / "before", threads=None)
    status, result = compared("one", before)
    assert (status, result["differs"], result["bound"]["setup"]) == (0, {}, EQUAL_BITS.setup)


def test_what_is_no_run_or_has_nothing_in_common_is_refused_in_one_line(
    runs: Runs, tmp_path: Path, refused: Refusal
) -> None:
    assert "name two runs or more" in refused("compare", runs["one"])
    assert (
        refused("compare", runs["one"], tmp_path)
        == f"{tmp_path}: not a run (it has no recipe.toml)"
    )
    empty = tmp_path / "empty"
    shutil.copytree(runs["one"], empty, ignore=shutil.ignore_patterns("metrics.jsonl", "step-*"))
    assert refused("compare", runs["one"], empty).startswith(
        f"{empty}: no log step in common with {runs['one']}; "
    )
    shutil.copy(runs["one"] / "metrics.jsonl", empty)
    assert (
        refused("compare", runs["one"], empty, "--weights")
        == f"--weights: {runs['one']} and {empty} have no checkpoint of the same step"
    )
    damaged = tmp_path / "damaged"
    shutil.copytree(runs["again"], damaged)
    for file in Run(damaged).checkpoint_path(4).glob("*.distcp"):
        file.write_bytes(b"\0" * file.stat().st_size)
    assert "does not hold what was written" in refused("compare", runs["one"], damaged, "--weights")


def test_the_bounds_that_the_page_gives_are_those_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    for bound in BOUNDS:
        numbers = [
            f"{value:.2g}" if value else "0"
            for value in (bound.loss, bound.gradient_norm, bound.weights)
        ]
        assert [bound.setup, *numbers, bound.reason] in rows
    text = " ".join(page.split())
    assert (
        f"epsilon below 1e-3, as by default, the bound of weights is {WEIGHTS_OF_SMALL_EPSILON:.4f}"
        in text
    )
    assert f"The bounds are of the first {BOUND_STEPS} steps" in text
