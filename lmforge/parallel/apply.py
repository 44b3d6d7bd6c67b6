"""One order for everything that is done to a model before it trains: float8 → tensor → recompute → compile → shard → fill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lmforge.cluster.ranks import Ranks
from lmforge.model.layers import LanguageModel
from lmforge.parallel.context import Context
from lmforge.parallel.ddp import Replicated
from lmforge.parallel.engine import Loss, Scored, Spread
from lmforge.parallel.fits import check_adapters, check_neftune, choose_engine, model_ranks, stages_a_rank
from lmforge.parallel.fsdp1 import FlatSharded
from lmforge.parallel.fsdp2 import FullySharded
from lmforge.parallel.mesh import CONTEXT, TENSOR, sharding_of
from lmforge.parallel.pipeline import Pipelined
from lmforge.parallel.precision import check_float8, use_float8
from lmforge.parallel.recompute import recompute
from lmforge.parallel.tensor import split


@dataclass(frozen=True)
class Strategy:
    """How a model is spread and what memory it is spared; the fields are the options of `[parallel]` (config.py)."""

    engine: str = "auto"
    sharding: str | None = None
    hybrid_ranks: int | None = None
    recompute: str = "none"
    recompute_every: int = 2
    offload: bool = False
    embedding_unit: bool = True
    prefetch: int = 0
    reduce_every_micro_batch: bool = True
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    tensor_ranks: int = 1
    context_ranks: int = 1
    pipeline_ranks: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_stages: int | None = None

    @property
    def model_ranks(self) -> int:
        """How many ranks share the work on the same rows."""
        return model_ranks(self)

    @property
    def stages_a_rank(self) -> int:
        return stages_a_rank(self)


def compile_blocks(model: LanguageModel) -> None:
    """Compile each repeated block in place: one graph serves them all, and the names of tensors stay as they are."""
    for block in model.blocks:
        block.compile(dynamic=False)


def spread(
    model: LanguageModel,
    loss: Loss,
    *,
    ranks: Ranks,
    dtype: torch.dtype,
    compiled: bool = False,
    float8: bool = False,
    strategy: Strategy = Strategy(),
    fill: Callable[[LanguageModel], None] | None = None,
) -> Spread:
    """Spread `model` over the ranks as `strategy` says.

    The model has fp32 weights on the ranks' device; or it is on the meta device and `fill` gives it its weights, once
    it is as small on each rank as it is going to be. Masters stay fp32. With `dtype` bf16, FSDP gathers and computes in
    bf16 and reduces gradients in fp32; the other engines use autocast, whose gradients are fp32 as well. With `float8` the
    products in the blocks are of float8 numbers. Raises Mistake where the strategy or float8 does not fit the ranks or the
    model, the same on all.
    """
    engine = choose_engine(strategy, ranks.count, ranks.device.type)
    if model.lora is not None:
        check_adapters(strategy, float8)
    if model.neftune_alpha:
        check_neftune(strategy)
    if float8:
        check_float8(ranks.device, dtype)
        use_float8(model)
    wanted = sharding_of(strategy, ranks.count, ranks.place.local_ranks)
    if engine == "fsdp2" and not dist.is_initialized():
        # Sharding on one rank is one code path with many; it needs a group, if only of one.
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = wanted.mesh(ranks.device.type) if engine == "fsdp2" else None
    if mesh is not None and wanted.tensor > 1:
        split(model, mesh[TENSOR])
    if mesh is not None and wanted.context > 1:
        model.context = Context(mesh[CONTEXT].get_group())
    recompute(model, strategy.recompute, strategy.recompute_every)
    if compiled:
        compile_blocks(model)
    scored = Scored(model, loss)
    mixed = dtype if dtype != torch.float32 else None
    if engine != "fsdp2" and fill is not None:
        _materialise(model, ranks.device if engine in ("alone", "ddp") else torch.device("cpu"), fill)
    if engine == "alone":
        return Spread(scored, model, ranks, mixed)
    if engine == "ddp":
        return Replicated(scored, model, ranks, mixed)
    common: dict[str, Any] = {
        "dtype": dtype,
        "offload": strategy.offload,
        "embedding_unit": strategy.embedding_unit,
        "reduce_every_micro_batch": strategy.reduce_every_micro_batch,
    }
    if engine == "fsdp1":
        common |= {"limit_all_gathers": strategy.limit_all_gathers, "forward_prefetch": strategy.forward_prefetch}
        return FlatSharded(scored, model, ranks, wanted, **common)
    about = {"ranks": ranks, "sharding": wanted, "mesh": mesh, **common}
    sharded: FullySharded
    if wanted.pipeline > 1:
        sharded = Pipelined(model, loss, strategy.stages_a_rank, **about)
    else:
        sharded = FullySharded(scored, model, **about, prefetch=strategy.prefetch)
    if fill is not None:
        _materialise(model, torch.device("cpu") if strategy.offload else ranks.device, fill)
    return sharded


def _materialise(model: LanguageModel, device: torch.device, fill: Callable[[LanguageModel], None]) -> None:
    model.to_empty(device=device)
    model.tie()
    fill(model)
