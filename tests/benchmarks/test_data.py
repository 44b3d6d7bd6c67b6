"""benchmarks/data.py runs end to end, its shards can be read, and its loaders return correct
batches.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_a_plan_of_many_shards_and_loaders_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAMS / "data.py", "--tiny", "--rounds", "2", "--steps", "3", "--sequences", "128"]
    command += ["--loader_rounds", "1", "--batches", "2"]
    ended = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("data-*.json"))
    (table,) = (path.read_text() for path in tmp_path.glob("data-*.md"))
    assert record["plan"]["tokens"]["rounds"] == [100 * 100_000] * 2
    assert record["plan"]["state_bytes"]["max"] < 1000
    assert "| start-up (open, first step's indices) |" in table
    # Of these none needs a package of its own; that each gives what it should is checked where it
    # is measured.
    assert list(record["loaders"]) == ["lmforge", "memory map, raw slices", "memory map, by hand"]
    assert all(row["figures"]["samples_a_second"]["median"] > 0 for row in record["loaders"].values()), record["loaders"]
    assert "times the samples per CPU second of memory map, by hand" in table
