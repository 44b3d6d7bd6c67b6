"""A Hugging Face hub on this machine, for looking up and downloading models and datasets, with the
faults that a test requests.
"""

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

    models: files by the name of a model. gated, down: models whose files nobody may have; whether
    it answers at all.
    cut: bytes after which the body of a file breaks off, by the file's name; each cut is made
    `cuts_left` times.
    datasets: files by the name of a dataset.
    """

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    down: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    cuts_left: int = 0
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    address: str = ""

    def sent(self, file: str) -> list[str | None]:
        """The ranges of a file that were asked for, in turn; None is the whole of it."""
        return [
            span
            for method, path, span in self.requests
            if method == "GET" and path.endswith(f"/{file}")
        ]


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def described(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
    if len(content) >= LARGE:
        entry["lfs"] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 134,
        }
    return entry


def etag(content: bytes) -> str:
    """What the hub calls a version of a file: its SHA-256 where it is large, else git's digest."""
    return hashlib.sha256(content).hexdigest() if len(content) >= LARGE else git_digest(content)


def listed(files: dict[str, bytes], prefix: str = "", recursive: bool = False) -> bytes:
    """What is below a folder, as the hub's `tree` lists it; where not recursive, without what is in
    folders in it.
    """
    entries: list[dict[str, Any]] = []
    folders: set[str] = set()
    for name, content in files.items():
        inner = name.removeprefix(prefix)
        if not name.startswith(prefix):
            continue
        if "/" in inner and not recursive:
            folders.add(prefix + inner.split("/")[0])
            continue
        entries.append(
            {"type": "file", "path": name, "size": len(content), "oid": git_digest(content)}
        )
        if len(content) >= LARGE:
            entries[-1]["lfs"] = {
                "oid": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 134,
            }
    entries += [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in folders]
    return json.dumps(entries).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *words: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer_for_dataset(self) -> None:
        """What is in a folder, and ranges of files."""
        path, hub = self.path.partition("?")[0], self.hub
        name = next((each for each in hub.datasets if f"datasets/{each}/" in path), None)
        if name is None:
            return self.answer(
                404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
            )
        files = hub.datasets[name]
        if match := re.fullmatch(rf"/api/datasets/{name}/tree/{COMMIT}/?(.*)", path):
            prefix = f"{match[1]}/" if match[1] else ""
            return self.answer(
                200, {}, listed(files, prefix, recursive="recursive=true" in self.path.lower())
            )
        if path.startswith("/api/"):
            siblings = [described(*each) for each in files.items()]
            return self.answer(
                200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            )
        content = files.get(path.removeprefix(f"/datasets/{name}/resolve/{COMMIT}/"))
        if content is None:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"}, b"{}")
        first, last = map(
            int, re.findall(r"\d+", self.headers.get("Range") or f"bytes=0-{len(content) - 1}")
        )
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{etag(content)}"',
            "Content-Range": f"bytes {first}-{last}/{len(content)}",
        }
        return self.answer(
            206 if "Range" in self.headers else 200, headers, content[first : last + 1]
        )

    def do_GET(self) -> None:
        hub = self.hub
        # Of no concern to a model: who else uses the library.
        if self.path == "/api/agent-harnesses":
            return self.answer(404, {}, b"{}")
        hub.requests.append((self.command, self.path.partition("?")[0], self.headers.get("Range")))
        if hub.down:
            return self.answer(503, {}, b"{}")
        if self.path.startswith(("/datasets/", "/api/datasets/")):
            return self.answer_for_dataset()
        if match := re.match(r"/api/models/([^/]+/[^/]+)(?:/revision/([^?]+))?(\?|$)", self.path):
            name, revision = match[1], match[2] or "main"
            if name not in hub.models:
                return self.answer(
                    404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
                )
            if revision not in ("main", COMMIT):
                return self.answer(
                    404, {"X-Error-Code": "RevisionNotFound"}, b'{"error": "Invalid rev id"}'
                )
            siblings = [described(*each) for each in hub.models[name].items()]
            return self.answer(
                200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            )
        if match := re.match(rf"/api/models/([^/]+/[^/]+)/tree/{COMMIT}", self.path):
            return self.answer(200, {}, listed(hub.models[match[1]], recursive=True))
        match = re.match(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", self.path)
        assert match, self.path
        if match[1] in hub.gated:
            return self.answer(
                401,
                {"X-Error-Code": "GatedRepo"},
                b'{"error": "Access to this model is restricted"}',
            )
        content = hub.models[match[1]][match[2]]
        status, headers, start = (
            200,
            {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(content)}"', "Accept-Ranges": "bytes"},
            0,
        )
        if span := self.headers.get("Range"):
            start = int(span.removeprefix("bytes=").rstrip("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        stop = hub.cut.get(match[2])
        if stop is not None and hub.cuts_left and start < stop:
            hub.cuts_left -= 1
            return self.answer(status, headers, content[start:stop], length=len(content) - start)
        return self.answer(status, headers, content[start:])

    def answer(
        self, status: int, headers: dict[str, str], body: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
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


# Other tests set these for all processes of theirs.
ONLINE = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}


def variables(hub: Hub | str, home: Path) -> dict[str, str]:
    """The environment of a process that is to use this hub, with a cache of its own."""
    address = hub if isinstance(hub, str) else hub.address
    return {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
    } | ONLINE
