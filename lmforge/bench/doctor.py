"""`lmforge doctor --parity`: does every strategy compute the same on this machine, with these ranks?"""

import gc
import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lmforge.bench.parity import ParityData, relative_differences, run_case, run_single, strategy_cases
from lmforge.cluster import distributed as cluster
from lmforge.cluster.distributed import DistributedContext
from lmforge.config.verbs import DoctorOptions
from lmforge.errors import UserError
from lmforge.parallel.precision import missing_for_compile

# Sums in another order, in fp32, over ten steps. A GPU's kernels also order their sums by the shape of what they are given.
TOLERANCES = {"cpu": 2e-6, "cuda": 5e-5}
SEQUENCES_PER_RANK = 8
MIB = 2**20
# What a rank holds of each strategy: the first three between steps, the last between forward and backward.
MEMORY_COLUMNS = {"parameters": "weights", "gradients": "grads", "optimizer": "optim.", "activations": "activ."}


def doctor(options: DoctorOptions) -> int:
    """Train the small model under every strategy that fits the ranks, print a table, and return 1 where one is wrong."""
    if not options.parity:
        raise UserError("doctor: say what to examine: --parity")
    ranks = cluster.init_distributed(options.device, threads=1)
    try:
        if options.compile:
            missing = missing_for_compile(ranks.device)
            if missing:
                raise UserError(f"--compile: {missing} on this machine; install it, or leave the option out")
        rows = _run_cases(ranks, options)
        if ranks.is_rank0:
            print(json.dumps(rows, indent=1)) if options.output == "json" else _print_table(rows, ranks)
        wrong = ranks.broadcast([row["strategy"] for row in rows if row["wrong"]])
        return 1 if wrong else 0
    finally:
        cluster.destroy_distributed()


def _run_cases(dist_ctx: DistributedContext, options: DoctorOptions) -> list[dict[str, Any]]:
    """A row for each strategy; on ranks but the first the rows stay empty."""
    task = ParityData(sequences=SEQUENCES_PER_RANK * dist_ctx.world_size, steps=options.steps, seed=options.seed)
    chosen = strategy_cases(dist_ctx.world_size, options.compile)
    tolerance = TOLERANCES[dist_ctx.device.type]
    reference = run_single(chosen[0], task, dist_ctx) if dist_ctx.is_rank0 else None
    gc.freeze()  # trials and the compiler collect often: what is here to stay need not be looked through each time
    rows = []
    for case in chosen:
        if dist_ctx.is_rank0 and sys.stderr.isatty():
            print(f"\r\033[K{case.name} …", end="", file=sys.stderr, flush=True)
        if dist_ctx.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        outcome = run_case(case, task, dist_ctx)
        if reference is not None:
            differences = relative_differences(outcome, reference)
            rows.append(
                {
                    "strategy": case.name,
                    "ranks": dist_ctx.world_size,
                    "loss": outcome.losses[-1],
                    "reference": reference.losses[-1],
                    "difference": differences,
                    # Not a number is no difference that is small enough.
                    "wrong": not all(value <= tolerance for value in differences.values()),
                    "tokens_per_second": outcome.tokens_per_second,
                    "mib": {what: size / MIB for what, size in outcome.memory_bytes.items()},
                    "peak_gib": outcome.memory_gib if dist_ctx.device.type == "cuda" else None,
                    "options": asdict(case.strategy),
                }
            )
        torch.compiler.reset()
    if dist_ctx.is_rank0 and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return rows


def _print_table(rows: list[dict[str, Any]], dist_ctx: DistributedContext) -> None:
    on_gpu = dist_ctx.device.type == "cuda"
    table = Table(
        title=f"{dist_ctx.world_size} {'rank' if dist_ctx.world_size == 1 else 'ranks'} on {dist_ctx.device.type}, fp32",
        title_justify="left",
    )
    table.add_column("strategy")
    for name in (
        "loss",
        "Δ loss",
        "Δ gradient",
        "Δ weights",
        "tok/s",
        *MEMORY_COLUMNS.values(),
        *(["GiB at most"] if on_gpu else []),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        differences = [f"{row['difference'][name]:.0e}" for name in ("loss", "gradient_norm", "weights")]
        cells = [
            row["strategy"],
            f"{row['loss']:.6f}",
            *differences,
            f"{row['tokens_per_second']:,.0f}",
            *(f"{row['mib'][what]:.2f}" if what in row["mib"] else "?" for what in MEMORY_COLUMNS),
        ]
        if on_gpu:
            cells.append(f"{row['peak_gib']:.2f}")
        table.add_row(*cells, style="bold red" if row["wrong"] else None)
    # Into a file or a pipe a table is as wide as it needs to be.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    wrong = [row["strategy"] for row in rows if row["wrong"]]
    tolerance = TOLERANCES[dist_ctx.device.type]
    told = f"{len(rows)} strategies agree with one process within {tolerance:g}"
    if wrong:
        told = f"WRONG, further than {tolerance:g} from one process: {', '.join(wrong)}"
    console.print(told, style="bold red" if wrong else None, highlight=False, soft_wrap=True)
    console.print("Δ: largest relative difference from one process over all steps", highlight=False)
    told = "MiB on the first rank: weights, gradients and optimizer states between steps, activations before the backward pass"
    console.print(told, highlight=False, soft_wrap=True)
