"""What checkpoints cost: the speed of saving and loading compared with a plain write, and how long
they stall training.

Saving is timed from the call until the checkpoint has its final name, hashing and syncing included;
a plain write is the same number of bytes from memory into one file, in large pieces, with an fsync.
They take turns on the same disk. Then a run is trained through the command itself, saving every
minute.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from setting import benchmark_parser, machine, machine_lines, summarize, tokens_of_stdlib, write_result

from lmforge.core import checkpoint
from lmforge.core.checkpoint import AsyncCheckpointer, RetentionPolicy, StateDict
from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.sections import OptimizerOptions
from lmforge.core.records.runs import Run

PIECE = 1 << 24
METADATA = {"global_batch_size": 1, "plan_hash": "", "hf_config": {}, "recipe": {}, "tokenizer_hash": "", "written_by": {}}


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain_write(path: Path, content: bytes, size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // PIECE):
            file.write(content)
        os.fsync(file.fileno())


def torch_writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors of a state, of the model and of its optimizer."""
    return [*state["model"].values(), *(tensor for kinds in state["optimizer"].values() for tensor in kinds.values())]


def speeds(folder: Path, shape: ModelConfig, rounds: int) -> dict[str, Any]:
    """Gigabytes per second of each method, in rounds."""
    ranks = DistributedContext(RankInfo(), torch.device("cpu"), None)
    model = init_weights(build_model(shape), 0)
    state: StateDict = {"model": dict(model.named_parameters())}
    state["optimizer"] = named_optimizer_state(model, build_optimizer(model, OptimizerOptions()))
    run = Run(folder / "run")
    lines: list[str] = []
    saver = AsyncCheckpointer(
        run,
        ranks,
        RetentionPolicy(1),
        metadata=METADATA,
        tokenizer=train_tokenizer(["text"], 300),
        log=lines.append,
        async_save=False,
    )
    content = os.urandom(PIECE)
    result: dict[str, list[float]] = {
        name: [] for name in ("plain write", "save", "torch's dcp.save", "load", "torch's dcp.load")
    }
    expected = sum(tensor.nbytes for tensor in tensors_of(state))
    for number in range(rounds):
        step = number + 1
        writing: list[tuple[str, Callable[[], Any]]] = [
            ("plain write", lambda: plain_write(folder / "plain", content, expected)),
            ("save", partial(saver.save, step, state, consumed_sequences=step, rng="")),
            ("torch's dcp.save", lambda: dcp.save(state, storage_writer=torch_writer(folder / "torch"), no_dist=True)),
        ]
        # Each round begins with another one, since the disk's state depends on the previous one.
        for name, work in writing[number % 3 :] + writing[: number % 3]:
            result[name].append(expected / timed(work) / 1e9)
        assert not lines, lines
        reader = dcp.FileSystemReader(folder / "torch")
        result["load"].append(expected / timed(partial(checkpoint.load, run.checkpoint_path(step), state)) / 1e9)
        their_loading = timed(partial(dcp.load, state, storage_reader=reader, no_dist=True))
        result["torch's dcp.load"].append(expected / their_loading / 1e9)
        (folder / "plain").unlink()
        for left in (folder / "torch", run.checkpoint_path(step)):
            shutil.rmtree(left)
        print(", ".join(f"{name} {values[-1]:.2f}" for name, values in result.items()), "GB/s", file=sys.stderr, flush=True)
    ratios = [ours / plain for ours, plain in zip(result["save"], result["plain write"], strict=True)]
    return {
        "bytes": expected,
        "gigabytes_per_second": {name: summarize(values) for name, values in result.items()},
        "save_to_plain_write": summarize(ratios),
    }


def wait_until(done: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    while not done():
        assert process.poll() is None
        time.sleep(0.2)


def stall(folder: Path, minutes: float, every_minutes: float, width: int) -> dict[str, Any]:
    """Train through the command, with a save after this many minutes, and read from its metrics how
    long it was stalled.
    """
    tokens = tokens_of_stdlib(folder, files=40, vocab_size=2048)
    chosen = {
        "data.folder": tokens.path,
        "data.sequence_length": 256,
        "model.hidden_size": width,
        "model.intermediate_size": 3 * width,
        "model.num_hidden_layers": 6,
        "model.num_attention_heads": 8,
        "model.num_key_value_heads": 8,
        "train.global_batch_size": 8,
        "train.steps": 10**6,
        "train.dtype": "fp32",
        "train.device": "cpu",
        "train.compile": "off",
        "validation.sequences": 1,
        "checkpoint.every_minutes": every_minutes,
        "checkpoint.every_steps": 10**6,
        "checkpoint.keep_last": 100,
        "log.every_steps": 1,
        "run.folder": folder,
        "run.name": "run",
    }
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, "-m", "lmforge", "pretrain", *words], stdout=subprocess.DEVNULL)
    run = Run(folder / "run")
    try:
        wait_until(run.read_metrics, process)
        time.sleep(60 * minutes + 5)
        wait_until(run.checkpoint_steps, process)
    finally:
        process.kill()
        process.wait()
    records, saves = run.read_metrics(), run.checkpoint_steps()
    size = sum(file["bytes"] for file in checkpoint.read_manifest(run.checkpoint_path(saves[-1])).files.values())
    held = records[-1].get("save_stall_seconds", 0.0)
    return {
        "minutes": minutes,
        "every_minutes": every_minutes,
        "bytes": size,
        "saves": len(saves),
        "held_seconds": held,
        "share": held / (60 * minutes),
    }


def table(record: dict[str, Any]) -> str:
    speed, held = record["speed"], record["stall"]
    lines = [*machine_lines(record["machine"]), "", f"{record['what']}:", "", "| | GB/s |", "|---|---|"]
    for name, each in speed["gigabytes_per_second"].items():
        lines.append(f"| {name} | {each['median']:.2f} ({each['min']:.2f}–{each['max']:.2f}) |")
    ratio = speed["save_to_plain_write"]
    lines += [
        "",
        f"Saving reaches {100 * ratio['median']:.0f} % ({100 * ratio['min']:.0f}–{100 * ratio['max']:.0f}) of a plain write.",
    ]
    lines.append("Loading checks every block; torch's does not. Both find the files in the page cache.")
    saved = f"a checkpoint of {held['bytes'] / 1e6:.0f} MB every {held['every_minutes']:g} minutes"
    lines += ["", f"Training for {held['minutes']:g} minutes with {saved}:"]
    lines.append(f"held up for {held['held_seconds']:.2f} s by {held['saves']} saves, {100 * held['share']:.2f} % of the time.")
    return "\n".join(lines)


def main() -> int:
    parser = benchmark_parser(__doc__, 7, "measurements of each way")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to train (default: 3)")
    parser.add_argument("--every_minutes", type=float, default=1.0, help="between its checkpoints (default: 1)")
    parser.add_argument("--width", type=int, default=768, help="of the model that is saved (default: 768)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    chosen = parser.parse_args()
    environment = machine()
    shape = ModelConfig(
        vocab_size=32_000,
        hidden_size=chosen.width,
        intermediate_size=3 * chosen.width,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=chosen.folder) as name:
        speed = speeds(Path(name), shape, chosen.rounds)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=chosen.folder) as name:
        held = stall(Path(name), chosen.minutes, chosen.every_minutes, chosen.width // 2)
    what = f"A checkpoint of {speed['bytes'] / 1e9:.2f} GB, {chosen.rounds} rounds, one process; median (lowest–highest)"
    record = {"benchmark": "checkpoint", "machine": environment, "what": what, "speed": speed, "stall": held}
    readable = table(record)
    print(f"{readable}\n\nwritten to {write_result('checkpoint', record, readable, chosen.out)} and .json beside it")
    print(json.dumps({"save_to_plain_write": speed["save_to_plain_write"]["median"], "stall_share": held["share"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
