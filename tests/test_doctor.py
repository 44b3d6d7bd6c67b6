"""`lmforge doctor`: what a machine has, a line each; with `--parity` a table of every strategy beside one process. Its status
says whether the machine is usable, and whether the strategies agree."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lmforge.bench import doctor
from lmforge.cli import run
from lmforge.parallel.fsdp2 import FSDP2Model
from tests.conftest import Command, Refusal


def test_two_ranks_agree_with_one_process_under_every_strategy(lmforge: Command) -> None:
    done = lmforge("doctor", "--parity", "--processes", 2, "--steps", 2, "--output", "json", "--device", "cpu")
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


Findings = dict[str, dict[str, Any]]


def examined(capfd: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Findings:
    capfd.readouterr()
    assert run(["doctor", "--output", "json", *words]) == status
    return {finding["name"]: finding for finding in json.loads(capfd.readouterr().out)}


def test_this_machine_is_examined(capfd: pytest.CaptureFixture[str]) -> None:
    findings = examined(capfd, "--device", "cpu")
    assert set(findings) >= {"python", "packages", "torch", "cpu", "compiler", "memory", "disk", "extras", "tools"}
    assert not [finding for finding in findings.values() if finding["status"] == "broken"]
    assert run(["doctor", "--device", "cpu"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "lmforge can train here"
    assert [line.split()[1] for line in lines[:-1]] == list(findings)


@pytest.mark.needs("a C++ compiler")
def test_a_compiler_that_works_is_told_from_one_that_does_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert examined(capfd)["compiler"]["status"] == "ok"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no room' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = examined(capfd)["compiler"]
    assert finding["status"] == "warning"
    assert "does not work (fatal error: no room)" in finding["description"]
    broken.unlink()
    assert "no C++ compiler" in examined(capfd)["compiler"]["description"]


def test_a_package_that_is_missing_or_too_old_is_broken_and_another_than_the_tested_is_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("Tomli_W==0.1\n# torch==1\n")
    monkeypatch.setattr(doctor, "CONSTRAINTS", pinned)
    finding = examined(capfd)["packages"]
    assert (finding["status"], finding["description"].partition("; ")[2]) == (
        "ok",
        f"not those of constraints.txt: tomli-w {importlib.metadata.version('tomli-w')} (0.1)",
    )
    needs = ["torch>=99", "no-such-package>=1", "numpy>=1", 'absent; extra == "serve"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    finding = examined(capfd, status=1)["packages"]
    version = importlib.metadata.version("torch").partition("+")[0]
    assert (finding["status"], finding["description"]) == ("broken", f"torch {version} is not >=99, no-such-package is missing")


def test_a_torch_that_cannot_be_imported_is_broken(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = examined(capfd, status=1)["torch"]
    assert finding["status"] == "broken"
    assert "cannot be imported" in finding["description"]


def test_a_gpu_that_is_requested_and_absent_is_broken(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert examined(capfd, "--device", "cuda", status=1)["gpu"]["status"] == "broken"


def test_a_folder_that_cannot_be_written_is_a_warning(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    finding = examined(capfd)["disk"]
    assert finding["status"] == "warning"
    assert "cannot be written" in finding["description"]


def test_options_of_the_comparison_are_refused_without_it(refused: Refusal) -> None:
    assert refused("doctor", "--processes", 2) == "--processes: applies to --parity only; add --parity, or leave it out"
