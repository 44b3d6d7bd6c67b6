"""The batches of a distillation: those of fine-tuning, with what the teacher says of their tokens."""

from dataclasses import replace

from lmforge.objectives.distillation import DistillationObjective
from lmforge.stages.attempt import RunContext
from lmforge.stages.build_model import BuiltModel
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.distillation.teacher import build_teacher
from lmforge.stages.inputs import RunInputs
from lmforge.train.callbacks import BatchSource


def build_distill_batches(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> BatchSource:
    """The batches, and what the objective has to know of the teacher. Every rank calls it."""
    objective = built.objective
    teacher = build_teacher(ctx, built)
    batches = DatasetBatches(ctx, inputs, built, teacher.add_hidden)
    if isinstance(objective, DistillationObjective):  # and not one of a plugin
        objective.config = replace(objective.config, vocab_size=inputs.tokenizer.vocab_size)
        objective.teacher_head = teacher.copy_head(inputs.batch_plan.sequence_length)
    return batches
