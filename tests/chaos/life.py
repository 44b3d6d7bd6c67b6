"""One run from its first to its last step with faults, compared with an undisturbed run."""

import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from lmforge.core import checkpoint
from lmforge.core.checkpoint import CorruptCheckpoint
from lmforge.core.distributed.processes import STOP_SIGNALS, signal_name
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from lmforge.ops.monitor.heartbeat import FINAL_PHASES
from tests.chaos import plan
from tests.chaos.faults import (
    HANG_SECONDS,
    Ballast,
    Damage,
    Hung,
    Tracks,
    await_moment,
    damage,
    draw_outlet,
    lose_output,
    untold_loss,
)
from tests.chaos.plan import BY_COMMAND, LOSES_OUTPUT, Fault, Topology
from tests.chaos.processes import Attempt, descendants, forked, gone, in_a_child, launched, stop_for
from tests.chaos.undisturbed import EVERY, STALL_SECONDS, STEPS, distance, recipe, undisturbed

ENDING_SECONDS = 30.0
ASKING = ("ask to stop", "kill the launcher", "ask the launcher", *LOSES_OUTPUT)
# What is sent here. A rank that ends by another signal has crashed.
SENT = (signal.SIGKILL, *STOP_SIGNALS)
# A rank that is stopped is told after the limit and some heartbeats; a busy machine is late with
# either.
NAMED_SECONDS = STALL_SECONDS + 15.0


@dataclass
class Figures:
    """What came of it. `findings` are what should not have been, each with what was said."""

    faults: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    lives: int = 0
    compared_bit_for_bit: int = 0
    steps_trained: int = 0
    lost_steps: int = 0
    most_lost_at_once: int = 0
    lost_to_damage_or_full_disk: int = 0
    most_lost_to_damage_or_full_disk: int = 0
    passed_over_and_named: int = 0
    wrong_losses: int = 0
    wrong_weights: int = 0
    unnamed_hangs: int = 0
    hangs: int = 0
    corrupt_loaded: int = 0
    unsound_under_final_names: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: "Figures") -> None:
        for name, value in vars(other).items():
            if name.startswith("most_"):
                setattr(self, name, max(getattr(self, name), value))
            else:
                setattr(self, name, getattr(self, name) + value)


class Life:
    """A run under `folder`, on a disk of its own if `disk` says so.

    `stays` keeps it on one topology from first to last.
    """

    def __init__(self, data: Path, folder: Path, references: Path, seed: int, number: int, disk: Path | None) -> None:
        self._data, self._folder, self._references, self._disk = data, folder, references, disk
        self._seed, self._number = seed, number
        self._chance = Random(f"{seed} {number}")
        self._stays = self._chance.random() < 0.5
        self._topology = plan.topology(self._chance, least=2)
        self._history: list[Topology] = []
        self._position = 0
        self._damaged: list[Damage] = []
        self._telling = ""
        self._attempt: Attempt | None = None
        self.figures = Figures(lives=1)
        folder.mkdir(parents=True, exist_ok=True)
        self.run = Run(folder / "run")
        shutil.rmtree(self.run.path, ignore_errors=True)

    def lead(self, goes_on: Callable[[Figures], bool]) -> Figures:
        """Disturb the run while `goes_on` and it is not at its end; then let it end, and compare."""
        number = 0
        while True:
            if not self._stays and number and self._chance.random() < 0.4:
                self._topology = plan.topology(self._chance)
            fault = plan.fault(self._seed, self._number, number) if goes_on(self.figures) else None
            number += 1
            if self._attempted(fault):
                break
            if number > 400:
                self._find("a run that does not come to its end", "")
                break
        self._compare_weights()
        return self.figures

    def _attempted(self, fault: Fault | None) -> bool:
        """One attempt at the run, with a fault. Whether the run has come to its end."""
        figures, topology = self.figures, self._topology
        if fault and fault.kind in ("rank sleeps", *BY_COMMAND) and topology.ranks == 1:
            topology = Topology(2, "ddp")
        words = recipe(self._data, self.run.path.parent, self.run.path.name, topology)
        tracks, expected = Tracks(self.run), self._newest()
        figures.attempts += 1
        # Where no disk can be mounted that fills, no file may grow.
        limited = ("file limit",) if self._disk else ("file limit", "full disk")
        limit = fault.chance.randrange(60_000, 150_000) if fault and fault.kind in limited else None
        outlet = draw_outlet(fault, self._folder, self._disk is not None) if fault else None
        if fault and fault.kind in BY_COMMAND:
            attempt = launched(words, topology.ranks, self._folder, outlet)
        else:
            attempt = forked(words, topology.ranks, self._folder, limit, outlet)
        self._attempt = attempt
        self._telling = f"life {self._number}, attempt {figures.attempts}: {topology}, {fault and fault.kind}"
        self._telling += f" {outlet.streams} ({outlet.how}) at" if outlet else " at"
        self._telling += f" {fault and fault.moment}, from step {expected}"
        hurt = False
        try:
            hurt = self._hurt(fault, attempt, tracks, topology.ranks) if fault else False
            if not hurt and not attempt.wait(10 * HANG_SECONDS):
                raise Hung("it did not come to its end")
        except Hung as problem:
            self._hung(attempt, str(problem))
        finally:
            attempt.send(signal.SIGKILL)
            attempt.wait(ENDING_SECONDS)
        is_over = self._look_over(fault if hurt else None, attempt, tracks, topology, expected)
        if outlet:
            outlet.close()
        return is_over

    # --- during an attempt
    # -------------------------------------------------------------------------------------------

    def _hurt(self, fault: Fault, attempt: Attempt, tracks: Tracks, ranks: int) -> bool:
        """Do the harm and wait for what comes of it. Whether it was done."""
        victim = fault.chance.randrange(ranks)
        if fault.kind == "file limit" or (fault.kind == "full disk" and self._disk is None):
            if not attempt.wait(4 * HANG_SECONDS):
                raise Hung("under a limit of files it neither trained nor ended")
            self._count(fault)
            return True
        if not await_moment(fault, attempt, tracks, victim):
            return False
        self._count(fault)
        if fault.kind == "rank sleeps":
            return self._sleep(victim, attempt, tracks)
        if fault.kind == "full disk":
            return self._fill(fault, attempt)
        if attempt.outlet:
            lose_output(fault, attempt, tracks, victim)
            return True
        under_way = tracks.under_way(ranks)
        if attempt.launched:
            self._hurt_launched(fault, attempt, tracks, victim)
            return True
        if fault.kind == "ask to stop":
            attempt.send(fault.signal, [victim])
            if not under_way:
                self._as_a_launcher(attempt)
        elif fault.kind == "kill all ranks":
            attempt.send(signal.SIGKILL)
        else:
            attempt.send(signal.SIGKILL, [victim] if fault.kind == "kill a rank" else [0])
            if not (fault.patient and under_way):
                self._as_a_launcher(attempt)
        if not attempt.wait(ENDING_SECONDS):
            raise Hung(f"it did not end after: {fault.kind}")
        return True

    @staticmethod
    def _as_a_launcher(attempt: Attempt) -> None:
        """End all ranks when one has ended, as launchers do."""
        deadline = time.monotonic() + 1.0
        while attempt.look() and not attempt.ended and time.monotonic() < deadline:
            time.sleep(0.005)
        attempt.send(signal.SIGTERM)

    def _hurt_launched(self, fault: Fault, attempt: Attempt, tracks: Tracks, victim: int) -> None:
        ranks = descendants(attempt.pids[-1])
        process = tracks.heartbeats().get(victim, {}).get("process")
        if fault.kind == "kill a launched rank":
            attempt_pid = process if process in ranks else fault.chance.choice(ranks) if ranks else attempt.pids[-1]
            _kill(attempt_pid)
        elif fault.kind == "kill the launcher":
            attempt.send(signal.SIGKILL)
        else:
            attempt.send(fault.signal)
        deadline = time.monotonic() + 2 * ENDING_SECONDS
        while not (attempt.wait(0.01) and all(map(gone, ranks))):
            if time.monotonic() > deadline:
                for pid in ranks:
                    _kill(pid)
                raise Hung(f"launcher or ranks did not end after: {fault.kind}")
            time.sleep(0.02)
        named = f"rank {victim} was killed by SIGKILL" in attempt.said()
        if process in ranks and fault.kind == "kill a launched rank" and attempt.ended[-1] and not named:
            self._find("a killed rank was not named", attempt.said())

    def _sleep(self, victim: int, attempt: Attempt, tracks: Tracks) -> bool:
        """Stop a rank until its peers have named it; the run then goes on, to its end or the next
        fault.
        """
        pid, said = attempt.pids[victim], len(attempt.said())
        named = re.compile(rf"^  ranks? [\d, -]*{victim}\b.* stuck +process {pid} is stopped", re.M)
        ended_before = not attempt.look()
        phases: dict[int, str] = {}

        def is_over() -> bool:
            phases.update((rank, beat["phase"]) for rank, beat in tracks.heartbeats().items())
            return bool(named.search(attempt.said())) or not attempt.look()

        stop_for(pid, is_over, NAMED_SECONDS)
        # Ranks wait for each other before they end: once one is done, the victim has only its own
        # end before it.
        had_ended = ended_before or phases.get(victim) in FINAL_PHASES or "done" in phases.values()
        if not named.search(attempt.said()) and not had_ended:
            self.figures.unnamed_hangs += 1
            self._find(f"rank {victim} (process {pid}) slept and was not named", attempt.said()[said:])
        # And on: what follows is the fault of another attempt.
        steps = len(tracks.trained()) + 2
        deadline = time.monotonic() + HANG_SECONDS
        while attempt.look() and len(tracks.trained()) < steps:
            if time.monotonic() > deadline:
                raise Hung("it did not go on after a rank had slept")
            time.sleep(0.01)
        attempt.send(signal.SIGKILL)
        attempt.wait(ENDING_SECONDS)
        return True

    def _fill(self, fault: Fault, attempt: Attempt) -> bool:
        """Fill the disk; where the fault is `patient` until it has been told, and then make room
        again.
        """
        assert self._disk is not None
        ballast = Ballast(self._disk, int(fault.delay**2 * 900_000))
        try:
            if fault.patient:
                deadline = time.monotonic() + 3.0
                while attempt.look() and time.monotonic() < deadline and "saves failed in a row" not in attempt.said():
                    time.sleep(0.01)
                ballast.drop()
            if not attempt.wait(4 * HANG_SECONDS):
                raise Hung("on a full disk it neither trained nor ended")
        finally:
            ballast.drop()
        return True

    def _hung(self, attempt: Attempt, problem: str) -> None:
        self.figures.hangs += 1
        named = "STALL" in attempt.said()
        self.figures.unnamed_hangs += not named
        self._find(f"hang ({'named' if named else 'not named'}): {problem}", attempt.said())

    # --- after an attempt
    # --------------------------------------------------------------------------------------------

    def _look_over(self, fault: Fault | None, attempt: Attempt, tracks: Tracks, topology: Topology, expected: int) -> bool:
        """Judge what an attempt said and left. Whether the run is at its end."""
        figures, said, trained = self.figures, attempt.said(), tracks.trained()
        figures.steps_trained += len(trained)
        statuses = set(attempt.ended.values())
        if "Traceback" in said:
            self._find("a traceback", said)
        if fault is None and statuses != {0}:
            self._find(f"statuses {attempt.ended} where nothing was done to it", said)
        if trained:
            self._history.append(topology)
            self._check_start(attempt.said() if attempt.outlet else attempt.out(), trained, expected, bool(attempt.outlet))
            self._check_losses()
            self._position = trained[-1]
        self._damaged = [each for each in self._damaged if each.there]
        self._check_final_names()
        newest = self._newest()
        lost = max(0, self._position - newest)
        if any(status < 0 and -status not in SENT for status in statuses):
            self._find(f"a rank crashed: {attempt.ended}", said)
        # Asked when the last step is done there is nothing left to stop.
        if fault and fault.kind in ASKING and trained and trained[-1] < STEPS:
            # A run that was only starting gets the launcher's SIGTERM too; all ranks follow the
            # same signal.
            requested = len(statuses) == 1 and statuses <= {128 + number for number in attempt.sent}
            if fault.kind in ("ask to stop", *LOSES_OUTPUT) and not requested:
                self._find(f"asked by {signal_name(fault.signal)} it ended with {attempt.ended}", said)
            if attempt.outlet and (words := untold_loss(attempt, tracks)):
                self._find(f"nowhere in its log: {words}", said)
            if lost:
                self._find(f"{lost} steps were lost though it was asked to stop", said)
        left_alone = statuses <= {1, -signal.SIGKILL} and 1 in statuses  # a launcher's SIGTERM may end who was about to speak
        if fault and fault.kind == "kill a rank" and trained and left_alone and not re.search(r"^lmforge: ", said, re.M):
            self._find(f"nobody said why it ended with {attempt.ended}", said)
        self._lose(lost, by_disk=fault is not None and fault.kind in ("full disk", "file limit"))
        self._position = min(self._position, newest)
        if fault is None or statuses == {0}:
            return statuses == {0} and newest == STEPS
        self._spoil(fault)
        return False

    def _lose(self, lost: int, by_disk: bool) -> None:
        figures = self.figures
        if by_disk:
            figures.lost_to_damage_or_full_disk += lost
            figures.most_lost_to_damage_or_full_disk = max(figures.most_lost_to_damage_or_full_disk, lost)
            return
        figures.lost_steps += lost
        figures.most_lost_at_once = max(figures.most_lost_at_once, lost)
        # A save is in flight beside at most the steps up to the next one.
        if lost > 2 * EVERY:
            self._find(f"{lost} steps were lost", self._attempt.said() if self._attempt else "")

    def _newest(self) -> int:
        """The step that the run has to go on from: its newest checkpoint that was not damaged here."""
        damaged = {each.folder for each in self._damaged if each.there}
        return max((step for step in self.run.checkpoint_steps() if self.run.checkpoint_path(step) not in damaged), default=0)

    def _check_start(self, out: str, trained: list[int], expected: int, may_be_lost: bool) -> None:
        """It went on from the newest sound checkpoint and said so, and what it passed over, unless
        that may be lost.
        """
        resumed = re.findall(r"^continuing .* from step (\d+)$", out, re.M)
        begun = int(resumed[-1]) if resumed else trained[0] - 1 if may_be_lost else 0
        if begun != expected or trained[0] != begun + 1:
            self._find(f"it went on from step {begun} (first trained {trained[0]}) and not from {expected}", out)
            self.figures.corrupt_loaded += any(self.run.checkpoint_path(begun) == each.folder for each in self._damaged)
        for each in self._damaged:
            if int(each.folder.name.removeprefix("step-")) > begun:
                if re.search(rf"{each.folder.name}: .+; skipped$", out, re.M):
                    self.figures.passed_over_and_named += 1
                elif not may_be_lost:
                    self._find(f"{each.folder.name} ({each.what}) was passed over without a word", out)

    def _check_losses(self) -> None:
        same = len(set(self._history)) == 1
        theirs = undisturbed(self._data, self._references, self._history[0] if same else Topology(1, "single"))
        for record in self.run.read_metrics():
            for name in ("loss", "val/loss"):
                if name in record:
                    mine, right = record[name], theirs[f"{name} {record['step']}"]
                    if mine != right if same else abs(mine - right) > FP32.loss * abs(right):
                        self.figures.wrong_losses += 1
                        self._find(f"{name} of step {record['step']} is {mine!r} and not {right!r}", "")
                        return

    def _check_final_names(self) -> None:
        """What has a checkpoint's name is one, unless it was damaged here."""
        damaged = {each.folder for each in self._damaged}
        for step in self.run.checkpoint_steps():
            folder = self.run.checkpoint_path(step)
            try:
                if folder not in damaged:
                    checkpoint.verify(folder)
            except CorruptCheckpoint as problem:
                self.figures.unsound_under_final_names += 1
                self._find(f"{folder.name}: {problem}", "")

    def _spoil(self, fault: Fault) -> None:
        """Damage the newest checkpoints.

        Where none is left the run must refuse, and the damage is undone.
        """
        for kind in fault.damage:
            damaged = {each.folder for each in self._damaged}
            sound = [step for step in self.run.checkpoint_steps() if self.run.checkpoint_path(step) not in damaged]
            if not sound:
                return
            done = damage(kind, self.run.checkpoint_path(sound[-1]), fault.chance)
            self.figures.faults[f"damage: {kind}"] += 1
            self._damaged.append(done)
            if len(sound) == 1:
                self._refused(done)
                if done.there:
                    done.undo()
                self._damaged.remove(done)
                return
            before, after = sound[-1], sound[-2]
            self._lose(before - after, by_disk=True)
            self._position = min(self._position, after)

    def _refused(self, done: Damage) -> None:
        """With no sound checkpoint a run does not begin again by itself."""
        alone = Topology(1, "single")
        attempt = forked(recipe(self._data, self.run.path.parent, self.run.path.name, alone), 1, self._folder)
        if not attempt.wait(HANG_SECONDS):
            attempt.send(signal.SIGKILL)
            attempt.wait(ENDING_SECONDS)
        said = attempt.said()
        if attempt.ended != {0: 2} or "none of its checkpoints can be used" not in said:
            self._telling = f"life {self._number}: every checkpoint damaged, the last: {done.what}"
            self.figures.corrupt_loaded += 0 in attempt.ended.values()
            self._find(f"ended with {attempt.ended}", said)

    def _compare_weights(self) -> None:
        figures = self.figures
        same = len(set(self._history)) == 1
        topology = self._history[0] if same else Topology(1, "single")
        undisturbed(self._data, self._references, topology)
        figures.compared_bit_for_bit += same
        worst = in_a_child(distance, str(self.run.path), str(self._references / str(topology)))
        if worst > (0.0 if same else FP32.weights):
            figures.wrong_weights += 1
            self._find(f"weights are {worst} from those of {topology}", "")

    def _find(self, what: str, said: str) -> None:
        self.figures.findings.append({"what": what, "where": self._telling, "said": said[-6000:]})
        print(f"FOUND {what} · {self._telling}", flush=True)

    def _count(self, fault: Fault) -> None:
        self.figures.faults[fault.kind] += 1
        self.figures.moments[fault.moment if fault.moment != "phase" else f"phase {fault.phase}"] += 1


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
