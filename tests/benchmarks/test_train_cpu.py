import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmforge.core.parallel.precision import has_native_bf16

PROGRAMS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow  # five contenders, each started in a process of its own


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, PROGRAMS / "train_cpu.py", "--tiny", "--rounds", "2", "--seconds", "0.2", "--threads", "1"]
    ended = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (record,) = (json.loads(path.read_text()) for path in out.glob("train_cpu-*.json"))
    (table,) = (path.read_text() for path in out.glob("train_cpu-*.md"))
    return ended.stdout, record, table


def test_every_contender_is_measured_in_every_round(finished):
    _, record, table = finished
    for of_dtype in record["dtypes"].values():
        assert set(of_dtype["contenders"]) == {"lmforge", "Trainer", "plain loop"}
        assert len(of_dtype["peak_gflops"]["rounds"]) == 2
        for name, row in of_dtype["contenders"].items():
            assert f"| {name} |" in table
            for figure in ("tokens_per_second", "share_of_peak", "lmforge_is_faster_by"):
                assert len(row[figure]["rounds"]) == 2
                assert row[figure]["min"] > 0


def test_contenders_do_the_same_work(finished):
    """Same weights, rows and steps.

    They differ in whether attention and targets cross documents, which is small here.
    """
    contenders = finished[1]["dtypes"]["fp32"]["contenders"]
    losses = [row["loss_of_first_steps"] for row in contenders.values()]
    assert max(losses) - min(losses) < 0.02
    assert losses[0] < 6.238  # ln 512, where training begins


def test_bf16_is_left_out_with_a_reason_where_the_processor_only_emulates_it(finished):
    said, record, table = finished
    fast = has_native_bf16(torch.device("cpu"))
    assert ("bf16" in record["dtypes"]) == fast
    assert ("bf16 is left out" in said and "bf16 is left out" in table) == (not fast)


def test_a_result_tells_machine_versions_and_command_but_not_this_host(finished):
    _, record, table = finished
    machine = record["machine"]
    assert {"processor", "cores", "instructions", "packages", "git_commit", "time"} <= set(machine)
    assert "benchmarks/train_cpu.py --tiny" in machine["command"]
    assert "host" not in machine
    assert "directory" not in machine
    assert machine["processor"] in table
