"""`lmforge show`: what a recipe, a model, a shard folder, a run or a checkpoint is, without loading its weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lmforge.config.load import config_class
from lmforge.config.options import read_recipe, validate_options
from lmforge.config.sections import OptimizerOptions
from lmforge.config.verbs import ShowOptions
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError
from lmforge.hub import is_hub_name
from lmforge.interop.config_json import model_config_from_json
from lmforge.interop.resolve import resolve_model_config
from lmforge.model.config import ModelConfig, get_preset
from lmforge.model.flops import FLOPS_CONVENTION, parameter_count
from lmforge.model.presets import PRESETS
from lmforge.runs import MANIFEST, Run, format_bytes, read_checkpoint_manifest
from lmforge.untrusted import MAX_MANIFEST_BYTES, cut, describe_os_error, read_json
from lmforge.verbs.dry_run import describe_cost, describe_recipe

DEFAULT_SEQUENCE_LENGTH = 4096


def run_show(options: ShowOptions) -> int:
    """Print what a thing is, or samples of data. Raises UserError."""
    reading = [name for name in options.changed() if name in ("mask", "format", "fields", "apply_chat_template")]
    if reading and options.tokenizer is None:
        raise UserError(f"show: --{reading[0]} is for `lmforge show data FILE --tokenizer MODEL` alone")
    of_data = options.thing == "data" and options.of is not None
    if not of_data and (options.of is not None or options.samples is not None or options.tokenizer is not None):
        raise UserError("show: a second THING, --samples and --tokenizer are for `lmforge show data` alone")
    try:
        text = _show_data(options) if of_data else show(options.thing)
    except OSError as problem:  # such as a folder in the place of a file
        raise UserError(f"{describe_os_error(problem, options.thing)}; name something else") from None
    print(text)
    return 0


def _show_data(options: ShowOptions) -> str:
    from lmforge.verbs.show_data import show_examples, show_samples

    assert options.of is not None
    return show_examples(options, options.tokenizer) if options.tokenizer else show_samples(options.of, options.samples)


def show(thing: str) -> str:
    """A description of `thing` in a few lines. Raises UserError for anything unknown."""
    path = Path(thing)
    if thing == "presets":
        return _list_presets()
    if path.suffix == ".toml":
        table = read_recipe(path)
        config = validate_options(config_class(table, thing), table, thing).with_name(path.stem)
        return f"recipe {thing}\n{describe_recipe(config)}"
    if not path.exists():
        if thing in PRESETS:
            return _describe_model(get_preset(thing), f"preset {thing}")
        if is_hub_name(thing):
            return _describe_model(resolve_model_config(thing, {}, implementation="auto"), f"{thing} on the Hugging Face hub")
        raise UserError(f"{cut(thing)}: no such file, folder or preset; `lmforge show presets` lists the presets")
    if (path / "recipe.toml").exists():
        return _describe_run(Run.open(path))
    if (path / MANIFEST).exists():
        is_checkpoint = "hf_config" in read_json(path / MANIFEST, dict[str, Any], max_bytes=MAX_MANIFEST_BYTES)
        return _describe_checkpoint(path) if is_checkpoint else _describe_token_folder(path)
    if (path / "config.json").exists():
        return _describe_model(resolve_model_config(path, {}, implementation="auto"), f"Hugging Face folder {path}")
    raise UserError(f"{thing}: not a recipe, run, checkpoint, shard folder or Hugging Face folder")


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
        f"{describe_cost(model, length, OptimizerOptions(), 'fp32')}\n"
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
class _DataOptions:
    folder: str
    sequence_length: Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class _ModelOptions:
    implementation: str = "lmforge"


@dataclass(frozen=True)
class _RecipeSummary:
    data: _DataOptions
    model: _ModelOptions = field(default_factory=_ModelOptions)


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
    recipe: _RecipeSummary
    written_by: _Writer
    files: dict[str, _FileEntry]


def _describe_checkpoint(path: Path) -> str:
    manifest = read_checkpoint_manifest(path, _CheckpointSummary)
    for name, file in manifest.files.items():
        if not (path / name).is_file():
            raise UserError(f"{path / name}: missing")
        if (size := (path / name).stat().st_size) != file.bytes:
            raise UserError(f"{path / name}: {size:,} bytes instead of {file.bytes:,}")
    data, writer = manifest.recipe.data, manifest.written_by
    config = model_config_from_json(manifest.hf_config, str(path / MANIFEST), manifest.recipe.model.implementation)
    length, consumed = data.sequence_length, manifest.consumed_sequences
    size = sum(file.bytes for file in manifest.files.values())
    return (
        f"checkpoint {path}\n"
        f"step       {manifest.step:,}: {consumed:,} sequences, {consumed * length:,} tokens\n"
        f"written by {writer.ranks} {'rank' if writer.ranks == 1 else 'ranks'}, engine {writer.engine}, {writer.dtype}\n"
        f"on disk    {format_bytes(size)} in {len(manifest.files)} files\n"
        + _describe_model(config, f"trained on {data.folder}", length)
    )


def _describe_run(run: Run) -> str:
    steps, config = run.checkpoint_steps(), run.load_config()
    records = run.read_metrics()
    lines = [f"run {run.path}: {records[-1]['step'] if records else 0:,} of {config.train.steps:,} steps"]
    if records:
        last = {name: value for record in records for name, value in record.items() if value is not None}
        shown = ("loss", "val/loss", "val/bits_per_byte", "tokens", "tokens_per_second", "mfu")
        values = {name: last[name] for name in shown if name in last}
        words = (f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}" for name, value in values.items())
        lines.append(f"last       {', '.join(words)}")
    lines.append(f"saved      {', '.join(f'step {step:,}' for step in steps) if steps else 'no checkpoint yet'}")
    for step in reversed(steps):
        try:
            lines.append(_describe_checkpoint(run.checkpoint_path(step)))
            break
        except (UserError, OSError) as problem:  # the newest intact one is shown
            lines.append(f"damaged    {problem}")
    return "\n".join(lines)
