"""Opening a trained model by naming it: a run, a checkpoint or a Hugging Face folder, with no other flag."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmforge import checkpoint
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig, resolve
from lmforge.model.weights import load_folder


@dataclass(frozen=True)
class Opened:
    """A model in fp32 or bf16 on one device, ready to be read from, and what is known of it."""

    model: LanguageModel
    config: ModelConfig
    tokenizer: Tokenizer
    origin: Path
    recipe: dict[str, Any] | None


def open_model(path: Path, device: torch.device, dtype: torch.dtype, say: Callable[[str], None] = print) -> Opened:
    """Load what `path` names onto `device`. Raises Mistake where there is no model or tokenizer.

    `say` gets a line for each damaged checkpoint that was passed over.
    """
    manifest = None
    if (path / "config.json").exists():
        origin, config = path, resolve(path, {})
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
    else:
        checkpoint.load(origin, model)
    return Opened(model.to(dtype).eval(), config, tokenizer, origin, manifest.recipe if manifest else None)
