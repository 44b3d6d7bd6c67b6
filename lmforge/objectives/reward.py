"""Reward functions: plain Python in the user's file, called in a process of their own, so that what goes wrong in one of them
costs some rewards and not the run.

A function is `reward(prompts, completions, **columns) -> list[float | None]`, `def` or `async def`; None means that it has
nothing to say of an item. One with a parameter `reward_seconds` is told how long it may take. How rewards become
advantages is not decided here.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from lmforge.errors import Mistake

BUILT_IN = "lmforge.objectives.rewards"
# Where the package lies that this is a part of.
HERE = str(Path(__file__).resolve().parents[2])
# What every function is called with by these names, which are no columns'.
GIVEN = ("prompts", "completions", "reward_seconds")
# A file may import torch and open a model; and an async function that was cancelled may take a moment to say so.
LOADING_SECONDS = 300.0
GRACE_SECONDS = 5.0
ALIVE_SECONDS = 1.0


@dataclass(frozen=True)
class Scores:
    """What a batch of completions earned.

    rewards: of each item, the weighted sum of what the functions gave, None where none of them gave anything.
    parts: by function, what it gave. failures: by function, how many items it left without a reward by failing.
    """

    rewards: list[float | None]
    parts: dict[str, list[float | None]]
    failures: dict[str, int]


class Worker(Protocol):
    """What answers for one or more rewards: the process of a file of functions, or a model.

    needs: of each reward by its name, which columns it has to be given. takes: which it is given where they are there; None
    for all of them.
    """

    needs: dict[str, list[str]]
    takes: dict[str, list[str] | None]

    def call(self, job: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
        """By name, what was "given" to each completion, or what went wrong ("problem") and of which "kind" that is."""

    def end(self) -> None: ...


class Rewards:
    """Reward functions, ready to be called. Use it in a `with`, or close it."""

    def __init__(self, files: Mapping[str, Worker], weights: dict[str, float], seconds: float, say: Callable[[str], None]):
        self._files = files
        self._weights = weights
        self._seconds = seconds
        self._say = say
        self._told: set[tuple[str, str]] = set()
        self.failures: Counter[str] = Counter()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Scores:
        """Score each completion. `prompts`, `completions` and each column have an entry for each item, all of plain data.

        A function that raises, or takes longer than its time, gives None for every item of this call: it is told once for
        each kind of failure, and counted. Mistake where the columns are none that `check_columns` lets pass, a function
        raises a Mistake itself, or returns the wrong number of rewards or what is no finite number: it would do so with
        every batch.
        """
        self.check_columns(columns)
        job = {"prompts": list(prompts), "completions": list(completions)}
        for name, entries in {"completions": completions, **columns}.items():
            if len(entries) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts, but {len(entries)} of {name}")
        parts: dict[str, list[float | None]] = {}
        failures = dict.fromkeys(self._weights, 0)
        for worker in self._files.values():
            taken = {name: list(column) for name, column in columns.items() if _takers(worker, name)}
            for spec, answer in worker.call({**job, "columns": taken}, self._seconds).items():
                if answer["problem"]:
                    self._fail(spec, answer["kind"], answer["problem"], len(prompts))
                    failures[spec] = len(prompts)
                    parts[spec] = [None] * len(prompts)
                else:
                    parts[spec] = _checked(spec, answer["given"], len(prompts))
        return Scores([self._total(item, parts) for item in range(len(prompts))], parts, failures)

    def check_columns(self, names: Collection[str]) -> None:
        """Raise Mistake where a function cannot be called with columns of these names."""
        if taken := [name for name in GIVEN if name in names]:
            raise Mistake(
                f"column {taken[0]!r}: reward functions get the run's {' and '.join(GIVEN)} by these names; rename it"
            )
        for worker in self._files.values():
            for spec, needs in worker.needs.items():
                if missing := [name for name in needs if name not in names]:
                    there = ", ".join(names) or "none but prompts and completions"
                    raise Mistake(f"reward {spec}: needs the column {missing[0]!r}, which the data has not: there are {there}")

    def check_plain(self, columns: Mapping[str, Any]) -> None:
        """Raise Mistake where a column that a function is given holds, in this record, what cannot be handed to it."""
        for name, value in columns.items():
            takers = [spec for worker in self._files.values() for spec in _takers(worker, name)]
            if not takers or isinstance(value, str | int | float | None):
                continue
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise Mistake(
                    f"column {name!r} is not plain data ({error}), and reward {takers[0]} takes it, by its name or with all"
                    " others: make it text or numbers, or have the function take by their names only the columns it needs"
                ) from None

    def _fail(self, spec: str, kind: str, problem: str, items: int) -> None:
        self.failures[spec] += items
        if (spec, kind) not in self._told:
            self._told.add((spec, kind))
            self._say(f"reward {spec}: {problem}: {items} completions are left without it; more of this kind are only counted")

    def _total(self, item: int, parts: dict[str, list[float | None]]) -> float | None:
        given = [(self._weights[spec], part[item]) for spec, part in parts.items()]
        known = [weight * reward for weight, reward in given if reward is not None]
        return sum(known) if known else None

    def close(self) -> None:
        """End the processes of the functions, whatever they do."""
        for worker in self._files.values():
            worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


def load_rewards(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    seconds: float = 60.0,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    models: Callable[[str], Worker] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Rewards:
    """Open reward functions, each named FILE.py:FUNCTION or, for one of lmforge/objectives/rewards.py, by its name alone; and
    what `models` opens, named by folders.

    Each file is imported once, in a process of its own that is kept. `weights` default to 1; `seconds` is the time that one
    call of one function may take; `say` hears of failures, and `alive` is called now and then while functions are waited for.
    Mistake for a file, function, signature or weight that will not do.
    """
    weights = [1.0] * len(specs) if weights is None else weights
    if len(weights) != len(specs):
        raise Mistake(f"rewards: {len(specs)} functions but {len(weights)} weights; give one for each")
    if len(set(specs)) != len(specs):
        raise Mistake(f"rewards: a function is named twice: {', '.join(specs)}")
    by_file: dict[str, dict[str, str]] = {}
    judges = [spec for spec in specs if models is not None and names_model(spec)]
    for spec in specs:
        if spec in judges:
            continue
        file, colon, function = spec.rpartition(":")
        if (colon or spec.endswith(".py")) and not (file.endswith(".py") and function):
            raise Mistake(f"reward {spec}: expected FILE.py:FUNCTION")
        by_file.setdefault(file or BUILT_IN, {})[spec] = function
    files: dict[str, Worker] = {}
    try:
        for file, functions in by_file.items():
            files[file] = _Worker(file, functions, alive)
        for spec in judges:
            assert models is not None
            files[spec] = models(spec)
    except BaseException:
        for worker in files.values():
            worker.end()
        raise
    return Rewards(files, dict(zip(specs, weights, strict=True)), seconds, say)


def names_model(spec: str) -> bool:
    """Whether a reward is named by a folder, which is a model's."""
    return Path(spec).is_dir()


def _takers(worker: Worker, column: str) -> list[str]:
    """The rewards of a worker that are given a column."""
    return [spec for spec, taken in worker.takes.items() if taken is None or column in taken]


def _checked(spec: str, given: Any, items: int) -> list[float | None]:
    if isinstance(given, str):
        raise Mistake(f"reward {spec}: returned {given}, not a list with a number or None for each completion")
    if len(given) != items:
        raise Mistake(f"reward {spec}: returned {len(given)} rewards for {items} completions")
    for item, reward in enumerate(given):
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise Mistake(f"reward {spec}: gave {reward!r} for completion {item}, not a finite number or None")
    return [None if reward is None else float(reward) for reward in given]


class _Worker:
    """The process of one file. It is begun anew after it was ended for taking too long, or died."""

    def __init__(self, file: str, functions: dict[str, str], alive: Callable[[], None]) -> None:
        self._file, self._functions, self._alive = file, functions, alive
        self._process: subprocess.Popen[bytes] | None = None
        self._together: list[list[str]] = []
        self.needs: dict[str, list[str]] = {}
        self.takes: dict[str, list[str] | None] = {}
        self._start()

    def call(self, job: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
        """By function, what it returned ("given"), or what went wrong ("problem") and of which "kind" that is.

        Async functions wait together, others in turn.
        """
        answers: dict[str, dict[str, Any]] = {}
        for specs in self._together:
            try:
                if self._process is None:
                    self._start()
                self._send({**job, "functions": {spec: self._functions[spec] for spec in specs}, "seconds": seconds})
                answer = self._receive(seconds + GRACE_SECONDS, self._alive)
                for spec in specs:
                    if answer[spec]["mistake"]:
                        raise Mistake(f"reward {spec}: {answer[spec]['mistake']}")
                    answers[spec] = answer[spec]
            except TimeoutError:
                self.end()
                answers |= {spec: {"problem": f"no answer in {seconds:g} seconds", "kind": "time"} for spec in specs}
            except (EOFError, BrokenPipeError):
                self.end()
                answers |= {spec: {"problem": "its process died", "kind": "death"} for spec in specs}
        return answers

    def _start(self) -> None:
        (asked, self._requests), (self._answers, answered) = os.pipe(), os.pipe()
        start = f"import sys; sys.path.insert(0, {HERE!r}); from lmforge.objectives.rewardserver import serve; serve()"
        self._process = subprocess.Popen(
            # -P: not what happens to lie in the working directory, under the name of a module that is imported here.
            [sys.executable, "-P", "-c", start, self._file, str(asked), str(answered)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints is for whoever watches, and not for whoever reads a run's output
            pass_fds=(asked, answered),
            start_new_session=True,
        )
        os.close(asked)
        os.close(answered)
        try:
            self._send(self._functions)
            hello = self._receive(LOADING_SECONDS)
        except (EOFError, BrokenPipeError):
            self.end()
            raise Mistake(f"reward {self._file}: its process died while the file was imported") from None
        except TimeoutError:
            self.end()
            raise Mistake(f"reward {self._file}: importing it took more than {LOADING_SECONDS:g} seconds") from None
        if "mistake" in hello:
            self.end()
            raise Mistake(hello["mistake"])
        self.needs = {spec: about["needs"] for spec, about in hello.items()}
        self.takes = {spec: about["takes"] for spec, about in hello.items()}
        asynchronous = [spec for spec, about in hello.items() if about["async"]]
        self._together = [[spec] for spec, about in hello.items() if not about["async"]]
        self._together += [asynchronous] if asynchronous else []

    def _send(self, message: object) -> None:
        try:
            line = json.dumps(message).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise Mistake(f"rewards: a column holds what is not plain data: {error}") from None
        while line:
            line = line[os.write(self._requests, line) :]

    def _receive(self, seconds: float, alive: Callable[[], None] = lambda: None) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        line, end = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            alive()
            if not poll.poll(1000 * max(0.0, min(ALIVE_SECONDS, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise TimeoutError
                continue
            piece = os.read(self._answers, 1 << 16)
            if not piece:
                raise EOFError
            line += piece
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        """Kill the process with those it started in its session."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._requests)
            os.close(self._answers)
            self._process = None
