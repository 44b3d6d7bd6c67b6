"""`lmforge doctor --parity`: the table that compares parallel strategies on these ranks."""

import faulthandler
import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lmforge.core.distributed.distributed import DistributedContext, init_distributed
from lmforge.core.distributed.waiting import print_line
from lmforge.core.errors import UserError, format_count, format_duration
from lmforge.core.files.atomic_files import without_non_finite
from lmforge.core.model.config import ModelConfig
from lmforge.core.parallel.precision import DTYPES, dtype_name, missing_for_compile
from lmforge.lab.bench import parity
from lmforge.lab.bench.bounds import bound_of_splits
from lmforge.lab.bench.parity import ParityCase, ParityData, ParityResult
from lmforge.ops.options.examine import DoctorOptions
from lmforge.ops.terminal.cells import page_console

SEQUENCES_PER_RANK = 8
MIB = 2**20
STDERR_FILENO = 2
GRACE_SECONDS = 5.0
# The memory that a rank holds: the first three between steps, the last between forward and
# backward.
MEMORY_COLUMNS = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
}


def check_parity(options: DoctorOptions) -> int:
    """Train the small model under every strategy that fits the ranks, and print a table.

    Returns 1 where one is wrong.
    """
    with init_distributed(options.device, threads=1) as dist_ctx:
        missing = missing_for_compile(dist_ctx.device) if options.compile else ""
        if missing:
            raise UserError(
                f"--compile: {missing} on this machine; install it, or leave the option out"
            )
        rows = _run_cases(dist_ctx, options)
        if dist_ctx.is_rank0 and options.output == "json":
            print(json.dumps(without_non_finite(rows), indent=1))
        elif dist_ctx.is_rank0:
            _print_table(rows, dist_ctx, options.dtype)
        return dist_ctx.broadcast(int(any(row["wrong"] for row in rows)))


def _run_cases(dist_ctx: DistributedContext, options: DoctorOptions) -> list[dict[str, Any]]:
    """A row for each strategy on rank 0; none on the other ranks."""
    data = ParityData(
        sequences=SEQUENCES_PER_RANK * dist_ctx.world_size, steps=options.steps, seed=options.seed
    )
    of_ranks = dist_ctx.world_size, options.compile, DTYPES[options.dtype]
    cases = [*parity.strategy_cases(*of_ranks), *parity.cases_of_other_models(*of_ranks)]
    references = dict[ModelConfig, ParityResult]()
    if dist_ctx.is_rank0:
        with _reported_if_late("one process", options.timeout_seconds, 0):
            of_models = {case.model_config: case for case in cases}
            references = {
                model: parity.run_single(case, data, dist_ctx) for model, case in of_models.items()
            }
    # Cases and the compiler run garbage collection often, which need not traverse lasting objects
    # each time.
    gc.freeze()
    rows = []
    is_shown = dist_ctx.is_rank0 and sys.stderr.isatty()
    with Console(stderr=True, quiet=not is_shown).status("") as status:
        for case in cases:
            status.update(case.name)
            if dist_ctx.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with _reported_if_late(case.name, options.timeout_seconds, dist_ctx.rank_info.rank):
                result = parity.run_case(case, data, dist_ctx)
            if dist_ctx.is_rank0:
                rows.append(_row(case, result, references[case.model_config], dist_ctx))
            torch.compiler.reset()
    return rows


@contextmanager
def _reported_if_late(strategy: str, seconds: float, rank: int) -> Iterator[None]:
    """A context that is named with its rank and the stacks of all threads when it is late.

    It is named every so many seconds until it ends.
    """
    ended = threading.Event()

    def name_it() -> None:
        waited = 0.0
        while not ended.wait(seconds):
            waited += seconds
            print_line(
                f"rank {rank}: {strategy} has not ended after {format_duration(waited)}; the stacks"
                " of the rank:"
            )
            faulthandler.dump_traceback(STDERR_FILENO)
            dump_without_lock()

    def dump_without_lock() -> None:
        """Let faulthandler print the stacks, later.

        Where the rank holds Python's lock and waits, no thread of Python can print them. Reading
        stacks that run may crash, so it begins only when the other thread has had its time, and
        begins anew after it.
        """
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, repeat=True, file=STDERR_FILENO)

    late = threading.Thread(target=name_it, name="late", daemon=True)
    dump_without_lock()
    late.start()
    try:
        yield
    finally:
        ended.set()
        late.join()
        faulthandler.cancel_dump_traceback_later()


def _row(
    case: ParityCase, result: ParityResult, reference: ParityResult, dist_ctx: DistributedContext
) -> dict[str, Any]:
    differences = parity.relative_differences(result, reference)
    device_type = dist_ctx.device.type
    bound = bound_of_splits(dtype_name(case.dtype), device_type)
    # Compiled, the residual stream is not seen.
    seen_dtypes = set() if case.compile_model else {case.dtype}
    # What is not finite is infinitely far.
    is_near = all(differences[name] <= getattr(bound, name) for name in differences)
    return {
        "strategy": case.name,
        "ranks": dist_ctx.world_size,
        "loss": result.losses[-1],
        "reference": reference.losses[-1],
        "difference": differences,
        "wrong": not is_near or result.hidden_dtypes != seen_dtypes,
        "tokens_per_second": result.tokens_per_second,
        "mib": {name: size / MIB for name, size in result.memory_bytes.items()},
        "peak_gib": result.memory_gib if device_type == "cuda" else None,
        "options": case.options.model_dump(),
    }


def _print_table(rows: list[dict[str, Any]], dist_ctx: DistributedContext, dtype: str) -> None:
    device_type = dist_ctx.device.type
    ranks = format_count(dist_ctx.world_size, "rank")
    table = Table(title=f"{ranks} on {device_type}, {dtype}", title_justify="left")
    table.add_column("strategy")
    columns = ["loss", "Δ loss", "Δ gradient", "Δ weights", "tok/s", *MEMORY_COLUMNS.values()]
    if device_type == "cuda":
        columns.append("peak GiB")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            row["strategy"],
            f"{row['loss']:.6f}",
            *(f"{row['difference'][name]:.0e}" for name in ("loss", "gradient_norm", "weights")),
            f"{row['tokens_per_second']:,.0f}",
            *(f"{row['mib'][name]:.2f}" if name in row["mib"] else "?" for name in MEMORY_COLUMNS),
        ]
        if device_type == "cuda":
            cells.append(f"{row['peak_gib']:.2f}")
        table.add_row(*cells, style="bold red" if row["wrong"] else None)
    console = page_console(160)
    console.print(table)
    bound = bound_of_splits(dtype, device_type)
    bounds = dict.fromkeys(
        f"{each:.2g}" for each in (bound.loss, bound.gradient_norm, bound.weights)
    )
    wrong = [row["strategy"] for row in rows if row["wrong"]]
    within = ", ".join(bounds)
    verdict = f"{len(rows)} strategies agree with one process within {within}"
    if len(bounds) > 1:
        verdict += f" (loss, gradient, weights), with a residual stream in {dtype}"
    if wrong:
        verdict = (
            f"WRONG, further than {within} from one process, or in another dtype:"
            f" {', '.join(wrong)}"
        )
    console.print(verdict, style="bold red" if wrong else None, soft_wrap=True)
    console.print("Δ: largest relative difference from one process over all steps")
    memory = (
        "MiB on rank 0: weights, gradients and optimizer states between steps, activations before"
        " the backward pass"
    )
    console.print(memory, soft_wrap=True)
