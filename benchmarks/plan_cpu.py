"""Predictions of `lmforge plan` for this CPU compared with measurements of `lmforge bench`.

Compared are tokens/s and the peak bytes of live tensors.

A round calibrates for one rank and for two, and then measures each configuration once, so that a
prediction and its measurement are from the same minutes. Each is a separate process. Medians over
the rounds are reported.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from setting import benchmark_parser, machine, machine_lines, write_result

from lmforge.core.distributed.rank_info import threads_per_rank

# The presets nano and nano-moe, with 4,096 ids, in other shapes. Experts are drawn as busy as
# random weights make them.
SHAPES = {
    "wide": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4},
    "deep": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 10},
    "mixture": {"hidden_size": 256, "moe_intermediate_size": 352, "num_hidden_layers": 6},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "tiny mixture": {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2},
}
HEADS = {"wide": 8, "deep": 4, "mixture": 4, "tiny": 2, "tiny mixture": 2}
# (ranks, engine, shape, dtype, micro-batch, length, activation checkpointing)
CONFIGURATIONS = [
    (1, "single", "wide", "fp32", 2, 512, "none"),
    (1, "single", "wide", "fp32", 4, 512, "full"),
    (1, "single", "deep", "fp32", 8, 256, "selective-ops"),
    (1, "single", "deep", "fp32", 2, 1024, "none"),
    (1, "single", "wide", "bf16", 4, 512, "none"),
    (1, "single", "deep", "bf16", 4, 512, "full"),
    (2, "ddp", "wide", "fp32", 2, 512, "none"),
    (2, "ddp", "deep", "fp32", 4, 256, "full"),
    (2, "ddp", "wide", "bf16", 2, 512, "selective-ops"),
    (2, "fsdp2", "wide", "fp32", 2, 512, "none"),
    (2, "fsdp2", "deep", "fp32", 4, 512, "full"),
    (2, "fsdp2", "deep", "bf16", 4, 256, "none"),
    (1, "single", "mixture", "fp32", 4, 512, "none"),
    (1, "single", "mixture", "bf16", 4, 512, "none"),
    (1, "single", "mixture", "bf16", 8, 256, "full"),
    (2, "ddp", "mixture", "fp32", 4, 256, "none"),
    (2, "fsdp2", "mixture", "bf16", 4, 512, "none"),
    (2, "fsdp2, experts 2", "mixture", "fp32", 4, 512, "none"),
]


def options(configuration: tuple[Any, ...], *, tiny: bool) -> list[str]:
    """The recipe of a configuration, as arguments of both verbs."""
    ranks, engine, shape, dtype, size, length, checkpointing = configuration
    is_mixture = shape == "mixture"
    shape, length = ("tiny mixture" if is_mixture else "tiny", 64) if tiny else (shape, length)
    engine, _, experts = engine.partition(", experts ")
    values: dict[str, Any] = {f"model.{name}": value for name, value in SHAPES[shape].items()}
    values |= {"model.num_attention_heads": HEADS[shape], "model.num_key_value_heads": HEADS[shape]}
    values |= {"model.head_dim": SHAPES[shape]["hidden_size"] // HEADS[shape]}
    values |= {"data.sequence_length": length, "train.dtype": dtype}
    values |= {"train.micro_batch_size": size, "train.global_batch_size": size * ranks, "train.compile": "off"}
    values |= {"parallel.engine": engine, "parallel.activation_checkpointing": checkpointing}
    values |= {"model.preset": "nano-moe"} if is_mixture else {}
    values |= {"parallel.expert_parallel_degree": experts} if experts else {}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def describe(configuration: tuple[Any, ...]) -> str:
    ranks, engine, shape, dtype, size, length, checkpointing = configuration
    return f"{ranks} × {engine}, {shape}, {dtype}, {size} × {length}, {checkpointing}"


def lmforge(*words: object) -> str:
    command = [sys.executable, "-m", "lmforge", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def one_round(
    chosen: list[tuple[Any, ...]], folder: Path, number: int, seconds: float, steps: int, threads: int, *, tiny: bool
) -> list[dict[str, float]]:
    """Calibrate, and then predict and measure each configuration."""
    files = {ranks: folder / f"round-{number}-{ranks}.json" for ranks in (1, 2)}
    for ranks, file in files.items():
        budget = ("--bench.calibrate_seconds", seconds, "--train.threads", threads)
        lmforge("bench", "--calibrate", "--out", file, "--launch.processes", ranks, *budget)
    rows = []
    for configuration in chosen:
        ranks, words = configuration[0], options(configuration, tiny=tiny)
        machine_words = ("--gpus", ranks, "--gpu_type", "cpu", "--calibration", files[ranks])
        predicted = json.loads(lmforge("plan", *words, *machine_words, "--output", "json"))
        timed = ("--bench.steps", steps, "--bench.output", "json", "--launch.processes", ranks, "--train.threads", threads)
        [measured] = json.loads(lmforge("bench", *words, *timed, "--data.folder", folder / "none"))
        step = measured["step_seconds"]
        rows.append(
            {
                "predicted_tokens_per_second": predicted["tokens_per_second_per_gpu"] * ranks,
                "tokens_per_second": measured["tokens_per_second"],
                "tokens_per_cpu_second": measured["tokens_per_second"] * step["median"] / measured["cpu_seconds"] * threads,
                "predicted_live_mib": predicted["live_bytes"] / 2**20,
                "live_mib": measured["live_gib"] * 2**10,
                "resident_mib": measured["memory_gib"] * 2**10,
            }
        )
        row = rows[-1]
        print(
            f"{describe(configuration):48} {row['predicted_tokens_per_second']:9,.0f} {row['tokens_per_second']:9,.0f}"
            f" {row['tokens_per_cpu_second']:9,.0f} {row['predicted_live_mib']:8.1f} {row['live_mib']:8.1f}",
            flush=True,
        )
    return rows


def summarize_rounds(chosen: list[tuple[Any, ...]], rounds: list[list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians of each configuration over the rounds, and the medians of the ratios within a round."""
    rows = []
    for number, configuration in enumerate(chosen):
        of_rounds = [rows[number] for rows in rounds]
        row: dict[str, Any] = {"configuration": describe(configuration)}
        row |= {name: statistics.median(each[name] for each in of_rounds) for name in of_rounds[0]}
        ratios = {
            "speed": ("predicted_tokens_per_second", "tokens_per_second"),
            "speed_by_cpu_time": ("predicted_tokens_per_second", "tokens_per_cpu_second"),
            "live": ("predicted_live_mib", "live_mib"),
        }
        row |= {name: statistics.median(each[top] / each[below] for each in of_rounds) for name, (top, below) in ratios.items()}
        rows.append(row | {"rounds": of_rounds})
    return rows


def table(record: dict[str, Any]) -> str:
    rows = record["rows"]
    lines = ["# Predicted and measured on a CPU", "", *machine_lines(record["machine"]), f"- {record['what']}"]
    names = ("speed", "speed_by_cpu_time", "live")
    medians = {name: statistics.median(row[name] for row in rows) for name in names}
    errors = {name: statistics.median(abs(row[name] - 1) for row in rows) for name in names}
    lines.append(
        f"- predicted ÷ measured, median of {len(rows)}: speed {medians['speed']:.2f} (by CPU time"
        f" {medians['speed_by_cpu_time']:.2f}), live tensors {medians['live']:.3f}; median error: {errors['speed']:.0%}"
        f" ({errors['speed_by_cpu_time']:.0%}), {errors['live']:.1%}"
    )
    lines += [
        "",
        "| configuration | predicted tokens/s | measured | ratio | by CPU time | ratio | live MiB | measured | ratio | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['configuration']} | {row['predicted_tokens_per_second']:,.0f} | {row['tokens_per_second']:,.0f}"
            f" | {row['speed']:.2f} | {row['tokens_per_cpu_second']:,.0f} | {row['speed_by_cpu_time']:.2f}"
            f" | {row['predicted_live_mib']:.1f} | {row['live_mib']:.1f} | {row['live']:.3f} | {row['resident_mib']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 3, "rounds of all configurations")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each (default: 10)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a calibration (default: 60)")
    parser.add_argument("--threads", type=int, default=threads_per_rank(2), help="CPU threads of a rank (default: of two)")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand weights: to see that this works")
    parser.add_argument("--only", default="", help="configurations that contain this text (default: all)")
    chosen = parser.parse_args()
    measured = [each for each in CONFIGURATIONS if chosen.only in describe(each)]
    if not measured:
        parser.error(f"--only {chosen.only}: no configuration contains it")
    environment, began = machine(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="plan-cpu-") as name:
        measure = (chosen.seconds, chosen.steps, chosen.threads)
        rounds = [one_round(measured, Path(name), number, *measure, tiny=chosen.tiny) for number in range(chosen.rounds)]
    what = (
        f"{chosen.rounds} rounds of a calibration for one rank and for two ({chosen.seconds:g} s each) and of {chosen.steps}"
        f" steps of each configuration; {chosen.threads} threads per rank; nothing compiled; MiB: resident memory;"
        f" {time.perf_counter() - began:,.0f} s in all"
    )
    record = {"benchmark": "plan_cpu", "machine": environment, "what": what, "rows": summarize_rounds(measured, rounds)}
    readable = table(record)
    print(f"\n{readable}\n\nwritten to {write_result('plan_cpu', record, readable, chosen.out)} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
