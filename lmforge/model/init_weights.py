"""First values of the weights.

Every tensor is drawn from a generator of its own, seeded with the run's seed and the tensor's name. So values depend on
nothing else: not on the order of construction, the device, the number of ranks, or which other tensors exist.
"""

import hashlib
import math
from collections.abc import Collection
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lmforge.model.config import ModelConfig

# The projections that write into the residual stream, in both families.
_RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")
_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
# The names of a low-rank adapter's two tensors (lora.py).
LORA_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

Model = TypeVar("Model", bound=nn.Module)


def initial_value(
    name: str, shape: torch.Size | tuple[int, ...], config: ModelConfig, seed: int, embedding_std: float | None = None
) -> Tensor:
    """The first value of one tensor, fp32 on the CPU.

    Norm weights are one and biases zero. The rest is normal(0, initializer_range), divided by sqrt(2 * layers) for the
    projections that add to the residual stream, so that its variance does not grow with depth (GPT-2, section 2.3).
    `embedding_std` replaces initializer_range for the input embedding. Of a low-rank adapter's pair, A is uniform in
    ±1/sqrt(inputs) (Kaiming with a slope of sqrt(5)) and B zero: at first an adapter adds nothing.
    """
    generator = torch.Generator().manual_seed(tensor_seed(seed, name))
    if name.endswith((".bias", LORA_SUFFIXES[1])):
        return torch.zeros(shape)
    if name.endswith(LORA_SUFFIXES[0]):
        bound = shape[1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
        return torch.ones(shape)
    std = config.initializer_range
    if name.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * config.num_hidden_layers)
    if embedding_std is not None and name.endswith(_INPUT_EMBEDDINGS):
        std = embedding_std
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def init_weights(model: Model, seed: int, embedding_std: float | None = None) -> Model:
    """Give every parameter of a model its first value, in place, and return the model.

    Of a sharded parameter (DTensor) each rank keeps its part. Nothing is sent between ranks: each draws the full tensors,
    one at a time, and drops the rest. A wrapped model of transformers is initialised as transformers does it.
    """
    parameters = dict(model.named_parameters())
    for name, value in model.initial_values(seed, embedding_std):  # type: ignore[operator]
        if name in parameters:
            copy_full_tensor(parameters[name], value)
    return model


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int, new_names: Collection[str] = ()) -> None:
    """As `init_weights`, but only the low-rank adapters and `new_names`: for a model whose other weights are loaded."""
    for name, parameter in model.named_parameters():
        if name.endswith(LORA_SUFFIXES) or name in new_names:
            copy_full_tensor(parameter, initial_value(name, parameter.shape, model.config, seed))  # type: ignore[arg-type]


def copy_full_tensor(parameter: nn.Parameter, full: Tensor) -> None:
    """Copy a full tensor into a parameter, in the parameter's dtype; of a sharded one (DTensor) this rank's part."""
    local, part = local_part(parameter)
    if local.numel():
        local.copy_(full[part])


def local_part(parameter: nn.Parameter) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, sharing its memory, and which slices of the full tensor that is."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
