"""`parallelize`: all transformations of a model before it trains, for all models and engines."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lmforge.core import registry
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.model.attention import ContextParallel
from lmforge.core.model.layers import LanguageModel
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.core.parallel.dims import CONTEXT, TENSOR, ParallelDims, parallel_dims
from lmforge.core.parallel.parallel_model import LossFn, ParallelModel
from lmforge.core.parallel.precision import check_float8, convert_to_float8
from lmforge.core.parallel.validate import check_lora, check_neftune, choose_engine

# The number of graphs of a block after which torch would run it uncompiled.
MAX_GRAPHS = 64


def parallelize(
    model: LanguageModel,
    loss_fn: LossFn,
    *,
    dist_ctx: DistributedContext,
    dtype: torch.dtype,
    options: ParallelOptions,
    compile_model: bool = False,
    float8: bool = False,
    init_weights: Callable[[LanguageModel], object] | None = None,
    loads_weights: bool = False,
) -> ParallelModel:
    """Distribute `model` over the ranks as `options` say, in place.

    The model has its weights on the ranks' device; or it is on the meta device, and `init_weights`
    fills it: for `single` and DDP before it is wrapped, for FSDP after it has been sharded. With
    `loads_weights` that reads files; the flat parts of FSDP1 cannot be read, so it then comes
    before FSDP1.

    Master weights keep their dtype. With `dtype` bf16, FSDP gathers and computes in bf16 and
    reduces gradients in fp32; the other engines use autocast and working_weights.py, whose
    gradients are fp32 as well. With `float8` the matrix products of the blocks are in float8.

    The order is float8 → expert parallel → tensor parallel → context parallel → activation
    checkpointing → activation offload → compile → shard (a pipeline is cut into stages first) → init weights;
    docs/architecture.md says why each stands where it does.

    Raises UserError, the same on all ranks, where the options or float8 do not fit the ranks or the
    model.
    """
    engine = choose_engine(options, dist_ctx.world_size, dist_ctx.device.type)
    if model.lora_config is not None:
        check_lora(options, float8, model.lora_config.base_dtype)
    if model.setup.neftune_noise_alpha:
        check_neftune(options)
    if float8:
        check_float8(dist_ctx.device, dtype)
        convert_to_float8(model)
    dims = parallel_dims(options, dist_ctx.world_size, dist_ctx.rank_info.local_world_size)
    mesh = _build_mesh(dims, dist_ctx) if engine == "fsdp2" else None
    if mesh is not None and options.expert_parallel_degree > 1:
        registry.get("transform", "expert-parallel").load()(model, *dims.expert_meshes(mesh))
    if mesh is not None and options.tensor_parallel_degree > 1:
        registry.get("transform", "tensor-parallel").load()(model, mesh[TENSOR])
    if mesh is not None and options.context_parallel_degree > 1:
        context_parallel = ContextParallel(mesh[CONTEXT].get_group())
        model.setup = replace(model.setup, context_parallel=context_parallel)
        if model.balance is not None:
            model.balance.groups += (context_parallel.group,)
    apply_activation_checkpointing(
        model, options.activation_checkpointing, options.activation_checkpointing_every
    )
    if options.activation_offload:
        registry.get("transform", "activation-offload").load()(model, dist_ctx.device)
    if compile_model:
        _compile(model, dist_ctx.device)
    device = torch.device("cpu") if engine == "fsdp1" or options.cpu_offload else dist_ctx.device
    # DDP broadcasts weights when it wraps, and FSDP1 takes over their memory.
    if engine != "fsdp2" and init_weights is not None:
        _allocate(model, device, device)
        if engine != "fsdp1" or loads_weights:
            init_weights(model)
    wrapper = "pipeline" if options.pipeline_parallel_degree > 1 else engine
    engine_class: type[ParallelModel] = registry.get("engine", wrapper).load()
    compute_dtype = None if dtype == torch.float32 else dtype
    parallel_model = engine_class(model, loss_fn, dist_ctx, dims, compute_dtype, mesh)
    if engine == "fsdp2" and init_weights is not None:
        _allocate(model, device, dist_ctx.device)
        init_weights(model)
    elif engine == "fsdp1" and init_weights is not None and not loads_weights:
        init_weights(model)
    return parallel_model


def _compile(model: LanguageModel, device: torch.device) -> None:
    # Graphs with and without gradients, dropout and adapters, for each window: by default torch
    # stops compiling after 8.
    torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
    # In place: one graph serves them all, and the names of tensors do not change.
    for block in model.blocks:
        block.compile(dynamic=False)
    model.lm_head.passes = "fused" if device.type == "cuda" else "stored"


def _build_mesh(dims: ParallelDims, dist_ctx: DistributedContext) -> DeviceMesh:
    device_type = dist_ctx.device.type
    if not dist.is_initialized():
        # FSDP2 takes the same code path on one rank as on many, and needs a process group for it.
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dims.build_mesh(device_type)


def _allocate(model: LanguageModel, device: torch.device, buffers_device: torch.device) -> None:
    model.to_empty(device=device)
    for module in model.modules():  # not those of offloaded parameters
        module._buffers |= {
            name: each if each is None else each.to(buffers_device)
            for name, each in module._buffers.items()
        }
    model.tie_weights()
