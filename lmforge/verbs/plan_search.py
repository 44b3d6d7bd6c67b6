"""`lmforge plan --search`: prints the configurations that fit, and why the others are slower; writes the fastest as recipes."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from lmforge.atomic_files import atomic_write_text, check_output
from lmforge.config.load import STAGES
from lmforge.config.options import to_toml, validate_options
from lmforge.config.stage import PretrainConfig
from lmforge.config.verbs.plan import AnyPlanConfig
from lmforge.errors import RunFailed, UserError, format_bytes
from lmforge.parallel.dims import plan_batches
from lmforge.plan.planning import Machine, find_machine, make_step_config
from lmforge.plan.prediction.search import Candidate, Finalist, SearchResult, search, why_slower
from lmforge.terminal.cells import page_console
from lmforge.untrusted import describe_os_error
from lmforge.verbs.show.describe import find_vocab_size, resolve_model

SHOWN = 10
# The options that a search chooses, and their values, for which the best configuration of each is shown.
CHOICES = (
    "engine",
    "sharding",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "activation_checkpointing",
    "cpu_offload",
)


def run_search(config: AnyPlanConfig) -> int:
    """Search, print and write. Raises UserError where nothing can be tried, RunFailed where nothing fits."""
    files = _files(config)
    for file in files:
        check_output(file, "--write")
    machine = find_machine(config)
    model = resolve_model(config, find_vocab_size(config))
    parallel = config.parallel.model_copy(update={"engine": "auto", "sharding": None, "shard_degree": None})
    degrees = {f"{name}_parallel_degree": 1 for name in ("tensor", "context", "pipeline")}
    plain = config.model_copy(update={"parallel": parallel.model_copy(update=degrees | {"cpu_offload": False})})
    base = make_step_config(plain, model, config.plan.gpus, machine)
    size = plan_batches(plain, 1).global_batch_size
    budget = config.plan.usable * machine.gpu.memory_bytes
    rates = machine.rates(base.dtype)
    result = search(base, size, machine.gpu, rates, budget, config.plan.configurations, config.train.float8)
    if result.tried == 0:
        raise UserError(
            f"--search: a global batch of {size} sequences cannot be divided over {config.plan.gpus} GPUs; change"
            " train.global_batch_size or plan.gpus"
        )
    if config.plan.output == "json":
        print(json.dumps(_as_json(result), indent=1))
    else:
        print(f"{config.plan.gpus} × {machine.gpu.name}; {machine.describe_constants(base.dtype)}")
        lengths = {phase.sequence_length for phase in config.data.phases} if isinstance(config, PretrainConfig) else set()
        if lengths - {None, base.sequence_length}:
            print(f"phases differ in sequence length: the search is for the longest, {base.sequence_length:,} tokens")
        _print(result, config, budget)
        if not config.train.float8 and machine.gpu.peak_flops("fp8") is not None:
            print("float8 changes results and is tried only with --train.float8 true")
    if not result.best:
        least = format_bytes(result.too_large[0].device_bytes) if result.too_large else "nothing"
        mend = "raise --configurations, or use more GPUs" if result.left_out else "use more GPUs"
        raise RunFailed(f"--search: no configuration fits into {format_bytes(budget)}; the smallest takes {least}; {mend}")
    written = list(zip(files, result.best, strict=False))
    for file, candidate in written:
        _write(candidate, config, file)
    if len(written) < len(files):
        print(f"--finalists {len(files)}: only {len(written)} are known to fit", file=sys.stderr)
    if len(written) > 1:
        print(_how_to_measure([file for file, _ in written], config, machine), file=sys.stderr)
    return 0


def _print(result: SearchResult, config: AnyPlanConfig, budget: float) -> None:
    console = page_console(130)
    counts = f"{result.tried:,} configurations tried: {len(result.fitting):,} fit into {format_bytes(budget)},"
    left = f", {result.left_out:,} left out by --configurations" if result.left_out else ""
    console.print(f"{counts} {len(result.too_large):,} do not, {result.refused:,} are refused by a run{left}")
    if not result.best:
        return
    winner = result.best[0]
    table = Table(title="fastest", title_justify="left")
    for name in ("configuration", "tokens/s per GPU", "MFU", "GiB", "why slower"):
        table.add_column(name, justify="left" if name in ("configuration", "why slower") else "right")
    for each in result.best[:SHOWN]:
        speed = f"{each.prediction.tokens_per_second:,.0f}"
        reason = "" if each is winner else why_slower(each, winner)
        table.add_row(each.describe(), speed, f"{each.prediction.mfu:.0%}", f"{each.device_bytes / 2**30:.1f}", reason)
    console.print(table)
    title = "the best configuration with each alternative"
    table = Table("choice", "configuration", "why it loses", title=title, title_justify="left")
    for choice, candidate, reason in other_choices(result):
        table.add_row(choice, candidate.describe(), reason)
    console.print(table)


def other_choices(result: SearchResult) -> list[tuple[str, Candidate, str]]:
    """For each value of an option that the winner does not have: the best candidate with it, and why it is slower."""
    winner, rows = result.best[0], list[tuple[str, Candidate, str]]()
    seen: set[tuple[str, Any]] = {(name, getattr(winner.step_config.options, name)) for name in CHOICES}
    seen.add(("micro_batch_size", winner.step_config.micro_batch_size))
    for each in (*result.fitting, *result.too_large):
        for name in (*CHOICES, "micro_batch_size"):
            value = each.step_config.micro_batch_size if name == "micro_batch_size" else getattr(each.step_config.options, name)
            if (name, value) in seen or value is None:
                continue
            seen.add((name, value))
            fits = each in result.fitting
            reason = why_slower(each, winner) if fits else f"does not fit: {format_bytes(each.device_bytes)} at least"
            rows.append((f"{name} = {value}", each, reason))
    return sorted(rows, key=lambda row: row[0])


def _files(config: AnyPlanConfig) -> list[Path]:
    """The recipes to write, the fastest first."""
    first = config.plan.write
    if first is None:
        return []
    if not first.name:
        raise UserError(f"--write: {first} is a folder; name a file")
    return [first, *(first.with_stem(f"{first.stem}-{number}") for number in range(2, config.plan.finalists + 1))]


def _write(candidate: Finalist, config: AnyPlanConfig, file: Path) -> None:
    """The recipe with the configuration that was found, as `lmforge pretrain` reads it."""
    table = config.model_dump(mode="json", exclude={"plan"})
    options = candidate.step_config.options.model_dump(mode="json")
    table["parallel"] |= options
    table["train"] |= {"micro_batch_size": candidate.step_config.micro_batch_size, "float8": candidate.step_config.float8}
    table["run"] |= {"name": ""}
    recipe = validate_options(STAGES[config.of_stage], table, str(file))
    header = (
        f"# Found by `lmforge plan --search` for {config.plan.gpus} x {config.plan.gpu_type}: {candidate.describe()}.\n"
        f"# By estimate {candidate.prediction.tokens_per_second:,.0f} tokens/s per GPU and"
        f" {candidate.device_bytes / 2**30:.1f} GiB.\n"
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, header + to_toml(recipe, changed_only=True))
    except OSError as problem:
        raise UserError(f"--write: {describe_os_error(problem, file)}; name another file") from None
    print(f"wrote {file}", file=sys.stderr)


def _how_to_measure(files: list[Path], config: AnyPlanConfig, machine: Machine) -> str:
    """The command that measures recipes on the real machine."""
    if not isinstance(config, PretrainConfig):
        return "lmforge bench measures recipes of pretraining only"
    if config.plan.gpus > machine.gpus_per_host:
        return f"to measure them: on {config.plan.gpus} GPUs, torchrun … -m lmforge bench FILE for each"
    if any("," in str(file) for file in files):  # which separates the values of a sweep
        return f"to measure them: lmforge bench FILE --launch.processes {config.plan.gpus} for each"
    calibration = [f"--log.calibration {shlex.quote(str(config.plan.calibration))}"] * (config.plan.calibration is not None)
    sweep = shlex.quote(f"recipe={','.join(map(str, files))}")
    words = ["lmforge bench --sweep", sweep, f"--launch.processes {config.plan.gpus}", *calibration]
    return f"to measure them: {' '.join(words)}"


def _as_json(result: SearchResult) -> dict[str, Any]:
    best = []
    for each in result.best:
        row = {"configuration": each.describe(), "tokens_per_second_per_gpu": each.prediction.tokens_per_second}
        options = each.step_config.options.model_dump(mode="json")
        best.append({**row, "device_bytes": round(each.device_bytes), "parallel": options})
    counts = {"tried": result.tried, "fitting": len(result.fitting), "too_large": len(result.too_large)}
    return {**counts, "refused": result.refused, "left_out": result.left_out, "best": best}
