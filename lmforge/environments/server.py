"""The process that environments run in, each with one episode after another. process.py starts it and sends it requests."""

import inspect
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lmforge import registry
from lmforge.config import builtin_names as builtin_names
from lmforge.environments.environment import Environment, Reply, ToolEnvironment
from lmforge.errors import UserError, prefix_errors
from lmforge.foreign_code import describe_exception, import_file
from lmforge.plugins import load_plugins
from lmforge.rewards.function_server import (
    RewardFunction,
    call_functions,
    error_response,
    find_function,
    serve_requests,
    to_plain_number,
)
from lmforge.untrusted import expand_home


class _TooLong(BaseException):
    """The time of a call is over. Not an Exception, which an environment may catch."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupts what runs longer, unless it is in code that Python cannot interrupt."""

    def interrupt(number: int, frame: object) -> None:
        raise _TooLong

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class _Episodes:
    """The environments of a process, by the number of their episode."""

    def __init__(self, build: Callable[[], Environment], timeout_seconds: float, functions: dict[str, RewardFunction]) -> None:
        self._build, self._timeout_seconds, self._functions = build, timeout_seconds, functions
        self._environments: dict[int, Environment] = {}
        self._rewards: dict[int, list[float]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a request. An environment that fails is left."""
        if request["call"] == "functions":
            return self._call_functions(request)
        try:
            with _time_limit(self._timeout_seconds):
                return {"reset": self._reset, "step": self._step, "reward": self._reward}[request["call"]](request)
        except _TooLong:
            response = {"error": f"no answer in {self._timeout_seconds:g} seconds", "error_type": "timeout"}
        except BaseException as error:  # sys.exit() in a tool is a failure of its episode only
            response = error_response(error)
        self._environments.pop(request["episode"], None)
        return response

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        # An instance serves one episode after another, as in TRL.
        environment = self._environments.pop(request["episode"], None) or self._build()
        messages = _checked(environment.reset(**request["row"]))
        self._environments[request["episode"]], self._rewards[request["episode"]] = environment, []
        return {"messages": messages}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._environments[request["episode"]].step(request["message"])
        if not isinstance(reply, Reply):
            raise TypeError(f"step returned {type(reply).__name__}, not a Reply")
        if reply.reward is not None:
            self._rewards[request["episode"]].append(float(reply.reward))
        messages = _checked(reply.messages)
        return {"messages": messages, "done": bool(reply.done or not messages)}

    def _reward(self, request: dict[str, Any]) -> dict[str, Any]:
        environment, given = self._environments[request["episode"]], self._rewards[request["episode"]]
        if isinstance(environment, ToolEnvironment):
            return {"reward": to_plain_number(environment.get_reward())}
        return {"reward": math.fsum(given) if given else None}

    def _call_functions(self, request: dict[str, Any]) -> dict[str, Any]:
        environments = [self._environments[number] for number in request["episodes"]]
        given = [each.instance if isinstance(each, ToolEnvironment) else each for each in environments]
        request["columns"]["environments"] = given
        return call_functions({spec: self._functions[spec] for spec in request["functions"]}, request)


def main() -> None:
    """Open the environment that the first argument names, say what it has, then answer requests until the input closes."""
    serve_requests(_open_environment)


def _open_environment(spec: str, first: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    file, _, name = spec.rpartition(":")
    if file:
        module = import_file(expand_home(file).resolve(), "environment", "environment")
        found = find_function(module, f"environment {spec}", name, classes=True)
    else:
        load_plugins(first["plugins"])
        found = registry.get("environment", spec).load()
    functions = {}
    for reward, (reward_file, function) in first["functions"].items():
        path = expand_home(reward_file).resolve()
        # Of one file with the environment: what is in it is there once.
        imported = module if file and path == expand_home(file).resolve() else import_file(path, "reward_functions", "reward")
        functions[reward] = RewardFunction(find_function(imported, f"reward {reward}", function), reward)
    with prefix_errors(f"environment {spec}"), _time_limit(first["timeout_seconds"]):
        try:
            environment = _build(found)
            description = _describe(environment, getattr(found, "__name__", spec))
        except _TooLong:
            raise UserError(f"not made in {first['timeout_seconds']:g} seconds") from None
        except UserError:
            raise
        except BaseException as error:
            raise UserError(describe_exception(error)) from None
    return description, _Episodes(partial(_build, found), first["timeout_seconds"], functions).answer


def _build(found: Any) -> Environment:
    if not inspect.isclass(found):
        return ToolEnvironment([found])
    instance = found()
    return instance if isinstance(instance, Environment) else ToolEnvironment.of_instance(instance)


def _describe(environment: Environment, name: str) -> dict[str, Any]:
    """What an environment declares. Raises UserError, which names the field, where it is not as Environment says."""
    roles, declared = environment.reply_roles, environment.tools
    if not isinstance(roles, list | tuple) or not roles or not {*map(str, roles)} <= {"tool", "user"}:
        raise UserError(f'{name}.reply_roles: expected a list of "tool", "user" or both, got {roles!r:.100}')
    if not isinstance(declared, list | tuple):
        raise UserError(f"{name}.tools: expected a list of functions and schemas, got {declared!r:.100}")
    if wrong := [tool for tool in declared if not (callable(tool) or isinstance(tool, dict))]:
        raise UserError(f"{name}.tools: expected functions and schemas, got {wrong[0]!r:.100}")
    tools = environment.tool_schemas()
    names = list[str]()
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": …}}'
            raise UserError(f"{name}.tools: expected schemas {form}, got {tool!r:.100}")
        try:
            json.dumps(tool)
        except (TypeError, ValueError, RecursionError) as problem:
            raise UserError(f"{name}.tools: the schema of {function['name']} is not JSON: {problem}") from None
        names.append(function["name"])
    if len(set(names)) < len(names):
        raise UserError(f"{name}.tools: two tools have one name: {', '.join(names)}")
    return {"tools": tools, "reply_roles": list(roles), "gives_rewards": bool(environment.gives_rewards)}


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Messages of an environment. Raises TypeError for what is none."""
    checked = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(f"expected messages, each with role and content, got {message!r:.100}")
        checked.append(message)
    json.dumps(checked)
    return checked
