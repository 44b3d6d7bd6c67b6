"""For tests of `lmforge launch`: a folder to type commands in, with a recipe, and waiting for what
was started there.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from lmforge.core.options.load import parse_config
from lmforge.core.options.options import to_toml
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.runs import Run
from tests.distributed.conftest import weights
from tests.support.preloaded import preloaded

WAIT_SECONDS = 100


class Desk:
    """A folder with `recipe.toml`, in which lmforge commands are typed with the same variables."""

    def __init__(self, folder: Path, options: list[str], **variables: str) -> None:
        self.folder, self.variables = folder, variables
        self._said = folder / "said"
        self._said.mkdir()
        self.recipe = folder / "recipe.toml"
        config = parse_config(PretrainConfig, options)._with_run(name="")
        self.recipe.write_text(to_toml(config, changed_only=True))
        self._launched: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End what a test that failed has left running."""
        for name in self._launched:
            if not (self.folder / "runs" / name / "launch" / "status").exists():
                self("stop", name, "--kill")

    def __call__(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Type a command, and wait for its end."""
        line = [str(word) for word in words]
        said = self._said / str(len(list(self._said.iterdir())))
        said.mkdir()
        return preloaded().run(line, said, cwd=self.folder, variables=self.variables)

    def launch(self, *words: object) -> Run:
        """Launch the recipe.

        Returns its run, named as the last --run.name says, or as the recipe.
        """
        done = self("launch", "recipe.toml", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        line = list(words)
        name = (
            str(line[len(line) - 1 - line[::-1].index("--run.name") + 1])
            if "--run.name" in line
            else "recipe"
        )
        self._launched.append(name)
        return self.run(name)

    def run(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    def refusal(self, *words: object) -> str:
        """The one line with which a command is refused, after which no run has begun."""
        before = self._launched_files()
        done = self(*words)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.startswith("lmforge: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert self._launched_files() == before
        return done.stderr.removeprefix("lmforge: ").rstrip("\n")

    def _launched_files(self) -> list[Path]:
        runs = self.folder / "runs"
        return sorted([*runs.glob("*"), *runs.glob("*/.*launch*"), *runs.glob("*/launch/*")])

    def state(self, name: str) -> str:
        """The state of the job and what is said about it, as `lmforge runs` prints it."""
        done = self("runs", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("launched")[2].splitlines()[1]

    def wait_for_state(self, run: Run, pattern: str) -> None:
        """Wait until `lmforge runs` prints what matches of the job."""
        self.wait(lambda: re.search(pattern, self.state(run.path.name)) is not None, run)

    def wait_for_end(self, run: Run, seconds: float = WAIT_SECONDS) -> int:
        """Wait until the job has left its status. Returns it."""
        status = run.path / "launch" / "status"
        self.wait(lambda: status.exists() and status.read_text() != "", run, seconds)
        return int(status.read_text())

    def wait_for_step(self, run: Run, step: int) -> None:
        """Wait until the metrics tell of a step."""
        self.wait(lambda: any(record["step"] >= step for record in run.read_metrics()), run)

    def wait(self, reached: Callable[[], bool], run: Run, seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, self.output(run)
            time.sleep(0.05)

    def output(self, run: Run) -> str:
        """What the job has printed on all nodes."""
        files = sorted((run.path / "launch").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)


def job_id(run: Run) -> str:
    return str(json.loads((run.path / "launch" / "job.json").read_text())["job_id"])


def losses(run: Run) -> dict[int, float]:
    return {
        record["step"]: record["loss"]
        for record in run.read_metrics()
        if record.get("loss") is not None
    }


def assert_same_result(run: Run, reference: Run) -> None:
    """The same losses and the same weights, to the last bit."""
    assert losses(run) == losses(reference)
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == tensor).all()) for name, tensor in theirs.items())


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def with_programs(folder: Path) -> str:
    """A PATH on which the programs of `folder` come first."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
