"""Fully sharded data parallel through `fully_shard`: each rank keeps 1/N of parameters, gradients and optimizer states.

Units: the embedding, each block, the head, and a root with what is left (the last norm). An embedding tied to the head
is used at both ends of the forward pass, so it stays in the root, which is gathered once.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lmforge.cluster.ranks import Ranks
from lmforge.model.layers import Head, LanguageModel


def shard(scored: nn.Module, model: LanguageModel, ranks: Ranks, dtype: torch.dtype, keep_gathered: bool) -> None:
    """Shard `model` in place over all ranks; `scored` (the model with its objective) becomes the root.

    With `keep_gathered` a unit's weights stay whole between forward and backward (grad-shard): one gather a step instead
    of two, for the memory of the whole model in the compute dtype.
    """
    mesh = init_device_mesh(ranks.device.type, (ranks.count,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    tied = model.lm_head.weight is model.embeddings[0].weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    if not tied:
        for embedding in model.embeddings:
            fully_shard(embedding, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
        # The head is needed again as soon as the backward pass begins.
        fully_shard(model.lm_head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(scored, mesh=mesh, mp_policy=policy)
    for unit in _units(scored):
        # Gradients are sums: the loss is already divided by the weight of the global batch.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _units(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(root: nn.Module, keep_gathered: bool) -> Iterator[None]:
    """All units gathered once, and left so: the forward passes inside communicate nothing. `keep_gathered` as in `shard`."""
    units = _units(root)
    for unit in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            # The root and the head are never freed between forward and backward; see `shard`.
            always = unit is root or isinstance(unit, Head)
            unit.set_reshard_after_forward(not (always or keep_gathered), recurse=False)
