"""bf16 working weights beside fp32 masters, for the engines without a mixed precision of their own: `single` and DDP.

Under autocast alone, every micro-batch casts every matrix again, and widens its gradient. Here the weights of linear layers
are cast once a step. Embeddings are looked up in fp32; autocast casts what is left: biases and the head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.model.gpt2 import Conv1D
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraLinear


@contextmanager
def working_weights(model: LanguageModel, dtype: torch.dtype) -> Iterator[None]:
    """The linear layers of `model` compute with copies of their weights in `dtype`; the model's parameters stay the masters.

    Gradients of the copies are added to those of the masters, in fp32, as each backward pass computes them. Values and
    gradients are those that autocast gives, bit by bit. Enter it around all forward and backward passes of a step.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D | LoraLinear)]
    masters = [layer.weight for layer in layers]
    copies = {master: _WorkingWeight.apply(master, dtype) for master in masters}
    # Not by assignment: the copies are no parameters, and names, hooks and optimizers are those of the masters.
    for layer, master in zip(layers, masters, strict=True):
        layer._parameters["weight"] = copies[master]
    try:
        yield
    finally:
        for layer, master in zip(layers, masters, strict=True):
            layer._parameters["weight"] = master  # type: ignore[assignment]


class _WorkingWeight(torch.autograd.Function):
    """A copy of a parameter in another dtype, whose gradient may be computed several times."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.master = master
        return master.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        total = ctx.master.grad
        if total is None:
            return gradient, None
        # In one pass. Returned, it would be widened first; the hooks of DDP are called in either case.
        total.add_(gradient)
        return None, None
