"""First values of the weights.

Each number of a tensor is drawn as a function of the run's seed, the tensor's name and the number's
index in it. So values do not depend on the order of construction, the device, the number of ranks,
or other tensors, and a rank draws only its own part. How they are drawn is in weight_rng.py.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmforge.core.data.order import derive_key
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.quantization.formats import quantized_matrices
from lmforge.core.model.rng.weight_rng import (
    Distribution,
    fill_random,
    standard_normal,
    standard_uniform,
)

# The names of a low-rank adapter's two tensors (lora.py).
LORA_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class InitialValue:
    """The first value of a tensor: loc + scale · numbers of a distribution, or the constant
    `loc`.
    """

    distribution: Distribution | None = None
    loc: float = 0.0
    scale: float = 1.0

    def scaled(self, factor: float, offset: float = 0.0) -> "InitialValue":
        """This value with `factor` times its random numbers, or its constant.

        `offset` is what is added to a constant where it is used.
        """
        if self.distribution is not None:
            return replace(self, scale=factor * self.scale)
        return replace(self, loc=factor * (self.loc + offset) - offset)


@dataclass(frozen=True)
class FlatShard:
    """An FSDP1 rank's part of a parameter with this name and shape: numbers from `start` on of the
    flattened tensor.
    """

    name: str
    shape: torch.Size
    start: int


@dataclass(frozen=True)
class HeldPart:
    """This rank's part of a parameter.

    values: [runs, length], sharing its memory; the numbers of a row are contiguous in the flattened
    full tensor. starts: int64 [runs]: the index of each row's first number in the flattened full
    tensor.
    """

    shape: torch.Size
    values: Tensor
    starts: Tensor

    def fill(self, value: InitialValue | Tensor, key: int) -> None:
        """Set the first value, in the part's own dtype; from a full tensor it copies this rank's
        part.
        """
        if isinstance(value, Tensor):
            for start, row in zip(self.starts.tolist(), self.values, strict=True):
                row.copy_(value.flatten()[start : start + len(row)])
        elif value.distribution is None:
            self.values.fill_(value.loc)
        else:
            fill_random(self.values, self.starts, key, value.distribution, value.loc, value.scale)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What folders and checkpoints hold of a model: its parameters, and its persistent buffers."""
    yield from model.named_parameters()
    yield from stored_buffers(model)


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's persistent buffers: what folders and checkpoints hold of it that is not trained."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def initial_value(
    name: str,
    shape: torch.Size | tuple[int, ...],
    config: ModelConfig,
    embedding_std: float | None = None,
) -> InitialValue | Tensor:
    """The first value of one tensor, of this full shape.

    Norms multiply by one and biases are zero. The rest is normal(0, initializer_range), divided by
    sqrt(residual branches) for the projections that add to the residual stream, so that its
    variance does not grow with depth (GPT-2, section 2.3). `embedding_std` replaces initializer_range. In a
    low-rank adapter's pair, A is uniform in ±1/sqrt(inputs) (Kaiming with a slope of sqrt(5)) and B
    zero: at first an adapter adds nothing.
    """
    if vector := config.vector(name):
        if isinstance(vector.first, tuple):
            return torch.tensor(vector.first)
        if vector.first is None:
            return InitialValue(standard_uniform, scale=shape[-1] ** -0.5)
        return InitialValue(loc=vector.first)
    if name.endswith(("bias", LORA_SUFFIXES[1])):
        return InitialValue(loc=0.0)
    if name.endswith(LORA_SUFFIXES[0]):
        return InitialValue(standard_uniform, scale=shape[-1] ** -0.5)
    if len(shape) == 1:
        return InitialValue(loc=1.0 - config.norm_offset(name))
    std = config.initializer_range if embedding_std is None else embedding_std
    if name.removesuffix(".weight").endswith(config.residual_linears):
        std /= math.sqrt(sum(len(block.branches) for block in config.blocks))
    return InitialValue(standard_normal, scale=std)


@torch.no_grad()
def init_weights(model: Model, seed: int, embedding_std: float | None = None) -> Model:
    """Give every parameter of a model its first value, in place, and return the model.

    Each rank draws its part of a sharded parameter, and nothing is sent between ranks. A wrapped
    model of transformers is initialised as transformers does it.
    """
    parts = _held_parts(model)
    quantized = quantized_matrices(model)
    shapes = {name: quantized.get(name, part).shape for name, part in parts.items()}
    for name, value in model.initial_values(shapes, seed, embedding_std):  # type: ignore[operator]
        key = derive_key(seed, "weights", name)
        # From the whole matrix, so that every rank has the bytes of the same one.
        if name in quantized:
            whole = torch.empty(shapes[name], device=parts[name].values.device)
            HeldPart(
                shapes[name],
                whole.view(1, -1),
                torch.zeros(1, dtype=torch.int64, device=whole.device),
            ).fill(value, key)
            value = quantized[name].quantize(whole)
        parts[name].fill(value, key)
    return model


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int, ends: Collection[str] = LORA_SUFFIXES) -> None:
    """As `init_weights`, but only the tensors whose names end so: for a model whose other weights
    are loaded.
    """
    for name, part in _held_parts(model).items():
        if name.endswith(tuple(ends)):
            config: ModelConfig = model.config  # type: ignore[assignment]
            factor = model.tensor_scale(name, tuple(part.shape)).init  # type: ignore[operator]
            value = initial_value(name, part.shape, config)
            assert isinstance(value, InitialValue), "as of adapters and heads"
            part.fill(value.scaled(factor), derive_key(seed, "weights", name))


def _held_parts(model: nn.Module) -> dict[str, HeldPart]:
    """This rank's parts of the parameters, by name, without those of which it holds nothing."""
    parts: dict[str, HeldPart] = {}
    flat_shards: dict[str, FlatShard] = model.flat_shards  # type: ignore[assignment]
    for name, parameter in named_tensors(model):
        if (flat := flat_shards.get(name)) is not None:
            local = parameter.detach()
            shape = flat.shape
            name = flat.name
            starts = torch.tensor([flat.start])
            length = parameter.numel()
        else:
            (local, part), shape = local_part(parameter), parameter.shape
            starts, length = part_runs(part, shape)
        if local.numel():
            parts[name] = HeldPart(shape, local.view(len(starts), length), starts.to(local.device))
    return parts


def part_runs(part: tuple[slice, ...], shape: torch.Size) -> tuple[Tensor, int]:
    """The contiguous rows of a part of a tensor: where each begins in the flattened tensor, and
    their length.
    """
    # From this dimension on, numbers of the part are contiguous: it has all of each later
    # dimension.
    first = max((dim for dim, each in enumerate(part) if each != slice(0, shape[dim])), default=0)
    starts = torch.zeros(1, dtype=torch.int64)
    length = 1
    for dim, (each, size) in enumerate(zip(part, shape, strict=True)):
        inside = torch.arange(each.start, each.stop if dim < first else each.start + 1)
        starts = (starts.unsqueeze(-1) * size + inside).flatten()
        length *= each.stop - each.start if dim >= first else 1
    return starts, length


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, sharing its memory, and which slices of the full tensor that
    is.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local().detach(), tuple(
        slice(start, start + size) for start, size in zip(offset, shape, strict=True)
    )
