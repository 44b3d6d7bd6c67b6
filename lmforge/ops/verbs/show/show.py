"""`lmforge show`: describes a recipe, a model, a token folder, a run or a checkpoint, without
loading weights.
"""

from pathlib import Path

from lmforge.core.data.best_fit_index import best_fit_lengths, describe_best_fit
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError, format_bytes, format_count
from lmforge.core.files.untrusted import describe_os_error
from lmforge.core.model.flops import active_parameters, parameter_count
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.model.resolve import stored_model_config
from lmforge.core.options.load import read_config
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.kinds import Kind, kind_of, unexpected
from lmforge.core.records.manifests import CorruptCheckpoint, check_sizes, read_manifest
from lmforge.core.records.run_records import newest_values, skipped_batches
from lmforge.core.records.runs import Run
from lmforge.hf.resolve import resolve_model_config
from lmforge.ops.options.examine import ShowOptions
from lmforge.ops.verbs.show.describe import describe_model, describe_recipe
from lmforge.ops.verbs.show.describe_data import describe_data


def run_show(options: ShowOptions) -> int:
    """Print a description of the thing, or samples of data. Raises UserError."""
    of_files = [
        "mask",
        "format",
        "fields",
        "apply_chat_template",
        "split_turns",
        "ignore_media",
        "skip_invalid",
    ]
    reading = [name for name in options.changed() if name in of_files]
    if reading and options.tokenizer is None:
        raise UserError(
            f"show: --{reading[0]} is for `lmforge show data FILE --tokenizer MODEL` alone"
        )
    of_data = options.thing == "data" and options.of is not None
    for_data = {
        "of": "a second THING",
        **{name: f"--{name}" for name in ("tokenizer", "samples", "num_samples")},
    }
    given = [words for name, words in for_data.items() if name in options.changed()]
    if given and not of_data:
        raise UserError(f"show: {given[0]} is for `lmforge show data OF` alone")
    try:
        text = _show_data(options) if of_data else show(options.thing)
    except OSError as problem:  # such as a folder in the place of a file
        raise UserError(
            f"{describe_os_error(problem, options.thing)}; name something else"
        ) from None
    print(text)
    return 0


def _show_data(options: ShowOptions) -> str:
    from lmforge.ops.verbs.show.show_data import report_data, show_samples
    from lmforge.ops.verbs.show.show_examples import show_examples

    assert options.of is not None
    if options.tokenizer:
        return show_examples(options, options.tokenizer)
    is_reported = kind_of(options.of) in (Kind.RECIPE, Kind.TOKENS)
    if is_reported and options.samples is None and options.num_samples is None:
        return report_data(options.of)
    return show_samples(options.of, options.samples, options.num_samples)


def show(thing: str) -> str:
    """A description of `thing` in a few lines. Raises UserError for anything unknown."""
    path = Path(thing)
    kind = kind_of(thing)
    if thing == "presets":
        return _list_presets()
    if kind == Kind.RECIPE:
        return f"recipe {thing}\n{describe_recipe(read_config(path))}"
    if kind == Kind.MISSING and thing in PRESETS:
        return describe_model(get_preset(thing), f"preset {thing}")
    if kind in (Kind.HUB_NAME, Kind.HF_FOLDER):
        if kind == Kind.HF_FOLDER:
            title = f"Hugging Face folder {path}"
        else:
            title = f"{thing} on the Hugging Face hub"
        described = describe_model(resolve_model_config(thing, {}, implementation="auto"), title)
        notes: list[str] = []
        if kind == Kind.HF_FOLDER:
            from lmforge.hf.weights import describe_folder, has_weights  # torch, not for presets

            notes = describe_folder(path) if has_weights(path) else []
        return "\n".join([described, *(f"weights    {note}" for note in notes)])
    if kind == Kind.RUN:
        return _describe_run(Run.open(path))
    if kind == Kind.CHECKPOINT:
        return _describe_checkpoint(path)
    if kind == Kind.TOKENS:
        return _describe_token_folder(path)
    shown = (
        Kind.RECIPE,
        Kind.RUN,
        Kind.CHECKPOINT,
        Kind.TOKENS,
        Kind.HF_FOLDER,
        Kind.HUB_NAME,
        "a preset",
    )
    raise unexpected(thing, shown, "; `lmforge show presets` lists the presets")


def _describe_token_folder(path: Path) -> str:
    folder = TokenFolder.open(path)
    tokenizer = folder.tokenizer
    lines = [f"token shards {path}"]
    for name in folder.splits:
        split = folder.split(name)
        lines.append(
            f"{name:<10} {split.num_tokens:,} tokens in"
            f" {format_count(split.num_documents, 'document')}"
        )
    lines += [
        f"best-fit   {describe_best_fit(folder, length)}" for length in best_fit_lengths(folder)
    ]
    separator = (
        f"{tokenizer.decode([tokenizer.eos_token_id], include_special_tokens=True)!r} (id"
        f" {tokenizer.eos_token_id})"
    )
    lines.append(
        f"tokenizer  {tokenizer.vocab_size:,} tokens, {separator} after each document;"
        f" {tokenizer.hash}"
    )
    lines.append(f"stored as  {folder.dtype}")
    return "\n".join(lines)


def _describe_checkpoint(path: Path) -> str:
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except CorruptCheckpoint as reason:
        raise UserError(f"{path}: {reason}") from None
    writer = manifest.written_by
    consumed = manifest.consumed_sequences
    length = manifest.recipe.get("data", {}).get("sequence_length", 0)
    phases = manifest.data_plan.get("phases")  # of which each may have a length of its own
    if phases:
        tokens = sum(phase["samples"] * phase["sequence_length"] for phase in phases)
    else:
        tokens = consumed * length
    size = sum(file["bytes"] for file in manifest.files.values())
    return (
        f"checkpoint {path}\nstep       {manifest.step:,}: {consumed:,} sequences, {tokens:,}"
        f" tokens\nwritten by {format_count(writer.get('ranks', 0), 'rank')}, engine"
        f" {writer.get('engine')}, {writer.get('dtype')}\non disk    {format_bytes(size)} in"
        f" {len(manifest.files)} files\n"
        + describe_model(
            stored_model_config(manifest), f"trained on {writer.get('data') or ''}", length
        )
    )


def _describe_run(run: Run) -> str:
    steps = run.checkpoint_steps()
    config = run.load_config()
    records = run.read_metrics()
    last_step = records[-1]["step"] if records else 0
    lines = [f"run {run.path}: {last_step:,} of {config.train.steps:,} steps"]
    if records:
        last = newest_values(records)
        shown = ("loss", "val/loss", "val/bits_per_byte", "tokens", "tokens_per_second", "mfu")
        values = {name: last[name] for name in shown if last.get(name) is not None}
        words = (
            f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}"
            for name, value in values.items()
        )
        lines.append(f"last       {', '.join(words)}")
    if isinstance(config, PretrainConfig) and (config.data.sources or config.data.phases):
        try:
            lines += describe_data(config, last_step, skipped_batches(records))[0]
        except UserError as problem:  # the run is shown without its data
            lines.append(f"data       {problem}")
    saved = ", ".join(f"step {step:,}" for step in steps)
    lines.append(f"saved      {saved or 'no checkpoint yet'}")
    for step in reversed(steps):
        try:
            lines.append(_describe_checkpoint(run.checkpoint_path(step)))
            break
        except (UserError, OSError) as problem:  # the newest intact one is shown
            lines.append(f"damaged    {problem}")
    return "\n".join(lines)


def _list_presets() -> str:
    """A line for each preset."""
    rows = []
    for name in PRESETS:
        model = get_preset(name)
        active = ""
        if any(model.sparse_layers):
            active = f", {active_parameters(model) / 1e6:,.1f} M active"
        rows.append(
            f"{name:<16} {parameter_count(model).total / 1e6:>10,.1f} M  {model.model_type:<11}"
            f" {model.num_hidden_layers:>3} layers, width {model.hidden_size:>6}, vocabulary"
            f" {model.vocab_size:>7,}{active}"
        )
    return "\n".join(rows)
