"""Which kernel computes attention over full sequences, and why.

It depends on the device, the dtype and the model.

Variable-length flash attention computes only the scores within documents, and needs no mask.
FlexAttention takes any mask and any dtype, and differentiates the log-sum-exp of scores, which
attention with sinks needs. Dense SDPA is used on CPUs, where FlexAttention has no
backward pass, and for heads too small for the others.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import attention as torch_attention

VARLEN = "varlen"
FLEX = "flex"
DENSE = "dense"
# The smallest head_dim that FlexAttention takes; flash attention takes multiples of 8 up to 256.
FLEX_MIN_HEAD_DIM = 16
FLASH_HEAD_DIM_MULTIPLE = 8
FLASH_MAX_HEAD_DIM = 256
# Maximum keys per query for which compiled blocks on a CPU store all attention weights in bf16.
MAX_STORED_KEYS = 1024
# The arguments that torch's function must have, and one that grouped heads need where it is known:
# they are from different versions, and earlier ones group heads unasked.
_ARGUMENTS = {"scale", "window_size"}
_FOR_GROUPS = "enable_gqa"
VARLEN_OPTIONS: dict[str, Any] = {}
# By the first number of a GPU's compute capability: flash attention's own packages have faster
# kernels than torch.
_FLASH_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}


@cache
def load_varlen_attn() -> Any:
    """torch's varlen_attn, to be called with VARLEN_OPTIONS; None where it is missing or cannot do
    all that is needed.

    It is imported on demand: it imports torch._dynamo, which takes over a second.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters.keys()
    VARLEN_OPTIONS.update(dict.fromkeys(known & {_FOR_GROUPS}, True))
    return varlen_attn if known >= _ARGUMENTS else None


@dataclass(frozen=True)
class AttentionBackend:
    """`name` is VARLEN, FLEX or DENSE; `reason` says why an earlier one of these was not chosen,
    and is empty for VARLEN.
    """

    name: str
    reason: str = ""


def choose_attention_backend(
    device_type: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    *,
    context_parallel: bool,
    sinks: bool = False,
) -> AttentionBackend:
    """The backend for queries of this dtype and head_dim on a device of this compute capability
    ((0, 0) of a CPU).
    """
    if device_type != "cuda":
        return AttentionBackend(DENSE, f"on {device_type}")
    if head_dim < FLEX_MIN_HEAD_DIM:
        return AttentionBackend(DENSE, f"head_dim {head_dim}")
    if context_parallel:
        return AttentionBackend(FLEX, "context parallelism")
    if sinks:
        return AttentionBackend(FLEX, "attention sinks")
    if load_varlen_attn() is None:
        return AttentionBackend(
            FLEX, f"torch {torch.__version__} has no variable-length flash attention for all models"
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return AttentionBackend(FLEX, str(dtype).removeprefix("torch."))
    if head_dim % FLASH_HEAD_DIM_MULTIPLE or head_dim > FLASH_MAX_HEAD_DIM:
        return AttentionBackend(FLEX, f"head_dim {head_dim}")
    if capability < (8, 0):
        return AttentionBackend(FLEX, f"compute capability {capability[0]}.{capability[1]}")
    return AttentionBackend(VARLEN)


@cache
def attention_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    context_parallel: bool,
    sinks: bool = False,
) -> AttentionBackend:
    """The backend of this device. Activates the fastest flash attention that is installed."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    backend = choose_attention_backend(
        device.type, capability, dtype, head_dim, context_parallel=context_parallel, sinks=sinks
    )
    if backend.name == VARLEN:
        flash_implementation(capability[0])
    return backend


@cache
def flash_implementation(capability_major: int) -> str:
    """Activate flash attention 3 or 4 where its package is installed and made for this GPU: "FA2"
    is torch's own.
    """
    implementation = _FLASH_IMPLEMENTATIONS.get(capability_major)
    if implementation is None or not hasattr(torch_attention, "activate_flash_attention_impl"):
        return "FA2"
    try:
        torch_attention.activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError, ValueError):
        # Not installed, without the kernels, or unknown to this torch.
        return "FA2"
    return implementation


def stores_attention_weights(
    dtype: torch.dtype, num_keys: int, *, on_gpu: bool, compiled: bool
) -> bool:
    """Whether dense attention keeps its weights for the backward pass.

    The bf16 kernel of SDPA on a CPU takes twice as long as plain products (torch 2.13,
    AVX512-BF16).
    """
    return dtype == torch.bfloat16 and not on_gpu and compiled and num_keys <= MAX_STORED_KEYS


def describe_attention_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    context_parallel: bool,
    sinks: bool = False,
) -> str:
    """The backend of this device in words, for logs."""
    backend = attention_backend(
        device, dtype, head_dim, context_parallel=context_parallel, sinks=sinks
    )
    if backend.name == VARLEN:
        return (
            "variable-length flash"
            f" ({flash_implementation(torch.cuda.get_device_capability(device)[0])})"
        )
    kind = "FlexAttention, block mask" if backend.name == FLEX else "SDPA, dense mask"
    return f"{kind} ({backend.reason})"
