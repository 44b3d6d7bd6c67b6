"""Activation checkpointing: activations of a block are dropped in the forward pass and recomputed
in the backward pass.

It replaces a block's own `forward`, so that no wrapper changes the names of tensors, and FSDP's
hooks, which gather a block's weights before its backward pass, stay outside the recomputation.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmforge.core.model.attention_backend import load_varlen_attn
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.mixture import experts  # noqa: F401  (its operators)
from lmforge.core.model.quantization import matrices  # noqa: F401  (its operators)
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES, NoCheckpointing
from lmforge.core.parallel import expert_parallel  # noqa: F401  (its operators)

_ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
# What is chosen, and what the host and other ranks were asked: kept whatever the mode.
_ASKED_ONCE = {
    torch.ops.lmforge.choose_experts.default,
    torch.ops.lmforge.exchange_counts.default,
    torch.ops.lmforge.sizes_by_rank.default,
}
_MATMUL_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.lmforge.multiply_groups.default,
    torch.ops.lmforge.quantized_product.default,
}


def apply_activation_checkpointing(model: LanguageModel, mode: str, every: int = 2) -> None:
    """Checkpoint the activations of `model`'s blocks, in place, before they are compiled or
    sharded.

    mode: the name of one in core/options/activation_checkpointing.py; `every`: for modes of every
    k-th block.
    """
    chosen = CHECKPOINTING_MODES[mode]
    # It warns of in-place operations in the recomputed region; no block has any.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    kwargs: dict[str, Any] = {}
    if chosen.keeps_operators or model.config.sparse_layers.count(True):
        kwargs["context_fn"] = partial(_selective_context, chosen)
        if load_varlen_attn() is not None:
            _ATTENTION_OPS.add(torch.ops.torch_attn._varlen_attn.default)
    for number, block in enumerate(model.blocks, start=1):
        if chosen.recomputes_block(number, every):
            block.forward = _checkpointed(block.forward, **kwargs)


def _checkpointed(forward: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    # A function of our own, since torch.compile skips torch's functions, such as
    # `partial(checkpoint, …)`.
    def checkpointed_forward(*inputs: Any, **named_inputs: Any) -> Any:
        # Dropout draws from the tokens' keys, so there is no random state to restore.
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **kwargs, **named_inputs)

    return checkpointed_forward


def _selective_context(mode: NoCheckpointing) -> Any:
    num_matmuls = {False: 0, True: 0}  # in the forward pass, and in the recomputation

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in _ASKED_ONCE or (mode.keeps_operators and operator in _ATTENTION_OPS)
        if operator in _MATMUL_OPS:
            num_matmuls[context.is_recompute] += 1
            keep = mode.keeps_product(num_matmuls[context.is_recompute])
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
