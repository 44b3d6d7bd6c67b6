"""Who and what is let in: the key, the name that the server is called by, and how much a request may hold."""

import asyncio
import ipaddress
import re
import secrets

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmforge.serve.protocol import ApiError

# How long a body may take to arrive, and how many times the limit of it is read and dropped, so that whoever sends it
# reads the refusal and not the end of the connection.
BODY_TIMEOUT_SECONDS = 30
MAX_DISCARDED_BODIES = 16


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AuthMiddleware:
    """Answers with a refusal what may not come in, and hands on the rest. The page and /health need no key."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, loopback_hosts_only: bool) -> None:
        """With `local_names_only`, requests are refused that call the server by another name than this machine's own:
        they come from pages elsewhere, whose name was pointed here (DNS rebinding)."""
        self._app = app
        self._api_key = api_key
        self._loopback_hosts_only = loopback_hosts_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        called = re.sub(r":\d*$", "", headers.get("host", ""))  # an address of IPv6 is in brackets
        if self._loopback_hosts_only and not is_loopback(called.strip("[]")):
            return ApiError(403, f"called {called!r}, which is not this machine; use http://localhost, or serve with --api_key")
        if self._api_key is None or not scope["path"].startswith("/v1/"):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._api_key.encode()):
            return None
        what = "needs a key: send it as `Authorization: Bearer KEY`" if not given else "not the key of this server"
        return ApiError(401, what, code="invalid_api_key")


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request. Raises Refusal where it is too large, not called JSON, or does not arrive."""
    # What a page elsewhere may send without asking first is never called JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected a body with the header Content-Type: application/json")
    content, seen = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                seen += len(chunk)
                if seen <= max_bytes:
                    content += chunk
                elif seen > MAX_DISCARDED_BODIES * max_bytes:
                    break
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_SECONDS} seconds") from None
    if seen > max_bytes:
        raise ApiError(413, f"the body has more than {max_bytes:,} bytes", code="body_too_large")
    return bytes(content)
