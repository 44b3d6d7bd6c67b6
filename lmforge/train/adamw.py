"""AdamW whose moments may be kept in bf16, which halves the optimizer's memory.

With fp32 moments torch's own fused AdamW does the same in one pass, and is what a run uses; here they serve the
parameters that Muon leaves (muon.py).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lmforge.parallel.parallel_model import local_tensor

# Elements that are worked on at once: it bounds the fp32 copies of moments in bf16, four times this many bytes each.
MAX_CHUNK_NUMEL = 2**25
# The step, and elements of this rank's part of a parameter, its exp_avg, exp_avg_sq and gradient. All have one dimension.
Chunk = tuple[int, tuple[Tensor, ...]]


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
            # On the host, which computes with it.
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)
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
        for chunks in _batch_chunks(self._chunks(parameters, group)):
            steps, tensors = zip(*chunks, strict=True)
            params, exp_avgs, exp_avg_sqs, grads = zip(*tensors, strict=True)
            # Everything is computed in fp32, masters and gradients in bf16 too; in fp32 these are the tensors themselves.
            values, gradients = [param.float() for param in params], [grad.float() for grad in grads]
            first, second = [moment.float() for moment in exp_avgs], [moment.float() for moment in exp_avg_sqs]
            torch._foreach_lerp_(first, gradients, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
            denom = torch._foreach_div(second, [1 - beta2**step for step in steps])
            torch._foreach_sqrt_(denom)
            torch._foreach_add_(denom, group["eps"])
            torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
            torch._foreach_addcdiv_(values, first, denom, [-lr / (1 - beta1**step) for step in steps])
            if params[0].dtype != torch.float32:
                torch._foreach_copy_(params, values)
            if self.state_dtype != torch.float32:
                torch._foreach_copy_(exp_avgs, first)
                stochastic_round_(second, seed=steps[0])
                torch._foreach_copy_(exp_avg_sqs, second)

    def _chunks(self, parameters: list[Tensor], group: dict[str, Any]) -> Iterator[Chunk]:
        for parameter in parameters:
            state = self.get_or_init_state(parameter, group)
            state["step"] += 1
            assert parameter.grad is not None
            flat = [local_tensor(tensor).view(-1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
            flat.append(local_tensor(parameter.grad).reshape(-1))
            for tensors in zip(*(tensor.split(MAX_CHUNK_NUMEL) for tensor in flat), strict=True):
                yield int(state["step"]), tensors


def _batch_chunks(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks of MAX_CHUNK_NUMEL elements together, or of one that has as many."""
    batch: list[Chunk] = []
    numel = 0
    for chunk in chunks:
        _, (param, *_) = chunk
        if batch and numel + param.numel() > MAX_CHUNK_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(chunk)
        numel += param.numel()
    if batch:
        yield batch


def stochastic_round_(tensors: list[Tensor], seed: int) -> None:
    """Round fp32 tensors in place to numbers that bf16 holds: up or down at random, the nearer the likelier.

    The expected value is the number itself. bf16 is the upper half of fp32, and a carry out of the lower one rounds up.
    """
    generator = torch.Generator(tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        bits = tensor.view(torch.int32)
        bits += torch.randint(2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        bits &= -(2**16)
