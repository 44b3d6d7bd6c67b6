"""The options of `lmforge run` and the contents of a pipeline file."""

import re
from pathlib import Path

from pydantic import model_validator

from lmforge.config.options import Options, argument, option


class RunPipelineOptions(Options):
    """lmforge run PIPELINE.toml: a pipeline: stages in order, each from the run of the one before it."""

    file: Path = argument(..., "a TOML file of [[stages]]: each a verb, with a recipe and arguments")


class PipelineStageOptions(Options):
    """One stage: a verb with its arguments, as typed after `lmforge`."""

    verb: str = option(..., "verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(None, "name by which later stages refer to its run, as {NAME} (default: the verb)")
    recipe: Path | None = option(None, "recipe of a verb that trains, relative to the pipeline file")
    arguments: tuple[str, ...] = option((), "further arguments; {NAME} stands for the run of an earlier stage")


class PipelineOptions(Options):
    """A pipeline file: where its runs are, and [[stages]]."""

    name: str | None = option(None, "name of the pipeline; runs are FOLDER/NAME-STAGE (default: the file's name)")
    folder: Path = option(Path("runs"), "folder that holds the runs")
    stages: tuple[PipelineStageOptions, ...] = option(..., "[[stages]], in order")

    @model_validator(mode="after")
    def _check_names(self) -> "PipelineOptions":
        names = [stage.name or stage.verb for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stages: two are called {name}; give each its own name")
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"stages: {name!r} is not a valid name; use letters, digits, dots and dashes")
        return self
