"""The benchmarks without a separate test file run end to end with minimal work, and every benchmark
is tested.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
LEAST_WORK = {
    "calculator": "--rounds 1 --steps 1 --staleness 1",
    "checkpoint": "--rounds 1 --minutes 0.01 --every_minutes 0.01 --width 64",
    "distillation": (
        "--rounds 2 --ids 600 --files 20 --teacher_steps 2 --student_steps 2 --tokens 256"
    ),
    "ladder": "--tiny --parameters 1e5 --budget 1 --texts c++",
    "ladder_law": "--rounds 1 --bootstraps 1 --processes 1",
    "loader": "--rounds 1 --steps 1 --threads 1",
    "hybrid_cpu": "--tiny --rounds 1 --seconds 0.1 --threads 1",
    "mixture_cpu": "--tiny --rounds 1 --seconds 0.1 --threads 1 --seeds 1",
    "staleness": "--rounds 1 --steps 3",
    "small_states": "--tiny --rounds 1 --threads 1",
    "lr_transfer": "--rounds 1 --widths 64 128 --rates 0.01 --steps 2",
    "on_policy_distillation": "--rounds 1 --steps 2 --sft_steps 1 --align_steps 1 --prompts 2",
    "prepare": "--rounds 1 --megabytes 1 --workers 1 --beside lmforge",
    "rollout_engines": "--rounds 1 --steps 1 --engines in-process lmforge",
}
TESTED_ELSEWHERE = {"plan"}  # tests/lab/plan/test_plan.py


def test_every_benchmark_is_run_by_a_test() -> None:
    programs = {
        path.stem
        for path in PROGRAMS.glob("*.py")
        if path.read_text().endswith("sys.exit(main())\n")
    }
    with_a_file = {
        path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
    }
    assert programs <= with_a_file | LEAST_WORK.keys() | TESTED_ELSEWHERE


@pytest.mark.slow  # two programs train, or train a tokenizer
@pytest.mark.parametrize("name", LEAST_WORK)
def test_a_benchmark_ends_with_its_result(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        PROGRAMS / f"{name}.py",
        *LEAST_WORK[name].split(),
        "--out",
        str(tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob(f"{name}-*.json"))
    assert record["benchmark"] == name
    (table,) = (path.read_text() for path in tmp_path.glob(f"{name}-*.md"))
    assert table.strip() in ended.stdout
