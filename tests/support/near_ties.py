"""Near-ties of mixtures of experts: tokens whose k-th and next score are so close that rounding may
choose either.

Two computations that differ by rounding are compared on numbers that have none: what was drawn is
counted and drawn again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lmforge.core.model.layers import local_weight
from lmforge.core.model.mixture.experts import Router

NEAR = 1e-5
T = TypeVar("T")


@contextmanager
def near_ties() -> Iterator[list[int]]:
    """The number of tokens with a near-tie, of each call of a router within it.

    Padding does not count in training.
    """
    found: list[int] = []

    def look(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(module, Router):
            near = _smallest_gaps(module, result[2].detach()) < NEAR
            found.append(int((near if len(args) < 2 or args[1] is None else near & args[1]).sum()))

    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        yield found
    finally:
        hook.remove()


def _smallest_gaps(router: Router, scores: Tensor) -> Tensor:
    """Between what is chosen and what is next, of experts and of groups of them: [tokens], of
    scores [tokens, experts].
    """
    gaps = _gap_after(router._to_choose_by(scores), router.count)
    if router.groups == 1:
        return gaps
    assert router.e_score_correction_bias is not None
    groups = (scores + local_weight(router.e_score_correction_bias)).unflatten(
        -1, (router.groups, -1)
    )
    return torch.minimum(gaps, _gap_after(groups.topk(2).values.sum(-1), router.kept_groups))


def _gap_after(scores: Tensor, count: int) -> Tensor:
    if count == scores.shape[-1]:
        return torch.full_like(scores[..., 0], torch.inf)
    return scores.topk(count + 1).values.diff(dim=-1).neg()[..., -1]


def drawn_without_near_ties(draw: Callable[[], T], run: Callable[[T], object]) -> T:
    """What `draw` gave first that a model that `run` runs on it has no near-tie with.

    It prints how often it drew again.
    """
    again = 0
    while True:
        drawn = draw()
        with near_ties() as found:
            run(drawn)
        if not any(found):
            return drawn
        again += 1
        print(f"drawn again ({again}): {sum(found)} near-ties")
