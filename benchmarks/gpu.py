"""Tokens a second and MFU of lmforge beside others on one GPU: 124M, 1B, 3B and 8B Llama shapes, bf16 and float8.

A trial is a process: it starts, warms up and compiles, is timed, and ends, so that one that runs out of memory or crashes
is a marked row and the table goes on. Trials of one size and length take turns in rounds, another one first in each; a ratio
is taken within a round. Models of these sizes have no room beside each other, so that a round is as long as its trials.

Without a GPU a tiny shape takes the same way on the CPU, and nothing is recorded.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contender_process import Contender, EndedEarly
from contenders import LMFORGE, LMFORGE_FLOAT8, PLAIN, PLAIN_COMPILED, TRAINER, WARM_UP_STEPS, Contest
from setting import RESULTS, machine, machine_lines, summarize, tokens_of_stdlib, write_result

from lmforge.bench.step_timing import OUT_OF_MEMORY, ran_out_of_memory
from lmforge.cluster.distributed import DistributedContext
from lmforge.cluster.rank_info import RankInfo, threads_per_rank
from lmforge.interop.config_json import to_config_json
from lmforge.model.config import ModelConfig
from lmforge.model.flops import FLOPS_CONVENTION, flops_per_token, parameter_count
from lmforge.parallel.precision import has_native_bf16
from lmforge.plan.peak_flops import rank_peak_flops

LENGTHS = (2048, 8192)
GIB = 2**30
# Of a GPU's memory, what weights, gradients and optimizer states may take; the rest is for activations and logits.
SHARE_AT_REST = 0.8


@dataclass(frozen=True)
class Size:
    """A shape, and how many tokens a forward pass and a step take. With `checkpointing_from` that length and longer ones
    compute activations again, for all contenders alike."""

    shape: ModelConfig
    micro_tokens: int
    step_tokens: int
    checkpointing_from: int | None = None


def llama(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kept: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kept,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        rope_theta=5e5,
    )


# Written out rather than presets, so that results stay comparable when presets change. Tokens of a forward pass are what
# leaves room, on 80 GB, for a contender that keeps all of its logits.
SIZES = {
    "124m": Size(llama(50304, 768, 2048, 12, 12, 12, tied=True), micro_tokens=32_768, step_tokens=65_536),
    "1b": Size(llama(128256, 2048, 8192, 16, 32, 8, tied=True), micro_tokens=8_192, step_tokens=65_536),
    "3b": Size(
        llama(128256, 3072, 8192, 28, 24, 8, tied=True), micro_tokens=4_096, step_tokens=32_768, checkpointing_from=8192
    ),
    "8b": Size(llama(128256, 4096, 14336, 32, 32, 8, tied=False), micro_tokens=4_096, step_tokens=16_384, checkpointing_from=0),
}
TINY_SIZES = {"tiny": Size(llama(512, 32, 64, 2, 4, 2, tied=True), micro_tokens=128, step_tokens=256, checkpointing_from=128)}
TINY_LENGTHS = (128,)


def bytes_at_rest(shape: ModelConfig, bytes_a_number: int) -> int:
    """Of weights, gradients and AdamW's two moments."""
    return 4 * bytes_a_number * parameter_count(shape).total


def what_fits(size: Size, length: int, memory_bytes: float) -> dict[str, Any]:
    """Options that all contenders share: bf16 masters (and so bf16 gradients and states) only where fp32 finds no room."""
    fits = bytes_at_rest(size.shape, 4) <= SHARE_AT_REST * memory_bytes
    checkpointing = size.checkpointing_from is not None and length >= size.checkpointing_from
    return {"master_dtype": "fp32" if fits else "bf16", "activation_checkpointing": checkpointing}


def contest_of(size: Size, length: int, folder: Path, device: torch.device, chosen: argparse.Namespace) -> Contest:
    on_gpu = device.type == "cuda"
    micro_rows = max(1, size.micro_tokens // length)
    rows = max(micro_rows, size.step_tokens // length)
    return Contest(
        shape=size.shape,
        rows=rows,
        length=length,
        threads=chosen.threads,
        dtype="bf16" if has_native_bf16(device) else "fp32",
        compiled=on_gpu,
        peak_size=0,
        folder=folder,
        device=device.type,
        accumulation=rows // micro_rows,
        **what_fits(size, length, torch.cuda.get_device_properties(device).total_memory if on_gpu else 8 * GIB),
    )


def why(ended: EndedEarly) -> str:
    """In a few words, for a row of the table."""
    if ran_out_of_memory(ended.status, ended.said):
        return OUT_OF_MEMORY
    last = next((line for line in reversed(ended.said.splitlines()) if line.strip()), "it said nothing")
    return last.removeprefix("lmforge.errors.UserError: ").replace("|", "/")[:200]


def contenders(compiled: bool) -> tuple[str, ...]:
    return LMFORGE, LMFORGE_FLOAT8, PLAIN_COMPILED if compiled else PLAIN, TRAINER


def attempt(name: str, contest: Contest, chosen: argparse.Namespace) -> dict[str, Any]:
    """One trial. Where it fails, {"failed": why}."""
    contender = Contender(name, contest, chosen.limit)
    try:
        warm_up = contender.take_turn(0.0)
        turn = contender.take_turn(chosen.seconds)
        loss = contender.finish()
    except EndedEarly as ended:
        return {"failed": why(ended)}
    finally:
        contender.leave()
    speed = turn.steps * contest.tokens_a_step / turn.seconds
    return {"speed": speed, "memory_gib": turn.memory_gib, "loss": loss, "warm_up_seconds": warm_up.seconds}


def hold(label: str, contest: Contest, peak: float | None, chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one size and length: what was measured of each contender, or why it was not."""
    names = contenders(contest.compiled)
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(chosen.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if any("failed" in trial for trial in trials[name]):
                continue
            trial = attempt(name, contest, chosen)
            trials[name].append(trial)
            say(f"{label}, round {number + 1} of {chosen.rounds}: {name}: {outcome(trial)}")
    flops = flops_per_token(contest.shape, contest.length)
    return {name: figures(of_name, trials[LMFORGE], flops, peak) for name, of_name in trials.items()}


def outcome(trial: dict[str, Any]) -> str:
    if "failed" in trial:
        return trial["failed"]
    return f"{trial['speed']:,.0f} tokens/s, warm after {trial['warm_up_seconds']:.0f} s"


def figures(trials: list[dict[str, Any]], ours: list[dict[str, Any]], flops: float, peak: float | None) -> dict[str, Any]:
    failed = next((trial["failed"] for trial in trials if "failed" in trial), None)
    if failed is not None:
        return {"failed": failed}
    speeds = [trial["speed"] for trial in trials]
    pairs = [] if any("failed" in trial for trial in ours) else zip(ours, trials, strict=True)
    ratios = [mine["speed"] / theirs["speed"] for mine, theirs in pairs]
    return {
        "tokens_per_second": summarize(speeds),
        "mfu": summarize([speed * flops / peak for speed in speeds]) if peak else None,
        "lmforge_is_faster_by": summarize(ratios) if ratios else None,
        "memory_gib": max(trial["memory_gib"] for trial in trials),
        "loss_of_first_steps": trials[0]["loss"],
    }


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = ["# Training on one GPU, side by side", "", f"- {record['device']}", *machine_lines(record["machine"])]
    lines += [f"- {record['what']}", f"- MFU: {FLOPS_CONVENTION}; of the bf16 peak of the data sheet, float8 too"]
    for label, cell in record["cells"].items():
        lines += ["", f"## {label}: {cell['what']}", ""]
        lines += ["| contender | tokens/s | MFU | lmforge in bf16 ÷ it | GiB | loss, steps 1–10 |", "|---|---|---|---|---|---|"]
        for name, row in cell["contenders"].items():
            if "failed" in row:
                lines.append(f"| {name} | {row['failed']} | | | | |")
                continue
            cells = [_of_rounds(row[what], form) for what, form in COLUMNS.items()]
            lines.append(f"| {name} | {' | '.join(cells)} | {row['memory_gib']:.1f} | {row['loss_of_first_steps']:.3f} |")
    return "\n".join(lines)


COLUMNS = {"tokens_per_second": "{:,.0f}", "mfu": "{:.1%}", "lmforge_is_faster_by": "{:.2f}"}


def _of_rounds(row: dict[str, Any] | None, form: str) -> str:
    return "" if row is None else f"{form.format(row['median'])} ({form.format(row['min'])}–{form.format(row['max'])})"


def say(line: str) -> None:
    print(line, flush=True)


def describe(contest: Contest) -> str:
    """The cell in words: what is trained, in what batches, and what makes it fit."""
    at_rest = bytes_at_rest(contest.shape, 4 if contest.master_dtype == "fp32" else 2) / GIB
    again = ", activations computed again" if contest.activation_checkpointing else ""
    return (
        f"{parameter_count(contest.shape).total:,} parameters, {contest.rows} × {contest.length} tokens a step in"
        f" {contest.accumulation} micro-batches, {contest.dtype}, masters {contest.master_dtype}"
        f" ({at_rest:.1f} GiB at rest){again}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*SIZES, *(f"{size}-{length}" for size in SIZES for length in LENGTHS)]
    parser.add_argument(
        "--only", action="append", choices=names, help="this size, or size and length, only; may be given several times"
    )
    parser.add_argument("--quick", action="store_true", help="one round of 3 seconds: does it work, and about how fast")
    parser.add_argument("--rounds", type=int, default=3, help="trials of each contender (default: 3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time that is measured in a trial (default: 10)")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds until a silent trial is given up (default: 420)")
    parser.add_argument(
        "--threads", type=int, default=threads_per_rank(1), help="CPU threads of each (default: the cores there are)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args()
    if chosen.rounds < 1 or chosen.threads < 1 or chosen.limit <= 0:
        parser.error("--rounds, --threads: at least 1; --limit: more than 0")
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, min(chosen.seconds, 3.0)
    return chosen


def main() -> int:
    chosen = arguments()
    about = machine()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    sizes, lengths = (SIZES, LENGTHS) if on_gpu else (TINY_SIZES, TINY_LENGTHS)
    if not on_gpu:
        say("no GPU that torch can use: a tiny shape on the CPU, uncompiled, to see that this works; --only is passed over")
        torch.set_num_threads(chosen.threads)
    only = chosen.only if on_gpu else None
    labels = [(size, length) for size in sizes for length in lengths]
    cells: dict[str, Any] = {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        folder = Path(name)
        tokens_of_stdlib(folder, files=None if on_gpu else 20, vocab_size=4096 if on_gpu else 512)
        for size, length in labels:
            label = f"{size}-{length}"
            if only and size not in only and label not in only:
                continue
            contest = contest_of(sizes[size], length, folder, device, chosen)
            dtype = torch.bfloat16 if contest.dtype == "bf16" else torch.float32
            peak = rank_peak_flops(DistributedContext(RankInfo(), device, None), dtype)
            say(f"{label}: {describe(contest)}")
            cells[label] = {
                "what": describe(contest),
                "shape": to_config_json(contest.shape),
                "flops_per_token": flops_per_token(contest.shape, length),
                "peak_flops": peak,
                "contenders": hold(label, contest, peak, chosen),
            }
    record = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name(device) if on_gpu else "no GPU",
        "machine": about,
        "what": f"{chosen.rounds} rounds of {chosen.seconds:g} s after {WARM_UP_STEPS} steps of warm-up, each trial a process"
        f" of its own; median (low–high), ratios in a round; {time.perf_counter() - began:.0f} s in all",
        "convention": FLOPS_CONVENTION,
        "warm_up_steps": WARM_UP_STEPS,
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "cells": cells,
    }
    say(f"\n{table(record)}\n")
    if not on_gpu:
        say("nothing was recorded: results are of a GPU")
        return 0
    say(f"written to {write_result('gpu', record, table(record), chosen.out, hardware=record['device'])} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
