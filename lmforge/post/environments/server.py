"""The process that environments run in, each with one episode after another. process.py starts it
and sends it requests.
"""

import atexit
import inspect
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any

from lmforge.core import registry
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.files.untrusted import expand_home
from lmforge.core.foreign_code import describe_exception, import_file
from lmforge.core.options import builtin_names as builtin_names
from lmforge.core.plugins import load_plugins
from lmforge.post.environments.environment import Environment, Reply, ToolEnvironment, WrongReturn
from lmforge.post.environments.process import CLOSING_SECONDS, adapted, split_spec
from lmforge.post.rewards.function_server import (
    RewardFunction,
    call_functions,
    error_response,
    find_function,
    serve_requests,
    to_plain_number,
)


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
        self._names: dict[int, str] = {}
        # By the name of an environment, instances for further episodes.
        self._idle: dict[str, list[Environment]] = {}

    def open(self, spec: str, first: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        """What the environment declares, and what answers requests. Raises UserError."""
        file, name = split_spec(spec)
        self._spec = spec
        self._timeout_seconds = first["timeout_seconds"]
        self._file = file
        self._module = None
        if file:
            self._module = import_file(expand_home(file).resolve(), "environment", "environment")
            found = _find_environments(self._module, spec, name)
        elif another := adapted(spec):
            module_name, _, class_name = another[0].partition(":")
            found = partial(getattr(import_module(module_name), class_name), another[1])
        else:
            load_plugins(first["plugins"])
            found = registry.get("environment", spec).load()
        # As in TRL: of several, the column `environment` says whose an episode is.
        self._found: dict[str, Any] = found if isinstance(found, dict) else {"": found}
        self._functions = self._import_functions(first["functions"])
        declarations = {}
        for name, each in self._found.items():
            with (
                prefix_errors(f"environment {spec}{name and f': {name}'}"),
                _time_limit(self._timeout_seconds),
            ):
                try:
                    environment = _build(each)
                    self._idle[name] = [environment]
                    declarations[name] = _describe(environment, getattr(each, "__name__", spec))
                except _TooLong:
                    raise UserError(f"not made in {self._timeout_seconds:g} seconds") from None
                except UserError:
                    raise
                except BaseException as error:
                    raise UserError(describe_exception(error)) from None
        return declarations, self.answer

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a request. An environment that fails is left."""
        calls = {"reset": self._reset, "step": self._step, "reward": self._reward, "end": self._end}
        try:
            if request["call"] == "functions":  # which have a time of their own
                return self._call_functions(request)
            if request["call"] == "import":
                self._functions |= self._import_functions(request["functions"])
                return {}
            if request["call"] == "begin":
                self._begin(request["requests"])
                return {}
            with _time_limit(request["seconds"]):
                return calls[request["call"]](request)
        except _TooLong:
            response = {"error": f"no answer in {self._timeout_seconds:g} seconds"}
        except WrongReturn as error:
            response = {"error": str(error)}
        except BaseException as error:  # sys.exit() in a tool is a failure of its episode only
            response = error_response(error)
        if "episode" in request:
            self._close(self._environments.pop(request["episode"], None))
        return response

    def close(self) -> None:
        """End what all environments have opened."""
        for environment in (
            *self._environments.values(),
            *chain.from_iterable(self._idle.values()),
        ):
            self._close(environment)
        atexit._run_exitfuncs()  # the process ends without them

    def _close(self, environment: Environment | None) -> None:
        if environment is not None and environment.has_close:
            try:
                with _time_limit(self._timeout_seconds):
                    environment.close()
            except BaseException as error:
                reason = (
                    "takes too long" if isinstance(error, _TooLong) else describe_exception(error)
                )
                print(
                    f"environment {self._spec}: close fails: {reason}", file=sys.stderr, flush=True
                )

    def _begin(self, requests: Sequence[dict[str, Any]]) -> None:
        """Begin calls that follow, while there is time; those that fail, fail then."""
        with suppress(_TooLong), _time_limit(self._timeout_seconds):
            for request in requests:
                with suppress(Exception):
                    environment = self._environment(request)
                    environment.begin(
                        request["call"], request.get("row") or request.get("message") or {}
                    )

    def _environment(self, request: dict[str, Any]) -> Environment:
        """The environment of an episode; an instance serves one episode after another, as in TRL."""
        number = request["episode"]
        if number not in self._environments:
            name = "" if "" in self._found else request["row"]["environment"]
            idle = self._idle[name]
            self._environments[number] = idle.pop(0) if idle else _build(self._found[name])
            self._names[number] = name
            self._rewards[number] = []
        return self._environments[number]

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._environment(request)
        row = request["row"]
        if "" not in self._found:
            del row["environment"]
        messages = _checked(environment.reset(**row), "reset")
        if not messages:
            raise WrongReturn("reset returned no messages")
        return {"messages": messages}

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._environments[request["episode"]]
        reply = environment.step(request["message"])
        if not isinstance(reply, Reply):
            raise WrongReturn(f"step returned {type(reply).__name__}, not a Reply")
        if reply.reward is not None:
            self._rewards[request["episode"]].append(_checked_reward(reply.reward, "step"))
        messages = _checked(reply.messages, "step")
        done = bool(reply.done or not messages)
        return {"messages": messages, "done": done, "failed_calls": int(environment.failed_calls)}

    def _reward(self, request: dict[str, Any]) -> dict[str, Any]:
        environment = self._environments[request["episode"]]
        given = self._rewards[request["episode"]]
        if (reward := environment.get_reward()) is not None:
            return {"reward": _checked_reward(reward, "get_reward")}
        return {"reward": math.fsum(given) if given else None}

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        if environment := self._environments.pop(request["episode"], None):
            if environment.has_close:
                self._close(environment)
            else:
                self._idle[self._names[request["episode"]]].append(environment)
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
        given = [
            each.instance if isinstance(each, ToolEnvironment) else each for each in environments
        ]
        request["columns"]["environments"] = given
        return call_functions(
            {spec: self._functions[spec] for spec in request["functions"]}, request
        )


def main() -> None:
    """Open the environment that the first argument names, say what it has, then answer requests
    until the input closes.
    """
    episodes = _Episodes()
    serve_requests(episodes.open, episodes.close, CLOSING_SECONDS)


def _find_environments(module: ModuleType, spec: str, name: str) -> Any:
    """A class or function of a file, or a dict of several by their names. Raises UserError."""
    found = vars(module).get(name)
    if not isinstance(found, dict):
        return find_function(module, f"environment {spec}", name, classes=True)
    if not found or not all(
        isinstance(key, str) and key and callable(each) for key, each in found.items()
    ):
        raise UserError(
            f"environment {spec}: expected a dict of names and classes or functions, got"
            f" {found!r:.100}"
        )
    return found


def _build(found: Any) -> Environment:
    if inspect.isfunction(found):
        return ToolEnvironment([found])
    instance = found()
    return instance if isinstance(instance, Environment) else ToolEnvironment.of_instance(instance)


def _describe(environment: Environment, name: str) -> dict[str, Any]:
    """What an environment declares.

    Raises UserError, which names the field, where it is not as Environment says.
    """
    roles = environment.reply_roles
    declared = environment.tools
    if (
        not isinstance(roles, list | tuple)
        or not roles
        or not {*map(str, roles)} <= {"tool", "user"}
    ):
        raise UserError(
            f'{name}.reply_roles: expected a list of "tool", "user" or both, got {roles!r:.100}'
        )
    if not isinstance(declared, list | tuple):
        raise UserError(
            f"{name}.tools: expected a list of functions and schemas, got {declared!r:.100}"
        )
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
            raise UserError(
                f"{name}.tools: the schema of {function['name']} is not JSON: {problem}"
            ) from None
        names.append(function["name"])
    if len(set(names)) < len(names):
        raise UserError(f"{name}.tools: two tools have one name: {', '.join(names)}")
    return {
        "tools": tools,
        "reply_roles": list(roles),
        **{name: bool(getattr(environment, name)) for name in ("gives_rewards", "begins_early")},
    }


def _checked(messages: Any, method: str) -> list[dict[str, Any]]:
    """Messages of an environment. Raises WrongReturn for what is none."""
    if not isinstance(messages, list | tuple):
        raise WrongReturn(f"{method} returned {type(messages).__name__}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongReturn(
                f"{method} returned {message!r:.100}, not a message with role and content"
            )
    json.dumps(messages)
    return list(messages)


def _checked_reward(reward: Any, method: str) -> float:
    """Raises WrongReturn for what is no finite number."""
    if not isinstance(plain := to_plain_number(reward), int | float):
        raise WrongReturn(f"{method} returned the reward {plain}, not a finite number")
    return float(plain)
