"""`lmforge plan`: prints what a run will need and cost.

With `--search` it prints the configurations that fit and why the others are slower, and writes the
fastest as recipes. The arithmetic is in plan/prediction.
"""

import json
import shlex
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lmforge.core.errors import RunFailed, UserError, format_bytes, format_count, format_duration
from lmforge.core.files.atomic_files import atomic_write_text, check_output
from lmforge.core.files.untrusted import describe_os_error
from lmforge.core.model.flops import active_parameters, describe_experts
from lmforge.core.options.load import STAGES
from lmforge.core.options.options import to_toml, validate_options
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel.dims import plan_batches
from lmforge.lab.options.plan import AnyPlanConfig
from lmforge.lab.plan.planning import (
    Machine,
    find_machine,
    make_step_config,
    predict_phases,
    predict_step,
    suggest_reduction,
    with_default_batch,
)
from lmforge.lab.plan.prediction.predict import (
    Prediction,
    RunCost,
    can_reduce_once,
    peak_memory,
    run_cost,
)
from lmforge.lab.plan.prediction.search import (
    Candidate,
    SearchResult,
    in_fewer_bits,
    search,
    suggest_what_fits,
    why_slower,
)
from lmforge.lab.plan.prediction.simulator import COMPUTE, HOST_COPIES, NETWORK
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.ops.terminal.cells import page_console
from lmforge.ops.verbs.show.describe import resolve_model, resolve_teacher
from lmforge.ops.verbs.show.describe_data import find_vocab_size

SHOWN = 10
# The options that a search chooses, and their values, for which the best configuration of each is
# shown.
CHOICES = (
    "engine",
    "sharding",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
    "activation_checkpointing",
    "activation_offload",
    "cpu_offload",
)
# Characters of the picture of a step.
PICTURE_WIDTH = 72
PICTURE_HEIGHT = 8


def run_plan(config: AnyPlanConfig) -> int:
    """Print the plan of a recipe.

    Returns the exit status. Raises UserError where the recipe does not fit the GPUs.
    """
    if config.plan.search:
        return run_search(config)
    machine = find_machine(config.plan)
    config, batch_note = with_default_batch(config)
    step_config, vocabulary = _step_config(config, machine)
    prediction = predict_step(step_config, machine)
    phases = predict_phases(config, prediction, machine)
    cost = run_cost(
        phases,
        config.plan.price,
        machine.gpu,
        async_save=config.checkpoint.async_save,
        disk_gb_s=machine.disk_gb_s,
    )
    budget = config.plan.usable * machine.gpu.memory_bytes
    fits_device = prediction.device_bytes <= budget
    host_bytes = prediction.host_bytes
    fits = fits_device and host_bytes <= machine.host_memory_bytes
    on_host = f"{format_bytes(host_bytes)} of host memory on each host, for offload"
    room = format_bytes(budget)
    advice = ""
    if not fits_device:
        advice = suggest_what_fits(step_config, _device_bytes, budget)
    elif not fits:
        room = "the hosts"
        advice = (
            f"it takes {on_host}, which has {format_bytes(machine.host_memory_bytes)}; use more"
            " hosts, or no offload"
        )
    if config.plan.output == "json":
        content = _as_json(prediction, phases, cost, fits, advice, machine)
        print(json.dumps(content | {"vocabulary": vocabulary}, indent=1))
        return 0
    console = page_console(110)
    options = step_config.options
    where = f"{config.plan.gpus} × {machine.gpu.name}"
    if machine.network is not None:
        where += f", {machine.gpus_per_host} per host, {machine.network.name}"
    lines = [*batch_note, f"{where}; {machine.describe_constants(step_config.dtype)}", vocabulary]
    if any(step_config.model.sparse_layers):
        lines.append(
            f"{step_config.parameters.total:,} parameters; experts:"
            f" {describe_experts(step_config.model)}"
        )
    console.print(escape("\n".join(lines)), soft_wrap=True)
    engine = str(options.engine)
    if step_config.is_fsdp:
        engine += f" {step_config.dims}"
    compiled = "compiled" if step_config.compiled else "not compiled"
    if can_reduce_once(step_config) and not options.reduce_every_micro_batch:
        compiled += (
            "; gradients reduced once per step (reduce_every_micro_batch = false), which takes"
            " memory"
        )
    console.print(
        f"{engine}; {step_config.accumulation} × {step_config.micro_batch_size} sequences of"
        f" {step_config.sequence_length:,} tokens per rank; activation checkpointing:"
        f" {options.activation_checkpointing}; {compiled}",
        soft_wrap=True,
    )
    console.print(_memory_table(prediction))
    console.print(picture(prediction), soft_wrap=True)
    low, high = (format_bytes(each) for each in prediction.memory_interval)
    verdict = f"fits into {room}" if fits else f"[bold]does not fit[/bold] into {room}; {advice}"
    console.print(
        f"memory     {low} to {high} per rank, peak in: {prediction.peak_at}; {verdict}\n",
        soft_wrap=True,
    )
    console.print(_time_table(prediction))
    slow, fast = prediction.speed_interval
    console.print(
        f"speed      {prediction.tokens_per_second:,.0f} tokens/s per GPU ({slow:,.0f} to"
        f" {fast:,.0f}), MFU {prediction.mfu:.0%}, {prediction.step_seconds:.3g} s per step; most"
        f" time: {prediction.bottleneck}\n",
        soft_wrap=True,
    )
    faster = suggest_reduction(prediction, machine, config.plan.usable)
    if faster:
        console.print(f"gradients  {faster}\n", soft_wrap=True)
    if host_bytes:
        console.print(f"host       {on_host}")
    _print_phases(console, phases)
    _print_cost(console, prediction, cost, config.plan.price, machine.disk_gb_s)
    return 0


def _device_bytes(step_config: StepConfig) -> float:
    return sum(peak_memory(step_config).values())


def _step_config(config: AnyPlanConfig, machine: Machine) -> tuple[StepConfig, str]:
    """The step, and a line that says whose vocabulary it has.

    A preset or a folder has its own: it gets that of data which the recipe names, not of what
    happens to lie in the default folder.
    """
    has_own = config.model.preset is not None or config.model.source is not None
    names_data = not {"folder", "sources"}.isdisjoint(config.data.model_fields_set)
    vocab_size = find_vocab_size(config) if names_data or not has_own else None
    model = resolve_model(config, vocab_size)
    whose = "the model's own" if has_own else "lmforge's default"
    if model.vocab_size == vocab_size and isinstance(config, PretrainConfig):
        folders = ", ".join(source.folder for source in config.data.all_sources)
        whose = f"of the tokenizer in {folders}"
    step_config = make_step_config(
        config, model, config.plan.gpus, machine, resolve_teacher(config)
    )
    return step_config, f"vocabulary {model.vocab_size:,} tokens, {whose}"


def _memory_table(prediction: Prediction) -> Table:
    title = "memory of the fullest rank at its peak"
    table = Table("what", Column("GiB", justify="right"), title=title, title_justify="left")
    for name, count in sorted(prediction.memory.items(), key=lambda item: -item[1]):
        if count >= 2**20:
            table.add_row(name, f"{count / 2**30:.2f}")
    table.add_section()
    table.add_row("total", f"{prediction.device_bytes / 2**30:.2f}")
    return table


def _time_table(prediction: Prediction) -> Table:
    numbers = (Column(name, justify="right") for name in ("ms", "of the step"))
    table = Table("what", *numbers, title="time of a step", title_justify="left")
    waits = {
        "(exposed communication)": prediction.exposed_seconds,
        "(pipeline bubble)": prediction.bubble_seconds,
        "(waiting for the host)": prediction.host_seconds,
    }
    parts = {
        name: seconds
        for name, seconds in prediction.seconds.items()
        if name not in (COMPUTE, NETWORK, HOST_COPIES)
    }
    for name, seconds in [*sorted(parts.items(), key=lambda item: -item[1]), *waits.items()]:
        if seconds > 0:
            table.add_row(name, f"{1e3 * seconds:,.1f}", f"{seconds / prediction.step_seconds:.0%}")
    table.add_section()
    table.add_row(
        "per step; collectives overlap with kernels", f"{1e3 * prediction.step_seconds:,.1f}", ""
    )
    return table


def live_peaks(prediction: Prediction) -> list[float]:
    """The maximum live bytes in each of PICTURE_WIDTH equal parts of the step.

    The operations are in issue order.
    """
    values = [count for _, count in prediction.timeline]
    edges = [len(values) * at // PICTURE_WIDTH for at in range(PICTURE_WIDTH + 1)]
    return [max(values[first : max(first + 1, after)]) for first, after in pairwise(edges)]


def picture(prediction: Prediction) -> str:
    """Live memory over the operations of the simulated micro-batches, as bars of characters."""
    columns = live_peaks(prediction)
    most = max(columns)
    bars = " ▁▂▃▄▅▆▇█"
    lines = []
    for row in range(PICTURE_HEIGHT, 0, -1):
        cells = (
            min(8, max(0, round(8 * (count / most * PICTURE_HEIGHT - row + 1))))
            for count in columns
        )
        if row in (PICTURE_HEIGHT, PICTURE_HEIGHT // 2):
            label = f"{most / 2**30 * row / PICTURE_HEIGHT:7.1f} GiB "
        else:
            label = " " * 12
        lines.append(label + "".join(bars[cell] for cell in cells))
    shown = ""
    if prediction.step_config.accumulation > 3:
        shown = f", 3 of {prediction.step_config.accumulation} micro-batches"
    return "\n".join(
        [*lines, f"{'':12}live memory in the order in which operations are issued{shown}"]
    )


def _print_phases(console: Console, phases: list[tuple[int, Prediction]]) -> None:
    """Print the speed of each phase of a run with several sequence lengths.

    Memory and the times that were printed before are those of the longest.
    """
    if len(phases) == 1:
        return
    for steps, each in phases:
        console.print(
            f"phase      {steps:,} steps with sequences of {each.step_config.sequence_length:,}"
            f" tokens: {each.tokens_per_second:,.0f} tokens/s per GPU, {each.step_seconds:.3g} s"
            " per step",
            soft_wrap=True,
        )


def _run_intervals(prediction: Prediction, cost: RunCost) -> dict[str, tuple[float, float]]:
    """The interval (least, most) of each number of a whole run that depends on the speed."""
    below, above = (each / prediction.tokens_per_second for each in prediction.speed_interval)
    values = {
        name: getattr(cost, name) for name in ("days", "gpu_hours", "kilowatt_hours", "price")
    }
    return {name: (value / above, value / below) for name, value in values.items()}


def _format_days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else format_duration(days * 86400)


def _format_amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _print_cost(
    console: Console, prediction: Prediction, cost: RunCost, price: float, disk_gb_s: float
) -> None:
    intervals = _run_intervals(prediction, cost)

    def described(name: str, unit: str = "") -> str:
        values = [getattr(cost, name), *intervals[name]]
        format_value = _format_days if name == "days" else _format_amount
        middle, least, most = map(format_value, values)
        return f"{middle}{unit} ({least} to {most})"

    priced = ""
    if price:
        priced = f", {described('price')} at {price:g} a GPU-hour"
    console.print(
        f"run        {cost.steps:,} steps = {cost.tokens:,} tokens: {described('days')},"
        f" {described('gpu_hours', ' GPU-hours')}, {described('kilowatt_hours', ' kWh')}{priced}",
        soft_wrap=True,
    )
    every = format_count(cost.checkpoint_every_steps, "step")
    console.print(
        f"checkpoint {format_bytes(cost.checkpoint_bytes)}, written in"
        f" {format_duration(cost.checkpoint_seconds)} at {disk_gb_s:.3g} GB/s; best"
        f" every {format_duration(cost.checkpoint_every_seconds)} ({every}, Young-Daly);"
        f" {cost.failures:.2g} failures expected, goodput {cost.goodput:.1%}",
        soft_wrap=True,
    )


def _as_json(
    prediction: Prediction,
    phases: list[tuple[int, Prediction]],
    cost: RunCost,
    fits: bool,
    advice: str,
    machine: Machine,
) -> dict[str, Any]:
    seconds = ("step_seconds", "seconds", "exposed_seconds", "bubble_seconds", "host_seconds")
    return {
        "memory_bytes": {name: round(count) for name, count in prediction.memory.items()},
        "peak_at": prediction.peak_at,
        "timeline_bytes": [round(each) for each in live_peaks(prediction)],
        **{
            name: round(getattr(prediction, name))
            for name in ("live_bytes", "reserved_bytes", "device_bytes")
        },
        "device_bytes_interval": [round(each) for each in prediction.memory_interval],
        "capacity_bytes": machine.gpu.memory_bytes,
        "fits": fits,
        "advice": advice,
        **{name: getattr(prediction, name) for name in seconds},
        "tokens_per_second_per_gpu": prediction.tokens_per_second,
        "tokens_per_second_per_gpu_interval": list(prediction.speed_interval),
        "parameters": prediction.step_config.parameters.total,
        "active_parameters": active_parameters(prediction.step_config.model),
        "mfu": prediction.mfu,
        "bottleneck": prediction.bottleneck,
        "constants": dict(
            zip(
                ("measured", "data sheets"),
                machine.constants(prediction.step_config.dtype),
                strict=True,
            )
        ),
        "phases": [
            {
                "steps": steps,
                "sequence_length": each.step_config.sequence_length,
                "step_seconds": each.step_seconds,
            }
            for steps, each in phases
        ],
        "run": asdict(cost),
        "run_intervals": _run_intervals(prediction, cost),
    }


def run_search(config: AnyPlanConfig) -> int:
    """Search, print and write.

    Raises UserError where nothing can be tried, RunFailed where nothing fits.
    """
    files = _files(config)
    for file in files:
        check_output(file, "--write")
    machine = find_machine(config.plan)
    parallel = config.parallel.model_copy(
        update={"engine": "auto", "sharding": None, "shard_degree": None}
    )
    degrees = {f"{name}_parallel_degree": 1 for name in ("tensor", "context", "pipeline", "expert")}
    plain = config.model_copy(
        update={"parallel": parallel.model_copy(update=degrees | {"cpu_offload": False})}
    )
    base, vocabulary = _step_config(plain, machine)
    size = plan_batches(plain, 1).global_batch_size
    budget = config.plan.usable * machine.gpu.memory_bytes
    rates = machine.rates(base.dtype)
    most = config.plan.configurations
    for each in (base, *in_fewer_bits(base)):
        result = search(each, size, machine.gpu, rates, budget, most, config.train.float8)
        if result.best or not result.tried:
            break
    if result.tried == 0:
        raise UserError(
            f"--search: a global batch of {size} sequences cannot be divided over"
            f" {config.plan.gpus} GPUs; change train.global_batch_size or plan.gpus"
        )
    if config.plan.output == "json":
        print(json.dumps(_search_as_json(result) | {"vocabulary": vocabulary}, indent=1))
    else:
        print(f"{config.plan.gpus} × {machine.gpu.name}; {machine.describe_constants(base.dtype)}")
        print(vocabulary)
        phases = config.data.phases if isinstance(config, PretrainConfig) else ()
        if {phase.sequence_length for phase in phases} - {None, base.sequence_length}:
            print(
                "phases differ in sequence length: the search is for the longest,"
                f" {base.sequence_length:,} tokens"
            )
        _print_search(result, config, budget)
        if result.best:
            bits = result.best[0].step_config.bits
            if bits != base.bits:
                print(f"with {' and '.join(bits)} as it is nothing fits; this changes results")
        if not config.train.float8 and machine.gpu.peak_flops("fp8") is not None:
            print("float8 changes results and is tried only with --train.float8 true")
    if not result.best:
        least = result.too_large[0].needs if result.too_large else "nothing"
        mend = "raise --configurations, or use more GPUs" if result.left_out else "use more GPUs"
        raise RunFailed(
            f"--search: no configuration fits into {format_bytes(budget)}; the smallest takes"
            f" {least}; {mend}"
        )
    written = list(zip(files, result.best, strict=False))
    for file, candidate in written:
        _write(candidate, config, file)
    if len(written) < len(files):
        print(f"--finalists {len(files)}: only {len(written)} are known to fit", file=sys.stderr)
    if len(written) > 1:
        print(_how_to_measure([file for file, _ in written], config, machine), file=sys.stderr)
    return 0


def _print_search(result: SearchResult, config: AnyPlanConfig, budget: float) -> None:
    console = page_console(130)
    left = f", {result.left_out:,} left out by --configurations" if result.left_out else ""
    console.print(
        f"{result.tried:,} configurations tried: {len(result.fitting):,} fit into"
        f" {format_bytes(budget)}, {len(result.too_large):,} do not, {result.refused:,} are refused"
        f" by a run{left}"
    )
    if not result.best:
        return
    winner = result.best[0]
    table = Table(title="fastest", title_justify="left")
    table.add_column("configuration")
    for name in ("tokens/s per GPU", "MFU", "GiB"):
        table.add_column(name, justify="right")
    table.add_column("why slower")
    for each in result.best[:SHOWN]:
        reason = "" if each is winner else why_slower(each, winner)
        table.add_row(
            each.step_config.describe(),
            f"{each.tokens_per_second:,.0f}",
            f"{each.mfu:.0%}",
            f"{each.device_bytes / 2**30:.1f}",
            reason,
        )
    console.print(table)
    title = "the best configuration with each alternative"
    table = Table("choice", "configuration", "why it loses", title=title, title_justify="left")
    for choice, candidate, reason in other_choices(result):
        table.add_row(choice, candidate.step_config.describe(), reason)
    console.print(table)


def other_choices(result: SearchResult) -> list[tuple[str, Candidate, str]]:
    """Rows (choice, candidate, reason) of the values that the winner does not have.

    The candidate is the best one with such a value, and the reason says why it is slower.
    """

    def choices(candidate: Candidate | Prediction) -> dict[str, Any]:
        step_config = candidate.step_config
        values = {name: getattr(step_config.options, name) for name in CHOICES}
        return values | {"micro_batch_size": step_config.micro_batch_size}

    winner = result.best[0]
    rows = list[tuple[str, Candidate, str]]()
    seen = set(choices(winner).items())
    for each in (*result.fitting, *result.too_large):
        for name, value in choices(each).items():
            if (name, value) in seen or value is None:
                continue
            seen.add((name, value))
            reason = f"does not fit: {each.needs} at least"
            if each in result.fitting:
                reason = why_slower(each, winner)
            rows.append((f"{name} = {value}", each, reason))
    return sorted(rows, key=lambda row: row[0])


def _files(config: AnyPlanConfig) -> list[Path]:
    """The recipes to write, the fastest first."""
    first = config.plan.write
    if first is None:
        return []
    if not first.name:
        raise UserError(f"--write: {first} is a folder; name a file")
    numbers = range(2, config.plan.finalists + 1)
    return [first, *(first.with_stem(f"{first.stem}-{number}") for number in numbers)]


def _write(prediction: Prediction, config: AnyPlanConfig, file: Path) -> None:
    """Write the recipe with the configuration that was found, as `lmforge pretrain` reads it."""
    step_config = prediction.step_config
    table = config.model_dump(mode="json", exclude={"plan"})
    table["parallel"] |= step_config.options.model_dump(mode="json")
    table["train"]["micro_batch_size"] = step_config.micro_batch_size
    table["train"]["float8"] = step_config.float8
    table["run"]["name"] = ""
    for name, value in step_config.bits.items():
        section, _, option = name.partition(".")
        table[section][option] = value
    recipe = validate_options(STAGES[config.of_stage], table, str(file))
    header = (
        f"# Found by `lmforge plan --search` for {config.plan.gpus} x {config.plan.gpu_type}:"
        f" {step_config.describe()}.\n# By estimate {prediction.tokens_per_second:,.0f}"
        f" tokens/s per GPU and {prediction.device_bytes / 2**30:.1f} GiB.\n"
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
        return (
            f"to measure them: on {config.plan.gpus} GPUs, torchrun … -m lmforge bench FILE for"
            " each"
        )
    if any("," in str(file) for file in files):  # which separates the values of a sweep
        return f"to measure them: lmforge bench FILE --launch.processes {config.plan.gpus} for each"
    sweep = shlex.quote(f"recipe={','.join(map(str, files))}")
    command = f"lmforge bench --sweep {sweep} --launch.processes {config.plan.gpus}"
    if config.plan.calibration is not None:
        command += f" --log.calibration {shlex.quote(str(config.plan.calibration))}"
    return f"to measure them: {command}"


def _search_as_json(result: SearchResult) -> dict[str, Any]:
    best = [
        {
            "configuration": each.step_config.describe(),
            "tokens_per_second_per_gpu": each.tokens_per_second,
            "device_bytes": round(each.device_bytes),
            "parallel": each.step_config.options.model_dump(mode="json"),
            **each.step_config.bits,
        }
        for each in result.best
    ]
    return {
        "tried": result.tried,
        "fitting": len(result.fitting),
        "too_large": len(result.too_large),
        "refused": result.refused,
        "left_out": result.left_out,
        "best": best,
    }
