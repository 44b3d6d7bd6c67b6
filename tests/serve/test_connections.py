"""Clients that send half a request, or read no answer, and how many may be connected."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
import uvicorn
from starlette.types import Receive, Scope, Send

from lmforge.core.errors import RunFailed
from lmforge.serve import connections
from lmforge.serve.model_registry import ModelRegistry, ServingLimits
from lmforge.serve.server import bind_socket, serve
from tests.serve.conftest import Server

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n"
LARGE = 1 << 23  # more than the buffers of a connection


@asynccontextmanager
async def listening(limit: int) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """The port of a server that answers GET with a large body, and POST with a small one once it
    has read its own.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while scope["method"] == "POST" and (await receive()).get("more_body"):
            pass
        size = LARGE if scope["method"] == "GET" else 2
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"." * size})

    config = uvicorn.Config(app, lifespan="off", log_level="error")
    server, bound = uvicorn.Server(config), bind_socket("127.0.0.1", 0)
    bound.listen(2048)
    accepting = asyncio.ensure_future(connections.accept_connections(bound, config, server, limit))
    yield bound.getsockname()[1], server
    accepting.cancel()
    bound.close()


async def open_one(stack: AsyncExitStack, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # A small buffer: what is not read stays with the server.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    stack.callback(writer.close)
    return reader, writer


async def connect(stack: AsyncExitStack, port: int, content: bytes) -> asyncio.StreamReader:
    reader, writer = await open_one(stack, port)
    writer.write(content)
    return reader


HALVES = [b"", GET[:20], POST + b"half a body"]


def test_a_client_that_sends_half_a_request_or_reads_no_answer_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(connections, "POLL_SECONDS", 0.02)

    async def lose() -> None:
        async with listening(100) as (port, server), AsyncExitStack() as stack:
            failed = asyncio.Event()  # what looks for late connections, once: it goes on
            asyncio.get_running_loop().set_exception_handler(lambda *_: failed.set())
            server.server_state.connections.add(None)  # type: ignore[arg-type]
            await failed.wait()
            server.server_state.connections.remove(None)  # type: ignore[arg-type]
            readers = [await connect(stack, port, half) for half in [*HALVES, POST + b"." * 100 + GET[:20], GET]]
            _, dripping = await open_one(stack, port)
            dripping.write(GET[:16])
            with suppress(ConnectionError):
                while True:
                    dripping.write(b"X: y\r\n")
                    await dripping.drain()
                    await asyncio.sleep(0.01)
            for each in readers[:3]:
                assert await each.read() == b""
            while server.server_state.connections:  # the time of the test bounds it
                await asyncio.sleep(0.01)

    asyncio.run(lose())


def test_connections_beyond_the_limit_are_served_at_the_cost_of_those_that_keep_the_server_waiting(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(connections, "FULL_POLL_SECONDS", 0.02)

    async def flood() -> None:
        async with listening(16) as (port, server), AsyncExitStack() as stack:
            for _ in range(3):
                for number in range(30):
                    await connect(stack, port, HALVES[number % 3])
                reader = await connect(stack, port, GET)
                assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
                assert len(server.server_state.connections) <= 16
            assert capfd.readouterr() == ("", "")

    asyncio.run(flood())


def test_clients_beyond_the_limit_whose_requests_are_on_their_way_are_all_answered() -> None:
    limit = 16

    async def come_together() -> None:
        async with listening(limit) as (port, server), AsyncExitStack() as stack:
            clients = [await open_one(stack, port) for _ in range(4 * limit)]
            for _ in range(20 * limit):  # it accepts as many as it may, and looks for connections to close
                await asyncio.sleep(0)
            assert len(server.server_state.connections) == limit
            for _, writer in clients:
                writer.write(POST.replace(b"here", b"here\r\nConnection: close") + b"." * 100)
            for reader, _ in clients:
                assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"

    asyncio.run(come_together())


def test_as_many_connections_as_the_system_permits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        count = connections.max_connections()
        assert count == min(connections.MAX_CONNECTIONS, limits[1] - connections.RESERVED_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == count + connections.RESERVED_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connections.max_connections() == connections.MAX_CONNECTIONS


def test_a_server_that_cannot_accept_ends_with_a_line(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ServingLimits(max_batch_size=1, max_queue=1, max_length=100, max_models=1)
    registry = ModelRegistry([models / "noise"], limits, torch.device("cpu"), torch.float32, warn=print)
    bound = bind_socket("127.0.0.1", 0)
    bound.listen()

    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(connections, "H11Protocol", fail)
    with (
        socket.create_connection(bound.getsockname()),
        pytest.raises(RunFailed, match=r"^no connection can be accepted any more: RuntimeError\('no room'\)$"),
    ):
        serve(registry, bound, "127.0.0.1", None, 1000)


def test_half_sent_requests_do_not_stop_a_server_that_has_no_file_descriptors_left(server: Server) -> None:
    pid, errors = server.process.pid, server.process.errors.read_text()
    open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 10, limits[1]))
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limits)
        for number in range(12):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.send(HALVES[number % 2])
        assert server.ask("/health")[0] == 200
    assert server.process.errors.read_text() == errors
