"""Policy optimization: the objective of a recipe, and its rollouts with their rewards."""

from functools import partial
from pathlib import Path

import torch

from lmforge import checkpoint
from lmforge.config.align import AlignConfig, RolloutOptions
from lmforge.data.chat.templates import ChatTemplate
from lmforge.errors import UserError
from lmforge.objectives.policy import PolicyObjective, build_policy_loss_config
from lmforge.rewards.functions import RewardFunctions, load_reward_functions
from lmforge.stages.align import build_reference
from lmforge.stages.completions import FOLDER, is_logged, write_completions
from lmforge.stages.prompt_inputs import PromptPacking, is_conversational
from lmforge.stages.reward_model_scorer import RewardModelScorer
from lmforge.stages.rollouts import CompletionScorer, RolloutObjective, Rollouts, completion_metric_names
from lmforge.train.trainer import Trainer


def build_policy_objective(config: AlignConfig) -> RolloutObjective:
    return RolloutObjective(
        PolicyObjective(build_policy_loss_config(config.rollout)), completion_metric_names(config.rollout.num_generations)
    )


def build_rollouts(trainer: Trainer) -> Rollouts:
    """Completions of prompts, with their rewards. Every rank calls it, and has reward functions of its own."""
    config, dataset, tokenizer = trainer.ctx.config, trainer.inputs.train_dataset, trainer.inputs.tokenizer
    assert isinstance(config, AlignConfig)
    assert isinstance(dataset.packing, PromptPacking)
    loss_config = build_policy_loss_config(config.rollout)
    prompts = [*dataset.packing.prompts, *dataset.packing.validation_prompts]
    from_template = is_conversational(prompts)
    with trainer.ctx.dist_ctx.raise_on_all():
        reward_functions = _load_reward_functions(trainer, config.rollout)
    rollouts = Rollouts(
        trainer,
        config.rollout,
        loss_config,
        CompletionScorer(
            reward_functions,
            sorted({name for prompt in prompts for name in prompt.columns}),
            tokenizer,
            config.rollout.pass_threshold,
            partial(_write_table, trainer, config.rollout),
        ),
        stop_token_ids=ChatTemplate.from_tokenizer(tokenizer).stop_ids
        if from_template
        else frozenset({tokenizer.eos_token_id}),
        reference=build_reference(trainer, loss_config.temperature) if loss_config.kl_estimator != "none" else None,
    )
    folder = trainer.resume_point.checkpoint_folder
    if config.rollout.num_iterations > 1 and folder is not None:
        _restore(rollouts, folder, trainer)
    return rollouts


def _load_reward_functions(trainer: Trainer, options: RolloutOptions) -> RewardFunctions:
    ctx, heartbeat = trainer.ctx, partial(trainer.ctx.watch.set_phase, "reward")
    return load_reward_functions(
        options.reward_functions,
        weights=options.reward_weights or None,
        timeout_seconds=options.reward_timeout_seconds,
        # Functions may fail on some ranks only, and the console prints on rank 0 only; other ranks print to their logs.
        log=ctx.console.warn if ctx.dist_ctx.is_rank0 else partial(print, flush=True),
        open_reward_model=partial(RewardModelScorer, device=ctx.dist_ctx.device, dtype=trainer.dtype, on_batch=heartbeat),
        heartbeat=heartbeat,
    )


def _write_table(trainer: Trainer, options: RolloutOptions, name: str, records: list[dict[str, object]]) -> None:
    kind, _, number = name.partition("-")
    if kind != "set" or is_logged(int(number), options):
        rank = trainer.ctx.dist_ctx.rank_info.rank
        write_completions(trainer.ctx.run.path / FOLDER / f"{name}-rank-{rank}.jsonl", records)


def _restore(rollouts: Rollouts, folder: Path, trainer: Trainer) -> None:
    """Go on with the set of completions of a checkpoint."""
    state = rollouts.empty_state_dict()
    try:
        with trainer.ctx.dist_ctx.raise_on_all(), torch.no_grad():
            checkpoint.load(folder, {"rollouts": state})
        rollouts.load_state_dict(state)
    except UserError as reason:  # corrupt, or saved with other options
        trainer.ctx.console.warn(f"{folder}: {reason}; the completions of this set are sampled again")
