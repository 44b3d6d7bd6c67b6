"""benchmarks/engine.py runs end to end, and reports what it compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_both_write_in_every_round_and_greedy_tokens_are_compared(tmp_path: Path) -> None:
    command = [
        sys.executable,
        PROGRAMS / "engine.py",
        "--tiny",
        "--rounds",
        "2",
        "--rows",
        "3",
        "--new_tokens",
        "5",
    ]
    ended = subprocess.run(
        [*command, "--threads", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("engine-*.json"))
    (table,) = (path.read_text() for path in tmp_path.glob("engine-*.md"))
    tiny = record["shapes"]["tiny"]
    assert tiny["ties"] == 0
    for kind in ("greedy", "sampled"):
        assert f"| {kind} |" in table
        assert len(tiny[kind]["ratio"]["rounds"]) == 2
        assert all(speed["min"] > 0 for speed in tiny[kind]["tokens_per_second"].values())
