"""The options of `quickstart` and `run`, and the contents of a pipeline file."""

import re
from collections.abc import Iterator
from pathlib import Path

from lmforge.config.options import Options, argument, option
from lmforge.config.ranges import (
    COUNT,
    RANKS,
)
from lmforge.config.sections import RUNS_FOLDER
from lmforge.untrusted import cut, name_problem, quoted


class QuickstartOptions(Options):
    """lmforge quickstart: all stages on the Python standard library's source, some 5 minutes on 2 cores."""

    folder: Path = option(Path("."), "folder for data and runs")
    steps: int | None = option(
        None, "steps of each stage, up to 10 with small batches (default: the recipe's)", **{**COUNT, "gt": 1}
    )
    processes: int | None = option(None, "ranks to start (default: one for each GPU, or one)", **RANKS)
    prompt: str = option("def ", "prompt that the model continues at the end")
    overwrite: bool = option(False, "begin again instead of continuing")


class RunPipelineOptions(Options):
    """lmforge run PIPELINE.toml: a pipeline: stages in order, each from the run of the one before it."""

    file: Path = argument(..., "a TOML file of [[stages]]: each a verb, with a recipe and arguments")


class PipelineStageOptions(Options):
    """One stage: a verb with its arguments, as typed after `lmforge`."""

    verb: str = option(..., "verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(None, "name by which later stages refer to its run, as {NAME} (default: the verb)")
    recipe: Path | None = option(None, "recipe of a verb that trains, relative to the pipeline file")
    arguments: tuple[str, ...] = option((), "further arguments; {NAME} stands for the run of an earlier stage")

    def problems(self) -> Iterator[str]:
        if word := next((word for word in self.arguments if "\0" in word), None):
            yield f"stages: arguments: expected words of a command line, without NUL, got {quoted(word)}"


class PipelineOptions(Options):
    """A pipeline file: where its runs are, and [[stages]]."""

    name: str | None = option(None, "name of the pipeline; runs are FOLDER/NAME-STAGE (default: the file's name)")
    folder: Path = RUNS_FOLDER
    stages: tuple[PipelineStageOptions, ...] = option(..., "[[stages]], in order")

    def problems(self) -> Iterator[str]:
        if self.name and (problem := name_problem(self.name)):
            yield f"name: {problem}"
        names = [stage.name or stage.verb for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                yield f"stages: two are called {cut(name)}; give each its own name"
            if not re.fullmatch(r"[\w.-]+", name):
                yield f"stages: {cut(name)!r} is not a valid name; use letters, digits, dots and dashes"
