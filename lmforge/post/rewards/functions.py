"""Reward functions: plain Python in the user's file, called in a process of its own, so that a
failure in one of them costs some rewards and not the run.

A function is `reward(prompts, completions, **columns) -> list[float | None]`, `def` or `async def`;
None means that it does not score a completion. A parameter `reward_timeout_seconds` gets the time
that it may take. How rewards become advantages is in post/objectives/policy.py.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, list_names
from lmforge.core.foreign_code import ProcessLost, start_server
from lmforge.core.plugins import files_of
from lmforge.post.options.align import is_model_folder

# Used instead of a file: functions registered by name, by lmforge or a plugin.
REGISTERED = "registered names"
# Names of the arguments besides columns.
RESERVED_NAMES = ("prompts", "completions", "reward_timeout_seconds")
# Additional time after the time-out, for a cancelled async function to report it.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class RewardScores:
    """The rewards of a batch of completions.

    rewards: of each completion, the weighted sum of what the functions returned, None where all
    returned None. by_function: what each function returned. errors: why functions failed, of those
    that did, whose completions have no reward from them.
    """

    rewards: list[float | None]
    by_function: dict[str, list[float | None]]
    errors: dict[str, str]


@dataclass(frozen=True)
class FunctionResult:
    """What a reward function returned for a batch, not yet validated, or the error by which it
    failed.
    """

    rewards: Any = None
    error: str = ""


class RewardWorker(Protocol):
    """Computes one or more rewards: the process of a file of functions, or a reward model.

    required_columns: by the name of the reward, the columns that it must be given.
    accepted_columns: those that it is given if the data has them; None for all of them.
    """

    required_columns: dict[str, list[str]]
    accepted_columns: dict[str, list[str] | None]

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, FunctionResult]:
        """The results by name.

        The request has lists `prompts` and `completions`, and `columns`, lists by name.
        """

    def close(self) -> None: ...


class EnvironmentRewards(RewardWorker, Protocol):
    """An environment (post/environments/process.py), whose episodes have rewards: of itself, under
    its name, and of the functions that it is given because they take `environments`.
    """

    def add_functions(
        self, functions: Mapping[str, tuple[str, str]], accepted: Mapping[str, list[str] | None]
    ) -> None:
        """Functions by their specs: (file, name), and the columns that each is given."""


class RewardFunctions(AbstractContextManager["RewardFunctions"]):
    """Opened reward functions. Use it in a `with`, or close it."""

    def __init__(
        self, workers: Sequence[RewardWorker], weights: dict[str, float], timeout_seconds: float
    ):
        self._workers = workers
        self._weights = weights
        self._timeout_seconds = timeout_seconds

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
    ) -> RewardScores:
        """Score completions.

        `completions` and each column have an entry, of plain data, for each of `prompts`.

        A function that raises or exceeds the time-out gives None for every completion of this call.
        Raises UserError if `check_columns` does, if a function raises a UserError, or if it returns
        the wrong number of rewards or a reward that is not finite: it would do so with every batch.
        """
        self.check_columns(columns)
        count = len(prompts)
        for name, entries in {"completions": completions, **columns}.items():
            if len(entries) != count:
                raise ValueError(f"{count} prompts, but {len(entries)} of {name}")
        by_function: dict[str, list[float | None]] = {}
        errors: dict[str, str] = {}
        for worker in self._workers:
            accepted = {
                name: list(column)
                for name, column in columns.items()
                if _functions_accepting(worker, name)
            }
            request = {
                "prompts": list(prompts),
                "completions": list(completions),
                "columns": accepted,
            }
            for spec, result in worker.score(request, self._timeout_seconds).items():
                if result.error:
                    errors[spec] = result.error
                    by_function[spec] = [None] * count
                else:
                    by_function[spec] = _validated_rewards(spec, result.rewards, count)
        rewards = [self._weighted_sum(index, by_function) for index in range(count)]
        return RewardScores(rewards, by_function, errors)

    def check_columns(self, names: Collection[str]) -> None:
        """Raise UserError if a function cannot be called with columns of these names."""
        if reserved := [name for name in RESERVED_NAMES if name in names]:
            raise UserError(
                f"column {reserved[0]!r}: reward functions get the run's"
                f" {' and '.join(RESERVED_NAMES)} by these names; rename it"
            )
        for worker in self._workers:
            for spec, required in worker.required_columns.items():
                if missing := [name for name in required if name not in names]:
                    present = list_names(names) if names else "none but prompts and completions"
                    raise UserError(
                        f"reward {spec}: needs the column {missing[0]!r}, which the data does not"
                        f" have: there are {present}"
                    )

    def check_serializable(self, columns: Mapping[str, Any]) -> None:
        """Raise UserError if a value of this record cannot be sent to a function that is given its
        column.
        """
        for name, value in columns.items():
            accepting = [
                spec for worker in self._workers for spec in _functions_accepting(worker, name)
            ]
            if not accepting or isinstance(value, str | int | float | None):
                continue
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"column {name!r} is not plain data ({error}), and reward {accepting[0]} takes"
                    " it, by its name or with all others; make it text or numbers, or let the"
                    " function name only the columns that it needs"
                ) from None

    def _weighted_sum(self, index: int, by_function: dict[str, list[float | None]]) -> float | None:
        # An environment's own rewards have no weight.
        returned = [
            (self._weights.get(spec, 1.0), rewards[index]) for spec, rewards in by_function.items()
        ]
        known = [weight * reward for weight, reward in returned if reward is not None]
        return sum(known) if known else None

    def close(self) -> None:
        """Kill the processes of the functions, even while they run."""
        for worker in self._workers:
            worker.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def load_reward_functions(
    specs: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    timeout_seconds: float = 60.0,
    open_reward_model: Callable[[str], RewardWorker] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
    options: Mapping[str, str] | None = None,
    environment: EnvironmentRewards | None = None,
) -> RewardFunctions:
    """Open reward functions, each named FILE.py:FUNCTION or, where it is registered, by its name
    alone, and reward models, each named by its folder, which `open_reward_model` opens. `options`
    has those of registered functions, as JSON by name. Functions with a parameter `environments`
    are called where the `environment` is, which is closed with them.

    Each file is imported once, in a process of its own that lives until `close`. `weights` default
    to 1. `timeout_seconds` is for one call of one function. `heartbeat` is called every second
    while functions run. Raises UserError for a file, function, signature or weight that cannot be
    used.
    """
    weights = [1.0] * len(specs) if weights is None else weights
    if len(weights) != len(specs):
        raise UserError(
            f"rewards: {len(specs)} functions but {len(weights)} weights; give one for each"
        )
    if len(set(specs)) != len(specs):
        raise UserError(f"rewards: a function is named twice: {', '.join(specs)}")
    by_file: dict[str, dict[str, str]] = {}
    models = [spec for spec in specs if open_reward_model is not None and is_model_folder(spec)]
    for spec in (spec for spec in specs if spec not in models):
        file, colon, function = spec.rpartition(":")
        if (colon or spec.endswith(".py")) and not (file.endswith(".py") and function):
            raise UserError(f"reward {spec}: expected FILE.py:FUNCTION")
        if not file and "/" in spec:
            raise UserError(
                f"reward {spec}: no such folder of a reward model; or give FILE.py:FUNCTION or a"
                " registered name"
            )
        if not file:
            registry.get("reward", spec)
        by_file.setdefault(file or REGISTERED, {})[spec] = function
    workers: list[RewardWorker] = []
    with ExitStack() as opened:
        for file, functions in by_file.items():
            process = opened.enter_context(
                closing(_RewardProcess(file, functions, heartbeat, options or {}))
            )
            taken = process.hand_over("environments")
            if taken and environment is None:
                raise UserError(
                    f"reward {next(iter(taken))}: takes environments; name one with"
                    " rollout.environment"
                )
            if taken and environment is not None:
                environment.add_functions({spec: (file, functions[spec]) for spec in taken}, taken)
            workers.append(process)
        for spec in models:
            assert open_reward_model is not None
            workers.append(opened.enter_context(closing(open_reward_model(spec))))
        opened.pop_all()
    if environment is not None:
        workers.append(environment)
    return RewardFunctions(workers, dict(zip(specs, weights, strict=True)), timeout_seconds)


def _functions_accepting(worker: RewardWorker, column: str) -> list[str]:
    """The rewards of a worker that are given a column."""
    return [
        spec
        for spec, accepted in worker.accepted_columns.items()
        if accepted is None or column in accepted
    ]


def _validated_rewards(spec: str, returned: Any, count: int) -> list[float | None]:
    if isinstance(returned, str):
        raise UserError(
            f"reward {spec}: returned {returned}, not a list with a number or None for each"
            " completion"
        )
    if len(returned) != count:
        raise UserError(f"reward {spec}: returned {len(returned)} rewards for {count} completions")
    for index, reward in enumerate(returned):
        if reward is not None and (
            not isinstance(reward, int | float) or not math.isfinite(reward)
        ):
            raise UserError(
                f"reward {spec}: returned {cut(repr(reward))} for completion {index}, not a finite"
                " number or None"
            )
    return [None if reward is None else float(reward) for reward in returned]


class _RewardProcess:
    """The process of one file.

    It is started again after it was killed for taking too long, or died.
    """

    def __init__(
        self,
        file: str,
        functions: dict[str, str],
        heartbeat: Callable[[], None],
        options: Mapping[str, str],
    ) -> None:
        self._file = file
        self._heartbeat = heartbeat
        plugins = (
            files_of([registry.get("reward", name) for name in functions])
            if file == REGISTERED
            else []
        )
        self._request: dict[str, Any] = {
            "functions": functions,
            "plugins": plugins,
            "options": dict(options),
        }
        # Specs that are called together.
        self._call_groups: list[list[str]] = []
        self._ended = False
        self._start()

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, FunctionResult]:
        results: dict[str, FunctionResult] = {}
        for specs in self._call_groups:
            if self._ended:
                raise UserError(f"rewards {self._file}: closed")
            if self._process.closed:
                self._start()
            call = {**request, "functions": specs, "timeout_seconds": timeout_seconds}
            try:
                responses = self._process.request(
                    call, timeout_seconds + GRACE_SECONDS, self._heartbeat
                )
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"rewards: a column is not plain data: {error}") from None
            except TimeoutError:
                results |= dict.fromkeys(
                    specs, FunctionResult(error=f"no answer in {timeout_seconds:g} seconds")
                )
            except ProcessLost as lost:
                results |= dict.fromkeys(specs, FunctionResult(error=str(lost)))
            else:
                for spec, response in responses.items():
                    if "user_error" in response:
                        raise UserError(f"reward {spec}: {response['user_error']}")
                    results[spec] = FunctionResult(**response)
        return results

    def hand_over(self, parameter: str) -> dict[str, list[str] | None]:
        """Leave the functions of a file that name a parameter to another.

        Returns the other columns that each is given.
        """
        if self._file == REGISTERED:
            return {}
        columns = {
            spec: (accepted, self.required_columns[spec])
            for spec, accepted in self.accepted_columns.items()
        }
        taken = {
            spec: accepted
            for spec, (accepted, required) in columns.items()
            if parameter in [*(accepted or ()), *required]
        }
        self._request["functions"] = {
            spec: name for spec, name in self._request["functions"].items() if spec not in taken
        }
        for spec in taken:
            del self.required_columns[spec], self.accepted_columns[spec]
        left = ([spec for spec in specs if spec not in taken] for specs in self._call_groups)
        self._call_groups = [specs for specs in left if specs]
        return taken

    def _start(self) -> None:
        what = f"reward {self._file}"
        self._process, description = start_server(
            "lmforge.post.rewards.function_server", self._file, self._request, what
        )
        self.required_columns: dict[str, list[str]] = description["required_columns"]
        self.accepted_columns: dict[str, list[str] | None] = description["accepted_columns"]
        self._call_groups = description["call_groups"]

    def close(self) -> None:
        self._ended = True
        self._process.close()
