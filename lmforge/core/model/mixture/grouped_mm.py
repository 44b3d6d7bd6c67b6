"""The matrix products of stacked experts: each expert multiplies its own rows, in one kernel.

torch's `grouped_mm` with what it lacks (torch 2.13): a rule of shapes in every dtype, so that
blocks compile as one graph and are traced without data; widths whose rows are no multiples of 16
bytes, which are padded here; and its FLOPs. On a CPU, where it is a loop over experts too, the loop
is here: oneDNN generates code for each new number of rows, and the numbers of rows of experts are
new in every step. So products in 16 bits take a few rows more, up to a number that returns.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad
from torch.utils.flop_counter import register_flop_formula

ROW_BYTES = 16  # rows of operands begin at multiples of it


@torch.library.custom_op("lmforge::multiply_groups", mutates_args=())
def multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """rows [rows, inputs] of expert after expert times the matrix of each one: [rows, outputs].

    weight [experts, outputs, inputs], or [experts, inputs, outputs] if `transposed`; both of one
    dtype. ends int32 [experts]: the number of rows up to and with those of each expert; the last is
    the number of rows.
    """
    if _is_looped(rows):
        matrices = weight if transposed else weight.transpose(1, 2)
        out = rows.new_empty(len(rows), matrices.shape[2])
        for matrix, (start, end, window) in zip(matrices, _windows(rows, ends), strict=True):
            if window.start == start:  # what it writes below its rows, the next experts write again
                torch.mm(rows[window], matrix, out=out[window])
            else:
                out[start:end] = (rows[window] @ matrix)[start - window.start : end - window.start]
        return out
    outputs = weight.shape[2 if transposed else 1]
    padded = _pad(weight, rows=True)
    right = padded if transposed else padded.transpose(1, 2)
    return grouped_mm(_pad(rows), right, offs=ends)[:, :outputs].contiguous()


@torch.library.custom_op("lmforge::sum_outer_products", mutates_args=())
def sum_outer_products(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """leftᵀ right of the rows of each expert: [experts, left's width, right's width]; `ends` as in
    `multiply_groups`.
    """
    if _is_looped(left):
        out = left.new_empty(len(ends), left.shape[1], right.shape[1])
        for product, (start, end, window) in zip(out, _windows(left, ends), strict=True):
            own = right[window]
            if own.shape[0] != end - start:  # rows of other experts count nothing
                own = torch.zeros_like(own)
                own[start - window.start : end - window.start] = right[start:end]
            torch.mm(left[window].t(), own, out=product)
        return out
    product = grouped_mm(_pad(left).t(), _pad(right), offs=ends)
    return product[:, : left.shape[1], : right.shape[1]].contiguous()


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`multiply_groups` of rows in the dtype of the weights [experts, outputs, inputs];
    differentiable.
    """
    result: Tensor = multiply_groups(rows.to(weight.dtype), weight, ends, False)
    return result


def _is_looped(rows: Tensor) -> bool:
    """The kernel has no fp64, which only tests compute in."""
    return rows.device.type == "cpu" or rows.dtype == torch.float64


def _windows(rows: Tensor, ends: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Where the rows of each expert start and end, and the rows that its product takes: in 16 bits
    a multiple of some number, an eighth of an expert's average, with rows of other experts below
    or, at the end, above.
    """
    average = len(rows) // len(ends)
    multiple = 1 << max(4, (average // 8).bit_length() - 1) if rows.itemsize == 2 else 1
    start = 0
    for end in ends.tolist():
        size = min(-(-(end - start) // multiple) * multiple, len(rows))
        first = min(start, len(rows) - size)
        yield start, end, slice(first, first + size)
        start = end


def _pad(matrix: Tensor, rows: bool = False) -> Tensor:
    """A matrix, or a stack of them, with columns of zeros so that its rows are multiples of 16
    bytes; `rows` as well.
    """
    multiple = ROW_BYTES // matrix.element_size()
    columns = -matrix.shape[-1] % multiple
    below = -matrix.shape[-2] % multiple * rows
    return pad(matrix, (0, columns, 0, below)) if columns or below else matrix.contiguous()


@multiply_groups.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@sum_outer_products.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, ctx.transposed = inputs
    ctx.save_for_backward(rows, weight, ends)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    needs_rows, needs_weight, *_ = ctx.needs_input_grad
    left, right = (rows, gradient) if ctx.transposed else (gradient, rows)
    rows_gradient = weight_gradient = None
    if needs_rows:
        rows_gradient = multiply_groups(gradient, weight, ends, not ctx.transposed)
    if needs_weight:
        weight_gradient = sum_outer_products(left, right, ends)
    return rows_gradient, weight_gradient, None, None


multiply_groups.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.lmforge.multiply_groups)
def _multiply_flops(rows: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(rows[0]) * int(weight[1]) * int(weight[2])


@register_flop_formula(torch.ops.lmforge.sum_outer_products)
def _outer_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * int(left[0]) * int(left[1]) * int(right[1])
