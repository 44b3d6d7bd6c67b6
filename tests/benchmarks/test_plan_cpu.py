"""benchmarks/plan_cpu.py runs end to end, and has a prediction and a measurement for every
configuration.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_every_configuration_is_predicted_and_measured(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAMS / "plan_cpu.py", "--tiny", "--rounds", "1", "--steps", "1", "--seconds", "0.5"]
    ended = subprocess.run([*command, "--threads", "1", "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("plan_cpu-*.json"))
    (table,) = (path.read_text() for path in tmp_path.glob("plan_cpu-*.md"))
    assert len({row["configuration"] for row in record["rows"]}) == 18
    for row in record["rows"]:
        assert row["configuration"] in table
        assert min(row["predicted_tokens_per_second"], row["tokens_per_second"], row["predicted_live_mib"], row["live_mib"]) > 0
