"""The weights of a checkpoint for further training, evaluation and export: full models, with trained adapters merged."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.checkpoint.load import load, open_checkpoint_reader
from lmforge.checkpoint.manifest import Manifest
from lmforge.interop.torch_checkpoints import load_tensors
from lmforge.interop.weights import merge_adapters
from lmforge.model.init_weights import LORA_SUFFIXES
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, lora_delta


def stored_lora_config(manifest: Manifest) -> LoraConfig | None:
    """The config of the low-rank adapters that a checkpoint has beside the weights; None where it has none."""
    options = manifest.recipe.get("lora", {})
    if not options.get("rank"):
        return None
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return LoraConfig(**fields)


@torch.no_grad()
def load_weights(folder: Path, manifest: Manifest, model: LanguageModel, new_names: Collection[str] = ()) -> None:
    """Fill a model from a checkpoint, whose adapters are merged. The model may be sharded: each rank reads its parts.

    The model's own adapters and `new_names` are not in the checkpoint and stay as they are. Raises CorruptCheckpoint where a
    file does not hold what was written, and UserError where it is another model's.
    """
    own = {name: each for name, each in model.named_parameters() if not name.endswith(LORA_SUFFIXES) and name not in new_names}
    load(folder, {"model": own})
    lora = stored_lora_config(manifest)
    if lora is not None:
        merge_adapters(model, lora, StoredModel(folder, manifest).adapters, str(folder))


class StoredModel:
    """The model's tensors in a checkpoint, by name: `tensors` on the meta device, and each one's value by `read`.

    `read` merges adapters; `adapters` has them as they are, and `lora` is their config, None where there are none.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = open_checkpoint_reader(folder)
        self.lora = stored_lora_config(manifest)
        self._conv1d_layout = manifest.model_config.family == "gpt2"  # stores its weights transposed
        stored = self._reader.meta_tensors()
        tensors = {name.removeprefix("model."): each for name, each in stored.items() if name.startswith("model.")}
        self._adapters = {name: tensor for name, tensor in tensors.items() if name.endswith(LORA_SUFFIXES)}
        self.tensors = {name: tensor for name, tensor in tensors.items() if name not in self._adapters}

    def read(self, name: str) -> Tensor:
        """The full tensor, on the CPU. Raises CorruptCheckpoint where a file does not hold what was written."""
        value = self._read(name, self.tensors[name])
        layer = name.removesuffix(".weight")
        if self.lora is not None and f"{layer}{LORA_SUFFIXES[0]}" in self._adapters:
            a, b = (self.adapters[f"{layer}{suffix}"] for suffix in LORA_SUFFIXES)
            value += lora_delta(self.lora.scaling, a, b, self._conv1d_layout)
        return value

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The adapters' tensors, on the CPU."""
        return {name: self._read(name, tensor) for name, tensor in self._adapters.items()}

    def _read(self, name: str, like: Tensor) -> Tensor:
        value = torch.empty_like(like, device="cpu")
        load_tensors({"model": {name: value}}, self._reader)
        return value
