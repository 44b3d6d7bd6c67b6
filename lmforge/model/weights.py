"""Weights in and out, in Hugging Face's layout: config.json beside model.safetensors, or its shards and their index.

Our tensor names are Hugging Face's, so nothing is converted, but for wrapped models whose files are cut otherwise than
they compute (foreign_weights.py). Reading is strict in both directions and takes, for a sharded model, only this rank's
bytes. Nothing is unpickled. Checkpoints of a run in progress are train/'s.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmforge.errors import Mistake
from lmforge.model import build
from lmforge.model.foreign import ForeignModel
from lmforge.model.foreign_weights import Joint, as_computed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Constants that older versions of transformers stored among the weights.
_CONSTANTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@torch.no_grad()
def load_folder(folder: str | Path, model: nn.Module) -> None:
    """Fill a model's parameters, in place and in their own dtype, from the safetensors of a folder.

    The model must be allocated (not on meta) and may be sharded: of a DTensor each rank reads only its own part. It may
    lack what other stages of a pipeline have: the folder must hold the whole model, and what is here is filled.
    Raises Mistake when a file is missing or damaged, or when names or shapes differ, naming the first few.
    """
    folder = Path(folder)
    here = dict(model.named_parameters())
    whole_model = model if isinstance(model, ForeignModel) else build(model.config, seed=None, device="meta")  # type: ignore[arg-type]
    expected = dict(whole_model.named_parameters())
    places: dict[str, Path] = {}
    for path in _weight_files(folder):
        with _opened(path) as file:
            places |= dict.fromkeys(file.keys(), path)
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
    by_path: dict[Path, list[tuple[str, str]]] = {}
    for name, (path, stored) in files.items():
        by_path.setdefault(path, []).append((name, stored))
    for path, names in by_path.items():
        with _opened(path) as file:
            for name, stored in names:
                if name in here:
                    _fill(here[name], file.get_slice(stored), f"{path}: {stored}")
    with _reading(places) as read:
        for joint in joints:
            for name, value in joint.made(read).items():
                _fill(here[name], value, f"{folder}: {name}")


@contextmanager
def _reading(places: Mapping[str, Path], shapes_only: bool = False) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that gives the whole of a stored tensor; with `shapes_only` on the meta device, without reading it."""
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in set(places.values())}

        def read(stored: str) -> torch.Tensor:
            file = files[places[stored]]
            shape = file.get_slice(stored).get_shape()
            return torch.empty(shape, device="meta") if shapes_only else file.get_tensor(stored)

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


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise Mistake(f"{path}: damaged or not a safetensors file ({error}); copy it again") from None


def _our_name(stored: str, expected: Mapping[str, object]) -> str:
    """GPT-2's first releases name their tensors without the leading `transformer.`."""
    longer = f"transformer.{stored}"
    gpt2 = "transformer.wte.weight" in expected
    return longer if gpt2 and not stored.startswith(("transformer.", "lm_head.")) else stored


def _settle_tied_head(model: nn.Module, expected: Mapping[str, nn.Parameter], files: dict[str, tuple[Path, str]]) -> None:
    """A tied matrix may be stored under the embedding's name, the head's, or both."""
    if "lm_head.weight" in expected or "lm_head.weight" not in files:
        return
    head = files.pop("lm_head.weight")
    tied = next(name for name, parameter in expected.items() if parameter is model.get_parameter("lm_head.weight"))
    files.setdefault(tied, head)


def _refuse_differences(folder: Path, expected: Mapping[str, nn.Parameter], files: Mapping[str, tuple[Path, str]]) -> None:
    missing = [name for name in expected if name not in files]
    unexpected = [name for name in files if name not in expected]
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise Mistake(
                f"{folder}: its weights do not fit its config.json: {kind} {', '.join(names[:3])}{more}; "
                "use the config.json that belongs to these weights"
            )
    misshaped = []
    for path in sorted({path for path, _ in files.values()}):
        with _opened(path) as file:
            for name, (place, stored) in files.items():
                if place == path and (shape := tuple(file.get_slice(stored).get_shape())) != expected[name].shape:
                    misshaped.append(f"{name} is {list(shape)} and should be {list(expected[name].shape)}")
    if misshaped:
        more = f" and {len(misshaped) - 3} more" if len(misshaped) > 3 else ""
        raise Mistake(
            f"{folder}: its weights do not fit the shape asked for: {'; '.join(misshaped[:3])}{more}; "
            "use the config.json that belongs to these weights"
        )


def _fill(parameter: nn.Parameter, stored: Any, where: str) -> None:
    target: torch.Tensor = parameter
    part: tuple[slice, ...] = tuple(slice(0, size) for size in parameter.shape)
    if isinstance(parameter, DTensor):
        target = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    if target.numel():
        value = stored[part]
        if not value.is_floating_point():
            raise Mistake(f"{where}: is {value.dtype}; quantized weights cannot be trained, use the unquantized model")
        target.copy_(value)
