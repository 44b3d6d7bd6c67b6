"""How a recipe of policy optimisation becomes prompts, an objective and rollouts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from lmforge import checkpoint
from lmforge.config.align import AlignConfig
from lmforge.config.sections import ModelOptions
from lmforge.config.stage import StageConfig
from lmforge.data.chat.examples import hash_files, select_validation
from lmforge.data.chat.preferences import PromptCounts, TokenizedPrompt, encode_completions, read_prompt_columns, read_prompts
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.dataset import PackedDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.generate.model_loading import check_reward_head
from lmforge.objectives.policy import LOSS_TYPE_PRESETS, PolicyLossConfig, PolicyObjective
from lmforge.parallel.dims import plan_batches
from lmforge.rewards.functions import is_model_folder, load_reward_functions
from lmforge.stages.align import build_reference
from lmforge.stages.completions import FOLDER, is_logged, write_completions
from lmforge.stages.examples import find_required_pretrained
from lmforge.stages.feed import StageBatches, StageContext
from lmforge.stages.inputs import RunInputs, check_has_weights, check_model
from lmforge.stages.pretrained import find_pretrained
from lmforge.stages.reward_model_scorer import RewardModelScorer
from lmforge.stages.rollouts import CompletionScorer, PromptPacking, RolloutObjective, Rollouts, completion_metric_names


def build_policy_loss_config(config: AlignConfig) -> PolicyLossConfig:
    """The preset of `rollout.loss_type` with the options of `[rollout]` that the recipe sets."""
    options = config.rollout
    given = {field.name: getattr(options, field.name) for field in fields(PolicyLossConfig)}
    preset = LOSS_TYPE_PRESETS[options.loss_type]
    switches = replace(preset, **{name: value for name, value in given.items() if value is not None})
    if switches.kl_estimator != "none" and not switches.beta:
        raise UserError(
            f"rollout.kl_estimator = {switches.kl_estimator}: without a weight it does nothing; give rollout.beta, such as 0.04"
        )
    return switches


def check_prompts_and_rewards(config: AlignConfig) -> None:
    """Raise UserError where prompts or reward functions cannot be used."""
    if not config.data.files:
        raise UserError("data.files: name the files of prompts, such as --data.files prompts.jsonl")
    if not config.rollout.reward_functions:
        raise UserError(
            "rollout.reward_functions: name a reward function, such as --rollout.reward_functions rewards.py:reward"
        )
    models = [spec for spec in config.rollout.reward_functions if is_model_folder(spec)]
    for spec in models:
        try:
            check_reward_head(find_pretrained(Path(spec)).resolve_model_config(ModelOptions()), Path(spec), reward_model=True)
        except UserError as mistake:
            raise UserError(f"rollout.reward_functions: {mistake}") from None
    with load_reward_functions([spec for spec in config.rollout.reward_functions if spec not in models]) as rewards:
        for files in filter(None, (config.data.files, config.data.validation_files)):
            names: set[str] = set()
            for place, columns in (each for path in files for each in read_prompt_columns(path, config.data.renamed)):
                names.update(columns)
                try:
                    rewards.check_serializable(columns)
                except UserError as mistake:
                    raise UserError(f"{place}: {mistake}") from None
            try:
                rewards.check_columns(sorted(names))
            except UserError as mistake:
                raise UserError(f"{', '.join(map(str, files))}: {mistake}") from None


def _read_prompt_files(
    config: AlignConfig, tokenizer: Tokenizer, tally: PromptCounts, files_option: str
) -> Iterator[TokenizedPrompt]:
    longest = config.data.sequence_length - config.rollout.max_completion_length
    for path in getattr(config.data, files_option):
        options = config.data
        yield from read_prompts(
            path,
            tokenizer,
            apply_chat_template=options.apply_chat_template,
            fields=options.renamed,
            max_prompt_length=longest,
            counts=tally,
        )


def _split_prompts(config: AlignConfig, tokenizer: Tokenizer) -> tuple[list[TokenizedPrompt], list[TokenizedPrompt], str]:
    """Prompts to learn from, those held out, and what became of the records in words. UserError where files leave none."""
    tallies = {"files": PromptCounts(), "validation_files": PromptCounts()}
    prompts, held_out = (list(_read_prompt_files(config, tokenizer, tally, name)) for name, tally in tallies.items())
    for name, tally in tallies.items():
        if getattr(config.data, name) and not tally.kept:
            raise UserError(
                f"data.{name}: no prompt is left ({tally}); make data.sequence_length longer, or rollout.max_completion_length shorter"
            )
    if config.data.validation_files:
        return prompts, held_out, f"{tallies['files']}; held out: {tallies['validation_files']}"
    hashes = [xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()) for prompt in prompts]
    held = select_validation(np.array(hashes, np.uint64), config.data.validation_ratio)
    sides: tuple[list[TokenizedPrompt], list[TokenizedPrompt]] = ([], [])
    for prompt, out in zip(prompts, held.tolist(), strict=True):
        sides[out].append(prompt)
    return *sides, f"{tallies['files']}; {len(sides[1]):,} held out"


def open_prompt_inputs(config: AlignConfig, world_size: int) -> RunInputs:
    """Prompts, tokenizer, shape and plan of a recipe. Raises UserError where they do not fit."""
    options, plan, origin = config.rollout, plan_batches(config, world_size), find_required_pretrained(config)
    tokenizer = origin.tokenizer()
    shape = origin.resolve_model_config(config.model, tokenizer.vocab_size)
    samples = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt_tokens=max(samples, default=0))
    check_has_weights(origin)
    if options.max_completion_length >= config.data.sequence_length:
        raise UserError(
            f"rollout.max_completion_length = {options.max_completion_length}: leaves no room for a prompt in data.sequence_length = {config.data.sequence_length}"
        )
    if plan.rows % (world_size * options.num_generations):
        unit = world_size * options.num_generations
        raise UserError(
            f"train.global_batch_size = {plan.rows}: {world_size} ranks with whole groups of rollout.num_generations = {options.num_generations}"
            f" answers need a multiple of {unit}; nearest: {max(1, round(plan.rows / unit)) * unit}"
        )
    prompts, held_out, parted = _split_prompts(config, tokenizer)
    if any_conversational([*prompts, *held_out]):
        # Only that: how a template writes an answer down does not matter to who learns from the tokens that were drawn.
        ChatTemplate.from_tokenizer(tokenizer).check_stop_token()
    _check_reward_models(config, prompts[0])
    files = hash_files(config.data.files)
    # What else of a rollout is changed may be changed in a run that goes on.
    chosen = [
        options.num_generations,
        options.max_completion_length,
        options.num_iterations,
        config.data.apply_chat_template,
        *config.data.fields,
    ]
    chosen += [] if config.data.validation_files else [config.data.validation_ratio]
    order = PackedDataset(
        PromptPacking(prompts, held_out, config.data.sequence_length),
        name="prompts",
        location=", ".join(map(str, config.data.files)),
        plan=["prompts", xxhash.xxh3_128_hexdigest(json.dumps([files, chosen], sort_keys=True).encode())],
        sequence_length=config.data.sequence_length,
        seed=config.train.seed,
    )
    about = f"{order.location}: {parted}; {options.num_generations} answers each"
    return RunInputs(
        tokenizer, order, None, shape, plan, order.location, about, origin, sequences_per_sample=options.num_generations
    )


def _check_reward_models(config: AlignConfig, prompt: TokenizedPrompt) -> None:
    """Raise UserError where a reward model cannot read such prompts, for want of a chat template."""
    for spec in filter(is_model_folder, config.rollout.reward_functions):
        try:
            encode_completions(find_pretrained(Path(spec)).tokenizer(), [prompt.prompt], ["."])
        except UserError as mistake:
            raise UserError(f"rollout.reward_functions: {spec}: {mistake}") from None


def has_frozen_reference(config: StageConfig) -> bool:
    """Whether a run keeps a frozen copy of its first weights beside the policy."""
    if not isinstance(config, AlignConfig) or config.reference != "copy":
        return False
    return config.align.method != "grpo" or build_policy_loss_config(config).kl_estimator != "none"


def any_conversational(prompts: Sequence[TokenizedPrompt]) -> bool:
    """Whether some of them are messages, which a chat template asks with."""
    return any(not isinstance(prompt.prompt, str) for prompt in prompts)


def evenly_spaced(prompts: Sequence[TokenizedPrompt], count: int) -> list[TokenizedPrompt]:
    """At most `count` of them, evenly spaced."""
    count = min(count, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def build_policy_objective(config: AlignConfig) -> RolloutObjective:
    """What a batch of answers is worth."""
    return RolloutObjective(
        PolicyObjective(build_policy_loss_config(config)), completion_metric_names(config.rollout.num_generations)
    )


def build_rollout_batches(context: StageContext, config: AlignConfig) -> StageBatches:
    """Answers to prompts, judged. Every rank calls it, and has reward functions of its own."""
    options, switches, trained = config.rollout, build_policy_loss_config(config), context.parallel_model
    tokenizer = context.inputs.tokenizer
    packing = context.inputs.train_dataset.packing
    assert isinstance(packing, PromptPacking)
    ranks, folder = trained.dist_ctx, context.run.path / FOLDER
    # Functions fail on some ranks only, and only the first one speaks; what others print is in their own logs.
    say = context.warn if ranks.is_rank0 else partial(print, flush=True)
    weights = options.reward_weights or None

    def alive() -> None:
        context.watch.set_phase("judge", rollouts.current_step)

    with ranks.raise_on_all():
        rewards = load_reward_functions(
            options.reward_functions,
            weights=weights,
            timeout_seconds=options.reward_timeout_seconds,
            log=say,
            open_reward_model=partial(RewardModelScorer, device=ranks.device, dtype=context.dtype, on_batch=alive),
            heartbeat=alive,
        )
    columns = sorted({name for prompt in [*packing.prompts, *packing.validation_prompts] for name in prompt.columns})

    def table(name: str, lines: list[dict[str, object]]) -> None:
        kind, _, number = name.partition("-")
        if kind != "set" or is_logged(int(number), options):
            write_completions(folder / f"{name}-rank-{ranks.rank_info.rank}.jsonl", lines)

    turns = any_conversational([*packing.prompts, *packing.validation_prompts])
    ends = ChatTemplate.from_tokenizer(tokenizer).stop_ids if turns else frozenset({tokenizer.eos_token_id})
    rollouts = Rollouts(
        trained,
        packing.prompts,
        context.inputs.train_dataset,
        CompletionScorer(rewards, columns, tokenizer, options.pass_threshold, table),
        options=options,
        loss_config=switches,
        batch_plan=context.inputs.batch_plan,
        seed=config.train.seed,
        stop_token_ids=ends,
        vocab_size=tokenizer.vocab_size,
        reference=build_reference(context, config, switches.temperature) if switches.kl_estimator != "none" else None,
        heartbeat=partial(context.watch.set_phase, "sample"),
    )
    if options.num_iterations > 1 and context.checkpoint_folder is not None:
        kept = rollouts.empty_state_dict()
        try:
            with ranks.raise_on_all(), torch.no_grad():
                checkpoint.load(context.checkpoint_folder, {"rollouts": kept})
            rollouts.load_state_dict(kept)
        except UserError as reason:  # damaged, or kept by other options
            context.warn(f"{context.checkpoint_folder}: {reason}; the answers of this set are written anew")
    held_out = packing.validation_prompts
    return StageBatches(
        rollouts,
        validate=partial(rollouts.validate, evenly_spaced(held_out, config.validation.sequences)) if held_out else None,
        get_state=rollouts.state_dict if options.num_iterations > 1 else None,
        close=rewards.close,
    )
