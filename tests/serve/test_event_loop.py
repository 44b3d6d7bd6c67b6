"""What a request costs the event loop, on which all requests are read and answered: counted, in
this process.
"""

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.hf.export import export_folder
from lmforge.serve import token_api
from lmforge.serve.api import create_app
from lmforge.serve.decoding.engine import Engine, GenerationRequest
from lmforge.serve.model_registry import ModelRegistry, ServingLimits
from tests.serve.decoding.conftest import Scripted

LENGTH = 3_000
CHATS, TEXTS, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HI = [{"role": "user", "content": "Hi"}]


class Client:
    """Calls the routes of a server without a socket."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    def variable(self, path: str, name: str) -> Any:
        """Of the function that answers a route."""
        [endpoint] = [
            route.endpoint
            for route in self._app.routes
            if isinstance(route, Route) and route.path == path
        ]
        return inspect.getclosurevars(endpoint).nonlocals[name]

    async def ask(
        self, path: str, body: Any, leaves: asyncio.Event | None = None
    ) -> tuple[int, Any]:
        """Status and content of an answer; of a stream its text. `leaves`: when the client does."""
        content = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        parts = [content[start : start + 65_536] for start in range(0, len(content), 65_536)]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if parts:
                await asyncio.sleep(0)  # as from a socket
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await (leaves or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self._app({**scope, "asgi": {"version": "3.0"}}, receive, send)  # type: ignore[arg-type]
        answer = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], json.loads(answer) if answer.startswith(b"{") else answer.decode()


def serve(
    model: Path, use: Callable[[Client, ModelRegistry], Awaitable[None]], max_batch_size: int = 8
) -> None:
    async def run() -> None:
        limits = ServingLimits(max_batch_size, max_queue=9, max_length=LENGTH, max_models=1)
        registry = ModelRegistry([model], limits, torch.device("cpu"), torch.float32, warn=print)
        await registry.get(registry.default_model)
        try:
            await use(Client(create_app(registry, 4 * 2**20, weight_updates=True)), registry)
        finally:
            registry.stop()
            await asyncio.to_thread(registry.join)

    asyncio.run(run())


class MostSteps:
    """How many instructions of Python the event loop has run at most without a pause.

    It stops counting far above `limit`.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.steps, self._count, self._limit = 0, 0, limit

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if self.steps > 2 * self._limit:
            frame.f_trace_opcodes = False
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" and frame.f_code is asyncio.Handle._run.__code__:
            self._count = 0
        self._count += event == "opcode"
        self.steps = max(self.steps, self._count)
        return self._trace

    def __enter__(self) -> "MostSteps":
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def ids(count: int, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": [100] * count, "sampling_params": {"max_tokens": 1} | sampling}


# Of each what it multiplies, and the status.
HEAVY = [
    ("prompts times n", TEXTS, {"prompt": [[100]] * 20_001, "n": 128}, 400),
    ("prompts", TEXTS, {"prompt": [[100]] * 10_000}, 400),
    ("prompts that are none", TEXTS, {"prompt": [{}] * 30_000}, 400),
    ("a text", TEXTS, {"prompt": "a b " * 20_000}, 400),
    ("ids of a prompt", TEXTS, {"prompt": [100] * 50_000}, 400),
    ("ids that are none", TEXTS, {"prompt": [1.5] * 50_000}, 400),
    ("names", TEXTS, {str(number): 0 for number in range(5_000)}, 400),
    ("a large number", TEXTS, {"prompt": [[100]] * 20_000, "seed": 10**400}, 400),
    (
        "n of a long prompt",
        CHATS,
        {"messages": [{"role": "user", "content": "a" * 50_000}], "n": 128},
        400,
    ),
    ("messages", CHATS, {"messages": HI * 3_000}, 400),
    ("messages that are read", CHATS, {"messages": HI * 200, "max_tokens": 1}, 200),
    ("tools", CHATS, {"messages": HI, "tools": [{"function": {"name": "a"}}] * 3_000}, 400),
    (
        "variables",
        CHATS,
        {
            "messages": HI,
            "max_tokens": 1,
            "chat_template_kwargs": {str(n): 0 for n in range(5_000)},
        },
        200,
    ),
    (
        "log-probabilities of a prompt",
        TEXTS,
        {"prompt": "a" * 300, "echo": True, "logprobs": 20, "max_tokens": 1},
        200,
    ),
    (
        "the same in a stream",
        TEXTS,
        {"prompt": "a" * 300, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True},
        200,
    ),
    (
        "log-probabilities of an answer",
        TEXTS,
        {"prompt": "a", "logprobs": 20, "max_tokens": 20, "n": 8},
        200,
    ),
    (
        "stop strings",
        TEXTS,
        {
            "prompt": "a",
            "max_tokens": 30,
            "stop": [f"{'ba' * 499}{end}" for end in "cdefghijklmnopqr"],
        },
        200,
    ),
    ("a text to be tokenized", "/tokenize", {"prompt": "a b " * 20_000}, 200),
    ("ids", IDS, ids(50_000), 400),
    ("ids that stop", IDS, ids(1, stop_token_ids=[7] * 50_000), 200),
    ("tokens of an answer", IDS, ids(1, max_tokens=50, ignore_eos=True, logprobs=0), 200),
    ("log-probabilities of ids", IDS, ids(500, prompt_logprobs=60), 200),
]


def test_no_request_holds_the_event_loop_longer_than_others(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, on_the_loop = JSONResponse.render, list[int]()

    def watched(self: JSONResponse, content: Any) -> bytes:
        rendered = render(self, content)
        if threading.current_thread() is threading.main_thread():
            on_the_loop.append(len(rendered))
        return rendered

    async def use(client: Client, registry: ModelRegistry) -> None:
        name = registry.default_model
        ordinary: list[int] = []
        for path, body in [(TEXTS, {"prompt": "a", "n": 8}), (CHATS, {"messages": HI, "n": 8})] * 2:
            with MostSteps() as most:
                assert (
                    await client.ask(path, {"model": name, "max_tokens": 4, "stream": True, **body})
                )[0] == 200
            ordinary.append(most.steps)
        monkeypatch.setattr(JSONResponse, "render", watched)
        excessive = {}
        for what, path, body, expected in HEAVY:
            body = body if path in (IDS, "/tokenize") else {"model": name, **body}
            with MostSteps(max(ordinary[2:])) as most:
                status, answer = await client.ask(path, body)
            assert status == expected, (what, answer)
            if most.steps > max(ordinary[2:]):
                excessive[what] = most.steps
        assert not excessive, ordinary
        assert max(on_the_loop) < 1_000

    serve(models / "endless", use)


def test_requests_that_start_together_and_one_that_has_left_or_a_server_that_stops(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, added = Engine.add_request, list[int]()

    def record(self: Engine, request: GenerationRequest) -> int:
        added.append(request.prompt_ids[0])
        return add(self, request)

    monkeypatch.setattr(Engine, "add_request", record)

    async def use(client: Client, registry: ModelRegistry) -> None:
        def start(
            id: str, index: int, token: int, leaves: asyncio.Event | None = None
        ) -> "asyncio.Task[tuple[int, Any]]":
            together = {"id": id, "count": 2, "index": index}
            body = {
                "token_ids": [token],
                "sampling_params": {"max_tokens": 1},
                "starts_with": together,
            }
            return asyncio.ensure_future(client.ask(IDS, body, leaves))

        # The same index twice: one of them is refused, and the other waits.
        twice = [start("a", 0, 101), start("a", 0, 102)]
        [refused], [waits] = await asyncio.wait(twice, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result()[0] == 400
        assert "index 0: expected each from 0 to 1 once" in refused.result()[1]["error"]["message"]
        assert (await start("a", 2, 103))[0] == 400
        assert [status for status, _ in await asyncio.gather(start("a", 1, 104), waits)] == [
            200,
            200,
        ]
        assert len(added) == 2
        # One that has left is not started with the others.
        added.clear()
        leaves = asyncio.Event()
        leaves.set()
        assert (await start("b", 0, 105, leaves))[0] == 499
        # A group ends with its last member, and a request that is refused begins none: no timer of
        # it releases a later one.
        assert (await start("c", 2, 105))[0] == 400
        assert client.variable(IDS, "gathering") == {}
        later = [start("b", 1, 106), start("b", 0, 107)]
        assert [status for status, _ in await asyncio.gather(*later)] == [200, 200]
        assert added == [107, 106]
        # A server that stops answers those that wait.
        _, [waits] = await asyncio.wait(
            [start("d", 0, 108), start("d", 0, 108)], return_when=asyncio.FIRST_COMPLETED
        )
        registry.stop()
        assert [status for status, _ in await asyncio.gather(start("d", 1, 109), waits)] == [
            503,
            503,
        ]

    serve(models / "noise", use)


def test_a_chat_is_read_while_scorings_of_prompts_wait_for_each_other(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, holding, released = token_api.top_log_probs, threading.Event(), threading.Event()

    def held(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        holding.set()
        assert released.wait(60)
        return score(*args, **kwargs)

    monkeypatch.setattr(token_api, "top_log_probs", held)

    async def use(client: Client, registry: ModelRegistry) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        together = [
            {"starts_with": {"id": "a", "count": 16, "index": index}} for index in range(16)
        ]
        scorings = [
            asyncio.ensure_future(client.ask(IDS, ids(3, prompt_logprobs=1) | each))
            for each in together
        ]
        try:
            while not holding.is_set() or registry.request_counts() != (0, 0):
                await asyncio.sleep(0.001)
            body = {"model": registry.default_model, "messages": HI, "max_tokens": 1}
            chat = asyncio.ensure_future(client.ask(CHATS, body))
            async with asyncio.timeout(30):
                while registry.request_counts() == (0, 0):
                    await asyncio.sleep(0.001)
        finally:
            released.set()
        assert [status for status, _ in await asyncio.gather(chat, *scorings)] == [200] * 17

    serve(models / "noise", use, max_batch_size=16)


def test_ids_that_the_tokenizer_has_and_the_model_has_not_are_refused(
    scripted: Scripted, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    a, b, z = byte_tokenizer.encode("abz")
    model = scripted({a: b, b: a}, vocab_size=z)
    byte_tokenizer.save(tmp_path / "tokenizer")
    export_folder(model, model.config, tmp_path / "small", tokenizer_folder=tmp_path / "tokenizer")

    async def use(client: Client, registry: ModelRegistry) -> None:
        body = {"model": registry.default_model, "max_tokens": 50, "repetition_penalty": 1.1}
        running = asyncio.ensure_future(client.ask(TEXTS, {**body, "prompt": "a"}))
        for path, prompt in [
            (TEXTS, {"prompt": "az"}),
            (TEXTS, {"prompt": [[a], [a, z]]}),
            (CHATS, {"messages": [{"role": "user", "content": "z"}]}),
            (IDS, ids(1) | {"token_ids": [z]}),
            (IDS, ids(1, prompt_logprobs=1) | {"token_ids": [a, z]}),
        ]:
            status, answer = await client.ask(path, prompt if path == IDS else {**body, **prompt})
            assert status == 400
            assert f", and this model reads ids below {z}" in answer["error"]["message"]
        status, answer = await running
        assert (status, answer["usage"]["completion_tokens"]) == (200, 50)
        assert registry.request_counts() == (0, 0)

    serve(tmp_path / "small", use)
