"""Run in every rank: adapters trained under each engine, saved, and gone on with under the next.

    lora_saved.py FOLDER

Writes FOLDER/told.json: by engine, what the optimizer had state of, the losses after saving, those of the engine that
took over, and what the model sees of a batch when it is whole, with adapters and without.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from lmforge.cluster import ranks as cluster
from lmforge.config import OptimizerOptions
from lmforge.model import build
from lmforge.model.initial import initialise
from lmforge.model.layers import LanguageModel
from lmforge.model.lora import LoraConfig, adapters_off, add_lora
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import Strategy, spread
from lmforge.parallel.engine import Spread
from lmforge.train.loop import train_step
from lmforge.train.optim import build_optimizer, state_by_name
from lmforge.train.parity import SMALL, Task

ENGINES = {"ddp": "fsdp1", "fsdp1": "fsdp2", "fsdp2": "ddp"}  # and who takes over from it


def trained_by(engine: str, fill: Callable[[LanguageModel], None]) -> tuple[Spread, torch.optim.Optimizer]:
    model = build(SMALL, seed=None, device="meta")
    add_lora(model, LoraConfig(3, 6.0))
    strategy = Strategy(engine=engine)
    spread_out = spread(model, NextToken().loss, ranks=ranks, dtype=torch.float32, strategy=strategy, fill=fill)
    return spread_out, build_optimizer(spread_out.model, OptimizerOptions(lr=1e-2), spread_out.shapes())


def step(spread_out: Spread, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The loss of a step, over all ranks."""
    mine = task.batch(number, SMALL.vocab_size)[ranks.place.rank :: 2]
    _, (metrics,) = train_step(spread_out, optimizer, [mine], NextToken().weight, lr=1e-2, clip_norm=1.0)
    total, count = metrics["loss"]
    return float(ranks.sum_(total) / ranks.sum_(count))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks = cluster.start("cpu", threads=1)
    task = Task(rows=4, length=32, steps=4, seed=1)
    told = {}
    for engine, following in ENGINES.items():
        first, optimizer = trained_by(engine, lambda model: initialise(model, 1))
        for number in (0, 2):
            step(first, optimizer, number)
        state = first.state(optimizer, state_by_name)
        dcp.save(state, checkpoint_id=folder / engine)
        trained = sorted(state["optimizer"])
        with first.whole() as model, torch.no_grad():
            read = task.batch(3, SMALL.vocab_size)
            seen = model(read.tokens, read.positions, read.documents)
            with adapters_off(model):
                bare = model(read.tokens, read.positions, read.documents)
        whole = [float(hidden.square().mean()) for hidden in (seen, bare)]
        second, its_optimizer = trained_by(following, lambda model: initialise(model, 2))
        state = second.state(its_optimizer, state_by_name)
        dcp.load(state, checkpoint_id=folder / engine)
        second.loaded(its_optimizer, state)
        losses = [[step(*each, number) for number in (0, 2)] for each in ((first, optimizer), (second, its_optimizer))]
        told[engine] = {"trained": trained, "losses": losses, "whole": whole}
    if ranks.first:
        (folder / "told.json").write_text(json.dumps(told))
    cluster.stop()
