"""Trains the rungs of a ladder, and reads what they have reached.

Rungs are ordinary runs in processes of their own, or jobs of `lmforge launch`. Whatever was killed,
it goes on: a finished run is read, one that trains is waited for, any other is resumed.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmforge.core.distributed.processes import STOP_SIGNALS, handle_signals, restore_signals
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import EXIT_PEER_LOST, RunFailed, UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.files.locks import try_lock
from lmforge.core.files.untrusted import cut
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.options.options import to_toml
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.manifests import CorruptCheckpoint, read_manifest
from lmforge.core.records.runs import Run
from lmforge.core.steps.bad_steps import IN_A_ROW
from lmforge.lab.ladder.law import Point
from lmforge.lab.ladder.rungs import Trial, scaled_parameters
from lmforge.ops.jobs.job import read_job
from lmforge.ops.jobs.launchers import job_state
from lmforge.ops.report.run_data import read_events

POLL_SECONDS = 0.2
JOB_SECONDS = 5.0
# A rung whose process was killed is started again so often.
MOST_RESTARTS = 3
# The options that make the points of a fit comparable: what rungs are trained and validated on, and
# how. Steps and shapes differ.
OWN_OPTIONS = ("data", "model", "optimizer", "schedule", "validation", "objective", "train")
FREE_OPTIONS = {"threads", "device", "compile", "stage_to"}


@dataclass(frozen=True)
class Reached:
    """The result of a finished run, for a fit.

    loss, bits_per_byte: on the held-out text, at the end; NaN for a run that diverged.
    curve: (fraction of the run, loss) at its validations. scores: of validation tasks.
    text: its tokens and its held-out text; points of one fit have the same.
    """

    name: str
    parameters: int
    tokens: int
    loss: float
    bits_per_byte: float
    curve: tuple[tuple[float, float], ...]
    text: dict[str, Any]
    scores: dict[str, float]
    steps: int | None = None

    @property
    def point(self) -> Point:
        return Point(self.name, self.parameters, self.tokens, self.loss, self.steps)


def read_reached(path: Path) -> Reached:
    """The result of a run. Raises UserError where it is not a finished run of pretraining."""
    run = Run.open(path)
    if not run.exists():
        raise UserError(f"{path}: no run of lmforge (it has no recipe.toml)")
    config = run.load_config()
    if not isinstance(config, PretrainConfig):
        raise UserError(f"{path}: a run of lmforge {config.of_stage}; a ladder is of pretraining")
    steps = config.train.steps
    records = final_records(run, steps)
    if not records:
        raise UserError(
            f"{path}: not finished, or without a validation loss at its end; lmforge pretrain"
            " continues it"
        )
    try:
        manifest = read_manifest(run.checkpoint_path(steps))
    except CorruptCheckpoint as error:
        raise UserError(f"{run.checkpoint_path(steps)}: {error}") from error
    last = records[-1]
    return Reached(
        name=path.name,
        parameters=scaled_parameters(stored_model_config(manifest)),
        tokens=manifest.step * manifest.global_batch_size * config.data.sequence_length,
        loss=math.nan if last["val/loss"] is None else last["val/loss"],
        bits_per_byte=last.get("val/bits_per_byte") or math.nan,
        curve=tuple(
            (record["step"] / steps, record["val/loss"])
            for record in records
            if record["step"] and record["val/loss"]
        ),
        text=text_of(config, manifest.tokenizer_hash, manifest.data_plan),
        scores={
            name: value
            for name, value in last.items()
            if name.startswith("val/") and name.count("/") > 1 and value is not None
        },
        steps=steps,
    )


def text_of(config: PretrainConfig, tokenizer_hash: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """`Reached.text` of a run with this plan of its data."""
    return {
        "tokenizer": tokenizer_hash,
        "data": [phase["proportions"] for phase in plan.get("phases", ())],
        "data.sequence_length": config.data.sequence_length,
        "validation.sequences": config.validation.sequences,
    }


def read_rung(rung: Trial) -> Reached:
    """The result of a rung; its loss is NaN where it has diverged and so is not finished."""
    run = Run.from_config(rung.config)
    if final_records(run, rung.config.train.steps):
        return read_reached(run.path)
    return Reached(rung.name, rung.parameters, rung.tokens, math.nan, math.nan, (), {}, {})


def check_same_text(reached: Sequence[Reached]) -> None:
    """Raise UserError where the losses of runs do not compare."""
    finished = [each for each in reached if each.text]
    for each in finished[1:]:
        first = finished[0]
        for name, value in each.text.items():
            if value != first.text[name]:
                other = "other data" if name == "data" else f"another {name}"
                raise UserError(
                    f"{each.name}: trained with {other} than {first.name}: no law holds for both"
                )


def final_records(run: Run, steps: int) -> list[dict[str, Any]]:
    """The validations of a run; none where it has not measured its last step, or not saved it."""
    if run.checkpoint_steps()[-1:] != [steps]:
        return []
    records = run.read_metrics()
    if not records or records[-1]["step"] != steps or "val/loss" not in records[-1]:
        return []
    return [record for record in records if "val/loss" in record]


def is_over(run: Run, rung: Trial) -> bool:
    """Return True where a rung is finished, or bad steps have ended it."""
    return bool(final_records(run, rung.config.train.steps)) or has_diverged(run)


def has_diverged(run: Run) -> bool:
    """Return True where bad steps have ended a run: other failures are of its machine."""
    ended = [event for event in read_events(run)[0] if event["kind"] == "end"]
    if not ended:
        return False
    return ended[-1].get("state") == "failed" and IN_A_ROW in str(ended[-1].get("error"))


def check_options(rung: Trial, run: Run) -> None:
    """Raise UserError where a run of this name was trained with other options."""
    if not run.exists():
        return
    recorded = run.load_config().model_dump(mode="json")
    planned = rung.config.model_dump(mode="json")
    for section in OWN_OPTIONS:
        for name, value in planned[section].items():
            if name not in FREE_OPTIONS and recorded.get(section, {}).get(name) != value:
                way = "delete it, or give another --run.name"
                raise UserError(
                    f"{run.path}: begun with another {section}.{name} than this ladder's; {way}"
                )


class RungRunner:
    """Trains rungs, `parallel` at once.

    `tell` is called with a line about each that begins or ends.
    """

    def __init__(self, recipes: Path, parallel: int, tell: Callable[[str], None]) -> None:
        """recipes: folder of NAME.toml and NAME.log of each rung."""
        self._recipes = recipes
        self._parallel = parallel
        self._tell = tell
        self._signals = list[int]()
        self._restarts = Counter[str]()

    def run(self, rungs: Sequence[Trial]) -> int:
        """Train what is not finished.

        Returns 0, or the signal that interrupted it: rungs of its own save and end then too.

        Raises RunFailed where a rung fails, but not for one that diverged, and UserError where one
        is refused.
        """
        for rung in rungs:  # each is refused before one is trained
            check_options(rung, Run.from_config(rung.config))
        waiting = deque(rungs)
        active = dict[str, _Active]()
        slots = list(range(self._parallel))
        previous = handle_signals(STOP_SIGNALS, lambda number, frame: self._signals.append(number))
        try:
            while active or (waiting and not self._signals):
                while waiting and len(active) < self._parallel and not self._signals:
                    rung = waiting.popleft()
                    run = Run.from_config(rung.config)
                    if is_over(run, rung):
                        self._tell_reached(rung)
                        continue
                    active[rung.name] = self._start(rung, run, slots.pop())
                if self._signals:
                    active = {name: each for name, each in active.items() if self._pass_on(each)}
                for name, each in list(active.items()):
                    status = each.poll()
                    if status is None:
                        continue
                    del active[name]
                    slots.append(each.slot)
                    if self._has_ended(each, status):
                        self._tell_reached(each.rung)
                    elif not self._signals:
                        waiting.appendleft(each.rung)
                time.sleep(POLL_SECONDS)
        except BaseException:
            for each in active.values():
                each.stop()
            restore_signals(previous)  # Ctrl-C ends the waiting
            for each in active.values():
                each.wait()
            raise
        finally:
            restore_signals(previous)
        return self._signals[0] if self._signals else 0

    def _tell_reached(self, rung: Trial) -> None:
        loss = read_rung(rung).loss
        result = "diverged" if math.isnan(loss) else f"val/loss {loss:.4f}"
        self._tell(f"{rung.name}: {result}")

    def _pass_on(self, active: "_Active") -> bool:
        """Give a rung the signals that it has not had.

        Returns whether it ends by them, and is waited for.
        """
        if not active.process:
            self._tell(f"{active.rung.name}: goes on without this ladder")
        for number in self._signals[active.signals :]:
            active.stop(number)
            active.signals += 1
        return active.process is not None

    def _start(self, rung: Trial, run: Run, slot: int) -> "_Active":
        recipe = self._recipes / f"{rung.name}.toml"
        launch = rung.config.launch
        if run.path.exists():
            lock = try_lock(run.path / ".lock")
            if lock is None:
                self._tell(f"{rung.name}: trains already, in another process; waiting for it")
                return _Elsewhere(rung=rung, run=run, slot=slot)
            lock.release()
        atomic_write_text(recipe, to_toml(rung.config, changed_only=True))
        self._tell(f"{rung.name}: {rung.parameters:,} parameters, {rung.tokens:,} tokens")
        if launch.on != "local":
            return _Job(rung=rung, run=run, slot=slot, recipe=recipe)
        command = [sys.executable, "-m", "lmforge", "pretrain", str(recipe)]
        environment = dict(os.environ)
        if self._parallel > 1:
            if shutil.which("nvidia-smi") and rung.config.train.device != "cpu":
                environment |= _visible_gpus(slot, launch.processes)
            elif rung.config.train.threads is None:
                threads = threads_per_rank(self._parallel * launch.processes)
                command += ["--train.threads", str(threads)]
        with open(self._recipes / f"{rung.name}.log", "ab") as log:
            # In a session of its own Ctrl-C reaches it once, by this process: a second one would
            # end it unsaved.
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        return _Local(rung=rung, run=run, slot=slot, process=process)

    def _has_ended(self, active: "_Active", status: int) -> bool:
        """Return True where a rung is done, or has diverged; False where it is started again.

        Raises for any other end.
        """
        run = active.run
        rung = active.rung
        if is_over(run, rung):
            return True
        log = self._recipes / f"{rung.name}.log"
        was_killed = status < 0 or status in (0, EXIT_PEER_LOST) or status > 128
        self._restarts[rung.name] += 1
        if self._signals or (was_killed and self._restarts[rung.name] <= MOST_RESTARTS):
            return False
        words = active.last_words(log)
        error = UserError if status == 2 else RunFailed
        raise error(
            f"rung {rung.name} ended with status {status}: {words or 'it says no more'}; log: {log}"
        )


def _visible_gpus(slot: int, count: int) -> dict[str, str]:
    """The GPUs of one of several runs at once."""
    import torch

    names = [str(each) for each in range(torch.cuda.device_count())]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        names = given.split(",")
    chosen = []
    if names:
        chosen = [names[(slot * count + number) % len(names)] for number in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(chosen))}


@dataclass(kw_only=True)
class _Active(ABC):
    """A rung that trains, in the place `slot`. signals: the number that was passed on to it.

    One without a process of this ladder's goes on when the ladder ends.
    """

    rung: Trial
    run: Run
    slot: int
    process: subprocess.Popen[bytes] | None = None
    signals: int = field(default=0, init=False)

    @abstractmethod
    def poll(self) -> int | None:
        """The exit status of the rung's process; None while it trains."""

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask it to save and end."""
        if self.process:
            self.process.send_signal(number)

    def wait(self) -> None:
        if self.process:
            self.process.wait()

    def last_words(self, log: Path) -> str:
        """The last message of the rung in its log."""
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in reversed(lines):
            if line.startswith("lmforge: "):
                return cut(line.removeprefix("lmforge: "), 500)
        return ""


class _Local(_Active):
    def poll(self) -> int | None:
        assert self.process is not None
        return self.process.poll()


class _Elsewhere(_Active):
    """A rung of a ladder that was killed: it goes on."""

    def poll(self) -> int | None:
        lock = try_lock(self.run.path / ".lock")
        if lock is None:
            return None
        lock.release()
        return 0


@dataclass(kw_only=True)
class _Job(_Active):
    """A job of `lmforge launch`, submitted unless there is one. It goes on when the ladder ends."""

    recipe: Path
    next_at: float = 0.0

    def poll(self) -> int | None:
        if time.monotonic() < self.next_at:
            return None
        job = read_job(self.run.path)
        if job is None or (self.next_at == 0.0 and not job_state(job)[0].is_active):
            command = [sys.executable, "-m", "lmforge", "launch", str(self.recipe)]
            ended = subprocess.run(
                command, capture_output=True, text=True, check=False, start_new_session=True
            )
            if ended.returncode:
                raise UserError(
                    ended.stderr.strip().removeprefix("lmforge: ")
                    or f"lmforge launch {self.recipe} failed"
                )
            job = read_job(self.run.path)
            assert job is not None, "lmforge launch has written it"
        self.next_at = time.monotonic() + JOB_SECONDS
        state, _ = job_state(job)
        if state.is_active:
            return None
        return {"done": 0, "refused": 2, "failed": 1}.get(state, 143)

    def last_words(self, log: Path) -> str:
        job = read_job(self.run.path)
        return job.last_words() if job else ""
