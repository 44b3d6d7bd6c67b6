"""Reward functions: plain Python in the user's file, called in a process of their own, so that what goes wrong in one of them
costs some rewards and not the run.

A function is `reward(prompts, completions, **columns) -> list[float | None]`, `def` or `async def`; None means that it has
nothing to say of an item. One with a parameter `reward_timeout_seconds` is told how long it may take. How rewards become
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

from lmforge.errors import UserError

BUILT_IN_MODULE = "lmforge.rewards.builtin"
# Where the package lies that this is a part of.
PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# What every function is called with by these names, which are no columns'.
RESERVED_NAMES = ("prompts", "completions", "reward_timeout_seconds")
# A file may import torch and open a model; and an async function that was cancelled may take a moment to say so.
IMPORT_TIMEOUT_SECONDS = 300.0
GRACE_SECONDS = 5.0
HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class RewardScores:
    """What a batch of completions earned.

    rewards: of each item, the weighted sum of what the functions gave, None where none of them gave anything.
    parts: by function, what it gave. failures: by function, how many items it left without a reward by failing.
    """

    rewards: list[float | None]
    by_function: dict[str, list[float | None]]
    failures: dict[str, int]


class RewardWorker(Protocol):
    """What answers for one or more rewards: the process of a file of functions, or a model.

    needs: of each reward by its name, which columns it has to be given. takes: which it is given where they are there; None
    for all of them.
    """

    required_columns: dict[str, list[str]]
    accepted_columns: dict[str, list[str] | None]

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, dict[str, Any]]:
        """By name, what was "given" to each completion, or what went wrong ("problem") and of which "kind" that is."""

    def close(self) -> None: ...


class RewardFunctions:
    """Reward functions, ready to be called. Use it in a `with`, or close it."""

    def __init__(
        self, workers: Mapping[str, RewardWorker], weights: dict[str, float], timeout_seconds: float, log: Callable[[str], None]
    ):
        self._workers = workers
        self._weights = weights
        self._timeout_seconds = timeout_seconds
        self._log = log
        self._logged_failures: set[tuple[str, str]] = set()
        self.failures: Counter[str] = Counter()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> RewardScores:
        """Score each completion. `prompts`, `completions` and each column have an entry for each item, all of plain data.

        A function that raises, or takes longer than its time, gives None for every item of this call: it is told once for
        each kind of failure, and counted. UserError where the columns are none that `check_columns` lets pass, a function
        raises a UserError itself, or returns the wrong number of rewards or what is no finite number: it would do so with
        every batch.
        """
        self.check_columns(columns)
        job = {"prompts": list(prompts), "completions": list(completions)}
        for name, entries in {"completions": completions, **columns}.items():
            if len(entries) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts, but {len(entries)} of {name}")
        parts: dict[str, list[float | None]] = {}
        failures = dict.fromkeys(self._weights, 0)
        for worker in self._workers.values():
            taken = {name: list(column) for name, column in columns.items() if _functions_accepting(worker, name)}
            for spec, answer in worker.score({**job, "columns": taken}, self._timeout_seconds).items():
                if answer["problem"]:
                    self._record_failure(spec, answer["kind"], answer["problem"], len(prompts))
                    failures[spec] = len(prompts)
                    parts[spec] = [None] * len(prompts)
                else:
                    parts[spec] = _validated_rewards(spec, answer["given"], len(prompts))
        return RewardScores([self._weighted_sum(item, parts) for item in range(len(prompts))], parts, failures)

    def check_columns(self, column_names: Collection[str]) -> None:
        """Raise UserError where a function cannot be called with columns of these names."""
        if taken := [name for name in RESERVED_NAMES if name in column_names]:
            raise UserError(
                f"column {taken[0]!r}: reward functions get the run's {' and '.join(RESERVED_NAMES)} by these names; rename it"
            )
        for worker in self._workers.values():
            for spec, needs in worker.required_columns.items():
                if missing := [name for name in needs if name not in column_names]:
                    there = ", ".join(column_names) or "none but prompts and completions"
                    raise UserError(
                        f"reward {spec}: needs the column {missing[0]!r}, which the data has not: there are {there}"
                    )

    def check_serializable(self, columns: Mapping[str, Any]) -> None:
        """Raise UserError where a column that a function is given holds, in this record, what cannot be handed to it."""
        for name, value in columns.items():
            takers = [spec for worker in self._workers.values() for spec in _functions_accepting(worker, name)]
            if not takers or isinstance(value, str | int | float | None):
                continue
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"column {name!r} is not plain data ({error}), and reward {takers[0]} takes it, by its name or with all"
                    " others: make it text or numbers, or have the function take by their names only the columns it needs"
                ) from None

    def _record_failure(self, spec: str, failure_type: str, problem: str, items: int) -> None:
        self.failures[spec] += items
        if (spec, failure_type) not in self._logged_failures:
            self._logged_failures.add((spec, failure_type))
            self._log(f"reward {spec}: {problem}: {items} completions are left without it; more of this kind are only counted")

    def _weighted_sum(self, item: int, by_function: dict[str, list[float | None]]) -> float | None:
        given = [(self._weights[spec], part[item]) for spec, part in by_function.items()]
        known = [weight * reward for weight, reward in given if reward is not None]
        return sum(known) if known else None

    def close(self) -> None:
        """End the processes of the functions, whatever they do."""
        for worker in self._workers.values():
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


def load_reward_functions(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    timeout_seconds: float = 60.0,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    open_reward_model: Callable[[str], RewardWorker] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> RewardFunctions:
    """Open reward functions, each named FILE.py:FUNCTION or, for one of lmforge/rewards/builtin.py, by its name alone; and
    what `models` opens, named by folders.

    Each file is imported once, in a process of its own that is kept. `weights` default to 1; `seconds` is the time that one
    call of one function may take; `say` hears of failures, and `alive` is called now and then while functions are waited for.
    UserError for a file, function, signature or weight that will not do.
    """
    weights = [1.0] * len(specs) if weights is None else weights
    if len(weights) != len(specs):
        raise UserError(f"rewards: {len(specs)} functions but {len(weights)} weights; give one for each")
    if len(set(specs)) != len(specs):
        raise UserError(f"rewards: a function is named twice: {', '.join(specs)}")
    by_file: dict[str, dict[str, str]] = {}
    judges = [spec for spec in specs if open_reward_model is not None and is_model_folder(spec)]
    for spec in specs:
        if spec in judges:
            continue
        file, colon, function = spec.rpartition(":")
        if (colon or spec.endswith(".py")) and not (file.endswith(".py") and function):
            raise UserError(f"reward {spec}: expected FILE.py:FUNCTION")
        by_file.setdefault(file or BUILT_IN_MODULE, {})[spec] = function
    files: dict[str, RewardWorker] = {}
    try:
        for file, functions in by_file.items():
            files[file] = _RewardProcess(file, functions, heartbeat)
        for spec in judges:
            assert open_reward_model is not None
            files[spec] = open_reward_model(spec)
    except BaseException:
        for worker in files.values():
            worker.close()
        raise
    return RewardFunctions(files, dict(zip(specs, weights, strict=True)), timeout_seconds, log)


def is_model_folder(spec: str) -> bool:
    """Whether a reward is named by a folder, which is a model's."""
    return Path(spec).is_dir()


def _functions_accepting(worker: RewardWorker, column: str) -> list[str]:
    """The rewards of a worker that are given a column."""
    return [spec for spec, taken in worker.accepted_columns.items() if taken is None or column in taken]


def _validated_rewards(spec: str, returned: Any, items: int) -> list[float | None]:
    if isinstance(returned, str):
        raise UserError(f"reward {spec}: returned {returned}, not a list with a number or None for each completion")
    if len(returned) != items:
        raise UserError(f"reward {spec}: returned {len(returned)} rewards for {items} completions")
    for item, reward in enumerate(returned):
        if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
            raise UserError(f"reward {spec}: gave {reward!r} for completion {item}, not a finite number or None")
    return [None if reward is None else float(reward) for reward in returned]


class _RewardProcess:
    """The process of one file. It is begun anew after it was ended for taking too long, or died."""

    def __init__(self, file: str, functions: dict[str, str], heartbeat: Callable[[], None]) -> None:
        self._file, self._functions, self._heartbeat = file, functions, heartbeat
        self._process: subprocess.Popen[bytes] | None = None
        self._call_groups: list[list[str]] = []
        self.required_columns: dict[str, list[str]] = {}
        self.accepted_columns: dict[str, list[str] | None] = {}
        self._start()

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, dict[str, Any]]:
        """By function, what it returned ("given"), or what went wrong ("problem") and of which "kind" that is.

        Async functions wait together, others in turn.
        """
        answers: dict[str, dict[str, Any]] = {}
        for specs in self._call_groups:
            try:
                if self._process is None:
                    self._start()
                self._send(
                    {**request, "functions": {spec: self._functions[spec] for spec in specs}, "seconds": timeout_seconds}
                )
                answer = self._receive(timeout_seconds + GRACE_SECONDS, self._heartbeat)
                for spec in specs:
                    if answer[spec]["mistake"]:
                        raise UserError(f"reward {spec}: {answer[spec]['mistake']}")
                    answers[spec] = answer[spec]
            except TimeoutError:
                self.close()
                answers |= {spec: {"problem": f"no answer in {timeout_seconds:g} seconds", "kind": "time"} for spec in specs}
            except (EOFError, BrokenPipeError):
                self.close()
                answers |= {spec: {"problem": "its process died", "kind": "death"} for spec in specs}
        return answers

    def _start(self) -> None:
        (asked, self._requests), (self._responses, answered) = os.pipe(), os.pipe()
        start = (
            f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from lmforge.rewards.function_server import serve; serve()"
        )
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
            hello = self._receive(IMPORT_TIMEOUT_SECONDS)
        except (EOFError, BrokenPipeError):
            self.close()
            raise UserError(f"reward {self._file}: its process died while the file was imported") from None
        except TimeoutError:
            self.close()
            raise UserError(f"reward {self._file}: importing it took more than {IMPORT_TIMEOUT_SECONDS:g} seconds") from None
        if "mistake" in hello:
            self.close()
            raise UserError(hello["mistake"])
        self.required_columns = {spec: about["needs"] for spec, about in hello.items()}
        self.accepted_columns = {spec: about["takes"] for spec, about in hello.items()}
        asynchronous = [spec for spec, about in hello.items() if about["async"]]
        self._call_groups = [[spec] for spec, about in hello.items() if not about["async"]]
        self._call_groups += [asynchronous] if asynchronous else []

    def _send(self, message: object) -> None:
        try:
            line = json.dumps(message).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"rewards: a column holds what is not plain data: {error}") from None
        while line:
            line = line[os.write(self._requests, line) :]

    def _receive(self, timeout_seconds: float, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._responses, select.POLLIN)
        line, end = b"", time.monotonic() + timeout_seconds
        while not line.endswith(b"\n"):
            heartbeat()
            if not poll.poll(1000 * max(0.0, min(HEARTBEAT_SECONDS, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise TimeoutError
                continue
            piece = os.read(self._responses, 1 << 16)
            if not piece:
                raise EOFError
            line += piece
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Kill the process with those it started in its session."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._requests)
            os.close(self._responses)
            self._process = None
