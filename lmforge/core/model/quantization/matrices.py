"""Matrices of a model that are stored in 4 or 8 bits, and products with them.

The bytes are the layer's parameter, under the name that the matrix has without them. A product
computes the matrix again each time, in the forward and in the backward pass, so that no more than
one exists in full. Which layers they are in is decided in lora.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from lmforge.core.model.mixture.grouped_mm import multiply_groups
from lmforge.core.model.quantization.blocks import BlockFormat, dequantize, quantize


@dataclass(frozen=True)
class QuantizedMatrix:
    """What the bytes of a parameter stand for: a matrix of this `shape`, as the model has it
    without them. `transposed`: it is stored as [inputs, outputs], as in GPT-2, and its transpose is
    quantized, as bitsandbytes does it.
    """

    stored: BlockFormat
    shape: torch.Size
    transposed: bool = False

    @property
    def stored_shape(self) -> torch.Size:
        return self.stored.stored_shape(self.shape.numel())

    def quantize(self, matrix: Tensor) -> Tensor:
        """The bytes of the whole matrix, of this shape and any float dtype: uint8 [rows, row
        bytes].
        """
        return quantize(matrix.t() if self.transposed else matrix, self.stored)

    def dequantize(self, packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, of this shape."""
        shape = self.shape[::-1] if self.transposed else self.shape
        matrix = dequantize(packed, self.stored, shape, dtype)
        return matrix.t() if self.transposed else matrix

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
        """x [..., inputs] → [..., outputs], in the dtype of x.

        Of a stack of matrices, x [rows, inputs] are multiplied as in `grouped_linear`, which says
        what `ends` are.
        """
        bias = None if bias is None else bias.to(x.dtype)
        shape = [*(self.shape[::-1] if self.transposed else self.shape)]
        result: Tensor = quantized_product(x, packed, bias, ends, shape, self.stored.bits, self.stored.double_quant)
        return result


def quantize_parameter(module: nn.Module, name: str, stored: BlockFormat, transposed: bool = False) -> None:
    """Replace the matrix, or the stack of them, that a module has as its parameter `name` by its
    bytes, in place; on the meta device by what has their shape. `module.quantized` says what they
    stand for.
    """
    parameter = module.get_parameter(name)
    matrix = QuantizedMatrix(stored, parameter.shape, transposed)
    packed = torch.empty(matrix.stored_shape, dtype=torch.uint8, device="meta")
    if not parameter.is_meta:
        packed = matrix.quantize(parameter)
    setattr(module, name, nn.Parameter(packed, requires_grad=False))
    known: Any = getattr(module, "quantized", {})
    quantized: Any = {**known, name: matrix}
    module.quantized = quantized


def quantized_matrices(model: nn.Module) -> dict[str, QuantizedMatrix]:
    """What the quantized parameters of a model stand for, by name."""
    return {
        f"{owner}.{name}": matrix
        for owner, module in model.named_modules()
        for name, matrix in getattr(module, "quantized", {}).items()
    }


@torch.library.custom_op("lmforge::quantized_product", mutates_args=())
def quantized_product(
    x: Tensor, packed: Tensor, bias: Tensor | None, ends: Tensor | None, shape: list[int], bits: str, double_quant: bool
) -> Tensor:
    """x [..., inputs] times the transpose of the matrix of these bytes and this shape, [outputs,
    inputs], plus the bias; with `ends` of a stack of them. One operator, so that neither autograd
    nor a compiler keeps the matrix.
    """
    matrix = dequantize(packed, BlockFormat(bits, double_quant), shape, x.dtype)  # type: ignore[arg-type]
    if ends is not None:
        return multiply_groups(x, matrix, ends, False)
    return nn.functional.linear(x, matrix, bias)


@torch.library.custom_op("lmforge::quantized_product_backward", mutates_args=())
def quantized_product_backward(
    gradient: Tensor, packed: Tensor, ends: Tensor | None, shape: list[int], bits: str, double_quant: bool
) -> Tensor:
    """The gradient [..., inputs] of x, given that of the result."""
    matrix = dequantize(packed, BlockFormat(bits, double_quant), shape, gradient.dtype)  # type: ignore[arg-type]
    return gradient @ matrix if ends is None else multiply_groups(gradient, matrix, ends, True)


@quantized_product.register_fake
def _(x: Tensor, packed: Tensor, bias: Any, ends: Any, shape: list[int], bits: str, double_quant: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], shape[-2])


@quantized_product_backward.register_fake
def _(gradient: Tensor, packed: Tensor, ends: Any, shape: list[int], bits: str, double_quant: bool) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, _, ends, *ctx.stored = inputs
    ctx.save_for_backward(packed, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, ends = ctx.saved_tensors
    return quantized_product_backward(gradient, packed, ends, *ctx.stored), None, None, None, None, None, None


quantized_product.register_autograd(_backward, setup_context=_keep)


@register_flop_formula([torch.ops.lmforge.quantized_product, torch.ops.lmforge.quantized_product_backward])
def _flops(x: Any, packed: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * int(torch.Size(x).numel()) * int(out_shape[-1])
