"""How a recipe of policy optimisation becomes prompts, an objective and rollouts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from lmforge import checkpoint
from lmforge.config import ModelOptions, StageConfig
from lmforge.config_post import AlignConfig
from lmforge.data.examples import files_digest, hold_out
from lmforge.data.preferences import Prompt, Tally, encode_answers, prompt_columns, read_prompts
from lmforge.data.stream import Rows
from lmforge.data.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.judging import ModelJudge
from lmforge.infer.opening import check_kind
from lmforge.objectives.policy import PRESETS, Policy, Switches
from lmforge.objectives.reward import load_rewards, names_model
from lmforge.parallel.mesh import plan_batches
from lmforge.train.alignment import make_reference
from lmforge.train.completions import FOLDER, is_written, write_table
from lmforge.train.examples import origin_of
from lmforge.train.feed import Built, Feed
from lmforge.train.material import Material, check_model, check_weights
from lmforge.train.origin import find_origin
from lmforge.train.rollouts import Judge, PromptRows, Rollouts, Told, told_names

SWITCHES = (
    "ratio",
    "clip_low",
    "clip_high",
    "aggregate",
    "baseline",
    "scale",
    "kl",
    "kl_weight",
    "kl_corrected",
    "mask_overlong",
)


def switches_of(config: AlignConfig) -> Switches:
    """The preset with what the recipe changes of it."""
    options = config.rollout
    chosen = {name: value for name in SWITCHES if (value := getattr(options, name)) is not None}
    preset = replace(PRESETS[options.preset], constant_tokens=options.max_tokens, temperature=options.temperature)
    switches = replace(preset, **chosen)
    if switches.kl != "none" and not switches.kl_weight:
        raise Mistake(f"rollout.kl = {switches.kl}: without a weight it does nothing; give rollout.kl_weight, such as 0.04")
    return switches


def check_prompts(config: AlignConfig) -> None:
    """Raise Mistake where prompts or reward functions cannot be used."""
    if not config.data.files:
        raise Mistake("data.files: name the files of prompts, such as --data.files prompts.jsonl")
    if not config.rollout.rewards:
        raise Mistake("rollout.rewards: name a reward function, such as --rollout.rewards rewards.py:reward")
    models = [spec for spec in config.rollout.rewards if names_model(spec)]
    for spec in models:
        try:
            check_kind(find_origin(Path(spec)).shape(ModelOptions()), Path(spec), judges=True)
        except Mistake as mistake:
            raise Mistake(f"rollout.rewards: {mistake}") from None
    with load_rewards([spec for spec in config.rollout.rewards if spec not in models]) as rewards:
        for files in filter(None, (config.data.files, config.data.held_out)):
            names: set[str] = set()
            for place, columns in (each for path in files for each in prompt_columns(path, config.data.renamed)):
                names.update(columns)
                try:
                    rewards.check_plain(columns)
                except Mistake as mistake:
                    raise Mistake(f"{place}: {mistake}") from None
            try:
                rewards.check_columns(sorted(names))
            except Mistake as mistake:
                raise Mistake(f"{', '.join(map(str, files))}: {mistake}") from None


def _prompts(config: AlignConfig, tokenizer: Tokenizer, tally: Tally, name: str) -> Iterator[Prompt]:
    longest = config.data.length - config.rollout.max_tokens
    for path in getattr(config.data, name):
        options = config.data
        yield from read_prompts(path, tokenizer, as_chat=options.as_chat, fields=options.renamed, length=longest, tally=tally)


def _split(config: AlignConfig, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Prompt], str]:
    """Prompts to learn from, those held out, and what became of the records in words. Mistake where files leave none."""
    tallies = {"files": Tally(), "held_out": Tally()}
    prompts, held_out = (list(_prompts(config, tokenizer, tally, name)) for name, tally in tallies.items())
    for name, tally in tallies.items():
        if getattr(config.data, name) and not tally.kept:
            raise Mistake(f"data.{name}: no prompt is left ({tally}); make data.length longer, or rollout.max_tokens shorter")
    if config.data.held_out:
        return prompts, held_out, f"{tallies['files']}; held out: {tallies['held_out']}"
    hashes = [xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()) for prompt in prompts]
    held = hold_out(np.array(hashes, np.uint64), config.data.held_out_share)
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, out in zip(prompts, held.tolist(), strict=True):
        sides[out].append(prompt)
    return *sides, f"{tallies['files']}; {len(sides[1]):,} held out"


def open_prompts(config: AlignConfig, ranks: int) -> Material:
    """Prompts, tokenizer, shape and plan of a recipe. Raises Mistake where they do not fit."""
    options, plan, origin = config.rollout, plan_batches(config, ranks), origin_of(config)
    tokenizer = origin.tokenizer()
    shape = origin.shape(config.model, tokenizer.vocab_size)
    samples = [len(tokenizer.encode(prompt)) for prompt in config.sample.prompts]
    check_model(config, shape, plan, longest_prompt=max(samples, default=0))
    check_weights(origin)
    if options.max_tokens >= config.data.length:
        raise Mistake(
            f"rollout.max_tokens = {options.max_tokens}: leaves no room for a prompt in data.length = {config.data.length}"
        )
    if plan.rows % (ranks * options.samples):
        unit = ranks * options.samples
        raise Mistake(
            f"train.global_batch_rows = {plan.rows}: {ranks} ranks with whole groups of rollout.samples = {options.samples}"
            f" answers need a multiple of {unit}; nearest: {max(1, round(plan.rows / unit)) * unit}"
        )
    prompts, held_out, parted = _split(config, tokenizer)
    if are_turns([*prompts, *held_out]):
        # Only that: how a template writes an answer down does not matter to who learns from the tokens that were drawn.
        ChatTemplate.of(tokenizer).check_ends()
    _check_judges(config, prompts[0])
    files = files_digest(config.data.files)
    # What else of a rollout is changed may be changed in a run that goes on.
    chosen = [options.samples, options.max_tokens, options.updates, config.data.as_chat, *config.data.fields]
    chosen += [] if config.data.held_out else [config.data.held_out_share]
    order = Rows(
        PromptRows(prompts, held_out, config.data.length),
        name="prompts",
        where=", ".join(map(str, config.data.files)),
        plan=["prompts", xxhash.xxh3_128_hexdigest(json.dumps([files, chosen], sort_keys=True).encode())],
        length=config.data.length,
        seed=config.train.seed,
    )
    about = f"{order.where}: {parted}; {options.samples} answers each"
    return Material(tokenizer, order, None, shape, plan, order.where, about, origin, uses=options.samples)


def _check_judges(config: AlignConfig, prompt: Prompt) -> None:
    """Raise Mistake where a reward model cannot read such prompts, for want of a chat template."""
    for spec in filter(names_model, config.rollout.rewards):
        try:
            encode_answers(find_origin(Path(spec)).tokenizer(), [prompt.prompt], ["."])
        except Mistake as mistake:
            raise Mistake(f"rollout.rewards: {spec}: {mistake}") from None


def has_reference(config: StageConfig) -> bool:
    """Whether a run keeps a frozen copy of its first weights beside the policy."""
    if not isinstance(config, AlignConfig) or config.reference != "copy":
        return False
    return config.align.method != "grpo" or switches_of(config).kl != "none"


def are_turns(prompts: Sequence[Prompt]) -> bool:
    """Whether some of them are messages, which a chat template asks with."""
    return any(not isinstance(prompt.prompt, str) for prompt in prompts)


def spaced(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` of them, evenly spaced."""
    count = min(count, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def policy_of(config: AlignConfig) -> Told:
    """What a batch of answers is worth."""
    return Told(Policy(switches_of(config)), told_names(config.rollout.samples))


def rollouts_of(built: Built, config: AlignConfig) -> Feed:
    """Answers to prompts, judged. Every rank calls it, and has reward functions of its own."""
    options, switches, trained = config.rollout, switches_of(config), built.trained
    tokenizer = built.material.tokenizer
    packing = built.material.train.packing
    assert isinstance(packing, PromptRows)
    ranks, folder = trained.ranks, built.run.path / FOLDER
    # Functions fail on some ranks only, and only the first one speaks; what others print is in their own logs.
    say = built.complain if ranks.first else partial(print, flush=True)
    weights = options.reward_weights or None

    def alive() -> None:
        built.watch.mark("judge", rollouts.step)

    with ranks.agreeing():
        rewards = load_rewards(
            options.rewards,
            weights=weights,
            seconds=options.reward_seconds,
            say=say,
            models=partial(ModelJudge, device=ranks.device, dtype=built.dtype, alive=alive),
            alive=alive,
        )
    columns = sorted({name for prompt in [*packing.prompts, *packing.held_out] for name in prompt.columns})

    def table(name: str, lines: list[dict[str, object]]) -> None:
        kind, _, number = name.partition("-")
        if kind != "set" or is_written(int(number), options):
            write_table(folder / f"{name}-rank-{ranks.place.rank}.jsonl", lines)

    turns = are_turns([*packing.prompts, *packing.held_out])
    ends = ChatTemplate.of(tokenizer).ends if turns else frozenset({tokenizer.separator_id})
    rollouts = Rollouts(
        trained,
        packing.prompts,
        built.material.train,
        Judge(rewards, columns, tokenizer, options.passes_at, table),
        options=options,
        switches=switches,
        plan=built.material.plan,
        seed=config.train.seed,
        ends=ends,
        vocab_size=tokenizer.vocab_size,
        reference=make_reference(built, config, switches.temperature) if switches.kl != "none" else None,
        mark=partial(built.watch.mark, "sample"),
    )
    if options.updates > 1 and built.folder is not None:
        kept = rollouts.empty()
        try:
            with ranks.agreeing(), torch.no_grad():
                checkpoint.load(built.folder, {"rollouts": kept})
            rollouts.restore(kept)
        except Mistake as reason:  # damaged, or kept by other options
            built.complain(f"{built.folder}: {reason}; the answers of this set are written anew")
    held_out = packing.held_out
    return Feed(
        rollouts,
        validate=partial(rollouts.validate, spaced(held_out, config.validation.rows)) if held_out else None,
        state=rollouts.state if options.updates > 1 else None,
        close=rewards.close,
    )
