"""`lmforge show`: what a recipe, a model, a shard folder, a run or a checkpoint is, without loading its weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmforge.cluster.environment import find_place
from lmforge.config import Config, StageConfig
from lmforge.config_post import AlignConfig, TunedConfig, config_class
from lmforge.data.hub import is_name
from lmforge.data.shards import TokenFolder
from lmforge.errors import Mistake
from lmforge.model.flops import CONVENTION, flops_per_token, parameters, training_bytes, weight_bytes
from lmforge.model.presets import PRESETS
from lmforge.model.shapes import ModelConfig, from_hugging_face, preset, resolve, shape_of
from lmforge.options import read_recipe, to_toml, validate
from lmforge.parallel.fits import check_fits, choose_engine
from lmforge.parallel.mesh import plan_batches, sharding_of
from lmforge.runs import MANIFEST, Run, sized

USUAL_LENGTH = 4096


def show(thing: str) -> str:
    """A description of `thing` in a few lines. Raises Mistake where it is nothing that we know."""
    path = Path(thing)
    if thing == "presets":
        return _presets()
    if path.suffix == ".toml":
        table = read_recipe(path)
        config = validate(config_class(table, thing), table, thing).with_name(path.stem)
        return f"recipe {thing}\n{to_toml(config)}\n{_arithmetic(config)}"
    if not path.exists():
        if thing in PRESETS:
            return _model(preset(thing), f"preset {thing}")
        if is_name(thing):
            return _model(resolve(thing, {}, implementation="auto"), f"{thing} on the Hugging Face hub")
        raise Mistake(f"{thing}: no such file, folder or preset; `lmforge show presets` lists the presets")
    if (path / "recipe.toml").exists():
        return _run(Run.open(path))
    if (path / MANIFEST).exists():
        table = _manifest(path)
        return _checkpoint(path, table) if "samples" in table else _tokens(path)
    if (path / "config.json").exists():
        return _model(resolve(path, {}, implementation="auto"), f"Hugging Face folder {path}")
    raise Mistake(f"{thing}: not a recipe, run, checkpoint, shard folder or Hugging Face folder")


def dry_run(config: StageConfig) -> str:
    """The resolved recipe and the batch arithmetic. Raises Mistake where they do not fit together."""
    return f"{to_toml(config)}\n{_arithmetic(config)}"


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise Mistake(f"{folder / MANIFEST}: cannot be read as the manifest of a shard folder or a checkpoint") from None


def _arithmetic(config: StageConfig) -> str:
    place = find_place()
    ranks = place.ranks if place.launched else config.launch.processes
    plan = plan_batches(config, ranks)
    steps = config.train.steps
    passes = config.train.epochs
    length = f"{steps:,} steps = {steps * plan.tokens:,} tokens" if passes is None else f"{passes:g} passes over the data"
    lines = [f"batch      {plan}", f"run        {length}"]
    vocabulary = None
    if isinstance(config, Config) and (config.data.folder / MANIFEST).exists():
        tokens = TokenFolder.open(config.data.folder)
        vocabulary = tokens.tokenizer.vocab_size
        held = tokens.split("train").tokens
        lines.append(f"data       {config.data.folder}: {held:,} tokens, so {steps * plan.tokens / held:.2f} epochs")
    elif isinstance(config, Config):
        lines.append(f"data       {config.data.folder}: not there yet; `lmforge prepare SOURCE {config.data.folder}` makes it")
    shape = _shape(config, vocabulary)
    lines.append(_cost(shape, config.data.length))
    total, at_rest = float(flops_per_token(shape, config.data.length)), training_bytes(shape)
    if isinstance(config, TunedConfig) and config.lora.rank is not None:
        from lmforge.train.material import counted, step_flops_per_token  # with torch, which knows the layers

        (held, trained), total = counted(config, shape), step_flops_per_token(config, shape)
        at_rest = 4 * held + 8 * trained
        lines.append(
            f"adapters   {held - parameters(shape).total:,} more parameters; {trained:,} are trained, so {total:.3g} FLOPs a"
            f" token and {sized(at_rest)} at rest"
        )
    check_fits(config.parallel, shape, plan)
    lines += _spread(config, shape, ranks, at_rest)
    if passes is None:
        lines.append(f"compute    {total * steps * plan.tokens:.3g} FLOPs in the whole run")
    return "\n".join(lines)


def _shape(config: StageConfig, vocabulary: int | None) -> ModelConfig:
    source = config.model.source
    if source is None or is_name(source) or (source / "config.json").exists():
        shape = shape_of(config.model, vocabulary)
    else:
        from lmforge.train.origin import find_origin  # with torch, which reads checkpoints

        shape = find_origin(source).shape(config.model, vocabulary)
    return replace(shape, reward=True) if isinstance(config, AlignConfig) and config.align.method == "reward" else shape


def _spread(config: StageConfig, shape: ModelConfig, ranks: int, at_rest: int) -> list[str]:
    """How FSDP would share the model out over the ranks; Mistake where it would not fit them."""
    chosen = config.parallel
    if choose_engine(chosen, ranks) in ("alone", "ddp"):
        return []
    place = find_place()
    spread = sharding_of(chosen, ranks, place.local_ranks if place.launched else ranks)
    copies = f"{spread.replicas} copies, each" if spread.hybrid else "one copy"
    where = "host memory" if chosen.offload else "its memory"
    held = spread.shards * spread.tensor * spread.pipeline
    share = sized(at_rest / held)
    average = ", on average" if chosen.splits_model else ""  # who has the embedding or the head has more
    return [f"sharding   {spread}: {copies} over {held} of {ranks} ranks; each holds {share} in {where} at rest{average}"]


def _cost(shape: ModelConfig, length: int) -> str:
    count = parameters(shape)
    return (
        f"model      {count.total:,} parameters ({count.multiplied:,} multiply each token),"
        f" {flops_per_token(shape, length):.3g} FLOPs a token at length {length:,}\n"
        f"memory     {sized(weight_bytes(shape))} of fp32 weights; {sized(training_bytes(shape))} at rest in training"
        " (with AdamW's two moments), over all ranks that shard it"
    )


def _model(shape: ModelConfig, title: str, length: int | None = None) -> str:
    """A shape and what it costs, in rows of `length` tokens (default: as long as is usual for it)."""
    heads = f"{shape.num_attention_heads} heads of {shape.head_dim}"
    if shape.num_key_value_heads != shape.num_attention_heads:
        heads += f" ({shape.num_key_value_heads} for keys and values)"
    return (
        f"{title}\n"
        f"shape      {shape.model_type}: {shape.num_hidden_layers} layers, width {shape.hidden_size},"
        f" feed-forward {shape.intermediate_size}, {heads}\n"
        f"vocabulary {shape.vocab_size:,}, {'tied' if shape.tie_word_embeddings else 'untied'};"
        f" positions {shape.max_position_embeddings:,}\n"
        f"{_cost(shape, length or min(shape.max_position_embeddings, USUAL_LENGTH))}\n"
        f"{CONVENTION}"
    )


def _presets() -> str:
    rows = []
    for name in PRESETS:
        shape = preset(name)
        rows.append(
            f"{name:<16} {parameters(shape).total / 1e6:>10,.1f} M  {shape.model_type:<8}"
            f" {shape.num_hidden_layers:>3} layers, width {shape.hidden_size:>6}, vocabulary {shape.vocab_size:>7,}"
        )
    return "\n".join(rows)


def _tokens(path: Path) -> str:
    folder = TokenFolder.open(path)
    tokenizer = folder.tokenizer
    lines = [f"token shards {path}"]
    for name in folder.splits:
        split = folder.split(name)
        lines.append(f"{name:<10} {split.tokens:,} tokens in {split.documents:,} documents")
    separator = f"{tokenizer.decode([tokenizer.separator_id], specials=True)!r} (id {tokenizer.separator_id})"
    lines.append(f"tokenizer  {tokenizer.vocab_size:,} tokens, {separator} after each document; {tokenizer.hash}")
    lines.append(f"stored as  {folder.dtype}")
    return "\n".join(lines)


def _checkpoint(path: Path, table: dict[str, Any]) -> str:
    implementation = table["recipe"].get("model", {}).get("implementation", "lmforge")
    shape = from_hugging_face(table["model"], str(path / MANIFEST), implementation)
    length = table["recipe"]["data"]["length"]
    size = sum(file["bytes"] for file in table["files"].values())
    world = table["world"]
    ranks = f"{world['ranks']} {'rank' if world['ranks'] == 1 else 'ranks'}"
    return (
        f"checkpoint {path}\n"
        f"step       {table['step']:,}: {table['samples']:,} rows, {table['samples'] * length:,} tokens\n"
        f"written by {ranks}, engine {world['engine']}, {world['dtype']}\n"
        f"on disk    {sized(size)} in {len(table['files'])} files\n"
        + _model(shape, f"trained on {table['recipe']['data']['folder']}", length)
    )


def _run(run: Run) -> str:
    steps, config = run.steps(), run.config()
    records = run.read_metrics()
    lines = [f"run {run.path}: {records[-1]['step'] if records else 0:,} of {config.train.steps:,} steps"]
    if records:
        last = {name: value for record in records for name, value in record.items() if value is not None}
        shown = ("loss", "val/loss", "val/bits_per_byte", "tokens", "tokens_per_second", "mfu")
        lines.append("last       " + ", ".join(f"{name} {last[name]:,.4g}" for name in shown if name in last))
    lines.append(f"saved      {', '.join(f'step {step:,}' for step in steps) if steps else 'no checkpoint yet'}")
    if steps and (run.checkpoint(steps[-1]) / MANIFEST).exists():
        lines.append(_checkpoint(run.checkpoint(steps[-1]), _manifest(run.checkpoint(steps[-1]))))
    return "\n".join(lines)
