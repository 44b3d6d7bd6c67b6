"""The core stays small, and a run loads little beside it. The ceilings may only be lowered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.codesize import PACKAGE, brought_by, modules, tokens_in

MAX_TOKENS = 502_500
MAX_CORE_TOKENS = 182_500
MAX_ROOMS = 11
# What an import brings, in tokens.
MAX_BROUGHT = {"lmforge.core.run": 128_000, "lmforge.core.loop": 58_500}
MAX_LOADED_TOKENS = 155_500
# What a run attaches by default: log, watchdog and console, the report, and who else trains here.
ATTACHED = ("lmforge.ops.monitor", "lmforge.ops.report", "lmforge.ops.terminal")
# Options, which `lmforge --help` reads.
READ = (
    "lmforge.text.options",
    "lmforge.serve.options",
    "lmforge.post.options",
    "lmforge.ops.options",
    "lmforge.lab.options",
)
SCRIPT = """
import json, sys
from lmforge import cli
status = cli.run(sys.argv[1:])
print(json.dumps([status, [name for name in sys.modules if name.startswith("lmforge")]]), file=sys.stderr)
"""


def test_the_package_and_its_core_are_not_larger_than_they_were() -> None:
    assert tokens_in(modules()) <= MAX_TOKENS
    assert (
        tokens_in(name for name in modules() if name.startswith("lmforge.core")) <= MAX_CORE_TOKENS
    )


def test_the_top_of_the_package_is_read_at_a_glance() -> None:
    places = [path for path in PACKAGE.iterdir() if not path.name.startswith("__")]
    rooms = [path.name for path in places if path.is_file() or any(path.rglob("*.py"))]
    assert len(rooms) <= MAX_ROOMS, rooms


@pytest.mark.parametrize("name", MAX_BROUGHT)
def test_an_import_of_the_core_brings_nothing_of_a_wing(name: str) -> None:
    brought = brought_by(name) - {"lmforge"}
    assert [each for each in sorted(brought) if not each.startswith("lmforge.core")] == []
    assert tokens_in(brought) <= MAX_BROUGHT[name]


def test_two_steps_of_pretraining_load_only_what_they_use(
    tiny_options: list[str], tmp_path: Path
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "a",
        "--train.steps",
        "2",
    ]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True)
    status, loaded = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    known = [name for name in loaded if name in modules()]
    packages = {name.rpartition(".")[0] for name in (*ATTACHED, *READ)}
    of_wings = [
        name
        for name in known
        if not name.startswith(("lmforge.core", "lmforge.cli")) and name != "lmforge"
    ]
    assert [
        name
        for name in of_wings
        if not name.startswith((*ATTACHED, *READ)) and name not in packages
    ] == []
    assert tokens_in(known) <= MAX_LOADED_TOKENS
