"""Servers that are killed and started again, and proxies before them that spoil answers and write
down all others.
"""

import json
import secrets
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from lmforge.core.distributed.rendezvous import free_port
from tests.support.preloaded import Forked, preloaded

# What a proxy does to answers with sampled tokens, and what the run says of it. An answer that is
# late is no failure.
SPOILS = {
    "a server hangs": "no whole answer within",
    "a server answers late": "",
    "a server answers with old weights": "answers with other weights",
    "a server cuts the connection": "not valid JSON",
}
START_SECONDS = 60.0
# Of the servers, for the trainers.
KEY = {"LMFORGE_API_KEY": secrets.token_urlsafe(16)}


class SampledSpan(NamedTuple):
    """Tokens that a server has sampled for a request, with their versions."""

    tokens: tuple[int, ...]
    versions: tuple[int, ...]


class Server:
    """`lmforge serve --weight_updates` at one address, whenever it runs."""

    def __init__(self, model: Path, folder: Path, number: int) -> None:
        self.port, self._folder = free_port(), folder / f"server-{number}"
        self._folder.mkdir()
        limits = [
            "--max_batch_size",
            8,
            "--max_length",
            80,
            "--device",
            "cpu",
            "--dtype",
            "fp32",
            "--port",
            self.port,
        ]
        self._words = ["serve", model, "--weight_updates", *limits]
        self._process: Forked | None = None
        self._start_at: float | None = None

    def start(self) -> None:
        """Start it unless it runs, and wait until it answers."""
        self._start_at = 0.0
        self.start_if_due()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.05)
        raise RuntimeError(
            f"the server does not start: {self._process and self._process.errors.read_text()}"
        )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)

    def start_after(self, seconds: float) -> None:
        """Start it later, or let it go on where it was halted."""
        self._start_at = time.monotonic() + seconds

    def halt(self) -> None:
        """Nothing of it answers, whatever it is asked."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def start_if_due(self) -> None:
        """Start it without waiting for it."""
        if self._start_at is not None and time.monotonic() > self._start_at:
            self._start_at = None
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)
            else:
                self._process = preloaded().start(self._words, self._folder, variables=KEY)


class Proxy:
    """The address of a server that does as it should, but for answers that are to be spoiled.

    `sampled` has what passed as it was; `spoiled` is the first kind of fault that was done in this
    attempt.
    """

    def __init__(self, server: Server) -> None:
        self.sampled: list[SampledSpan] = []
        self.spoiled = ""
        self._lock = threading.Lock()
        self._kind, self._left, self._seconds, self._older = "", 0, 0.0, 1
        self._attempt = 0
        self._released = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.forward(self.rfile.read(int(self.headers["content-length"])))

            def do_GET(self) -> None:
                self.forward(None)

            def forward(self, body: bytes | None) -> None:
                attempt = proxy._attempt
                headers = {"content-type": "application/json"} if body is not None else {}
                headers["authorization"] = self.headers.get("authorization", "")
                request = urllib.request.Request(
                    f"http://127.0.0.1:{server.port}{self.path}", body, headers
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        status, content = answer.status, answer.read()
                except urllib.error.HTTPError as refusal:
                    status, content = refusal.code, refusal.read()
                except (OSError, ValueError):
                    return  # the server is gone: the client finds its connection closed
                sent = content
                if status == 200 and self.path == "/inference/v1/generate" and not is_check(body):
                    sent = proxy.pass_on(content, attempt)
                with suppress(OSError):  # the client has left
                    self.send_response(status)
                    is_cut = content.startswith(sent)
                    self.send_header("content-length", str(len(content if is_cut else sent)))
                    self.end_headers()
                    self.wfile.write(sent)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        class Listener(ThreadingHTTPServer):
            request_queue_size = 128  # all requests of several sets come at once

        self._server = Listener(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def begin_attempt(self) -> None:
        with self._lock:
            self.spoiled, self._left, self._attempt = "", 0, self._attempt + 1

    def spoil(self, kind: str, answers: int, seconds: float, older: int) -> None:
        """Spoil the next answers. `seconds`: how late; `older`: by how many versions."""
        with self._lock:
            self._kind, self._left, self._seconds, self._older = kind, answers, seconds, older

    def pass_on(self, content: bytes, attempt: int) -> bytes:
        """What the client gets. The client of an earlier attempt is dead."""
        with self._lock:
            kind = self._kind if self._left and attempt == self._attempt else ""
            self._left -= bool(kind)
            if kind and SPOILS[kind]:
                self.spoiled = self.spoiled or kind
            seconds, older = self._seconds, self._older
        if kind == "a server hangs":
            self._released.wait()
            return b""
        if kind == "a server cuts the connection":
            return content[: len(content) // 2]
        choice = json.loads(content)["choices"][0]
        if kind == "a server answers with old weights":
            answer = json.loads(content)
            for span in answer["choices"][0]["weight_versions"]:
                name, _, version = span["version"].rpartition("-")
                span["version"] = (
                    f"{name}-{int(version) - older}"
                    if version.isdecimal() and int(version) >= older
                    else "default"
                )
            return json.dumps(answer).encode()
        if kind:
            time.sleep(seconds)
        names = [
            span["version"]
            for span in choice["weight_versions"]
            for _ in range(span["start"], span["end"])
        ]
        versions = tuple(
            int(name.rpartition("-")[2]) if name.rpartition("-")[2].isdecimal() else -1
            for name in names
        )
        with self._lock:
            self.sampled.append(SampledSpan(tuple(choice["token_ids"]), versions))
        return content

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


def is_check(body: bytes | None) -> bool:
    """Whether a request is that of the check before a run."""
    return body is not None and json.loads(body).get("sampling_params", {}).get("max_tokens") == 1
