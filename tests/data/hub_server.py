"""A Hugging Face hub on this machine, as far as models are looked up and fetched, with the faults that a test asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000


@dataclass
class Hub:
    """What the hub has and does.

    models: files by the name of a model. gated, down: models whose files nobody may have; whether it answers at all.
    cut: bytes after which the body of a file breaks off, by the file's name; each cut is made `cuts_left` times.
    spoilt: files that arrive with another content of the same length.
    """

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    down: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    cuts_left: int = 0
    spoilt: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def sent(self, file: str) -> list[str | None]:
        """The ranges of a file that were asked for, in turn; None is the whole of it."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{file}")]


def described(name: str, content: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
    if len(content) >= LARGE:
        told["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return told


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words: Any) -> None: ...

    def do_GET(self) -> None:
        hub = self.hub
        if self.path == "/api/agent-harnesses":  # of no concern to a model: who else uses the library
            return self.answer(404, {}, b"{}")
        hub.requests.append(("GET", self.path.partition("?")[0], self.headers.get("Range")))
        if hub.down:
            return self.answer(503, {}, b"{}")
        if asked := re.match(r"/api/models/([^/]+/[^/]+)(?:/revision/([^?]+))?(\?|$)", self.path):
            name, revision = asked[1], asked[2] or "main"
            if name not in hub.models:
                return self.answer(404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}')
            if revision not in ("main", COMMIT):
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}')
            siblings = [described(*each) for each in hub.models[name].items()]
            return self.answer(200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
        asked = re.match(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", self.path)
        assert asked, self.path
        if asked[1] in hub.gated:
            return self.answer(401, {"X-Error-Code": "GatedRepo"}, b'{"error": "Access to this model is restricted"}')
        content = hub.models[asked[1]][asked[2]]
        if asked[2] in hub.spoilt:
            content = bytes(byte ^ 1 for byte in content)
        status, headers, start = 200, {"X-Repo-Commit": COMMIT, "ETag": '"x"', "Accept-Ranges": "bytes"}, 0
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").rstrip("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        stop = hub.cut.get(asked[2])
        if stop is not None and hub.cuts_left and start < stop:
            hub.cuts_left -= 1
            return self.answer(status, headers, content[start:stop], length=len(content) - start)
        return self.answer(status, headers, content[start:])

    def answer(self, status: int, headers: dict[str, str], body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        if length is not None:  # it dies in the middle
            self.close_connection = True
            self.connection.shutdown(2)


@contextmanager
def serving(models: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with these models, on a port of its own for as long as the block lasts."""
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HandlerOfThis", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def variables(hub: Hub | str, home: Path) -> dict[str, str]:
    """The environment of a process that is to use this hub, with a cache of its own."""
    address = hub if isinstance(hub, str) else hub.address
    return {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(home / "hub")}
