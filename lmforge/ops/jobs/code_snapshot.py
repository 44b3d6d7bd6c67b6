"""The code that a run was started with: commit and changes of the folder where `lmforge launch` was
typed.
"""

import platform
import subprocess
from pathlib import Path
from typing import Any

from lmforge import __version__
from lmforge.core.files.atomic_files import atomic_write, atomic_write_json

CODE_FILE = "code.json"
DIFF_FILE = "code.diff"
# A larger untracked file is taken for data, not code.
MAX_NEW_FILE_BYTES = 2**20
GIT_SECONDS = 60


def save_code(folder: Path, directory: Path) -> None:
    """Write into `folder` what restores the code in `directory`: code.json with the commit, and
    code.diff with the changes to it, including new files, for `git apply`. Outside of a git
    repository there is only code.json.
    """
    fields: dict[str, Any] = {
        "lmforge": __version__,
        "python": platform.python_version(),
        "directory": str(directory),
    }
    top = _git(directory, "rev-parse", "--show-toplevel")
    if top is None:
        atomic_write_json(folder / CODE_FILE, fields | {"git": None})
        return
    root = Path(top.decode().strip())
    commit = _git(root, "rev-parse", "HEAD")
    difference = _git(root, "diff", "--binary", "HEAD") if commit else b""
    names = (_git(root, "ls-files", "--others", "--exclude-standard", "-z") or b"").split(b"\0")
    left_out = []
    for name in filter(None, names):
        path = root / name.decode(errors="surrogateescape")
        if not path.is_file() or path.is_symlink() or path.stat().st_size > MAX_NEW_FILE_BYTES:
            left_out.append(str(path))
            continue
        added = _git(
            root,
            "diff",
            "--binary",
            "--no-index",
            "--",
            "/dev/null",
            str(path.relative_to(root)),
            statuses=(0, 1),
        )
        difference = (difference or b"") + (added or b"")
    with atomic_write(folder / DIFF_FILE) as file:
        file.write(difference or b"")
    atomic_write_json(
        folder / CODE_FILE,
        fields
        | {
            "git": str(root),
            "commit": commit.decode().strip() if commit else None,
            "branch": (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b"").decode().strip()
            or None,
            "new_files_left_out": left_out,
        },
    )


def _git(directory: Path, *arguments: str, statuses: tuple[int, ...] = (0,)) -> bytes | None:
    """What a git command prints; None where it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *arguments],
            cwd=directory,
            capture_output=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode in statuses:
        return done.stdout
    return None
