"""Environments of the package `verifiers` (from 0.4, its `verifiers.v1`): `verifiers:TASKSET`, or
`verifiers:FILE.toml`, a file with the table [env] of its own configurations.

There a harness, which may be a program, asks a model at an OpenAI endpoint and runs the tools. That
endpoint is here: what a harness asks is what `reset` and `step` answer, and its response is held
back until the next `step` brings the model's answer.
"""

import asyncio
import atexit
import json
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, list_names
from lmforge.post.environments.environment import Environment, Message, Reply, WrongReturn
from lmforge.post.environments.openai_messages import completion_of, read_message
from lmforge.post.environments.verifiers_loading import load

# What every harness is told that the policy's name is.
MODEL = "policy"
ROUTE = "/v1/chat/completions"
# Harnesses that append what tools return, and nothing else.
TOOL_LOOPS = {"null", "bash"}
CLOSING_SECONDS = 4.0


class _Asked(NamedTuple):
    """A request of a harness, which waits for a message of the assistant; None ends its rollout."""

    conversation: str
    body: dict[str, Any]
    response: asyncio.Future[Message | None]

    def answer(self, message: Message | None) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self.response.get_loop().call_soon_threadsafe(_set_result, self.response, message)


class _Ended(NamedTuple):
    """A rollout is over: the reward of the one that asked, and how many answers its harness got; or
    why it failed.
    """

    reward: float
    heard: int = 0
    error: str = ""


class _Host:
    """An environment of verifiers and the endpoint for its harnesses, in an event loop of a thread:
    one in a process.

    tools: schemas that the harness offered for the first task.
    """

    def __init__(self, address: str) -> None:
        """Raises UserError where there is no such environment, or its harness does not ask for a
        first answer.
        """
        self.env = load(address)
        self._tasks = iter(self.env.taskset)
        self._loaded = list[Any]()
        self._problem: BaseException | None = None
        # By the id of a trace, which verifiers sends with each request.
        self.rollouts: dict[str, _Rollout] = {}
        self.loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        opened = Future[int]()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(opened), self.loop)
        self.url = f"http://127.0.0.1:{opened.result()}/v1"
        atexit.register(self.close)
        self.tools = self._first_tools()
        from verifiers.v1 import SingleAgentEnv

        harnesses = {config.id for config in self.env.config.agent_harnesses().values()}
        self.reply_roles = (
            ("tool",)
            if isinstance(self.env, SingleAgentEnv) and harnesses <= TOOL_LOOPS
            else ("tool", "user")
        )

    def _first_tools(self) -> list[dict[str, Any]]:
        rollout = _Rollout(self, self.task({"idx": 0}))
        try:
            return list(rollout.wait_first().body.get("tools") or [])
        except WrongReturn as problem:
            raise UserError(f"the first task: {problem}") from None
        finally:
            rollout.close()

    async def _serve(self, opened: Future[int]) -> None:
        """Hold the environment and the endpoint open; `opened` gets the port."""
        from aiohttp import web

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(ROUTE, self._complete)
        app.router.add_post("/{other:.*}", self._refuse)
        runner = web.AppRunner(app)
        try:
            async with self.env.serving():
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                opened.set_result(runner.addresses[0][1])
                await self._closing.wait()
        except Exception as problem:
            if opened.done():
                raise
            opened.set_exception(problem)
        finally:
            await runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        """Answer a harness when the model has."""
        from aiohttp import web
        from verifiers.v1.clients.client import SESSION_ID_HEADER

        body = await request.json()
        conversation = request.headers.get(SESSION_ID_HEADER, "")
        message = None
        rollout = self.rollouts.get(conversation)
        if rollout is not None:
            message = await rollout.ask(conversation, body)
        if message is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=400)
        if not body.get("stream"):
            return web.json_response(completion_of(message, MODEL, streamed=False))
        events = (
            f"data: {json.dumps(completion_of(message, MODEL, streamed=True))}\n\ndata: [DONE]\n\n"
        )
        return web.Response(text=events, content_type="text/event-stream")

    async def _refuse(self, request: Any) -> Any:
        from aiohttp import web

        return web.Response(
            status=404, text=f"harnesses are answered at {ROUTE} here, not at {cut(request.path)}"
        )

    def task(self, row: dict[str, Any]) -> Any:
        """The task of the taskset that a row names in its column `idx`.

        Raises WrongReturn where there is none.
        """
        index = row.get("idx")
        if not isinstance(index, int) or index < 0:
            raise WrongReturn(
                "column idx: expected the number of a task in the taskset, from 0, got"
                f" {cut(repr(index))}"
            )
        while len(self._loaded) <= index:
            if self._problem is not None:
                raise self._problem
            try:
                self._loaded.append(next(self._tasks))
            except StopIteration:
                count = f"{len(self._loaded)} task{'s' if len(self._loaded) != 1 else ''}"
                raise WrongReturn(f"column idx: {index}, but the taskset has {count}") from None
            except BaseException as problem:  # a generator ends with it; an interrupted one too
                self._problem = problem
                raise
        return self._loaded[index]

    def close(self) -> None:
        """End the rollouts, and what the environment has started."""
        for rollout in {*self.rollouts.values()}:
            rollout.close()
        self.loop.call_soon_threadsafe(self._closing.set)
        with suppress(Exception):  # this process ends
            self._serving.result(CLOSING_SECONDS)


class _Rollout:
    """A task that is being played in the host's loop."""

    def __init__(self, host: _Host, task: Any) -> None:
        self._host = host
        self._traces = list[Any]()
        self._responses = list[asyncio.Future[Message | None]]()
        self._events = queue.SimpleQueue[_Asked | _Ended]()
        self._conversation = ""  # the id of the trace that asks first
        self._playing = asyncio.run_coroutine_threadsafe(self._play(task), host.loop)

    async def _play(self, task: Any) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        ctx = ModelContext(
            MODEL, EvalClientConfig(base_url=self._host.url, api_key_var="LMFORGE_HAS_NO_KEY")
        )
        try:
            episode = await self._host.env.run_episode(
                task, ctx, on_trace=self._begun, on_discard=self._discard
            )
            failures = [
                trace.last_error for trace in self._traces if trace.has_error
            ] + episode.errors
            error = next((f"{each.type}: {each.message}" for each in failures if each), "")
            asked = [trace for trace in self._traces if trace.id == self._conversation]
            reward = sum(trace.reward for trace in asked)
            heard = sum(trace.num_turns for trace in asked)
            self._events.put(_Ended(reward, heard, error))
        except Exception as problem:
            self._events.put(_Ended(0.0, error=f"{type(problem).__name__}: {problem}"))
        finally:
            for trace in self._traces:
                self._host.rollouts.pop(trace.id, None)
            for response in self._responses:
                _set_result(response, None)

    def _begun(self, trace: Any) -> None:
        self._traces.append(trace)
        self._host.rollouts[trace.id] = self

    def _discard(self, trace: Any) -> None:
        """Forget an attempt that verifiers makes again."""
        self._traces.remove(trace)
        self._host.rollouts.pop(trace.id, None)

    async def ask(self, conversation: str, body: dict[str, Any]) -> Message | None:
        """What the model answers to a request of the harness; None where it does not any more."""
        # Not when it is read, which may be after the end.
        self._conversation = self._conversation or conversation
        self._responses = [each for each in self._responses if not each.done()]
        self._responses.append(response := self._host.loop.create_future())
        self._events.put(_Asked(conversation, body, response))
        return await response

    def wait(self) -> _Asked | _Ended:
        """The next request, or the end.

        Raises WrongReturn where the rollout failed, or another agent asks.
        """
        event = self._events.get()
        if isinstance(event, _Ended):
            if event.error:
                raise WrongReturn(f"its rollout failed: {_outer_lines(event.error)}")
            return event
        if event.conversation != self._conversation:
            raise WrongReturn(
                "a second agent or attempt asked the model; an episode is one conversation here"
            )
        return event

    def wait_first(self) -> _Asked:
        """The first request. Raises WrongReturn where there is none."""
        event = self.wait()
        if isinstance(event, _Ended):
            raise WrongReturn("its harness ended without a request to the model")
        return event

    def stop(self) -> None:
        """Have verifiers end it as at a limit of its own, and score what there is, once its harness
        gets no answer.
        """
        for trace in self._traces:
            self._host.loop.call_soon_threadsafe(trace.stop, "cut")

    def close(self) -> None:
        """End it, without a reward if it has none yet."""
        self._playing.cancel()


class VerifiersEnvironment(Environment):
    """A task of a taskset, which the row's column `idx` names.

    The reward is that of its rubric, of the agent that asks.
    """

    begins_early = True

    def __init__(self, address: str) -> None:
        """Raises UserError where there is no such environment here."""
        self._host = _host(address)
        self._known = list[Message]()
        self._answers = 0
        self._rollout: _Rollout | None = None
        # What the harness waits with, or its end; None while it works.
        self._event: _Asked | _Ended | None = None
        self.reply_roles = self._host.reply_roles  # type: ignore[misc]

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._host.tools

    def begin(self, call: str, given: dict[str, Any]) -> None:
        if call == "reset" and self._rollout is None:
            self._rollout = _Rollout(self._host, self._host.task(given))
        elif isinstance(self._event, _Asked):
            if call == "step":
                self._known.append(read_message(given, {}))
                self._answers += 1
                self._event.answer(given)
            elif self._rollout:
                self._rollout.stop()
                self._event.answer(None)
            self._event = None

    def reset(self, **row: Any) -> Sequence[Message]:
        """The messages of the harness's first request."""
        self.begin("reset", row)
        assert self._rollout is not None
        self._event = self._rollout.wait_first()
        return self._read_new(self._event.body)

    def step(self, message: Message) -> Reply:
        self.begin("step", message)
        assert self._rollout is not None
        self._event = self._rollout.wait()
        if isinstance(self._event, _Asked):
            return Reply(self._read_new(self._event.body))
        if self._event.heard < self._answers:
            raise WrongReturn("its harness had ended when the model answered")
        return Reply(done=True)

    def get_reward(self) -> float:
        """The reward of the episode; of one that was cut, that of what there is."""
        while not isinstance(self._event, _Ended):
            self.begin("reward", {})
            assert self._rollout is not None
            self._event = self._rollout.wait()
        return self._event.reward

    def _read_new(self, body: dict[str, Any]) -> list[Message]:
        """What a request adds to the conversation.

        Raises WrongReturn where it does something else.
        """
        tools = list(body.get("tools") or [])
        if tools != self._host.tools:
            names = [
                list_names(str(tool.get("function", {}).get("name")) for tool in each)
                for each in (self._host.tools, tools)
            ]
            raise WrongReturn(
                f"its harness offers other tools than for the first task: {names[1]}, not"
                f" {names[0]}"
            )
        names_of_calls: dict[str, str] = {}
        said = [read_message(message, names_of_calls) for message in body["messages"]]
        known = len(self._known)
        if said[:known] != self._known:
            at = next(
                (
                    at
                    for at, pair in enumerate(zip(said, self._known, strict=False))
                    if pair[0] != pair[1]
                ),
                len(said),
            )
            raise WrongReturn(
                f"its harness did not append to the conversation: message {at + 1} of {known} was"
                " left out or is another one"
            )
        if len(said) == known:
            raise WrongReturn("its harness asked again without a new message")
        self._known = said
        return said[known:]

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()


@cache
def _host(address: str) -> _Host:
    """The one of this process."""
    return _Host(address)


def _set_result(response: asyncio.Future[Message | None], message: Message | None) -> None:
    if not response.done():
        response.set_result(message)


def _outer_lines(text: str) -> str:
    """The first and the last line of an error, which may be a traceback."""
    lines = text.strip().splitlines()
    return cut(lines[0], 300) + (f" … {cut(lines[-1], 300)}" if len(lines) > 1 else "")
