"""The inputs of policy optimization: prompts with the columns that reward functions are given."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.core import registry
from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.packing import PackedSequence, Packing
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.options.extend import entry_options
from lmforge.core.options.sections import ModelOptions
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.stages.inputs import RunInputs, check_model
from lmforge.core.stages.weight_source import download_weights
from lmforge.hf.pretrained import find_pretrained
from lmforge.post.environments.appending import TurnEncoder
from lmforge.post.environments.process import EnvironmentPool, identify
from lmforge.post.options.align import AlignConfig, RolloutOptions, is_model_folder
from lmforge.post.rewards.functions import load_reward_functions
from lmforge.post.rl.engines.rollout_server import check_servers
from lmforge.post.rl.episodes import Turns
from lmforge.post.tuned_model import open_tuned_model
from lmforge.serve.decoding.model_loading import check_reward_head
from lmforge.text.chat.examples import hash_files, select_validation
from lmforge.text.chat.preferences import (
    PromptCounts,
    TokenizedPrompt,
    encode_completions,
    read_prompt_columns,
    read_prompts,
)
from lmforge.text.chat.templates import ChatTemplate
from lmforge.text.sources.folders import FileSplit
from lmforge.text.sources.records import (
    UnusableRecords,
    describe_folders,
    describe_special_text,
    find_record_files,
)


@dataclass(frozen=True)
class PromptPacking(Packing):
    """One prompt in each sequence, without labels, so that a PackedDataset gives the order of the
    prompts.
    """

    prompts: Sequence[TokenizedPrompt]
    validation_prompts: Sequence[TokenizedPrompt]
    turns: Turns | None = None  # where there is an environment

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    def read(self, index: int, out: PackedSequence) -> None:
        out.put_document(self.prompts[index].tokens)


def prepare_prompts(config: AlignConfig, dist_ctx: DistributedContext) -> None:
    """Make the model of a recipe available on every host, and check prompts and reward functions
    there. Every rank calls it.

    Raises UserError where one of them cannot be used.
    """
    config.require_inputs()
    download_weights(config, dist_ctx)
    dist_ctx.run_once_per_host(partial(_check_prompts_and_rewards, config))


def _check_prompts_and_rewards(config: AlignConfig) -> None:
    models = [spec for spec in config.rollout.reward_functions if is_model_folder(spec)]
    for spec in models:
        with prefix_errors("rollout.reward_functions"):
            check_reward_head(
                find_pretrained(Path(spec)).resolve_model_config(ModelOptions()),
                Path(spec),
                reward_model=True,
            )
    functions = [spec for spec in config.rollout.reward_functions if spec not in models]
    environment = name_environment(config.rollout)
    with load_reward_functions(
        functions, options=reward_options(config.rollout), environment=environment
    ) as rewards:
        for files in filter(None, (_files_of(config, "train"), _files_of(config, "validation"))):
            names = set[str]()
            unusable = UnusableRecords(config.data.skip_invalid)
            records = chain.from_iterable(
                read_prompt_columns(path, config.data.renamed, unusable) for path in files
            )
            for location, columns in records:
                names.update(columns)
                with prefix_errors(location):
                    rewards.check_serializable(columns)
            with prefix_errors(", ".join(map(str, files))):
                rewards.check_columns(sorted(names))


def name_environment(options: RolloutOptions) -> EnvironmentPool | None:
    """The environment of a recipe, if it names one. It is not opened yet."""
    if options.environment is None:
        return None
    processes = options.environment_processes
    timeout_seconds = options.environment_timeout_seconds
    return EnvironmentPool(
        options.environment, processes=processes, timeout_seconds=timeout_seconds
    )


def _open_turns(options: RolloutOptions, tokenizer: Tokenizer) -> Turns | None:
    """The environment, and how turns with it become ids.

    Raises UserError unless it has rewards, and the chat template takes the turns.
    """
    pool = name_environment(options)
    if pool is None:
        return None
    encoders = {}
    for name, declared in pool.declarations.items():
        with prefix_errors(f"rollout.environment{name and f': {name}'}"):
            encoders[name] = TurnEncoder(tokenizer, declared.tools)
            encoders[name].check(declared.reply_roles, options.max_turns)
    if not (pool.gives_rewards or options.reward_functions):
        raise UserError(
            f"rollout.reward_functions: name one: {pool.spec} gives no reward itself (get_reward)"
        )
    return Turns(pool, encoders)


def _check_first_episodes(turns: Turns, prompts: Sequence[TokenizedPrompt]) -> None:
    """Raises UserError where an environment does not begin an episode with its first row of the
    data.
    """
    first = {turns.encoder(prompt.columns): prompt for prompt in reversed(prompts)}
    with prefix_errors(f"rollout.environment: {turns.pool.spec}: the first episode"):
        begun = turns.pool.reset(
            [{**prompt.columns, "prompt": prompt.prompt} for prompt in first.values()]
        )
        for encoder, reply in zip(first, begun, strict=True):
            if reply.error:
                raise UserError(f"fails: {reply.error}")
            encoder.encode_prompt(reply.messages)
    turns.pool.end_episodes()


def reward_options(rollout: RolloutOptions) -> dict[str, str]:
    """The options of reward functions of plugins, as JSON by name."""
    entries = [entry for entry in registry.entries("reward") if entry.options is not None]
    return {entry.name: entry_options(rollout, entry).model_dump_json() for entry in entries}


def _files_of(config: AlignConfig, split: FileSplit) -> list[Path]:
    """The files of `data.files` or `data.validation_files`, and of the folders among them.

    Raises UserError.
    """
    paths = config.data.files if split == "train" else config.data.validation_files
    return [file for path in paths for file in find_record_files(path, split)]


def _read_split(
    config: AlignConfig, tokenizer: Tokenizer, split: FileSplit, turns: Turns | None
) -> tuple[list[TokenizedPrompt], str]:
    """The prompts of the files of a split, with counts.

    Raises UserError where there are files but no prompts.
    """
    options = config.data
    counts = PromptCounts()
    unusable = UnusableRecords(config.data.skip_invalid)
    reading: dict[str, Any] = {
        "apply_chat_template": options.apply_chat_template,
        "fields": options.renamed,
        "ignore_media": options.ignore_media,
        "parse_special_tokens": options.parse_special_tokens,
        "max_prompt_length": options.sequence_length - config.rollout.max_completion_length,
        "counts": counts,
        "unusable": unusable,
        "tools_of": turns and (lambda record: turns.encoder(record).tools),
    }
    files = _files_of(config, split)
    prompts = [prompt for path in files for prompt in read_prompts(path, tokenizer, **reading)]
    if files and not counts.kept:
        raise UserError(
            f"data.{'files' if split == 'train' else 'validation_files'}: no prompt is left"
            f" ({counts}{unusable}); make data.sequence_length longer, or"
            " rollout.max_completion_length shorter"
        )
    spelled = describe_special_text(
        unusable.with_special_text, counts.records, "data.parse_special_tokens"
    )
    return prompts, f"{counts}{unusable}{spelled}"


def _read_prompts(
    config: AlignConfig, tokenizer: Tokenizer, turns: Turns | None
) -> tuple[list[TokenizedPrompt], list[TokenizedPrompt], str]:
    """Training and validation prompts, and a description of how many records were used and
    skipped.
    """
    prompts, counts = _read_split(config, tokenizer, "train", turns)
    if config.data.validation_files:
        validation, validation_counts = _read_split(config, tokenizer, "validation", turns)
        return prompts, validation, f"{counts}; validation: {validation_counts}"
    # With an environment, rows of one prompt may differ in what they begin.
    begun = [
        b"" if turns is None else json.dumps(prompt.columns, default=str).encode()
        for prompt in prompts
    ]
    contents = [prompt.tokens.tobytes() + more for prompt, more in zip(prompts, begun, strict=True)]
    hashes = np.array(list(map(xxhash.xxh3_64_intdigest, contents)), np.uint64)
    is_validation = select_validation(hashes, config.data.validation_ratio)
    validation = list(compress(prompts, is_validation))
    return (
        list(compress(prompts, ~is_validation)),
        validation,
        f"{counts}; {len(validation):,} for validation",
    )


def open_prompt_inputs(config: AlignConfig, world_size: int) -> RunInputs:
    """Open prompts, tokenizer and model. Raises UserError where they do not fit together."""
    options = config.rollout
    data = config.data
    batch_plan = plan_batches(config, world_size)
    pretrained, tokenizer, model_config = open_tuned_model(config)
    check_model(config, model_config, batch_plan, tokenizer)
    if options.max_completion_length >= data.sequence_length:
        raise UserError(
            f"rollout.max_completion_length = {options.max_completion_length}: leaves no room for a"
            f" prompt in data.sequence_length = {data.sequence_length}"
        )
    if options.replay_routed_experts and not (
        model_config.num_experts and config.model.implementation == "lmforge"
    ):
        raise UserError(
            "rollout.replay_routed_experts: this model is no mixture of experts of lmforge's own;"
            " leave it out"
        )
    if options.engine_urls:
        check_servers(options, model_config, tokenizer.vocab_size, data.sequence_length)
    turns = _open_turns(options, tokenizer)
    prompts, validation_prompts, counts = _read_prompts(config, tokenizer, turns)
    if turns:
        _check_first_episodes(turns, [*prompts, *validation_prompts])
    if is_conversational([*prompts, *validation_prompts]):
        # Only its stop token is checked: completions are trained on as sampled, without the
        # template.
        ChatTemplate.from_tokenizer(tokenizer).check_stop_token()
    for spec in filter(is_model_folder, options.reward_functions):
        # Raises UserError where a reward model has no chat template, and so cannot read such
        # prompts.
        with prefix_errors(f"rollout.reward_functions: {spec}"):
            offered = {name: prompts[0].columns.get(name) for name in ("tools", "documents")}
            encode_completions(
                find_pretrained(Path(spec)).tokenizer(), [prompts[0].prompt], ["."], [offered]
            )
    # The plan of the order has the options that must not change when the run resumes.
    fixed: list[Any] = [
        options.num_generations,
        options.max_completion_length,
        options.num_iterations,
    ]
    fixed += [data.apply_chat_template, *data.fields]
    if not data.validation_files:
        fixed.append(data.validation_ratio)
    if data.parse_special_tokens:
        fixed.append("parsed")
    if options.environment:
        fixed += [*identify(options.environment), options.max_turns]
    content = json.dumps([hash_files(data.files), fixed], sort_keys=True)
    dataset = PackedDataset(
        PromptPacking(prompts, validation_prompts, turns),
        name="prompts",
        location=", ".join(map(str, data.files)),
        plan=["prompts", xxhash.xxh3_128_hexdigest(content.encode())],
        sequence_length=data.sequence_length,
        seed=config.train.seed,
    )
    folders = describe_folders(data.files, validation_paths=data.validation_files)
    return RunInputs(
        tokenizer,
        dataset,
        None,
        model_config,
        batch_plan,
        data_source=dataset.location,
        data_summary=(
            f"{dataset.location}: {counts}{folders}; {options.num_generations} completions each"
        ),
        load_weights=pretrained.load_weights,
        sequences_per_sample=options.num_generations,
    )


def is_conversational(prompts: Sequence[TokenizedPrompt]) -> bool:
    """Whether some of them are messages, which the chat template renders."""
    return any(not isinstance(prompt.prompt, str) for prompt in prompts)
