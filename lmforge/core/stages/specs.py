"""What each stage does in its own way: `spec_of` a config, with the batches of preference methods.

Those of policy optimization are in alignment/rollouts.py, what is prepared and opened in inputs.py, examples.py and
alignment/prompt_inputs.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.stages.attempt import RunContext
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.dataset_batches import DatasetBatches
from lmforge.core.stages.inputs import RunInputs, open_pretrain_inputs
from lmforge.core.stages.pretrained import download_pretrained
from lmforge.core.steps.callbacks import BatchSource
from lmforge.core.steps.metrics import MetricsAccumulator
from lmforge.post.distillation.batches import build_distill_batches
from lmforge.post.distillation.teacher import open_distill_inputs, prepare_distillation
from lmforge.post.examples import open_example_inputs, prepare_examples
from lmforge.post.objectives.preference import reference_mismatch_warning
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig
from lmforge.post.rl.prompt_inputs import open_prompt_inputs, prepare_prompts
from lmforge.post.rl.reference import PackingWithReference, build_reference, precompute_reference_logprobs
from lmforge.post.rl.rollouts import Rollouts


@dataclass(frozen=True)
class StageSpec:
    """What a stage does in its own way.

    prepare_data     downloads and converts what the recipe names; every rank calls it
    open_inputs      opens and checks data, tokenizer and model config for a number of ranks
    build_batches    where batches come from, once the model is built; every rank calls it
    """

    prepare_data: Callable[[Any, DistributedContext], None]
    open_inputs: Callable[[Any, int], RunInputs]
    build_batches: Callable[[RunContext, RunInputs, BuiltModel], BatchSource]


def spec_of(config: StageConfig) -> StageSpec:
    """The spec of the stage that a recipe is for."""
    if isinstance(config, PretrainConfig):
        return StageSpec(download_pretrained, open_pretrain_inputs, DatasetBatches)
    if isinstance(config, AlignConfig) and config.align.method == "grpo":
        return StageSpec(prepare_prompts, open_prompt_inputs, Rollouts)
    if isinstance(config, DistillConfig):
        return StageSpec(prepare_distillation, open_distill_inputs, build_distill_batches)
    preferences = isinstance(config, AlignConfig)
    return StageSpec(prepare_examples, open_example_inputs, build_preference_batches if preferences else DatasetBatches)


def build_preference_batches(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> BatchSource:
    """The batches of a preference method, with the reference's log-probabilities where it has one. Every rank calls it."""
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
        batches = DatasetBatches(ctx, inputs, built, build_reference(ctx, inputs, built).add_logprobs)
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
        ctx.console.info(f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})")
