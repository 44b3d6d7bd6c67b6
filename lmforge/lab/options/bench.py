"""The options of `lmforge bench`, and the combinations of a `--sweep`."""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from lmforge.core.errors import UserError, did_you_mean
from lmforge.core.files.untrusted import cut
from lmforge.core.options.options import OUTPUT_FORMAT, Options, iter_options, option, section
from lmforge.core.options.ranges import COUNT, DURATION
from lmforge.core.options.stage import PretrainConfig

MAX_COMBINATIONS = 1000
# What a sweep may vary besides options: the recipe.
RECIPE_AXIS = "recipe"


class BenchOptions(Options):
    """The steps that are timed, and how long they are."""

    steps: int = option(10, "timed steps", **COUNT)
    warmup_steps: int = option(3, "untimed steps before them, which include compilation", **COUNT)
    sweep: tuple[str, ...] = option(
        (), "section.option=value,value… or recipe=FILE,FILE…: time every combination"
    )
    trace: Path | None = option(
        None, "write a profiler trace of one step, for Perfetto (.json or .json.gz)"
    )
    calibrate: bool = option(
        False, "instead of steps, measure what these ranks can do, for `lmforge plan --calibration`"
    )
    out: Path = option(Path("calibration.json"), "with --calibrate: file to write")
    calibrate_seconds: float = option(
        100.0, "with --calibrate: seconds for products, attention and memory together", **DURATION
    )
    output: Literal["text", "json"] = OUTPUT_FORMAT

    def problems(self) -> Iterator[str]:
        changed = self.changed()
        if self.calibrate:
            others = [name for name in ("sweep", "trace") if name in changed]
            if others:
                yield f"--{others[0]}: not with --calibrate, which times no step; leave one out"
        else:
            given = [name for name in ("out", "calibrate_seconds") if name in changed]
            if given:
                yield f"--bench.{given[0]}: only with --calibrate; add it, or leave this out"


class BenchConfig(PretrainConfig):
    """lmforge bench [RECIPE.toml] [--sweep section.option=value,value …] [--calibrate]: speed and
    memory of a step.
    """

    of_verb: ClassVar[str | None] = "bench"

    @property
    def uses_ranks(self) -> bool:
        return not self.bench.sweep

    SHORT: ClassVar[Mapping[str, str]] = {
        **PretrainConfig.SHORT,
        **{name: f"bench.{name}" for name in ("sweep", "trace", "calibrate", "out")},
    }
    ESSENTIAL: ClassVar[str] = (
        "bench.steps bench.warmup_steps bench.sweep bench.trace bench.calibrate bench.out"
        " bench.output data.sequence_length model.preset model.source train.global_batch_size"
        " train.micro_batch_size train.dtype train.compile parallel.engine parallel.sharding"
        " parallel.activation_checkpointing log.calibration launch.processes"
    )
    bench: BenchOptions = section(BenchOptions, "what is timed")


def sweep_combinations(sweep: tuple[str, ...]) -> list[dict[str, str]]:
    """Every combination of `section.option=value,value…` and `recipe=FILE,FILE…`.

    Raises UserError where one has another form, or is no option.
    """
    known = {".".join(path) for path, _ in iter_options(BenchConfig)} - {
        "bench.sweep",
        "bench.output",
        "bench.trace",
    }
    known.add(RECIPE_AXIS)
    axes = list[list[tuple[str, str]]]()
    for axis in sweep:
        name, equals, values = axis.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(
                f"--sweep {cut(axis)}: expected section.option=value,value… or"
                f" {RECIPE_AXIS}=value,value…"
            )
        if name.replace("-", "_") not in known:
            raise UserError(f"--sweep {cut(name)}: no such option{did_you_mean(name, known)}")
        if any(name.replace("-", "_") == other[0][0].replace("-", "_") for other in axes):
            raise UserError(
                f"--sweep {cut(name)}: given twice; write all of its values after one {cut(name)}="
            )
        axes.append([(name, value) for value in values.split(",")])
    count = math.prod(map(len, axes))
    if count > MAX_COMBINATIONS:
        raise UserError(
            f"--sweep: {count:,} combinations, each of which takes seconds at least; at most"
            f" {MAX_COMBINATIONS:,}"
        )
    return [dict(combination) for combination in itertools.product(*axes)]
