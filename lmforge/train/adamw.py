"""AdamW whose moments may be kept in bf16, which halves the optimizer's memory.

With fp32 moments torch's own fused AdamW does the same in one pass, and is what a run uses; here they serve the
parameters that Muon leaves (muon.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmforge.parallel.parallel_model import local_tensor

# Elements that are worked on at once: it bounds the fp32 copies of moments in bf16, four times this many bytes each.
MAX_CHUNK_NUMEL = 2**25


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) on fp32 or bf16 parameters, plain or DTensor, with moments of `state_dtype`, fp32 or bf16.

    A step is computed in fp32. In bf16 the first moment is stored rounded to nearest, the second stochastically: its
    steps are smaller than what bf16 tells apart, and rounded to nearest it could not fall once beta2 is above 0.996.
    The noise depends on the step only, so that a resumed run draws the same.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype = torch.float32,
        **defaults: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, **defaults})
        self.state_dtype = state_dtype

    def get_or_init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter of `group`, made of zeros where there is none yet."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # on the host, which computes with it
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient. The host does not wait for the device."""
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.update_group(ready, group)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of `parameters`, which are of `group`."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        for lot in _batch_chunks(self._chunks(parameters, group)):
            # Everything is computed in fp32, masters and gradients in bf16 too; in fp32 these are the tensors themselves.
            values, gradients = [piece.param.float() for piece in lot], [piece.grad.float() for piece in lot]
            first, second = [piece.exp_avg.float() for piece in lot], [piece.exp_avg_sq.float() for piece in lot]
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            width = torch._foreach_div(second, [1 - beta2**piece.step for piece in lot])
            torch._foreach_sqrt_(width)
            torch._foreach_add_(width, group["eps"])
            torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(values, first, width, [-lr / (1 - beta1**piece.step) for piece in lot])
            if lot[0].param.dtype != torch.float32:
                torch._foreach_copy_([piece.param for piece in lot], values)
            if self.state_dtype != torch.float32:
                torch._foreach_copy_([piece.exp_avg for piece in lot], first)
                stochastic_round_(second, seed=lot[0].step)
                torch._foreach_copy_([piece.exp_avg_sq for piece in lot], second)

    def _chunks(self, parameters: list[Tensor], group: dict[str, Any]) -> Iterator["_ParameterChunk"]:
        for parameter in parameters:
            state = self.get_or_init_state(parameter, group)
            state["step"] += 1
            kept = [local_tensor(tensor).view(-1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad).reshape(-1)
            for stretch in zip(*(flat.split(MAX_CHUNK_NUMEL) for flat in (gradient, *kept)), strict=True):
                yield _ParameterChunk(int(state["step"]), *stretch)


@dataclass(frozen=True)
class _ParameterChunk:
    """A stretch of this rank's share of one parameter, with its state. All have one dimension."""

    step: int
    grad: Tensor
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def _batch_chunks(chunks: Iterable[_ParameterChunk]) -> Iterator[list[_ParameterChunk]]:
    lot: list[_ParameterChunk] = []
    for piece in chunks:
        if lot and sum(earlier.param.numel() for earlier in lot) + piece.param.numel() > MAX_CHUNK_NUMEL:
            yield lot
            lot = []
        lot.append(piece)
    if lot:
        yield lot


def stochastic_round_(tensors: list[Tensor], seed: int) -> None:
    """Round fp32 tensors in place to numbers that bf16 holds: up or down at random, the nearer the likelier.

    The expected value is the number itself. bf16 is the upper half of fp32, and a carry out of the lower one rounds up.
    """
    generator = torch.Generator(tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        bits = tensor.view(torch.int32)
        bits += torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        bits &= -(2**16)
