"""`lmforge doctor --parity`: a table of every strategy beside one process, and a status that says whether they agree."""

import json

import pytest

from lmforge.cli import run
from lmforge.parallel.fsdp2 import FSDP2Model
from tests.conftest import Command


def test_two_ranks_agree_with_one_process_under_every_strategy(lmforge: Command) -> None:
    done = lmforge("doctor", "--parity", "--processes", 2, "--steps", 3, "--output", "json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    engines = {row["options"]["engine"] for row in rows}
    assert engines == {"ddp", "fsdp1", "fsdp2"}
    assert not any(row["wrong"] for row in rows)
    assert all(row["ranks"] == 2 and row["tokens_per_second"] > 0 for row in rows)


def test_a_strategy_that_computes_something_else_is_told_and_the_status_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["doctor", "--parity", "--steps", "3", "--device", "cpu"]) == 0
    assert "strategies agree with one process within 2e-06" in capsys.readouterr().out
    monkeypatch.setattr(FSDP2Model, "gradient_divide_factor", 1.001)
    assert run(["doctor", "--parity", "--steps", "3", "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    assert "WRONG, further than 2e-06 from one process: fsdp2 full-shard, " in told
    assert "one process, 2 micro-batches," not in told.partition("WRONG")[2]


def test_what_to_examine_has_to_be_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 2
    assert capfd.readouterr().err == "lmforge: doctor: say what to examine: --parity\n"
