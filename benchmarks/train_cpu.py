"""Tokens per second of lmforge compared with other trainers on a CPU.

All have the same Llama shape, weights, data, optimizer, dtype and threads. Each contender runs in a
separate process, since each changes process-wide state: thread pool, allocator, garbage collection,
signal handlers, compiler settings, accelerate's singletons. They warm up and compile one after
another, then take turns, one at a time while the rest wait on a pipe, so that whatever the machine
does to a round it does to all of them. A ratio is taken within a round; medians over the rounds are
reported.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from contender_process import Contender
from contenders import (
    LMFORGE,
    LMFORGE_UNCOMPILED,
    PEAK,
    PLAIN,
    PLAIN_COMPILED,
    TRAINER,
    WARM_UP_STEPS,
    Contest,
)
from setting import (
    add_turns,
    benchmark_parser,
    machine,
    machine_lines,
    summarize,
    tokens_of_stdlib,
    write_result,
)

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.flops import FLOPS_CONVENTION, flops_per_token, parameter_count
from lmforge.core.parallel.precision import has_native_bf16, missing_for_compile

PEAK_SECONDS = 1.5
# Written out rather than a preset, so that results stay comparable when presets change.
SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=4,
)
TINY = ModelConfig(
    vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def hold(contest: Contest, rounds: int, seconds: float) -> dict[str, Any]:
    """Let all contenders take `rounds` turns of `seconds` and return the figures of this dtype."""
    names = [PEAK, LMFORGE, TRAINER, PLAIN] + (
        [LMFORGE_UNCOMPILED, PLAIN_COMPILED] if contest.compiled else []
    )
    contenders: list[Contender] = []
    try:
        contenders += [Contender(name, contest) for name in names]
        for contender in contenders:
            warm_up = contender.take_turn(0.0)
            say(f"{contest.dtype}: {contender.name} is warm after {warm_up.seconds:.0f} s")
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            # Each round begins with another contender, so that none always runs after the same one,
            # with its heat and caches.
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                if contender.name == PEAK:
                    fastest = contender.take_turn(min(seconds, PEAK_SECONDS)).fastest_step_seconds
                    speeds[PEAK].append(2 * contest.peak_size**3 / fastest)
                else:
                    turn = contender.take_turn(seconds)
                    speeds[contender.name].append(turn.steps * contest.tokens_a_step / turn.seconds)
            done = ", ".join(f"{name} {speeds[name][-1]:,.0f}" for name in names if name != PEAK)
            say(
                f"{contest.dtype}: round {number + 1} of {rounds}: {done} tokens/s; peak"
                f" {speeds[PEAK][-1] / 1e9:.0f} GFLOP/s"
            )
        losses = {contender.name: contender.finish() for contender in contenders}
    finally:
        for contender in contenders:
            contender.leave()
    return figures(contest, speeds, losses)


def figures(
    contest: Contest, speeds: dict[str, list[float]], losses: dict[str, float]
) -> dict[str, Any]:
    flops = flops_per_token(contest.shape, contest.length)
    rows = {
        name: {
            "tokens_per_second": summarize(of_name),
            "share_of_peak": summarize(
                [speed * flops / peak for speed, peak in zip(of_name, speeds[PEAK], strict=True)]
            ),
            "lmforge_is_faster_by": summarize(
                [ours / theirs for ours, theirs in zip(speeds[LMFORGE], of_name, strict=True)]
            ),
            "loss_of_first_steps": losses[name],
        }
        for name, of_name in speeds.items()
        if name != PEAK
    }
    return {"peak_gflops": summarize([peak / 1e9 for peak in speeds[PEAK]]), "contenders": rows}


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = ["# Training on a CPU, side by side", "", *machine_lines(record["machine"])]
    lines += [
        f"- {record['what']}",
        f"- share of peak: {FLOPS_CONVENTION}",
        *(f"- {reason}" for reason in record["left_out"]),
    ]
    for dtype, of_dtype in record["dtypes"].items():
        peak = of_dtype["peak_gflops"]
        reached = f"{peak['median']:.0f} GFLOP/s ({peak['min']:.0f}–{peak['max']:.0f})"
        lines += ["", f"## {dtype}: matrix product of {record['peak_size']}: {reached}", ""]
        lines += [
            "| contender | tokens/s | share of peak | lmforge ÷ it | loss, steps 1–10 |",
            "|---|---|---|---|---|",
        ]
        for name, row in of_dtype["contenders"].items():
            speed, share, ratio = (
                row["tokens_per_second"],
                row["share_of_peak"],
                row["lmforge_is_faster_by"],
            )
            lines.append(
                f"| {name} | {speed['median']:,.0f} ({speed['min']:,.0f}–{speed['max']:,.0f}) |"
                f" {share['median']:.0%} ({share['min']:.0%}–{share['max']:.0%}) |"
                f" {ratio['median']:.2f} ({ratio['min']:.2f}–{ratio['max']:.2f}) |"
                f" {row['loss_of_first_steps']:.3f} |"
            )
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = benchmark_parser(__doc__, 7, "turns of each contender")
    add_turns(parser)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model of a few thousand weights, uncompiled: to see that this works",
    )
    chosen = parser.parse_args()
    if chosen.rounds < 1 or chosen.threads < 1:
        parser.error("--rounds, --threads: at least 1")

    environment = machine()
    missing = missing_for_compile(torch.device("cpu"))
    compiled = not chosen.tiny and missing is None
    left_out = []
    if not compiled:
        left_out.append(
            "nothing is compiled: "
            + (f"{missing} on this machine" if missing else "--tiny leaves it out")
        )
    dtypes = ["fp32"]
    if chosen.force_bf16 or has_native_bf16(torch.device("cpu")):
        dtypes.append("bf16")
    else:
        left_out.append(
            "bf16 is left out: this CPU has neither AMX nor AVX512-BF16 and only emulates it"
            " (--force-bf16 measures it)"
        )
    with tempfile.TemporaryDirectory(prefix="train-cpu-") as name:
        folder = Path(name)
        shape, rows, length, peak_size = (
            (TINY, 2, 64, 512) if chosen.tiny else (SHAPE, 8, 256, 2048)
        )
        tokens_of_stdlib(folder, files=20 if chosen.tiny else None, vocab_size=shape.vocab_size)
        what = (
            f"Llama of {parameter_count(shape).total:,} parameters, {shape.num_hidden_layers}"
            f" layers of {shape.hidden_size}, vocabulary {shape.vocab_size}; {rows} × {length}"
            f" tokens per step, {chosen.threads} threads; {chosen.rounds} interleaved rounds of"
            f" {chosen.seconds:g} s after {WARM_UP_STEPS} steps of warm-up; median (low–high),"
            " ratios in a round"
        )
        for line in (*machine_lines(environment), what, *left_out):
            say(line)
        results = {}
        for dtype in dtypes:
            contest = Contest(
                shape, rows, length, chosen.threads, dtype, compiled, peak_size, folder
            )
            results[dtype] = hold(contest, chosen.rounds, chosen.seconds)
    record = {
        "benchmark": "train_cpu",
        "machine": environment,
        "what": what,
        "shape": to_config_json(shape),
        "parameters": parameter_count(shape).total,
        "flops_per_token": flops_per_token(shape, length),
        "convention": FLOPS_CONVENTION,
        "rows": rows,
        "length": length,
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "warm_up_steps": WARM_UP_STEPS,
        "peak_size": peak_size,
        "left_out": left_out,
        "dtypes": results,
    }
    readable = table(record)
    say(
        f"\n{readable}\n\nwritten to {write_result('train_cpu', record, readable, chosen.out)} and"
        " .json beside it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
