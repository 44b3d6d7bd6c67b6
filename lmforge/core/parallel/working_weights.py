"""bf16 working weights besides fp32 master weights, for the engines without their own mixed
precision: `single` and DDP.

Under autocast alone, every micro-batch casts every matrix again, and widens its gradient. Here the
weights of linear layers are cast once per step. Embeddings are looked up in fp32; autocast casts
what is left: biases and the head.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lmforge.core.model.layers import Conv1D, LanguageModel
from lmforge.core.model.lora import LoraLinear
from lmforge.core.model.mixture.experts import Experts


@contextmanager
def working_weights(model: LanguageModel, dtype: torch.dtype) -> Iterator[None]:
    """The linear layers of `model` compute with copies of their weights in `dtype`; the model's
    parameters stay the masters.

    Gradients of the copies are added to those of the masters, in fp32, as each backward pass
    computes them. Values and gradients are those that autocast gives, bit by bit. Enter it around
    all forward and backward passes of a step.
    """
    masters: dict[tuple[nn.Module, str], Any] = {
        (module, name): getattr(module, name) for module in model.modules() for name in _matrices(module)
    }
    copies: dict[Tensor, Tensor] = {master: master.detach().to(dtype) for master in masters.values()}

    def use_copies(layers: Iterable[tuple[nn.Module, str]]) -> None:
        # Not by assignment: the copies are not parameters; names, hooks and optimizers use the
        # masters.
        for layer, name in layers:
            master = masters[layer, name]
            layer._parameters[name] = _WorkingWeight.apply(master, copies[master])

    use_copies(masters)
    try:
        with ExitStack() as hooks:
            for block in model.blocks:
                layers = [(module, name) for module in block.modules() for name in _matrices(module)]
                hooks.enter_context(_before_each_call(block, partial(use_copies, layers)))
            yield
    finally:
        for (layer, name), master in masters.items():
            layer._parameters[name] = master


def _matrices(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's own parameters that it multiplies with."""
    if isinstance(module, Experts):
        return () if module.quantized else module.matrices
    multiplies = isinstance(module, nn.Linear | Conv1D) or (isinstance(module, LoraLinear) and not module.quantized)
    return ("weight",) if multiplies else ()


@contextmanager
def _before_each_call(block: nn.Module, function: Callable[[], None]) -> Iterator[None]:
    """`function` runs before each call of the block, and is not compiled with it.

    Private to torch; checked with 2.13.0.
    """
    call = block._compiled_call_impl
    if call is None:
        handle = block.register_forward_pre_hook(lambda *_: function())
        try:
            yield
        finally:
            handle.remove()
        return

    def call_after_function(*args: Any, **kwargs: Any) -> Any:
        function()
        return call(*args, **kwargs)

    block._compiled_call_impl = call_after_function
    try:
        yield
    finally:
        block._compiled_call_impl = call


class _WorkingWeight(torch.autograd.Function):
    """Stands for a copy of a parameter in another dtype, and hands the copy's gradient to the
    parameter.

    One is made in each forward pass, directly before the layer is called: autograd carries out the
    youngest of the operations that are ready. Made at the start of the step, all would wait until
    the end of the backward pass, and DDP with them.
    """

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        ctx.master = master
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        total = ctx.master.grad
        if total is None:
            return gradient, None
        # Added in one pass. A returned gradient would be converted to fp32 first; DDP's hooks are
        # called in either case.
        total.add_(gradient)
        return None, None
