"""Lines about a recipe and its model: for `lmforge show`, for `--dry-run` of the training verbs,
and for plans.
"""

from dataclasses import replace

from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.errors import format_bytes, prefix_errors
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import (
    FLOPS_CONVENTION,
    describe_experts,
    flops_per_token,
    parameter_count,
)
from lmforge.core.model.state_bytes import DTYPE_BYTES, checkpoint_bytes, count_all
from lmforge.core.options.mixture import tokens_by_length
from lmforge.core.options.options import to_toml
from lmforge.core.options.sections import ModelOptions, OptimizerOptions
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.parallel.dims import parallel_dims, plan_batches
from lmforge.core.parallel.validate import check_parallel, choose_engine
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.hf.resolve import model_config_from_options
from lmforge.ops.verbs.show.describe_data import describe_data
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig, TunedConfig


def dry_run(config: StageConfig, everything: bool = False) -> str:
    """What `--dry-run` prints. Raises UserError where the run would be refused for its recipe."""
    if isinstance(config, TunedConfig):
        config.require_inputs()
    return describe_recipe(config, everything)


def describe_recipe(config: StageConfig, everything: bool = False) -> str:
    """The batch arithmetic and what the run costs, then the recipe: the options that differ from
    their defaults, or all.

    Raises UserError where they do not fit together.
    """
    rank_info = read_rank_info()
    ranks = rank_info.world_size if rank_info.launched else config.launch.world_size
    plan = plan_batches(config, ranks)
    steps = config.train.steps
    passes = config.train.epochs
    phases = config.data.phases if isinstance(config, PretrainConfig) else ()
    by_length = tokens_by_length(phases, steps, plan.global_batch_size, plan.sequence_length)
    total = sum(tokens for _, tokens in by_length)
    if passes is None:
        length = f"{steps:,} steps = {total:,} tokens"
    else:
        length = f"{passes:g} passes over the data"
    lines = [f"batch      {plan}", f"run        {length}"]
    vocab_size = None
    if isinstance(config, PretrainConfig):
        data_lines, vocab_size = describe_data(config)
        lines += data_lines
    model = resolve_model(config, vocab_size)
    optimizer = config.optimizer
    master_dtype = config.train.master_dtype
    lines.append(describe_size(model, config.data.sequence_length))
    flops = float(flops_per_token(model, config.data.sequence_length))
    state_bytes = checkpoint_bytes(optimizer, master_dtype, count_all(model))
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.core.stages import parameter_counts  # with torch, which knows the layers

        counts = parameter_counts.count_parameters(model, parameter_counts.get_lora_config(config))
        flops = parameter_counts.training_flops_per_token(
            config, model, config.data.sequence_length
        )
        state_bytes = checkpoint_bytes(optimizer, master_dtype, counts)
        added = counts.total - parameter_count(model).total
        lines.append(
            f"adapters   {added:,} more parameters; {counts.trained:,} are trained, so {flops:.3g}"
            f" FLOPs per token and {format_bytes(state_bytes)} of weights and optimizer states"
        )
    else:
        lines.append(describe_memory(model, optimizer, master_dtype))
    if (teacher := resolve_teacher(config)) is not None:
        lines.append(_describe_teacher(config, teacher))
        check_parallel(config.parallel, teacher, plan)
    if config.model.parametrization != "standard":
        from lmforge.ops.verbs.show.tensor_table import describe_tensors  # with torch

        lines += describe_tensors(config, model)
    check_parallel(config.parallel, model, plan)
    lines += _describe_sharding(config, ranks, state_bytes)
    if passes is None:
        if not phases:
            total_flops = flops * total
        else:
            total_flops = sum(
                flops_per_token(model, length) * tokens for length, tokens in by_length
            )
        lines.append(f"compute    {total_flops:.3g} FLOPs in the whole run")
    shown = "what differs from the defaults; --dry-run all prints every option"
    if everything:
        shown = "every option"
    return "\n".join(
        [*lines, "", f"# {shown}", to_toml(config, changed_only=not everything).rstrip()]
    )


def _describe_teacher(config: StageConfig, teacher: ModelConfig) -> str:
    count = parameter_count(teacher)
    dtype = "bf16" if config.train.dtype == "auto" else config.train.dtype
    return (
        f"teacher    {count.total:,} parameters, {format_bytes(count.total * DTYPE_BYTES[dtype])}"
        f" in {dtype}; {flops_per_token(teacher, config.data.sequence_length) // 3:.3g} more FLOPs"
        " per token, of its forward pass"
    )


def resolve_model(config: StageConfig, vocab_size: int | None) -> ModelConfig:
    """The model config of a recipe, also where it begins from a checkpoint. Raises UserError."""
    model = _resolve(config.model, vocab_size)
    if isinstance(config, AlignConfig) and config.align.method == "reward":
        return replace(model, reward=True)
    return model


def resolve_teacher(config: StageConfig) -> ModelConfig | None:
    """The model config of the teacher that scores the batches of a recipe; None where there is
    none. Raises UserError.
    """
    if not isinstance(config, DistillConfig):
        return None
    config.require_teacher()
    if config.distill.teacher is None or config.distill.logprobs:
        return None
    with prefix_errors("distill.teacher"):
        return _resolve(ModelOptions(source=config.distill.teacher))


def _resolve(options: ModelOptions, vocab_size: int | None = None) -> ModelConfig:
    source = options.source
    if source is None or kind_of(source) in (Kind.HUB_NAME, Kind.HF_FOLDER):
        return model_config_from_options(options, vocab_size)
    from lmforge.hf.pretrained import find_pretrained  # with torch, which reads checkpoints

    return find_pretrained(source).resolve_model_config(options, vocab_size)


def _describe_sharding(config: StageConfig, world_size: int, state_bytes: int) -> list[str]:
    """How FSDP distributes the model over the ranks.

    Raises UserError where it does not fit them.
    """
    parallel = config.parallel
    if choose_engine(parallel, world_size) in ("single", "ddp"):
        return []
    rank_info = read_rank_info()
    dims = parallel_dims(
        parallel,
        world_size,
        rank_info.local_world_size if rank_info.launched else config.launch.processes,
    )
    copies = "one copy"
    if dims.is_hybrid:
        copies = f"{dims.replicate_degree} copies, each"
    where = "its memory"
    if parallel.cpu_offload:
        where = "host memory"
    ranks = dims.fsdp_degree * parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree
    # The ranks with embedding or head hold more.
    average = ""
    if parallel.splits_model:
        average = ", on average"
    where = (
        f"{format_bytes(state_bytes / ranks)} of weights and optimizer states in {where}{average}"
    )
    return [f"sharding   {dims}: {copies} over {ranks} of {world_size} ranks; each holds {where}"]


def describe_size(model: ModelConfig, sequence_length: int) -> str:
    """Parameters and FLOPs per token of a model."""
    count = parameter_count(model)
    experts = ""
    if any(model.sparse_layers):
        experts = f"\nexperts    {describe_experts(model)}"
    return (
        f"model      {count.total:,} parameters ({count.active_matmul:,} multiply each token),"
        f" {flops_per_token(model, sequence_length):.3g} FLOPs per token at length"
        f" {sequence_length:,}{experts}"
    )


def describe_memory(model: ModelConfig, optimizer: OptimizerOptions, master_dtype: str) -> str:
    """Memory of weights and optimizer states of a model that `optimizer` trains."""
    return (
        f"memory     {format_bytes(parameter_count(model).total * DTYPE_BYTES[master_dtype])} of"
        f" {master_dtype} weights;"
        f" {format_bytes(checkpoint_bytes(optimizer, master_dtype, count_all(model)))} with the"
        f" states of {optimizer.name}, over all ranks that shard it"
    )


DEFAULT_SEQUENCE_LENGTH = 4096


def describe_model(model: ModelConfig, title: str, sequence_length: int | None = None) -> str:
    """A model config and what it costs at a sequence length (default: the model's, up to
    DEFAULT_SEQUENCE_LENGTH).
    """
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} for keys and values)"
    widths = {False: str(model.intermediate_size), True: f"of experts {model.expert_size}"}
    feed_forward = [widths[sparse] for sparse in sorted(set(model.sparse_layers))]
    length = sequence_length or min(model.max_position_embeddings, DEFAULT_SEQUENCE_LENGTH)
    return (
        f"{title}\n"
        f"config     {model.model_type}: {model.num_hidden_layers} layers, width"
        f" {model.hidden_size},"
        f" feed-forward {' and '.join(feed_forward)}, {heads}\n"
        f"vocabulary {model.vocab_size:,}, {'tied' if model.tie_word_embeddings else 'untied'};"
        f" positions {model.max_position_embeddings:,}\n"
        f"{describe_size(model, length)}\n{describe_memory(model, OptimizerOptions(), 'fp32')}\n"
        f"{FLOPS_CONVENTION}"
    )
