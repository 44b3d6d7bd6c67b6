"""`lmforge bench`: what a step of a recipe costs, and where the time goes; for one recipe, or a sweep over its options.

A trial builds what training would build, runs whole optimizer steps and times them. It then runs a few steps in which the
host waits for the device after each phase, to time the phases, and one under the profiler, to time communication. Tokens come
from the recipe's shards, or are random where there are none.
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
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.verbs import BenchConfig
from lmforge.data.batch import Batch
from lmforge.data.dataset import TokenDataset
from lmforge.data.loader import BatchLoader
from lmforge.data.shards import TokenFolder
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
    """A batch of random tokens, one document a sequence, for every step: used where the recipe's data is missing."""

    def __init__(self, vocab_size: int, plan: BatchPlan, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = plan.micro_batch_size, plan.sequence_length
        tokens = torch.randint(0, vocab_size, size, generator=generator)
        positions = torch.arange(plan.sequence_length).expand(size).contiguous()
        # Random too, and used only where the model has dropout.
        keys = torch.randint(-(2**63), 2**63 - 1, size, generator=generator)
        batch = Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros(size, dtype=torch.int32), keys)
        self._batches = [batch.to(device)] * plan.accumulation

    def batches(self, step: int) -> list[Batch]:
        return self._batches

    def close(self) -> None: ...


def bench(config: BenchConfig, arguments: list[str]) -> int:
    """Time the recipe, or every combination of a sweep, and print. `arguments` is the command line without the verb.

    Raises UserError where the recipe cannot be trained here, and RunFailed where a trial failed for another reason than
    memory.
    """
    if not config.bench.sweep:
        row = measure(config)
        if read_rank_info().is_rank0:
            _print_results([row], config.bench.output)
        return 0
    if config.bench.trace:
        raise UserError("--trace: not with --sweep; trace one recipe")
    if read_rank_info().launched:
        raise UserError("--sweep: starts ranks itself, so do not start it with torchrun; use --launch.processes")
    rows = []
    for overrides in sweep_combinations(config.bench.sweep):
        rows.append({**_run_trial(arguments, overrides), "swept": overrides})
        if config.bench.output == "text":
            print(_summary_line(rows[-1]), file=sys.stderr, flush=True)
    _print_results(rows, config.bench.output)
    return 0


def sweep_combinations(sweep: tuple[str, ...]) -> list[dict[str, str]]:
    """Every combination of `section.option=value,value…`. Raises UserError where one has another form."""
    axes = []
    for axis in sweep:
        name, equals, values = axis.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--sweep {axis}: expected section.option=value,value…")
        axes.append([(name, value) for value in values.split(",")])
    return [dict(combination) for combination in itertools.product(*axes)]


def _run_trial(arguments: list[str], overrides: dict[str, str]) -> dict[str, Any]:
    """One combination in its own processes, so that its memory and its failure end with them."""
    options = [word for name, value in overrides.items() for word in (f"--{name}", value)]
    # The last of an option given twice counts, and a list may be empty.
    command = [sys.executable, "-m", "lmforge", "bench", *arguments, *options, "--bench.output", "json", "--bench.sweep"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return dict(json.loads(done.stdout)[0])
    last_line = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no error message")
    if ran_out_of_memory(done.returncode, done.stderr):
        return {"failed": OUT_OF_MEMORY}
    if done.returncode == 2:
        return {"failed": last_line.removeprefix("lmforge: ")}
    raise RunFailed(f"bench {' '.join(options)}: {last_line}")


def ran_out_of_memory(status: int | None, stderr: str) -> bool:
    """Whether a process that ended with `status` and wrote `stderr` ran out of memory."""
    return "OutOfMemoryError" in stderr or "can't allocate memory" in stderr or status == -9


def measure(config: BenchConfig) -> dict[str, Any]:
    """Times and rates of one recipe on these ranks. Every rank calls it and gets rank 0's result."""
    set_determinism(config.train.deterministic)
    dist_ctx = cluster.init_distributed(config.train.device, config.train.threads)
    try:
        plan = plan_batches(config, dist_ctx.world_size)
        has_data = (config.data.folder / MANIFEST).exists()
        tokens = TokenFolder.open(config.data.folder) if has_data else None
        vocab_size = tokens.tokenizer.vocab_size if tokens else None
        pretrained = find_pretrained(config.model.source) if config.model.source else None
        model_config = resolve_model_config(config, pretrained, vocab_size)
        check_parallel(config.parallel, model_config, plan)
        data = _open_data(config, tokens, model_config, plan, dist_ctx)
        try:
            load_weights = pretrained.load_weights if pretrained and loads_pretrained_weights(config) else None
            fill = partial(fill_weights, config, dist_ctx, load_weights)
            row = _Trial(config, model_config, fill, plan, data, dist_ctx).run()
        finally:
            data.close()
        return dist_ctx.broadcast({**row, "data": str(config.data.folder) if has_data else "random tokens"})
    finally:
        cluster.destroy_distributed()


def _open_data(
    config: BenchConfig, tokens: TokenFolder | None, model_config: ModelConfig, plan: BatchPlan, dist_ctx: DistributedContext
) -> BatchLoader | RandomBatches:
    if tokens is None:
        rank, _ = data_parallel_rank_and_size(config.parallel, dist_ctx.rank_info.rank, dist_ctx.world_size)
        return RandomBatches(model_config.vocab_size, plan, dist_ctx.device, seed=rank)
    dataset = TokenDataset(tokens, sequence_length=config.data.sequence_length, seed=config.train.seed)
    return build_loader(config, dataset, plan, dist_ctx)


class _Trial:
    """A model of a recipe that is trained and timed."""

    def __init__(
        self,
        config: BenchConfig,
        model_config: ModelConfig,
        fill: Callable[[LanguageModel], None],
        plan: BatchPlan,
        data: BatchLoader | RandomBatches,
        dist_ctx: DistributedContext,
    ) -> None:
        self._config, self._model_config, self._plan, self._data = config, model_config, plan, data
        self._device, self._is_rank0 = dist_ctx.device, dist_ctx.is_rank0
        self._dtype, _ = choose_dtype(config.train.dtype, dist_ctx.device)
        self._compiled, _ = choose_compile(config.train.compile, dist_ctx.device, config.train.steps)
        self._objective = NextTokenObjective()
        self._model, self._optimizer = build_model_and_optimizer(
            config,
            model_config,
            self._objective,
            dist_ctx,
            self._dtype,
            self._compiled,
            fill,
        )
        self._step_number = itertools.count()

    def run(self) -> dict[str, Any]:
        """Time steps, then phases, then communication."""
        bench = self._config.bench
        warmup_seconds = sum(self._timed_step() for _ in range(bench.warmup_steps))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [self._timed_step() for _ in range(bench.steps)]
        memory_gib = peak_memory_gib(self._device)
        phase_seconds = _measure_phases(self._step, self._synchronize)
        trace_file = bench.trace if self._is_rank0 else None
        return self._row(seconds) | {
            "warmup_seconds": warmup_seconds,
            "memory_gib": memory_gib,
            "phase_seconds": phase_seconds,
            "communication_seconds": _measure_communication(self._step, self._synchronize, trace_file),
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _step(self, set_phase: Callable[[str], None] = lambda phase: None) -> None:
        set_phase("data")
        train_step(
            self._model,
            self._optimizer,
            self._data.batches(next(self._step_number)),
            self._objective.num_items,
            lr=self._config.optimizer.lr,
            max_grad_norm=self._config.optimizer.max_grad_norm,
            set_phase=set_phase,
        )

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._step()
        self._synchronize()
        return time.perf_counter() - began

    def _row(self, seconds: list[float]) -> dict[str, Any]:
        """What was timed, its rates, and what they hold for."""
        median, on_gpu = statistics.median(seconds), self._device.type == "cuda"
        tokens_per_second, world_size = self._plan.tokens / median, self._model.dist_ctx.world_size
        flops = tokens_per_second / world_size * flops_per_token(self._model_config, self._plan.sequence_length)
        peak = device_peak_flops(self._device, self._dtype)  # that of bf16 for float8 too, so that the two compare
        float8 = ", float8 in blocks" if self._config.train.float8 else ""
        return {
            "engine": self._model.description,
            "ranks": world_size,
            "device": torch.cuda.get_device_name(self._device) if on_gpu else f"cpu, {torch.get_num_threads()} threads a rank",
            "dtype": str(self._dtype).removeprefix("torch.") + float8,
            "compiled": self._compiled,
            "parameters": parameter_count(self._model_config).total,
            "batch": str(self._plan),
            "step_seconds": {"median": median, "min": min(seconds), "max": max(seconds), "steps": len(seconds)},
            "tokens_per_second": tokens_per_second,
            "tflops_a_rank": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "convention": FLOPS_CONVENTION,
            "torch": torch.__version__,
        }


def _measure_phases(step: Callable[..., None], synchronize: Callable[[], None]) -> dict[str, float]:
    """Seconds of each phase of a step. The host waits for the device between phases, so their sum exceeds a normal step."""
    spent = dict.fromkeys(TIMED_PHASES, 0.0)
    for _ in range(PHASE_STEPS):
        at, phase = time.perf_counter(), ""

        def set_phase(following: str) -> None:
            nonlocal at, phase
            synchronize()
            now = time.perf_counter()
            if phase:
                spent[phase] += now - at
            at, phase = now, following

        step(set_phase)
        set_phase("")
    return {phase: seconds / PHASE_STEPS for phase, seconds in spent.items()}


def _measure_communication(step: Callable[..., None], synchronize: Callable[[], None], trace_file: Path | None) -> float:
    """Seconds of one step in which collectives run, overlapped by computation or not."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    synchronize()
    with profile(activities=activities) as profiled:
        step()
        synchronize()
    if trace_file is not None:
        trace_file.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(trace_file))
    collectives = ("gloo:", "ncclDevKernel", "ncclKernel")
    spans = [event.time_range for event in profiled.events() or [] if event.name.startswith(collectives)]
    return _union_length([(span.start, span.end) for span in spans]) / 1e6


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
    first = next((row for row in rows if "failed" not in row), None)
    if first is not None:
        console.print(f"{first['ranks']} × {first['device']}, {first['dtype']}, data: {first['data']}", soft_wrap=True)
        if len(rows) == 1:
            console.print(f"{first['engine']}, {first['parameters']:,} parameters, {first['batch']}", soft_wrap=True)
    swept = list(rows[0].get("swept", {}))
    table = Table()
    for name in (*swept, "tokens/s", "ms a step", "TFLOP/s", "MFU", "GiB", *TIMED_PHASES, "comm."):
        table.add_column(name, justify="left" if name in swept else "right")
    for row in rows:
        values = [row["swept"][name] for name in swept]
        if "failed" in row:
            table.add_row(*values, row["failed"] if row["failed"] == OUT_OF_MEMORY else "refused", style="yellow")
        else:
            table.add_row(*values, *_cells(row))
    console.print(table)
    for row in rows:
        if row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY:
            console.print(f"refused: {_summary_line(row)}", soft_wrap=True)
    phases = "phases and communication in ms of one step; the host waits after each phase to time it"
    console.print(phases, soft_wrap=True)
    if first is not None:
        console.print(f"MFU and TFLOP/s are per rank; {FLOPS_CONVENTION}", soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    step = row["step_seconds"]
    return [
        f"{row['tokens_per_second']:,.0f}",
        f"{1e3 * step['median']:.0f} ({1e3 * step['min']:.0f}–{1e3 * step['max']:.0f})",
        f"{row['tflops_a_rank']:.3g}",
        f"{row['mfu']:.0%}" if row["mfu"] else "?",
        f"{row['memory_gib']:.2f}",
        # A pipeline's schedule mixes the passes: all of it counts as forward.
        *(f"{1e3 * seconds:.0f}" if (seconds := row["phase_seconds"][phase]) else "–" for phase in TIMED_PHASES),
        f"{1e3 * row['communication_seconds']:.0f}",
    ]
