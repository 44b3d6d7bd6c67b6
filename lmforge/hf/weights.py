"""Reads the weights of a folder in Hugging Face's layout into a model.

The folder has model.safetensors, or its shards and their index. Our tensor names are Hugging
Face's, so nothing is converted, except for wrapped models whose stored tensors are in other pieces
than the computed ones (transformers_causal_lm.py). Missing and unexpected tensors are refused. For
a sharded model only this rank's bytes are read (safetensors_file.py). Nothing is unpickled. Writing
is in export.py, our checkpoints in core/checkpoint/.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.errors import UserError, format_count, name_some
from lmforge.core.model.config import ModelConfig, base_model_type
from lmforge.core.model.config_json import (
    fp8_block,
    is_mxfp4_folder,
    is_nf4_folder,
    is_supported_family,
    read_config_json,
)
from lmforge.core.model.family import OUR_PREFIX, Family, load_family
from lmforge.core.model.init_weights import LORA_SUFFIXES, local_part, named_tensors
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig, adapted_name
from lmforge.core.model.quantization.formats import quantized_matrices
from lmforge.core.model.text_tower import TOWER_OF, has_tower_names, tower_tensor
from lmforge.hf.hub import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, indexed_weight_files
from lmforge.hf.merge_adapters import LM_HEAD_WEIGHT, copy_part, full_model_of
from lmforge.hf.quantized.bitsandbytes_folder import StoredMatrix, stored_matrices
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.safetensors_file import SafetensorsFile
from lmforge.hf.stored_experts import pieces, stored_name
from lmforge.hf.transformers_causal_lm import TensorConversion, map_stored_names
from lmforge.hf.transformers_model import TransformersModel
from lmforge.hf.turned_experts import TurnedStack, turned_stacks

SCALE_SUFFIX = "_scale_inv"  # of the scales of a tensor in float8, beside its name
# Our name of a tensor → its file, and its name there.
StoredFiles = dict[str, tuple[SafetensorsFile, str]]
CLASSIFIER_HEAD_WEIGHT = "score.weight"  # of a classifier of transformers
LM_HEAD_BIAS = "lm_head.bias"
# Which field of config.json says that there are tensors of these names.
_FLAGS = {
    LM_HEAD_WEIGHT: "tie_word_embeddings",
    **{f".self_attn.{name}_proj.bias": "attention_bias" for name in "qkvo"},
    **{f".mlp.{name}_proj.bias": "mlp_bias" for name in ("gate", "up", "down")},
}
# Constants that older versions of transformers stored among the weights.
_CONSTANT_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@torch.no_grad()
def load_folder(folder: str | Path, model: nn.Module, new_names: Collection[str] = ()) -> None:
    """Fill a model's parameters, in place and in their own dtype, from a folder.

    Adapters and `new_names` (such as a new head) are not in the folder and stay as they are. The
    model must be allocated (not on meta) and may be sharded: of a DTensor each rank reads only its
    own part, in few long reads, and holds little more than that. Where its vocabulary is not that
    of the folder's config.json, rows are left out, or further ones become the mean of those there;
    where only the folder ties embedding and head, both begin as its one matrix. A pipeline stage
    may lack parameters: the folder must hold the full model, and the local part is filled. Matrices
    that are quantized (lora.base_dtype) are read whole on each rank, one after another, or taken as
    a folder in NF4 has them. What `describe_folder` says is done. Raises UserError where a file is
    missing or damaged, or where names or shapes differ, naming the first few.
    """
    folder = Path(folder)
    local = dict(named_tensors(model))
    full_model = full_model_of(model)
    absent = (*LORA_SUFFIXES, *new_names)
    # A wrapped model's own.
    config = full_model.config
    file_of = open_weights(folder)
    opened = [*dict.fromkeys(file_of.values())]
    conversions: list[TensorConversion] = []
    content = read_config_json(folder / "config.json")
    if TOWER_OF in content or has_tower_names(file_of):
        our_names = {stored: ours for stored in file_of if (ours := tower_tensor(stored))}
    elif isinstance(model, TransformersModel):
        our_names, conversions = map_stored_names(model.config.config_dict, file_of)
    else:
        our_names = {stored: _our_name(stored, config.family) for stored in file_of}
    turned: dict[str, TurnedStack | None] = {}
    if config.family.interleaved_experts and not isinstance(model, TransformersModel):
        turned = turned_stacks(file_of)
    stacks = {stored: each for stored, each in turned.items() if each is not None}
    our_names |= {stored: each.name for stored, each in stacks.items()}
    expected = dict[str, Tensor]()
    matrices = quantized_matrices(full_model)
    # Some folders have experts stacked as the model has them.
    whole = frozenset(our_names.values())
    rows_of = {
        ours: file_of[stored].entries[stored].shape[0]
        for stored, ours in our_names.items()
        if file_of[stored].entries[stored].shape
    }
    for name, each in named_tensors(full_model):
        if name in matrices:
            each = torch.empty(matrices[name].shape, device="meta")
        if not name.endswith(absent):
            expected |= _stored_parts(name, each, config, whole, rows_of)
    ignored = (*_CONSTANT_SUFFIXES, *new_names)
    stored = {
        ours: (file_of[name], name)
        for name, ours in our_names.items()
        if not ours.endswith(ignored)
    }
    nf4: dict[str, StoredMatrix] = {}
    beside: Collection[str] = ()
    if is_nf4_folder(content):
        if config.family.transposed:
            raise UserError(
                f"{folder}: quantization_config: not of {config.model_type}, whose matrices are"
                " transposed"
            )
        nf4, beside = stored_matrices(file_of)
    unread = tuple(f"{model.blocks_name}.{layer}." for layer in _unread_layers(content))
    block = fp8_block(content)
    scales = {name for name in file_of if block and name.endswith(SCALE_SUFFIX)}
    stored = {
        ours: (file, name)
        for ours, (file, name) in stored.items()
        if not ours.startswith((*unread, *config.family.unread_names))
        and name not in scales
        and name not in beside
        and turned.get(name, True)
    }
    embedding = f"{model.embedding_names[0]}.weight"  # type: ignore[index]
    ends = {embedding, LM_HEAD_WEIGHT}
    if ends <= expected.keys() and not ends <= stored.keys():
        stated = resolve_model_config(folder, {}, implementation=config.implementation)
        if stated.tie_word_embeddings:
            for name, other in ((LM_HEAD_WEIGHT, embedding), (embedding, LM_HEAD_WEIGHT)):
                if other in stored:
                    stored[name] = stored[other]
    tied, head = _resolve_tied_head(full_model, expected, stored)
    for conversion in conversions:
        converted = conversion.convert(lambda name: file_of[name].entries[name].meta)
        _check_converted(folder, expected, converted)
    shapes = {ours: file.entries[name].shape for ours, (file, name) in stored.items()}
    in_other_order: dict[str, StoredMatrix | TurnedStack] = {**nf4, **stacks}
    shapes |= {
        ours: in_other_order[name].shape
        for ours, (_, name) in stored.items()
        if name in in_other_order
    }
    rows = _rows_to_resize(folder, model)
    _reject_differences(folder, expected, shapes, rows)
    # As they are stored.
    resized = {name for ours, (_, name) in stored.items() if ours in rows} | {*rows}

    def read(parts: dict[str, tuple[Tensor, tuple[slice, ...]]]) -> None:
        for file in opened:
            targets = [
                (name, parts[ours])
                for ours, (source, name) in stored.items()
                if source is file and ours in parts
            ]
            for name, (target, part) in targets:
                if name in nf4:
                    target.copy_(nf4[name].dequantize()[part])
                elif name in stacks:
                    if not stacks[name].is_mxfp4:
                        _reject_quantized(file.entries[name].dtype, f"{file.path}: {name}")
                    stacks[name].read(target, part)
            targets = [each for each in targets if each[0] not in in_other_order]
            for name, _ in targets:
                where = f"{file.path}: {name}"
                _reject_quantized(file.entries[name].dtype, where, has_scales=block is not None)
            _read_parts(file, [(name, *part) for name, part in targets], resized)
            if block is None:
                continue
            for name, (target, part) in targets:
                scale = f"{name}{SCALE_SUFFIX}"
                if scale in scales:
                    _dequantize(folder, target, part, scale, file_of[scale].read(scale), block)
                elif file.entries[name].dtype == torch.float8_e4m3fn:
                    raise _mismatch(folder, f"missing {scale}, against its quantization_config")

    quantized = {
        name: matrix for name, matrix in quantized_matrices(model).items() if name in local
    }
    plain = {name: each for name, each in local.items() if name not in quantized}
    read(_local_parts(plain, full_model, whole, rows_of))
    for name, matrix in quantized.items():
        as_stored = nf4.get(stored[name][1]) if name in stored else None
        if as_stored is not None and as_stored.stored == matrix.stored:
            copy_part(local[name], as_stored.read())
            continue
        matrix_values = torch.empty(matrix.shape, device=local[name].device)
        read(_local_parts({name: matrix_values}, full_model, whole, rows_of))
        copy_part(local[name], matrix.quantize(matrix_values))
    if head is not None and tied in local:
        target, part = local_part(local[tied])
        again = torch.empty_like(target)
        _read_parts(head[0], [(head[1], again, part)], resized)
        if not torch.equal(again, target):
            raise _mismatch(folder, f"it says tie_word_embeddings, and {head[1]} is not {tied}")
    for conversion in conversions:
        for name, value in conversion.convert(lambda name: file_of[name].read(name)).items():
            _reject_quantized(value.dtype, f"{folder}: {name}")
            if name in quantized:
                value = quantized[name].quantize(value)
            copy_part(local[name], value)


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that are opened."""
    return (folder / SAFE_WEIGHTS_NAME).is_file() or (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()


def describe_folder(folder: Path) -> list[str]:
    """Notes on what is done with the weights of a Hugging Face folder besides reading them."""
    content = read_config_json(folder / "config.json")
    names = [*open_weights(folder)]
    layers = [
        str(each)
        for each in _unread_layers(content)
        if any(f".layers.{each}." in name for name in names)
    ]
    notes = []
    if TOWER_OF in content or has_tower_names(names):
        others = sum(tower_tensor(name) is None for name in names)
        kind = content.get(TOWER_OF, "multimodal")
        notes.append(
            f"the language model of a {kind} folder; its {others} other tensors are not trained"
        )
    elif is_supported_family(content):
        unread = load_family(base_model_type(str(content["model_type"]))).unread_names
        if count := sum(name.startswith(unread) for name in names):
            of_further = format_count(count, "tensor")
            notes.append(f"without {of_further} for the prediction of further tokens")
    if fp8_block(content):
        notes.append("dequantized from float8")
    elif is_mxfp4_folder(content):
        notes.append("dequantized from MXFP4")
    elif is_nf4_folder(content):
        notes.append("stored in NF4 by bitsandbytes")
    if layers:
        notes.append(f"without layer {', '.join(layers)}, which predicts further tokens")
    return notes


def _unread_layers(content: dict[str, Any]) -> range:
    """The layers after the last one that a folder may have and nothing reads.

    See family.Family.unread_layers.
    """
    if not is_supported_family(content):
        return range(0)
    field, default = load_family(base_model_type(str(content["model_type"]))).unread_layers
    layers = content.get("num_hidden_layers")
    count = content.get(field, default)
    if isinstance(layers, int) and isinstance(count, int):
        return range(layers, layers + count)
    return range(0)


def _dequantize(
    folder: Path,
    target: Tensor,
    part: tuple[slice, ...],
    name: str,
    scale: Tensor,
    block: tuple[int, int],
) -> None:
    """Multiply a `part` of a matrix, or of a stack of them, by the `scale` of each block of rows and
    columns, in place.
    """
    blocks = [
        torch.arange(cut.start, cut.stop) // size
        for cut, size in zip(part[-2:], block, strict=True)
    ]
    fits = scale.ndim == len(part) and all(
        not len(each) or each[-1] < size
        for each, size in zip(blocks, scale.shape[-2:], strict=True)
    )
    own = scale[part[:-2]] if fits else scale
    if not fits or own.shape[:-2] != target.shape[:-2]:
        raise _mismatch(folder, f"{name} is {list(scale.shape)}, against its quantization_config")
    rows, columns = blocks
    target.copy_(target.float() * own.float()[..., rows, :][..., columns].to(target.device))


def _stored_parts(
    name: str,
    tensor: Tensor,
    config: ModelConfig,
    whole: Collection[str],
    rows_of: Mapping[str, int],
) -> dict[str, Tensor]:
    """What is on disk of a tensor of the model, by its names there: the pieces of one that is not
    among those that are stored `whole`, else all of it; `rows_of` as of `pieces`.
    """
    if name in whole:
        return {name: tensor}
    stack = {piece.name: piece.cut(tensor) for piece in pieces(name, tensor.shape, config, rows_of)}
    return stack or {stored_name(name, config): tensor}


def _local_parts(
    local: Mapping[str, Tensor],
    full_model: Any,
    whole: Collection[str],
    rows_of: Mapping[str, int],
) -> dict[str, tuple[Tensor, tuple[slice, ...]]]:
    """The parts to read, by names on disk.

    Each is a tensor of this rank, and the part of the one on disk that belongs into it. What is
    stored `whole` is not read in pieces; `rows_of` as of `pieces`.
    """
    parts = {}
    for name, parameter in local.items():
        target, part = local_part(parameter)
        stack = (
            [] if name in whole else [*pieces(name, parameter.shape, full_model.config, rows_of)]
        )
        if not stack:
            stored = name if name in whole else stored_name(name, full_model.config)
            parts[stored] = target, part
        for piece in stack:
            cut = piece.cut_part(target, part)
            if cut is not None:
                parts[piece.name] = cut
    return parts


def _rows_to_resize(folder: Path, model: Any) -> dict[str, int]:
    """The rows in a folder of the parameters that have one for each token, by name.

    There are none where the model has as many.
    """
    rows = read_config_json(folder / "config.json").get("vocab_size")
    if not isinstance(rows, int) or rows == model.config.vocab_size:
        return {}
    head = () if model.config.reward else (LM_HEAD_WEIGHT, LM_HEAD_BIAS)
    return dict.fromkeys((f"{model.embedding_names[0]}.weight", *head), rows)


def _read_parts(
    file: SafetensorsFile,
    requests: list[tuple[str, Tensor, tuple[slice, ...]]],
    resized: Collection[str],
) -> None:
    """Read parts as `read_parts` does.

    Those that are `resized` get the mean of their rows as the ones that they lack.
    """
    file.read_parts([each for each in requests if each[0] not in resized])
    for name, target, part in requests:
        if name in resized:
            wanted, *columns = part
            value = file.read(name)
            kept = value[(slice(wanted.start, wanted.stop), *columns)]
            target[: len(kept)] = kept
            target[len(kept) :] = value.mean(0, dtype=torch.float32)[tuple(columns)]


@torch.no_grad()
def continue_adapters(
    model: LanguageModel, lora_config: LoraConfig, tensors: Mapping[str, Tensor], source: str
) -> dict[str, Tensor]:
    """Fill a model's own adapters, beside its quantized matrices, with adapters of these.

    So nothing is rounded with them. Returns the other tensors, for `merge_adapters`: without
    quantized matrices, all. Arguments and errors are those of `merge_adapters`. Raises UserError
    too where the model's adapters are others.
    """
    own = model.lora_config
    full_model = full_model_of(model)
    if own is None or own.stored is None:
        return dict(tensors)
    if full_model is not model:
        add_lora(full_model, own)
    matrices = quantized_matrices(full_model)
    shapes = {name: [*each.shape] for name, each in full_model.named_parameters()}
    local = dict(model.named_parameters())
    left = {}
    for name, value in tensors.items():
        layer = next((name.removesuffix(end) for end in LORA_SUFFIXES if name.endswith(end)), None)
        matrix = name if layer is None else adapted_name(layer)
        if matrix not in matrices:
            left[name] = value
            continue
        stored = f"lora.base_dtype = {own.base_dtype}: {source}"
        if layer is None:
            raise UserError(
                f"{stored} replaces {name}, which would be rounded; merge it first"
                " (lmforge.save_model)"
            )
        if name not in shapes:
            raise UserError(
                f"{stored} has adapters of {matrix}; add it to lora.target_modules or"
                " lora.target_parameters"
            )
        if shapes[name] != [*value.shape]:
            raise UserError(
                f"{stored} has {name} as {[*value.shape]} and the run {shapes[name]}; give"
                " lora.rank its rank"
            )
        if name in local:
            if name.endswith(LORA_SUFFIXES[1]):
                value = value * (lora_config.scaling / own.scaling)
            copy_part(local[name], value)
    return left


def _check_converted(
    folder: Path, expected: dict[str, Tensor], converted: Mapping[str, Tensor]
) -> None:
    """Remove the converted tensors from `expected`.

    Raises UserError where one is not expected, or of another shape.
    """
    for name, value in converted.items():
        parameter = expected.pop(name, None)
        if parameter is None or parameter.shape != value.shape:
            should = "is not in this model"
            if parameter is not None:
                should = f"should be {list(parameter.shape)}"
            raise _mismatch(folder, f"{name} is {list(value.shape)} and {should}")


def _mismatch(folder: Path, difference: str) -> UserError:
    return UserError(
        f"{folder / 'config.json'}: does not fit the weights: {difference}; use the config.json"
        " that belongs to them"
    )


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor of a folder. Raises UserError where one is missing or damaged."""
    opened = [SafetensorsFile(path) for path in _weight_files(folder)]
    return {name: file for file in opened for name in file.entries}


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return [folder / SAFE_WEIGHTS_NAME]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        if pickled is not None:
            raise UserError(
                f"{pickled}: pickled weights are not opened; convert the folder to safetensors"
                " first"
            )
        raise UserError(
            f"{folder}: has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; give a"
            " folder in Hugging Face's layout"
        )
    names = indexed_weight_files(folder)
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(
                f"{index}: names {name}, which is not in {folder}; copy the missing file"
            )
    return [folder / name for name in names]


def _our_name(stored: str, family: Family) -> str:
    """Our name of a stored tensor, of whose experts each may have one.

    GPT-2's first releases leave out the leading `transformer.`; the head of a classifier has
    another name, and some families have tensors with several.
    """
    if stored == CLASSIFIER_HEAD_WEIGHT:
        return LM_HEAD_WEIGHT
    for ours, other in family.other_names.items():
        if stored.endswith(f".{other}"):
            return stored.removesuffix(other) + ours
    if stored.startswith(family.stored_prefix):
        return OUR_PREFIX + stored.removeprefix(family.stored_prefix)
    if stored.startswith((family.optional_prefix, "lm_head.")):
        return stored
    return family.optional_prefix + stored


def _resolve_tied_head(
    model: nn.Module, expected: Mapping[str, Tensor], files: StoredFiles
) -> tuple[str, tuple[SafetensorsFile, str] | None]:
    """The name of a tied matrix, and its second copy.

    It may be stored under the embedding's name, the head's, or both: only then there is a copy.
    """
    if LM_HEAD_WEIGHT in expected or LM_HEAD_WEIGHT not in files:
        return "", None
    matrix = model.get_parameter(LM_HEAD_WEIGHT)
    tied = next(name for name, parameter in expected.items() if parameter is matrix)
    head = files.pop(LM_HEAD_WEIGHT)
    if tied in files:
        return tied, head
    files[tied] = head
    return tied, None


def _reject_differences(
    folder: Path,
    expected: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    rows: Mapping[str, int],
) -> None:
    """Raise UserError where the folder's tensors are not the expected ones.

    shapes: of the tensors in the folder, by our names.
    """
    for kind, names in (
        ("missing", [name for name in expected if name not in shapes]),
        ("unexpected", [name for name in shapes if name not in expected]),
    ):
        if names:
            difference = f"{kind} {name_some(names, limit=3)}"
            for end, flag in _FLAGS.items():
                if names[0].endswith(end):
                    difference += f", against its {flag}"
                    break
            raise _mismatch(folder, difference)
    misshaped = [
        f"{name} is {list(shape)} and should be {list(expected[name].shape)}"
        for name, shape in shapes.items()
        if [*shape] != [*expected[name].shape] and [rows.get(name), *shape[1:]] != [*shape]
    ]
    if misshaped:
        raise _mismatch(folder, name_some(misshaped, limit=3, separator="; "))


def _reject_quantized(dtype: torch.dtype, where: str, has_scales: bool = False) -> None:
    """Raise UserError for integers, and for numbers of 8 bits that have no scales."""
    if not dtype.is_floating_point or (dtype.itemsize == 1 and not has_scales):
        raise UserError(
            f"{where}: is {dtype}; quantized weights cannot be trained, use the unquantized model"
        )
