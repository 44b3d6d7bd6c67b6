"""The weights of a checkpoint for those that begin from them: whole models, with the adapters that were trained beside them
merged."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lmforge.checkpoint.loading import Reader, load, read_tensors
from lmforge.checkpoint.manifest import Manifest
from lmforge.model.initial import ADAPTERS
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, addition
from lmforge.model.weights import add_adapters

DOWN, UP = ADAPTERS


def adapters_of(manifest: Manifest) -> LoraConfig | None:
    """The low-rank adapters that a checkpoint holds beside the weights; None where it has none."""
    options = manifest.recipe.get("lora", {})
    if not options.get("rank"):
        return None
    chosen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return LoraConfig(**chosen)


@torch.no_grad()
def load_weights(folder: Path, manifest: Manifest, model: LanguageModel, new: Collection[str] = ()) -> None:
    """Fill a model that has no adapters, or new ones which stay as they are, and so does what else is `new` to the checkpoint;
    it may be sharded, and each rank reads its parts.

    Raises Unsound where what is read is not what was written, and Mistake where it is another model's.
    """
    here = {name: each for name, each in model.named_parameters() if not name.endswith(ADAPTERS) and name not in new}
    load(folder, {"model": here})
    lora = adapters_of(manifest)
    if lora is not None:
        add_adapters(model, lora, StoredModel(folder, manifest).adapters, str(folder))


class StoredModel:
    """The model's tensors in a checkpoint, by name: their shapes and dtypes (on the meta device), and each when asked for.

    Adapters are merged into what is read; `adapters` has them as they are, `lora` what they are, None where there are none.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = Reader(folder)
        self.lora = adapters_of(manifest)
        self._transposed = manifest.model_config.family == "gpt2"  # whose weights lie on their side
        stored = self._reader.read_metadata().state_dict_metadata
        everything = {
            name.removeprefix("model."): torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in stored.items()
            if isinstance(found, TensorStorageMetadata) and name.startswith("model.")
        }
        self._adapters = {name: tensor for name, tensor in everything.items() if name.endswith(ADAPTERS)}
        self.tensors = {name: tensor for name, tensor in everything.items() if name not in self._adapters}

    def read(self, name: str) -> Tensor:
        """The whole of a tensor, on the CPU. Raises Unsound where it is not what was written."""
        value = self._read(name, self.tensors[name])
        layer = name.removesuffix(".weight")
        if self.lora is not None and f"{layer}{DOWN}" in self._adapters:
            value += addition(self.lora.scale, self.adapters[f"{layer}{DOWN}"], self.adapters[f"{layer}{UP}"], self._transposed)
        return value

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The adapters' tensors, on the CPU."""
        return {name: self._read(name, tensor) for name, tensor in self._adapters.items()}

    def _read(self, name: str, like: Tensor) -> Tensor:
        value = torch.empty_like(like, device="cpu")
        read_tensors({"model": {name: value}}, self._reader)
        return value
