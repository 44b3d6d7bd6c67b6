"""The config of a stage, from `[RECIPE.toml] --section.option value …`."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from lmforge.core.errors import UserError, did_you_mean
from lmforge.core.files.untrusted import quoted
from lmforge.core.options.extend import extended
from lmforge.core.options.options import (
    Options,
    OptionsT,
    merge_options,
    parse_options,
    read_recipe,
    validate_options,
)
from lmforge.core.options.stage import StageConfig
from lmforge.core.plugins import load_plugins, resolve_plugins
from lmforge.core.registry import find, import_named, names, names_unchecked

StageConfigT = TypeVar("StageConfigT", bound=StageConfig)


class _Stages(Mapping[str, type[StageConfig]]):
    """The config class of each stage by its name; a class is imported when it is first asked
    for.
    """

    def __getitem__(self, name: str) -> type[StageConfig]:
        entry = find("stage", name)
        if entry is None:
            raise KeyError(name)
        config: type[StageConfig] = import_named(entry.facts["config"])
        return config

    def __iter__(self) -> Iterator[str]:
        return iter(names("stage"))

    def __len__(self) -> int:
        return len(names("stage"))


STAGES = _Stages()
# Options that override arguments and recipe when a stage resumes: what was to be deleted has been
# deleted.
RESUME_ARGUMENTS = ["--run.overwrite", "false", "--run.resume", "auto"]


def config_class(recipe: dict[str, object], source: str) -> type[StageConfig]:
    """The config class of a recipe, by its run.stage; PretrainConfig where it has none.

    Raises UserError.
    """
    return STAGES[_stage_of(recipe, source) or "pretrain"]


def _stage_of(recipe: dict[str, object], source: str) -> str | None:
    run = recipe.get("run")
    stage = run.get("stage") if isinstance(run, dict) else None
    if stage is not None and (not isinstance(stage, str) or stage not in STAGES):
        raise UserError(
            f"{source}: run.stage: expected one of {', '.join(STAGES)}, got {quoted(stage)}"
        )
    return stage


def read_config(recipe: Path) -> StageConfig:
    """The config of a recipe alone, of the stage that it names. Raises UserError."""
    table = read_recipe(recipe)
    options_class = load_extended(config_class(table, str(recipe)), table, recipe)
    return validate_options(options_class, table, str(recipe)).with_name(recipe.stem)


def read_record(recipe: Path) -> StageConfig:
    """The config of a recipe that a run has recorded, without loading its plugins: their names are
    kept, their options are left out, and so are those of a version of lmforge that had more.

    Raises UserError.
    """
    table = read_recipe(recipe)
    options_class = config_class(table, str(recipe))
    for section, values in table.items():
        field = options_class.model_fields.get(section)
        known = getattr(field and field.annotation, "model_fields", None)
        if known and isinstance(values, dict):
            table[section] = {name: values[name] for name in values if name in known}
    with names_unchecked():
        return validate_options(options_class, table, str(recipe))


def load_extended(
    options_class: type[OptionsT],
    table: dict[str, Any],
    recipe: Path | None = None,
    arguments: Sequence[str] = (),
) -> type[OptionsT]:
    """Load installed plugins and those that a recipe and a command line name.

    Returns the class with their options.

    Paths in `table`, the content of `recipe`, become absolute. Raises UserError for a plugin that
    cannot be used.
    """
    if "plugins" not in options_class.model_fields:
        return options_class
    resolve_plugins(table, recipe)
    typed = _typed_plugins(arguments)
    given = table.get("plugins", ()) if typed is None else typed
    load_plugins(
        [path for path in given if isinstance(path, str)] if isinstance(given, list | tuple) else ()
    )
    return extended(options_class)


def _typed_plugins(arguments: Sequence[str]) -> list[str] | None:
    """The values of the last --plugins; None where there is none."""
    paths: list[str] | None = None
    for at, word in enumerate(arguments):
        if word == "--plugins":
            paths = list(
                itertools.takewhile(lambda value: not value.startswith("--"), arguments[at + 1 :])
            )
        elif word.startswith("--plugins="):
            paths = [word.partition("=")[2]]
    return paths


def parse_verb(options_class: type[OptionsT], arguments: list[str]) -> OptionsT:
    """The options of a verb without a recipe, with those of plugins. Raises UserError."""
    return parse_options(load_extended(options_class, {}, None, arguments), arguments)


def parse_config(options_class: type[StageConfigT], arguments: list[str]) -> StageConfigT:
    """A recipe, if the first argument is one, overridden by the options after it.

    Raises UserError.
    """
    recipe, rest = (
        (Path(arguments[0]), arguments[1:])
        if arguments and not arguments[0].startswith("-")
        else (None, arguments)
    )
    table = read_recipe(recipe) if recipe else {}
    stage = _stage_of(table, str(recipe))
    options_class = cast(
        "type[StageConfigT]", options_class.FOR_STAGE.get(stage or "", options_class)
    )
    # Checked before options that only the other stage has are refused.
    if stage not in (None, options_class.of_stage):
        verb = options_class.of_verb or options_class.of_stage
        raise UserError(f"{recipe}: this recipe is for `lmforge {stage}`, not for `lmforge {verb}`")
    options_class = load_extended(options_class, table, recipe, rest)
    config = parse_options(
        options_class, _expand_short_options(options_class, rest), table, str(recipe or "")
    )
    return config.with_name(recipe.stem if recipe else "run")


def build_config(stage: str, options: Mapping[str, Any], recipe: Path | None = None) -> StageConfig:
    """The config of a stage for a program: a recipe, if there is one, overridden by options such as
    "train.steps". Raises UserError.
    """
    if stage not in STAGES:
        raise UserError(
            f"{stage}: no stage of training{did_you_mean(stage, STAGES)}; there are"
            f" {', '.join(STAGES)}"
        )
    table = read_recipe(recipe) if recipe else {}
    given = {tuple(name.split(".")): value for name, value in options.items()}
    words = ["--plugins", *map(str, options["plugins"])] if "plugins" in options else []
    options_class = load_extended(STAGES[stage], table, recipe, words)
    config = merge_options(options_class, given, table, str(recipe or ""))
    return config.with_name(recipe.stem if recipe else "run")


def _expand_short_options(options_class: type[StageConfig], arguments: list[str]) -> list[str]:
    """Spell out the short options of a class. `--resume` without a value means required."""
    expanded = []
    for at, word in enumerate(arguments):
        name = re.match(r"--([\w-]+)(?==|$)", word)
        full = options_class.SHORT.get(name[1].replace("-", "_")) if name else None
        if name is None or full is None or full.partition(".")[0] not in options_class.model_fields:
            expanded.append(word)
            continue
        expanded.append(f"--{full}{word[name.end() :]}")
        if word == "--resume" and (at + 1 == len(arguments) or arguments[at + 1].startswith("--")):
            expanded.append("required")
    return expanded


def flat_options(options: Options, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.name, value as JSON has it) of each option."""
    for name, value in options.model_dump(mode="json").items():
        child = getattr(options, name)
        if isinstance(child, Options):
            yield from flat_options(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
