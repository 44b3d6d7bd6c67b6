"""The options of the verbs that start runs and look at them: `run`, `launch`, `stop`,
`logs`, `runs`, `compare`, `report`, `top`, and `quickstart`; the contents of a pipeline file, and
what a command line of `launch` asks for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut, name_problem, quoted, words_problem
from lmforge.core.options.load import STAGES, config_class, parse_config
from lmforge.core.options.operation import LaunchOptions
from lmforge.core.options.options import (
    OUTPUT_FORMAT,
    Options,
    argument,
    option,
    parse_options,
    read_recipe,
)
from lmforge.core.options.ranges import COUNT, RANKS
from lmforge.core.options.sections import RUNS_FOLDER
from lmforge.core.options.stage import StageConfig


class QuickstartOptions(Options):
    """lmforge quickstart: all stages on the Python standard library's source, some 5 minutes on 2
    cores.
    """

    folder: Path = option(Path("."), "folder for data and runs")
    steps: int | None = option(
        None,
        "steps of each stage, up to 10 with small batches (default: the recipe's)",
        **{**COUNT, "gt": 1},
    )
    processes: int | None = option(
        None, "ranks to start (default: one for each GPU, or one)", **RANKS
    )
    prompt: str = option("def ", "prompt that the model continues at the end")
    overwrite: bool = option(False, "begin again instead of continuing")


class RunPipelineOptions(Options):
    """lmforge run PIPELINE.toml: a pipeline: stages in order, each from the run of the one before
    it.
    """

    file: Path = argument(
        ..., "a TOML file of [[stages]]: each a verb, with a recipe and arguments"
    )


class PipelineStageOptions(Options):
    """One stage: a verb with its arguments, as typed after `lmforge`."""

    verb: str = option(..., "verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(
        None, "name by which later stages refer to its run, as {NAME} (default: the verb)"
    )
    recipe: Path | None = option(
        None, "recipe of a verb that trains, relative to the pipeline file"
    )
    arguments: tuple[str, ...] = option(
        (), "further arguments; {NAME} stands for the run of an earlier stage"
    )

    def problems(self) -> Iterator[str]:
        if word := next((word for word in self.arguments if "\0" in word), None):
            yield (
                "stages: arguments: expected words of a command line, without NUL, got"
                f" {quoted(word)}"
            )


class PipelineOptions(Options):
    """A pipeline file: where its runs are, and [[stages]]."""

    name: str | None = option(
        None, "name of the pipeline; runs are FOLDER/NAME-STAGE (default: the file's name)"
    )
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
                yield (
                    f"stages: {cut(name)!r} is not a valid name; use letters, digits, dots and"
                    " dashes"
                )


class LaunchCommandOptions(Options):
    """What `lmforge launch` does with the recipe."""

    dry_run: bool = option(False, "print the script that would be submitted, and stop")


class LaunchVerbOptions(LaunchOptions, LaunchCommandOptions):
    """lmforge launch [VERB] RECIPE.toml [--on slurm]: start a recipe on this machine, hosts or a
    cluster, and return.
    """

    recipe: Path = argument(
        ..., "recipe; if it has no run.stage, write its verb first, such as sft"
    )


class StopOptions(Options):
    """lmforge stop NAME: end a run that `lmforge launch` has started; it saves a checkpoint
    first.
    """

    name: str = argument(..., "name of the run")
    folder: Path = RUNS_FOLDER
    kill: bool = option(False, "end it at once, without saving")


@dataclass(frozen=True)
class LaunchRequest:
    """A command line of `lmforge launch`.

    verb    what trains the recipe
    config  of the recipe, with the options that were typed
    """

    verb: str
    command: LaunchCommandOptions
    config: StageConfig


def parse_launch(arguments: list[str]) -> LaunchRequest:
    """Options without a section are those of `[launch]`; the others are the recipe's.

    Raises UserError.
    """
    first_option = next(
        (at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments)
    )
    given = arguments[:first_option]
    words = arguments[first_option:]
    verb = None
    if given and given[0] in STAGES:
        verb = given.pop(0)
    if len(given) != 1:
        expected = "give one recipe, such as lmforge launch recipe.toml --on slurm"
        raise UserError(
            f"launch: {expected}" if not given else f"unexpected argument {given[1]!r}; {expected}"
        )
    recipe = Path(given[0])
    table = read_recipe(recipe)
    if "stages" in table:
        raise UserError(
            f"{recipe}: a pipeline, which is run on one machine (lmforge run {recipe}); launch its"
            " stages one after another with a job script (docs/clusters.md)"
        )
    verb = verb or config_class(table, str(recipe)).of_stage
    own, rest = _split_options(words)
    command = parse_options(LaunchCommandOptions, own)
    config: StageConfig = parse_config(STAGES[verb], [str(recipe), *rest])
    return LaunchRequest(verb, command, config)


def _split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """(options of the command itself, options of the recipe, with those of `[launch]` spelt
    out).
    """
    own: list[str] = []
    rest: list[str] = []
    target = rest
    for word in words:
        if option_name := re.match(r"--([A-Za-z][\w-]*)(?==|$)", word):
            name = option_name[1].replace("-", "_")
            target = own if name in LaunchCommandOptions.model_fields else rest
            if name in LaunchOptions.model_fields and name not in StageConfig.SHORT:
                word = f"--launch.{name}{word[option_name.end() :]}"
        elif re.match(r"--[A-Za-z]", word):
            target = rest
        target.append(word)
    return own, rest


class LogsOptions(Options):
    """lmforge logs RUN [--rank N] [--follow] [--errors]: the logs of all ranks in one view, the
    first error first.
    """

    run: Path = argument(..., "directory of a run")
    rank: int | None = option(None, "show only this rank (default: all)", ge=0, lt=RANKS["le"])
    follow: bool = option(False, "keep printing new lines, across restarts, until the run ends")
    errors: bool = option(
        False,
        "show only errors of failed ranks, the cause first; of all attempts without --attempt",
    )
    attempt: int | None = option(None, "number of the attempt (default: the last)", **COUNT)
    lines: int | None = option(
        50, "print the last N lines of all ranks together; none prints all", **COUNT
    )


class RunsOptions(Options):
    """lmforge runs [FOLDER]: all runs in a folder: state, step, loss and speed, and the jobs that
    `lmforge launch` has started.
    """

    folder: Path = argument(Path("runs"), "folder that holds the runs, or one run")
    watch: bool = option(
        False, "update the table of runs, without jobs, every two seconds, until Ctrl-C"
    )
    output: Literal["text", "json"] = option(
        "text", "output format: text, or one JSON object per run, without jobs"
    )

    def problems(self) -> Iterator[str]:
        if self.watch and self.output == "json":
            yield "--watch: not with --output json; call it again instead"


class CompareOptions(Options):
    """lmforge compare RUN RUN [RUN …]: where runs begin to differ by more than rounding, and what
    else differs in them.
    """

    runs: tuple[Path, ...] = argument(..., "directories of runs; each is compared with the first")
    weights: bool = option(False, "compare the checkpoints of the same steps too")
    output: Literal["text", "json"] = OUTPUT_FORMAT

    def problems(self) -> Iterator[str]:
        if len(self.runs) < 2:
            yield "runs: name two runs or more"


class ReportOptions(Options):
    """lmforge report RUN [RUN …]: one HTML page of a run, several side by side, or all stages of a
    pipeline.
    """

    runs: tuple[Path, ...] = argument(
        ..., "runs, or the TOML file of a pipeline for the runs of its stages"
    )
    out: Path | None = option(
        None, "file to write (default: report.html, of a single run in its directory)"
    )

    def problems(self) -> Iterator[str]:
        if not self.runs:
            yield "runs: name a run"
        if self.out is not None and self.out.suffix not in (".html", ".htm"):
            yield f"--out: {cut(str(self.out))}: expected a name that ends with .html"


class TopOptions(Options):
    """lmforge top [RUN|HOST …]: what hosts, GPUs and the ranks of a run do, live; without a name,
    this host.
    """

    names: tuple[str, ...] = argument(
        (), "directories of runs, and hosts that are asked over ssh (default: this host)"
    )
    slurm_job: int | None = option(None, "ask the hosts of this Slurm job too, over srun", **COUNT)
    once: bool = option(False, "print once, as plain text, and end")
    output: Literal["text", "json"] = option(
        "text",
        "output format: text, or JSON: without --once one object per line every two seconds",
    )
    timeout_seconds: float = option(
        10.0, "seconds to wait for the first answer of a host", ge=1, le=3600
    )
    ssh_command: str = option("ssh", "ssh with options of its own, such as `ssh -p 2222`")
    remote_command: str | None = option(
        None,
        "command that runs lmforge on the other hosts (default: this Python, at the same path"
        " there)",
    )

    def problems(self) -> Iterator[str]:
        if problem := words_problem(self.ssh_command):
            yield f"--ssh_command: {problem}"
