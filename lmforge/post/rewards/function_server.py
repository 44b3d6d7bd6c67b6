"""The process that a file of reward functions runs in. functions.py starts it, sends it requests
and ends it.
"""

import asyncio
import inspect
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import expand_home
from lmforge.core.foreign_code import describe_exception, import_file, supervise
from lmforge.core.options import builtin_names as builtin_names
from lmforge.core.plugins import load_plugins
from lmforge.post.rewards.functions import REGISTERED, RESERVED_NAMES

TEXT_NOT_MESSAGES = (
    "; completions are text here, where TRL's are lists of messages: take completion instead of"
    " completion[0]['content']"
)


def main() -> None:
    """Import the file, send the parameters of its functions or an error, then answer requests until
    the input closes.

    The file, or REGISTERED, is the first argument; the first request names functions by their
    specs. The response to it also says which functions are called together: all async ones, and
    each other one by itself.
    """
    serve_requests(_open_functions)


def serve_requests(
    open_served: Callable[[str, Any], tuple[dict[str, Any], Callable[[Any], Any]]],
    close: Callable[[], None] = lambda: None,
    closing_seconds: float = 0.0,
) -> None:
    """Answer requests, lines of JSON, until the input closes.

    Then all processes that were started here are ended.

    `open_served(first argument, first request)` returns the response to that request, and what
    answers the others. A UserError that it raises is the response {"user_error": …}, and the end.
    When the input closes, `close` has `closing_seconds`; a request that is being answered gets a
    KeyboardInterrupt.
    """
    supervise(closing_seconds)
    # What functions print goes to standard error, and standard input is empty for them. Processes
    # that they start do not inherit these two descriptors, or they would keep the trainer waiting.
    request_fd, responses = os.dup(0), open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    idle = threading.Event()
    threading.Thread(
        target=_listen, args=(request_fd, requests, idle, closing_seconds), daemon=True
    ).start()

    def respond(response: dict[str, Any]) -> None:
        print(json.dumps(response), file=responses, flush=True)

    with suppress(BrokenPipeError, KeyboardInterrupt):
        try:
            description, answer = open_served(sys.argv[1], json.loads(requests.get()))
        except UserError as error:
            idle.set()  # what ends the process is not interrupted
            respond({"user_error": str(error)})
            return
        respond(description)
        while True:
            idle.set()
            request = requests.get()
            if not request:
                break
            idle.clear()
            respond(answer(json.loads(request)))
    close()
    os._exit(0)


def _open_functions(file: str, first: Any) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    names = first["functions"]
    options = first["options"]
    if file == REGISTERED:
        load_plugins(first["plugins"])
        functions = {spec: _get_registered(spec, options.get(spec, "{}")) for spec in names}
    else:
        module = import_file(expand_home(file).resolve(), "reward_functions", "reward")
        functions = {
            spec: RewardFunction(find_function(module, f"reward {spec}", name), spec)
            for spec, name in names.items()
        }
    together = [spec for spec, function in functions.items() if function.is_async]
    call_groups = [[spec] for spec in functions if spec not in together]
    if together:
        call_groups.append(together)
    description = {
        "required_columns": {
            spec: function.required_columns for spec, function in functions.items()
        },
        "accepted_columns": {
            spec: function.accepted_columns for spec, function in functions.items()
        },
        "call_groups": call_groups,
    }
    return description, lambda request: call_functions(
        {spec: functions[spec] for spec in request["functions"]}, request
    )


class RewardFunction:
    """A function, and what it takes by name.

    required_columns: those that it cannot be called without. accepted_columns: those that it is
    given if the data has them, None for all of them.
    """

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        """Raises UserError where it cannot be called with prompts and completions by name."""
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        self._options = getattr(function, "keywords", {})  # which it has been given
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        by_name = [
            each
            for each in parameters
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        self._names = [each.name for each in by_name if each.name not in self._options]
        if not self._takes_all and not {"prompts", "completions"} <= {*self._names}:
            given = "prompts, completions and the data's columns"
            raise UserError(f"reward {spec}: takes {signature}, but is called by name with {given}")
        required = [each.name for each in by_name if each.default is each.empty]
        self.required_columns = [name for name in required if name not in RESERVED_NAMES]
        columns = [name for name in self._names if name not in ("prompts", "completions")]
        self.accepted_columns = None if self._takes_all else columns

    def arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        given = {
            **request["columns"],
            "prompts": request["prompts"],
            "completions": request["completions"],
        }
        names = given.keys() - self._options if self._takes_all else given.keys() & self._names
        given = {name: value for name, value in given.items() if name in names}
        # Only a function that names this parameter gets it: to others, with **columns, it would
        # look like a column.
        if "reward_timeout_seconds" in self._names:
            given["reward_timeout_seconds"] = request["timeout_seconds"]
        return given


def _listen(
    request_fd: int,
    requests: "queue.SimpleQueue[bytes]",
    idle: threading.Event,
    closing_seconds: float,
) -> None:
    """Queue the requests.

    When the input closes, the process ends in `closing_seconds`, even while a function runs.
    """
    with open(request_fd, "rb") as lines:
        for line in lines:
            requests.put(line)
    if closing_seconds:
        requests.put(b"")
        main_thread = threading.main_thread().ident
        if main_thread and not idle.is_set():
            signal.pthread_kill(main_thread, signal.SIGINT)
        time.sleep(closing_seconds)
    os._exit(0)


def _get_registered(name: str, options: str) -> RewardFunction:
    """A function that is registered, with its options where it has some. Raises UserError."""
    entry = registry.get("reward", name)
    function = entry.load()
    if entry.options is None:
        return RewardFunction(function, name)
    if "options" not in inspect.signature(function).parameters:
        raise UserError(
            f"{entry.origin}: reward {name}: has options, but takes {inspect.signature(function)};"
            " add options"
        )
    return RewardFunction(partial(function, options=entry.options(**json.loads(options))), name)


def find_function(module: ModuleType, what: str, name: str, classes: bool = False) -> Any:
    """A public function of a file, or a class where that is asked for.

    Raises UserError, which begins with `what`.
    """

    def fits(value: Any) -> bool:
        return inspect.isfunction(value) or (classes and inspect.isclass(value))

    found = getattr(module, name, None)
    if not fits(found) or name.startswith("_"):
        own = [
            each
            for each in vars(module).values()
            if fits(each) and each.__module__ == module.__name__
        ]
        public = sorted(each.__name__ for each in own if not each.__name__.startswith("_"))
        kind = "class or function" if classes else "function"
        raise UserError(f"{what}: no {kind} {name!r}: there are {', '.join(public) or 'none'}")
    return found


def call_functions(
    functions: dict[str, RewardFunction], request: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """What each function returned, or how it failed.

    Several functions are all async, and wait at the same time.
    """

    def failed(error: BaseException) -> dict[str, Any]:
        response = error_response(error)
        completions = request["completions"]
        if (
            isinstance(error, TypeError)
            and str(error).startswith("string indices must be")
            and isinstance(completions[0], str)
        ):
            response["error"] += TEXT_NOT_MESSAGES
        return response

    async def awaited(each: RewardFunction) -> dict[str, Any]:
        try:
            return _to_response(
                await asyncio.wait_for(
                    each.function(**each.arguments(request)), request["timeout_seconds"]
                )
            )
        except TimeoutError:
            return {"error": f"no answer in {request['timeout_seconds']:g} seconds"}
        except Exception as error:
            return failed(error)

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*map(awaited, functions.values()))

    if all(each.is_async for each in functions.values()):
        return dict(zip(functions, asyncio.run(together()), strict=True))
    [(spec, each)] = functions.items()
    try:
        return {spec: _to_response(each.function(**each.arguments(request)))}
    except BaseException as error:
        # sys.exit() in a reward function is a failure of that function only.
        return {spec: failed(error)}


def _to_response(returned: Any) -> dict[str, Any]:
    """What a function returned, as JSON: a list with Python's numbers for those of numpy and torch,
    or the name of its type.
    """
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return {"rewards": type(returned).__name__}
    return {"rewards": [to_plain_number(reward) for reward in returned]}


def to_plain_number(reward: Any) -> Any:
    if hasattr(reward, "item"):
        reward = reward.item()
    if reward is None or (isinstance(reward, int | float) and math.isfinite(reward)):
        return reward
    return repr(reward)[:100]  # the caller's error message names it


def error_response(error: BaseException) -> dict[str, Any]:
    """The error of a function."""
    if isinstance(error, UserError):
        return {"user_error": str(error)}
    return {"error": describe_exception(error)}
