"""Whether a model, its rows and its micro-batches can be spread as asked: known before torch is imported."""

from lmforge.config import BatchPlan, ParallelOptions
from lmforge.errors import Mistake
from lmforge.model.shapes import ModelConfig


def check_fits(chosen: ParallelOptions, shape: ModelConfig, plan: BatchPlan) -> None:
    """Raise Mistake, which says the way out, where tensor, context or pipeline parallelism cannot be had as chosen."""
    if shape.family == "transformers" and chosen.tensor_ranks * chosen.context_ranks * chosen.pipeline_ranks > 1:
        raise Mistake("parallel.tensor_ranks, context_ranks, pipeline_ranks: not with model.implementation = transformers")
    _check_length(plan.length, chosen.context_ranks)
    _check_tensor_ranks(shape, chosen.tensor_ranks, plan.length // chosen.context_ranks)
    stages = chosen.pipeline_stages if chosen.pipeline_schedule == "interleaved" else 1
    _check_pipeline(shape, chosen.pipeline_ranks, stages, plan.accumulation)


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


def _check_pipeline(shape: ModelConfig, ranks: int, stages: int, micro_batches: int) -> None:
    """Raise Mistake where a model cannot be run as a pipeline over `ranks` with `stages` on each."""
    if ranks == 1:
        return
    asked = f"parallel.pipeline_ranks = {ranks}"
    if shape.tie_word_embeddings:
        raise Mistake(f"{asked}: model.tie_word_embeddings puts one tensor at both ends of it; untie them, or only shard")
    blocks = shape.num_hidden_layers
    if blocks < ranks * stages:
        raise Mistake(f"{asked}: {blocks} blocks do not make {ranks * stages} stages; use fewer ranks or stages")
    if stages > 1 and micro_batches % ranks:
        near = max(ranks, micro_batches // ranks * ranks)
        raise Mistake(
            f"parallel.pipeline_schedule = interleaved: {micro_batches} micro-batches a step do not divide into rounds of"
            f" {ranks}; choose train.micro_batch_rows so that there are {near} or another multiple of {ranks}"
        )
