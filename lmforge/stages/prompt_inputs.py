"""The inputs of policy optimization: prompts with the columns that reward functions are given."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.sections import ModelOptions
from lmforge.data.chat.examples import hash_files, select_validation
from lmforge.data.chat.preferences import PromptCounts, TokenizedPrompt, encode_completions, read_prompt_columns, read_prompts
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.dataset import PackedDataset
from lmforge.data.packing import PackedSequence
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError, prefix_errors
from lmforge.generate.model_loading import check_reward_head
from lmforge.parallel.dims import plan_batches
from lmforge.rewards.functions import is_model_folder, load_reward_functions
from lmforge.stages.inputs import check_model, open_tuned_model
from lmforge.stages.pretrained import find_pretrained
from lmforge.train.context import RunInputs


class PromptPacking:
    """One prompt in each sequence, without labels: what the order of a PackedDataset is made of."""

    def __init__(
        self, prompts: Sequence[TokenizedPrompt], validation_prompts: Sequence[TokenizedPrompt], sequence_length: int
    ) -> None:
        self.prompts, self.validation_prompts = prompts, validation_prompts
        self._sequence_length = sequence_length

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    def sequence(self, index: int) -> PackedSequence:
        sequence = PackedSequence.all_padding(self._sequence_length)
        if index < self.num_sequences:
            tokens = self.prompts[index].tokens
            sequence.tokens[: len(tokens)] = tokens
            sequence.positions[: len(tokens)] = np.arange(len(tokens))
            sequence.document_ids[: len(tokens)] = 0
        return sequence


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
        with prefix_errors("rollout.reward_functions"):
            check_reward_head(find_pretrained(Path(spec)).resolve_model_config(ModelOptions()), Path(spec), reward_model=True)
    with load_reward_functions([spec for spec in config.rollout.reward_functions if spec not in models]) as rewards:
        for files in filter(None, (config.data.files, config.data.validation_files)):
            names: set[str] = set()
            for location, columns in (record for path in files for record in read_prompt_columns(path, config.data.renamed)):
                names.update(columns)
                with prefix_errors(location):
                    rewards.check_serializable(columns)
            with prefix_errors(", ".join(map(str, files))):
                rewards.check_columns(sorted(names))


def _read_split(config: AlignConfig, tokenizer: Tokenizer, files_option: str) -> tuple[list[TokenizedPrompt], PromptCounts]:
    """The prompts of `data.files` or `data.validation_files`, with counts. UserError where there are files and no prompts."""
    options, counts = config.data, PromptCounts()
    files = getattr(options, files_option)
    prompts = [
        prompt
        for path in files
        for prompt in read_prompts(
            path,
            tokenizer,
            apply_chat_template=options.apply_chat_template,
            fields=options.renamed,
            max_prompt_length=options.sequence_length - config.rollout.max_completion_length,
            counts=counts,
        )
    ]
    if files and not counts.kept:
        raise UserError(
            f"data.{files_option}: no prompt is left ({counts}); make data.sequence_length longer, or"
            " rollout.max_completion_length shorter"
        )
    return prompts, counts


def _read_prompts(config: AlignConfig, tokenizer: Tokenizer) -> tuple[list[TokenizedPrompt], list[TokenizedPrompt], str]:
    """Prompts of training and of validation, and what became of the records, in words."""
    prompts, counts = _read_split(config, tokenizer, "files")
    if config.data.validation_files:
        validation, validation_counts = _read_split(config, tokenizer, "validation_files")
        return prompts, validation, f"{counts}; validation: {validation_counts}"
    hashes = np.array([xxhash.xxh3_64_intdigest(prompt.tokens.tobytes()) for prompt in prompts], np.uint64)
    chosen = select_validation(hashes, config.data.validation_ratio).tolist()
    train = [prompt for prompt, is_validation in zip(prompts, chosen, strict=True) if not is_validation]
    validation = [prompt for prompt, is_validation in zip(prompts, chosen, strict=True) if is_validation]
    return train, validation, f"{counts}; {len(validation):,} for validation"


def open_prompt_inputs(config: AlignConfig, world_size: int) -> RunInputs:
    """Open prompts, tokenizer and model. Raises UserError where they do not fit together."""
    batch_plan = plan_batches(config, world_size)
    pretrained, tokenizer, model_config = open_tuned_model(config)
    check_model(config, model_config, batch_plan, tokenizer)
    _check_sizes(config, batch_plan, world_size)
    prompts, validation_prompts, counts = _read_prompts(config, tokenizer)
    if is_conversational([*prompts, *validation_prompts]):
        # Only its stop token is checked: completions are learned from as they were sampled, without the template.
        ChatTemplate.from_tokenizer(tokenizer).check_stop_token()
    _check_reward_models(config, prompts[0])
    dataset = _prompt_dataset(config, prompts, validation_prompts)
    return RunInputs(
        tokenizer,
        dataset,
        None,
        model_config,
        batch_plan,
        data_source=dataset.location,
        data_summary=f"{dataset.location}: {counts}; {config.rollout.num_generations} completions each",
        load_weights=pretrained.load_weights,
        sequences_per_sample=config.rollout.num_generations,
    )


def _check_sizes(config: AlignConfig, batch_plan: BatchPlan, world_size: int) -> None:
    options, length = config.rollout, config.data.sequence_length
    if options.max_completion_length >= length:
        raise UserError(
            f"rollout.max_completion_length = {options.max_completion_length}: leaves no room for a prompt in"
            f" data.sequence_length = {length}"
        )
    unit = world_size * options.num_generations
    size = batch_plan.global_batch_size
    if size % unit:
        raise UserError(
            f"train.global_batch_size = {size}: {world_size} ranks with groups of rollout.num_generations"
            f" = {options.num_generations} completions need a multiple of {unit}; nearest: {max(1, round(size / unit)) * unit}"
        )


def _prompt_dataset(
    config: AlignConfig, prompts: list[TokenizedPrompt], validation_prompts: list[TokenizedPrompt]
) -> PackedDataset:
    """The order of the prompts. Its plan holds the options that a run may not change when it resumes."""
    options, data = config.rollout, config.data
    fixed: list[Any] = [options.num_generations, options.max_completion_length, options.num_iterations]
    fixed += [data.apply_chat_template, *data.fields]
    fixed += [] if data.validation_files else [data.validation_ratio]
    content = json.dumps([hash_files(data.files), fixed], sort_keys=True)
    return PackedDataset(
        PromptPacking(prompts, validation_prompts, data.sequence_length),
        name="prompts",
        location=", ".join(map(str, data.files)),
        plan=["prompts", xxhash.xxh3_128_hexdigest(content.encode())],
        sequence_length=data.sequence_length,
        seed=config.train.seed,
    )


def _check_reward_models(config: AlignConfig, prompt: TokenizedPrompt) -> None:
    """Raise UserError where a reward model cannot read such prompts, because it has no chat template."""
    for spec in filter(is_model_folder, config.rollout.reward_functions):
        with prefix_errors(f"rollout.reward_functions: {spec}"):
            encode_completions(find_pretrained(Path(spec)).tokenizer(), [prompt.prompt], ["."])


def is_conversational(prompts: Sequence[TokenizedPrompt]) -> bool:
    """Whether some of them are messages, which the chat template renders."""
    return any(not isinstance(prompt.prompt, str) for prompt in prompts)
