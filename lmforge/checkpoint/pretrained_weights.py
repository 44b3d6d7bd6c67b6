"""The weights of a checkpoint for those that begin from them: whole models, with the adapters that were trained beside them
merged."""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lmforge.checkpoint.load import CheckpointReader, load, read_tensors
from lmforge.checkpoint.manifest import Manifest
from lmforge.interop.weights import merge_adapters
from lmforge.model.init_weights import LORA_SUFFIXES
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, lora_delta

LORA_A_SUFFIX, LORA_B_SUFFIX = LORA_SUFFIXES


def stored_lora_config(manifest: Manifest) -> LoraConfig | None:
    """The low-rank adapters that a checkpoint holds beside the weights; None where it has none."""
    options = manifest.recipe.get("lora", {})
    if not options.get("rank"):
        return None
    chosen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return LoraConfig(**chosen)


@torch.no_grad()
def load_weights(folder: Path, manifest: Manifest, model: LanguageModel, new_names: Collection[str] = ()) -> None:
    """Fill a model that has no adapters, or new ones which stay as they are, and so does what else is `new` to the checkpoint;
    it may be sharded, and each rank reads its parts.

    Raises CorruptCheckpoint where what is read is not what was written, and UserError where it is another model's.
    """
    here = {name: each for name, each in model.named_parameters() if not name.endswith(LORA_SUFFIXES) and name not in new_names}
    load(folder, {"model": here})
    lora = stored_lora_config(manifest)
    if lora is not None:
        merge_adapters(model, lora, StoredModel(folder, manifest).adapters, str(folder))


class StoredModel:
    """The model's tensors in a checkpoint, by name: their shapes and dtypes (on the meta device), and each when asked for.

    Adapters are merged into what is read; `adapters` has them as they are, `lora` what they are, None where there are none.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = CheckpointReader(folder)
        self.lora = stored_lora_config(manifest)
        self._conv1d_layout = manifest.model_config.family == "gpt2"  # whose weights lie on their side
        stored = self._reader.read_metadata().state_dict_metadata
        everything = {
            name.removeprefix("model."): torch.empty(found.size, dtype=found.properties.dtype, device="meta")
            for name, found in stored.items()
            if isinstance(found, TensorStorageMetadata) and name.startswith("model.")
        }
        self._adapters = {name: tensor for name, tensor in everything.items() if name.endswith(LORA_SUFFIXES)}
        self.tensors = {name: tensor for name, tensor in everything.items() if name not in self._adapters}

    def read(self, name: str) -> Tensor:
        """The whole of a tensor, on the CPU. Raises CorruptCheckpoint where it is not what was written."""
        value = self._read(name, self.tensors[name])
        layer = name.removesuffix(".weight")
        if self.lora is not None and f"{layer}{LORA_A_SUFFIX}" in self._adapters:
            value += lora_delta(
                self.lora.scaling,
                self.adapters[f"{layer}{LORA_A_SUFFIX}"],
                self.adapters[f"{layer}{LORA_B_SUFFIX}"],
                self._conv1d_layout,
            )
        return value

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The adapters' tensors, on the CPU."""
        return {name: self._read(name, tensor) for name, tensor in self._adapters.items()}

    def _read(self, name: str, like: Tensor) -> Tensor:
        value = torch.empty_like(like, device="cpu")
        read_tensors({"model": {name: value}}, self._reader)
        return value
