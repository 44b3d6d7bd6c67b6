"""One order for everything that is done to a model before it trains: float8 → tensor → recompute → compile → shard → fill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lmforge.cluster.distributed import DistributedContext
from lmforge.model.layers import LanguageModel
from lmforge.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.parallel.context_parallel import ContextParallel
from lmforge.parallel.ddp import DDPModel
from lmforge.parallel.dims import CONTEXT, TENSOR, parallel_dims
from lmforge.parallel.fsdp1 import FSDP1Model
from lmforge.parallel.fsdp2 import FSDP2Model
from lmforge.parallel.parallel_model import LossFn, ModelWithLoss, ParallelModel
from lmforge.parallel.pipeline_parallel import PipelineModel
from lmforge.parallel.precision import check_float8, convert_to_float8
from lmforge.parallel.tensor_parallel import apply_tensor_parallel
from lmforge.parallel.validate import check_lora, check_neftune, choose_engine, model_parallel_size, stages_per_rank


@dataclass(frozen=True)
class ParallelStrategy:
    """How a model is spread and what memory it is spared; the fields are the options of `[parallel]` (config/run.py)."""

    engine: str = "auto"
    sharding: str | None = None
    shard_degree: int | None = None
    activation_checkpointing: str = "none"
    activation_checkpointing_every: int = 2
    cpu_offload: bool = False
    wrap_embedding: bool = True
    prefetch_blocks: int = 0
    reduce_every_micro_batch: bool = True
    limit_all_gathers: bool = True
    forward_prefetch: bool = False
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    pipeline_schedule: str = "1f1b"
    pipeline_stages_per_rank: int | None = None

    @property
    def model_parallel_size(self) -> int:
        """How many ranks share the work on the same rows."""
        return model_parallel_size(self)

    @property
    def stages_per_rank(self) -> int:
        return stages_per_rank(self)


def compile_blocks(model: LanguageModel) -> None:
    """Compile each repeated block in place: one graph serves them all, and the names of tensors stay as they are."""
    for block in model.blocks:
        block.compile(dynamic=False)


def parallelize(
    model: LanguageModel,
    loss_fn: LossFn,
    *,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    compile_model: bool = False,
    float8: bool = False,
    strategy: ParallelStrategy = ParallelStrategy(),
    init_weights: Callable[[LanguageModel], object] | None = None,
) -> ParallelModel:
    """Spread `model` over the ranks as `strategy` says.

    The model has fp32 weights on the ranks' device; or it is on the meta device and `fill` gives it its weights, once
    it is as small on each rank as it is going to be. Masters stay fp32. With `dtype` bf16, FSDP gathers and computes in
    bf16 and reduces gradients in fp32; the other engines use autocast, whose gradients are fp32 as well. With `float8` the
    products in the blocks are of float8 numbers. Raises UserError where the strategy or float8 does not fit the ranks or the
    model, the same on all.
    """
    engine = choose_engine(strategy, dist_ctx.world_size, dist_ctx.device.type)
    if model.lora_config is not None:
        check_lora(strategy, float8)
    if model.neftune_noise_alpha:
        check_neftune(strategy)
    if float8:
        check_float8(dist_ctx.device, dtype)
        convert_to_float8(model)
    wanted = parallel_dims(strategy, dist_ctx.world_size, dist_ctx.rank_info.local_world_size)
    if engine == "fsdp2" and not dist.is_initialized():
        # Sharding on one rank is one code path with many; it needs a group, if only of one.
        backend = "cpu:gloo,cuda:nccl" if dist_ctx.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = wanted.build_mesh(dist_ctx.device.type) if engine == "fsdp2" else None
    if mesh is not None and wanted.tensor_parallel_degree > 1:
        apply_tensor_parallel(model, mesh[TENSOR])
    if mesh is not None and wanted.context_parallel_degree > 1:
        model.context_parallel = ContextParallel(mesh[CONTEXT].get_group())
    apply_activation_checkpointing(model, strategy.activation_checkpointing, strategy.activation_checkpointing_every)
    if compile_model:
        compile_blocks(model)
    scored = ModelWithLoss(model, loss_fn)
    mixed = dtype if dtype != torch.float32 else None
    if engine != "fsdp2" and init_weights is not None:
        _materialize(model, dist_ctx.device if engine in ("single", "ddp") else torch.device("cpu"), init_weights)
    if engine == "single":
        return ParallelModel(scored, model, dist_ctx, mixed)
    if engine == "ddp":
        return DDPModel(scored, model, dist_ctx, mixed)
    common: dict[str, Any] = {
        "dtype": dtype,
        "cpu_offload": strategy.cpu_offload,
        "wrap_embedding": strategy.wrap_embedding,
        "reduce_every_micro_batch": strategy.reduce_every_micro_batch,
    }
    if engine == "fsdp1":
        common |= {"limit_all_gathers": strategy.limit_all_gathers, "forward_prefetch": strategy.forward_prefetch}
        return FSDP1Model(scored, model, dist_ctx, wanted, **common)
    about = {"dist_ctx": dist_ctx, "dims": wanted, "mesh": mesh, **common}
    sharded: FSDP2Model
    if wanted.pipeline_parallel_degree > 1:
        sharded = PipelineModel(model, loss_fn, strategy.stages_per_rank, **about)
    else:
        sharded = FSDP2Model(scored, model, **about, prefetch_blocks=strategy.prefetch_blocks)
    if init_weights is not None:
        _materialize(model, torch.device("cpu") if strategy.cpu_offload else dist_ctx.device, init_weights)
    return sharded


def _materialize(model: LanguageModel, device: torch.device, init_weights: Callable[[LanguageModel], object]) -> None:
    model.to_empty(device=device)
    model.tie_weights()
    init_weights(model)
