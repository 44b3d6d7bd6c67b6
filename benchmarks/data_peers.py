"""lmforge's loader compared with others, each in a separate environment: corpus, environments and
measurement.

The measured code is in data_contenders.py. data.py calls this, and writes the result.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from data_contenders import BATCH_SIZE, EOS, FLOOR, SEED, WRITE
from setting import make_environment, summarize

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST, hash_tokenizer_files, write_shard
from lmforge.core.records.manifests import FORMAT_VERSION, ShardEntry, TokenFolderManifest
from lmforge.text.prepare.prepare import prepare

CONTENDERS = Path(__file__).with_name("data_contenders.py")
SHARD_TOKENS = 10_000_000
VOCAB_SIZE = 8192
# What is installed for a loader, over the packages of this environment, torch among them. Streaming
# takes an older numpy.
PACKAGES = {
    "MosaicML Streaming": (
        "mosaicml-streaming==0.13.0",
        "numpy==2.1.3",
        "catalogue==2.0.10",
        "brotli==1.2.0",
        "cramjam==2.14.0",
        "python-snappy==0.7.3",
        "zstd==1.5.6.8",
        "xxhash==3.5.0",
        "boto3==1.43.117",
    ),
    "Grain": (
        "grain==0.2.18",
        "array-record==0.8.6",
        "absl-py==2.5.1",
        "cloudpickle==3.1.2",
        "etils==1.15.0",
        "fsspec==2026.9.0",
        "portpicker==1.6.0",
        "protobuf==7.36.2",
        "psutil==7.2.2",
        "zipp==4.1.2",
    ),
    "datasets": ("datasets==5.2.0",),
}
# Streaming imports torchvision for its images. The real one comes with gigabytes of CUDA.
STAND_IN = {
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "to_tensor = None\n",
}


def write_corpus(folder: Path, tokens: int) -> None:
    """The standard library's documents, repeated in other orders up to this many tokens: shards,
    and one file of raw tokens.
    """
    prepare("stdlib", folder / "once", vocab_size=VOCAB_SIZE, validation_ratio=0)
    once = TokenFolder.open(folder / "once")
    split = once.split("train")
    assert once.tokenizer.eos_token_id == EOS
    stream = split.read(0, split.num_tokens)
    bounds = np.concatenate(([0], split.document_starts(0, split.num_tokens), [split.num_tokens]))
    documents = [stream[start:stop] for start, stop in pairwise(bounds)]
    generator, written = np.random.default_rng(SEED), 0
    shards: list[ShardEntry] = []
    once.tokenizer.save(folder / "shards" / "tokenizer")
    with open(folder / "tokens.bin", "wb") as file:
        while written < tokens:
            chosen, size = [], 0
            while size < min(SHARD_TOKENS, tokens - written):
                for number in generator.permutation(len(documents)).tolist():
                    chosen.append(documents[number])
                    size += len(chosen[-1])
            lengths = np.array([len(document) for document in chosen])
            shard = np.concatenate(chosen)
            name = f"train-{len(shards):05d}"
            shards.append(write_shard(folder / "shards", name, shard, lengths, once.tokenizer.hash))
            file.write(shard.data)
            written += len(shard)
    hashes = hash_tokenizer_files(once.tokenizer)
    vocab_size = once.manifest.vocab_size
    manifest = TokenFolderManifest(
        FORMAT_VERSION, "stdlib", {}, once.tokenizer.hash, vocab_size, "uint16", 0, 0, {}, {"train": shards}, hashes
    )
    (folder / "shards" / SHARDS_MANIFEST).write_text(json.dumps(asdict(manifest)))


def measure_loaders(folder: Path, names: list[str], tokens: int, batches: int, rounds: int) -> dict[str, Any]:
    """The figures of each loader in each round, each in a separate process, one after another; or
    why there are none.
    """
    write_corpus(folder, tokens)
    result: dict[str, Any] = {name: {"packages": PACKAGES.get(name, ())} for name in names}
    pythons: dict[str, str] = {}
    for name in names:
        place, files = folder / f"environment-{len(pythons)}", STAND_IN if name == "MosaicML Streaming" else {}
        made = make_environment(place, PACKAGES[name], files) if name in PACKAGES else (sys.executable, "")
        pythons[name], result[name]["problem"] = made
        if name in WRITE and not result[name]["problem"]:
            result[name]["problem"] = _run(pythons[name], folder, "write", name)[1]
    for _ in range(rounds):
        for name, row in result.items():
            if not row["problem"]:
                figures, row["problem"] = _run(pythons[name], folder, "measure", name, str(batches))
                row.setdefault("rounds", []).append(figures)
    for row in result.values():
        measured = row.pop("rounds", [])
        if not row["problem"]:
            row["figures"] = {key: summarize([figures[key] for figures in measured]) for key in measured[0]}
    return result


def _run(python: str, folder: Path, verb: str, name: str, *numbers: str) -> tuple[dict[str, float], str]:
    """(what a loader's process printed, the last line of its error)."""
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [python, str(CONTENDERS), verb, name, str(folder), *numbers]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        return {}, ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else f"exit status {ended.returncode}"
    return (json.loads(ended.stdout.splitlines()[-1]) if verb == "measure" else {}), ""


ROWS = {
    "samples per second": ("samples_a_second", 0),
    "CPU s, main thread": ("main_thread_cpu", 4),
    "CPU s, all": ("all_cpu", 3),
    "start-up, s": ("start_seconds", 2),
    "state, bytes": ("state_bytes", 0),
    "memory, MB": ("memory_mb", 0),
}


def loaders_table(loaders: dict[str, Any]) -> list[str]:
    """Lines of Markdown; CPU seconds are those a thousand samples."""
    lines = [f"| | {' | '.join(ROWS)} |", "|---" * (len(ROWS) + 1) + "|"]
    for name, row in loaders.items():
        cells = [row["problem"]]
        if not row["problem"]:
            values = ((row["figures"][key], digits) for key, digits in ROWS.values())
            cells = [f"{v['median']:,.{d}f} ({v['min']:,.{d}f}–{v['max']:,.{d}f})" for v, d in values]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def lead(loaders: dict[str, Any]) -> str:
    """The ratio of lmforge's samples per CPU second to those of the best other loader with the same
    features.
    """
    cpu = {name: row["figures"]["all_cpu"]["median"] for name, row in loaders.items() if "figures" in row}
    others = {name: cpu[name] for name in cpu if name not in ("lmforge", FLOOR)}
    best = min(others, key=lambda name: others[name])
    main = loaders["lmforge"]["figures"]["main_thread_cpu"]["median"]
    share = main / 1000 * BATCH_SIZE / 0.1
    return (
        f"lmforge gives {others[best] / cpu['lmforge']:.2f} times the samples per CPU second of {best}, the best that gives"
        f" document ids, positions and a resumable order, and takes {share:.2%} of a main thread's step of 100 ms"
    )
