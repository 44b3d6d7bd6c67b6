"""The options of `lmforge plan`: the ranks and the hardware of a run that is yet to begin."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from lmforge.core.options.options import OUTPUT_FORMAT, Options, option, section
from lmforge.core.options.ranges import (
    NONZERO_FRACTION,
    RANKS,
    SCALE_OR_0,
    Range,
)
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig, SftConfig

CONFIGURATIONS: Range = {"gt": 0, "le": 1_000_000}
# How many of the fastest estimates a search predicts in full.
FINALISTS = 24
FINALIST_RANGE: Range = {"gt": 0, "le": FINALISTS}
# The fraction of a GPU's memory that a run may use by default; the rest is outside of torch's
# memory pool.
USABLE_FRACTION = 0.94


class MachineOptions(Options):
    """The hardware that a run is planned for, and what it costs."""

    gpus: int = option(1, "GPUs of the run, one rank each", **RANKS)
    gpu_type: str = option(
        "h100-80",
        "name of the GPU in the hardware file, such as a100-80, h100-80, h200, b200, mi300x, cpu",
    )
    gpus_per_host: int = option(8, "GPUs of a host", **RANKS)
    network: str = option(
        "infiniband-ndr",
        "name of the network between hosts, such as infiniband-ndr, roce-400, ethernet-100",
    )
    hardware: Path | None = option(
        None, "a TOML file with further [[gpus]] and [[networks]], as in lab/plan/hardware.toml"
    )
    calibration: Path | None = option(
        None, "a file of `lmforge bench --calibrate`: its measurements replace data sheets"
    )
    price: float = option(0.0, "price of a GPU-hour, in any currency", **SCALE_OR_0)


class PlanOptions(MachineOptions):
    """The hardware that the run is planned for, and the search."""

    search: bool = option(
        False, "rank the configurations that fit, and say why each of the others is slower"
    )
    configurations: int = option(
        10_000, "with --search: configurations to try at most", **CONFIGURATIONS
    )
    write: Path | None = option(
        None, "with --search: write the fastest configuration as this recipe"
    )
    finalists: int = option(
        1, "with --write: write the N fastest, as NAME.toml, NAME-2.toml, …", **FINALIST_RANGE
    )
    usable: float = option(
        USABLE_FRACTION, "fraction of a GPU's memory that a run may use", **NONZERO_FRACTION
    )
    output: Literal["text", "json"] = OUTPUT_FORMAT

    def problems(self) -> Iterator[str]:
        given = [name for name in ("write", "configurations") if name in self.changed()]
        if given and not self.search:
            yield f"--{given[0]}: only with --search; add it, or leave this out"
        if self.write is None and "finalists" in self.changed():
            yield "--finalists: only with --write, which names the files; add it, or leave this out"


# Those that may be typed without their section.
SHORT = {name: f"plan.{name}" for name in PlanOptions.model_fields if name != "usable"}
ESSENTIAL = (
    "plan.gpus plan.gpu_type plan.gpus_per_host plan.network plan.hardware plan.calibration"
    " plan.price plan.search plan.write plan.finalists plan.output data.sequence_length"
    " model.preset train.global_batch_size train.micro_batch_size parallel.engine parallel.sharding"
    " parallel.activation_checkpointing run.name"
)


PLAN = section(PlanOptions, "the ranks and the hardware that it is planned for")


class SftPlanConfig(SftConfig):
    """lmforge plan RECIPE.toml: the same for a recipe of `lmforge sft`, with adapters or all
    weights.
    """

    of_verb: ClassVar[str | None] = "plan"
    SHORT: ClassVar[Mapping[str, str]] = {**SftConfig.SHORT, **SHORT}
    ESSENTIAL: ClassVar[str] = f"{ESSENTIAL} lora.rank"
    plan: PlanOptions = PLAN


class DistillPlanConfig(DistillConfig):
    """lmforge plan RECIPE.toml: the same for a recipe of `lmforge distill`, with its teacher."""

    of_verb: ClassVar[str | None] = "plan"
    SHORT: ClassVar[Mapping[str, str]] = {**DistillConfig.SHORT, **SHORT}
    ESSENTIAL: ClassVar[str] = f"{ESSENTIAL} lora.rank"
    plan: PlanOptions = PLAN


class AlignPlanConfig(AlignConfig):
    """lmforge plan RECIPE.toml: the same for a recipe of `lmforge align`: preferences or a reward
    model.
    """

    of_verb: ClassVar[str | None] = "plan"
    SHORT: ClassVar[Mapping[str, str]] = {**AlignConfig.SHORT, **SHORT}
    ESSENTIAL: ClassVar[str] = f"{ESSENTIAL} align.method lora.rank"
    plan: PlanOptions = PLAN


class PlanConfig(PretrainConfig):
    """lmforge plan [RECIPE.toml] --gpus N --gpu_type NAME: memory, speed and cost of a run before
    it starts.
    """

    of_verb: ClassVar[str | None] = "plan"
    SHORT: ClassVar[Mapping[str, str]] = {**PretrainConfig.SHORT, **SHORT}
    FOR_STAGE: ClassVar[Mapping[str, type[StageConfig]]] = {
        "sft": SftPlanConfig,
        "distill": DistillPlanConfig,
        "align": AlignPlanConfig,
    }
    ESSENTIAL: ClassVar[str] = ESSENTIAL
    plan: PlanOptions = PLAN


AnyPlanConfig = PlanConfig | SftPlanConfig | DistillPlanConfig | AlignPlanConfig
