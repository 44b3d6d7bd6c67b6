"""First values of the weights.

Every tensor is drawn from a generator of its own, keyed by the seed and the tensor's name. So the values depend on
nothing else: not on the order of construction, the device, the number of ranks, or which other tensors exist.
"""

import hashlib
import math
from collections.abc import Collection
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lmforge.errors import UserError
from lmforge.interop.transformers_model import TransformersModel
from lmforge.interop.transformers_weights import initial_values
from lmforge.model.config import ModelConfig

# The projections that write into the residual stream, in both families.
_RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")


_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
# What low-rank adapters (lora.py) call their tensors.
LORA_SUFFIXES = (".lora_A.weight", ".lora_B.weight")


def initial_value(
    name: str, shape: torch.Size | tuple[int, ...], config: ModelConfig, seed: int, embedding_std: float | None = None
) -> torch.Tensor:
    """The first value of one tensor, fp32 on the CPU.

    Norm weights are one and biases zero; the rest is normal(0, initializer_range), divided by sqrt(2 * layers) for the
    projections that add to the residual stream, so that its variance does not grow with depth (GPT-2, section 2.3).
    `embedding_deviation` is that of the input embedding where it is to differ. Of a low-rank adapter's pair the first is
    uniform in ±1/sqrt(inputs), which is Kaiming's with a slope of sqrt(5), and the second zero: at first they add nothing.
    """
    generator = torch.Generator().manual_seed(_tensor_seed(seed, name))
    if name.endswith((".bias", LORA_SUFFIXES[1])):
        return torch.zeros(shape)
    if name.endswith(LORA_SUFFIXES[0]):
        bound = shape[1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = config.initializer_range
    if name.endswith(_RESIDUAL_PROJECTIONS):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    if embedding_std is not None and name.endswith(_INPUT_EMBEDDINGS):
        deviation = embedding_std
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def _tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, embedding_std: float | None = None) -> None:
    """Give every parameter of a model its first value, in place; of a sharded one (DTensor) each rank keeps its part.

    Nothing is sent between ranks: each draws a whole tensor and drops the rest, one tensor at a time. A wrapped model
    begins as transformers has it begin.
    """
    expected = dict(model.named_parameters())
    if isinstance(model, TransformersModel):
        if embedding_std is not None:
            raise UserError("model.embedding_initializer_range: transformers initialises this model; leave that option out")
        # A tied head is drawn too, and dropped.
        drawn = ((name, value) for name, value in initial_values(model.config, partial(_tensor_seed, seed)) if name in expected)
        init_adapters(model, seed)
    else:
        config: ModelConfig = model.config  # type: ignore[assignment]
        drawn = (
            (name, initial_value(name, parameter.shape, config, seed, embedding_std)) for name, parameter in expected.items()
        )
    for name, value in drawn:
        copy_full_tensor(expected[name], value)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int, new_names: Collection[str] = ()) -> None:
    """As `initialise`, of the low-rank adapters and what else is `new`: for a model whose other weights come from elsewhere."""
    for name, parameter in model.named_parameters():
        if name.endswith(LORA_SUFFIXES) or name in new_names:
            copy_full_tensor(parameter, initial_value(name, parameter.shape, model.config, seed))  # type: ignore[arg-type]


def copy_full_tensor(parameter: nn.Parameter, full_tensor: torch.Tensor) -> None:
    """Give a parameter its whole value, in place and in its own dtype; of a sharded one (DTensor) this rank's part is kept."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        full_tensor = distribute_tensor(full_tensor.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.copy_(full_tensor)
