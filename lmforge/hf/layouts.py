"""The checkpoints of other trainers, whose stored tensors make up ours as a plugin describes.

A plugin registers a `checkpoint_layout` (docs/extending.md); examples/checkpoint_layouts/ has those
of nanoGPT, torchtitan and fms-fsdp. Here are what they have in common: wrappers of names, the
choice of a layout, and the check of what they describe.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.core import registry
from lmforge.core.errors import UserError, prefix_errors
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.registry import Entry
from lmforge.hf.torch_checkpoints import TensorSource

# Keys under which trainers store the model in a checkpoint, and prefixes that wrappers add to its
# names.
_PREFIXES = ("", "model.", "model_state.", "state_dict.", "module.")
_WRAPPER_NAMES = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
# Stored but not learned: causal masks and rotary tables.
_NOT_LEARNED = re.compile(r"(\.attn\.bias|freqs_cis|rot_emb\..*|rope\.\w+|rotary_emb\.\w+)$")
_EXAMPLE = "--plugins examples/checkpoint_layouts/nanogpt.py"


@dataclass(frozen=True)
class LayoutHints:
    """Values that a checkpoint lacks and the user must give; None where not given."""

    num_attention_heads: int | None = None
    rope_theta: float | None = None
    rope_scaling: Any = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    hidden_act: str = "gelu"


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """Another trainer's checkpoint as a model of ours.

    tensors: on the meta device. read: returns the value of one.
    """

    layout: str
    config: ModelConfig
    tensors: dict[str, Tensor]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredSlice:
    """The rows of a stored tensor that are one of ours, transposed if need be.

    With `num_heads`, the rows of a query or key matrix of so many heads that rotates neighbouring
    pairs of channels, as Meta's code does: ours and Hugging Face's pair a channel of the first half
    with one of the second, so they are reordered.
    """

    stored_name: str
    rows: slice
    num_heads: int = 0
    transposed: bool = False

    def extract(self, full: Tensor) -> Tensor:
        value = full[self.rows]
        if self.num_heads:
            value = value.unflatten(0, (self.num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return value.t() if self.transposed else value


# The part of a stored tensor that each of ours is, by our names; None is a bias of zeros, which is
# not stored.
Parts = dict[str, StoredSlice | None]


def find_layout(path: Path, checkpoint: TensorSource, layout: str) -> Entry:
    """The registered layout of this name. Raises UserError.

    With "auto" it is the one whose tensor names the checkpoint has.
    """
    source = _without_wrappers(checkpoint)
    known = registry.entries("checkpoint_layout")
    if not known:
        raise UserError(
            f"{path}: no layout of another trainer is known; name a plugin that registers it, such"
            f" as {_EXAMPLE}"
        )
    if layout == "auto":
        found = [entry for entry in known if entry.facts["marker"] in source.tensors]
        if not found:
            some = ", ".join(sorted(source.tensors)[:3]) or "no tensors"
            names = ", ".join(entry.name for entry in known)
            raise UserError(f"{path}: not of a known layout ({names}); it has {some}")
        return found[0]
    entry = registry.get("checkpoint_layout", layout)
    marker = entry.facts["marker"]
    if marker not in source.tensors:
        close = get_close_matches(marker, source.tensors, n=1)
        but = f", but {close[0]}" if close else ""
        raise UserError(f"{path}: not of layout {layout}: has no {marker}{but}")
    return entry


def convert_checkpoint(
    path: Path, checkpoint: TensorSource, layout: Entry, hints: LayoutHints
) -> ConvertedCheckpoint:
    """Another trainer's checkpoint as a model of ours.

    Raises UserError where it is not of the layout, or a hint is wrong.
    """
    source = _without_wrappers(checkpoint)
    config: ModelConfig
    parts: Parts
    with prefix_errors(str(path)):
        config, parts = layout.build(source, hints)
    tensors = _check_tensors(path, config, parts, source)

    def read(name: str) -> Tensor:
        part = parts[name]
        if part is None:
            return torch.zeros_like(tensors[name], device="cpu")
        return part.extract(source.read(part.stored_name))

    return ConvertedCheckpoint(layout.name, config, tensors, read)


def _without_wrappers(checkpoint: TensorSource) -> TensorSource:
    """The tensors of the model, by their names in the model."""
    for root in _PREFIXES:
        names = {}
        for name in checkpoint.tensors:
            short = _WRAPPER_NAMES.sub("", name)
            if short.startswith(root):
                names[short.removeprefix(root).removeprefix("base_model.")] = name
        if any(entry.facts["marker"] in names for entry in registry.entries("checkpoint_layout")):
            break
    else:
        names = {name: name for name in checkpoint.tensors}
    # The optimizer's tensors may lie beside the model's.
    ignored = re.compile(f"^optimizer|{_NOT_LEARNED.pattern}")
    tensors = {
        short: checkpoint.tensors[name]
        for short, name in names.items()
        if not ignored.search(short)
    }
    return TensorSource(
        tensors, lambda short: checkpoint.read(names[short]), checkpoint.non_tensors
    )


def count_layers(source: TensorSource, block: str) -> int:
    """The number of blocks, by the numbers that the pattern `block` finds in names.

    The numbers are at the beginning of the names.
    """
    matches = [re.match(block, name) for name in source.tensors]
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _check_tensors(
    path: Path, config: ModelConfig, parts: Parts, source: TensorSource
) -> dict[str, Tensor]:
    """The model's tensors on the meta device.

    Raises UserError where one is missing, or of another shape.
    """
    expected = dict(build_model(config, "meta").named_parameters())
    dtype = next(iter(source.tensors.values())).dtype
    tensors = {}
    for name, parameter in expected.items():
        if name not in parts:
            raise UserError(
                f"{path}: has nothing that could be {name}; it is incomplete, or of another layout"
            )
        part = parts[name]
        if part is None:
            tensor = parameter.to(dtype)
        else:
            tensor = part.extract(source.tensors[part.stored_name])
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{path}: {name} would be {list(tensor.shape)} and should be"
                f" {list(parameter.shape)}"
            )
        tensors[name] = tensor
    extra = sorted(parts.keys() - expected.keys())
    if extra:
        raise UserError(
            f"{path}: holds {extra[0]}, which is not part of such a model; it cannot be imported"
        )
    return tensors
