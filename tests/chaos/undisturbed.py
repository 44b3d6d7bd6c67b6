"""The recipe of these runs, and their reference: the same run with the same topology, without
faults.
"""

import fcntl
from pathlib import Path

import torch

from lmforge.core.records.runs import Run
from tests.chaos.plan import Topology
from tests.chaos.processes import forked
from tests.distributed.conftest import weights

STEPS, EVERY = 60, 5
STALL_SECONDS = 2.0
TRAINING_SECONDS = 300.0
RECIPE = {
    "data.sequence_length": 48,
    "model.hidden_size": 36,
    "model.intermediate_size": 52,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 6,
    "model.num_key_value_heads": 2,
    "train.steps": STEPS,
    "train.global_batch_size": 12,
    "train.dtype": "fp32",
    "train.compile": "off",
    "train.seed": 3,
    "train.device": "cpu",
    "train.threads": 1,
    "schedule.warmup_steps": 3,
    "optimizer.lr": "3e-3",
    # AdamW's step then follows the size of a gradient, and one that is zero but for rounding stays
    # small.
    "optimizer.eps": "1e-3",
    "log.every_steps": 1,
    "validation.every_steps": 12,
    "validation.sequences": 5,
    "checkpoint.every_steps": EVERY,
    "checkpoint.keep_last": 3,
    "watch.stall_seconds": STALL_SECONDS,
    "watch.timeout_seconds": 45,
    "launch.max_restarts": 0,
}


def recipe(data: Path, folder: Path, name: str, topology: Topology) -> list[str]:
    """The command line of a run."""
    chosen = {"data.folder": data, "run.folder": folder, "run.name": name, **RECIPE}
    return ["pretrain", *(word for option, value in chosen.items() for word in (f"--{option}", str(value))), *topology.words]


_known: dict[Topology, dict[str, float]] = {}


def undisturbed(data: Path, folder: Path, topology: Topology) -> dict[str, float]:
    """Losses of FOLDER/TOPOLOGY by name and step; trained by whoever asks first, while others wait
    for it.
    """
    if topology not in _known:
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(folder / str(topology))
        with open(folder / f"{topology}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not run.checkpoint_path(STEPS).exists():
                said = folder / f"said by {topology}"
                said.mkdir(exist_ok=True)
                attempt = forked(recipe(data, folder, str(topology), topology), topology.ranks, said)
                if not attempt.wait(TRAINING_SECONDS) or set(attempt.ended.values()) != {0}:
                    raise RuntimeError(f"the undisturbed run, {topology}, failed: {attempt.said()}")
        _known[topology] = {
            f"{name} {record['step']}": record[name]
            for record in run.read_metrics()
            for name in ("loss", "val/loss")
            if name in record
        }
    return _known[topology]


def distance(run: str, reference: str) -> float:
    """The largest difference of two runs' last weights, as a share of the largest weight of its
    tensor; 0.0 is equal bits.
    """
    ours, theirs = weights(Run(Path(run)), STEPS), weights(Run(Path(reference)), STEPS)
    distances = [
        0.0 if torch.equal(ours[name], tensor) else float((ours[name] - tensor).abs().max() / tensor.abs().max())
        for name, tensor in theirs.items()
    ]
    assert len(ours) == len(theirs)
    return max(distances)
