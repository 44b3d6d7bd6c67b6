"""Who and what is let in: the key, the name that the server is called by, and how much a request may hold."""

import asyncio
import ipaddress
import re
import secrets

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmforge.infer.protocol import Refusal

# How long a body may take to arrive, and how many times the limit of it is read and dropped, so that whoever sends it
# reads the refusal and not the end of the connection.
BODY_SECONDS = 30
DROPPED_LIMITS = 16


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Answers with a refusal what may not come in, and hands on the rest. The page and /health need no key."""

    def __init__(self, inside: ASGIApp, *, key: str | None, local_names_only: bool) -> None:
        """With `local_names_only`, requests are refused that call the server by another name than this machine's own:
        they come from pages elsewhere, whose name was pointed here (DNS rebinding)."""
        self._inside = inside
        self._key = key
        self._local_names_only = local_names_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._inside(scope, receive, send)
        else:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        called = re.sub(r":\d*$", "", headers.get("host", ""))  # an address of IPv6 is in brackets
        if self._local_names_only and not is_loopback(called.strip("[]")):
            return Refusal(403, f"called {called!r}, which is not this machine; use http://localhost, or serve with --api_key")
        if self._key is None or not scope["path"].startswith("/v1/"):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._key.encode()):
            return None
        what = "needs a key: send it as `Authorization: Bearer KEY`" if not given else "not the key of this server"
        return Refusal(401, what, code="invalid_api_key")


async def read_limited(request: Request, limit: int) -> bytes:
    """The body of a JSON request. Raises Refusal where it is too large, not called JSON, or does not arrive."""
    # What a page elsewhere may send without asking first is never called JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "expected a body with the header Content-Type: application/json")
    content, seen = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                seen += len(chunk)
                if seen <= limit:
                    content += chunk
                elif seen > DROPPED_LIMITS * limit:
                    break
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS} seconds") from None
    if seen > limit:
        raise Refusal(413, f"the body has more than {limit:,} bytes", code="body_too_large")
    return bytes(content)
