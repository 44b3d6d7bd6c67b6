"""Gradient descent with momentum, by torch's fused kernel on each rank's part of the parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lmforge.parallel.parallel_model import local_tensor
from lmforge.train.optimizers.adamw import MAX_CHUNK_NUMEL


class SGD(torch.optim.Optimizer):
    """SGD on fp32 or bf16 parameters, plain or DTensor; torch's own fused SGD does not support all of these.

    The gradient plus weight decay is added to `momentum` times the previous buffer. Where `found_inf` is set on the optimizer,
    as for torch's fused ones, and is 1, a step leaves parameters and state as they are.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def get_or_init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter of `group`, made of zeros where there is none yet; none without momentum."""
        state = self.state[parameter]
        if not state and group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient. The host does not wait for the device."""
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.get_or_init_state(parameter, group) for parameter in ready]
            values = [local_tensor(parameter) for parameter in ready]
            gradients = [local_tensor(parameter.grad) for parameter in ready]
            sums = [local_tensor(state["momentum_buffer"]) if state else None for state in states]
            if all(value.dtype == torch.float32 for value in values):
                self._update(values, gradients, sums, group)
            else:
                for tensors in zip(values, gradients, sums, strict=True):
                    self._update_in_fp32(*tensors, group)

    def _update_in_fp32(self, value: Tensor, gradient: Tensor, momentum: Tensor | None, group: dict[str, Any]) -> None:
        """Update a parameter in bf16. On a CPU, torch 2.13's kernel does not update bf16 parameters, and doubles their
        momentum."""
        stored = [tensor for tensor in (value, gradient, momentum) if tensor is not None]
        for chunks in zip(*(tensor.view(-1).split(MAX_CHUNK_NUMEL) for tensor in stored), strict=True):
            computed = [chunk.float() for chunk in chunks]
            self._update(computed[:1], computed[1:2], computed[2:] or [None], group)
            for chunk, result in zip(chunks, computed, strict=True):
                chunk.copy_(result)

    def _update(
        self, values: list[Tensor], gradients: list[Tensor], sums: Sequence[Tensor | None], group: dict[str, Any]
    ) -> None:
        sgd(
            values,
            gradients,
            list(sums),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            fused=True,
            found_inf=getattr(self, "found_inf", None),
        )
