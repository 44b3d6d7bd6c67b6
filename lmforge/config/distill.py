"""The options of `lmforge distill`: a student learns what a teacher says of each token. The data is that of `lmforge sft`."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from lmforge.config.options import Options, option, section
from lmforge.config.ranges import FRACTION, SCALE
from lmforge.config.sections import Stage
from lmforge.config.tuning import SftConfig
from lmforge.errors import UserError


class DistillOptions(Options):
    """The teacher, and the loss. Names are TRL's (GKD) and torchtune's (kd_ratio)."""

    teacher: Path | None = option(
        None, "the teacher: a run, a checkpoint, a Hugging Face folder or a name on the hub, with the student's tokenizer"
    )
    beta: float = option(
        0.5,
        "of the generalised Jensen-Shannon divergence (arXiv 2306.13649): 0 is the forward KL divergence, KL(teacher ||"
        " student), 1 the reverse one",
        **FRACTION,
    )
    temperature: float = option(1.0, "both models' logits are divided by it in the divergence", **SCALE)
    kd_ratio: float = option(
        1.0, "share of the divergence in the loss; the rest is the cross-entropy of the data, as in `lmforge sft`", **FRACTION
    )


class DistillConfig(SftConfig):
    """lmforge distill [RECIPE.toml] --teacher MODEL: train a small model on what a larger one says of each token."""

    of_stage: ClassVar[Stage] = "distill"
    ESSENTIAL: ClassVar[str] = f"distill.teacher distill.beta distill.temperature distill.kd_ratio {SftConfig.ESSENTIAL}"
    distill: DistillOptions = section(DistillOptions, "the teacher, and the loss")

    def require_inputs(self) -> None:
        super().require_inputs()
        if self.distill.teacher is None:
            raise UserError("distill.teacher: name the model to learn from, such as --teacher runs/large")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.train.z_loss:
            yield "train.z_loss: distillation does not read it; it is for pretrain and sft: leave it out"
        if self.parallel.pipeline_parallel_degree > 1:
            yield "parallel.pipeline_parallel_degree: distillation computes losses of whole models; shard with fsdp2 instead"
