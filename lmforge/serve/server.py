"""The server process: bind, load the first model, check keys and hosts, serve until a signal.

Generation stops first. The routes are in api.py, the chat page in web/.
"""

import asyncio
import gc
import ipaddress
import re
import secrets
import signal
import socket
from contextlib import nullcontext

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmforge.core.errors import RunFailed, UserError
from lmforge.core.files.untrusted import cut
from lmforge.serve.api import create_app
from lmforge.serve.connections import accept_connections, max_connections
from lmforge.serve.model_registry import ModelRegistry
from lmforge.serve.protocol import ApiError

# The time that connections may take to close once the server stops.
SHUTDOWN_TIMEOUT_SECONDS = 5
LISTEN_BACKLOG = 2048
# Paths that need no key: the page, and whether the server runs.
OPEN_PATHS = {"/", "/health"}


def is_loopback(host: str) -> bool:
    """Return True where an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AuthMiddleware:
    """Refuses requests without the key, of web pages elsewhere, or with a foreign Host header.

    The page and /health need no key.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, loopback_hosts_only: bool) -> None:
        """loopback_hosts_only: refuse requests whose Host is not this machine.

        A web page elsewhere can send them by DNS rebinding.
        """
        self._app = app
        self._api_key = api_key
        self._loopback_hosts_only = loopback_hosts_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        refusal = self._check(scope)
        if refusal is not None:
            app = JSONResponse(refusal.body, refusal.status)
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = re.sub(r":\d*$", "", headers.get("host", ""))  # IPv6 addresses are in brackets
        if self._loopback_hosts_only and not is_loopback(host.strip("[]")):
            return ApiError(
                403,
                f"Host {cut(host)!r} is not this machine; use http://localhost, or serve with"
                " --api_key",
            )
        if scope["method"] not in ("GET", "HEAD") and _is_foreign(headers):
            return ApiError(
                403,
                "a web page of another origin sends this; use the page of this server, or another"
                " program; a proxy before this server must pass on the header Host",
            )
        if self._api_key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), self._api_key.encode())
        if is_right and scheme.lower() == "bearer":
            return None
        message = "no API key: send it as `Authorization: Bearer KEY`"
        if key:
            message = "not the API key of this server"
        return ApiError(401, message, code="invalid_api_key")


def _is_foreign(headers: Headers) -> bool:
    """Return True where a request comes from a web page elsewhere.

    Browsers say so, by Sec-Fetch-Site where that is safe to say (it holds behind a proxy too), else
    by Origin. Other programs send neither.
    """
    site = headers.get("sec-fetch-site")
    if site:
        return site not in ("same-origin", "none")
    scheme, _, origin = headers.get("origin", "").lower().rpartition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return origin.removesuffix(port) not in ("", headers.get("host", "").lower().removesuffix(port))


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that does not listen yet; port 0 takes a free one. Raises UserError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"{host}:{port}: {reason}; choose another --port or --host") from None
    return bound


def serve(
    registry: ModelRegistry,
    bound: socket.socket,
    host: str,
    api_key: str | None,
    max_body_bytes: int,
    weight_updates: bool = False,
) -> None:
    """Serve on the socket until SIGTERM or SIGINT; a second signal does not wait for connections.

    Raises UserError, and RunFailed where no connection can be accepted any more.

    `host` is the address as the user wrote it. Once the first model is loaded, prints the server's
    URL and the models.
    """
    # Without a key, a web page could point its own host name at this machine and read the
    # responses.
    loopback_only = api_key is None and is_loopback(host)
    routes = create_app(registry, max_body_bytes, weight_updates)
    app = AuthMiddleware(routes, api_key=api_key, loopback_hosts_only=loopback_only)
    asyncio.run(_run_server(app, registry, bound, host))


async def _run_server(
    app: AuthMiddleware, registry: ModelRegistry, bound: socket.socket, host: str
) -> None:
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="error",  # whoever connects can cause warnings
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_SECONDS,
    )
    server = uvicorn.Server(config)
    # Signals are ours: generation stops before connections close, and the exit status is 0.
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]

    def stop() -> None:
        accepting.cancel()
        registry.stop()
        server.force_exit = server.should_exit
        server.should_exit = True

    def stop_accepting(accepting: "asyncio.Task[None]") -> None:
        bound.close()
        server.should_exit = True

    try:
        await registry.get(registry.default_model)
        gc.freeze()  # so that it is not looked through whenever a large request makes many objects
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        bound.listen(LISTEN_BACKLOG)  # a client that reads the next line may connect at once
        accepting = asyncio.ensure_future(
            accept_connections(bound, config, server, max_connections())
        )
        accepting.add_done_callback(stop_accepting)
        url = f"http://[{host}]" if ":" in host else f"http://{host}"
        names = ", ".join(info.name for info in registry.list_models())
        print(f"{url}:{bound.getsockname()[1]}  {names}", flush=True)
        await server.serve(sockets=[])
        if not accepting.cancelled():
            raise RunFailed(
                f"no connection can be accepted any more: {accepting.exception()!r}"
            ) from accepting.exception()
    finally:
        registry.stop()
        await asyncio.to_thread(registry.join)
