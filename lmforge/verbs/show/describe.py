"""Lines about a recipe, its data and its model: for `lmforge show`, for `--dry-run` of the training verbs, and for plans."""

import re
from collections.abc import Sequence
from dataclasses import replace

from lmforge.cluster.rank_info import read_rank_info
from lmforge.config.align import AlignConfig
from lmforge.config.batch_plan import batch_plan
from lmforge.config.mixture import is_remote, tokens_by_length
from lmforge.config.options import to_toml
from lmforge.config.sections import OptimizerOptions
from lmforge.config.stage import PretrainConfig, StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.data.mixture import MixedDataset
from lmforge.errors import format_bytes
from lmforge.interop.kinds import Kind, kind_of
from lmforge.interop.resolve import model_config_from_options
from lmforge.model.config import ModelConfig
from lmforge.model.flops import FLOPS_CONVENTION, describe_experts, flops_per_token, parameter_count
from lmforge.parallel.dims import parallel_dims, plan_batches
from lmforge.parallel.validate import check_parallel, choose_engine
from lmforge.plan.memory import DTYPE_BYTES, checkpoint_bytes, count_all
from lmforge.stages.training_data import TokenSources, find_missing_folders


def dry_run(config: StageConfig, everything: bool = False) -> str:
    """What `--dry-run` prints. Raises UserError where the run would be refused for its recipe."""
    if isinstance(config, TunedConfig):
        config.require_inputs()
    return describe_recipe(config, everything)


def describe_recipe(config: StageConfig, everything: bool = False) -> str:
    """The batch arithmetic and what the run costs, then the recipe: the options that differ from their defaults, or all.

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
    length = f"{steps:,} steps = {total:,} tokens" if passes is None else f"{passes:g} passes over the data"
    lines = [f"batch      {plan}", f"run        {length}"]
    vocab_size = None
    if isinstance(config, PretrainConfig):
        data_lines, vocab_size = describe_data(config)
        lines += data_lines
    model = resolve_model(config, vocab_size)
    optimizer, master_dtype = config.optimizer, config.train.master_dtype
    lines.append(describe_cost(model, config.data.sequence_length, optimizer, master_dtype))
    flops = float(flops_per_token(model, config.data.sequence_length))
    state_bytes = checkpoint_bytes(optimizer, master_dtype, count_all(model))
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.plan import parameter_counts  # with torch, which knows the layers

        counts = parameter_counts.count_parameters(model, parameter_counts.get_lora_config(config))
        flops = parameter_counts.training_flops_per_token(config, model, config.data.sequence_length)
        state_bytes = checkpoint_bytes(optimizer, master_dtype, counts)
        added = counts.total - parameter_count(model).total
        lines.append(
            f"adapters   {added:,} more parameters; {counts.trained:,} are trained, so {flops:.3g} FLOPs per token"
            f" and {format_bytes(state_bytes)} of weights and optimizer states"
        )
    if config.model.parametrization != "standard":
        lines += _describe_parametrization(config, model)
    check_parallel(config.parallel, model, plan)
    lines += _describe_sharding(config, ranks, state_bytes)
    if passes is None:
        total_flops = (
            flops * total if not phases else sum(flops_per_token(model, length) * tokens for length, tokens in by_length)
        )
        lines.append(f"compute    {total_flops:.3g} FLOPs in the whole run")
    shown = "every option" if everything else "what differs from the defaults; --dry-run all prints every option"
    return "\n".join([*lines, "", f"# {shown}", to_toml(config, changed_only=not everything).rstrip()])


def _describe_parametrization(config: StageConfig, model: ModelConfig) -> list[str]:
    """The factors of each kind of tensor, relative to the options of the recipe."""
    from lmforge.stages.build_model import empty_model  # with torch

    built, rows = empty_model(config, model), dict[str, tuple[str, ...]]()
    is_muon = config.optimizer.name == "muon"
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.model.lora import add_lora
        from lmforge.plan.parameter_counts import get_lora_config

        if (adapters := get_lora_config(config)) is not None:
            add_lora(built, adapters)
    for name, parameter in built.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = built.tensor_scale(name, tuple(parameter.shape))
        lr = scale.muon_lr if is_muon and name.startswith(built.blocks_name) and parameter.ndim > 1 else scale.lr
        decay = 0.0 if parameter.ndim < 2 else 1 / lr
        numbers = (scale.init, lr, decay, scale.eps)
        rows[re.sub(r"\.\d+\.", ".N.", name)] = (scale.kind, *(f"{each:.4g}" for each in numbers))
    title = f"factors    of {config.model.parametrization}: of first values, learning rate, weight decay and epsilon"
    return [
        title,
        *align_right([["tensor", "kind", "first", "lr", "decay", "eps"], *([name, *row] for name, row in rows.items())]),
    ]


def resolve_model(config: StageConfig, vocab_size: int | None) -> ModelConfig:
    """The model config of a recipe, also where it begins from a checkpoint. Raises UserError."""
    source = config.model.source
    if source is None or kind_of(source) in (Kind.HUB_NAME, Kind.HF_FOLDER):
        model = model_config_from_options(config.model, vocab_size)
    else:
        from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

        model = find_pretrained(source).resolve_model_config(config.model, vocab_size)
    return replace(model, reward=True) if isinstance(config, AlignConfig) and config.align.method == "reward" else model


def _describe_sharding(config: StageConfig, world_size: int, state_bytes: int) -> list[str]:
    """How FSDP distributes the model over the ranks. Raises UserError where it does not fit them."""
    parallel = config.parallel
    if choose_engine(parallel, world_size) in ("single", "ddp"):
        return []
    rank_info = read_rank_info()
    dims = parallel_dims(parallel, world_size, rank_info.local_world_size if rank_info.launched else config.launch.processes)
    copies = f"{dims.replicate_degree} copies, each" if dims.is_hybrid else "one copy"
    where = "host memory" if parallel.cpu_offload else "its memory"
    ranks = dims.fsdp_degree * parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree
    average = ", on average" if parallel.splits_model else ""  # the ranks with embedding or head hold more
    where = f"{format_bytes(state_bytes / ranks)} of weights and optimizer states in {where}{average}"
    return [f"sharding   {dims}: {copies} over {ranks} of {world_size} ranks; each holds {where}"]


def describe_cost(model: ModelConfig, sequence_length: int, optimizer: OptimizerOptions, master_dtype: str) -> str:
    """Parameters, FLOPs per token and memory of weights and optimizer states of a model that `optimizer` trains."""
    count = parameter_count(model)
    experts = f"experts    {describe_experts(model)}\n" if any(model.sparse_layers) else ""
    return (
        f"model      {count.total:,} parameters ({count.active_matmul:,} multiply each token),"
        f" {flops_per_token(model, sequence_length):.3g} FLOPs per token at length {sequence_length:,}\n"
        f"{experts}memory     {format_bytes(count.total * DTYPE_BYTES[master_dtype])} of {master_dtype} weights;"
        f" {format_bytes(checkpoint_bytes(optimizer, master_dtype, count_all(model)))} with the states of {optimizer.name},"
        " over all ranks that shard it"
    )


def describe_data(config: PretrainConfig, step: int | None = None, batch_offset: int = 0) -> tuple[list[str], int | None]:
    """Lines about the data, and the size of the vocabulary where the data is there.

    With `step`, also how much has been read after that many steps. `batch_offset` is the number of batches that rollbacks have
    left out so far: they count as read. Raises UserError where the data is damaged.
    """
    if missing := find_missing_folders(config):
        return [f"data       {missing[0]}: not there yet; `lmforge prepare SOURCE {missing[0]}` makes it"], None
    sources = TokenSources.open(config)
    size = batch_plan(config.train, config.data.sequence_length, ranks=1).global_batch_size
    if not config.data.sources and not config.data.phases:
        num_tokens = sources.folders[0].split("train").num_tokens
        epochs = config.train.steps * size * config.data.sequence_length / num_tokens
        line = f"data       {sources.location}: {num_tokens:,} tokens, so {epochs:.2f} epochs"
        return [line], sources.tokenizer.vocab_size
    dataset = sources.training(size)
    steps = {} if step is None else {f"after {step:,} steps": step}
    steps[f"after all {config.train.steps:,}"] = config.train.steps
    rows = _rows(dataset, {title: (number + batch_offset) * size for title, number in steps.items()})
    title = "data       tokens of each source, padding included, and how often it is read"
    return [title, *align_right(rows), *dataset.describe_phases()], sources.tokenizer.vocab_size


def align_right(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


def find_vocab_size(config: StageConfig) -> int | None:
    """The size of the vocabulary of the recipe's data, where all of it is prepared on this machine; else None.

    Raises UserError where the data is damaged.
    """
    if not isinstance(config, PretrainConfig) or find_missing_folders(config):
        return None
    if any(is_remote(source.folder) for source in config.data.all_sources):
        return None
    return TokenSources.open(config).tokenizer.vocab_size


def _rows(dataset: MixedDataset, samples: dict[str, int]) -> list[list[str]]:
    """A row a source; for each number of samples, by its title: the tokens, their fraction of all, and the epochs."""
    rows = [["source"], *([name] for name in dataset.names)]
    for title, n in samples.items():
        uses = dataset.use_until(n)
        total = sum(use.tokens for use in uses) or 1
        rows[0] += [title, "of all", "epochs"]
        for row, use in zip(rows[1:], uses, strict=True):
            row += [f"{use.tokens:,}", f"{use.tokens / total:.2%}", f"{use.epochs:.2f}"]
    return rows


DEFAULT_SEQUENCE_LENGTH = 4096


def describe_model(model: ModelConfig, title: str, sequence_length: int | None = None) -> str:
    """A model config and what it costs at a sequence length (default: the model's, up to DEFAULT_SEQUENCE_LENGTH)."""
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} for keys and values)"
    feed_forward = ["of experts " * sparse + str(model.expert_size if sparse else model.intermediate_size)
                    for sparse in sorted(set(model.sparse_layers))]  # fmt: skip
    length = sequence_length or min(model.max_position_embeddings, DEFAULT_SEQUENCE_LENGTH)
    return (
        f"{title}\n"
        f"config     {model.model_type}: {model.num_hidden_layers} layers, width {model.hidden_size},"
        f" feed-forward {' and '.join(feed_forward)}, {heads}\n"
        f"vocabulary {model.vocab_size:,}, {'tied' if model.tie_word_embeddings else 'untied'};"
        f" positions {model.max_position_embeddings:,}\n"
        f"{describe_cost(model, length, OptimizerOptions(), 'fp32')}\n"
        f"{FLOPS_CONVENTION}"
    )
