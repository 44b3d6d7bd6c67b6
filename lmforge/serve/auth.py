"""What a request must satisfy before it is handled: the API key, the Host header, and the size and type of its body."""

import asyncio
import ipaddress
import re
import secrets
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lmforge.serve.protocol import ApiError
from lmforge.untrusted import cut, parse_json

# How long a body may take to arrive; and how much of a body that is too large is read, in multiples of the limit, so that
# the client reads the refusal instead of a closed connection.
BODY_TIMEOUT_SECONDS = 30
MAX_DISCARDED_BODIES = 16


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class AuthMiddleware:
    """Refuses requests without the key or with a foreign Host header. The page and /health need no key."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, loopback_hosts_only: bool) -> None:
        """With `loopback_hosts_only`, requests whose Host is not this machine are refused: a web page elsewhere can send them
        by DNS rebinding."""
        self._app = app
        self._api_key = api_key
        self._loopback_hosts_only = loopback_hosts_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check(scope)
        app: ASGIApp = self._app if refusal is None else JSONResponse(refusal.body, refusal.status)
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = re.sub(r":\d*$", "", headers.get("host", ""))  # IPv6 addresses are in brackets
        if self._loopback_hosts_only and not is_loopback(host.strip("[]")):
            return ApiError(403, f"Host {cut(host)!r} is not this machine; use http://localhost, or serve with --api_key")
        if self._api_key is None or not scope["path"].startswith("/v1/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), self._api_key.encode()):
            return None
        message = "not the API key of this server" if key else "no API key: send it as `Authorization: Bearer KEY`"
        return ApiError(401, message, code="invalid_api_key")


async def read_json_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the body of a request. Raises ApiError where it is too large, too late, or not a JSON object."""
    # Browsers let web pages elsewhere send other content types without asking the server first.
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
        raise ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")
    return parse_json(bytes(content), dict[str, Any], "the body", max_bytes=max_bytes, error=partial(ApiError, 400))
