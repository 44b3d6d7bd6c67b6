"""Injection of faults: waiting for the moment, damaging checkpoints, filling the disk."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lmforge.core.files.atomic_files import PARTIAL_SUFFIX
from lmforge.core.records.runs import MANIFEST, Run
from tests.chaos.plan import LOSES_OUTPUT, Fault
from tests.chaos.processes import Attempt, Outlet

# A moment that does not come (a phase that is over in microseconds) is not waited for longer.
MOMENT_SECONDS = 4.0
START_SECONDS = 1.5
START_OF_COMMAND_SECONDS = 8.0
# Nothing trained for so long is a hang.
HANG_SECONDS = 60.0


class Tracks:
    """What an attempt at a run leaves on the disk, followed from the attempt's beginning."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._from = run.metrics_path.stat().st_size if run.metrics_path.exists() else 0
        self._began = time.time()

    def trained(self) -> list[int]:
        """Steps that this attempt has logged."""
        if not self.run.metrics_path.exists():
            return []
        with open(self.run.metrics_path, "rb") as file:
            file.seek(self._from)
            lines = file.read().split(b"\n")[:-1]
        return [json.loads(line)["step"] for line in lines if line.strip()]

    def heartbeats(self) -> dict[int, dict[str, Any]]:
        """What the ranks of this attempt say of themselves, by rank."""
        by_rank = {}
        for path in self.run.health_folder.glob("rank-*.json"):
            if path.name.count(".") == 1:
                try:
                    beat = json.loads(path.read_text())
                except (OSError, ValueError):
                    continue  # it is being written, or deleted
                if beat["written"] > self._began:
                    by_rank[beat["rank"]] = beat
        return by_rank

    def under_way(self, ranks: int) -> bool:
        return len(self.heartbeats()) == ranks

    def names(self) -> set[str]:
        """What lies among the checkpoints."""
        try:
            return set(os.listdir(self.run.checkpoints_folder))
        except OSError:
            return set()


class Hung(Exception):
    """An attempt that neither trains nor ends."""


def await_moment(fault: Fault, attempt: Attempt, tracks: Tracks, victim: int) -> bool:
    """Whether the moment of a fault came before the attempt ended.

    Raises Hung where neither comes.
    """
    if fault.moment == "start":
        limit = START_OF_COMMAND_SECONDS if attempt.launched else START_SECONDS
        return _until(lambda: time.monotonic() > attempt.began + fault.delay * limit, attempt, limit)
    if not _until(lambda: len(tracks.trained()) >= fault.steps, attempt, HANG_SECONDS, hangs=True, every=0.003):
        return False
    before = {name for name in tracks.names() if not name.endswith(PARTIAL_SUFFIX)}

    def has_come() -> bool:
        if fault.moment == "phase":
            return tracks.heartbeats().get(victim, {}).get("phase") == fault.phase
        there = tracks.names() - before
        if fault.moment == "renamed":
            return any(name.startswith("step-") and not name.endswith(PARTIAL_SUFFIX) for name in there)
        if fault.moment == "deleting":
            return any(name.endswith(".dropped") for name in there)
        writing = [name for name in there if name.endswith(PARTIAL_SUFFIX)]
        if fault.moment == "sealing":
            return any(MANIFEST in name for each in writing for name in _listed(tracks.run.checkpoints_folder / each))
        return bool(writing)

    if fault.moment != "step" and not _until(has_come, attempt, MOMENT_SECONDS, every=0.0003):
        return not attempt.ended
    time.sleep(fault.delay * {"step": 0.05, "writing": 0.03}.get(fault.moment, 0.003))
    return attempt.look()


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _until(condition: Callable[[], bool], attempt: Attempt, seconds: float, hangs: bool = False, every: float = 0.002) -> bool:
    deadline = time.monotonic() + seconds
    looked = 0.0
    while not condition():
        now = time.monotonic()
        if now > looked + 0.02:
            looked = now
            attempt.look()
            if attempt.ended:
                return False
        if now > deadline:
            if hangs:
                raise Hung(f"nothing was trained in {seconds:.0f} s")
            return False
        time.sleep(every)
    return True


def draw_outlet(fault: Fault, folder: Path, may_mount: bool) -> Outlet | None:
    """The outlet of an attempt whose output is to be lost."""
    if fault.kind not in LOSES_OUTPUT:
        return None
    how = fault.chance.choice(("closed", "reader", "reader", *(("disk", "disk") if may_mount else ())))
    return Outlet(how, fault.chance.choice(((1, 2), (1, 2), (1,), (2,))), folder)


def lose_output(fault: Fault, attempt: Attempt, tracks: Tracks, victim: int) -> None:
    """Nothing takes the output any more: the run goes on, and ends or stops as it would have.

    Raises Hung.
    """
    assert attempt.outlet
    attempt.outlet.lose()
    steps = len(tracks.trained()) + 3
    if not _until(lambda: len(tracks.trained()) >= steps, attempt, HANG_SECONDS, hangs=True):
        return
    if not fault.patient:
        attempt.send(fault.signal, None if attempt.launched else [victim])
    if not attempt.wait(4 * HANG_SECONDS):
        raise Hung(f"it did not end after: {fault.kind}")


def untold_loss(attempt: Attempt, tracks: Tracks) -> str:
    """What the log of the first rank should say of the standard output that was lost, and does not;
    empty where it does.
    """
    assert attempt.outlet
    log = max(tracks.run.path.glob("logs/attempt-*/rank-0.log"), key=lambda path: path.stat().st_mtime)
    reason = {"closed": "closed", "reader": "Broken pipe", "disk": "No space left on device"}[attempt.outlet.how]
    words = f"standard output: {reason}; from now on it is written to this log only"
    return "" if 1 not in attempt.outlet.streams or words in log.read_text() else words


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint folder; `undo` brings back what was there."""

    kind: str
    folder: Path
    what: str
    inode: int
    saved: tuple[Path, bytes]

    def undo(self) -> None:
        path, content = self.saved
        path.write_bytes(content)

    @property
    def there(self) -> bool:
        """Whether it still is: a checkpoint that is saved anew is sound."""
        try:
            return self.folder.stat().st_ino == self.inode
        except FileNotFoundError:
            return False


def damage(kind: str, folder: Path, chance: Random) -> Damage:
    """Spoil one file of a checkpoint, in place."""
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    # A tokenizer is not read on resuming: a bit of it that flips is for those that read it to
    # notice.
    tensors = [path for path in files if path.suffix == ".distcp" or path.name == ".metadata"]
    if "manifest" in kind:
        path = folder / MANIFEST
    else:
        path = chance.choice(tensors if kind in ("flipped bit", "zeroed tail") else files)
    content = path.read_bytes()
    what = path.name
    if kind in ("missing file", "missing manifest"):
        path.unlink()
    elif kind in ("truncated", "torn manifest"):
        size = chance.randrange(len(content))
        path.write_bytes(content[:size])
        what += f" cut to {size} of {len(content)} bytes"
    elif kind == "zeroed tail":
        size = chance.randrange(min(4096, len(content)))
        spoiled = content[:size].ljust(len(content), b"\0")
        path.write_bytes(spoiled if spoiled != content else b"\1" + content[1:])
        what += f" zero after {size} of {len(content)} bytes"
    else:
        at, bit = _flip(content, chance, kind == "flipped manifest")
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        what += f" byte {at} xor {bit}: {content[max(0, at - 20) : at + 20]!r}"
    return Damage(kind, folder, what, folder.stat().st_ino, (path, content))


def _flip(content: bytes, chance: Random, of_json: bool) -> tuple[int, int]:
    """A byte and the bit of it to flip; of JSON one that matters (not that of 1e-05 to 1E-05)."""
    while True:
        at, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        if not of_json:
            return at, bit
        try:
            if json.loads(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]) != json.loads(content):
                return at, bit
        except ValueError:
            return at, bit


class Ballast:
    """A file that takes the room there is on a small disk, but for `left` bytes."""

    def __init__(self, disk: Path, left: int) -> None:
        self._path = disk / "ballast"
        piece = 1 << 22
        with open(self._path, "wb") as file:
            while piece >= 1 << 12:  # the run takes its share meanwhile
                there, at = os.statvfs(disk), os.fstat(file.fileno()).st_size
                room = there.f_bavail * there.f_frsize - left
                try:
                    if room < piece:
                        piece //= 2
                    else:
                        os.posix_fallocate(file.fileno(), at, piece)
                except OSError:
                    piece //= 2

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
