"""Weights of a folder in Hugging Face's layout (model.safetensors, or its shards and their index) into a model.

Our tensor names are Hugging Face's, so nothing is converted, except for wrapped models whose stored tensors are in other pieces
than the computed ones (transformers_causal_lm.py). Missing and unexpected tensors are refused. For a sharded model only this
rank's bytes are read (safetensors_file.py). Nothing is unpickled. Writing is in export.py, our checkpoints in checkpoint/.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.errors import UserError, name_some
from lmforge.hub import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, indexed_weight_files
from lmforge.interop.safetensors_file import SafetensorsFile
from lmforge.interop.transformers_causal_lm import TensorConversion, map_stored_names
from lmforge.interop.transformers_model import TransformersModel
from lmforge.model import build_model
from lmforge.model.init_weights import LORA_SUFFIXES, local_part
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, lora_delta

StoredFiles = dict[str, tuple[SafetensorsFile, str]]  # our name of a tensor → its file, and its name there
# Our head, and the head of a classifier of transformers.
LM_HEAD_WEIGHT, CLASSIFIER_HEAD_WEIGHT = "lm_head.weight", "score.weight"
# Constants that older versions of transformers stored among the weights.
_CONSTANT_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@torch.no_grad()
def load_folder(folder: str | Path, model: nn.Module, new_names: Collection[str] = ()) -> None:
    """Fill a model's parameters, in place and in their own dtype, from the safetensors files of a folder.

    Adapters and `new_names` (such as a new head) are not in the folder and stay as they are. The model must be allocated
    (not on meta) and may be sharded: of a DTensor each rank reads only its own part, in few long reads, and holds little
    more than that. A pipeline stage may lack parameters: the folder must hold the full model, and the local part is filled.
    Raises UserError where a file is missing or damaged, or where names or shapes differ, naming the first few.
    """
    folder = Path(folder)
    local = dict(model.named_parameters())
    full_model = _full_model(model)
    absent = (*LORA_SUFFIXES, *new_names)
    expected = {name: each for name, each in full_model.named_parameters() if not name.endswith(absent)}
    opened = [SafetensorsFile(path) for path in _weight_files(folder)]
    file_of = {name: file for file in opened for name in file.entries}
    conversions: list[TensorConversion] = []
    if isinstance(model, TransformersModel):
        our_names, conversions = map_stored_names(model.config.config_dict, file_of)
    else:
        prefix: Any = model.config.family.optional_prefix  # type: ignore[union-attr]
        our_names = {stored: _our_name(stored, prefix) for stored in file_of}
    ignored = (*_CONSTANT_SUFFIXES, *new_names)
    stored = {ours: (file_of[name], name) for name, ours in our_names.items() if not ours.endswith(ignored)}
    _resolve_tied_head(full_model, expected, stored)
    for conversion in conversions:
        _check_converted(folder, expected, conversion.convert(lambda name: file_of[name].entries[name].meta))
    _reject_differences(folder, expected, stored)
    for file in opened:
        targets = {name: local[ours] for ours, (source, name) in stored.items() if source is file and ours in local}
        for name in targets:
            _reject_quantized(file.entries[name].dtype, f"{file.path}: {name}")
        file.read_parts([(name, *local_part(target)) for name, target in targets.items()])
    for conversion in conversions:
        for name, value in conversion.convert(lambda name: file_of[name].read(name)).items():
            _reject_quantized(value.dtype, f"{folder}: {name}")
            target, part = local_part(local[name])
            target.copy_(value[part])


@torch.no_grad()
def merge_adapters(model: LanguageModel, lora_config: LoraConfig, tensors: Mapping[str, Tensor], source: str) -> None:
    """Add low-rank adapters, full tensors by our names, to the weights of a model in place.

    In a sharded model each rank adds to its own part; a pipeline stage may lack layers; adapters that the model has itself stay
    as they are. Raises UserError, beginning with `source` (where they come from), unless each fits a layer of the model.
    """
    local = dict(model.named_parameters())
    shapes = {name: [*each.shape] for name, each in _full_model(model).named_parameters()}
    transposed = model.config.family.transposed
    for layer in dict.fromkeys(name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end)):
        a, b = (tensors.get(f"{layer}{end}") for end in LORA_SUFFIXES)
        if a is None or b is None or a.shape[0] != b.shape[1] or a.shape[0] != lora_config.rank:
            raise UserError(f"{source}: {layer}: not a pair of matrices of rank {lora_config.rank}; copy the folder again")
        sizes = [a.shape[1], b.shape[0]] if transposed else [b.shape[0], a.shape[1]]
        name = f"{layer}.weight"
        if shapes.get(name) != sizes:
            ours = "has none" if name not in shapes else f"has {shapes[name]}"
            raise UserError(f"{source}: adapters for another model: they are for {name} {sizes}, and the model {ours}")
        if name in local:
            target, part = local_part(local[name])
            target += lora_delta(lora_config.scaling, a, b, transposed)[part].to(target.device)


def _full_model(model: Any) -> nn.Module:
    """The full model, for names and shapes, of which `model` may be a pipeline stage."""
    return model if isinstance(model, TransformersModel) else build_model(model.config, "meta")


def _check_converted(folder: Path, expected: dict[str, nn.Parameter], converted: Mapping[str, Tensor]) -> None:
    """Remove the converted tensors from `expected`. Raises UserError where one is not expected, or of another shape."""
    for name, value in converted.items():
        parameter = expected.pop(name, None)
        if parameter is None or parameter.shape != value.shape:
            should = "is not in this model" if parameter is None else f"should be {list(parameter.shape)}"
            raise _mismatch(folder, f"{name} is {list(value.shape)} and {should}")


def _mismatch(folder: Path, difference: str) -> UserError:
    return UserError(
        f"{folder}: its weights do not fit its config.json: {difference}; use the config.json that belongs to these weights"
    )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        if pickled is not None:
            raise UserError(f"{pickled}: pickled weights are not opened; convert the folder to safetensors first")
        raise UserError(
            f"{folder}: has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; give a folder in Hugging Face's layout"
        )
    names = indexed_weight_files(folder)
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{index}: names {name}, which is not in {folder}; copy the missing file")
    return [folder / name for name in names]


def _our_name(stored: str, optional_prefix: str) -> str:
    """GPT-2's first releases leave out the leading `transformer.`; the head of a classifier has another name."""
    if stored == CLASSIFIER_HEAD_WEIGHT:
        return LM_HEAD_WEIGHT
    return stored if stored.startswith((optional_prefix, "lm_head.")) else optional_prefix + stored


def _resolve_tied_head(model: nn.Module, expected: Mapping[str, nn.Parameter], files: StoredFiles) -> None:
    """A tied matrix may be stored under the embedding's name, the head's, or both."""
    if LM_HEAD_WEIGHT in expected or LM_HEAD_WEIGHT not in files:
        return
    head = files.pop(LM_HEAD_WEIGHT)
    tied = next(name for name, parameter in expected.items() if parameter is model.get_parameter(LM_HEAD_WEIGHT))
    files.setdefault(tied, head)


def _reject_differences(folder: Path, expected: Mapping[str, nn.Parameter], files: StoredFiles) -> None:
    if missing := [name for name in expected if name not in files]:
        raise _mismatch(folder, f"missing {name_some(missing, limit=3)}")
    if unexpected := [name for name in files if name not in expected]:
        raise _mismatch(folder, f"unexpected {name_some(unexpected, limit=3)}")
    misshaped = [
        f"{name} is {list(shape)} and should be {list(expected[name].shape)}"
        for name, (file, stored) in files.items()
        if (shape := file.entries[stored].shape) != expected[name].shape
    ]
    if misshaped:
        raise _mismatch(folder, name_some(misshaped, limit=3, separator="; "))


def _reject_quantized(dtype: torch.dtype, where: str) -> None:
    if not dtype.is_floating_point:
        raise UserError(f"{where}: is {dtype}; quantized weights cannot be trained, use the unquantized model")
