"""`lmforge bench`: what a step of a recipe costs, and where the time goes; one recipe, or a sweep over its options.

A trial builds what training would build, runs whole optimizer steps and times them; then a few more steps in which the
host waits for the device after each phase, to tell the phases apart; then one under the profiler, for communication.
Tokens come from the recipe's shards where they are there, and are drawn at random where they are not.
"""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import read_rank_info
from lmforge.config.run import BatchPlan, BenchConfig
from lmforge.data.batch import Batch
from lmforge.data.loader import BatchLoader
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import TokenDataset
from lmforge.errors import RunFailed, UserError
from lmforge.model.config import ModelConfig
from lmforge.model.flops import FLOPS_CONVENTION, flops_per_token, parameter_count
from lmforge.model.layers import LanguageModel
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.dims import data_parallel_rank_and_size, plan_batches
from lmforge.parallel.precision import choose_compile, choose_dtype
from lmforge.parallel.validate import check_parallel
from lmforge.runs import MANIFEST
from lmforge.stages.build_model import build_model_and_optimizer, fill_weights
from lmforge.stages.dataset_batches import build_loader
from lmforge.stages.inputs import loads_pretrained_weights, resolve_model_config
from lmforge.stages.pretrained import find_pretrained
from lmforge.train.determinism import set_determinism
from lmforge.train.loop import train_step
from lmforge.train.metrics import device_peak_flops, peak_memory_gib

PHASE_STEPS = 3
TIMED_PHASES = ("data", "forward", "backward", "reduce", "optimizer")
OUT_OF_MEMORY = "out of memory"


class RandomBatches:
    """Rows of random tokens, one document each, made once: the recipe's data is not there."""

    def __init__(self, vocab_size: int, plan: BatchPlan, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = plan.micro_batch_size, plan.length
        tokens = torch.randint(0, vocab_size, size, generator=generator)
        positions = torch.arange(plan.length).expand(size).contiguous()
        # Random numbers as well, and used only where the model has dropout.
        keys = torch.randint(-(2**63), 2**63 - 1, size, generator=generator)
        batch = Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros(size, dtype=torch.int32), keys)
        self._batches = [batch.to(device)] * plan.accumulation

    def batches(self, step: int) -> list[Batch]:
        return self._batches

    def close(self) -> None: ...


def bench(config: BenchConfig, arguments: list[str]) -> int:
    """Time the recipe, or every combination of a sweep, and print. `words` is the command line without the verb.

    Raises UserError where the recipe cannot be trained here, and RunFailed where a trial failed otherwise than for memory.
    """
    if not config.bench.sweep:
        measured = measure(config)
        if read_rank_info().is_rank0:
            _print_results([measured], config.bench.output)
        return 0
    if config.bench.trace:
        raise UserError("--trace: of one recipe, not of a sweep")
    if read_rank_info().launched:
        raise UserError("--sweep: starts ranks of its own, and these were started already; give --launch.processes instead")
    rows = []
    for chosen in sweep_combinations(config.bench.sweep):
        rows.append({**_run_trial(arguments, chosen), "swept": chosen})
        if config.bench.output == "text":
            print(_summary_line(rows[-1]), file=sys.stderr, flush=True)
    _print_results(rows, config.bench.output)
    return 0


def sweep_combinations(sweep: tuple[str, ...]) -> list[dict[str, str]]:
    """Every combination of `section.option=value,value…`. Raises UserError where one does not read so."""
    axes = []
    for axis in sweep:
        name, equals, values = axis.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--sweep {axis}: expected section.option=value,value…")
        axes.append([(name, value) for value in values.split(",")])
    return [dict(chosen) for chosen in itertools.product(*axes)]


def _run_trial(arguments: list[str], overrides: dict[str, str]) -> dict[str, Any]:
    """One combination, in processes of its own: what it leaves in memory, and its failing, end with it."""
    options = [word for name, value in overrides.items() for word in (f"--{name}", value)]
    # The last of an option given twice counts, and a list may be empty.
    over = ["--bench.output", "json", "--bench.sweep"]
    command = [sys.executable, "-m", "lmforge", "bench", *arguments, *options, *over]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return dict(json.loads(done.stdout)[0])
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
    if ran_out_of_memory(done.returncode, done.stderr):
        return {"failed": OUT_OF_MEMORY}
    if done.returncode == 2:
        return {"failed": said.removeprefix("lmforge: ")}
    raise RunFailed(f"bench {' '.join(options)}: {said}")


def ran_out_of_memory(status: int | None, stderr: str) -> bool:
    """Whether a process that ended with `status` and `said` this last did so for want of memory."""
    return "OutOfMemoryError" in stderr or "can't allocate memory" in stderr or status == -9


def measure(config: BenchConfig) -> dict[str, Any]:
    """Times and rates of one recipe on these ranks; every rank calls it and has the first rank's result."""
    set_determinism(config.train.deterministic)
    ranks = cluster.init_distributed(config.train.device, config.train.threads)
    try:
        plan = plan_batches(config, ranks.world_size)
        place, _ = data_parallel_rank_and_size(config.parallel, ranks.rank_info.rank, ranks.world_size)
        there = (config.data.folder / MANIFEST).exists()
        tokens = TokenFolder.open(config.data.folder) if there else None
        vocabulary = tokens.tokenizer.vocab_size if tokens else None
        origin = find_pretrained(config.model.source) if config.model.source else None
        shape = resolve_model_config(config, origin, vocabulary)
        check_parallel(config.parallel, shape, plan)
        data: BatchLoader | RandomBatches
        if tokens:
            stream = TokenDataset(tokens, sequence_length=config.data.sequence_length, seed=config.train.seed)
            data = build_loader(config, stream, plan, ranks)
        else:
            data = RandomBatches(shape.vocab_size, plan, ranks.device, seed=place)
        try:
            load_weights = origin.load_weights if origin is not None and loads_pretrained_weights(config) else None
            fill = partial(fill_weights, config, ranks, load_weights)
            timed = _time_steps(config, shape, fill, plan, data, ranks)
        finally:
            data.close()
        return ranks.broadcast({**timed, "data": str(config.data.folder) if there else "random tokens"})
    finally:
        cluster.destroy_distributed()


def _time_steps(
    config: BenchConfig,
    model_config: ModelConfig,
    fill: Callable[[LanguageModel], None],
    plan: BatchPlan,
    data: Any,
    dist_ctx: DistributedContext,
) -> dict[str, Any]:
    dtype, _ = choose_dtype(config.train.dtype, dist_ctx.device)
    compiled, _ = choose_compile(config.train.compile, dist_ctx.device, config.train.steps)
    objective = NextTokenObjective()
    trained, optimizer = build_model_and_optimizer(config, model_config, objective, dist_ctx, dtype, compiled, fill)
    on_gpu = dist_ctx.device.type == "cuda"
    number = itertools.count()

    def settle() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def step(mark: Any = lambda phase: None) -> None:
        mark("data")
        train_step(
            trained,
            optimizer,
            data.batches(next(number)),
            objective.num_items,
            lr=config.optimizer.lr,
            max_grad_norm=config.optimizer.max_grad_norm,
            set_phase=mark,
        )

    began = time.perf_counter()
    for _ in range(config.bench.warmup_steps):
        step()
    settle()
    warmup = time.perf_counter() - began
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(config.bench.steps):
        began = time.perf_counter()
        step()
        settle()
        seconds.append(time.perf_counter() - began)
    memory = peak_memory_gib(dist_ctx.device)
    phases = _measure_phases(step, settle)
    communication = _measure_communication(step, settle, config.bench.trace if dist_ctx.is_rank0 else None)

    median = statistics.median(seconds)
    per_second = plan.tokens / median
    flops = per_second / dist_ctx.world_size * flops_per_token(model_config, plan.length)
    peak = device_peak_flops(dist_ctx.device, dtype)  # of bf16 for float8 too, so that the two compare
    return {
        "engine": trained.description,
        "ranks": dist_ctx.world_size,
        "device": torch.cuda.get_device_name(dist_ctx.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads a rank",
        "dtype": str(dtype).removeprefix("torch.") + (", float8 in blocks" if config.train.float8 else ""),
        "compiled": compiled,
        "parameters": parameter_count(model_config).total,
        "batch": str(plan),
        "step_seconds": {"median": median, "min": min(seconds), "max": max(seconds), "steps": len(seconds)},
        "warmup_seconds": warmup,
        "tokens_per_second": per_second,
        "tflops_a_rank": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "convention": FLOPS_CONVENTION,
        "memory_gib": memory,
        "phase_seconds": phases,
        "communication_seconds": communication,
        "torch": torch.__version__,
    }


def _measure_phases(step: Any, synchronize: Any) -> dict[str, float]:
    """Seconds of each phase in a step that waits for the device between phases: together more than a step that does not."""
    spent = dict.fromkeys(TIMED_PHASES, 0.0)
    for _ in range(PHASE_STEPS):
        at, phase = time.perf_counter(), ""

        def mark(following: str) -> None:
            nonlocal at, phase
            synchronize()
            now = time.perf_counter()
            if phase:
                spent[phase] += now - at
            at, phase = now, following

        step(mark)
        mark("")
    return {phase: seconds / PHASE_STEPS for phase, seconds in spent.items()}


def _measure_communication(step: Any, synchronize: Any, trace_file: Path | None) -> float:
    """Seconds of one step that collectives are under way, whether or not something computes meanwhile."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    synchronize()
    with profile(activities=activities) as profiled:
        step()
        synchronize()
    if trace_file is not None:
        trace_file.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(trace_file))
    spans = []
    for event in profiled.events() or []:
        if event.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel")):
            spans.append((event.time_range.start, event.time_range.end))
    return _union_length(spans) / 1e6


def _union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: collectives overlap each other."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _summary_line(row: dict[str, Any]) -> str:
    swept = " ".join(f"{name}={value}" for name, value in row.get("swept", {}).items())
    if "failed" in row:
        return f"{swept}: {row['failed']}"
    return f"{swept}: {row['tokens_per_second']:,.0f} tokens/s"


def _print_results(rows: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(rows, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    about = next((row for row in rows if "failed" not in row), None)
    if about is not None:
        console.print(f"{about['ranks']} × {about['device']}, {about['dtype']}, data: {about['data']}", soft_wrap=True)
        if len(rows) == 1:
            console.print(f"{about['engine']}, {about['parameters']:,} parameters, {about['batch']}", soft_wrap=True)
    swept = list(rows[0].get("swept", {}))
    table = Table()
    for name in (*swept, "tokens/s", "ms a step", "TFLOP/s", "MFU", "GiB", *TIMED_PHASES, "comm."):
        table.add_column(name, justify="left" if name in swept else "right")
    for row in rows:
        chosen = [row["swept"][name] for name in swept] if swept else []
        if "failed" in row:
            table.add_row(*chosen, row["failed"] if row["failed"] == OUT_OF_MEMORY else "refused", style="yellow")
            continue
        step = row["step_seconds"]
        table.add_row(
            *chosen,
            f"{row['tokens_per_second']:,.0f}",
            f"{1e3 * step['median']:.0f} ({1e3 * step['min']:.0f}–{1e3 * step['max']:.0f})",
            f"{row['tflops_a_rank']:.3g}",
            f"{row['mfu']:.0%}" if row["mfu"] else "?",
            f"{row['memory_gib']:.2f}",
            # A pipeline's schedule mixes the passes; all of it counts as forward.
            *(f"{1e3 * row['phase_seconds'][phase]:.0f}" if row["phase_seconds"][phase] else "–" for phase in TIMED_PHASES),
            f"{1e3 * row['communication_seconds']:.0f}",
        )
    console.print(table)
    for row in rows:
        if row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            console.print(f"refused: {_summary_line(row)}", soft_wrap=True)
    phases = "phases and communication in ms of one step; phases are timed with the host waiting after each"
    console.print(phases, soft_wrap=True)
    if about is not None:
        console.print(f"MFU and TFLOP/s are of a rank; {FLOPS_CONVENTION}", soft_wrap=True)
