"""Connections: how many are open, and how long a client may keep the server waiting. Requests are read by uvicorn."""

import asyncio
import resource
import socket
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# How long a client may take for each part, however slowly its bytes come: for the head of a request, for its body (a route that
# reads it answers before), and for reading a part of an answer.
LIMIT_SECONDS, POLL_SECONDS = 40.0, 0.5
# File descriptors that are not for connections.
RESERVED_DESCRIPTORS = 128


def max_connections() -> int:
    """As many as the files that this process may open, but for some."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS, RESERVED_DESCRIPTORS)


async def accept_connections(bound: socket.socket, config: uvicorn.Config, server: uvicorn.Server, limit: int) -> None:
    """Accept connections until cancelled: at most `limit` at a time, or as many as the system has room for.

    For others half of those are closed that wait for their clients, the longest ones; where none does, the others wait.
    """
    loop, state = asyncio.get_running_loop(), server.server_state
    since: dict[Any, float] = {}

    def look() -> None:
        """Note which connections wait for their clients since when: while nothing that was due has been sent or read."""
        nonlocal since
        protocols: set[Any] = state.connections
        due = [(each, each.conn.their_state, each.cycle, each.transport.get_write_buffer_size()) for each in protocols]
        since = {each: since.get(each, loop.time()) for each in due if each[1] in (h11.IDLE, h11.SEND_BODY) or each[3]}

    def close_late() -> None:
        look()
        for (late, *_), start in since.items():
            if loop.time() - start > LIMIT_SECONDS:
                late.transport.abort()
        loop.call_later(POLL_SECONDS, close_late)

    close_late()
    bound.setblocking(False)
    while True:
        if len(state.connections) < limit:
            with suppress(OSError):  # out of file descriptors or memory
                accepted, _ = await loop.sock_accept(bound)
                await loop.connect_accepted_socket(lambda: H11Protocol(config, state, {}), accepted)
                continue
        look()
        for late, *_ in sorted(since, key=since.__getitem__)[: len(since) // 2 + 1]:
            late.transport.abort()
        await asyncio.sleep(0 if since else POLL_SECONDS)
