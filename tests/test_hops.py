"""The way from the typed command to the first step, and from the step to the cross-entropy, is
short enough to read.

Counted are the functions of lmforge that are on the call stack, in a run of one process in fp32
that is not compiled.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path

from lmforge import cli
from lmforge.core.losses.language import _ChunkedCrossEntropy
from lmforge.core.parallel.parallel_model import train_step
from lmforge.core import run  # so that importing it is not traced

PACKAGE, found = str(Path(cli.__file__).parent), {}

def look(frame, event, argument):
    marks = {train_step.__code__: "step", _ChunkedCrossEntropy.forward.__code__: "loss"}
    if event == "call" and (mark := marks.get(frame.f_code)) and mark not in found:
        if mark == "loss" and "step" not in found:  # of a trace, by which the run predicts what it needs
            return
        stack = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                stack.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))
            frame = frame.f_back
        found[mark] = stack[::-1]
        if len(found) == 2:
            sys.setprofile(None)
            print(json.dumps(found), file=sys.__stderr__)

sys.setprofile(look)
cli.main()
"""


@pytest.mark.slow
def test_the_command_reaches_the_first_step_in_seven_functions_as_the_step_does_the_loss(
    tiny_options: list[str], tmp_path: Path
) -> None:
    command = [
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
        "--run.name",
        "a",
        "--train.steps",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    stacks = json.loads(next(line for line in done.stderr.splitlines() if line.startswith("{")))
    to_step = stacks["step"]
    to_loss = stacks["loss"][len(to_step) - 1 :]
    assert to_step[0] == ["/cli.py", "main"]
    assert to_step[-1][1] == to_loss[0][1] == "train_step"
    assert to_loss[-1][1] == "_ChunkedCrossEntropy.forward"
    assert (len(to_step) <= 7, len({file for file, _ in to_step}) <= 4) == (True, True), to_step
    assert (len(to_loss) <= 7, len({file for file, _ in to_loss}) <= 3) == (True, True), to_loss
