"""Generators of hostile input for tests/test_fuzz.py, and the contract that a command keeps for any
input.
"""

import copy
import faulthandler
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lmforge.cli import MAX_LINE, run
from lmforge.core.checkpoint.storage import BLOCK_BYTES
from lmforge.core.records.manifests import read_manifest
from lmforge.core.records.runs import MANIFEST

# Nothing here needs more than two seconds; a busy machine may take longer.
LIMIT_SECONDS = 60


def pieces(text: str) -> list[str]:
    """The parts of a text between ` ;; `, or between its lines."""
    return [piece for line in text.strip("\n").split("\n") for piece in line.split(" ;; ")]


NUMBERS = pieces(
    "0 ;; -1 ;; 1 ;; 2 ;; 7 ;; 0.5 ;; 1e308 ;; 1e999 ;; -0.0 ;; nan ;; inf ;; 2.5e-320 ;; 1_000 ;;"
    " 0x10 ;; ٣ ;; +5"
)
NUMBERS += [
    str(2**31),
    str(2**53 + 1),
    str(2**63),
    str(2**64),
    str(-(2**63) - 1),
    str(10**30),
    "9" * 5000,
    "1e" + "9" * 400,
]
TEXTS = pieces(
    r"""none ;; true ;; False ;; auto ;; [] ;; {} ;; {a = 1} ;; {"a": 1} ;; a,b ;; -- ;; - ;; = ;; a=b=c
%s%n%d ;; {0}{name} ;; $HOME ;; `id` ;; * ? [ ;; \ ;; " ;; ' ;; ключ"""
)
TEXTS += [
    "",
    " ",
    "\t",
    "a\r\nb",
    "\x1b[2J\x1b]0;x\x07",
    "\x7f",
    "\u202eabc",
    "\ufeff",
    "e\u0301",
    "\udcff",
    "\ud800",
    "👍" * 200,
]
TEXTS += ["x" * 5000, "ä" * 130, "[" * 3000, "{" * 3000, "a/" * 2000]
PATHS = pieces(
    """. ;; .. ;; ~ ;; ../neighbour ;; ../neighbour/notes.txt ;; nothing/here ;; a/b/c/d ;; /dev/null
/dev/full ;; /dev/zero ;; /proc/self/mem ;; /proc/self/environ ;; s3://nowhere/x ;; file:///etc/passwd ;; http://localhost:1/x"""
)
JSON_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**63,
    10**30,
    1e308,
    "",
    "x" * 5000,
    "\x00",
    "../..",
    [],
    {},
    [[]],
    {"": 0},
]
JSON_VALUES += [-0.0, [None] * 3, {"a": {"b": []}}, "none", "9" * 400, [0, -1], [2**62, 2**62]]
# Written as they are: json.dumps has no words for them.
RAW_JSON = [
    "NaN",
    "-Infinity",
    "1e999",
    '"\\ud800"',
    "01",
    "9" * 6000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
]


# What is no metadata of a checkpoint: a value that it does not hold, another thing, half of one,
# nothing.
DAMAGED_PICKLES = [
    b"\x80\x04h\x05.",
    pickle.dumps({}),
    pickle.dumps(["x" * 400])[:-40],
    b"",
]


def a_word(rng: random.Random) -> str:
    """What may stand for the value of any option."""
    drawn = rng.choice([*[NUMBERS] * 4, *[TEXTS] * 4, *[PATHS] * 2, None])
    if drawn is not None:
        return rng.choice(drawn)
    return "".join(
        chr(rng.choice([rng.randrange(1, 128), rng.randrange(128, 0xD800)]))
        for _ in range(rng.randrange(1, 40))
    )


def a_misspelling(rng: random.Random, word: str) -> str:
    at = rng.randrange(len(word))
    return rng.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word.upper(),
            word.replace(".", "-"),
            word[::-1],
            word * 50,
        ]
    )


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """`content` after a few mutations of its bytes."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, until = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        until = min(until, at + rng.choice([1, 8, 200, 10**6]))
        noise = rng.randbytes(rng.choice([1, 4, 64]))
        content = rng.choice(
            [
                content[:at],
                content[at:],
                content[:at] + content[until:],
                content[:until] + content[at:],
                content[:at] + noise + content[at:],
                content[:at] + noise + content[at + len(noise) :],
                content[:at]
                + rng.choice(
                    [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"', b"\\", b"[" * 3000]
                )
                + content[at:],
                b"\xef\xbb\xbf" * rng.choice([1, 2]) + content,
                content * 2,
                content.decode("latin-1").encode("utf-16"),
                b"",
            ]
        )
    return content


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """JSON of `value` with a few fields mutated: at each level one is chosen, so that long lists
    get no more than others.
    """
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _mutate_a_field(rng, value)
    text = json.dumps(value)
    return (text.replace('"@RAW@"', rng.choice(RAW_JSON)) if rng.random() < 0.9 else text).encode()


def _mutate_a_field(rng: random.Random, value: Any) -> None:
    keys: list[Any] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return None
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.75:
        return _mutate_a_field(rng, value[key])
    old = value[key]
    change = rng.randrange(10)
    if change < 5:
        # Copied: the next mutation may be of a field in it.
        value[key] = copy.deepcopy(rng.choice([*JSON_VALUES, "@RAW@", "@RAW@"]))
    elif change == 5:
        del value[key]
    elif change == 6 and isinstance(value, dict):
        value[rng.choice(["", "x" * 5000, a_misspelling(rng, str(key) or "x")])] = value.pop(key)
    elif change == 7:
        value[key] = [old] if rng.random() < 0.5 else {"a": old}
    elif isinstance(old, int | float):
        value[key] = rng.choice([-old, old + 1, old * 2, old + 0.5, str(old), old * 10**12])
    elif isinstance(old, str):
        value[key] = rng.choice(
            [old[:-1], old + "x", old * 2, old.upper(), "../" + old, "/" + old, a_word(rng)]
        )
    elif isinstance(old, list):
        value[key] = old * 2 if rng.random() < 0.5 else old[:-1]
    else:
        value[key] = copy.deepcopy(rng.choice(JSON_VALUES))
    return None


def put_sealed(file: Path, content: bytes) -> None:
    """Other content of a file of a checkpoint, with the manifest that goes with it."""
    file.write_bytes(content)
    manifest = read_manifest(file.parent)
    blocks = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    manifest.files[file.name] = {
        "bytes": len(content),
        "xxh3": [xxhash.xxh3_64_hexdigest(block) for block in blocks],
    }
    (file.parent / MANIFEST).write_text(manifest.json_text)


def contents(folder: Path) -> dict[str, str]:
    """Every file, link and folder below a folder, and what it holds. Locks may come."""
    results = {}
    for root, folders, files in os.walk(folder):
        for path in (Path(root) / name for name in (*folders, *files)):
            if path.is_symlink():
                results[str(path)] = f"link to {path.readlink()}"
            elif path.is_file() and os.access(path, os.R_OK) and path.name != ".lock":
                results[str(path)] = (
                    xxhash.xxh3_64_hexdigest(path.read_bytes())
                    if path.stat().st_size < 2**30
                    else "huge"
                )
            elif path.name != ".lock":
                results[str(path)] = "folder" if path.is_dir() else "other"
    return results


class _TookTooLong(BaseException):
    """Not an Exception: nobody catches it on the way."""


@contextmanager
def _deadline() -> Iterator[None]:
    """Ends what takes too long.

    One call of C that does so ends the whole process, with its stack.
    """

    def stop(*_: object) -> None:
        raise _TookTooLong

    handler = signal.signal(signal.SIGALRM, stop)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)  # pytest-timeout's
    faulthandler.dump_traceback_later(2 * LIMIT_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, handler)


class Contract:
    """Carries out drawn command lines in this process, and collects in what they break the
    contract.

    A command ends in time; with status 0, or with 1 or 2 and one short line on standard error that
    was meant for the user. What was there before is as it was: a command may make new files where
    it succeeds, and only in the folder of its case.
    """

    def __init__(
        self, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self._capfd, self._monkeypatch = folder, capfd, monkeypatch
        self.broken: list[str] = []
        self.statuses: list[int] = []
        (folder / "neighbour").mkdir()
        (folder / "neighbour" / "notes.txt").write_text("not to be lost\n" * 9)

    def new_case(self) -> Path:
        """A folder for the next case, in which its command is carried out."""
        case = self.folder / f"case-{len(self.statuses)}"
        case.mkdir()
        self._monkeypatch.chdir(case)
        return case

    def check(
        self, case: Path, words: list[str], note: str, stdin: bytes = b"Hi\n", trains: bool = False
    ) -> None:
        """`note` says what was done to the input.

        What `trains` may write into the run that is in its folder.
        """
        before = contents(self.folder)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capfd.readouterr()
        problem, status = "", -1
        try:
            with _deadline():
                status = run(words)
        except _TookTooLong:
            problem = f"did not end in {LIMIT_SECONDS} seconds"
        except BaseException as escaped:
            problem = f"{type(escaped).__name__} escaped: {str(escaped)[:300]}"
        out, err = self._capfd.readouterr()
        self.statuses.append(status)
        stage_error = _stage_error(err) if words[0] == "run" else None
        # A pipeline whose stage was refused has begun: its state and the folder of the stage's run
        # are there.
        trains = trains or stage_error is not None
        problem = problem or _wrong_ending(status, out, stage_error or err)
        # Of a folder itself, what is in it may grow: that is seen by the files.
        after = contents(self.folder)
        may_write = [f"{case}/"] if trains or status == 0 else []
        lost = [
            path
            for path, what in before.items()
            if after.get(path) != what and not (trains and f"{case}/" in path)
        ]
        made = [
            path
            for path in after.keys() - before.keys()
            if not any(path.startswith(folder) for folder in may_write)
        ]
        if not problem and lost:
            problem = f"status {status}, and changed {lost[:3]}"
        if not problem and made:
            problem = f"status {status}, and left {sorted(made)[:3]}"
        if problem:
            kept = [
                path.read_text("utf-8")[-700:]
                for path in Path(tempfile.gettempdir()).glob("lmforge-*.txt")
            ]
            problem = "\n".join([problem, *kept])
            self.broken.append(
                f"{note}\n    lmforge {shlex.join(words)[:1500]!r}\n    {problem}\n    stderr:"
                f" {err[-1500:]!r}"
            )
        shutil.rmtree(case, ignore_errors=True)


def _stage_error(err: str) -> str | None:
    """What a stage of a pipeline said itself, before the line of `lmforge run` that names the
    stage; None without that.
    """
    lines = err.splitlines(keepends=True)
    named = len(lines) > 1 and re.search(r": stage \S+ ended with status \d+; ", lines[-1])
    return "".join(lines[:-1]) if named else None


def _wrong_ending(status: int, out: str, err: str) -> str:
    """What is wrong with how a command ended, or ""."""
    if status not in (0, 1, 2):
        return f"status {status}"
    if "Traceback" in err or "panicked" in err or "Traceback (most" in out:
        return "a traceback"
    # The verdict of lmforge compare.
    if status == 0 or (status == 1 and not err and " differs from " in out):
        return ""
    if err.count("\n") != 1 or not err.startswith("lmforge: "):
        return f"status {status} without its one line"
    if "; its traceback is in " in err:
        return "an unexpected exception"
    if len(err) > MAX_LINE + 20 or not err[:-1].isprintable():
        return f"a line of {len(err):,} characters, printable: {err[:-1].isprintable()}"
    return ""
