"""Whether a model, its rows and its micro-batches can be spread as asked: known before torch is imported."""

from lmforge.config.batch_plan import BatchPlan
from lmforge.errors import UserError
from lmforge.model.config import ModelConfig
from lmforge.parallel.dims import ParallelSettings

DEFAULT_INTERLEAVED_STAGES = 2  # on each rank of an interleaved pipeline, unless said otherwise


def model_parallel_size(options: ParallelSettings) -> int:
    """How many ranks share the work on the same rows."""
    return options.tensor_parallel_degree * options.context_parallel_degree * options.pipeline_parallel_degree


def stages_per_rank(options: ParallelSettings) -> int:
    """How many stages of a pipeline each rank has."""
    return (options.pipeline_stages_per_rank or DEFAULT_INTERLEAVED_STAGES) if options.pipeline_schedule == "interleaved" else 1


def choose_engine(options: ParallelSettings, world_size: int, device_type: str | None = None) -> str:
    """The engine that `auto` means for these ranks. Raises UserError where an engine lacks what is asked of it.

    `device_type` None is not known yet.
    """
    engine = options.engine
    if engine == "auto":
        engine = "fsdp2" if world_size > 1 or options.cpu_offload else "single"
    if engine == "single" and world_size > 1:
        raise UserError(f"parallel.engine = single: there are {world_size} ranks; use fsdp2 or ddp, or start one process")
    if engine in ("ddp", "fsdp1") and world_size == 1:
        other = "single" if engine == "ddp" else "fsdp2, which works on one rank too"
        raise UserError(
            f"parallel.engine = {engine}: there is one rank only; start more with --launch.processes, or use {other}"
        )
    if engine in ("single", "ddp"):
        if options.sharding not in (None, "no-shard"):
            raise UserError(f"parallel.sharding = {options.sharding}: {engine} does not shard; use engine = fsdp2 or fsdp1")
        if options.cpu_offload:
            raise UserError(f"parallel.cpu_offload: {engine} keeps everything on its device; use engine = fsdp2 or fsdp1")
        if options.shard_degree:
            raise UserError(
                f"parallel.shard_degree = {options.shard_degree}: {engine} does not shard; use engine = fsdp2 or fsdp1"
            )
    if engine == "fsdp1" and options.cpu_offload and device_type == "cpu":
        raise UserError(
            "parallel.cpu_offload: fsdp1 offloads from a GPU, and here all is in host memory; leave it out, or use fsdp2"
        )
    if model_parallel_size(options) > 1 and engine != "fsdp2":
        raise UserError(
            f"parallel.tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree: {engine} has none of these; use engine = fsdp2"
        )
    if options.prefetch_blocks and options.pipeline_parallel_degree > 1:
        raise UserError(
            f"parallel.prefetch_blocks = {options.prefetch_blocks}: a pipeline's schedule sets the order; leave it out"
        )
    if options.prefetch_blocks and engine != "fsdp2":
        raise UserError(
            f"parallel.prefetch_blocks = {options.prefetch_blocks}: only fsdp2 counts units; fsdp1 has forward_prefetch"
        )
    if engine != "fsdp1" and (options.forward_prefetch or not options.limit_all_gathers):
        raise UserError(
            f"parallel.forward_prefetch, parallel.limit_all_gathers: {engine} has no such switch, only fsdp1; see prefetch"
        )
    return engine


def check_lora(options: ParallelSettings, float8: bool) -> None:
    """Raise UserError where low-rank adapters cannot be trained as chosen."""
    if options.tensor_parallel_degree > 1 or options.pipeline_parallel_degree > 1:
        raise UserError(
            "parallel.tensor_parallel_degree, pipeline_parallel_degree: not with low-rank adapters; shard with engine = fsdp2 instead"
        )
    if float8:
        raise UserError("train.float8: not with low-rank adapters; leave one of the two out")


def check_neftune(options: ParallelSettings) -> None:
    """Raise UserError where a rank does not see how long a document is."""
    if options.context_parallel_degree > 1:
        raise UserError(
            "model.neftune_noise_alpha: not with parallel.context_parallel_degree, which cut documents; leave one of the two out"
        )


def check_parallel(options: ParallelSettings, model_config: ModelConfig, plan: BatchPlan) -> None:
    """Raise UserError, which says the way out, where tensor, context or pipeline parallelism cannot be had as chosen."""
    if model_config.family == "transformers" and model_parallel_size(options) > 1:
        raise UserError(
            "parallel.tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree: not with model.implementation = transformers"
        )
    _check_context_parallel(plan.length, options.context_parallel_degree)
    _check_tensor_parallel(model_config, options.tensor_parallel_degree, plan.length // options.context_parallel_degree)
    _check_pipeline_parallel(model_config, options.pipeline_parallel_degree, stages_per_rank(options), plan)


def _check_context_parallel(sequence_length: int, degree: int) -> None:
    """Raise UserError where rows of `length` tokens cannot be shared out over a context of `ranks`."""
    if degree > 1 and sequence_length % (2 * degree):
        below = sequence_length // (2 * degree) * 2 * degree
        near = f"{below} or {below + 2 * degree}" if below else f"{2 * degree}"
        raise UserError(
            f"parallel.context_parallel_degree = {degree}: rows of {sequence_length} tokens are cut into {2 * degree} equal pieces; nearest"
            f" data.sequence_length: {near}"
        )


def _check_tensor_parallel(model_config: ModelConfig, degree: int, local_sequence_length: int) -> None:
    """Raise UserError where a model of `shape` cannot be split over `ranks`; a rank reads rows of `local_length` tokens."""
    if degree == 1:
        return
    asked = f"parallel.tensor_parallel_degree = {degree}"
    if model_config.model_type == "gpt2":
        raise UserError(f"{asked}: gpt2 keeps queries, keys and values in one matrix, which is not split; use sharding alone")
    counts = {
        "num_attention_heads": model_config.num_attention_heads,
        "num_key_value_heads": model_config.num_key_value_heads,
        "intermediate_size": model_config.intermediate_size,
    }
    for name, count in counts.items():
        if count % degree:
            fitting = [size for size in range(2, degree) if all(each % size == 0 for each in counts.values())]
            way = f"use {fitting[-1]}" if fitting else "leave it out"
            raise UserError(f"{asked}: {name} = {count} does not divide by it; {way}")
    if local_sequence_length % degree:
        raise UserError(
            f"{asked}: the {local_sequence_length} tokens of a row that a rank reads do not divide by it; choose another data.sequence_length"
        )


def _check_pipeline_parallel(model_config: ModelConfig, degree: int, num_stages: int, plan: BatchPlan) -> None:
    """Raise UserError where a model cannot be run as a pipeline over `ranks` with `stages` on each."""
    if degree == 1:
        return
    asked = f"parallel.pipeline_parallel_degree = {degree}"
    if model_config.tie_word_embeddings:
        raise UserError(f"{asked}: model.tie_word_embeddings puts one tensor at both ends of it; untie them, or only shard")
    blocks = model_config.num_hidden_layers
    if blocks < degree * num_stages:
        raise UserError(f"{asked}: {blocks} blocks do not make {degree * num_stages} stages; use fewer ranks or stages")
    # 1F1B fills the pipeline before its first backward pass; the interleaved order goes in rounds.
    short = num_stages == 1 and plan.accumulation < degree
    if short or (num_stages > 1 and plan.accumulation % degree):
        rows = plan.micro_batch_size * plan.accumulation
        sizes = [size for size in range(1, rows // degree + 1) if rows % size == 0]
        fitting = [size for size in sizes if num_stages == 1 or rows // size % degree == 0]
        way = f"use train.micro_batch_size = {fitting[-1]}" if fitting else f"use a global batch of {degree} or more rows"
        needed = f"at least {degree}" if num_stages == 1 else f"a multiple of {degree}"
        made = f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'} a step"
        raise UserError(f"{asked}: {made}, and its schedule needs {needed}; {way}")
