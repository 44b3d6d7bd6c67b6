"""Load a trained model by name.

It is a run, a checkpoint, a Hugging Face folder or hub name, or a PEFT folder.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lmforge.core import checkpoint
from lmforge.core.checkpoint import Manifest
from lmforge.core.data.tokenizer import Tokenizer, refuse_sentencepiece
from lmforge.core.distributed.distributed import choose_device, keep_freed_memory
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.parallel.precision import choose_dtype
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.core.records.runs import parse_location
from lmforge.hf.hub import resolve_model_folder
from lmforge.hf.merge_adapters import merge_adapters
from lmforge.hf.peft_folder import (
    base_model_of,
    base_model_overrides,
    load_peft_folder,
    tokenizer_folder,
)
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.stored_model import load_weights
from lmforge.hf.turned_experts import adapters_of_model
from lmforge.hf.weights import describe_folder, load_folder
from lmforge.serve.decoding.prompts import PromptTooLong
from lmforge.serve.decoding.sampling import SamplingParams, choose_sampling
from lmforge.text.chat.templates import ChatTemplate

# A model may support sequences that are too long for the memory of a KV cache.
DEFAULT_MAX_LENGTH = 4096
# Stages in which texts begin and end according to the tokenizer and its chat template.
POST_TRAINING_STAGES = ("sft", "distill", "align")


@dataclass(frozen=True)
class LoadedModel:
    """A model on one device in one dtype, in eval mode, and what is known about it.

    prefix_ids, stop_token_ids: ids that a text begins with, and that end it, as the model was
    trained.
    recipe: the options it was trained with; None for a Hugging Face folder.
    training_data: the folder of the data it was trained on, or those of the sources of a mixture by
    name; empty: unknown.
    """

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    path: Path
    recipe: dict[str, Any] | None
    prefix_ids: list[int]
    stop_token_ids: frozenset[int]
    training_data: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises UserError where it has none that can be used."""
        return ChatTemplate.from_tokenizer(self.tokenizer)

    def sampling(self, default_temperature: float, **given: float | None) -> SamplingParams:
        """The options of sampling: `given`, else as the model says; see choose_sampling."""
        return choose_sampling(
            self.config.generation_config, self.path, default_temperature, **given
        )

    def answer_length(self, num_prompt_tokens: int, default: int) -> int:
        """The maximum length of an answer, as the model says.

        It is its max_new_tokens, else what the prompt leaves of its max_length; else `default`.
        Raises PromptTooLong where it leaves nothing.
        """
        stated = self.config.generation_config or {}
        longest = stated.get("max_length")
        length = stated.get("max_new_tokens")
        if length is not None or longest is None:
            return length or default
        if num_prompt_tokens >= longest:
            raise PromptTooLong(
                f"the model's generation_config.json says max_length {longest}, and got"
                f" {num_prompt_tokens} tokens in the prompt, which leaves no room for an answer;"
                " give max_tokens"
            )
        return int(longest - num_prompt_tokens)

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a text, as the model says."""
        stated = (self.config.generation_config or {}).get("stop_strings") or []
        return [stated] if isinstance(stated, str) else stated

    @property
    def text_stop_ids(self) -> frozenset[int]:
        """Ids that end a text, the tokenizer's end-of-text token included."""
        return self.stop_token_ids | {self.tokenizer.eos_token_id}

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        """Ids that end an answer in a chat. Raises UserError as `chat_template` does."""
        return self.text_stop_ids | self.chat_template.stop_ids


def resolve_device_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `--device` and `--dtype` name.

    On a CPU, torch takes every core. Raises UserError.
    """
    chosen = choose_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(threads_per_rank(1))
        keep_freed_memory()
    return chosen, choose_dtype(dtype, chosen)[0]


def resolve_max_length(loaded: LoadedModel, requested: int | None) -> int:
    """The maximum length of prompt and answer in tokens.

    It is `requested`, or what the model was trained for, up to 4096.
    """
    bound = loaded.config.max_sequence_length
    if requested is None:
        return min(loaded.config.max_position_embeddings, DEFAULT_MAX_LENGTH)
    if bound is not None and requested > bound:
        raise UserError(
            f"--max_length {requested}: {loaded.path} reads at most {bound} tokens; give at most"
            " that"
        )
    return requested


def load_model(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    warn: Callable[[str], None] = print,
    reward_model: bool = False,
    overrides: dict[str, Any] | None = None,
) -> LoadedModel:
    """Load the model at `path` onto `device`.

    Raises UserError where there is no model or tokenizer.

    `warn` gets a line for each corrupt checkpoint that was skipped, and what `describe_folder`
    says. With `reward_model` it must be a reward model, else it must not. `overrides` replace
    fields of a folder's config.
    """
    path = resolve_model_folder(path)
    kind = kind_of(path)
    if kind == Kind.ADAPTERS:
        # Merged in fp32 and then cast.
        base = load_model(
            base_model_of(path),
            device,
            torch.float32,
            warn,
            reward_model,
            base_model_overrides(path),
        )
        lora_config, tensors = load_peft_folder(path)
        tensors = adapters_of_model(tensors, base.model.config)
        merge_adapters(base.model, lora_config, tensors, str(path))
        tokenizer = base.tokenizer
        if tokenizer_folder(base.path, path) == path:
            tokenizer = Tokenizer.open(path)
        return replace(base, model=base.model.to(dtype), tokenizer=tokenizer, path=path)
    if kind == Kind.HF_FOLDER:
        loaded = _from_folder(path, device, dtype, reward_model, overrides or {})
        notes = describe_folder(path)
        if notes:
            warn(f"weights of {', '.join([str(path), *notes])}")
        return loaded
    load = partial(_from_checkpoint, device=device, dtype=dtype, reward_model=reward_model)
    loaded, skipped = checkpoint.open_checkpoint(path, load)
    for line in skipped:
        warn(line)
    return loaded


def _from_folder(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    reward_model: bool,
    overrides: dict[str, Any],
) -> LoadedModel:
    config = resolve_model_config(folder, overrides, implementation="auto")
    check_reward_head(config, folder, reward_model)
    refuse_sentencepiece(folder)
    if not (folder / "tokenizer.json").exists():
        raise UserError(
            f"{folder}: no tokenizer.json; put the model's tokenizer beside its weights"
        )
    tokenizer = Tokenizer.open(folder)
    model = build_model(config, device)
    load_folder(folder, model)
    return LoadedModel(
        model.to(dtype).eval(),
        config,
        tokenizer,
        folder,
        None,
        tokenizer.prefix_ids,
        config.end_token_ids,
    )


def _from_checkpoint(
    folder: Path, manifest: Manifest, device: torch.device, dtype: torch.dtype, reward_model: bool
) -> LoadedModel:
    config = stored_model_config(manifest)
    check_reward_head(config, folder, reward_model)
    model = build_model(config, device)
    load_weights(folder, manifest, model)
    tokenizer = Tokenizer.open(folder)
    prefix_ids, stop_ids = prefix_and_stop_ids(tokenizer, training_stage(manifest))
    recipe = manifest.recipe
    data = manifest.written_by.get("data") or recipe.get("data", {}).get("folder")
    sources = manifest.written_by.get("sources")
    if not sources:
        sources = {data: data} if data else {}
    training_data = {}
    # GRPO has prompts without answers, so there is no data to measure a loss on.
    if recipe.get("align", {}).get("method") != "grpo":
        training_data = {name: parse_location(source) for name, source in sources.items()}
    stop_ids |= config.end_token_ids
    return LoadedModel(
        model.to(dtype).eval(),
        config,
        tokenizer,
        folder,
        recipe,
        prefix_ids,
        stop_ids,
        training_data,
    )


def check_reward_head(config: ModelConfig, path: Path, reward_model: bool) -> None:
    """Raise UserError where a reward model is given for a language model, or the reverse."""
    if config.reward and not reward_model:
        raise UserError(
            f"{path}: a reward model, which generates no text; name it in rollout.reward_functions,"
            " or export it"
        )
    if reward_model and not config.reward:
        raise UserError(
            f"{path}: not a reward model; train one with `lmforge align --align.method reward`"
        )


def training_stage(manifest: Manifest) -> str | None:
    """The stage that wrote a checkpoint; None where it does not say (pretraining)."""
    stage: str | None = manifest.recipe.get("run", {}).get("stage")
    return stage


def prefix_and_stop_ids(
    tokenizer: Tokenizer, stage: str | None
) -> tuple[list[int], frozenset[int]]:
    """Ids that a text begins with, and that end it, as a stage trains them.

    Pretraining puts no token before a text. Later stages begin each text as the tokenizer does, and
    end it as its chat template does.
    """
    if stage not in POST_TRAINING_STAGES:
        return [], frozenset()
    template = chat_template(tokenizer, stage)
    return tokenizer.prefix_ids, frozenset() if template is None else template.stop_ids


def chat_template(tokenizer: Tokenizer, stage: str | None) -> ChatTemplate | None:
    """The chat template that a stage trains with.

    None for pretraining, or where the tokenizer has none.
    """
    if stage in POST_TRAINING_STAGES:
        with suppress(UserError):
            return ChatTemplate.from_tokenizer(tokenizer)
    return None
