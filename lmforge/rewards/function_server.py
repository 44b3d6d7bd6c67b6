"""The process that a file of reward functions runs in: started, asked and ended by reward.py."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import math
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lmforge.errors import UserError


def serve() -> None:
    """Import the file, say what is wrong with it or which functions are async, then answer each request until the end."""
    file, asked, answered = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for at in (asked, answered):
        os.set_inheritable(at, False)  # a process that a reward starts does not keep the trainer waiting
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, requests), daemon=True).start()
    named: dict[str, str] = json.loads(requests.get())
    try:
        module = _import_file(file)
        functions = {spec: _get_function(module, spec, name or spec) for spec, name in named.items()}
    except UserError as mistake:
        _send(answered, {"mistake": str(mistake)})
        return
    about = {
        spec: {"async": inspect.iscoroutinefunction(f), "needs": _required_columns(f), "takes": _accepted_columns(f)}
        for spec, f in functions.items()
    }
    _send(answered, about)
    while True:
        request = json.loads(requests.get())
        called = {spec: functions[spec] for spec in request["functions"]}
        _send(answered, _call_functions(called, request))


def _listen(request_fd: int, requests: "queue.SimpleQueue[bytes]") -> None:
    """Hand on what is asked. When nobody asks any more, end at once, whatever a function may be doing."""
    with open(request_fd, "rb") as lines:
        for line in lines:
            requests.put(line)
    os._exit(0)


def _send(response_fd: int, message: object) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(response_fd, line) :]


def _import_file(file: str) -> ModuleType:
    if not file.endswith(".py"):
        return importlib.import_module(file)
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"reward {file}: no such file")
    sys.path.insert(0, str(path.parent))  # so that it finds its neighbours, as a script does
    name = "reward_functions"  # not the file's own, which may be that of a library
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise UserError(f"reward {file}: cannot be imported: {_last_line(error)}") from None
    return module


def _get_function(module: ModuleType, spec: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not inspect.isfunction(function) or name.startswith("_"):
        own = [thing for thing in vars(module).values() if inspect.isfunction(thing) and thing.__module__ == module.__name__]
        there = [function.__name__ for function in own if not function.__name__.startswith("_")]
        raise UserError(f"reward {spec}: no function {name!r}: there are {', '.join(sorted(there)) or 'none'}")
    by_name = {name for name, parameter in _parameters(function).items() if parameter.kind is not parameter.POSITIONAL_ONLY}
    if not {"prompts", "completions"} <= by_name and not _accepts_any_column(function):
        taken = inspect.signature(function)
        raise UserError(f"reward {spec}: takes {taken}, but is called by name with prompts, completions and the data's columns")
    return function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _required_columns(function: Callable[..., Any]) -> list[str]:
    """The columns that a function cannot be called without."""
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in _parameters(function).values() if p.default is p.empty and p.kind not in optional]
    return [name for name in needed if name not in ("prompts", "completions", "reward_timeout_seconds")]


def _accepted_columns(function: Callable[..., Any]) -> list[str] | None:
    """The columns that a function is given where they are there; None for all of them."""
    return (
        None
        if _accepts_any_column(function)
        else [name for name in _parameters(function) if name not in ("prompts", "completions")]
    )


def _accepts_any_column(function: Callable[..., Any]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(function).values())


def _call_functions(functions: dict[str, Callable[..., Any]], request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each function gave or how it failed; several are all async, and wait at the same time."""

    def arguments(function: Callable[..., Any]) -> dict[str, Any]:
        columns = request["columns"]
        if not _accepts_any_column(function):
            columns = {name: column for name, column in columns.items() if name in _parameters(function)}
        # Only who asks for it by name is told of the time: others take whatever they are given for columns.
        told = {"reward_timeout_seconds": request["seconds"]} if "reward_timeout_seconds" in _parameters(function) else {}
        return {**columns, **told, "prompts": request["prompts"], "completions": request["completions"]}

    async def awaited(function: Callable[..., Any]) -> dict[str, Any]:
        try:
            return _to_response(await asyncio.wait_for(function(**arguments(function)), request["seconds"]))
        except TimeoutError:
            return {"problem": f"no answer in {request['seconds']:g} seconds", "kind": "time", "mistake": ""}
        except Exception as error:
            return _error_response(error)

    async def together() -> list[dict[str, Any]]:
        return await asyncio.gather(*(awaited(function) for function in functions.values()))

    if all(map(inspect.iscoroutinefunction, functions.values())):
        return dict(zip(functions, asyncio.run(together()), strict=True))
    [(spec, function)] = functions.items()
    try:
        return {spec: _to_response(function(**arguments(function)))}
    except BaseException as error:  # sys.exit() in a reward ends the reward
        return {spec: _error_response(error)}


def _to_response(returned: Any) -> dict[str, Any]:
    """What a function returned, as JSON: a list, with Python's numbers for those of numpy and torch, or its type's name."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return {"given": type(returned).__name__, "problem": "", "mistake": ""}
    return {"given": [_to_plain_number(reward) for reward in returned], "problem": "", "mistake": ""}


def _to_plain_number(reward: Any) -> Any:
    if hasattr(reward, "item"):
        reward = reward.item()
    if reward is None or (isinstance(reward, int | float) and math.isfinite(reward)):
        return reward
    return repr(reward)[:100]  # what is no number is named where it is refused


def _error_response(error: BaseException) -> dict[str, Any]:
    """What went wrong; its kind is the exception's and the place's, for the words may be others with every batch."""
    if isinstance(error, UserError):
        return {"mistake": str(error)}
    return {"problem": _last_line(error), "kind": f"{type(error).__qualname__}{_error_location(error)}", "mistake": ""}


def _last_line(error: BaseException) -> str:
    """The traceback's last line, and where in the file it was raised."""
    return traceback.format_exception_only(error)[-1].strip() + _error_location(error)


def _error_location(error: BaseException) -> str:
    places = traceback.extract_tb(error.__traceback__)
    return f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
