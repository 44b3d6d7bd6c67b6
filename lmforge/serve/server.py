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

from lmforge.config.verbs import ServeOptions
from lmforge.errors import UserError
from lmforge.generate.model_loading import resolve_device_and_dtype
from lmforge.serve.api import create_app
from lmforge.serve.auth import AuthMiddleware, is_loopback
from lmforge.serve.model_registry import ModelRegistry

API_KEY_VARIABLE = "LMFORGE_API_KEY"
# How long connections may take to close once the server is to end.
SHUTDOWN_TIMEOUT_SECONDS = 5
LISTEN_BACKLOG = 2048


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises UserError."""
    key = os.environ.get(API_KEY_VARIABLE) if options.api_key is None else options.api_key
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"--api_key (or {API_KEY_VARIABLE}): expected letters, digits and marks of ASCII, without blanks")
    if key is None and not is_loopback(options.host) and not options.without_key:
        raise UserError(
            f"--host {options.host}: others can reach this address; give an --api_key (or {API_KEY_VARIABLE}), or --without_key"
        )
    door = _bind_socket(options.host, options.port)
    device, dtype = resolve_device_and_dtype(options.device, options.dtype)
    shelf = ModelRegistry(
        options.models,
        device=device,
        dtype=dtype,
        max_batch_size=options.max_batch_size,
        max_queue=options.max_queue,
        max_length=options.max_length,
        max_models=options.max_models,
        warn=partial(print, file=sys.stderr),
    )
    asyncio.run(_serve_and_stop(options, shelf, door, key))
    return 0


def _bind_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
    except (OSError, OverflowError) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise UserError(f"{host}:{port}: {why}; choose another --port or --host") from None
    return door


async def _serve_and_stop(options: ServeOptions, registry: ModelRegistry, listener: socket.socket, api_key: str | None) -> None:
    try:
        await _run_server(options, registry, listener, api_key)
    finally:
        registry.stop()
        await asyncio.to_thread(registry.join)


async def _run_server(options: ServeOptions, registry: ModelRegistry, listener: socket.socket, api_key: str | None) -> None:
    await registry.get(registry.default_model)
    # Without a key, a page elsewhere could point a name of its own at this machine, and read what is answered.
    names_matter = api_key is None and is_loopback(options.host)
    app = AuthMiddleware(create_app(registry, options.max_body_bytes), api_key=api_key, loopback_hosts_only=names_matter)
    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
    )
    server = _UvicornServer(settings)

    def stop() -> None:
        registry.stop()
        server.force_exit = server.should_exit
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    listener.listen(LISTEN_BACKLOG)  # who reads the line that follows may come at once
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"http://{host}:{listener.getsockname()[1]}  {', '.join(offer.name for offer in registry.list_models())}", flush=True)
    await server.serve(sockets=[listener])


class _UvicornServer(uvicorn.Server):
    """A server whose end is ours to begin: what is being written ends first, and the exit status is 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
