"""Opening a trained model by naming it: a run, a checkpoint, a Hugging Face folder or name, with no other flag."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmforge import checkpoint
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
    manifest, path = None, local_folder(path)
    if (path / "config.json").exists():
        origin, config = path, resolve(path, {}, implementation="auto")
    else:
        origin, manifest, passed_over = checkpoint.find(path)
        for line in passed_over:
            say(line)
        config = manifest.model_config
    if not (origin / "tokenizer.json").exists():
        raise Mistake(f"{origin}: has no tokenizer.json; put the model's beside its weights")
    tokenizer = Tokenizer.open(origin)
    model = build(config, seed=None, device=device)
    if manifest is None:
        load_folder(origin, model)
        recipe, opening, ends = None, tokenizer.opening_ids, _named_ends(origin, config.vocab_size)
    else:
        checkpoint.load(origin, {"model": dict(model.named_parameters())})
        # Our rows are texts and separators: no text in them began with another token.
        recipe, opening, ends = manifest.recipe, [], frozenset[int]()
    return Opened(model.to(dtype).eval(), config, tokenizer, origin, recipe, opening, ends)


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
