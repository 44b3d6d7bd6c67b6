"""From `[RECIPE.toml] --section.option value …` to the config of a stage."""

import re
from pathlib import Path
from typing import Any, TypeVar

from lmforge.config.align import AlignConfig
from lmforge.config.options import parse_options, read_recipe
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import SftConfig
from lmforge.errors import UserError

StageConfigT = TypeVar("StageConfigT", bound=StageConfig)

STAGES: dict[str, type[StageConfig]] = {"pretrain": PretrainConfig, "sft": SftConfig, "align": AlignConfig}
# What a stage that resumes is given, whatever its arguments and recipe say: what was to be deleted has been.
RESUME_ARGUMENTS = ["--run.overwrite", "false", "--run.resume", "auto"]
# Options that may be typed without their section.
SHORT_OPTIONS = {
    "method": "align.method",
    "deterministic": "train.deterministic",
    "resume": "run.resume",
    "sweep": "bench.sweep",
    "trace": "bench.trace",
}


def config_class(recipe: dict[str, object], source: str) -> type[StageConfig]:
    """The config class of a recipe, by its run.stage; PretrainConfig where it has none. Raises UserError."""
    run = recipe.get("run")
    stage = run.get("stage") if isinstance(run, dict) else None
    if stage is None:
        return PretrainConfig
    if not isinstance(stage, str) or stage not in STAGES:
        raise UserError(f"{source}: run.stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    return STAGES[stage]


def load_config(arguments: list[str], stage: str = "pretrain") -> Any:
    """The config of a stage, for a command line without the verb. Raises UserError."""
    return parse_config(STAGES[stage], arguments)


def parse_config(options_class: type[StageConfigT], arguments: list[str]) -> StageConfigT:
    """A recipe, if the first argument is one, overridden by the options after it. Raises UserError."""
    recipe, rest = (Path(arguments[0]), arguments[1:]) if arguments and not arguments[0].startswith("-") else (None, arguments)
    table = read_recipe(recipe) if recipe else {}
    config = parse_options(options_class, _expand_short_options(options_class, rest), table, str(recipe or ""))
    return config.with_name(recipe.stem if recipe else "run")


def _expand_short_options(options_class: type[StageConfig], arguments: list[str]) -> list[str]:
    """Spell out SHORT_OPTIONS. `--resume` without a value means required."""
    expanded = []
    for at, word in enumerate(arguments):
        name = re.match(r"--(\w+)(?==|$)", word)
        full = SHORT_OPTIONS.get(name[1]) if name else None
        if name is None or full is None or full.partition(".")[0] not in options_class.model_fields:
            expanded.append(word)
            continue
        expanded.append(f"--{full}{word[name.end() :]}")
        if word == "--resume" and (at + 1 == len(arguments) or arguments[at + 1].startswith("--")):
            expanded.append("required")
    return expanded
