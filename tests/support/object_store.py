"""A real S3 server, for tests of object stores."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import s3fs


@contextmanager
def object_store(folder: Path) -> Iterator[None]:
    """Start an empty server, and set this process's environment to reach it; `folder` keeps what it
    prints.
    """
    before = dict(os.environ)
    printed = folder / "printed.txt"
    with open(printed, "w") as out:
        # Port 0: the system chooses one that is free, and the server says which.
        server = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        while "http://127.0.0.1:" not in printed.read_text():
            assert server.poll() is None, printed.read_text()
            time.sleep(0.05)
        port = printed.read_text().split("http://127.0.0.1:")[1].split()[0]
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        s3fs.S3FileSystem.clear_instance_cache()  # connections to another server
        yield
    finally:
        server.kill()
        server.wait()
        os.environ.clear()
        os.environ |= before
