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
from lmforge.cluster.environment import local_threads
from lmforge.cluster.ranks import choose_device, keep_freed_memory
from lmforge.data.hub import local_folder
from lmforge.data.templates import ChatTemplate
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.peft_folder import base_of, is_peft, load_peft
from lmforge.model.shapes import ModelConfig, resolve
from lmforge.model.weights import add_adapters, load_folder
from lmforge.parallel.precision import choose_dtype

# A shape may allow rows far longer than a cache has room for.
LONGEST_UNASKED = 4096
# Stages in which texts begin and end as the tokenizer and its chat template say.
TUNED = ("sft", "align")


@dataclass(frozen=True)
class Opened:
    """A model in fp32 or bf16 on one device, ready to be read from, and what is known of it.

    opening, ends: ids that a text begins with, and that end one, as the model was trained.
    data: where what it was trained on lies; None where it does not say.
    """

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    origin: Path
    recipe: dict[str, Any] | None
    opening: list[int]
    ends: frozenset[int]
    data: Path | None = None


def settle(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype that two options mean, with every core at the command of this process. Raises Mistake."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(local_threads(1))
        keep_freed_memory()
    return chosen, choose_dtype(dtype, chosen)[0]


def longest(opened: Opened, asked: int | None) -> int:
    """Tokens that a prompt and its answer may have together: what was asked for, or what the model was made for."""
    bound = opened.config.longest_row_tokens
    if asked is None:
        return min(opened.config.max_position_embeddings, LONGEST_UNASKED)
    if bound is not None and asked > bound:
        raise Mistake(f"--max_length {asked}: {opened.origin} reads at most {bound} tokens; give at most that")
    return asked


def open_model(
    path: Path, device: torch.device, dtype: torch.dtype, say: Callable[[str], None] = print, judges: bool = False
) -> Opened:
    """Load what `path` names onto `device`. Raises Mistake where there is no model or tokenizer.

    `say` gets a line for each damaged checkpoint that was passed over; with `judges` a reward model is asked for.
    """
    path = local_folder(path)
    if is_peft(path):
        return _from_adapters(path, device, dtype, say, judges)
    if (path / "config.json").exists():
        return _from_folder(path, device, dtype, judges)
    opened, passed_over = checkpoint.using(path, partial(_from_checkpoint, device=device, dtype=dtype, judges=judges))
    for line in passed_over:
        say(line)
    return opened


def _from_adapters(folder: Path, device: torch.device, dtype: torch.dtype, say: Callable[[str], None], judges: bool) -> Opened:
    """The model that adapters belong to with these merged into it, rounded only then. A tokenizer beside them comes first."""
    opened = open_model(base_of(folder), device, torch.float32, say, judges)
    add_adapters(opened.model, *load_peft(folder), str(folder))
    tokenizer = Tokenizer.open(folder) if (folder / "tokenizer.json").exists() else opened.tokenizer
    return replace(opened, model=opened.model.to(dtype), tokenizer=tokenizer, origin=folder)


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype, judges: bool) -> Opened:
    config = resolve(folder, {}, implementation="auto")
    check_kind(config, folder, judges)
    if not (folder / "tokenizer.json").exists():
        raise Mistake(f"{folder}: has no tokenizer.json; put the model's beside its weights")
    tokenizer = Tokenizer.open(folder)
    model = build(config, seed=None, device=device)
    load_folder(folder, model)
    ends = _named_ends(folder, config.vocab_size)
    return Opened(model.to(dtype).eval(), config, tokenizer, folder, None, tokenizer.opening_ids, ends)


def _from_checkpoint(folder: Path, manifest: Manifest, device: torch.device, dtype: torch.dtype, judges: bool) -> Opened:
    check_kind(manifest.model_config, folder, judges)
    model = build(manifest.model_config, seed=None, device=device)
    checkpoint.load_weights(folder, manifest, model)
    tokenizer = Tokenizer.open(folder)
    opening, ends = opening_and_ends(tokenizer, stage_of(manifest))
    model = model.to(dtype).eval()
    data = manifest.world.get("data") or manifest.recipe.get("data", {}).get("folder")
    if manifest.recipe.get("align", {}).get("method") == "grpo":
        data = None  # prompts, to which no answers are known
    return Opened(model, manifest.model_config, tokenizer, folder, manifest.recipe, opening, ends, Path(data) if data else None)


def check_kind(config: ModelConfig, where: Path, judges: bool) -> None:
    """Raise Mistake for a model that gives rewards where words are wanted, and the other way round."""
    if config.reward and not judges:
        raise Mistake(
            f"{where}: a reward model, which judges answers and writes none; name it in rollout.rewards, or export it"
        )
    if judges and not config.reward:
        raise Mistake(f"{where}: not a reward model; train one with `lmforge align --align.method reward`")


def stage_of(manifest: Manifest) -> str | None:
    """Which stage a checkpoint is of; None for old ones of pretraining."""
    stage: str | None = manifest.recipe.get("run", {}).get("stage")
    return stage


def opening_and_ends(tokenizer: Tokenizer, stage: str | None) -> tuple[list[int], frozenset[int]]:
    """Ids that a text begins with, and that end one, as a stage trains them.

    Rows of pretraining are texts and separators: no text in them began with another token. Later stages begin each text as
    the tokenizer does, and end it as its chat template does.
    """
    template = chat_template(tokenizer, stage)
    return tokenizer.opening_ids if stage in TUNED else [], frozenset() if template is None else template.ends


def chat_template(tokenizer: Tokenizer, stage: str | None) -> ChatTemplate | None:
    """How a stage teaches to chat; None where it is pretraining, or the tokenizer has no such way."""
    if stage not in TUNED:
        return None
    try:
        return ChatTemplate.of(tokenizer)
    except Mistake:
        return None


def _named_ends(folder: Path, vocab_size: int) -> frozenset[int]:
    """Every id that a Hugging Face folder calls `eos_token_id`: chat models name several."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            named = json.loads((folder / name).read_text("utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise Mistake(f"{folder / name}: not a JSON object") from None
        ids.update(id for id in (named if isinstance(named, list) else [named]) if isinstance(id, int))
    return frozenset(id for id in ids if 0 <= id < vocab_size)
