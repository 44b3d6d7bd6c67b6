"""The best learning rate of a grid at several widths, under mup and in the standard
parametrization.

Small models of two layers train on the standard library's text for a few steps at each learning
rate. At the base width both parametrizations are the same model. The loss is that of held-out text
after the last step.
"""

import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from setting import benchmark_parser, machine, machine_lines, tokens_of_stdlib, write_result

import lmforge
from lmforge.core.records.runs import Run

WIDTHS = (64, 128, 256)
RATES = tuple(2e-3 * 2**step for step in range(6))
BATCH, LENGTH, STEPS, HEAD_DIM, VOCABULARY = 8, 64, 100, 16, 512
PARAMETRIZATIONS = ("mup", "standard")


def train(folder: Path, width: int, parametrization: str, optimizer: str, rate: float, seed: int, steps: int) -> float:
    """The held-out loss of one run; infinite where it diverged."""
    options: dict[str, Any] = {"data.folder": folder / "tokens", "data.sequence_length": LENGTH, "run.folder": folder}
    options |= {"run.name": f"run-{seed}-{optimizer}", "run.overwrite": True, "train.seed": seed, "train.steps": steps}
    options |= {"train.global_batch_size": BATCH, "train.dtype": "fp32", "train.compile": "off", "train.device": "cpu"}
    options |= {"train.threads": 1, "optimizer.name": optimizer, "optimizer.lr": rate, "schedule.name": "linear"}
    options |= {"schedule.warmup_steps": steps // 10, "schedule.min_lr_ratio": 0.0, "validation.sequences": 256}
    options |= {"model.preset": "nano", "model.hidden_size": width, "model.num_hidden_layers": 2}
    options |= {"model.intermediate_size": width * 11 // 4, "model.num_attention_heads": width // HEAD_DIM}
    options |= {"model.num_key_value_heads": width // HEAD_DIM, "model.head_dim": HEAD_DIM}
    options |= {"model.initializer_range": 0.05, "model.embedding_initializer_range": 1.0, "log.every_steps": steps}
    if parametrization == "mup":
        options |= {"model.parametrization": "mup", "model.base_width": WIDTHS[0]}
    path = lmforge.train_model({name: str(value) if isinstance(value, Path) else value for name, value in options.items()})
    loss = float(Run(path).read_last_metrics()["val/loss"])
    shutil.rmtree(path)
    return loss if math.isfinite(loss) else math.inf


def measure(folder: Path, optimizer: str, seed: int, chosen: Any) -> dict[str, float]:
    """The losses of a seed, "PARAMETRIZATION WIDTH RATE" → loss, kept in a file of the folder, so
    that this can go on.
    """
    file = folder / f"{optimizer}-{seed}.jsonl"
    known = dict(json.loads(line) for line in file.read_text().splitlines()) if file.exists() else {}
    for width, rate, parametrization in itertools.product(chosen.widths, chosen.rates, PARAMETRIZATIONS):
        name = f"{parametrization} {width} {rate:g}"
        if name in known:
            continue
        if width == WIDTHS[0] and parametrization == "standard":
            known[name] = known[f"mup {width} {rate:g}"]
        else:
            known[name] = train(folder, width, parametrization, optimizer, rate, seed, chosen.steps)
        with file.open("a") as out:
            out.write(json.dumps([name, known[name]]) + "\n")
    return known


def best_rate(losses: dict[str, float], parametrization: str, width: int, rates: list[float]) -> float:
    return min(rates, key=lambda rate: losses[f"{parametrization} {width} {rate:g}"])


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    rates, lines = record["rates"], ["# The best learning rate over widths", "", *machine_lines(record["machine"])]
    lines += [f"- {record['what']}"]
    for optimizer, rows in record["optimizers"].items():
        lines += [
            "",
            f"## {optimizer}",
            "",
            f"| parametrization | width | {' | '.join(f'{rate:g}' for rate in rates)} | best |",
        ]
        lines += ["|" + "---|" * (len(rates) + 3)]
        for row in rows:
            means = [statistics.mean(each) for each in row["losses"]]
            cells = [f"**{mean:.3f}**" if mean == min(means) else f"{mean:.3f}" for mean in means]
            best = ", ".join(f"{rate:g}" for rate in row["best_of_each_seed"])
            lines.append(f"| {row['parametrization']} | {row['width']} | {' | '.join(cells)} | {best} |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 3, "seeds")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=["adamw", "muon"])
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, help="keep the losses here, and go on with those that are here already")
    chosen = parser.parse_args()
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.rounds)
    if not seeds or chosen.steps < 1:
        parser.error("--rounds, --steps: at least 1")
    environment, optimizers = machine(), {}
    with tempfile.TemporaryDirectory(prefix="lr-transfer-") as name:
        folder = chosen.folder or Path(name)
        if not (folder / "tokens").exists():
            folder.mkdir(exist_ok=True)
            tokens_of_stdlib(folder, files=None, vocab_size=VOCABULARY)
        for optimizer in chosen.optimizers:
            measured = [measure(folder, optimizer, seed, chosen) for seed in seeds]
            optimizers[optimizer] = [
                {
                    "parametrization": parametrization,
                    "width": width,
                    "losses": [[each[f"{parametrization} {width} {rate:g}"] for each in measured] for rate in chosen.rates],
                    "best_of_each_seed": [best_rate(each, parametrization, width, chosen.rates) for each in measured],
                }
                for parametrization, width in itertools.product(PARAMETRIZATIONS, chosen.widths)
            ]
    what = (
        f"{len(seeds)} seeds; models of 2 layers, heads of {HEAD_DIM}, {VOCABULARY} ids; {chosen.steps} steps of {BATCH} ×"
        f" {LENGTH} tokens, linear schedule; held-out loss, means over seeds, by learning rate (at base width {WIDTHS[0]});"
        " best: of each seed"
    )
    record = {"benchmark": "lr_transfer", "machine": environment, "what": what, "rates": chosen.rates, "optimizers": optimizers}
    readable = table(record)
    print(f"{readable}\n\nwritten to {write_result('lr_transfer', record, readable, chosen.out)} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
