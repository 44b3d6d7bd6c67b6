"""Environments of OpenEnv, by servers of the real package, which has an environment of its own
(build/openenv, 0.5 GB).
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmforge.core.errors import UserError
from lmforge.post.environments import openenv
from lmforge.post.environments.process import EnvironmentPool
from tests.post.environments.packages import ROOT, python_with

VERSION = "0.10.0"

# Two episodes of the environment of actions, and one of that of tools.
EPISODES = """
import json, sys
from lmforge.post.environments import openenv
from lmforge.post.environments.process import EnvironmentPool

def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}

row = {"prompt": [{"role": "user", "content": "Go"}], "start": 3}
done, request = {"role": "assistant", "content": "done"}, {"prompts": [""] * 2, "completions": [""] * 2, "columns": {}}
told = []
with EnvironmentPool(sys.argv[1], timeout_seconds=30) as pool:
    told.append(pool.declarations[""].tools)
    told.append(pool.reset([row, row])[0].messages)
    steps = [{0: call("step", number=4), 1: call("step", number="x")}, {0: call("step", number=4), 1: done}]
    told += [[list(replies[at]) for at in range(2)] for replies in map(pool.step, steps)]
    told.append(pool.score(request, 5.0)[pool.spec].rewards)
with EnvironmentPool(sys.argv[2], timeout_seconds=30) as pool:
    told.append(pool.declarations[""].tools)
    pool.reset([row, row])
    replies = pool.step({0: call("echo_message", message="hi"), 1: call("nothing")})
    told += [[list(replies[at]) for at in range(2)], list(pool.failed_episodes)]
print(json.dumps(told))
"""


def python() -> Path:
    return python_with("openenv", f"openenv=={VERSION}")


@contextmanager
def server(kind: str) -> Iterator[str]:
    """The address of a server of openenv_server.py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [python(), Path(__file__).with_name("openenv_server.py"), kind, str(port)]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def test_without_the_package_one_line_says_so() -> None:
    with pytest.raises(
        UserError, match=r"^environment openenv:http://127\.0\.0\.1:1: needs the package openenv"
    ):
        EnvironmentPool("openenv:http://127.0.0.1:1").declarations  # noqa: B018


@pytest.mark.parametrize("endless", [False, True])
def test_a_server_that_points_elsewhere_or_never_ends_is_none(
    endless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's client is not reached."""
    package = ModuleType("openenv.core")
    package.GenericEnvClient = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", package)
    monkeypatch.setattr(openenv, "REQUEST_SECONDS", 0.5 if endless else 30.0)
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if endless else 307)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", "200" if endless else "0")
            self.end_headers()
            with suppress(OSError):
                for _ in range(200 if endless else 0):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as answering:
        threading.Thread(target=answering.serve_forever, args=(0.02,), daemon=True).start()
        said = r"(TimeoutError|timed out)$" if endless else "/schema: status 307$"
        with pytest.raises(UserError, match=f"^no server of OpenEnv answers: {said}"):
            openenv.OpenEnvironment(f"http://127.0.0.1:{answering.server_port}")
        answering.shutdown()
    assert asked == ["/schema"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_actions_and_tools_of_servers_are_tools_and_rewards_are_those_of_their_steps() -> None:
    with server("adding") as adding, server("echo") as echo:
        words = [python(), "-c", EPISODES, f"openenv:{adding}", f"openenv:{echo}"]
        done = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    [step], begun, first, last, rewards, [tool], said, failed = json.loads(done.stdout)
    assert (step["function"]["name"], step["function"]["description"]) == (
        "step",
        "Add a number to the sum.",
    )
    assert step["function"]["parameters"]["required"] == ["number"]
    assert begun == [{"role": "user", "content": "Go\n3"}]

    def contents(replies: list[Any]) -> list[str]:
        return [message["content"] for messages, *_ in replies for message in messages]

    assert contents(first)[0] == "7"
    assert "VALIDATION_ERROR" in contents(first)[1]
    # Replies as (messages, done, failed calls, error).
    assert [reply[1:] for reply in first] == [[False, 0, ""], [False, 1, ""]]
    assert (contents(last), [reply[1] for reply in last]) == (["11"], [True, True])
    assert rewards == [8.0, None]
    assert (tool["function"]["name"], tool["function"]["description"]) == (
        "echo_message",
        "Say it again.",
    )
    assert contents(said) == ["hi", str({"error": "Unknown tool: 'nothing'"})]
    assert failed == []
