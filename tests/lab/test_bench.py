"""`lmforge bench`: what is printed about a recipe's step, with its prediction; and sweeps, with a
row for refused combinations too.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run
from lmforge.lab.bench import step_timing
from lmforge.lab.bench.trial import TIMED_PHASES
from lmforge.lab.options.bench import sweep_combinations
from tests.conftest import Command, Refusal
from tests.support.calibrations import calibration, write_calibration

SHORT = ["--bench.steps", "3", "--bench.warmup_steps", "1"]


def timed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["bench", *map(str, words), *SHORT, "--bench.output", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_recipe_is_timed_on_its_own_data(
    capsys: pytest.CaptureFixture[str], tiny_options: list[str], tiny_tokens: Path
) -> None:
    [row] = timed(capsys, *tiny_options)
    step = row["step_seconds"]
    assert step["steps"] == 3
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert row["tokens_per_second"] == pytest.approx(4 * 48 / step["median"])
    assert set(row["phase_seconds"]) == set(TIMED_PHASES)
    assert all(seconds > 0 for seconds in row["phase_seconds"].values())
    # The same clock readings.
    assert sum(row["phase_seconds"].values()) == pytest.approx(step["median"], rel=1e-9)
    assert row["communication_seconds"] == 0.0
    assert row["data"] == str(tiny_tokens)
    assert 0 < row["mfu"] < 1
    assert "FLOPs per token" in row["convention"]


@pytest.mark.slow
def test_a_recipe_whose_data_is_not_there_is_timed_on_random_tokens_and_traced(
    capsys: pytest.CaptureFixture[str], tiny_options: list[str], tmp_path: Path
) -> None:
    trace = tmp_path / "traces" / "step.json"
    [row] = timed(
        capsys,
        *tiny_options,
        "--data.folder",
        tmp_path / "absent",
        "--model.preset",
        "nano",
        "--trace",
        trace,
    )
    assert row["data"] == "random tokens"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.slow
def test_a_sweep_has_a_row_for_every_combination_and_says_what_was_refused(
    lmforge: Command, tiny_options: list[str]
) -> None:
    sweep = [
        "--train.micro_batch_size",
        2,
        "--sweep",
        "launch.processes=1,2",
        "train.global_batch_size=4,5",
    ]
    sweep += ["--parallel.sharding", "full-shard"]  # which one process takes with a word
    done = lmforge("bench", *tiny_options, *SHORT, *sweep, "--bench.output", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    lines = [line for line in done.stderr.splitlines() if " of 4  " in line]
    assert len(lines) == 8
    assert re.fullmatch(
        r"1 of 4  .*: [\d,]+ tokens/s, \d+ ms per step, MFU \d+%, [\d.]+ GiB", lines[1]
    )
    assert "5" in lines[3]
    swept = [tuple(row["swept"].values()) for row in rows]
    assert swept == [("1", "4"), ("1", "5"), ("2", "4"), ("2", "5")]
    assert [row.get("engine") for row in rows] == ["single", None, "fsdp2 full-shard", None]
    assert "5" in rows[1]["failed"]
    assert rows[2]["ranks"] == 2
    assert rows[2]["communication_seconds"] > 0


def test_a_sweep_that_is_interrupted_prints_what_is_done(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_options: list[str]
) -> None:
    [row] = timed(capfd, *tiny_options)
    outcomes = iter([row, {"failed": step_timing.OUT_OF_MEMORY}])

    def trial(arguments: list[str], overrides: dict[str, str]) -> dict[str, Any]:
        if (outcome := next(outcomes, None)) is None:
            raise KeyboardInterrupt
        return outcome

    monkeypatch.setattr(step_timing, "_run_trial", trial)
    words = ["bench", *tiny_options, "--sweep", "optimizer.lr=0.1,0.2,0.3,0.4"]
    assert run([*words, "--bench.output", "json"]) == 130
    printed = capfd.readouterr()
    assert [row["swept"]["optimizer.lr"] for row in json.loads(printed.out)] == ["0.1", "0.2"]
    assert "2 of 4  optimizer.lr=0.2: out of memory" in printed.err
    assert printed.err.splitlines()[-1] == "lmforge: interrupted after 2 of 4 combinations"


BROKEN_OPTIMIZER = """
import torch
import lmforge

class Broken(torch.optim.SGD):
    def get_or_init_state(self, parameter, group):
        return {}

    def step(self, closure=None):
        raise RuntimeError("out of luck")

@lmforge.register("optimizer", "broken", states_per_parameter=0)
def build(groups, optimizer, options):
    return Broken(groups, lr=optimizer.lr)
"""


def test_a_combination_that_crashes_is_a_row_and_the_others_are_timed(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(BROKEN_OPTIMIZER)
    words = [*tiny_options, "--bench.steps", 1, "--bench.warmup_steps", 1, "--plugins", plugin]
    done = lmforge(
        "bench", *words, "--sweep", "optimizer.name=broken,adamw", "--bench.output", "json"
    )
    broken, sound = json.loads(done.stdout)
    assert "RuntimeError: out of luck" in broken["failed"]
    assert sound["tokens_per_second"] > 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "lmforge: --sweep: 1 of 2 combinations failed; the first: optimizer.name=broken: unexpected"
    )
    assert done.returncode == 1


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_its_trial(tiny_options: list[str]) -> None:
    words = [*tiny_options, *SHORT, "--sweep", "optimizer.lr=0.1,0.2", "--bench.output", "json"]
    command = [sys.executable, "-m", "lmforge", "bench", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr
    while not process.stderr.readline().startswith("2 of 2"):
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(json.loads(out)) == 1
    assert errors == "lmforge: interrupted after 1 of 2 combinations\n"


def test_combinations_are_of_all_values_in_order() -> None:
    assert sweep_combinations(("train.seed=1,2", "run.name=x")) == [
        {"train.seed": "1", "run.name": "x"},
        {"train.seed": "2", "run.name": "x"},
    ]


@pytest.mark.parametrize("axis", ["a.b", "a.b=", "a.b=1,,2", "recipe="])
def test_a_sweep_that_does_not_read_as_one_is_refused(
    capfd: pytest.CaptureFixture[str], axis: str
) -> None:
    assert run(["bench", "--sweep", axis]) == 2
    assert (
        f"--sweep {axis}: expected section.option=value,value… or recipe=value,value…"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    "axes",
    [
        ["recipe=a.toml", "recipe=b.toml"],
        ["train.global-batch-size=1", "train.global_batch_size=2"],
    ],
)
def test_an_axis_that_is_given_twice_is_refused(refused: Refusal, axes: list[str]) -> None:
    name = axes[1].partition("=")[0]
    said = refused("bench", "--sweep", *axes)
    assert said == f"--sweep {name}: given twice; write all of its values after one {name}="


def result(recipe: str, **changed: object) -> dict[str, Any]:
    """A row of a sweep over recipes, as a trial returns it."""
    row: dict[str, Any] = {
        "swept": {"recipe": recipe},
        "ranks": 2,
        "device": "cpu",
        "dtype": "float32",
        "data": "random tokens",
        "tokens_per_second": 1000.0,
        "step_seconds": {"median": 0.1, "min": 0.1, "max": 0.2},
        "tflops_a_rank": 0.5,
        "mfu": 0.25,
        "memory_gib": 1.0,
        "phase_seconds": dict.fromkeys(TIMED_PHASES, 0.02),
        "communication_seconds": 0.01,
        "predicted": {
            "tokens_per_second": 1100.0,
            "tokens_per_second_interval": [900.0, 1300.0],
            "memory_gib_interval": [0.5, 1.5],
            "source": "constants measured",
        },
    }
    return row | changed


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    columns: int | None = None,
) -> list[str]:
    """What a sweep prints about these rows; in a terminal, if it has a number of columns."""
    capsys.readouterr()
    if columns is not None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
    step_timing._print_results(rows, "text")
    return capsys.readouterr().out.splitlines()


def test_a_table_that_is_written_to_a_file_cuts_no_path_of_a_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = [f"/{'folder/' * 20}{name} [v2].toml" for name in ("one", "two")]
    rows = [
        result(recipes[0]),
        {"swept": {"recipe": recipes[1]}, "failed": step_timing.OUT_OF_MEMORY},
    ]
    lines = printed(monkeypatch, capsys, rows)
    assert [
        recipe for recipe in recipes for line in lines if line.startswith(f"│ {recipe} │")
    ] == recipes


def test_in_a_narrow_terminal_rows_are_lines_of_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [result("a.toml"), {"swept": {"recipe": "b.toml"}, "failed": step_timing.OUT_OF_MEMORY}]
    wide = printed(monkeypatch, capsys, rows, columns=200)
    assert any(line.startswith("│ a.toml") for line in wide)
    lines = printed(monkeypatch, capsys, rows, columns=80)
    assert not [line for line in lines if line.startswith("│")]
    assert "recipe a.toml, tokens/s 1,000, predicted 900–1,300 (1.10), ms per step 100" in " ".join(
        lines
    )
    assert "recipe b.toml, tokens/s out of memory" in lines


def test_what_differs_between_recipes_is_not_said_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [result("a.toml"), result("b.toml", dtype="bfloat16"), result("c.toml")]
    lines = printed(monkeypatch, capsys, rows)
    assert lines[:2] == [
        "recipe=a.toml; recipe=c.toml: 2 × cpu, float32, data: random tokens",
        "recipe=b.toml: 2 × cpu, bfloat16, data: random tokens",
    ]
    assert lines[-1] == "prediction: constants measured"


@pytest.mark.slow
def test_finalists_of_a_search_are_measured_each_beside_its_prediction(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    measured = write_calibration(tmp_path, calibration(ranks=2))
    machine = ["--gpus", 2, "--gpu_type", "cpu", "--calibration", measured]
    words = [
        *tiny_options,
        "--train.dtype",
        "fp32",
        *machine,
        "--search",
        "--write",
        "found.toml",
        "--finalists",
        2,
    ]
    done = lmforge("plan", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = ["found.toml", "found-2.toml"]
    assert done.stderr.splitlines()[:2] == [f"wrote {file}" for file in files]
    program, *printed = shlex.split(done.stderr.splitlines()[2].removeprefix("to measure them: "))
    assert (program, *printed[:3]) == (
        "lmforge",
        "bench",
        "--sweep",
        "recipe=found.toml,found-2.toml",
    )
    done = lmforge(*printed, *SHORT, "--bench.output", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["swept"], row["ranks"]) for row in rows] == [
        ({"recipe": file}, 2) for file in files
    ]
    for file, row in zip(files, rows, strict=True):
        done = lmforge("plan", file, *machine, "--output", "json", cwd=tmp_path)
        planned, predicted = json.loads(done.stdout), row["predicted"]
        assert predicted["tokens_per_second"] == pytest.approx(
            2 * planned["tokens_per_second_per_gpu"], rel=1e-9
        )
        low, high = predicted["tokens_per_second_interval"]
        assert low < predicted["tokens_per_second"] < high
        assert (
            predicted["memory_gib_interval"][0]
            < predicted["memory_gib"]
            < predicted["memory_gib_interval"][1]
        )
        assert predicted["source"].startswith("constants measured (A CPU, 2 ranks")
    first, second = (row["predicted"]["tokens_per_second"] for row in rows)
    assert first >= second  # in the order of the search


def test_a_table_has_a_prediction_and_its_ratio_or_says_why_there_is_none(
    capsys: pytest.CaptureFixture[str], tiny_options: list[str], tmp_path: Path
) -> None:
    file = write_calibration(tmp_path, calibration())
    for words, speed, source in (
        (
            ["--log.calibration", str(file), "--train.dtype", "fp32"],
            r"[\d,]+–[\d,]+ \([\d.]+\)",
            "constants measured (A CPU, 1 rank,",
        ),
        ([], r"\?", "no measurements of this CPU; lmforge bench --calibrate makes them"),
    ):
        capsys.readouterr()
        assert run(["bench", *map(str, tiny_options), *SHORT, *words]) == 0
        text = capsys.readouterr().out
        heads, values = (
            [cell.strip() for cell in re.split("[┃│]", line)]
            for line in text.splitlines()
            if line[0] in "┃│"
        )
        assert heads[1:3] == ["tokens/s", "predicted"]
        assert re.fullmatch(speed, values[2])
        assert re.fullmatch(r"[\d.]+–[\d.]+", values[heads.index("GiB") + 1])
        assert f"prediction: {source}" in text


@pytest.mark.slow
def test_the_profiler_says_nothing_of_its_own(tiny_options: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "lmforge",
        "bench",
        *tiny_options,
        "--bench.steps",
        "1",
        "--bench.warmup_steps",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_sweep_over_recipes_takes_no_other_recipe_and_a_row_says_which_is_missing(
    refused: Refusal, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_run: Path
) -> None:
    recipe = tiny_run / "recipe.toml"
    there_are_two = f"--sweep recipe=…: with {recipe} before it there are two; leave one out"
    assert refused("bench", recipe, "--sweep", f"recipe={recipe}") == there_are_two
    nothing = tmp_path / "nothing.toml"
    assert run(["bench", "--sweep", f"recipe={nothing}"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith(
        f"none of its 1 combinations can be timed; the first: {nothing}: no such recipe"
    )
