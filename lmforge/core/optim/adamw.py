"""AdamW whose moments may be kept in bf16, which halves the optimizer's memory.

With fp32 moments torch's own fused AdamW does the same in one pass, and is what a run uses. With
fp32 moments this class is used for the parameters that Muon does not update (muon.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lmforge.core.optim.stored import StochasticBF16, Stored8Bit, zeros_8bit
from lmforge.core.options.sections import UPDATE_CHUNK_NUMEL
from lmforge.core.parallel.parallel_model import local_tensor

MAX_CHUNK_NUMEL = UPDATE_CHUNK_NUMEL
# An odd number near 2^16 divided by the golden ratio: its multiples modulo 2^16 are spread evenly,
# however many.
STEP_NOISE = 40_503
# What belongs to a parameter, and this rank's parts of tensors of its shape, flat, of which the
# last is the gradient.
Part = tuple[Any, tuple[Tensor | Stored8Bit | StochasticBF16, ...]]


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) on fp32 or bf16 parameters, plain or DTensor, with moments of
    `state_dtype`: fp32, bf16, or uint8 for 8 bits (arXiv 2110.02861) of the parameters in groups
    that have `stores_8bit`, and fp32 of others.

    A step is computed in fp32, by torch's fused kernel. In bf16 the first moment is stored rounded
    to nearest, the second stochastically: its changes are smaller than the spacing of bf16 numbers,
    so with rounding to nearest it could not fall once beta2 is above 0.996. The noise depends on
    the step only, so that a resumed run draws the same.

    `rounding_keys`: a key for each bf16 parameter that is rounded stochastically (stored.py).

    `found_inf`, set on the optimizer as for torch's fused ones (a scalar, 0 or 1, on the device of
    the parameters): where it is 1, a step leaves parameters and state as they are, bit by bit.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype = torch.float32,
        rounding_keys: Mapping[Tensor, int] = MappingProxyType({}),
        **defaults: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, **defaults}
        )
        self.state_dtype = state_dtype
        self.rounding_keys = rounding_keys

    def get_or_init_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter of `group`, made of zeros where there is none yet."""
        state = self.state[parameter]
        if not state:
            # On the device, which decides whether a step is skipped.
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = self.zero_state(parameter, group)
        return state

    def zero_state(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        if self.state_dtype != torch.uint8:
            return torch.zeros_like(parameter, dtype=self.state_dtype)
        return (
            zeros_8bit(parameter)
            if group["stores_8bit"]
            else torch.zeros_like(parameter, dtype=torch.float32)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient.

        The host does not wait for the device.
        """
        device = self.param_groups[0]["params"][0].device
        skip = getattr(self, "found_inf", torch.zeros((), device=device)).bool()
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            if ready:
                self.update_group(ready, group, skip)

    def update_group(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor) -> None:
        """One step of `parameters`, which are of `group`, or none where `skip` is true."""
        parts = (
            self._part(parameter, self.get_or_init_state(parameter, group))
            for parameter in parameters
        )
        for counted, (values, first, second, gradients) in fp32_batches(parts, skip):
            steps = [step.clone() for step in counted]
            _fused_update(values, gradients, first, second, steps, group, skip)
            if self.state_dtype == torch.bfloat16:
                stochastic_round_(second, steps[0])
        counters = [self.get_or_init_state(parameter, group)["step"] for parameter in parameters]
        torch._foreach_add_(counters, [(~skip).float()] * len(counters))

    def _part(self, parameter: Tensor, state: dict[str, Tensor]) -> Part:
        first = state["exp_avg"]
        second = state["exp_avg_sq"]
        parts: tuple[Any, ...] = local_parts(parameter, first, second)
        if first.dtype == torch.uint8:
            moments = (
                Stored8Bit.of(first, parameter, "int8"),
                Stored8Bit.of(second, parameter, "uint8"),
            )
            parts = parts[0], *moments, parts[-1]
        if parameter in self.rounding_keys:
            parts = (
                StochasticBF16.of(parameter, self.rounding_keys[parameter], state["step"]),
                *parts[1:],
            )
        return state["step"], parts


def _fused_update(
    values: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    skip: Tensor,
) -> None:
    """Update values and moments (fp32) in place with torch's kernel.

    `steps` count the previous steps, and are overwritten.
    """
    (beta1, beta2), lr, weight_decay, eps = (
        group[name] for name in ("betas", "lr", "weight_decay", "eps")
    )
    numbers: dict[str, Any] = {
        "beta1": beta1,
        "beta2": beta2,
        "lr": lr,
        "weight_decay": weight_decay,
        "eps": eps,
    }
    numbers |= {"amsgrad": False, "maximize": False}
    adamw(
        values, gradients, first, second, [], steps, fused=True, found_inf=skip.float(), **numbers
    )


def assign_unless(skip: Tensor, tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Give each tensor its new value, rounded to its dtype, unless `skip` (a bool scalar on their
    device) is true.
    """
    for tensor, value in zip(tensors, values, strict=True):
        torch.where(skip, tensor, value.to(tensor.dtype), out=tensor)


def local_parts(parameter: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of a parameter, of its states and of its gradient, as tensors of one
    dimension.
    """
    assert parameter.grad is not None
    return (
        *(local_tensor(each).view(-1) for each in (parameter, *states)),
        local_tensor(parameter.grad).reshape(-1),
    )


def fp32_batches(
    parts: Iterable[Part], skip: Tensor | None = None
) -> Iterator[tuple[list[Any], list[list[Tensor]]]]:
    """What an elementwise update computes with: of each part what belongs to it, and its tensors in
    fp32, a list for each kind.

    Those in fp32 are the tensors themselves. Others are rounded back when the next batch is asked
    for, but not gradients; where `skip` is true, they keep their bits. A batch has at most
    MAX_CHUNK_NUMEL elements of a kind; larger parts are cut, those in 8 bits between rows.
    """
    batch: list[Part] = []
    numel = 0
    for owned, tensors in parts:
        columns = next((each.columns for each in tensors if isinstance(each, Stored8Bit)), 1)
        size = max(1, MAX_CHUNK_NUMEL // columns) * columns
        for chunk in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            if batch and numel + chunk[0].numel() > MAX_CHUNK_NUMEL:
                yield from _in_fp32(batch, skip)
                batch = []
                numel = 0
            batch.append((owned, chunk))
            numel += chunk[0].numel()
    if batch:
        yield from _in_fp32(batch, skip)


def _in_fp32(
    batch: list[Part], skip: Tensor | None
) -> Iterator[tuple[list[Any], list[list[Tensor]]]]:
    owned, tensors = zip(*batch, strict=True)
    stored = [*zip(*tensors, strict=True)]
    computed = [[tensor.float() for tensor in each] for each in stored]
    yield [*owned], computed
    # A tensor that was not updated has its 16-bit values again, and needs no rounding.
    for olds, news in zip(stored[:-1], computed, strict=False):
        if not isinstance(olds[0], Tensor):
            for old, new in zip(olds, news, strict=True):
                old.store(new, skip)
        elif olds[0].dtype != torch.float32:
            torch._foreach_copy_(olds, news)


def stochastic_round_(tensors: Sequence[Tensor], step: Tensor) -> None:
    """Round fp32 tensors in place to bf16 values stochastically: up or down at random, so that the
    expected value is the number itself. bf16 is the upper half of fp32, and a carry out of the
    lower one rounds up. Each element has a random number of its own, always the same one, which
    `step` (a scalar on the device) shifts.
    """
    generator = torch.Generator(tensors[0].device).manual_seed(0)
    shift = (step.long() * STEP_NOISE) % 2**16
    for tensor in tensors:
        bits = tensor.view(torch.int32)
        noise = torch.randint(
            2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
        )
        bits += noise.add_(shift).bitwise_and_(2**16 - 1)
        bits &= -(2**16)
