"""Weights in and out, in Hugging Face's layout: config.json beside model.safetensors, or its shards and their index.

Our tensor names are Hugging Face's, so nothing is converted, but for wrapped models whose files are cut otherwise than
they compute (foreign_weights.py). Reading is strict in both directions and takes, for a sharded model, only this rank's
bytes (safetensors_file.py). Nothing is unpickled. Checkpoints of a run in progress are train/'s.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmforge.errors import UserError
from lmforge.hub import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from lmforge.interop.safetensors_file import SafetensorsFile
from lmforge.interop.transformers_model import TransformersModel
from lmforge.interop.transformers_weights import TensorConversion, map_stored_names
from lmforge.model import build_model
from lmforge.model.init_weights import LORA_SUFFIXES
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, lora_delta

StoredFiles = dict[str, tuple[SafetensorsFile, str]]  # by our name of a tensor: where it is, and what it is called there
# Constants that older versions of transformers stored among the weights.
# Our head, and what transformers calls that of a model with labels.
LM_HEAD_WEIGHT, CLASSIFIER_HEAD_WEIGHT = "lm_head.weight", "score.weight"
_CONSTANT_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@torch.no_grad()
def load_folder(folder: str | Path, model: nn.Module, new_names: Collection[str] = ()) -> None:
    """Fill a model's parameters, in place and in their own dtype, from the safetensors of a folder; those that are `new` to
    it, such as another head, stay as they are.

    The model must be allocated (not on meta) and may be sharded: of a DTensor each rank reads only its own part, in as few
    and as long reads as there can be, and holds little more than that part. It may lack what other stages of a pipeline
    have: the folder must hold the whole model, and what is here is filled.
    Raises UserError when a file is missing or damaged, or when names or shapes differ, naming the first few.
    """
    folder = Path(folder)
    here = dict(model.named_parameters())
    whole_model = model if isinstance(model, TransformersModel) else build_model(model.config, seed=None, device="meta")  # type: ignore[arg-type]
    # Low-rank adapters are no part of the folder's model.
    expected = {
        name: each
        for name, each in whole_model.named_parameters()
        if not name.endswith(LORA_SUFFIXES) and name not in new_names
    }
    opened = [SafetensorsFile(path) for path in _weight_files(folder)]
    places = {name: file for file in opened for name in file.entries}
    joints: list[TensorConversion] = []
    if isinstance(model, TransformersModel):
        ours, joints = map_stored_names(model.config, places)
    else:
        ours = {stored: _our_name(stored, expected) for stored in places}
    passed_over = (*_CONSTANT_SUFFIXES, *new_names)
    files = {name: (places[stored], stored) for stored, name in ours.items() if not name.endswith(passed_over)}
    _resolve_tied_head(whole_model, expected, files)
    whole = dict(expected)
    with _tensor_reader(places, shapes_only=True) as read:
        for joint in joints:
            _check_converted(folder, whole, joint.convert(read))
    _reject_differences(folder, whole, files)
    for file in opened:
        wanted = [(here[name], stored) for name, (place, stored) in files.items() if place is file and name in here]
        for _, stored in wanted:
            _reject_quantized(file.entries[stored].dtype, f"{file.path}: {stored}")
        with file.open_for_reading():
            file.read_all([(target, stored, part) for each, stored in wanted for target, part in [local_part(each)]])
    with _tensor_reader(places) as read:
        for joint in joints:
            for name, value in joint.convert(read).items():
                _reject_quantized(value.dtype, f"{folder}: {name}")
                target, part = local_part(here[name])
                if target.numel():
                    target.copy_(value[part])


@torch.no_grad()
def merge_adapters(model: LanguageModel, lora_config: LoraConfig, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Add what low-rank adapters add, whole tensors by our names, to the weights of a model in place.

    The model may be sharded, each rank adds to its own part; it may lack what other stages of a pipeline have; new adapters
    that it has stay as they are. Raises UserError, beginning with `where` they come from, unless each fits a layer of it.
    """
    here = dict(model.named_parameters())
    whole_model = model if isinstance(model, TransformersModel) else build_model(model.config, seed=None, device="meta")
    shapes = {name: [*each.shape] for name, each in whole_model.named_parameters()}
    transposed = model.config.family == "gpt2"  # whose weights lie on their side
    for layer in dict.fromkeys(name.removesuffix(end) for name in tensors for end in LORA_SUFFIXES if name.endswith(end)):
        down, up = (tensors.get(f"{layer}{end}") for end in LORA_SUFFIXES)
        if down is None or up is None or down.shape[0] != up.shape[1] or down.shape[0] != lora_config.rank:
            raise UserError(f"{where}: {layer}: not a pair of matrices of rank {lora_config.rank}; copy the folder again")
        sizes = [down.shape[1], up.shape[0]] if transposed else [up.shape[0], down.shape[1]]
        name = f"{layer}.weight"
        if shapes.get(name) != sizes:
            found = "has none" if name not in shapes else f"has {shapes[name]}"
            raise UserError(f"{where}: adapters for another model: they are for {name} {sizes}, and the model {found}")
        if name in here:
            target, part = local_part(here[name])
            target += lora_delta(lora_config.scaling, down, up, transposed)[part].to(target.device)


@contextmanager
def _tensor_reader(
    file_of: Mapping[str, SafetensorsFile], shapes_only: bool = False
) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that gives the whole of a stored tensor; with `shapes_only` on the meta device, without reading it."""
    with ExitStack() as stack:
        if not shapes_only:
            for file in set(file_of.values()):
                stack.enter_context(file.open_for_reading())

        def read(stored: str) -> torch.Tensor:
            tensor = file_of[stored].entries[stored]
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta" if shapes_only else "cpu")
            if not shapes_only:
                file_of[stored].read_into(value, stored, tuple(slice(0, size) for size in tensor.shape))
            return value

        yield read


def _check_converted(folder: Path, expected: dict[str, nn.Parameter], converted: Mapping[str, torch.Tensor]) -> None:
    """Cross off the tensors that are `made` of several stored ones. Raises UserError where they are not what is expected."""
    for name, value in converted.items():
        wanted = expected.pop(name, None)
        if wanted is None or wanted.shape != value.shape:
            should = "is not in this model" if wanted is None else f"should be {list(wanted.shape)}"
            raise UserError(
                f"{folder}: its weights do not fit its config.json: {name} is {list(value.shape)} and {should}; "
                "use the config.json that belongs to these weights"
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
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UserError(f"{index}: is not an index of weights; copy the file again") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{index}: names {name}, which is not in {folder}; copy the missing file")
    return [folder / name for name in names]


def _our_name(stored: str, expected: Mapping[str, object]) -> str:
    """GPT-2's first releases name their tensors without the leading `transformer.`; classifiers call their head otherwise."""
    if stored == CLASSIFIER_HEAD_WEIGHT:
        return LM_HEAD_WEIGHT
    longer = f"transformer.{stored}"
    gpt2 = "transformer.wte.weight" in expected
    return longer if gpt2 and not stored.startswith(("transformer.", "lm_head.")) else stored


def _resolve_tied_head(model: nn.Module, expected: Mapping[str, nn.Parameter], files: StoredFiles) -> None:
    """A tied matrix may be stored under the embedding's name, the head's, or both."""
    if LM_HEAD_WEIGHT in expected or LM_HEAD_WEIGHT not in files:
        return
    head = files.pop(LM_HEAD_WEIGHT)
    tied = next(name for name, parameter in expected.items() if parameter is model.get_parameter(LM_HEAD_WEIGHT))
    files.setdefault(tied, head)


def _reject_differences(folder: Path, expected: Mapping[str, nn.Parameter], files: StoredFiles) -> None:
    missing = [name for name in expected if name not in files]
    unexpected = [name for name in files if name not in expected]
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{folder}: its weights do not fit its config.json: {kind} {', '.join(names[:3])}{more}; "
                "use the config.json that belongs to these weights"
            )
    misshaped = [
        f"{name} is {list(shape)} and should be {list(expected[name].shape)}"
        for name, (file, stored) in files.items()
        if (shape := file.entries[stored].shape) != expected[name].shape
    ]
    if misshaped:
        more = f" and {len(misshaped) - 3} more" if len(misshaped) > 3 else ""
        raise UserError(
            f"{folder}: its weights do not fit the shape asked for: {'; '.join(misshaped[:3])}{more}; "
            "use the config.json that belongs to these weights"
        )


def local_part(parameter: nn.Parameter) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and which part of the whole that is."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _reject_quantized(dtype: torch.dtype, where: str) -> None:
    if not dtype.is_floating_point:
        raise UserError(f"{where}: is {dtype}; quantized weights cannot be trained, use the unquantized model")
