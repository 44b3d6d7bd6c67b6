"""Rollouts sampled by `lmforge serve`: the same numbers as in process, servers that fail, and mistakes that are refused."""

import json
import re
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run as command
from lmforge.generate.model_loading import load_model
from tests.conftest import Refusal
from tests.preloaded import preloaded
from tests.serve.conftest import Server


@pytest.fixture(scope="module")
def rollout_server(serving: Callable[..., Server], models: Path) -> Server:
    return serving(models / "noise", "--weight_updates", "--max_batch_size", 8, "--max_length", 32)


def by(*urls: str, engine: str = "lmforge") -> list[str]:
    return ["--rollout.engine", engine, "--rollout.engine_urls", *urls]


def numbers(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "reward", "ratio", "entropy", "grad_norm", "val/reward")
    return [{name: record.get(name) for name in names} for record in records]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run, torch.device("cpu"), torch.float32).model.state_dict()


def test_twenty_steps_sampled_by_a_server_equal_those_in_process_bit_for_bit(
    grpo: Callable[..., list[str]], rollout_server: Server, tmp_path: Path
) -> None:
    assert command(grpo("inside", steps=20)) == 0
    assert command(grpo("outside", *by(rollout_server.url), steps=20)) == 0
    assert len(numbers(tmp_path / "inside")) == 20
    assert numbers(tmp_path / "inside") == numbers(tmp_path / "outside")
    theirs = weights(tmp_path / "outside")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(tmp_path / "inside").items())


# --- servers that fail ------------------------------------------------------------------------------------------------


@contextmanager
def faulty(url: str, fault: str) -> Iterator[str]:
    """The address of something that stands before a server and spoils each answer with sampled tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.forward(urllib.request.Request(url + self.path, body, {"content-type": "application/json"}))

        def do_GET(self) -> None:
            self.forward(urllib.request.Request(url + self.path))

        def forward(self, request: urllib.request.Request) -> None:
            is_check = (
                request.data is not None and json.loads(bytes(request.data)).get("sampling_params", {}).get("max_tokens") == 1
            )
            try:
                with urllib.request.urlopen(request) as answer:
                    status, content = answer.status, answer.read()
            except urllib.error.HTTPError as refusal:
                status, content = refusal.code, refusal.read()
            spoils = self.path == "/inference/v1/generate" and not is_check
            if spoils and fault == "hangs":
                released.wait()
            if spoils and fault == "old weights":
                spoiled = json.loads(content)
                spoiled["choices"][0]["weight_versions"][0]["version"] = "default"
                content = json.dumps(spoiled).encode()
            with suppress(OSError):  # the client has left
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if spoils and fault == "cuts" else content)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    released = threading.Event()
    server: socketserver.BaseServer = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        released.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("cuts", "not valid JSON"), ("old weights", "answers with other weights"), ("hangs", "nothing answers (timed out)")],
)
def test_requests_of_a_server_that_fails_go_to_others(
    fault: str,
    words: str,
    grpo: Callable[..., list[str]],
    rollout_server: Server,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with faulty(rollout_server.url, fault) as url:
        assert command(grpo("run", *by(rollout_server.url, url), "--rollout.engine_timeout_seconds", 20)) == 0
    printed = "".join(capfd.readouterr())
    assert re.search(f"{url}.*{re.escape(words)}", printed)
    assert "its requests go to others" in printed
    assert len(numbers(tmp_path / "run")) == 2
    for table in (tmp_path / "run" / "completions").glob("set-*"):
        assert len(table.read_text().splitlines()) == 8  # none is missing, and none is there twice


def test_a_run_ends_with_one_line_when_no_server_is_left(
    grpo: Callable[..., list[str]], models: Path, tmp_path: Path, refused: Refusal
) -> None:
    words = (
        "serve",
        models / "noise",
        "--weight_updates",
        "--max_length",
        32,
        "--port",
        0,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    )
    (tmp_path / "server").mkdir()
    process = preloaded().start(words, tmp_path / "server")
    while "\n" not in (printed := process.out.read_text()):
        assert process.poll() is None, process.errors.read_text()
        time.sleep(0.02)
    url = printed.split()[0]
    (tmp_path / f"victim-{process.pid}").touch()
    line = refused(*grpo("run", *by(url), steps=3, reward="variety_after_the_end_of_the_server"), status=1)
    assert f"rollout.engine_urls: no server has the current weights: {url}: nothing answers" in line
    assert process.wait(timeout=60) != 0


# --- bad input --------------------------------------------------------------------------------------------------------


def test_servers_that_cannot_serve_a_run_are_refused_at_its_start(
    grpo: Callable[..., list[str]], serving: Callable[..., Server], models: Path, refused: Refusal
) -> None:
    nowhere = "http://127.0.0.1:1"
    assert f"rollout.engine_urls: {nowhere}: nothing answers" in refused(*grpo("nowhere", *by(nowhere)))
    plain = serving(models / "noise", "--max_length", 32)
    lacks = refused(*grpo("plain", *by(plain.url)))
    assert f"{plain.url}: has no /weight_info; start it with lmforge serve --weight_updates" in lacks
    assert "VLLM_SERVER_DEV_MODE=1" in refused(*grpo("plain", *by(plain.url, engine="vllm")))
    short = serving(models / "noise", "--weight_updates", "--max_length", 24)
    assert "this server was started with --max_length 24" in refused(*grpo("short", *by(short.url)))
    other = serving(models / "endless", "--weight_updates", "--max_length", 32)
    assert f"{other.url}: serves another model (hidden_size 262, the policy's is 32)" in refused(*grpo("other", *by(other.url)))


def test_options_of_servers_need_an_engine_and_addresses(grpo: Callable[..., list[str]], refused: Refusal) -> None:
    assert "rollout.engine_urls: for servers" in refused(*grpo("run", "--rollout.engine_urls", "http://127.0.0.1:1"))
    assert "give the servers' addresses in rollout.engine_urls" in refused(*grpo("run", "--rollout.engine", "vllm"))
    assert "expected http://HOST:PORT" in refused(*grpo("run", *by("127.0.0.1:8000")))
