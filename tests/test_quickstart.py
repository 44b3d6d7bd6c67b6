"""The first command of a new user, reduced to a few steps of each stage and a part of the standard
library.
"""

import re
import shutil
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from tests.conftest import Command

# `lmforge` where the standard library is in the folder of the first argument, on one thread: so its
# ranks can be forked after it has trained itself. The whole library is prepared in test_docs.py.
WITH_LIBRARY = """
import sys
from types import SimpleNamespace
from lmforge.cli import main
from lmforge.core.distributed import distributed
from lmforge.text.sources import text_sources
from lmforge.serve.decoding import model_loading
if __name__ == "__main__":
    library = sys.argv.pop(1)
    text_sources.sysconfig = SimpleNamespace(get_path=lambda name: library)
    distributed.threads_per_rank = model_loading.threads_per_rank = lambda ranks: 1
    main()
"""


@pytest.mark.slow
def test_the_quickstart_goes_the_whole_way_says_how_and_ends_with_a_table(
    tmp_path: Path, lmforge: Command, program: Command
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        if file.stat().st_size < 20_000:
            shutil.copy(file, library)
    words = [library, "quickstart", "--folder", tmp_path, "--steps", 2, "--processes", 1]
    done = program(WITH_LIBRARY, *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    typed = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ lmforge ")]
    assert typed == [
        "prepare",
        "prepare",
        "pretrain",
        "pretrain",
        "sft",
        "align",
        "evaluate",
        "generate",
    ]
    # From the same checkpoint, one process and FSDP2 on two have the same losses; here after one
    # step.
    assert re.findall(r"^.* 2 .* (loss|val/loss) .* (equal|NOT EQUAL)", done.stdout, re.M) == [
        ("loss", "equal"),
        ("val/loss", "equal"),
    ]
    rows = re.findall(
        r"(pretrain|sft|align) .* (\d\.\d{3}|\d\d?\.\d{3}) .* (\d+\.\d{3}) .*(better)", done.stdout
    )
    assert [row[0] for row in rows] == ["pretrain", "sft", "align"], done.stdout[-1500:]
    runs = [
        Run(tmp_path / "runs" / name)
        for name in ("quickstart", "quickstart-sft", "quickstart-align")
    ]
    assert [run.checkpoint_steps()[-1] for run in runs] == [2, 2, 2]
    for before, after in pairwise(runs):
        assert after.load_config().model.source == before.checkpoint_path(2)
    # Called again it continues; a run that was trained further, as the README says, is compared up
    # to where it was.
    longer = ["--train.steps", 3, "--schedule.warmup_steps", 0, "--train.compile", "off"]
    assert lmforge("pretrain", runs[0].recipe_path, *longer).returncode == 0
    again = program(WITH_LIBRARY, *words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("trained to step 2 already") == 3
    assert re.findall(r"^.* (\d) .* (loss|val/loss) .* equal", again.stdout, re.M) == [
        ("2", "loss"),
        ("2", "val/loss"),
    ]
    chat = re.findall(r"^  \S*lmforge (chat .*)$", done.stdout, re.M)
    answered = lmforge(*chat[0].split(), "--max_tokens", 4, stdin="Write a function.\n")
    assert answered.returncode == 0, answered.stderr
