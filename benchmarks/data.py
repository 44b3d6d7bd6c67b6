"""What the data of a run costs: a plan of 15T tokens in 30,000 shards, and lmforge's loader
compared with others.

For the plan: opening it, finding the sequences of a step, and reading some of them. Also the cost
of reading a batch with best-fit packing compared with concat packing, for documents with lengths as
on the web.

The shards are real files of 1 GB each with all their checksums, but of zeros that take no space,
and hard links of one another. Each measurement is a process of its own; memory is what it has
beyond its imports. The loaders: data_contenders.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from data_contenders import BATCH_SIZE as LOADER_BATCH
from data_contenders import BY_HAND, FLOOR, OPEN
from data_peers import lead, loaders_table, measure_loaders
from setting import benchmark_parser, machine, machine_lines, summarize, write_result

from lmforge.core.data.best_fit_index import BestFitIndex
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARD_SUFFIXES, SHARDS_MANIFEST, write_shard
from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.records.manifests import FORMAT_VERSION, ShardEntry, TokenFolderManifest
from lmforge.text.prepare.dist_context import SingleProcessContext
from lmforge.text.prepare.pack import pack_folder

SHARDS, SHARD_TOKENS, DOCUMENT_TOKENS = 30_000, 500_000_000, 1000
SEQUENCE_LENGTH, BATCH_SIZE = 4096, 512
LOADER_TOKENS = 60_000_000
# Of the comparison of packings.
MEDIAN_DOCUMENT_TOKENS, SPREAD, PACKED_LENGTH, PACKED_BATCH_SIZE = 600, 1.0, 2048, 64


def write_manifest(folder: Path, source: str, tokenizer: Tokenizer, entries: list[ShardEntry]) -> None:
    digest, vocab_size = tokenizer.hash, tokenizer.vocab_size
    manifest = TokenFolderManifest(FORMAT_VERSION, source, {}, digest, vocab_size, "uint16", 0, 0, {}, {"train": entries})
    (folder / SHARDS_MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))


def write_plan(folder: Path, shards: int, shard_tokens: int) -> None:
    """A folder of this many identical shards."""
    tokenizer = train_tokenizer([""], 261)
    tokenizer.save(folder / "tokenizer")
    lengths = np.full(shard_tokens // DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    first = write_shard(folder, "train-00000", np.zeros(lengths.sum(), np.uint16), lengths, tokenizer.hash)
    os.truncate(folder / "train-00000.tokens", 0)  # and extended again: a sparse file
    os.truncate(folder / "train-00000.tokens", 2 * first.tokens)
    entries = [replace(first, name=f"train-{number:05d}") for number in range(shards)]
    for entry in entries[1:]:
        for suffix in SHARD_SUFFIXES:
            os.link(folder / f"train-00000{suffix}", folder / f"{entry.name}{suffix}")
    write_manifest(folder, "zeros", tokenizer, entries)


def write_documents(folder: Path, documents: int) -> None:
    """A folder of one shard of documents with log-normal lengths, packed for PACKED_LENGTH."""
    tokenizer, generator = train_tokenizer([""], 261), np.random.default_rng(0)
    tokenizer.save(folder / "tokenizer")
    lengths = generator.lognormal(np.log(MEDIAN_DOCUMENT_TOKENS), SPREAD, documents).astype(np.int64) + 1
    tokens = generator.integers(5, 261, lengths.sum()).astype(np.uint16)
    entry = write_shard(folder, "train-00000", tokens, lengths, tokenizer.hash)
    write_manifest(folder, "random", tokenizer, [entry])
    pack_folder(str(folder), PACKED_LENGTH, workers=1, progress=lambda *step: None, dist_ctx=SingleProcessContext())


def measure_packings(folder: Path, batches: int) -> dict[str, Any]:
    """CPU time of a batch under each packing, and the fill of best fit."""
    result: dict[str, Any] = {}
    opened = TokenFolder.open(folder)
    for packing in ("concat", "best-fit"):
        dataset = TokenDataset(opened, sequence_length=PACKED_LENGTH, packing=packing)
        for timed in (False, True):  # blocks are verified the first time
            cpu = time.process_time()
            for n in range(0, batches * PACKED_BATCH_SIZE, PACKED_BATCH_SIZE):
                dataset.sequences(n, n + PACKED_BATCH_SIZE)
            if timed:
                result[f"{packing}_ms"] = 1000 * (time.process_time() - cpu) / batches
    result["best-fit_fill_percent"] = 100 * BestFitIndex.open(opened, PACKED_LENGTH).fill
    return result


def resident_mb() -> float:
    """Memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(folder: Path, steps: int, sequences: int) -> dict[str, Any]:
    """Start-up, the indices of random steps, and reading, in this process."""
    before, began = resident_mb(), time.perf_counter()
    opened = TokenFolder.open(folder)
    dataset = TokenDataset(opened, sequence_length=SEQUENCE_LENGTH)
    dataset.indices(0, BATCH_SIZE)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "start_mb": resident_mb() - before}
    generator, taken = np.random.default_rng(0), []
    for step in generator.integers(0, dataset.sequences_per_epoch // BATCH_SIZE, steps).tolist():
        began = time.perf_counter()
        dataset.indices(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        taken.append(1000 * (time.perf_counter() - began))
    result |= {"indices_ms": statistics.median(taken), "tokens": opened.split("train").num_tokens}
    # Everything that a checkpoint stores about the data.
    result["state_bytes"] = len(json.dumps({"samples_consumed": 2**40, "plan_hash": dataset.plan_hash}))
    began, cpu = time.perf_counter(), time.process_time()
    for n in range(0, sequences, 64):
        dataset.sequences(n, n + 64)
    result["sequence_ms"] = 1000 * (time.perf_counter() - began) / sequences
    result["sequence_cpu_ms"] = 1000 * (time.process_time() - cpu) / sequences
    result |= {"read_mb": resident_mb() - before, "open_files": len(os.listdir("/proc/self/fd"))}
    return result


def table(record: dict[str, Any]) -> str:
    """The record, to be read by people."""
    rows = {
        "start-up (open, first step's indices)": ("start_seconds", "s", 2),
        "memory after start-up": ("start_mb", "MB", 0),
        f"indices of a random step of {BATCH_SIZE} sequences": ("indices_ms", "ms", 3),
        "state of the data in a checkpoint": ("state_bytes", "bytes", 0),
        "reading a sequence, of a shard at random": ("sequence_ms", "ms", 3),
        "CPU time of that": ("sequence_cpu_ms", "ms", 3),
        "memory after reading": ("read_mb", "MB", 0),
        "open files after reading": ("open_files", "", 0),
        f"CPU time of a batch of {PACKED_BATCH_SIZE} x {PACKED_LENGTH:,}, concat packing": ("concat_ms", "ms", 2),
        "the same, best-fit packing": ("best-fit_ms", "ms", 2),
        "places of best-fit sequences that hold a token": ("best-fit_fill_percent", "%", 2),
    }
    lines = ["# The data of a run", "", *machine_lines(record["machine"]), ""]
    if loaders := record["loaders"]:
        lines += ["## Loaders", "", f"{record['loaders_what']}:", "", *loaders_table(loaders), "", f"{lead(loaders)}.", ""]
        lines += [f"- {name}: {', '.join(row['packages'])}" for name, row in loaders.items() if row["packages"]] + [""]
    lines += ["## A plan of 15T tokens", "", f"{record['what']}:", ""]
    lines += ["| | median | lowest–highest |", "|---|---|---|"]
    for title, (name, unit, digits) in rows.items():
        values = record["plan"][name]
        median, low, high = (f"{values[key]:,.{digits}f}" for key in ("median", "min", "max"))
        lines.append(f"| {title} | {median} {unit} | {low}–{high} |")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 5, "processes that measure")
    parser.add_argument("--steps", type=int, default=200, help="random steps of one measurement (default: 200)")
    parser.add_argument("--sequences", type=int, default=64_000, help="sequences read in one measurement (default: 64,000)")
    parser.add_argument("--loaders", nargs="*", default=list(OPEN), choices=OPEN, metavar="NAME", help="which (default: all)")
    parser.add_argument("--loader_rounds", type=int, default=3, help="measurements of each loader (default: 3)")
    parser.add_argument("--batches", type=int, default=200, help=f"of {LOADER_BATCH} sequences, of one of these (default: 200)")
    parser.add_argument(
        "--tiny", action="store_true", help="small shards, loaders without a library: does it work? The figures mean nothing"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        result = measure(chosen.measure, chosen.steps, chosen.sequences)
        print(json.dumps(result | measure_packings(chosen.measure / "documents", chosen.steps)))
        return 0
    environment = machine()
    shards, shard_tokens = (100, 100_000) if chosen.tiny else (SHARDS, SHARD_TOKENS)
    names, tokens = (["lmforge", FLOOR, BY_HAND], 1_000_000) if chosen.tiny else (chosen.loaders, LOADER_TOKENS)
    loaders = {}
    if names:
        with tempfile.TemporaryDirectory(prefix="loaders-") as name:
            loaders = measure_loaders(Path(name), names, tokens, chosen.batches, chosen.loader_rounds)
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        write_plan(Path(name), shards, shard_tokens)
        (Path(name) / "documents").mkdir()
        write_documents(Path(name) / "documents", 100 if chosen.tiny else 50_000)
        numbers = ["--steps", str(chosen.steps), "--sequences", str(chosen.sequences)]
        command = [sys.executable, __file__, "--measure", name, *numbers]
        results = [json.loads(subprocess.check_output(command)) for _ in range(chosen.rounds)]
    plan = {name: summarize([result[name] for result in results]) for name in results[0]}
    what = f"{shards:,} shards of {shard_tokens:,} tokens, sequences of {SEQUENCE_LENGTH:,}, {chosen.rounds} processes"
    loaders_what = (
        f"{tokens / 1e6:,.0f}M tokens of Python code, sequences of {SEQUENCE_LENGTH:,} in batches of {LOADER_BATCH},"
        f" {chosen.loader_rounds} rounds of {chosen.batches} batches after some to warm up, as fast as each gives them;"
        " median (lowest–highest), CPU seconds of 1,000 samples"
    )
    record = {
        "benchmark": "data",
        "machine": environment,
        "what": what,
        "plan": plan,
        "loaders_what": loaders_what,
        "loaders": loaders,
    }
    readable = table(record)
    print(f"{readable}\n\nwritten to {write_result('data', record, readable, chosen.out)} and .json beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
