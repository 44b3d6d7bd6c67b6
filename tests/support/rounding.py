"""Bounds that hold on any processor: a multiple of how far one process is from itself when its
rounding changes.

Processors, libraries and splits add the same numbers in other orders. What that changes depends on
the numbers, so it is measured where they are compared: a reference, the reference with other
rounding, and a candidate. Here too is the fault that each of these bounds must find, which
tests/test_rounding.py plants.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmforge.lab.bench.bounds import relative_difference
from lmforge.lab.bench.parity import weights_difference

# Of the distance between one process and itself, or of one rounding where that is more: how far a
# candidate may be.
TIMES = 8
ROUNDING = torch.finfo(torch.float32).eps
# Of a gradient; a bound that lets it pass says nothing.
FAULT = 1e-4
# A process that is started with one of them (variables of tests/support/preloaded.py) rounds differently,
# or makes the fault where it is one of several ranks, or samples by servers.
OTHER_ROUNDING = {"LMFORGE_TEST_ROUNDING": "other"}
PLANTED = {"LMFORGE_TEST_FAULT": "planted"}


def assert_rounding_apart(candidate: Mapping[str, float], rounded: Mapping[str, float]) -> None:
    """Check distances from one reference: the candidate's are no more than `TIMES` those of the
    reference, rounded otherwise.

    One message names every distance that is larger.
    """
    assert candidate.keys() == rounded.keys()
    largest = {name: TIMES * max(distance, ROUNDING) for name, distance in rounded.items()}
    said = {
        name: f"{name}: {distance:.2e} apart, {largest[name]:.2e} allowed"
        for name, distance in candidate.items()
    }
    print("\n".join(said.values()))
    further = [said[name] for name, distance in candidate.items() if not distance <= largest[name]]
    assert not further, f"more than rounding: {'; '.join(further)}"


def each_apart(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """The relative difference of each of these numbers."""
    assert ours.keys() == theirs.keys()
    return {name: relative_difference(ours[name], number) for name, number in theirs.items()}


def weights_apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """The `weights_difference` of each of these tensors, by norms: of their largest elements one
    rounding can be most.
    """
    assert ours.keys() == theirs.keys()
    return {
        f"weights of {name}": weights_difference(name, ours[name], tensor, order=2)
        for name, tensor in theirs.items()
    }


@contextmanager
def other_rounding(*, sampling: bool = True) -> Iterator[None]:
    """Within this, of what each layer gives a third of the elements is larger by a rounding, and a
    third smaller.

    Without `sampling` only where gradients are needed, so that no other token is drawn.
    """
    hook = _round_differently(sampling)
    try:
        yield
    finally:
        hook.remove()


def _round_differently(sampling: bool = True) -> RemovableHandle:
    signs = torch.Generator().manual_seed(0)

    def add_rounding(module: nn.Module, args: object, result: Any) -> Tensor | None:
        if any(True for _ in module.children()) or not isinstance(result, Tensor):
            return None
        if not (sampling or torch.is_grad_enabled()):
            return None
        return result * (
            1 + torch.randint(-1, 2, result.shape, generator=signs) * torch.finfo(result.dtype).eps
        )

    return nn.modules.module.register_module_forward_hook(add_rounding)


def obey_environment() -> None:
    """Round differently, or make the fault, for the rest of this process, if its variables say
    so.
    """
    if OTHER_ROUNDING.items() <= os.environ.items():
        _round_differently()
    if PLANTED.items() <= os.environ.items():
        plant_fault()


def plant_fault() -> None:
    """From now on, gradients of a candidate, and scores that a run logs, are larger by `FAULT`."""
    from lmforge.core.parallel.parallel_model import ParallelModel
    from lmforge.serve.validation import TaskObserver

    clip = ParallelModel.clip_grad_norm
    score = TaskObserver.validate

    def clip_and_enlarge(self: ParallelModel, max_norm: float) -> Tensor:
        norm = clip(self, max_norm)
        if self.dist_ctx.world_size == 1 and "--rollout.engine_urls" not in sys.argv:
            return norm  # the reference
        with torch.no_grad():
            for gradient in self._local_grads():
                gradient.mul_(1 + FAULT)  # after clipping, which would take it away
        return norm * (1 + FAULT)

    def score_and_enlarge(self: TaskObserver, step: int, required: bool) -> dict[str, float]:
        return {name: number * (1 + FAULT) for name, number in score(self, step, required).items()}

    ParallelModel.clip_grad_norm = clip_and_enlarge  # type: ignore[method-assign]
    TaskObserver.validate = score_and_enlarge  # type: ignore[method-assign]
