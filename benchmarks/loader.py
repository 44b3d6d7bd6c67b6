"""What the loader costs: the time to make a global batch, and the fraction of a step that training
waits for one.

A step is 100 ms of matrix products on all threads, so that the loader's thread has to share the
cores as in training. The shards are small and in the page cache: this is the loader's arithmetic,
not the disk's speed.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from setting import (
    add_threads,
    benchmark_parser,
    machine,
    machine_lines,
    summarize,
    tokens_of_stdlib,
    write_result,
)

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.shards.folder import TokenFolder

BATCHES = ((8, 256), (64, 2048))
STEP_SECONDS = 0.1
PRODUCT_SIZE = 512  # a product of a few milliseconds: a step ends on time


def making_seconds(stream: TokenDataset, rows: int, batches: int) -> list[float]:
    """Seconds to make each of the first global batches, with nothing else running."""
    taken = []
    for step in range(batches):
        began = time.perf_counter()
        Batch.from_sequences(stream.sequences(step * rows, (step + 1) * rows))
        taken.append(time.perf_counter() - began)
    return taken


def waited(stream: TokenDataset, rows: int, steps: int) -> tuple[float, float]:
    """(seconds that the training thread waited for data, seconds of everything) over `steps`, after
    a first one.
    """
    product = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE)
    with BatchLoader(stream, global_batch_size=rows, micro_batch_size=rows) as loader:
        loader.batches(0)
        before, began = loader.data_wait_seconds, time.perf_counter()
        for step in range(1, steps + 1):
            until = time.perf_counter() + STEP_SECONDS
            while time.perf_counter() < until:
                torch.mm(product, product)
            loader.batches(step)
        return loader.data_wait_seconds - before, time.perf_counter() - began


def measure(tokens: TokenFolder, rows: int, length: int, rounds: int, steps: int) -> dict[str, Any]:
    stream = TokenDataset(tokens, sequence_length=length)
    making = [1000 * seconds for seconds in making_seconds(stream, rows, steps)]
    shares, milliseconds = [], []
    for _ in range(rounds):
        waiting, total = waited(stream, rows, steps)
        shares.append(waiting / total)
        milliseconds.append(1000 * waiting / steps)
    return {
        "make_ms": summarize(making),
        "wait_ms": summarize(milliseconds),
        "wait_share": summarize(shares),
    }


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    lines = [
        "# The loader beside a step of 100 ms",
        "",
        *machine_lines(record["machine"]),
        f"- {record['what']}",
        "",
    ]
    lines += [
        "| global batch | to make it | wait a step | share of the step |",
        "|---|---|---|---|",
    ]
    for name, row in record["batches"].items():
        make, wait, share = row["make_ms"], row["wait_ms"], row["wait_share"]
        lines.append(
            f"| {name} | {make['median']:.2f} ms ({make['min']:.2f}–{make['max']:.2f})"
            f" | {wait['median']:.3f} ms ({wait['min']:.3f}–{wait['max']:.3f})"
            f" | {share['median']:.2%} ({share['min']:.2%}–{share['max']:.2%}) |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 5, "measurements of each batch")
    parser.add_argument(
        "--steps", type=int, default=50, help="steps of one measurement (default: 50)"
    )
    add_threads(parser, "the step")
    chosen = parser.parse_args()
    if min(chosen.rounds, chosen.steps, chosen.threads) < 1:
        parser.error("--rounds, --steps, --threads: at least 1")

    environment = machine()
    torch.set_num_threads(chosen.threads)
    what = (
        f"{chosen.rounds} rounds of {chosen.steps} steps, {chosen.threads} threads of matrix"
        " products beside one of the loader; median (lowest–highest)"
    )
    with tempfile.TemporaryDirectory(prefix="loader-") as name:
        tokens = tokens_of_stdlib(Path(name), files=None, vocab_size=4096)
        batches = {
            f"{rows} × {length}": measure(tokens, rows, length, chosen.rounds, chosen.steps)
            for rows, length in BATCHES
        }
    record = {
        "benchmark": "loader",
        "machine": environment,
        "what": what,
        "step_seconds": STEP_SECONDS,
        "batches": batches,
    }
    readable = table(record)
    print(
        f"{readable}\n\nwritten to {write_result('loader', record, readable, chosen.out)} and .json"
        " beside it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
