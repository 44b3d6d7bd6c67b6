"""The process that environments run in, each with one episode after another. process.py starts it and sends it requests."""

import inspect
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lmforge import registry
from lmforge.config import builtin_names as builtin_names
from lmforge.environments.environment import Environment, Reply, ToolEnvironment, WrongReturn
from lmforge.environments.process import CLOSING_SECONDS
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

    def __init__(self) -> None:
        self._environments: dict[int, Environment] = {}
        self._rewards: dict[int, list[float]] = {}
        self._spare: Environment | None = None  # that the declaration was read from: the first episode's

    def open(self, spec: str, first: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """What the environment declares, and what answers requests. Raises UserError."""
        file, _, name = spec.rpartition(":")
        self._spec, self._timeout_seconds, self._file, self._module = spec, first["timeout_seconds"], file, None
        if file:
            self._module = import_file(expand_home(file).resolve(), "environment", "environment")
            found = find_function(self._module, f"environment {spec}", name, classes=True)
        else:
            load_plugins(first["plugins"])
            found = registry.get("environment", spec).load()
        self._functions = self._import_functions(first["functions"])
        self._build = partial(_build, found)
        with prefix_errors(f"environment {spec}"), _time_limit(self._timeout_seconds):
            try:
                self._spare = self._build()
                return _describe(self._spare, getattr(found, "__name__", spec)), self.answer
            except _TooLong:
                raise UserError(f"not made in {self._timeout_seconds:g} seconds") from None
            except UserError:
                raise
            except BaseException as error:
                raise UserError(describe_exception(error)) from None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a request. An environment that fails is left."""
        calls = {"reset": self._reset, "step": self._step, "reward": self._reward, "end": self._end}
        try:
            if request["call"] == "functions":  # which have a time of their own
                return self._call_functions(request)
            if request["call"] == "import":
                self._functions |= self._import_functions(request["functions"])
                return {}
            with _time_limit(self._timeout_seconds):
                return calls[request["call"]](request)
        except _TooLong:
            response = {"error": f"no answer in {self._timeout_seconds:g} seconds", "error_type": "timeout"}
        except WrongReturn as error:
            response = {"error": str(error), "error_type": "wrong return"}
        except BaseException as error:  # sys.exit() in a tool is a failure of its episode only
            response = error_response(error)
        if "episode" in request:
            self._close(self._environments.pop(request["episode"], None))
        return response

    def close(self) -> None:
        """End what all environments have opened."""
        for environment in [self._spare, *self._environments.values()]:
            self._close(environment)

    def _close(self, environment: Environment | None) -> None:
        if environment is not None and environment.has_close:
            try:
                with _time_limit(self._timeout_seconds):
                    environment.close()
            except BaseException as error:
                reason = "takes too long" if isinstance(error, _TooLong) else describe_exception(error)
                print(f"environment {self._spec}: close fails: {reason}", file=sys.stderr, flush=True)

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        number, spare = request["episode"], self._spare
        # An instance serves one episode after another, as in TRL.
        self._environments[number] = environment = self._environments.pop(number, None) or spare or self._build()
        self._spare = None if environment is spare else spare
        messages = _checked(environment.reset(**request["row"]), "reset")
        if not messages:
            raise WrongReturn("reset returned no messages")
        self._rewards[number] = []
        return {"messages": messages}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._environments[request["episode"]].step(request["message"])
        if not isinstance(reply, Reply):
            raise WrongReturn(f"step returned {type(reply).__name__}, not a Reply")
        if reply.reward is not None:
            self._rewards[request["episode"]].append(_checked_reward(reply.reward, "step"))
        messages = _checked(reply.messages, "step")
        return {"messages": messages, "done": bool(reply.done or not messages)}

    def _reward(self, request: dict[str, Any]) -> dict[str, Any]:
        environment, given = self._environments[request["episode"]], self._rewards[request["episode"]]
        if isinstance(environment, ToolEnvironment):
            reward = environment.get_reward()
            return {"reward": None if reward is None else _checked_reward(reward, "get_reward")}
        return {"reward": math.fsum(given) if given else None}

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        if (environment := self._environments.get(request["episode"])) and environment.has_close:
            self._close(self._environments.pop(request["episode"]))
        return {}

    def _import_functions(self, functions: dict[str, tuple[str, str]]) -> dict[str, RewardFunction]:
        imported = {}
        for spec, (file, name) in functions.items():
            path = expand_home(file).resolve()
            # Of one file with the environment: what is in it is there once.
            shared = self._module is not None and path == expand_home(self._file).resolve()
            module = self._module if shared else import_file(path, "reward_functions", "reward")
            assert module is not None
            imported[spec] = RewardFunction(find_function(module, f"reward {spec}", name), spec)
        return imported

    def _call_functions(self, request: dict[str, Any]) -> dict[str, Any]:
        environments = [self._environments[number] for number in request["episodes"]]
        given = [each.instance if isinstance(each, ToolEnvironment) else each for each in environments]
        request["columns"]["environments"] = given
        return call_functions({spec: self._functions[spec] for spec in request["functions"]}, request)


def main() -> None:
    """Open the environment that the first argument names, say what it has, then answer requests until the input closes."""
    episodes = _Episodes()
    serve_requests(episodes.open, episodes.close, CLOSING_SECONDS)


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


def _checked(messages: Any, method: str) -> list[dict[str, Any]]:
    """Messages of an environment. Raises WrongReturn for what is none."""
    if not isinstance(messages, list | tuple):
        raise WrongReturn(f"{method} returned {type(messages).__name__}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongReturn(f"{method} returned {message!r:.100}, not a message with role and content")
    json.dumps(messages)
    return list(messages)


def _checked_reward(reward: Any, method: str) -> float:
    """Raises WrongReturn for what is no finite number."""
    if not isinstance(plain := to_plain_number(reward), int | float):
        raise WrongReturn(f"{method} returned the reward {plain}, not a finite number")
    return float(plain)
