"""Opening a trained model by naming it: a run, a checkpoint, a Hugging Face folder or name, a folder of adapters,
with no other flag."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmforge import checkpoint
from lmforge.checkpoint import Manifest
from lmforge.cluster.distributed import choose_device, keep_freed_memory
from lmforge.cluster.rank_info import threads_per_rank
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.hub import resolve_model_folder
from lmforge.interop.peft_folder import base_model_of, is_peft_folder, load_peft_folder
from lmforge.interop.resolve import resolve_model_config
from lmforge.interop.weights import load_folder, merge_adapters
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.layers import LanguageModel
from lmforge.parallel.precision import choose_dtype

# A shape may allow rows far longer than a cache has room for.
DEFAULT_MAX_LENGTH = 4096
# Stages in which texts begin and end as the tokenizer and its chat template say.
POST_TRAINING_STAGES = ("sft", "align")


@dataclass(frozen=True)
class LoadedModel:
    """A model in fp32 or bf16 on one device, ready to be read from, and what is known of it.

    opening, ends: ids that a text begins with, and that end one, as the model was trained.
    data: where what it was trained on lies; None where it does not say.
    """

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    path: Path
    recipe: dict[str, Any] | None
    prefix_ids: list[int]
    stop_token_ids: frozenset[int]
    training_data: Path | None = None


def resolve_device_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype that two options mean, with every core at the command of this process. Raises UserError."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(threads_per_rank(1))
        keep_freed_memory()
    return chosen, choose_dtype(dtype, chosen)[0]


def resolve_max_length(loaded: LoadedModel, requested: int | None) -> int:
    """Tokens that a prompt and its answer may have together: what was asked for, or what the model was made for."""
    bound = loaded.config.max_sequence_length
    if requested is None:
        return min(loaded.config.max_position_embeddings, DEFAULT_MAX_LENGTH)
    if bound is not None and requested > bound:
        raise UserError(f"--max_length {requested}: {loaded.path} reads at most {bound} tokens; give at most that")
    return requested


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype, warn: Callable[[str], None] = print, reward_model: bool = False
) -> LoadedModel:
    """Load what `path` names onto `device`. Raises UserError where there is no model or tokenizer.

    `say` gets a line for each damaged checkpoint that was passed over; with `judges` a reward model is asked for.
    """
    path = resolve_model_folder(path)
    if is_peft_folder(path):
        return _from_adapters(path, device, dtype, warn, reward_model)
    if (path / "config.json").exists():
        return _from_folder(path, device, dtype, reward_model)
    opened, passed_over = checkpoint.open_checkpoint(
        path, partial(_from_checkpoint, device=device, dtype=dtype, reward_model=reward_model)
    )
    for line in passed_over:
        warn(line)
    return opened


def _from_adapters(
    folder: Path, device: torch.device, dtype: torch.dtype, warn: Callable[[str], None], reward_model: bool
) -> LoadedModel:
    """The model that adapters belong to with these merged into it, rounded only then. A tokenizer beside them comes first."""
    opened = load_model(base_model_of(folder), device, torch.float32, warn, reward_model)
    merge_adapters(opened.model, *load_peft_folder(folder), str(folder))
    tokenizer = Tokenizer.open(folder) if (folder / "tokenizer.json").exists() else opened.tokenizer
    return replace(opened, model=opened.model.to(dtype), tokenizer=tokenizer, path=folder)


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype, reward_model: bool) -> LoadedModel:
    config = resolve_model_config(folder, {}, implementation="auto")
    check_reward_head(config, folder, reward_model)
    if not (folder / "tokenizer.json").exists():
        raise UserError(f"{folder}: has no tokenizer.json; put the model's beside its weights")
    tokenizer = Tokenizer.open(folder)
    model = build_model(config, device)
    load_folder(folder, model)
    ends = _read_eos_token_ids(folder, config.vocab_size)
    return LoadedModel(model.to(dtype).eval(), config, tokenizer, folder, None, tokenizer.prefix_ids, ends)


def _from_checkpoint(
    folder: Path, manifest: Manifest, device: torch.device, dtype: torch.dtype, reward_model: bool
) -> LoadedModel:
    check_reward_head(manifest.model_config, folder, reward_model)
    model = build_model(manifest.model_config, device)
    checkpoint.load_weights(folder, manifest, model)
    tokenizer = Tokenizer.open(folder)
    opening, ends = prefix_and_stop_ids(tokenizer, training_stage(manifest))
    model = model.to(dtype).eval()
    data = manifest.written_by.get("data") or manifest.recipe.get("data", {}).get("folder")
    if manifest.recipe.get("align", {}).get("method") == "grpo":
        data = None  # prompts, to which no answers are known
    return LoadedModel(
        model, manifest.model_config, tokenizer, folder, manifest.recipe, opening, ends, Path(data) if data else None
    )


def check_reward_head(config: ModelConfig, path: Path, reward_model: bool) -> None:
    """Raise UserError for a model that gives rewards where words are wanted, and the other way round."""
    if config.reward and not reward_model:
        raise UserError(
            f"{path}: a reward model, which judges answers and writes none; name it in rollout.reward_functions, or export it"
        )
    if reward_model and not config.reward:
        raise UserError(f"{path}: not a reward model; train one with `lmforge align --align.method reward`")


def training_stage(manifest: Manifest) -> str | None:
    """Which stage a checkpoint is of; None for old ones of pretraining."""
    stage: str | None = manifest.recipe.get("run", {}).get("stage")
    return stage


def prefix_and_stop_ids(tokenizer: Tokenizer, stage: str | None) -> tuple[list[int], frozenset[int]]:
    """Ids that a text begins with, and that end one, as a stage trains them.

    Rows of pretraining are texts and separators: no text in them began with another token. Later stages begin each text as
    the tokenizer does, and end it as its chat template does.
    """
    template = chat_template(tokenizer, stage)
    return tokenizer.prefix_ids if stage in POST_TRAINING_STAGES else [], frozenset() if template is None else template.stop_ids


def chat_template(tokenizer: Tokenizer, stage: str | None) -> ChatTemplate | None:
    """How a stage teaches to chat; None where it is pretraining, or the tokenizer has no such way."""
    if stage not in POST_TRAINING_STAGES:
        return None
    try:
        return ChatTemplate.from_tokenizer(tokenizer)
    except UserError:
        return None


def _read_eos_token_ids(folder: Path, vocab_size: int) -> frozenset[int]:
    """Every id that a Hugging Face folder calls `eos_token_id`: chat models name several."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            named = json.loads((folder / name).read_text("utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise UserError(f"{folder / name}: not a JSON object") from None
        ids.update(id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int))
    return frozenset(id for id in ids if 0 <= id < vocab_size)
