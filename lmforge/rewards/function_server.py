"""The process that a file of reward functions runs in. functions.py starts it, sends it requests and ends it."""

import asyncio
import inspect
import json
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from lmforge import registry
from lmforge.config import builtin_names as builtin_names
from lmforge.errors import UserError
from lmforge.foreign_code import describe_exception, error_location, import_file
from lmforge.plugins import load_plugins
from lmforge.rewards.functions import REGISTERED, RESERVED_NAMES
from lmforge.untrusted import expand_home


def main() -> None:
    """Import the file, send the parameters of its functions or an error, then answer requests until the input closes.

    The file, or REGISTERED, is the first argument; the first request names functions by their specs. The response to it also
    says which functions are called together: all async ones, and each other one by itself.
    """
    # What functions print goes to standard error, and standard input is empty for them. Processes that they start do not
    # inherit these two descriptors, or they would keep the trainer waiting.
    request_fd, responses = os.dup(0), open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115 (open as long as the process)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(request_fd, requests), daemon=True).start()
    file, first = sys.argv[1], json.loads(requests.get())
    names, options = first["functions"], first["options"]
    try:
        if file == REGISTERED:
            load_plugins(first["plugins"])
            functions = {spec: _get_registered(spec, options.get(spec, "{}")) for spec in names}
        else:
            module = import_file(expand_home(file).resolve(), "reward_functions", "reward")
            functions = {spec: _get_function(module, spec, name) for spec, name in names.items()}
    except UserError as error:
        print(json.dumps({"user_error": str(error)}), file=responses, flush=True)
        return
    together = [spec for spec, function in functions.items() if inspect.iscoroutinefunction(function)]
    description = {
        "required_columns": {spec: _required_columns(function) for spec, function in functions.items()},
        "accepted_columns": {spec: _accepted_columns(function) for spec, function in functions.items()},
        "call_groups": [[spec] for spec in functions if spec not in together] + ([together] if together else []),
    }
    print(json.dumps(description), file=responses, flush=True)
    while True:
        request = json.loads(requests.get())
        results = _call_functions({spec: functions[spec] for spec in request["functions"]}, request)
        print(json.dumps(results), file=responses, flush=True)


def _listen(request_fd: int, requests: "queue.SimpleQueue[bytes]") -> None:
    """Queue the requests. When the input closes, end at once, even while a function runs."""
    with open(request_fd, "rb") as lines:
        for line in lines:
            requests.put(line)
    os._exit(0)


def _get_registered(name: str, options: str) -> Callable[..., Any]:
    """A function that is registered, with its options where it has some. Raises UserError."""
    entry = registry.get("reward", name)
    function = _checked(entry.load(), name)
    if entry.options is None:
        return function
    if "options" not in _parameters(function):
        raise UserError(f"{entry.origin}: reward {name}: has options, but takes {inspect.signature(function)}; add options")
    return partial(function, options=entry.options(**json.loads(options)))


def _get_function(module: ModuleType, spec: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not inspect.isfunction(function) or name.startswith("_"):
        own = [each for each in vars(module).values() if inspect.isfunction(each) and each.__module__ == module.__name__]
        public = sorted(each.__name__ for each in own if not each.__name__.startswith("_"))
        raise UserError(f"reward {spec}: no function {name!r}: there are {', '.join(public) or 'none'}")
    return _checked(function, spec)


def _checked(function: Callable[..., Any], spec: str) -> Callable[..., Any]:
    by_name = {name for name, parameter in _parameters(function).items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    if not {"prompts", "completions"} <= by_name and not _accepts_any_column(function):
        given = "prompts, completions and the data's columns"
        raise UserError(f"reward {spec}: takes {inspect.signature(function)}, but is called by name with {given}")
    return function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _required_columns(function: Callable[..., Any]) -> list[str]:
    """The columns that a function cannot be called without."""
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [p.name for p in _parameters(function).values() if p.default is p.empty and p.kind not in optional]
    return [name for name in required if name not in RESERVED_NAMES]


def _accepted_columns(function: Callable[..., Any]) -> list[str] | None:
    """The columns that a function is given if the data has them; None for all of them."""
    if _accepts_any_column(function):
        return None
    not_columns = ("prompts", "completions", *getattr(function, "keywords", ()))
    return [name for name in _parameters(function) if name not in not_columns]


def _accepts_any_column(function: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(function).values())


def _call_functions(functions: dict[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each function returned, or how it failed. Several functions are all async, and wait at the same time."""

    def arguments(function: Callable[..., Any]) -> dict[str, Any]:
        given = {**request["columns"], "prompts": request["prompts"], "completions": request["completions"]}
        given = {name: value for name, value in given.items() if name not in getattr(function, "keywords", ())}
        if not _accepts_any_column(function):
            given = {name: given[name] for name in _parameters(function) if name in given}
        # Only a function that names this parameter gets it: to others, with **columns, it would look like a column.
        if "reward_timeout_seconds" in _parameters(function):
            given["reward_timeout_seconds"] = request["timeout_seconds"]
        return given

    async def awaited(function: Callable[..., Any]) -> dict[str, Any]:
        try:
            return _to_response(await asyncio.wait_for(function(**arguments(function)), request["timeout_seconds"]))
        except TimeoutError:
            return {"error": f"no answer in {request['timeout_seconds']:g} seconds", "error_type": "timeout"}
        except Exception as error:
            return _error_response(error)

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(awaited(function) for function in functions.values()))

    if all(map(inspect.iscoroutinefunction, functions.values())):
        return dict(zip(functions, asyncio.run(together()), strict=True))
    [(spec, function)] = functions.items()
    try:
        return {spec: _to_response(function(**arguments(function)))}
    except BaseException as error:  # sys.exit() in a reward function is a failure of that function only
        return {spec: _error_response(error)}


def _to_response(returned: Any) -> dict[str, Any]:
    """What a function returned, as JSON: a list with Python's numbers for those of numpy and torch, or the name of its type."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return {"rewards": type(returned).__name__}
    return {"rewards": [_to_plain_number(reward) for reward in returned]}


def _to_plain_number(reward: Any) -> Any:
    if hasattr(reward, "item"):
        reward = reward.item()
    if reward is None or (isinstance(reward, int | float) and math.isfinite(reward)):
        return reward
    return repr(reward)[:100]  # the caller's error message names it


def _error_response(error: BaseException) -> dict[str, Any]:
    """The error of a function. Its type is its class and location, since the message may differ with every batch."""
    if isinstance(error, UserError):
        return {"user_error": str(error)}
    return {"error": describe_exception(error), "error_type": f"{type(error).__qualname__}{error_location(error)}"}
