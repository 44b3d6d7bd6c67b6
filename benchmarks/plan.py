"""Predictions of `lmforge plan` divided by published values: speed and memory of each row of
published.json.

No constant of the prediction was fitted to these rows. A row that does not state its length or its
batch is listed and not scored. The result does not depend on the machine that this runs on.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from lmforge.core.model.config import ModelConfig, get_preset
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import ParallelOptions
from lmforge.lab.plan.hardware import data_sheets
from lmforge.lab.plan.planning import Machine
from lmforge.lab.plan.prediction.predict import Prediction, predict
from lmforge.lab.plan.prediction.step_config import StepConfig

PUBLISHED = Path(__file__).with_name("published.json")


def predict_row(row: dict[str, Any]) -> Prediction:
    """The prediction for a published row, which says what the program did that was measured."""
    gpus, per_host = row["gpus"], row.get("gpus_per_host", 8)
    gpu = data_sheets().gpu(row["gpu"]).model_copy(update=row.get("gpu_changes", {}))
    network = data_sheets().network(row.get("network", "infiniband-ndr"))
    parallel = {"engine": "fsdp2" if gpus > 1 else "single", **row["parallel"]}
    options = validate_options(ParallelOptions, parallel)
    model = get_preset(row["model"]) if isinstance(row["model"], str) else ModelConfig(**row["model"])
    taken = ("sequence_length", "micro_batch_size", "master_dtype", "compiled", "float8", "logit_bytes", "reduce_dtype_bytes")
    fields = {name: row[name] for name in taken if name in row}
    step_config = StepConfig(model, options, gpus, per_host, accumulation=row.get("accumulation", 1), **fields)
    machine = Machine(gpu, network if gpus > per_host else None, per_host)
    return predict(step_config, gpu, machine.rates(step_config.dtype))


def describe(row: dict[str, Any]) -> str:
    model = row["model"] if isinstance(row["model"], str) else f"width {row['model']['hidden_size']}"
    words = [row["source"].split()[0], model, f"{row['gpus']} x {row['gpu']}"]
    words += [f"{name.split('_')[0]} {value}" for name, value in row["parallel"].items() if "degree" in name]
    return " ".join([*words, *(["eager"] if not row.get("compiled", True) else []), *(["float8"] if row.get("float8") else [])])


def errors(ratios: list[float]) -> str:
    wrong = [abs(ratio - 1) for ratio in ratios]
    return f"median error {statistics.median(wrong):.0%}, worst {max(wrong):.0%}, of {len(wrong)} rows"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=PUBLISHED, help="a file of rows in the form of published.json")
    chosen = parser.parse_args()
    speed, memory = list[float](), list[float]()
    print(f"{'row':62} {'tokens/s':>9} {'published':>9} {'ratio':>6} {'GiB':>7} {'publ.':>7} {'ratio':>6}")
    for row in json.loads(chosen.rows.read_text())["rows"]:
        if not row["sequence_length"] or not row["micro_batch_size"]:
            print(f"{describe(row):62} not scored: {row['assumed']}")
            continue
        prediction = predict_row(row)
        ratio = prediction.tokens_per_second / row["tokens_per_second"]
        speed.append(ratio)
        line = f"{describe(row):62} {prediction.tokens_per_second:9,.0f} {row['tokens_per_second']:9,.0f} {ratio:6.2f}"
        if row.get("memory_gib"):
            is_live = row.get("memory_is") == "live"
            gib = (prediction.live_bytes if is_live else prediction.reserved_bytes) / 2**30
            memory.append(gib / row["memory_gib"])
            line += f" {gib:7.1f} {row['memory_gib']:7.1f} {memory[-1]:6.2f}"
        print(line)
    print(f"\nspeed:  {errors(speed)}\nmemory: {errors(memory)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
