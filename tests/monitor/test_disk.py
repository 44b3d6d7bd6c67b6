"""The disk of the checkpoints: a shortage is named once, and again when it is over."""

from pathlib import Path

from lmforge.monitor.usage.disk import DiskMonitor


def test_a_disk_without_room_for_the_next_checkpoint_is_told_of_once_and_again_when_there_is(tmp_path: Path) -> None:
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
