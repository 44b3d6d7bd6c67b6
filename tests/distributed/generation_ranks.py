"""Run in every rank: what a model writes while it is spread, ragged from rank to rank, between two steps of training.

generation_ranks.py SEED       fails where a spread model writes, or trains on, otherwise than one that is whole
"""

import sys
from itertools import chain

import torch

from lmforge.cluster import ranks as cluster
from lmforge.config import OptimizerOptions
from lmforge.infer.engine import decode
from lmforge.infer.sampling import Sampling
from lmforge.model import build
from lmforge.model.initial import initialise
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import Strategy, spread
from lmforge.train.loop import train_step
from lmforge.train.optim import build_optimizer
from lmforge.train.parity import Task

SIZES = {"vocab_size": 131, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
SHAPES = {
    "llama": ModelConfig(**SIZES, intermediate_size=40, num_key_value_heads=2),
    "gpt2": ModelConfig(**SIZES, model_type="gpt2", max_position_embeddings=64),
}
TOGETHER = {"vocab_size": 131, "sampling": Sampling(1.0), "stop_ids": frozenset({0})}


def written(model: LanguageModel, seed: int, rank: int) -> list[list[int]]:
    """Two completions of each of this rank's prompts: as many, and as long, as its number says."""
    generator = torch.Generator().manual_seed(seed + rank)
    prompts = [torch.randint(1, 131, (1 + 5 * number + rank,), generator=generator).tolist() for number in range(1 + 2 * rank)]
    rows: list[list[int]] = [[] for _ in range(2 * len(prompts))]
    for token in chain.from_iterable(decode(model, prompts, n=2, max_tokens=4 + 7 * rank, seed=seed, **TOGETHER)):
        rows[token.request].append(token.id)
    return rows


if __name__ == "__main__":
    seed = int(sys.argv[1])
    ranks = cluster.start("cpu", threads=1)
    objective, task = NextToken(), Task(rows=2 * ranks.count, length=24, seed=seed)
    for shape in SHAPES.values():
        expected: list[list[list[int]]] | None = None
        for engine, dtype in (("ddp", torch.float32), ("fsdp2", torch.float32), ("fsdp2", torch.bfloat16)):
            trained = spread(
                build(shape, seed=None, device="meta"),
                objective.loss,
                ranks=ranks,
                dtype=dtype,
                strategy=Strategy(engine=engine),
                fill=lambda model: initialise(model, seed),
            )
            optimizer, found = build_optimizer(trained.model, OptimizerOptions(), trained.shapes()), []
            for step in range(2):
                with trained.whole() as model, trained.autocast():
                    found.append(written(model, seed + step, ranks.place.rank))
                first = 2 * ranks.place.rank
                batch = task.batch(step, shape.vocab_size)[first : first + 2]
                train_step(trained, optimizer, [batch], objective.weight, lr=1e-3, clip_norm=1.0, mark=lambda phase: None)
            if expected is None:
                before = build(shape, seed=seed)
                assert found[0] == written(before, seed, ranks.place.rank), f"{engine} {dtype}"
                expected = found
            if dtype == torch.float32:
                assert found == expected, f"{engine} {dtype}"
    cluster.stop()
