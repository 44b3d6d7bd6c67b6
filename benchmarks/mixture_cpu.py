"""A mixture of experts on a CPU: its speed beside transformers' Trainer and a dense model, and what
it learns for its FLOPs.

Speed: lmforge's mixture of 8 experts, of which a token uses 2; the same model under Trainer, whose
experts are its grouped products; and lmforge's dense model of as many active parameters. They take
turns, as in train_cpu.py, without an auxiliary loss, so that all compute the same. Learning: the
quickstart's recipe with the presets nano and nano-moe, as many FLOPs each, for some seeds.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from beside_dense import say, speed_lines, speeds_of
from contenders import LMFORGE_DENSE, TRAINER, WARM_UP_STEPS, Contest
from setting import (
    add_turns,
    benchmark_parser,
    machine,
    machine_lines,
    run_lmforge,
    summarize,
    tokens_of_stdlib,
    train_run,
    write_result,
)

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.flops import flops_per_token, parameter_count
from lmforge.core.options.sections import ModelOptions
from lmforge.core.parallel.precision import has_native_bf16, missing_for_compile
from lmforge.hf.resolve import model_config_from_options

MIXTURE = "lmforge, mixture"
GOALS = {"fp32": {LMFORGE_DENSE: 0.7}, "bf16": {TRAINER: 1.3, LMFORGE_DENSE: 0.55}}
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
STEPS = 1100  # of the dense model, as in that recipe
BITS = "val/bits_per_byte"


def shapes(tiny: bool) -> tuple[ModelConfig, ModelConfig]:
    """The mixture, and the dense model that multiplies a token by as many numbers.

    Written out, so that results stay comparable when presets change.
    """
    vocabulary, width, inner, layers = (512, 32, 64, 2) if tiny else (4096, 256, 704, 6)
    dense = ModelConfig(vocabulary, width, layers, 4, inner, model_type="qwen3", qk_norm=True)
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner // 2,
        "norm_topk_prob": True,
    }
    return replace(dense, model_type="qwen3_moe", **experts), dense


def learning(folder: Path, seeds: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte of all validation files after as many FLOPs, dense and mixture, by seed."""
    run_lmforge("prepare", "stdlib", folder / "stdlib")
    steps, results = 30 if chosen.tiny else STEPS, {}
    length = 256
    flops = {
        preset: flops_per_token(model_config_from_options(ModelOptions(preset=preset)), length)
        for preset in ("nano", "nano-moe")
    }
    for preset, of_token in flops.items():
        own_steps = round(steps * flops["nano"] / of_token)
        bits = []
        for seed in range(seeds):
            name = f"{preset}-{seed}"
            few = ["--validation.sequences", 8] if chosen.tiny else []
            words = [
                "--model.preset",
                preset,
                "--train.seed",
                seed,
                "--train.steps",
                own_steps,
                "--train.threads",
                chosen.threads,
            ]
            bits.append(
                train_run(
                    folder,
                    name,
                    BITS,
                    "pretrain",
                    RECIPE,
                    "--data.folder",
                    folder / "stdlib",
                    *words,
                    *few,
                )
            )
            say(f"{name}: {bits[-1]:.4f} bits per byte after {own_steps:,} steps")
        results[preset] = {
            "steps": own_steps,
            "flops_per_token": of_token,
            "bits_per_byte": summarize(bits),
        }
    return results


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = [
        "# A mixture of experts on a CPU",
        "",
        *machine_lines(record["machine"]),
        f"- {record['what']}",
    ]
    lines += [f"- {reason}" for reason in record["left_out"]]
    lines += speed_lines(record["dtypes"], "mixture")
    if record["learning"]:
        lines += ["", "## Bits per byte of the quickstart's validation files, at equal FLOPs", ""]
        lines += ["| preset | steps | median | of each seed |", "|---|---|---|---|"]
        for preset, row in record["learning"].items():
            bits = row["bits_per_byte"]
            each = ", ".join(f"{value:.4f}" for value in bits["rounds"])
            lines.append(f"| {preset} | {row['steps']:,} | {bits['median']:.4f} | {each} |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 7, "turns of each")
    add_turns(parser)
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="seeds of the comparison at equal FLOPs; 0 leaves it out (default: 3)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="small models, uncompiled, and few steps: to see that this works",
    )
    chosen = parser.parse_args()
    if chosen.rounds < 0 or chosen.threads < 1 or chosen.seeds < 0:
        parser.error("--threads: at least 1; --rounds, --seeds: at least 0")
    environment, left_out, cpu = machine(), [], torch.device("cpu")
    missing = missing_for_compile(cpu)
    if not (compiled := not chosen.tiny and missing is None):
        left_out.append(
            "nothing is compiled: "
            + (f"{missing} on this machine" if missing else "--tiny leaves it out")
        )
    dtypes = ["fp32", "bf16"] if chosen.force_bf16 or has_native_bf16(cpu) else ["fp32"]
    if len(dtypes) == 1:
        left_out.append("bf16 is left out: this CPU only emulates it (--force-bf16 measures it)")
    mixture, dense = shapes(chosen.tiny)
    rows, length = (2, 64) if chosen.tiny else (8, 256)
    counts = [parameter_count(each) for each in (mixture, dense)]
    what = (
        f"{counts[0].total:,} parameters, {counts[0].active_matmul:,} of them in the products of a"
        f" token, beside {counts[1].total:,}, {counts[1].active_matmul:,};"
        f" {mixture.num_hidden_layers} layers of {mixture.hidden_size}; {rows} × {length} tokens"
        f" per step, {chosen.threads} threads; {chosen.rounds} interleaved rounds of"
        f" {chosen.seconds:g} s after {WARM_UP_STEPS} steps of warm-up; median (low–high), ratios"
        " in a round"
    )
    for line in (*machine_lines(environment), what, *left_out):
        say(line)
    with tempfile.TemporaryDirectory(prefix="mixture-cpu-") as name:
        folder, results = Path(name), {}
        if chosen.rounds:
            tokens_of_stdlib(
                folder, files=20 if chosen.tiny else None, vocab_size=mixture.vocab_size
            )
        for dtype in dtypes if chosen.rounds else ():
            contest = Contest(mixture, rows, length, chosen.threads, dtype, compiled, 0, folder)
            results[dtype] = speeds_of(
                contest, dense, chosen.rounds, chosen.seconds, MIXTURE, GOALS[dtype]
            )
        learned = learning(folder, chosen.seeds, chosen) if chosen.seeds else {}
    record = {
        "benchmark": "mixture_cpu",
        "machine": environment,
        "what": what,
        "shapes": {"mixture": to_config_json(mixture), "dense": to_config_json(dense)},
        "rows": rows,
        "length": length,
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "seconds": chosen.seconds,
        "left_out": left_out,
        "dtypes": results,
        "learning": learned,
    }
    readable = table(record)
    say(
        f"\n{readable}\n\nwritten to {write_result('mixture_cpu', record, readable, chosen.out)}"
        " and .json beside it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
