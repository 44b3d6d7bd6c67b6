"""Whether a model, its rows and its micro-batches can be spread as asked: known before torch is imported."""

from lmforge.config import BatchPlan
from lmforge.errors import Mistake
from lmforge.model.shapes import ModelConfig
from lmforge.parallel.mesh import Chosen

STAGES = 2  # on each rank of an interleaved pipeline, unless said otherwise


def model_ranks(chosen: Chosen) -> int:
    """How many ranks share the work on the same rows."""
    return chosen.tensor_ranks * chosen.context_ranks * chosen.pipeline_ranks


def stages_a_rank(chosen: Chosen) -> int:
    """How many stages of a pipeline each rank has."""
    return (chosen.pipeline_stages or STAGES) if chosen.pipeline_schedule == "interleaved" else 1


def choose_engine(strategy: Chosen, ranks: int, device_type: str | None = None) -> str:
    """The engine that `auto` means for these ranks. Raises Mistake where an engine lacks what is asked of it.

    `device_type` None is not known yet.
    """
    engine = strategy.engine
    if engine == "auto":
        engine = "fsdp2" if ranks > 1 or strategy.offload else "alone"
    if engine == "alone" and ranks > 1:
        raise Mistake(f"parallel.engine = alone: there are {ranks} ranks; use fsdp2 or ddp, or start one process")
    if engine in ("ddp", "fsdp1") and ranks == 1:
        other = "alone" if engine == "ddp" else "fsdp2, which works on one rank too"
        raise Mistake(f"parallel.engine = {engine}: there is one rank only; start more with --launch.processes, or use {other}")
    if engine in ("alone", "ddp"):
        if strategy.sharding not in (None, "no-shard"):
            raise Mistake(f"parallel.sharding = {strategy.sharding}: {engine} does not shard; use engine = fsdp2 or fsdp1")
        if strategy.offload:
            raise Mistake(f"parallel.offload: {engine} keeps everything on its device; use engine = fsdp2 or fsdp1")
        if strategy.hybrid_ranks:
            raise Mistake(
                f"parallel.hybrid_ranks = {strategy.hybrid_ranks}: {engine} does not shard; use engine = fsdp2 or fsdp1"
            )
    if engine == "fsdp1" and strategy.offload and device_type == "cpu":
        raise Mistake("parallel.offload: fsdp1 offloads from a GPU, and here all is in host memory; leave it out, or use fsdp2")
    if model_ranks(strategy) > 1 and engine != "fsdp2":
        raise Mistake(f"parallel.tensor_ranks, context_ranks, pipeline_ranks: {engine} has none of these; use engine = fsdp2")
    if strategy.prefetch and strategy.pipeline_ranks > 1:
        raise Mistake(f"parallel.prefetch = {strategy.prefetch}: a pipeline's schedule sets the order; leave it out")
    if strategy.prefetch and engine != "fsdp2":
        raise Mistake(f"parallel.prefetch = {strategy.prefetch}: only fsdp2 counts units; fsdp1 has forward_prefetch")
    if engine != "fsdp1" and (strategy.forward_prefetch or not strategy.limit_all_gathers):
        raise Mistake(
            f"parallel.forward_prefetch, parallel.limit_all_gathers: {engine} has no such switch, only fsdp1; see prefetch"
        )
    return engine


def check_adapters(chosen: Chosen, float8: bool) -> None:
    """Raise Mistake where low-rank adapters cannot be trained as chosen."""
    if chosen.tensor_ranks > 1 or chosen.pipeline_ranks > 1:
        raise Mistake("parallel.tensor_ranks, pipeline_ranks: not with low-rank adapters; shard with engine = fsdp2 instead")
    if float8:
        raise Mistake("train.float8: not with low-rank adapters; leave one of the two out")


def check_neftune(chosen: Chosen) -> None:
    """Raise Mistake where a rank does not see how long a document is."""
    if chosen.context_ranks > 1:
        raise Mistake("model.neftune_alpha: not with parallel.context_ranks, which cut documents; leave one of the two out")


def check_fits(chosen: Chosen, shape: ModelConfig, plan: BatchPlan) -> None:
    """Raise Mistake, which says the way out, where tensor, context or pipeline parallelism cannot be had as chosen."""
    if shape.family == "transformers" and model_ranks(chosen) > 1:
        raise Mistake("parallel.tensor_ranks, context_ranks, pipeline_ranks: not with model.implementation = transformers")
    _check_length(plan.length, chosen.context_ranks)
    _check_tensor_ranks(shape, chosen.tensor_ranks, plan.length // chosen.context_ranks)
    _check_pipeline(shape, chosen.pipeline_ranks, stages_a_rank(chosen), plan)


def _check_length(length: int, ranks: int) -> None:
    """Raise Mistake where rows of `length` tokens cannot be shared out over a context of `ranks`."""
    if ranks > 1 and length % (2 * ranks):
        below = length // (2 * ranks) * 2 * ranks
        near = f"{below} or {below + 2 * ranks}" if below else f"{2 * ranks}"
        raise Mistake(
            f"parallel.context_ranks = {ranks}: rows of {length} tokens are cut into {2 * ranks} equal pieces; nearest"
            f" data.length: {near}"
        )


def _check_tensor_ranks(shape: ModelConfig, ranks: int, local_length: int) -> None:
    """Raise Mistake where a model of `shape` cannot be split over `ranks`; a rank reads rows of `local_length` tokens."""
    if ranks == 1:
        return
    asked = f"parallel.tensor_ranks = {ranks}"
    if shape.model_type == "gpt2":
        raise Mistake(f"{asked}: gpt2 keeps queries, keys and values in one matrix, which is not split; use sharding alone")
    counts = {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
    }
    for name, count in counts.items():
        if count % ranks:
            fitting = [size for size in range(2, ranks) if all(each % size == 0 for each in counts.values())]
            way = f"use {fitting[-1]}" if fitting else "leave it out"
            raise Mistake(f"{asked}: {name} = {count} does not divide by it; {way}")
    if local_length % ranks:
        raise Mistake(
            f"{asked}: the {local_length} tokens of a row that a rank reads do not divide by it; choose another data.length"
        )


def _check_pipeline(shape: ModelConfig, ranks: int, stages: int, plan: BatchPlan) -> None:
    """Raise Mistake where a model cannot be run as a pipeline over `ranks` with `stages` on each."""
    if ranks == 1:
        return
    asked = f"parallel.pipeline_ranks = {ranks}"
    if shape.tie_word_embeddings:
        raise Mistake(f"{asked}: model.tie_word_embeddings puts one tensor at both ends of it; untie them, or only shard")
    blocks = shape.num_hidden_layers
    if blocks < ranks * stages:
        raise Mistake(f"{asked}: {blocks} blocks do not make {ranks * stages} stages; use fewer ranks or stages")
    # 1F1B fills the pipeline before its first backward pass; the interleaved order goes in rounds.
    short = stages == 1 and plan.accumulation < ranks
    if short or (stages > 1 and plan.accumulation % ranks):
        rows = plan.micro_batch_rows * plan.accumulation
        sizes = [size for size in range(1, rows // ranks + 1) if rows % size == 0]
        fitting = [size for size in sizes if stages == 1 or rows // size % ranks == 0]
        way = f"use train.micro_batch_rows = {fitting[-1]}" if fitting else f"use a global batch of {ranks} or more rows"
        needed = f"at least {ranks}" if stages == 1 else f"a multiple of {ranks}"
        made = f"{plan.accumulation} micro-batch{'' if plan.accumulation == 1 else 'es'} a step"
        raise Mistake(f"{asked}: {made}, and its schedule needs {needed}; {way}")
