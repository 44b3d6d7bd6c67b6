"""The environment that a run names, in processes of its own, with bounds of time; and its rewards.

Each process has several episodes and answers one request at a time. A call that takes too long is
interrupted, which ends its episode; if that does not help, its process is killed, which ends those
that it has.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import xxhash

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import expand_home
from lmforge.core.foreign_code import (
    HEARTBEAT_CALL_SECONDS,
    IMPORT_TIMEOUT_SECONDS,
    JsonLineProcess,
    ProcessLost,
    start_server,
)
from lmforge.core.plugins import files_of
from lmforge.post.environments.environment import Message
from lmforge.post.environments.verifiers_loading import sources
from lmforge.post.rewards.functions import GRACE_SECONDS, FunctionResult

# Environments of other packages, KIND:ADDRESS.
ADAPTERS = {
    "openenv": "lmforge.post.environments.openenv:OpenEnvironment",
    "verifiers": "lmforge.post.environments.verifiers:VerifiersEnvironment",
}
# For `close` of all environments of a process that ends.
CLOSING_SECONDS = 5.0
# For a call that began with others, whose time is over: to say what it has.
LEAST_SECONDS = 1.0


class Declaration(NamedTuple):
    """What an environment declares: schemas of the tools that the model may call, "tool", "user" or
    both, and whether episodes have a reward without a reward function; whether calls can begin
    before others have ended.
    """

    tools: list[dict[str, Any]]
    reply_roles: list[str]
    gives_rewards: bool
    begins_early: bool = False


class EpisodeReply(NamedTuple):
    """What an environment answered in an episode.

    `failed_calls`: how many of the answer's calls raised an exception. `error`: why there is no
    answer, which ends the episode.
    """

    messages: Sequence[Message] = ()
    done: bool = False
    failed_calls: int = 0
    error: str = ""


class _Call(NamedTuple):
    """A request to an episode, and its answer.

    `deadline`: of one that has begun before its turn, or None.
    """

    episode: int
    request: dict[str, Any]
    answer: Future[dict[str, Any]]
    deadline: float | None = None


def adapted(spec: str) -> tuple[str, str] | None:
    """The adapter's class and the address of an environment of another package."""
    kind, colon, address = spec.partition(":")
    return (ADAPTERS[kind], address) if colon and kind in ADAPTERS else None


def split_spec(spec: str) -> tuple[str, str]:
    """File and name of an environment; no file where the name is registered, or of another
    package.
    """
    if adapted(spec):
        return "", spec
    file, _, name = spec.rpartition(":")
    return file, name


def identify(spec: str) -> list[str]:
    """What makes an environment another one: its name, and what its files hold, wherever they are.

    Raises OSError.
    """
    file, name = split_spec(spec)
    files = [expand_home(file)] if file else []
    parts = [name]
    if spec.startswith("verifiers:"):
        version, files = sources(spec.partition(":")[2])
        parts.append(version)
    return parts + [xxhash.xxh3_128_hexdigest(each.read_bytes()) for each in files]


class EnvironmentPool(AbstractContextManager["EnvironmentPool"]):
    """An environment with episodes, numbered from 0.

    Use it in a `with`, or close it. It is a RewardWorker.

    Its processes are started when they are needed; they end with the object, or with this process.
    heartbeat: called every second while environments work.
    """

    def __init__(self, spec: str, *, processes: int = 1, timeout_seconds: float = 60.0) -> None:
        """`spec`: FILE.py:CLASS, FILE.py:FUNCTION, FILE.py:DICT, or a registered name.

        `timeout_seconds` is for one call of it.

        Raises UserError where it is not of this form. What needs its process raises UserError where
        it cannot be used.
        """
        file, name = split_spec(spec)
        if (file or name.endswith(".py")) and not (file.endswith(".py") and name):
            raise UserError(
                f"environment {spec}: expected FILE.py:CLASS, FILE.py:FUNCTION, or a registered"
                " name"
            )
        plugins = [] if file or adapted(spec) else files_of([registry.get("environment", spec)])
        self.spec = spec
        self._timeout_seconds = timeout_seconds
        self.heartbeat: Callable[[], None] = lambda: None
        self._functions: dict[str, tuple[str, str]] = {}
        self._first = {
            "plugins": plugins,
            "functions": self._functions,
            "timeout_seconds": timeout_seconds,
        }
        self._workers: list[JsonLineProcess | None] = [None] * processes
        self._threads = [ThreadPoolExecutor(1) for _ in range(processes)]
        # By process, of calls that begin together.
        self._waiting = [SimpleQueue[list[_Call]]() for _ in range(processes)]
        self.close = weakref.finalize(self, _close, self._workers, self._threads)
        self._declarations: dict[str, Declaration] = {}
        self._begins_early = False
        # Of episodes that have ended by a failure, why.
        self._failed: dict[int, str] = {}
        self._num_episodes = 0
        self._ended = True
        # A row begins an episode, with all its columns.
        self.required_columns: dict[str, list[str]] = {spec: []}
        self.accepted_columns: dict[str, list[str] | None] = {spec: None}

    @property
    def declarations(self) -> Mapping[str, Declaration]:
        """The declaration of each environment by its name; "" is the name of one alone."""
        if not self._declarations:
            self._start(0)
        return self._declarations

    @property
    def gives_rewards(self) -> bool:
        """Whether some episodes have a reward without a reward function."""
        return any(each.gives_rewards for each in self.declarations.values())

    def add_functions(
        self, functions: Mapping[str, tuple[str, str]], accepted: Mapping[str, list[str] | None]
    ) -> None:
        """Reward functions that are given `environments`: (file, name) of each, and the columns
        that it is given. They run where these are. Raises UserError where a file cannot be imported
        there, if there is a process.
        """
        self._functions.update(functions)
        self.accepted_columns |= accepted
        self.required_columns |= {spec: [] for spec in functions}
        for process in filter(None, self._workers):
            response = process.request(
                {"call": "import", "functions": functions}, IMPORT_TIMEOUT_SECONDS
            )
            if "user_error" in response:
                raise UserError(response["user_error"])

    def reset(self, rows: Sequence[dict[str, Any]]) -> list[EpisodeReply]:
        """Begin an episode for each row, and end those before.

        Returns the first messages of each.
        """
        self.end_episodes()
        self._failed = {}
        self._num_episodes = len(rows)
        self._ended = False
        begun = self._finish(
            self._begin({number: {"call": "reset", "row": row} for number, row in enumerate(rows)})
        )
        return [self.take_reply(number, answer) for number, answer in begun.items()]

    def step(self, answers: Mapping[int, Message]) -> dict[int, EpisodeReply]:
        """What the environment answers to each message, by the number of its episode."""
        begun = self._finish(self.begin_steps(answers))
        return {number: self.take_reply(number, answer) for number, answer in begun.items()}

    def begin_steps(self, answers: Mapping[int, Message]) -> dict[int, Future[dict[str, Any]]]:
        """As `step`, without waiting; `take_reply` reads what each will be."""
        return self._begin(
            {number: {"call": "step", "message": message} for number, message in answers.items()}
        )

    def take_reply(self, number: int, answer: Future[dict[str, Any]]) -> EpisodeReply:
        """The reply of an episode. Raises UserError where the environment cannot be used."""
        response = self._read(number, answer)
        if response is None:
            return EpisodeReply(error=self._failed[number])
        return EpisodeReply(
            **{key: value for key, value in response.items() if key in EpisodeReply._fields}
        )

    def end_episodes(self) -> None:
        """Close what the episodes have opened."""
        running = [
            number
            for at, process in enumerate(self._workers)
            if process
            for number in self._episodes_of(at)
        ]
        if not self._ended:
            # One that fails while it is closed has its reward.
            failed = self._failed
            self._failed = dict(self._failed)
            self._request({number: {"call": "end", "episode": number} for number in running})
            self._failed = failed
            self._ended = True

    def score(self, request: dict[str, Any], timeout_seconds: float) -> dict[str, FunctionResult]:
        """The rewards of all episodes, which it ends: of the environment itself, under its name,
        and of functions that take environments.
        """
        results = {}
        if self.gives_rewards:
            answers = self._request(
                {
                    number: {"call": "reward", "episode": number}
                    for number in range(self._num_episodes)
                }
            )
            rewards = [
                answers.get(number, {}).get("reward") for number in range(self._num_episodes)
            ]
            results[self.spec] = FunctionResult(rewards)
        for spec in self._functions:
            results[spec] = self._call_function(spec, request, timeout_seconds)
        self.end_episodes()
        return results

    def _call_function(
        self, spec: str, request: dict[str, Any], timeout_seconds: float
    ) -> FunctionResult:
        """A function is called in each process with the episodes that are there."""
        rewards: list[Any] = [None] * self._num_episodes
        for worker in range(len(self._workers)):
            mine = [number for number in self._episodes_of(worker) if number not in self._failed]
            if not mine:
                continue
            accepted = self.accepted_columns[spec]
            columns = {
                name: [column[at] for at in mine] for name, column in request["columns"].items()
            }
            call = {
                "call": "functions",
                "functions": [spec],
                "episodes": mine,
                "timeout_seconds": timeout_seconds,
                "columns": {
                    name: column
                    for name, column in columns.items()
                    if accepted is None or name in accepted
                },
                **{name: [request[name][at] for at in mine] for name in ("prompts", "completions")},
            }
            response = self._exchange(worker, call, timeout_seconds)
            if "error" in response:
                return FunctionResult(error=response["error"])
            result = response[spec]
            if "user_error" in result:
                raise UserError(f"reward {spec}: {result['user_error']}")
            if "error" in result or not isinstance(result["rewards"], list):
                return FunctionResult(**result)
            if (count := len(result["rewards"])) != len(mine):
                raise UserError(
                    f"reward {spec}: returned {count} rewards for {len(mine)} completions"
                )
            for number, reward in zip(mine, result["rewards"], strict=True):
                rewards[number] = reward
        return FunctionResult(rewards)

    @property
    def failed_episodes(self) -> dict[int, str]:
        """Why episodes failed since they were begun, by their number."""
        return dict(self._failed)

    def _episodes_of(self, worker: int) -> Iterable[int]:
        return range(worker, self._num_episodes, len(self._workers))

    def _request(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The responses by episode, without those that failed."""
        answers = {
            number: self._read(number, answer)
            for number, answer in self._finish(self._begin(requests)).items()
        }
        return {number: answer for number, answer in answers.items() if answer is not None}

    def _finish(
        self, answers: dict[int, Future[dict[str, Any]]]
    ) -> dict[int, Future[dict[str, Any]]]:
        """The same, when all are there. The processes work at the same time."""
        pending = {*answers.values()}
        try:
            while pending:
                done, pending = wait(pending, HEARTBEAT_CALL_SECONDS, FIRST_EXCEPTION)
                self.heartbeat()
                for each in done:
                    each.result()
        finally:
            for each in pending:
                each.cancel()
        return answers

    def _read(self, number: int, answer: Future[dict[str, Any]]) -> dict[str, Any] | None:
        """The response of an episode; None if it failed."""
        response = answer.result()
        if "user_error" in response:
            raise UserError(f"environment {self.spec}: {response['user_error']}")
        if "error" in response:
            self._failed.setdefault(number, response["error"])
            return None
        return response

    def _begin(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, Future[dict[str, Any]]]:
        self._begins_early = bool(requests) and any(
            each.begins_early for each in self.declarations.values()
        )
        calls = [
            _Call(number, {**request, "episode": number}, Future())
            for number, request in requests.items()
        ]
        for worker in {call.episode % len(self._workers) for call in calls}:
            self._waiting[worker].put(
                [call for call in calls if call.episode % len(self._workers) == worker]
            )
            self._threads[worker].submit(self._work_through, worker)
        return {call.episode: call.answer for call in calls}

    def _work_through(self, worker: int) -> None:
        """Answer what waits for a process, in its order, until nothing does."""
        calls: list[_Call] = []
        try:
            while self._take_waiting(worker, calls):
                call = calls[0]
                if call.answer.set_running_or_notify_cancel():
                    call.answer.set_result(self._respond(worker, call))
                del calls[0]
        except BaseException as problem:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(problem)

    def _take_waiting(self, worker: int, calls: list[_Call]) -> bool:
        """Add what waits for a process to `calls`, begun where that goes early.

        Returns whether there is any.
        """
        before = len(calls)
        with suppress(Empty):
            while True:
                calls += self._waiting[worker].get_nowait()
        new = calls[before:]
        early = [
            call.request
            for call in new
            if self._begins_early
            and call.request["call"] != "end"
            and call.episode not in self._failed
        ]
        if early:
            self._exchange(worker, {"call": "begin", "requests": early}, self._timeout_seconds)
            deadline = time.monotonic() + self._timeout_seconds
            calls[before:] = [call._replace(deadline=deadline) for call in new]
        return bool(calls)

    def _respond(self, worker: int, call: _Call) -> dict[str, Any]:
        if call.episode in self._failed:
            return {"error": self._failed[call.episode]}
        left = (
            self._timeout_seconds
            if call.deadline is None
            else max(call.deadline - time.monotonic(), LEAST_SECONDS)
        )
        return self._exchange(worker, {**call.request, "seconds": left}, self._timeout_seconds)

    def _exchange(
        self, worker: int, request: dict[str, Any], timeout_seconds: float
    ) -> dict[str, Any]:
        """The response of a process, or an error; if it is lost, its episodes are."""
        if self._workers[worker] is None:
            self._start(worker)
        process = self._workers[worker]
        assert process is not None
        try:
            return process.request(request, timeout_seconds + GRACE_SECONDS)
        except (TypeError, ValueError, RecursionError) as error:
            return {"user_error": f"a row of the data is not plain data: {error}"}
        except TimeoutError:
            response = {"error": f"no answer in {timeout_seconds:g} seconds: its process was ended"}
        except ProcessLost as lost:
            response = {"error": str(lost)}
        for number in self._episodes_of(worker):
            self._failed.setdefault(number, response["error"])
        # Last: `end_episodes` waits for threads of processes that are there.
        self._workers[worker] = None
        return response

    def _start(self, worker: int) -> None:
        if not self.close.alive:
            raise UserError(f"environment {self.spec}: is closed")
        module = "lmforge.post.environments.server"
        what = f"environment {self.spec}"
        self._workers[worker], description = start_server(
            module, self.spec, self._first, what, CLOSING_SECONDS
        )
        self._declarations = {
            name: Declaration(**declared) for name, declared in description.items()
        }

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _close(workers: list[JsonLineProcess | None], threads: Sequence[ThreadPoolExecutor]) -> None:
    """End the processes, even while an environment works."""
    for at, process in enumerate(workers):
        if process is not None:
            process.close()
        workers[at] = None
    for each in threads:
        each.shutdown(wait=False)  # what waits for a process is told that it is closed
