"""One HTTP request with a time limit for its whole answer.

It follows no redirect: the key would go to another host.

What servers are asked, and what their answers mean, is not known here.
"""

import io
import socket
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit

from lmforge.core.files.untrusted import read_stream

MAX_REFUSAL_BYTES = 2**16


class HttpAnswer(NamedTuple):
    """The answer of a server.

    content: of a refusal (status 400 and above) only the beginning. location: of a redirect.
    """

    status: int
    content: bytes
    location: str


def call(
    url: str, body: bytes | None, headers: Mapping[str, str], *, seconds: float, max_bytes: int
) -> HttpAnswer:
    """Send GET, or POST where there is a `body`, and read the answer, all within `seconds`.

    The environment's proxies, which are for the internet, are not used. Raises TimeoutError where
    the answer is not whole in time, UserError where it has more than `max_bytes`, and OSError,
    HTTPException or ValueError where there is none.
    """
    deadline = time.monotonic() + seconds
    parts = urlsplit(url)
    connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connection_class(parts.hostname or "", parts.port, timeout=seconds)
    connection.connect()
    with cast(socket.socket, connection.sock) as connected:
        connection.sock = cast(Any, _UntilDeadline(connected, deadline))
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        method = "GET" if body is None else "POST"
        connection.request(method, path, body, {"connection": "close", **headers})
        answer = connection.getresponse()
        stream = cast(BinaryIO, answer)
        if answer.status < 400:
            content = read_stream(stream, url, max_bytes)
        else:
            try:
                content = stream.read(MAX_REFUSAL_BYTES)
            except (OSError, HTTPException, ValueError):
                content = b"its answer broke off"
        return HttpAnswer(answer.status, content, answer.getheader("location", ""))


class _UntilDeadline(io.RawIOBase):
    """A connected socket, as http.client uses it, whose waits all end at one deadline.

    A socket's own time-out is that of each wait, and a server that sends a byte a second never
    exceeds it. The caller closes the socket.
    """

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket = connected
        self._deadline = deadline

    def _limit_wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def sendall(self, data: bytes) -> None:
        self._limit_wait()
        self._socket.sendall(data)

    def makefile(self, mode: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(self))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._limit_wait()
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        """Does nothing: http.client closes a connection before its answer is read."""
