"""The weights of a model as a checkpoint has them: each tensor by name, or all of them in a model,
with adapters merged.
"""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lmforge.core.checkpoint.load import load, open_reader
from lmforge.core.files.untrusted import check_content
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import LORA_SUFFIXES, named_tensors
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora, lora_delta
from lmforge.core.model.lora_config import LoraConfig, adapted_name
from lmforge.core.model.quantization.formats import StoredMatrix, quantized_matrices
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.options.lora import LoraOptions
from lmforge.core.records.manifests import CorruptCheckpoint, Manifest
from lmforge.core.records.runs import MANIFEST
from lmforge.hf.merge_adapters import copy_part, merge_adapters


def stored_lora_config(manifest: Manifest) -> LoraConfig | None:
    """The config of a checkpoint's low-rank adapters; None where it has none.

    Raises CorruptCheckpoint where the manifest lacks it.
    """
    options = check_content(
        manifest.recipe.get("lora", {}), LoraOptions, f"{MANIFEST}: recipe.lora", CorruptCheckpoint
    )
    return None if options.rank is None else LoraConfig(**options.model_dump())


@torch.no_grad()
def load_weights(
    folder: Path, manifest: Manifest, model: LanguageModel, new_names: Collection[str] = ()
) -> None:
    """Fill a model from a checkpoint, whose adapters are merged.

    The model may be sharded: each rank reads its parts.

    The model's own adapters and `new_names` are not in the checkpoint and stay as they are. Raises
    CorruptCheckpoint where a file does not hold what was written, and UserError where it is the
    checkpoint of another model.
    """
    own = {
        name: each
        for name, each in named_tensors(model)
        if not name.endswith(LORA_SUFFIXES) and name not in new_names
    }
    stored, matrices = StoredModel(folder, manifest), quantized_matrices(model)
    # Matrices that are quantized here or there are merged whole, and those of the model quantized
    # after that.
    whole = {name: own.pop(name) for name in [*own] if name in matrices or name in stored.quantized}
    load(folder, {"model": own})
    for name, parameter in whole.items():
        value = stored.read(name)
        copy_part(
            parameter,
            matrices[name].quantize(value.to(parameter.device)) if name in matrices else value,
        )
    if stored.lora is not None:
        left = {
            name: each
            for name, each in stored.adapters.items()
            if stored.adapted_name(name) not in whole
        }
        merge_adapters(model, stored.lora, left, str(folder))


class StoredModel:
    """The model's tensors in a checkpoint, by name: `tensors` on the meta device, and each one's
    value by `read`, which merges adapters. `adapters` are the unmerged adapters, and `lora` is
    their config, None where there are none. `quantized`: the matrices that are stored in 4 or 8
    bits; `read` returns them in fp32.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._reader = open_reader(folder)
        self.lora = stored_lora_config(manifest)
        config = stored_model_config(manifest)
        self._conv1d_layout = config.family.transposed
        self.quantized: dict[str, StoredMatrix] = {}
        if self.lora is not None and self.lora.stored is not None:
            add_lora(model := build_model(config, "meta"), self.lora)
            self.quantized = quantized_matrices(model)
        stored = self._reader.tensors
        tensors = {
            name.removeprefix("model."): each
            for name, each in stored.items()
            if name.startswith("model.")
        }
        self._adapters = {
            name: tensor for name, tensor in tensors.items() if name.endswith(LORA_SUFFIXES)
        }
        layers = [
            name.removesuffix(LORA_SUFFIXES[0])
            for name in self._adapters
            if name.endswith(LORA_SUFFIXES[0])
        ]
        self._adapter_of = {adapted_name(layer): layer for layer in layers}
        self._stored = {
            name: tensor for name, tensor in tensors.items() if name not in self._adapters
        }
        full = {
            name: torch.empty(matrix.shape, device="meta")
            for name, matrix in self.quantized.items()
        }
        self.tensors = self._stored | full

    def adapted_name(self, adapter: str) -> str:
        """The name of the weight that one of the tensors of `adapters` belongs to."""
        return adapted_name(adapter.removesuffix(LORA_SUFFIXES[0]).removesuffix(LORA_SUFFIXES[1]))

    def read(self, name: str) -> Tensor:
        """The full tensor, on the CPU. Raises CorruptCheckpoint where a file does not hold what was
        written.
        """
        value = self._read(name, self._stored[name])
        if name in self.quantized:
            value = self.quantized[name].dequantize(value)
        layer = self._adapter_of.get(name)
        if self.lora is not None and layer is not None:
            a, b = (self.adapters[f"{layer}{suffix}"] for suffix in LORA_SUFFIXES)
            value = value + lora_delta(self.lora.scaling, a, b, self._conv1d_layout)
        return value

    @cached_property
    def adapters(self) -> dict[str, Tensor]:
        """The adapters' tensors, on the CPU."""
        return {name: self._read(name, tensor) for name, tensor in self._adapters.items()}

    def _read(self, name: str, like: Tensor) -> Tensor:
        value = torch.empty_like(like, device="cpu")
        self._reader.load({"model": {name: value}}, name)
        return value
