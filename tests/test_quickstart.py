"""The first command of a newcomer, cut down to a few steps of each stage."""

import re
from itertools import pairwise
from pathlib import Path

from lmforge.runs import Run
from tests.conftest import Command


def test_the_quickstart_goes_the_whole_way_says_how_and_ends_with_a_table(tmp_path: Path, lmforge: Command) -> None:
    words = ["quickstart", "--folder", tmp_path, "--steps", 2, "--processes", 1]
    done = lmforge(*words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    typed = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("$ lmforge ")]
    assert typed == ["prepare", "prepare", "pretrain", "pretrain", "sft", "align", "evaluate", "generate"]
    # From the same checkpoint, one process and FSDP2 on two have the same losses; here after one step.
    assert re.findall(r"^.* 2 .* (loss|val/loss) .* (equal|NOT EQUAL)", done.stdout, re.M) == [
        ("loss", "equal"),
        ("val/loss", "equal"),
    ]
    rows = re.findall(r"(pretrain|sft|align) .* (\d\.\d{3}|\d\d?\.\d{3}) .* (\d+\.\d{3}) .*(better)", done.stdout)
    assert [row[0] for row in rows] == ["pretrain", "sft", "align"], done.stdout[-1500:]
    runs = [Run(tmp_path / "runs" / name) for name in ("quickstart", "quickstart-sft", "quickstart-align")]
    assert [run.checkpoint_steps()[-1] for run in runs] == [2, 2, 2]
    for before, after in pairwise(runs):
        assert after.load_config().model.source == before.checkpoint_path(2)
    # Called again it continues; a run that was trained further, as the README says, is compared up to where it was.
    longer = ["--train.steps", 3, "--schedule.warmup_steps", 0, "--train.compile", "off"]
    assert lmforge("pretrain", runs[0].recipe_path, *longer).returncode == 0
    again = lmforge(*words)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("trained to step 2 already") == 3
    assert re.findall(r"^.* (\d) .* (loss|val/loss) .* equal", again.stdout, re.M) == [("2", "loss"), ("2", "val/loss")]
    chat = re.findall(r"^  \S*lmforge (chat .*)$", done.stdout, re.M)
    answered = lmforge(*chat[0].split(), "--max_tokens", 4, stdin="Write a function.\n")
    assert answered.returncode == 0, answered.stderr
