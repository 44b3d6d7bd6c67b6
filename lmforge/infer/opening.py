"""Opening a trained model by naming it: a run, a checkpoint, a Hugging Face folder or name, with no other flag."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmforge import checkpoint
from lmforge.checkpoint import Manifest
from lmforge.data.hub import local_folder
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig, resolve
from lmforge.model.weights import load_folder


@dataclass(frozen=True)
class Opened:
    """A model in fp32 or bf16 on one device, ready to be read from, and what is known of it.

    opening, ends: ids that a text begins with, and that end one, as the model was trained.
    """

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    origin: Path
    recipe: dict[str, Any] | None
    opening: list[int]
    ends: frozenset[int]


def open_model(path: Path, device: torch.device, dtype: torch.dtype, say: Callable[[str], None] = print) -> Opened:
    """Load what `path` names onto `device`. Raises Mistake where there is no model or tokenizer.

    `say` gets a line for each damaged checkpoint that was passed over.
    """
    path = local_folder(path)
    if (path / "config.json").exists():
        return _from_folder(path, device, dtype)
    opened, passed_over = checkpoint.using(path, partial(_from_checkpoint, device=device, dtype=dtype))
    for line in passed_over:
        say(line)
    return opened


def _from_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> Opened:
    config = resolve(folder, {}, implementation="auto")
    if not (folder / "tokenizer.json").exists():
        raise Mistake(f"{folder}: has no tokenizer.json; put the model's beside its weights")
    tokenizer = Tokenizer.open(folder)
    model = build(config, seed=None, device=device)
    load_folder(folder, model)
    ends = _named_ends(folder, config.vocab_size)
    return Opened(model.to(dtype).eval(), config, tokenizer, folder, None, tokenizer.opening_ids, ends)


def _from_checkpoint(folder: Path, manifest: Manifest, device: torch.device, dtype: torch.dtype) -> Opened:
    model = build(manifest.model_config, seed=None, device=device)
    checkpoint.load(folder, {"model": dict(model.named_parameters())})
    # Our rows are texts and separators: no text in them began with another token.
    opening, ends = list[int](), frozenset[int]()
    model = model.to(dtype).eval()
    return Opened(model, manifest.model_config, Tokenizer.open(folder), folder, manifest.recipe, opening, ends)


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
