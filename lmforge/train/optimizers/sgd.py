"""Gradient descent with momentum, by torch's fused kernel on each rank's part of the parameters."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from lmforge.train.optimizers.adamw import Part, fp32_batches, local_parts


class SGD(torch.optim.Optimizer):
    """SGD on fp32 or bf16 parameters, plain or DTensor, which torch's own fused SGD does not support: on a CPU its kernel
    (2.13) does not update bf16 parameters, and doubles their momentum.

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
            for _, (values, *sums, gradients) in fp32_batches(self._parts(group)):
                sgd(
                    values,
                    gradients,
                    [*sums[0]] if sums else [None] * len(values),
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    fused=True,
                    found_inf=getattr(self, "found_inf", None),
                )

    def _parts(self, group: dict[str, Any]) -> Iterator[Part]:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield None, local_parts(parameter, *self.get_or_init_state(parameter, group).values())
