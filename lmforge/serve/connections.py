"""Limits on connections: their number, and the time that a client may keep the server waiting.

Requests are read by uvicorn.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmforge.core.distributed.joining import allow_open_files

# The time that a client may take for each part, however slowly its bytes come: for the head of a
# request, for its body (a route that reads it answers before), and for reading a part of an answer.
# With `PATIENCE_SECONDS` one is not in others' way.
LIMIT_SECONDS = 40.0
PATIENCE_SECONDS = 2.0
POLL_SECONDS = 0.5
FULL_POLL_SECONDS = 0.1
# Several trainers, each of which has 1,024 requests in flight. The memory of so many half-sent
# heads is 256 MiB.
MAX_CONNECTIONS = 4096
# File descriptors that are not for connections.
RESERVED_DESCRIPTORS = 128


def max_connections() -> int:
    """The number of connections that may be open.

    It is that of the files that this process can be allowed to open, but for some.
    """
    files = allow_open_files(MAX_CONNECTIONS + RESERVED_DESCRIPTORS)
    return max(files - RESERVED_DESCRIPTORS, RESERVED_DESCRIPTORS)


async def accept_connections(
    bound: socket.socket, config: uvicorn.Config, server: uvicorn.Server, limit: int
) -> None:
    """Accept connections until cancelled.

    There are at most `limit` at a time, or as many as the system has room for. Others wait until
    one closes. Of those that have kept the server waiting for `PATIENCE_SECONDS`, half are closed
    for them, the longest ones: a client whose request is on its way is none of these.
    """
    loop = asyncio.get_running_loop()
    state = server.server_state
    since: dict[Any, float] = {}

    def find_late(seconds: float) -> list[Any]:
        """The connections that were late for `seconds`, the longest first.

        Their clients have sent and read nothing of what is due.
        """
        nonlocal since
        protocols: set[Any] = state.connections
        due = [
            (each, each.conn.their_state, each.cycle, each.transport.get_write_buffer_size())
            for each in protocols
        ]
        since = {
            each: since.get(each, loop.time())
            for each in due
            if each[1] in (h11.IDLE, h11.SEND_BODY) or each[3]
        }
        return [
            each[0]
            for each in sorted(since, key=since.__getitem__)
            if loop.time() - since[each] > seconds
        ]

    def close_late() -> None:
        loop.call_later(POLL_SECONDS, close_late)  # first: an error in the rest ends no time limit
        for late in find_late(LIMIT_SECONDS):
            late.transport.abort()

    loop.call_soon(close_late)
    bound.setblocking(False)
    while True:
        if len(state.connections) < limit:
            with suppress(OSError):  # out of file descriptors or memory
                accepted, _ = await loop.sock_accept(bound)
                await loop.connect_accepted_socket(lambda: H11Protocol(config, state, {}), accepted)
                continue
        late = find_late(PATIENCE_SECONDS)
        for each in late[: len(late) // 2 + 1]:
            each.transport.abort()
        await asyncio.sleep(FULL_POLL_SECONDS)
