"""Alignment: the batches of each method; their losses are in objectives.py.

Preference methods read a dataset; grpo samples completions.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from lmforge import checkpoint
from lmforge.config.align import AlignConfig
from lmforge.data.chat.templates import ChatTemplate
from lmforge.errors import UserError
from lmforge.objectives.policy import build_policy_loss_config
from lmforge.objectives.preference import reference_mismatch_warning
from lmforge.rewards.functions import RewardFunctions, load_reward_functions
from lmforge.stages.alignment.completions import CompletionScorer, RewardModelScorer
from lmforge.stages.alignment.prompt_inputs import PromptPacking, is_conversational, reward_options
from lmforge.stages.alignment.reference import PackingWithReference, build_reference, precompute_reference_logprobs
from lmforge.stages.alignment.rollouts import Rollouts
from lmforge.stages.attempt import RunContext
from lmforge.stages.build_model import BuiltModel
from lmforge.stages.dataset_batches import DatasetBatches
from lmforge.stages.inputs import RunInputs
from lmforge.train.callbacks import BatchSource
from lmforge.train.metrics import MetricsAccumulator


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
        _, metrics = built.parallel_model.score(batch, score_fn=built.objective.loss)
    accumulator.add(metrics)
    means = accumulator.reduce_and_reset()
    if mismatch := reference_mismatch_warning(means):
        ctx.console.warn(mismatch)
    else:
        ctx.console.info(f"reference  agrees with the policy before the first update (loss {means['loss']:.4f})")


def build_rollouts(ctx: RunContext, inputs: RunInputs, built: BuiltModel) -> Rollouts:
    """Completions of prompts, with their rewards. Every rank calls it, and has reward functions of its own."""
    config = ctx.config
    assert isinstance(config, AlignConfig)
    tokenizer, packing = inputs.tokenizer, inputs.packed_dataset.packing
    assert isinstance(packing, PromptPacking)
    loss_config = build_policy_loss_config(config.rollout)
    prompts = [*packing.prompts, *packing.validation_prompts]
    with ctx.dist_ctx.raise_on_all():
        reward_functions = _load_reward_functions(ctx, config, built.dtype)
    scorer = CompletionScorer(
        reward_functions,
        sorted({name for prompt in prompts for name in prompt.columns}),
        tokenizer,
        ctx.run.path,
        ctx.dist_ctx.rank_info.rank,
    )
    stop_token_ids = frozenset({tokenizer.eos_token_id})
    if is_conversational(prompts):
        stop_token_ids = ChatTemplate.from_tokenizer(tokenizer).stop_ids
    reference = None
    if loss_config.kl_estimator != "none":
        reference = build_reference(ctx, inputs, built, loss_config.temperature)
    rollouts = Rollouts(ctx, inputs, built, loss_config, scorer, stop_token_ids=stop_token_ids, reference=reference)
    folder = built.point.checkpoint_folder
    if config.rollout.num_iterations > 1 and folder is not None:
        _restore(rollouts, folder, ctx)
    return rollouts


def _load_reward_functions(ctx: RunContext, config: AlignConfig, dtype: torch.dtype) -> RewardFunctions:
    options = config.rollout
    heartbeat, device = partial(ctx.watch.set_phase, "reward"), ctx.dist_ctx.device
    return load_reward_functions(
        options.reward_functions,
        weights=options.reward_weights or None,
        timeout_seconds=options.reward_timeout_seconds,
        # Functions may fail on some ranks only, and the console prints on rank 0 only; other ranks print to their logs.
        log=ctx.console.warn if ctx.dist_ctx.is_rank0 else partial(print, flush=True),
        open_reward_model=partial(RewardModelScorer, device=device, dtype=dtype, on_batch=heartbeat),
        heartbeat=heartbeat,
        options=reward_options(options),
    )


def _restore(rollouts: Rollouts, folder: Path, ctx: RunContext) -> None:
    """Load the set of completions of a checkpoint."""
    state = rollouts.empty_state_dict()
    try:
        with ctx.dist_ctx.raise_on_all(), torch.no_grad():
            checkpoint.load(folder, {"rollouts": state})
        rollouts.load_state_dict(state)
    except UserError as reason:
        # The set is corrupt, or was saved with other options.
        ctx.console.warn(f"{folder}: {reason}; the completions of this set are sampled again")
