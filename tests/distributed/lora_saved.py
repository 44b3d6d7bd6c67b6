"""Run in every rank: adapters trained under each engine, saved, and continued under the next.

    lora_saved.py FOLDER

Writes FOLDER/result.json: by engine, what the optimizer had state of, the losses after saving,
those of the engine that took over, and what the model sees of a batch when it is whole, with
adapters and without.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from lmforge.core.distributed import distributed as cluster
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import LoraConfig, add_lora, disable_adapters
from lmforge.core.optim.optimizer import build_optimizer, named_optimizer_state
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.parallel_model import ParallelModel, train_step
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import SMALL_MODEL, ParityData

ENGINES = {"ddp": "fsdp1", "fsdp1": "fsdp2", "fsdp2": "ddp"}  # and who takes over from it


def trained_by(engine: str, fill: Callable[[LanguageModel], None]) -> tuple[ParallelModel, torch.optim.Optimizer]:
    model = build_model(SMALL_MODEL, "meta")
    add_lora(model, LoraConfig(3, 6.0))
    strategy = ParallelOptions(engine=engine)
    spread_out = parallelize(
        model, NextTokenObjective().loss, dist_ctx=ranks, dtype=torch.float32, options=strategy, init_weights=fill
    )
    return spread_out, build_optimizer(spread_out.model, OptimizerOptions(lr=1e-2), spread_out.parameter_shapes)


def step(spread_out: ParallelModel, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The loss of a step, over all ranks."""
    mine = task.batch(number, SMALL_MODEL.vocab_size)[ranks.rank_info.rank :: 2]
    _, (metrics,) = train_step(spread_out, optimizer, [mine], NextTokenObjective().num_items, lr=1e-2, max_grad_norm=1.0)
    total, count = metrics["loss"]
    return float(ranks.all_reduce_sum(total) / ranks.all_reduce_sum(count))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ranks = cluster.init_distributed("cpu", threads=1)
    task = ParityData(sequences=4, sequence_length=32, steps=4, seed=1)
    result = {}
    for engine, following in ENGINES.items():
        first, optimizer = trained_by(engine, lambda model: init_weights(model, 1))
        for number in (0, 2):
            step(first, optimizer, number)
        state = first.state_dict(optimizer, named_optimizer_state)
        dcp.save(state, checkpoint_id=folder / engine)
        trained = sorted(state["optimizer"])
        with first.unsharded() as model, torch.no_grad():
            read = task.batch(3, SMALL_MODEL.vocab_size)
            seen = model(read.tokens, read.positions, read.document_ids)
            with disable_adapters(model):
                bare = model(read.tokens, read.positions, read.document_ids)
        whole = [float(hidden.square().mean()) for hidden in (seen, bare)]
        second, its_optimizer = trained_by(following, lambda model: init_weights(model, 2))
        state = second.state_dict(its_optimizer, named_optimizer_state)
        dcp.load(state, checkpoint_id=folder / engine)
        second.load_state_dict(its_optimizer, state)
        losses = [[step(*each, number) for number in (0, 2)] for each in ((first, optimizer), (second, its_optimizer))]
        result[engine] = {"trained": trained, "losses": losses, "whole": whole}
    if ranks.is_rank0:
        (folder / "result.json").write_text(json.dumps(result))
    cluster.destroy_distributed()
