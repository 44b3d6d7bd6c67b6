"""How rungs are trained: what is refused before any of them, what counts as diverged, and how
signals end a ladder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmforge.core.errors import UserError
from lmforge.core.files.locks import hold_lock
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.runs import Run
from lmforge.core.steps.resume import find_resume_point
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.ladder.rungs import Trial
from lmforge.lab.ladder.runs import RungRunner, has_diverged

MakeRung = Callable[..., Trial]


@pytest.fixture
def make_rung(tiny_options: list[str]) -> MakeRung:
    def make(name: str, *words: str) -> Trial:
        config = parse_config(PretrainConfig, [*tiny_options, "--run.name", name, *words])
        return Trial(config, model_config_from_options(config.model, 512))

    return make


def test_a_rung_with_other_options_is_refused_before_another_one_is_trained(
    make_rung: MakeRung, tiny_run: Path
) -> None:
    shutil.copytree(tiny_run, "runs/stale")
    said: list[str] = []
    with pytest.raises(
        UserError, match=r"runs/stale: begun with another optimizer.lr than this ladder's"
    ):
        RungRunner(Path(), 1, said.append).run(
            [make_rung("new"), make_rung("stale", "--optimizer.lr", "0.5")]
        )
    assert (said, Path("runs/new").exists()) == ([], False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_ladder_that_waits_for_a_rung_of_another_process(
    make_rung: MakeRung, number: int
) -> None:
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        if line.endswith("waiting for it"):
            os.kill(os.getpid(), number)

    Path("runs/far").mkdir(parents=True)
    with hold_lock(Path("runs/far/.lock")) as is_ours:
        assert is_ours
        assert RungRunner(Path(), 1, tell).run([make_rung("far"), make_rung("later")]) == number
    assert said == [
        "far: trains already, in another process; waiting for it",
        "far: goes on without this ladder",
    ]


def test_only_bad_steps_in_a_row_are_a_divergence(tiny_run: Path) -> None:
    shutil.copytree(tiny_run, "runs/skipped")
    run = Run.open(Path("runs/skipped"))

    def end(**fields: str) -> bool:
        with open(run.events_path, "a") as file:
            for event in ({"kind": "bad step", "reason": "loss is nan"}, {"kind": "end", **fields}):
                file.write(
                    json.dumps({"time": "2026-01-01T00:00:00+00:00", "step": 3, **event}) + "\n"
                )
        return has_diverged(run)

    assert not end(state="failed", error="KeyboardInterrupt")
    assert not end(state="failed", error="No space left on device")
    assert end(
        state="failed",
        error="step 7: 3 bad steps in a row, after 2 rollbacks; a lower optimizer.lr may help",
    )
    assert not end(state="interrupted")


LADDER = """
import sys
from pathlib import Path
from functools import partial
from lmforge.core.options.load import parse_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.ladder.rungs import Trial
from lmforge.lab.ladder.runs import RungRunner

config = parse_config(PretrainConfig, sys.argv[1:])
rung = Trial(config, model_config_from_options(config.model, 512))
sys.exit(RungRunner(Path(), 1, partial(print, flush=True)).run([rung]))
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_lets_a_rung_save_and_a_repeated_command_goes_on(
    tiny_options: list[str],
) -> None:
    words = [
        *tiny_options,
        "--run.name",
        "rung",
        "--train.steps",
        "100000",
        "--log.every_steps",
        "1",
    ]
    ladder = subprocess.Popen([sys.executable, "-c", LADDER, *words], process_group=0)
    while not Path("runs/rung/metrics.jsonl").exists():
        assert ladder.poll() is None
        time.sleep(0.1)
    os.killpg(ladder.pid, signal.SIGINT)  # as a terminal does
    assert ladder.wait() == signal.SIGINT
    saved = find_resume_point(Run.open(Path("runs/rung")), 100_000)
    assert 0 < saved.step < 100_000
    assert "stopped" in Path("rung.log").read_text()
