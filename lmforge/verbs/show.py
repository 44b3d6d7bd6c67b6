"""`lmforge show`: what a recipe, a model, a shard folder, a run or a checkpoint is, without loading its weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmforge.cluster.rank_info import read_rank_info
from lmforge.config.align import AlignConfig
from lmforge.config.load import config_class
from lmforge.config.options import read_recipe, to_toml, validate_options
from lmforge.config.pretrain import PretrainConfig
from lmforge.config.stage import StageConfig
from lmforge.config.tuning import TunedConfig
from lmforge.config.verbs import ShowOptions
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError
from lmforge.hub import is_hub_name
from lmforge.model.config import (
    ModelConfig,
    get_preset,
    model_config_from_json,
    model_config_from_options,
    resolve_model_config,
)
from lmforge.model.flops import FLOPS_CONVENTION, adamw_state_bytes, flops_per_token, parameter_count, weight_bytes
from lmforge.model.presets import PRESETS
from lmforge.parallel.dims import parallel_dims, plan_batches
from lmforge.parallel.validate import check_parallel, choose_engine
from lmforge.runs import MANIFEST, Run, format_bytes
from lmforge.untrusted import MAX_MANIFEST_BYTES, read_json

DEFAULT_SEQUENCE_LENGTH = 4096


def run_show(options: ShowOptions) -> int:
    """Print what a thing is, or samples of data. Raises UserError."""
    reading = options.model_dump(include={"mask", "format", "fields", "apply_chat_template"}, exclude_defaults=True)
    if reading and options.tokenizer is None:
        raise UserError(f"show: --{next(iter(reading))} is for `lmforge show data FILE --tokenizer MODEL` alone")
    if options.thing != "data" or options.of is None:
        if options.of is not None or options.samples is not None or options.tokenizer is not None:
            raise UserError("show: a second THING, --samples and --tokenizer are for `lmforge show data` alone")
        print(show(options.thing))
        return 0
    from lmforge.verbs.show_data import ExampleReader, show_examples, show_samples

    if options.tokenizer is None:
        print(show_samples(options.of, options.samples))
    else:
        print(show_examples(options.of, options.tokenizer, ExampleReader(**reading), options.samples))
    return 0


def show(thing: str) -> str:
    """A description of `thing` in a few lines. Raises UserError for anything unknown."""
    path = Path(thing)
    if thing == "presets":
        return _list_presets()
    if path.suffix == ".toml":
        table = read_recipe(path)
        config = validate_options(config_class(table, thing), table, thing).with_name(path.stem)
        return f"recipe {thing}\n{to_toml(config)}\n{_describe_batch_and_cost(config)}"
    if not path.exists():
        if thing in PRESETS:
            return _describe_model(get_preset(thing), f"preset {thing}")
        if is_hub_name(thing):
            return _describe_model(resolve_model_config(thing, {}, implementation="auto"), f"{thing} on the Hugging Face hub")
        raise UserError(f"{thing}: no such file, folder or preset; `lmforge show presets` lists the presets")
    if (path / "recipe.toml").exists():
        return _describe_run(Run.open(path))
    if (path / MANIFEST).exists():
        is_checkpoint = "hf_config" in read_json(path / MANIFEST, dict[str, Any], max_bytes=MAX_MANIFEST_BYTES)
        return _describe_checkpoint(path) if is_checkpoint else _describe_token_folder(path)
    if (path / "config.json").exists():
        return _describe_model(resolve_model_config(path, {}, implementation="auto"), f"Hugging Face folder {path}")
    raise UserError(f"{thing}: not a recipe, run, checkpoint, shard folder or Hugging Face folder")


def dry_run(config: StageConfig) -> str:
    """The resolved recipe and the batch arithmetic. Raises UserError where they do not fit together."""
    return f"{to_toml(config)}\n{_describe_batch_and_cost(config)}"


def _describe_batch_and_cost(config: StageConfig) -> str:
    rank_info = read_rank_info()
    ranks = rank_info.world_size if rank_info.launched else config.launch.processes
    plan = plan_batches(config, ranks)
    steps = config.train.steps
    passes = config.train.epochs
    length = f"{steps:,} steps = {steps * plan.tokens:,} tokens" if passes is None else f"{passes:g} passes over the data"
    lines = [f"batch      {plan}", f"run        {length}"]
    vocab_size = None
    if isinstance(config, PretrainConfig) and (config.data.folder / MANIFEST).exists():
        tokens = TokenFolder.open(config.data.folder)
        vocab_size = tokens.tokenizer.vocab_size
        num_tokens = tokens.split("train").num_tokens
        lines.append(
            f"data       {config.data.folder}: {num_tokens:,} tokens, so {steps * plan.tokens / num_tokens:.2f} epochs"
        )
    elif isinstance(config, PretrainConfig):
        lines.append(f"data       {config.data.folder}: not there yet; `lmforge prepare SOURCE {config.data.folder}` makes it")
    model = _model_config(config, vocab_size)
    lines.append(_describe_cost(model, config.data.sequence_length))
    flops, at_rest = float(flops_per_token(model, config.data.sequence_length)), adamw_state_bytes(model)
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.stages.inputs import count_parameters, training_flops_per_token  # with torch, which knows the layers

        (held, trained), flops = count_parameters(config, model), training_flops_per_token(config, model)
        at_rest = 4 * held + 8 * trained
        lines.append(
            f"adapters   {held - parameter_count(model).total:,} more parameters; {trained:,} are trained, so {flops:.3g} FLOPs"
            f" a token and {format_bytes(at_rest)} at rest"
        )
    check_parallel(config.parallel, model, plan)
    lines += _describe_sharding(config, ranks, at_rest)
    if passes is None:
        lines.append(f"compute    {flops * steps * plan.tokens:.3g} FLOPs in the whole run")
    return "\n".join(lines)


def _model_config(config: StageConfig, vocab_size: int | None) -> ModelConfig:
    source = config.model.source
    if source is None or is_hub_name(source) or (source / "config.json").exists():
        model = model_config_from_options(config.model, vocab_size)
    else:
        from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

        model = find_pretrained(source).resolve_model_config(config.model, vocab_size)
    return replace(model, reward=True) if isinstance(config, AlignConfig) and config.align.method == "reward" else model


def _describe_sharding(config: StageConfig, world_size: int, at_rest: int) -> list[str]:
    """How FSDP distributes the model over the ranks. Raises UserError where it does not fit them."""
    parallel = config.parallel
    if choose_engine(parallel, world_size) in ("single", "ddp"):
        return []
    rank_info = read_rank_info()
    dims = parallel_dims(parallel, world_size, rank_info.local_world_size if rank_info.launched else world_size)
    copies = f"{dims.replicate_degree} copies, each" if dims.is_hybrid else "one copy"
    where = "host memory" if parallel.cpu_offload else "its memory"
    ranks = dims.fsdp_degree * dims.tensor_parallel_degree * dims.pipeline_parallel_degree
    average = ", on average" if parallel.splits_model else ""  # the ranks with embedding or head hold more
    where = f"{format_bytes(at_rest / ranks)} in {where} at rest{average}"
    return [f"sharding   {dims}: {copies} over {ranks} of {world_size} ranks; each holds {where}"]


def _describe_cost(model: ModelConfig, sequence_length: int) -> str:
    count = parameter_count(model)
    return (
        f"model      {count.total:,} parameters ({count.active_matmul:,} multiply each token),"
        f" {flops_per_token(model, sequence_length):.3g} FLOPs a token at length {sequence_length:,}\n"
        f"memory     {format_bytes(weight_bytes(model))} of fp32 weights; {format_bytes(adamw_state_bytes(model))} at rest in"
        " training (with AdamW's two moments), over all ranks that shard it"
    )


def _describe_model(model: ModelConfig, title: str, sequence_length: int | None = None) -> str:
    """A model config and what it costs at a sequence length (default: the model's, up to DEFAULT_SEQUENCE_LENGTH)."""
    heads = f"{model.num_attention_heads} heads of {model.head_dim}"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} for keys and values)"
    length = sequence_length or min(model.max_position_embeddings, DEFAULT_SEQUENCE_LENGTH)
    return (
        f"{title}\n"
        f"config     {model.model_type}: {model.num_hidden_layers} layers, width {model.hidden_size},"
        f" feed-forward {model.intermediate_size}, {heads}\n"
        f"vocabulary {model.vocab_size:,}, {'tied' if model.tie_word_embeddings else 'untied'};"
        f" positions {model.max_position_embeddings:,}\n"
        f"{_describe_cost(model, length)}\n"
        f"{FLOPS_CONVENTION}"
    )


def _list_presets() -> str:
    rows = []
    for name in PRESETS:
        model = get_preset(name)
        rows.append(
            f"{name:<16} {parameter_count(model).total / 1e6:>10,.1f} M  {model.model_type:<8}"
            f" {model.num_hidden_layers:>3} layers, width {model.hidden_size:>6}, vocabulary {model.vocab_size:>7,}"
        )
    return "\n".join(rows)


def _describe_token_folder(path: Path) -> str:
    folder = TokenFolder.open(path)
    tokenizer = folder.tokenizer
    lines = [f"token shards {path}"]
    for name in folder.splits:
        split = folder.split(name)
        lines.append(f"{name:<10} {split.num_tokens:,} tokens in {split.num_documents:,} documents")
    separator = f"{tokenizer.decode([tokenizer.eos_token_id], include_special_tokens=True)!r} (id {tokenizer.eos_token_id})"
    lines.append(f"tokenizer  {tokenizer.vocab_size:,} tokens, {separator} after each document; {tokenizer.hash}")
    lines.append(f"stored as  {folder.dtype}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _FileEntry:
    bytes: int


@dataclass(frozen=True)
class _Writer:
    ranks: int
    engine: str
    dtype: str


@dataclass(frozen=True)
class _CheckpointSummary:
    """The part of a checkpoint's manifest that is shown. `checkpoint/` reads all of it, but with torch."""

    step: int
    consumed_sequences: int
    hf_config: dict[str, Any]
    recipe: dict[str, dict[str, Any]]
    written_by: _Writer
    files: dict[str, _FileEntry]


def _describe_checkpoint(path: Path) -> str:
    manifest = read_json(path / MANIFEST, _CheckpointSummary, max_bytes=MAX_MANIFEST_BYTES)
    data, writer = manifest.recipe["data"], manifest.written_by
    implementation = manifest.recipe.get("model", {}).get("implementation", "lmforge")
    config = model_config_from_json(manifest.hf_config, str(path / MANIFEST), implementation)
    length, consumed = data["sequence_length"], manifest.consumed_sequences
    size = sum(file.bytes for file in manifest.files.values())
    return (
        f"checkpoint {path}\n"
        f"step       {manifest.step:,}: {consumed:,} sequences, {consumed * length:,} tokens\n"
        f"written by {writer.ranks} {'rank' if writer.ranks == 1 else 'ranks'}, engine {writer.engine}, {writer.dtype}\n"
        f"on disk    {format_bytes(size)} in {len(manifest.files)} files\n"
        + _describe_model(config, f"trained on {data['folder']}", length)
    )


def _describe_run(run: Run) -> str:
    steps, config = run.checkpoint_steps(), run.load_config()
    records = run.read_metrics()
    lines = [f"run {run.path}: {records[-1]['step'] if records else 0:,} of {config.train.steps:,} steps"]
    if records:
        last = {name: value for record in records for name, value in record.items() if value is not None}
        shown = ("loss", "val/loss", "val/bits_per_byte", "tokens", "tokens_per_second", "mfu")
        lines.append("last       " + ", ".join(f"{name} {last[name]:,.4g}" for name in shown if name in last))
    lines.append(f"saved      {', '.join(f'step {step:,}' for step in steps) if steps else 'no checkpoint yet'}")
    if steps and (run.checkpoint_path(steps[-1]) / MANIFEST).exists():
        lines.append(_describe_checkpoint(run.checkpoint_path(steps[-1])))
    return "\n".join(lines)
