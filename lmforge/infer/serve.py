"""`lmforge serve`: an OpenAI-compatible API over HTTP, and a page to chat on. Here it starts, and ends.

The addresses are `api.py`'s; the page is in `web/`.
"""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from lmforge.config_verbs import ServeOptions
from lmforge.errors import Mistake
from lmforge.infer.api import application
from lmforge.infer.guard import Guard, is_loopback
from lmforge.infer.opening import settle
from lmforge.infer.shelf import Shelf

KEY_VARIABLE = "LMFORGE_API_KEY"
# How long connections may take to close once the server is to end.
LEAVE_SECONDS = 5
BACKLOG = 2048


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises Mistake."""
    key = os.environ.get(KEY_VARIABLE) if options.api_key is None else options.api_key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise Mistake(f"--api_key (or {KEY_VARIABLE}): expected letters, digits and marks of ASCII, without blanks")
    if key is None and not is_loopback(options.host) and not options.without_key:
        raise Mistake(
            f"--host {options.host}: others can reach this address; give an --api_key (or {KEY_VARIABLE}), or --without_key"
        )
    door = _bind(options.host, options.port)
    device, dtype = settle(options.device, options.dtype)
    shelf = Shelf(
        options.models,
        device=device,
        dtype=dtype,
        rows=options.rows,
        waiting=options.waiting,
        max_length=options.max_length,
        most_open=options.most_open,
        say=partial(print, file=sys.stderr),
    )
    asyncio.run(_serve(options, shelf, door, key))
    return 0


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except (OSError, OverflowError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise Mistake(f"{host}:{port}: {why}; choose another --port or --host") from None
    return door


async def _serve(options: ServeOptions, shelf: Shelf, door: socket.socket, key: str | None) -> None:
    try:
        await _open_up(options, shelf, door, key)
    finally:
        shelf.end()
        await asyncio.to_thread(shelf.join)


async def _open_up(options: ServeOptions, shelf: Shelf, door: socket.socket, key: str | None) -> None:
    await shelf.get(shelf.first)
    # Without a key, a page elsewhere could point a name of its own at this machine, and read what is answered.
    names_matter = key is None and is_loopback(options.host)
    app = Guard(application(shelf, options.max_body_bytes), key=key, local_names_only=names_matter)
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LEAVE_SECONDS,
    )
    server = _Server(settings)

    def stop() -> None:
        shelf.end()
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    door.listen(BACKLOG)  # who reads the line that follows may come at once
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"http://{host}:{door.getsockname()[1]}  {', '.join(offer.name for offer in shelf.offers())}", flush=True)
    await server.serve(sockets=[door])


class _Server(uvicorn.Server):
    """A server whose end is ours to begin: what is being written ends first, and the exit status is 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
