"""The disk of the checkpoints: a shortage is reported once, and so is its end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lmforge.cli import run as command
from lmforge.ops.monitor.usage import disk as disk_module
from lmforge.ops.monitor.usage.disk import DiskMonitor


def test_a_disk_without_room_for_the_next_checkpoint_is_reported_once_and_so_is_its_end(
    tmp_path: Path,
) -> None:
    needed = [0]
    disk = DiskMonitor(tmp_path, lambda: needed[0])
    assert disk.check() == []
    needed[0] = 2**62
    [line] = disk.check()
    assert "iB free, and the next checkpoint needs 4,294,967,296.00 GiB:" in line
    assert disk.check() == []
    needed[0] = 1
    [line] = disk.check()
    assert "enough for the next checkpoint" in line
    assert disk.check() == []


def test_a_run_warns_before_its_first_checkpoint(
    tiny_options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # To the monitor alone: set-up, which looks before it, refuses a disk without room.
    nothing_free = SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=0, f_favail=0)
    monkeypatch.setattr(disk_module, "os", SimpleNamespace(statvfs=lambda folder: nothing_free))
    assert (
        command(
            [
                "pretrain",
                *tiny_options,
                "--run.folder",
                str(tmp_path),
                "--run.name",
                "a",
                "--train.steps",
                "2",
            ]
        )
        == 0
    )
    assert capfd.readouterr().err.count("0 MiB free, and the next checkpoint needs") == 1
