"""Activation checkpointing: what a block computes in the forward pass is dropped, and computed again in the backward.

It is put inside a block's own forward, where no wrapper changes the names of tensors, and the hooks of sharding, which
gather a block's weights before its backward pass, stay outside of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmforge.model.layers import LanguageModel

# What is dear to compute again and cheap to keep: attention, and every second matrix product (torchtitan's choice).
_ATTENTION_OPS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
_MATMUL_OPS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}


def apply_activation_checkpointing(model: LanguageModel, mode: str, every: int = 2) -> None:
    """Checkpoint the activations of `model`'s blocks, in place: before they are compiled, and before they are sharded.

    how: none; full, of each block; blocks, of every `every`-th block; operators, of all but attention and every second
    matrix product of each block.
    """
    if mode == "none":
        return
    context: dict[str, Any] = {}
    if mode == "selective-ops":
        context["context_fn"] = _selective_context
    for number, block in enumerate(model.blocks, start=1):
        if mode == "selective-blocks" and number % every:
            continue
        # Dropout draws from the tokens' keys, so there is no random state to bring back.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **context)


def _selective_context() -> Any:
    return create_selective_checkpoint_contexts(_selective_policy())


def _selective_policy() -> Callable[..., CheckpointPolicy]:
    products = {False: 0, True: 0}  # counted apart in the forward pass and when it is done again

    def choose(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        keep = operator in _ATTENTION_OPS
        if operator in _MATMUL_OPS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return choose
