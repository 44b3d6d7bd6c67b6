"""`lmforge show`: what a recipe, a model, a shard folder, a run or a checkpoint is, without loading its weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmforge.cluster.rank_info import read_rank_info
from lmforge.config.options import read_recipe, to_toml, validate_options
from lmforge.config.post_training import AlignConfig, TunedConfig, config_class
from lmforge.config.run import Config, OptimizerOptions, StageConfig
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
from lmforge.model.flops import FLOPS_CONVENTION, flops_per_token, parameter_count
from lmforge.model.presets import PRESETS
from lmforge.parallel.dims import parallel_dims, plan_batches
from lmforge.parallel.validate import check_parallel, choose_engine
from lmforge.plan.memory import DTYPE_BYTES, ParameterCounts, checkpoint_bytes
from lmforge.runs import MANIFEST, Run, format_bytes

DEFAULT_SEQUENCE_LENGTH = 4096


def show(thing: str) -> str:
    """A description of `thing` in a few lines. Raises UserError where it is nothing that we know."""
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
        table = _read_manifest(path)
        return _describe_checkpoint(path, table) if "samples" in table else _describe_token_folder(path)
    if (path / "config.json").exists():
        return _describe_model(resolve_model_config(path, {}, implementation="auto"), f"Hugging Face folder {path}")
    raise UserError(f"{thing}: not a recipe, run, checkpoint, shard folder or Hugging Face folder")


def dry_run(config: StageConfig) -> str:
    """The resolved recipe and the batch arithmetic. Raises UserError where they do not fit together."""
    return f"{to_toml(config)}\n{_describe_batch_and_cost(config)}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder / MANIFEST}: cannot be read as the manifest of a shard folder or a checkpoint") from None


def _describe_batch_and_cost(config: StageConfig) -> str:
    place = read_rank_info()
    ranks = place.world_size if place.launched else config.launch.processes
    plan = plan_batches(config, ranks)
    steps = config.train.steps
    passes = config.train.epochs
    length = f"{steps:,} steps = {steps * plan.tokens:,} tokens" if passes is None else f"{passes:g} passes over the data"
    lines = [f"batch      {plan}", f"run        {length}"]
    vocabulary = None
    if isinstance(config, Config) and (config.data.folder / MANIFEST).exists():
        tokens = TokenFolder.open(config.data.folder)
        vocabulary = tokens.tokenizer.vocab_size
        held = tokens.split("train").num_tokens
        lines.append(f"data       {config.data.folder}: {held:,} tokens, so {steps * plan.tokens / held:.2f} epochs")
    elif isinstance(config, Config):
        lines.append(f"data       {config.data.folder}: not there yet; `lmforge prepare SOURCE {config.data.folder}` makes it")
    shape = _model_config(config, vocabulary)
    optimizer, master_dtype = config.optimizer, config.train.master_dtype
    lines.append(_describe_cost(shape, config.data.sequence_length, optimizer, master_dtype))
    total, at_rest = float(flops_per_token(shape, config.data.sequence_length)), _at_rest_bytes(shape, optimizer, master_dtype)
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.plan.parameter_counts import (
            count_parameters,
            training_flops_per_token,
        )  # with torch, which knows the layers

        counts, total = count_parameters(config, shape), training_flops_per_token(config, shape)
        at_rest = checkpoint_bytes(optimizer, master_dtype, counts)
        more = counts.total - parameter_count(shape).total
        lines.append(
            f"adapters   {more:,} more parameters; {counts.trained:,} are trained, so {total:.3g} FLOPs a"
            f" token and {format_bytes(at_rest)} at rest"
        )
    check_parallel(config.parallel, shape, plan)
    lines += _describe_sharding(config, shape, ranks, at_rest)
    if passes is None:
        lines.append(f"compute    {total * steps * plan.tokens:.3g} FLOPs in the whole run")
    return "\n".join(lines)


def _model_config(config: StageConfig, vocab_size: int | None) -> ModelConfig:
    source = config.model.source
    if source is None or is_hub_name(source) or (source / "config.json").exists():
        shape = model_config_from_options(config.model, vocab_size)
    else:
        from lmforge.stages.pretrained import find_pretrained  # with torch, which reads checkpoints

        shape = find_pretrained(source).resolve_model_config(config.model, vocab_size)
    return replace(shape, reward=True) if isinstance(config, AlignConfig) and config.align.method == "reward" else shape


def _describe_sharding(config: StageConfig, model_config: ModelConfig, world_size: int, at_rest: int) -> list[str]:
    """How FSDP would share the model out over the ranks; UserError where it would not fit them."""
    chosen = config.parallel
    if choose_engine(chosen, world_size) in ("single", "ddp"):
        return []
    place = read_rank_info()
    spread = parallel_dims(chosen, world_size, place.local_world_size if place.launched else world_size)
    copies = f"{spread.replicate_degree} copies, each" if spread.is_hybrid else "one copy"
    where = "host memory" if chosen.cpu_offload else "its memory"
    held = spread.fsdp_degree * chosen.tensor_parallel_degree * chosen.pipeline_parallel_degree
    share = format_bytes(at_rest / held)
    average = ", on average" if chosen.splits_model else ""  # who has the embedding or the head has more
    return [f"sharding   {spread}: {copies} over {held} of {world_size} ranks; each holds {share} in {where} at rest{average}"]


def _at_rest_bytes(model_config: ModelConfig, optimizer: OptimizerOptions, master_dtype: str) -> int:
    count = parameter_count(model_config)
    return checkpoint_bytes(optimizer, master_dtype, ParameterCounts(count.total, count.total, count.block_matrices))


def _describe_cost(
    model_config: ModelConfig,
    sequence_length: int,
    optimizer: OptimizerOptions,
    master_dtype: str,
) -> str:
    count = parameter_count(model_config)
    weights = count.total * DTYPE_BYTES[master_dtype]
    return (
        f"model      {count.total:,} parameters ({count.active_matmul:,} multiply each token),"
        f" {flops_per_token(model_config, sequence_length):.3g} FLOPs a token at length {sequence_length:,}\n"
        f"memory     {format_bytes(weights)} of {master_dtype} weights;"
        f" {format_bytes(_at_rest_bytes(model_config, optimizer, master_dtype))} at rest in training"
        f" (with the states of {optimizer.name}), over all ranks that shard it"
    )


def _describe_model(model_config: ModelConfig, title: str, sequence_length: int | None = None) -> str:
    """A shape and what it costs, in rows of `length` tokens (default: as long as is usual for it)."""
    sequence_length = sequence_length or min(model_config.max_position_embeddings, DEFAULT_SEQUENCE_LENGTH)
    cost = _describe_cost(model_config, sequence_length, OptimizerOptions(), "fp32")
    heads = f"{model_config.num_attention_heads} heads of {model_config.head_dim}"
    if model_config.num_key_value_heads != model_config.num_attention_heads:
        heads += f" ({model_config.num_key_value_heads} for keys and values)"
    return (
        f"{title}\n"
        f"shape      {model_config.model_type}: {model_config.num_hidden_layers} layers, width {model_config.hidden_size},"
        f" feed-forward {model_config.intermediate_size}, {heads}\n"
        f"vocabulary {model_config.vocab_size:,}, {'tied' if model_config.tie_word_embeddings else 'untied'};"
        f" positions {model_config.max_position_embeddings:,}\n"
        f"{cost}\n"
        f"{FLOPS_CONVENTION}"
    )


def _list_presets() -> str:
    rows = []
    for name in PRESETS:
        shape = get_preset(name)
        rows.append(
            f"{name:<16} {parameter_count(shape).total / 1e6:>10,.1f} M  {shape.model_type:<8}"
            f" {shape.num_hidden_layers:>3} layers, width {shape.hidden_size:>6}, vocabulary {shape.vocab_size:>7,}"
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


def _describe_checkpoint(path: Path, manifest: dict[str, Any]) -> str:
    implementation = manifest["recipe"].get("model", {}).get("implementation", "lmforge")
    shape = model_config_from_json(manifest["hf_config"], str(path / MANIFEST), implementation)
    length = manifest["recipe"]["data"]["sequence_length"]
    size = sum(file["bytes"] for file in manifest["files"].values())
    world = manifest["written_by"]
    ranks = f"{world['ranks']} {'rank' if world['ranks'] == 1 else 'ranks'}"
    return (
        f"checkpoint {path}\n"
        f"step       {manifest['step']:,}: {manifest['consumed_sequences']:,} sequences, {manifest['consumed_sequences'] * length:,} tokens\n"
        f"written by {ranks}, engine {world['engine']}, {world['dtype']}\n"
        f"on disk    {format_bytes(size)} in {len(manifest['files'])} files\n"
        + _describe_model(shape, f"trained on {manifest['recipe']['data']['folder']}", length)
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
        lines.append(_describe_checkpoint(run.checkpoint_path(steps[-1]), _read_manifest(run.checkpoint_path(steps[-1]))))
    return "\n".join(lines)
