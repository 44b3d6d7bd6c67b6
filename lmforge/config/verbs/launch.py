"""The options of `lmforge launch`, `jobs` and `stop`, and what a command line of `launch` asks for."""

import re
from dataclasses import dataclass
from pathlib import Path

from lmforge.config.load import SHORT_OPTIONS, STAGES, config_class, parse_config
from lmforge.config.operation import LaunchOptions
from lmforge.config.options import Options, argument, option, parse_options, read_recipe
from lmforge.config.sections import RUNS_FOLDER
from lmforge.config.stage import StageConfig
from lmforge.errors import UserError


class LaunchCommandOptions(Options):
    """What `lmforge launch` does with the recipe."""

    dry_run: bool = option(False, "print the script that would be submitted, and stop")
    sweep: tuple[str, ...] = option(
        (),
        "section.option=value,value…: a run for each combination, as a job array of slurm or pbs, otherwise one after another",
    )


class LaunchVerbOptions(LaunchOptions, LaunchCommandOptions):
    """lmforge launch [VERB] RECIPE.toml [--on slurm]: start a recipe on this machine, hosts or a cluster, and return."""

    recipe: Path = argument(..., "recipe; if it has no run.stage, write its verb first, such as sft")


class JobsOptions(Options):
    """lmforge jobs [NAME]: what `lmforge launch` has started: job, state, step, age and log of each run."""

    name: str | None = argument(None, "one run only")
    folder: Path = RUNS_FOLDER


class StopOptions(Options):
    """lmforge stop NAME: end a run that `lmforge launch` has started; it saves a checkpoint first."""

    name: str = argument(..., "name of the run")
    folder: Path = RUNS_FOLDER
    kill: bool = option(False, "end it at once, without saving")


@dataclass(frozen=True)
class LaunchRequest:
    """A command line of `lmforge launch`.

    verb       what trains the recipe
    arguments  the recipe and its options, as typed after the verb
    """

    verb: str
    recipe: Path
    arguments: tuple[str, ...]
    command: LaunchCommandOptions
    config: StageConfig


def parse_launch(arguments: list[str]) -> LaunchRequest:
    """Options without a section are those of `[launch]`; the others are the recipe's. Raises UserError."""
    first_option = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    given, words = arguments[:first_option], arguments[first_option:]
    verb = given.pop(0) if given and given[0] in STAGES else None
    if len(given) != 1:
        expected = "give one recipe, such as lmforge launch recipe.toml --on slurm"
        raise UserError(f"launch: {expected}" if not given else f"unexpected argument {given[1]!r}; {expected}")
    recipe = Path(given[0])
    table = read_recipe(recipe)
    if "stages" in table:
        raise UserError(
            f"{recipe}: a pipeline, which is run on one machine (lmforge run {recipe}); launch its stages one after another"
            " with a job script (docs/clusters.md)"
        )
    verb = verb or config_class(table, str(recipe)).of_stage
    own, rest = _split_options(words)
    command = parse_options(LaunchCommandOptions, own)
    config: StageConfig = parse_config(STAGES[verb], [str(recipe), *rest])
    return LaunchRequest(verb, recipe, (str(recipe), *rest), command, config)


def _split_options(words: list[str]) -> tuple[list[str], list[str]]:
    """(options of the command itself, options of the recipe, with those of `[launch]` spelt out)."""
    own: list[str] = []
    rest: list[str] = []
    target = rest
    for word in words:
        if option_name := re.match(r"--([A-Za-z][\w-]*)(?==|$)", word):
            name = option_name[1].replace("-", "_")
            target = own if name in LaunchCommandOptions.model_fields else rest
            if name in LaunchOptions.model_fields and name not in SHORT_OPTIONS:
                word = f"--launch.{name}{word[option_name.end() :]}"
        elif re.match(r"--[A-Za-z]", word):
            target = rest
        target.append(word)
    return own, rest
