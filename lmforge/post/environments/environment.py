"""What an environment is: first messages, tools, and what it answers to each message of the
assistant.

A class of the user's derives from `Environment`, or is one of TRL's `environment_factory`:
`reset(**row)`, and public methods that are tools. A function with type hints and a docstring is an
environment of one tool.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from lmforge.core.errors import UserError
from lmforge.post.environments.tool_schema import tool_schema

# A turn, as lmforge.text.chat.messages has it.
Message = dict[str, Any]

# Methods of TRL's classes that are not tools.
RESERVED_METHODS = ("reset", "get_reward", "close")


class WrongReturn(TypeError):
    """What a method of an environment returned, against its contract."""


class Reply(NamedTuple):
    """What an environment answers: the next messages, a reward for the answer, and whether this was
    the end.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False


class Environment:
    """A task of several turns.

    One instance has one episode at a time, and one after another, each begun by `reset`. With a
    `close` of its own it has one episode only.

    tools: functions, or schemas as OpenAI's API has them, that the model is offered. reply_roles:
    of the messages that `step` answers, "tool" or "user". begins_early: whether `begin` is called.
    The reward of an episode is the sum of those of its replies, or what `get_reward` says.
    """

    tools: ClassVar[Sequence[Callable[..., Any] | dict[str, Any]]] = ()
    reply_roles: ClassVar[Sequence[str]] = ("tool", "user")
    gives_rewards: bool = True
    begins_early: ClassVar[bool] = False
    failed_calls = 0  # of the last step, for a metric

    def begin(self, call: str, given: dict[str, Any]) -> None:
        """Begin what takes long in a call of `reset`, `step` or `reward`, without waiting, so that
        episodes wait at the same time: their calls follow one after the other. `given`: the row or
        the message.
        """

    def reset(self, **row: Any) -> Sequence[Message]:
        """Begin an episode with a row of the data: its columns, and `prompt`, messages.

        Returns the first messages.
        """
        return list(row["prompt"])

    def step(self, message: Message) -> Reply:
        """Answer a message of the assistant, with its `tool_calls` if it has some.

        Calls that could not be read are content.
        """
        raise NotImplementedError

    def get_reward(self) -> Any:
        """The reward of the episode at its end, which may come early; None if it is the sum of
        those of its replies.
        """
        return None

    def close(self) -> None:
        """End what the instance has opened.

        It is called at the end of its episode, of one that failed too.
        """

    @property
    def has_close(self) -> bool:
        """Whether there is something to close, after which the instance is not used again."""
        return type(self).close is not Environment.close

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools that the model is shown. Raises UserError where a function has no schema."""
        return [tool if isinstance(tool, dict) else tool_schema(tool) for tool in self.tools]


class ToolEnvironment(Environment):
    """Tools that are called as the model asks, until an answer calls none.

    The reward is `get_reward()` where there is one.
    """

    reply_roles = ("tool",)

    def __init__(self, functions: Sequence[Callable[..., Any]], instance: Any = None) -> None:
        """`instance`: of a class as TRL's, which the functions are methods of.

        Raises UserError where it has no reset.
        """
        self.instance = instance
        self._functions = {function.__name__: function for function in functions}
        self.gives_rewards = hasattr(instance, "get_reward")

    @classmethod
    def of_instance(cls, instance: Any) -> "ToolEnvironment":
        """The environment of an instance of a class as TRL's. Raises UserError where it is none."""
        methods = inspect.getmembers(type(instance), inspect.isfunction)
        if "reset" not in dict(methods):
            raise UserError("has no method reset(**row), which begins an episode")
        names = [name for name, _ in methods if name not in RESERVED_METHODS and not name.startswith("_")]
        return cls([getattr(instance, name) for name in names], instance)

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [tool_schema(function) for function in self._functions.values()]

    def reset(self, **row: Any) -> Sequence[Message]:
        """The messages of the row's prompt; text that the instance's `reset` returns ends the last
        of them, as in TRL.
        """
        messages = list(row["prompt"])
        observation = None if self.instance is None else _call_with_columns(self.instance.reset, row)
        if observation is not None and not isinstance(observation, str):
            raise WrongReturn(f"reset returned {type(observation).__name__}, not text or None")
        if observation:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
        return messages

    def step(self, message: Message) -> Reply:
        calls = message.get("tool_calls", [])
        results = [self._run(call["function"]) for call in calls]
        if later := [result for result in results if inspect.iscoroutine(result)]:
            returned = iter(asyncio.run(_all(later)))
            results = [next(returned) if inspect.iscoroutine(result) else result for result in results]
        self.failed_calls = sum(isinstance(result, _Failure) for result in results)
        return Reply([tool_message(call, str(result)) for call, result in zip(calls, results, strict=True)], done=not calls)

    def _run(self, call: dict[str, Any]) -> Any:
        """What a call returned, its error, or the coroutine of an async function."""
        try:
            if call["name"] not in self._functions:
                raise ValueError(f"Tool {call['name']} not found.")
            result = self._functions[call["name"]](**call["arguments"])
        except Exception as error:
            return _Failure(error=str(error))
        return result

    def get_reward(self) -> Any:
        reward = self.instance.get_reward() if self.gives_rewards else None
        return asyncio.run(reward) if inspect.iscoroutine(reward) else reward

    @property
    def has_close(self) -> bool:
        return callable(getattr(self.instance, "close", None))

    def close(self) -> None:
        if inspect.iscoroutine(closing := self.instance.close()):
            asyncio.run(closing)


class _Failure(dict[str, str]):
    """What is returned for a call that raised an exception, as in TRL: {"error": …}."""


def tool_message(call: Message, content: str) -> Message:
    """What a tool returned to a call."""
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    returned = await asyncio.gather(*coroutines, return_exceptions=True)
    return [_Failure(error=str(each)) if isinstance(each, Exception) else each for each in returned]


def _call_with_columns(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    """Call it with the row's columns that it names, all if it takes **row."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return function(**row)
    return function(**{each.name: row[each.name] for each in parameters if each.name in row})
