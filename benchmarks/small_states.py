"""What small optimizer states and bf16 master weights cost in held-out loss: the quickstart's
pretraining with each of them.

All train the quickstart's recipe from the same seeds. The loss is that of all its validation files
after the last step. 8-bit states are compared with fp32 ones, and bf16 master weights, rounded to
the nearest and stochastically, with fp32 ones.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from setting import (
    add_threads,
    benchmark_parser,
    machine,
    machine_lines,
    run_lmforge,
    summarize,
    train_run,
    write_result,
)

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
REFERENCE = "fp32"
BF16 = ("--train.master_dtype", "bf16")
# By name: options, and the goal, the loss relative to that of fp32.
VARIANTS: dict[str, tuple[tuple[str, ...], float | None]] = {
    REFERENCE: ((), None),
    "8-bit states": (("--optimizer.state_dtype", "8bit"), 1.002),
    "bf16 master weights, stochastic": ((*BF16, "--optimizer.stochastic_rounding", "true"), 1.005),
    "bf16 master weights, to the nearest": (BF16, None),
}
LOSS = "val/loss"
# Only the last step's loss counts.
QUICK = (
    "--validation.every_steps",
    "none",
    "--validation.at_start",
    "false",
    "--sample.every_steps",
    "none",
)


def train(
    folder: Path, name: str, options: tuple[str, ...], seed: int, chosen: argparse.Namespace
) -> float:
    """The held-out loss of one run."""
    few = ["--train.steps", 30, "--validation.sequences", 8] if chosen.tiny else []
    own = [
        *options,
        *QUICK,
        "--train.seed",
        seed,
        "--train.threads",
        chosen.threads,
        "--data.folder",
        folder / "stdlib",
    ]
    return train_run(folder, name, LOSS, "pretrain", RECIPE, *own, *few)


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = [
        "# Held-out loss with small states",
        "",
        *machine_lines(record["machine"]),
        f"- {record['what']}",
        "",
    ]
    lines += [
        "| | median loss | of each seed | ÷ fp32, of each seed | mean ÷ fp32 | goal |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in record["variants"].items():
        losses, ratios = (
            ", ".join(f"{value:.4f}" for value in row[key]["rounds"]) for key in ("loss", "ratio")
        )
        goal = row["goal"] or ""
        lines.append(
            f"| {name} | {row['loss']['median']:.4f} | {losses} | {ratios} |"
            f" {row['mean_ratio']:.4f} | {goal} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 3, "seeds")
    add_threads(parser)
    parser.add_argument(
        "--folder", type=Path, help="keep the runs here, and go on with those that are here already"
    )
    parser.add_argument("--tiny", action="store_true", help="few steps: to see that this works")
    chosen = parser.parse_args()
    if chosen.rounds < 1 or chosen.threads < 1:
        parser.error("--threads, --rounds: at least 1")
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="small-states-") as name:
        folder = chosen.folder or Path(name)
        if not (folder / "stdlib").exists():
            run_lmforge("prepare", "stdlib", folder / "stdlib")
        for seed in range(chosen.rounds):
            for number, (variant, (options, _)) in enumerate(VARIANTS.items()):
                losses[variant].append(train(folder, f"{number}-{seed}", options, seed, chosen))
                print(f"seed {seed}: {variant}: {losses[variant][-1]:.4f}", flush=True)
    variants = {}
    for variant, (_, goal) in VARIANTS.items():
        ratios = [
            each / reference
            for each, reference in zip(losses[variant], losses[REFERENCE], strict=True)
        ]
        mean = sum(losses[variant]) / sum(losses[REFERENCE])
        variants[variant] = {
            "loss": summarize(losses[variant]),
            "ratio": summarize(ratios),
            "mean_ratio": mean,
            "goal": goal,
        }
    what = (
        f"{RECIPE.name}, {chosen.rounds} seeds, {chosen.threads} threads; loss per token of all"
        " validation files"
    )
    record = {"benchmark": "small_states", "machine": machine(), "what": what, "variants": variants}
    readable = table(record)
    print(
        f"{readable}\n\nwritten to {write_result('small_states', record, readable, chosen.out)} and"
        " .json beside it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
