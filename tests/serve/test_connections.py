"""Clients that send half a request, or read no answer, and how many may be connected."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from lmforge.serve import connections
from lmforge.serve.server import bind_socket
from tests.serve.conftest import Server

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n"
LARGE = 1 << 23  # more than the buffers of a connection


@asynccontextmanager
async def listening(limit: int) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """The port of a server that answers GET with a large body, and POST once it has read its own."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while scope["method"] == "POST" and (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
        await send({"type": "http.response.body", "body": b"." * LARGE})

    config = uvicorn.Config(app, lifespan="off", log_level="error")
    server, bound = uvicorn.Server(config), bind_socket("127.0.0.1", 0)
    bound.listen(2048)
    accepting = asyncio.ensure_future(connections.accept_connections(bound, config, server, limit))
    yield bound.getsockname()[1], server
    accepting.cancel()
    bound.close()


async def connect(stack: AsyncExitStack, port: int, content: bytes) -> asyncio.StreamReader:
    # A small buffer: what is not read stays with the server.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    stack.callback(writer.close)
    writer.write(content)
    return reader


HALVES = [b"", GET[:20], POST + b"half a body"]


def test_a_client_that_sends_half_a_request_or_reads_no_answer_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(connections, "POLL_SECONDS", 0.02)

    async def lose() -> None:
        async with listening(100) as (port, server), AsyncExitStack() as stack:
            readers = [await connect(stack, port, half) for half in [*HALVES, POST + b"." * 100 + GET[:20], GET]]
            _, dripping = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(dripping.close)
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
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_half_sent_requests_do_not_stop_a_server_that_has_no_file_descriptors_left(server: Server) -> None:
    pid, errors = server.process.pid, server.process.errors.read_text()
    open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 10, limits[1]))
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, limits)
        for number in range(60):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.send(HALVES[number % 2])
            if number % 20 == 19:
                assert server.ask("/health")[0] == 200
    assert server.process.errors.read_text() == errors
