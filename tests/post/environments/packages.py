"""Packages of others that cannot be installed beside ours, each in an environment of its own below
build/.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python_with(name: str, *requirements: str) -> Path:
    """The interpreter of the environment `name` with these packages, in which ours are too, after
    its own.
    """
    folder = ROOT / "build" / name
    ready, interpreter = folder / "ready", folder / "bin" / "python"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        for words in (
            [sys.executable, "-m", "venv", folder],
            [interpreter, "-m", "pip", "install", "-q", *requirements],
        ):
            done = subprocess.run([*map(str, words)], capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                pytest.skip(
                    f"{', '.join(requirements)} cannot be installed here:"
                    f" {lines[-1] if lines else done.returncode}"
                )
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "after.pth").write_text(sysconfig.get_path("purelib"))
        ready.touch()
    return interpreter
