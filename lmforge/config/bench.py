"""The options of `lmforge bench`: those of pretraining, and what is timed."""

from pathlib import Path
from typing import Literal

from lmforge.config.options import Options, option, section
from lmforge.config.pretrain import PretrainConfig


class BenchOptions(Options):
    """What is timed, and for how long."""

    steps: int = option(10, "timed steps", gt=0)
    warmup_steps: int = option(3, "untimed steps before them, which include compilation", gt=0)
    sweep: tuple[str, ...] = option((), "section.option=value,value…: time every combination and print one table")
    trace: Path | None = option(None, "write a profiler trace of one step, for Perfetto (.json or .json.gz)")
    output: Literal["text", "json"] = option("text", "output format")


class BenchConfig(PretrainConfig):
    """lmforge bench [RECIPE.toml] [--sweep section.option=value,value …] [--trace FILE]: speed and memory of a step."""

    bench: BenchOptions = section(BenchOptions, "what is timed")
