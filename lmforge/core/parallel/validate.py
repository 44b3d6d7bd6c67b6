"""Whether a model, its sequences and its micro-batches can be distributed as the options say.

It does not import torch, for dry runs.
"""

from collections.abc import Mapping

from lmforge.core.errors import UserError, nearest_multiples
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.activation_checkpointing import CHECKPOINTING_MODES
from lmforge.core.options.batch_plan import BatchPlan, divisors
from lmforge.core.options.sections import ParallelOptions

# The float8 kernels take only sizes that are multiples of this.
FLOAT8_SIZE_MULTIPLE = 16
_DEGREES = "parallel.tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree"


def choose_engine(options: ParallelOptions, world_size: int, device_type: str | None = None) -> str:
    """The engine that `auto` means for these ranks.

    Raises UserError where an engine lacks what another option requests.

    `device_type` is None where it is not known yet.
    """
    engine: str = options.engine
    if engine == "auto":
        needs_fsdp2 = options.cpu_offload or options.expert_parallel_degree > 1
        engine = "fsdp2" if world_size > 1 or needs_fsdp2 else "single"
    if engine == "single" and world_size > 1:
        raise UserError(
            f"parallel.engine = single: there are {world_size} ranks; use fsdp2 or ddp, or start"
            " one process"
        )
    if engine in ("ddp", "fsdp1") and world_size == 1:
        other = "single" if engine == "ddp" else "fsdp2, which works on one rank too"
        raise UserError(
            f"parallel.engine = {engine}: there is one rank only; start more with"
            f" --launch.processes, or use {other}"
        )
    if engine in ("single", "ddp"):
        way = "use engine = fsdp2 or fsdp1"
        if options.sharding not in (None, "no-shard") and engine == "ddp":
            way = f"{way}, or --parallel.sharding no-shard"
            raise UserError(f"parallel.sharding = {options.sharding}: ddp does not shard; {way}")
        if options.cpu_offload:
            raise UserError(f"parallel.cpu_offload: {engine} keeps everything on its device; {way}")
        if options.shard_degree and engine == "ddp":
            raise UserError(
                f"parallel.shard_degree = {options.shard_degree}: {engine} does not shard; {way}"
            )
    if engine == "fsdp1" and options.cpu_offload and device_type == "cpu":
        raise UserError(
            "parallel.cpu_offload: fsdp1 offloads from a GPU, and this device is a CPU; leave it"
            " out, or use fsdp2"
        )
    if options.model_parallel_size * options.expert_parallel_degree > 1 and engine != "fsdp2":
        raise UserError(
            f"{_DEGREES}, expert_parallel_degree: {engine} has none of these; use engine = fsdp2"
        )
    prefetch = f"parallel.prefetch_blocks = {options.prefetch_blocks}"
    if options.prefetch_blocks and options.pipeline_parallel_degree > 1:
        raise UserError(f"{prefetch}: a pipeline's schedule sets the order; leave it out")
    if options.prefetch_blocks and engine != "fsdp2":
        raise UserError(f"{prefetch}: only fsdp2 has it; fsdp1 has forward_prefetch")
    if engine != "fsdp1" and (options.forward_prefetch or not options.limit_all_gathers):
        raise UserError(
            "parallel.forward_prefetch, parallel.limit_all_gathers: only fsdp1 has them, not"
            f" {engine}; see prefetch_blocks"
        )
    return engine


def describe_unused_sharding(
    options: ParallelOptions, world_size: int, device_type: str
) -> list[str]:
    """A line for a recipe that shards, on one process."""
    if (
        options.sharding in (None, "no-shard")
        or choose_engine(options, world_size, device_type) != "single"
    ):
        return []
    return [
        f"parallel.sharding = {options.sharding}: not used, since one process has nothing to shard"
    ]


def check_lora(options: ParallelOptions, float8: bool, base_dtype: str | None = None) -> None:
    """Raise UserError where LoRA adapters cannot be trained with these options, beside matrices in
    `base_dtype`.
    """
    if base_dtype is not None and options.engine == "fsdp1":
        raise UserError(
            f"lora.base_dtype = {base_dtype}: not with parallel.engine = fsdp1, which parts numbers"
            " from their scale; use fsdp2"
        )
    if base_dtype is not None and options.expert_parallel_degree > 1:
        raise UserError(
            f"lora.base_dtype = {base_dtype}: not with parallel.expert_parallel_degree; shard with"
            " fsdp2 alone"
        )
    if options.tensor_parallel_degree > 1:
        raise UserError(
            "parallel.tensor_parallel_degree: not with LoRA adapters; shard with engine = fsdp2"
        )
    if float8:
        raise UserError("train.float8: not with LoRA adapters; leave one of the two out")


def check_float8_dtype(dtype: str) -> None:
    """Raise UserError where the compute dtype beside float8 is not "bf16"."""
    if dtype != "bf16":
        raise UserError(
            "train.float8: the rest is computed in bf16; use train.dtype = bf16, or leave"
            " train.float8 out"
        )


def check_float8_layers(config: ModelConfig, layers: Mapping[str, tuple[int, int]]) -> None:
    """Raise UserError where the linear layers of blocks, (inputs, outputs) by name, cannot be
    multiplied in float8.
    """
    if any(config.sparse_layers):
        raise UserError(
            "train.float8: not with a mixture of experts, whose products torchao does not train;"
            " leave it out"
        )
    if not layers:
        raise UserError(
            f"train.float8: a {config.model_type} model has no linear layers in its blocks; leave"
            " it out"
        )
    for name, (inputs, outputs) in layers.items():
        if inputs % FLOAT8_SIZE_MULTIPLE or outputs % FLOAT8_SIZE_MULTIPLE:
            raise UserError(
                f"train.float8: {name} is {inputs} × {outputs}, and float8 needs multiples of"
                f" {FLOAT8_SIZE_MULTIPLE}; choose other sizes, or leave train.float8 out"
            )


def why_not_compiled(options: ParallelOptions, device_type: str) -> str | None:
    """Why torch cannot compile blocks that are distributed so; None where it can.

    On a CPU, compiled attention that is computed again is taken for an operation that draws random
    numbers, and what the forward pass keeps of those is confused with the device mesh of tensor
    parallelism (torch 2.13). GPUs keep none.
    """
    mode = CHECKPOINTING_MODES[options.activation_checkpointing]
    recomputes = mode.recomputes_block(
        options.activation_checkpointing_every, options.activation_checkpointing_every
    )
    if (
        device_type == "cpu"
        and recomputes
        and not mode.keeps_operators
        and options.tensor_parallel_degree > 1
    ):
        return "tensor parallelism with full activation checkpointing cannot be compiled on a CPU"
    return None


def check_compiled(options: ParallelOptions, device_type: str) -> None:
    """Raise UserError with a way out, where torch cannot compile blocks that are distributed so."""
    if reason := why_not_compiled(options, device_type):
        way = "use parallel.activation_checkpointing = selective-ops, or train.compile = off"
        raise UserError(f"train.compile = on: {reason}; {way}")


def check_neftune(options: ParallelOptions) -> None:
    """Raise UserError where a rank does not have the full length of a document."""
    if options.context_parallel_degree > 1:
        raise UserError(
            "model.neftune_noise_alpha: not with parallel.context_parallel_degree, which cuts"
            " documents; leave one of them out"
        )


def check_parallel(options: ParallelOptions, config: ModelConfig, plan: BatchPlan) -> None:
    """Raise UserError with a way out, where the options do not fit model or batch."""
    if config.implementation == "transformers" and options.model_parallel_size > 1:
        raise UserError(f"{_DEGREES}: not with model.implementation = transformers")
    if options.activation_offload:
        _check_activation_offload(config, options.activation_checkpointing)
    _check_expert_parallel(config, options.expert_parallel_degree)
    _check_context_parallel(plan.sequence_length, options.context_parallel_degree)
    _check_tensor_parallel(
        config,
        options.tensor_parallel_degree,
        plan.sequence_length // options.context_parallel_degree,
    )
    _check_pipeline_parallel(
        config, options.pipeline_parallel_degree, options.stages_per_rank, plan
    )


def _check_activation_offload(config: ModelConfig, checkpointing: str) -> None:
    if config.implementation == "transformers":
        raise UserError(
            "parallel.activation_offload: not with model.implementation = transformers; checkpoint"
            " them instead"
        )
    if CHECKPOINTING_MODES[checkpointing].keeps_operators:
        mode = f"parallel.activation_checkpointing = {checkpointing}"
        raise UserError(
            f"parallel.activation_offload: {mode} keeps what it saves on the device; use none or"
            " full"
        )


def _check_expert_parallel(config: ModelConfig, degree: int) -> None:
    if degree == 1:
        return
    requested = f"parallel.expert_parallel_degree = {degree}"
    experts = config.num_experts
    if config.implementation == "transformers" or not any(config.sparse_layers):
        kind = (
            "wrapped from transformers"
            if config.implementation == "transformers"
            else "without experts"
        )
        raise UserError(f"{requested}: not with a model {kind}; leave it out")
    if experts % degree:
        raise UserError(
            f"{requested}: {experts} experts do not divide by it; use one of"
            f" {', '.join(map(str, divisors(experts)))}"
        )


def _check_context_parallel(sequence_length: int, degree: int) -> None:
    pieces = 2 * degree
    if degree > 1 and sequence_length % pieces:
        raise UserError(
            f"parallel.context_parallel_degree = {degree}: sequences of {sequence_length} tokens"
            f" are cut into {pieces} equal pieces; nearest data.sequence_length:"
            f" {nearest_multiples(sequence_length, pieces)}"
        )


def _check_tensor_parallel(config: ModelConfig, degree: int, local_length: int) -> None:
    """`local_length`: tokens of each sequence on a rank."""
    if degree == 1:
        return
    requested = f"parallel.tensor_parallel_degree = {degree}"
    if why := config.family.why_not_split:
        raise UserError(f"{requested}: {why}; use sharding alone")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {name: getattr(config, name) for name in names}
    if config.n_shared_experts:
        sizes["n_shared_experts × moe_intermediate_size"] = config.shared_expert_size
    elif config.shared_expert_size:
        sizes["shared_expert_intermediate_size"] = config.shared_expert_size
    for name, size in sizes.items():
        if size % degree:
            fitting = [
                each
                for each in range(2, degree)
                if all(other % each == 0 for other in sizes.values())
            ]
            way = f"use {fitting[-1]}" if fitting else "leave it out"
            raise UserError(f"{requested}: {name} = {size} does not divide by it; {way}")
    if local_length % degree:
        raise UserError(
            f"{requested}: the {local_length} tokens of a sequence on each rank do not divide by"
            " it; choose another data.sequence_length"
        )


def _check_pipeline_parallel(
    config: ModelConfig, degree: int, stages_per_rank: int, plan: BatchPlan
) -> None:
    if degree == 1:
        return
    requested = f"parallel.pipeline_parallel_degree = {degree}"
    if config.tie_word_embeddings:
        raise UserError(
            f"{requested}: model.tie_word_embeddings puts one tensor at both ends of it; untie"
            " them, or only shard"
        )
    blocks = config.num_hidden_layers
    num_stages = degree * stages_per_rank
    if blocks < num_stages:
        raise UserError(
            f"{requested}: {blocks} blocks do not make {num_stages} stages; use fewer ranks or"
            " stages"
        )
    # 1F1B fills the pipeline before its first backward pass; the interleaved schedule goes in
    # rounds.
    is_interleaved = stages_per_rank > 1
    if plan.accumulation >= degree and not (is_interleaved and plan.accumulation % degree):
        return
    local_batch = plan.micro_batch_size * plan.accumulation
    sizes = [size for size in divisors(local_batch) if size <= local_batch // degree]
    fitting = [size for size in sizes if not is_interleaved or local_batch // size % degree == 0]
    way = (
        f"use train.micro_batch_size = {fitting[-1]}"
        if fitting
        else f"use a global batch of {degree} or more sequences"
    )
    needed = f"a multiple of {degree}" if is_interleaved else f"at least {degree}"
    count = f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'} per step"
    raise UserError(f"{requested}: {count}, and its schedule needs {needed}; {way}")
