"""What fine-tuning, distillation and alignment do in their own way, with the batches of preference
methods.

Those of policy optimization are in rl/rollouts.py; what is prepared and opened in examples.py and
prompts.py.
"""

from dataclasses import replace
from functools import cache, partial

import torch

from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.dataset_batches import DatasetBatches
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.specs import StageSpec
from lmforge.core.steps.callbacks import BatchSource
from lmforge.core.steps.metrics import MetricsAccumulator
from lmforge.post.distillation.batches import build_distill_batches
from lmforge.post.distillation.teacher import open_distill_inputs, prepare_distillation
from lmforge.post.examples import open_example_inputs, prepare_examples
from lmforge.post.objectives.preference import reference_mismatch_warning
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig, SftConfig
from lmforge.post.prompts import open_prompt_inputs, prepare_prompts
from lmforge.post.reference import (
    PackingWithReference,
    build_reference,
    precompute_reference_logprobs,
)
from lmforge.post.rl.rollouts import Rollouts


def sft_stage(config: SftConfig) -> StageSpec:
    return StageSpec(prepare_examples, open_example_inputs, DatasetBatches)


def distill_stage(config: DistillConfig) -> StageSpec:
    return StageSpec(prepare_distillation, open_distill_inputs, build_distill_batches)


def align_stage(config: AlignConfig) -> StageSpec:
    if config.align.method == "grpo":
        return StageSpec(prepare_prompts, open_prompt_inputs, Rollouts)
    return StageSpec(prepare_examples, open_example_inputs, build_preference_batches)


def build_preference_batches(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> BatchSource:
    """The batches of a preference method, with the reference's log-probabilities where it has one.

    Every rank calls it.
    """
    config = ctx.config
    assert isinstance(config, AlignConfig)
    if config.reference is None:
        return DatasetBatches(ctx, inputs, built)
    if config.reference == "precomputed":
        # Built only if log-probabilities are missing: for a resumed run all of them exist.
        get_reference = cache(partial(build_reference, ctx, inputs, built))
        for dataset in filter(None, (inputs.packed_dataset, inputs.validation_dataset)):
            logprobs = precompute_reference_logprobs(ctx, inputs, built, dataset, get_reference)
            dataset.packing = PackingWithReference(dataset.packing, logprobs)
        batches = DatasetBatches(ctx, inputs, built)
    else:
        batches = DatasetBatches(
            ctx, inputs, built, build_reference(ctx, inputs, built).add_logprobs
        )
    if built.point.step == 0:
        _check_reference_agrees(ctx, built, batches)
    return batches


def _check_reference_agrees(ctx: RunContext, built: BuiltModel, batches: DatasetBatches) -> None:
    """Log whether policy and reference are the same before the first update, as they have to be."""
    batch = replace(batches.batches(0)[0], rng_keys=None)
    accumulator = MetricsAccumulator(ctx.dist_ctx)
    with torch.no_grad():
        accumulator.add(built.parallel_model.score_loss(batch, built.objective.loss))
    means = accumulator.reduce_and_reset()
    if mismatch := reference_mismatch_warning(means):
        ctx.console.warn(mismatch)
    else:
        ctx.console.info(
            f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})"
        )
