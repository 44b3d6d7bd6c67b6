"""An HTTP server for a folder, with ranges, that is slow and fails as a test requests, on the
network and not in the reader.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FaultyServer(ThreadingHTTPServer):
    """`faults` are taken one by one by requests for the content of files: error, truncated, cut,
    short, stall or none.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.lock = folder, list[str](), threading.Lock()
        # (path, range) of each GET that was answered in full.
        self.requests = Counter[tuple[str, str]]()
        self.stall_seconds = 0.0

    def handle_error(self, *args: object) -> None:
        """A reader that gave up has closed the connection."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        file = self.server.folder / self.path.lstrip("/")
        self.send_response(200 if file.is_file() else 404)
        self.send_header("Content-Length", str(file.stat().st_size if file.is_file() else 0))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        file, span = self.server.folder / self.path.lstrip("/"), self.headers.get("Range", "")
        content = file.read_bytes() if file.is_file() else b""
        status = 200 if file.is_file() else 404
        if span and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1], 206
        with self.server.lock:
            fault = self.server.faults.pop(0) if self.server.faults else "none"
            if fault == "none":
                self.server.requests[self.path, span] += 1
        if fault == "stall":
            time.sleep(self.server.stall_seconds)
        if fault == "error":
            status, content = 500, b"try again"
        if fault == "short":  # and says so: only its reader can know
            content = content[: len(content) // 2]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault in ("truncated", "cut"):
            self.wfile.write(content[: len(content) // 3] if fault == "truncated" else b"")
            self.close_connection = True
        else:
            self.wfile.write(content)


@contextmanager
def file_server(folder: Path) -> Iterator[FaultyServer]:
    """Serve a folder while the block lasts."""
    server = FaultyServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
