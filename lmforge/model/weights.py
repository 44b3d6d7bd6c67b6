"""Weights in and out, in Hugging Face's layout: config.json beside model.safetensors, or its shards and their index.

Our tensor names are Hugging Face's, so nothing is converted, but for wrapped models whose files are cut otherwise than
they compute (foreign_weights.py). Reading is strict in both directions and takes, for a sharded model, only this rank's
bytes (safetensors_file.py). Nothing is unpickled. Checkpoints of a run in progress are train/'s.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmforge.data.hub import INDEX, SINGLE
from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.foreign import ForeignModel
from lmforge.model.foreign_weights import Joint, as_computed
from lmforge.model.safetensors_file import SafetensorsFile

Files = dict[str, tuple[SafetensorsFile, str]]  # by our name of a tensor: where it is, and what it is called there
# Constants that older versions of transformers stored among the weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@torch.no_grad()
def load_folder(folder: str | Path, model: nn.Module) -> None:
    """Fill a model's parameters, in place and in their own dtype, from the safetensors of a folder.

    The model must be allocated (not on meta) and may be sharded: of a DTensor each rank reads only its own part, in as few
    and as long reads as there can be, and holds little more than that part. It may lack what other stages of a pipeline
    have: the folder must hold the whole model, and what is here is filled.
    Raises Mistake when a file is missing or damaged, or when names or shapes differ, naming the first few.
    """
    folder = Path(folder)
    here = dict(model.named_parameters())
    whole_model = model if isinstance(model, ForeignModel) else build(model.config, seed=None, device="meta")  # type: ignore[arg-type]
    expected = dict(whole_model.named_parameters())
    opened = [SafetensorsFile(path) for path in _weight_files(folder)]
    places = {name: file for file in opened for name in file.tensors}
    joints: list[Joint] = []
    if isinstance(model, ForeignModel):
        ours, joints = as_computed(model.config, places)
    else:
        ours = {stored: _our_name(stored, expected) for stored in places}
    files = {name: (places[stored], stored) for stored, name in ours.items() if not name.endswith(_CONSTANTS)}
    _settle_tied_head(whole_model, expected, files)
    whole = dict(expected)
    with _reading(places, shapes_only=True) as read:
        for joint in joints:
            _take_out(folder, whole, joint.made(read))
    _refuse_differences(folder, whole, files)
    for file in opened:
        wanted = [(here[name], stored) for name, (place, stored) in files.items() if place is file and name in here]
        for _, stored in wanted:
            _refuse_whole_numbers(file.tensors[stored].dtype, f"{file.path}: {stored}")
        with file.reading():
            file.read_all([(target, stored, part) for each, stored in wanted for target, part in [_own_part(each)]])
    with _reading(places) as read:
        for joint in joints:
            for name, value in joint.made(read).items():
                _refuse_whole_numbers(value.dtype, f"{folder}: {name}")
                target, part = _own_part(here[name])
                if target.numel():
                    target.copy_(value[part])


@contextmanager
def _reading(places: Mapping[str, SafetensorsFile], shapes_only: bool = False) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that gives the whole of a stored tensor; with `shapes_only` on the meta device, without reading it."""
    with ExitStack() as stack:
        if not shapes_only:
            for file in set(places.values()):
                stack.enter_context(file.reading())

        def read(stored: str) -> torch.Tensor:
            tensor = places[stored].tensors[stored]
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta" if shapes_only else "cpu")
            if not shapes_only:
                places[stored].read_into(value, stored, tuple(slice(0, size) for size in tensor.shape))
            return value

        yield read


def _take_out(folder: Path, expected: dict[str, nn.Parameter], made: Mapping[str, torch.Tensor]) -> None:
    """Cross off the tensors that are `made` of several stored ones. Raises Mistake where they are not what is expected."""
    for name, value in made.items():
        wanted = expected.pop(name, None)
        if wanted is None or wanted.shape != value.shape:
            should = "is not in this model" if wanted is None else f"should be {list(wanted.shape)}"
            raise Mistake(
                f"{folder}: its weights do not fit its config.json: {name} is {list(value.shape)} and {should}; "
                "use the config.json that belongs to these weights"
            )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        if pickled is not None:
            raise Mistake(f"{pickled}: pickled weights are not opened; convert the folder to safetensors first")
        raise Mistake(f"{folder}: has neither {SINGLE} nor {INDEX}; give a folder in Hugging Face's layout")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Mistake(f"{index}: is not an index of weights; copy the file again") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise Mistake(f"{index}: names {name}, which is not in {folder}; copy the missing file")
    return [folder / name for name in names]


def _our_name(stored: str, expected: Mapping[str, object]) -> str:
    """GPT-2's first releases name their tensors without the leading `transformer.`."""
    longer = f"transformer.{stored}"
    gpt2 = "transformer.wte.weight" in expected
    return longer if gpt2 and not stored.startswith(("transformer.", "lm_head.")) else stored


def _settle_tied_head(model: nn.Module, expected: Mapping[str, nn.Parameter], files: Files) -> None:
    """A tied matrix may be stored under the embedding's name, the head's, or both."""
    if "lm_head.weight" in expected or "lm_head.weight" not in files:
        return
    head = files.pop("lm_head.weight")
    tied = next(name for name, parameter in expected.items() if parameter is model.get_parameter("lm_head.weight"))
    files.setdefault(tied, head)


def _refuse_differences(folder: Path, expected: Mapping[str, nn.Parameter], files: Files) -> None:
    missing = [name for name in expected if name not in files]
    unexpected = [name for name in files if name not in expected]
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Mistake(
                f"{folder}: its weights do not fit its config.json: {kind} {', '.join(names[:3])}{more}; "
                "use the config.json that belongs to these weights"
            )
    misshaped = [
        f"{name} is {list(shape)} and should be {list(expected[name].shape)}"
        for name, (file, stored) in files.items()
        if (shape := file.tensors[stored].shape) != expected[name].shape
    ]
    if misshaped:
        more = f" and {len(misshaped) - 3} more" if len(misshaped) > 3 else ""
        raise Mistake(
            f"{folder}: its weights do not fit the shape asked for: {'; '.join(misshaped[:3])}{more}; "
            "use the config.json that belongs to these weights"
        )


def _own_part(parameter: nn.Parameter) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and which part of the whole that is."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _refuse_whole_numbers(dtype: torch.dtype, where: str) -> None:
    if not dtype.is_floating_point:
        raise Mistake(f"{where}: is {dtype}; quantized weights cannot be trained, use the unquantized model")
