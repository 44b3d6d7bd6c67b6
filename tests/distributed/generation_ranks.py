"""Run in every rank: what a model writes while it is spread, ragged from rank to rank, between two steps of training.

generation_ranks.py SEED       fails where a spread model writes, or trains on, otherwise than one that is whole
"""

import sys
from itertools import chain

import torch

from lmforge.bench.parity import ParityData
from lmforge.cluster import distributed as cluster
from lmforge.config.run import OptimizerOptions, ParallelOptions
from lmforge.generate.engine import decode
from lmforge.generate.sampling import SamplingParams
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.model.layers import LanguageModel
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.parallelize import parallelize
from lmforge.train.loop import train_step
from lmforge.train.optimizer import build_optimizer

SIZES = {"vocab_size": 131, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
SHAPES = {
    "llama": ModelConfig(**SIZES, intermediate_size=40, num_key_value_heads=2),
    "gpt2": ModelConfig(**SIZES, model_type="gpt2", max_position_embeddings=64),
}
TOGETHER = {"vocab_size": 131, "sampling": SamplingParams(1.0), "stop_ids": frozenset({0})}


def written(model: LanguageModel, seed: int, rank: int) -> list[list[int]]:
    """Two completions of each of this rank's prompts: as many, and as long, as its number says."""
    generator = torch.Generator().manual_seed(seed + rank)
    prompts = [torch.randint(1, 131, (1 + 5 * number + rank,), generator=generator).tolist() for number in range(1 + 2 * rank)]
    rows: list[list[int]] = [[] for _ in range(2 * len(prompts))]
    for token in chain.from_iterable(decode(model, prompts, n=2, max_tokens=4 + 7 * rank, seed=seed, **TOGETHER)):
        rows[token.request_id].append(token.token_id)
    return rows


if __name__ == "__main__":
    seed = int(sys.argv[1])
    ranks = cluster.init_distributed("cpu", threads=1)
    objective, task = NextTokenObjective(), ParityData(sequences=2 * ranks.world_size, sequence_length=24, seed=seed)
    for shape in SHAPES.values():
        expected: list[list[list[int]]] | None = None
        for engine, dtype in (("ddp", torch.float32), ("fsdp2", torch.float32), ("fsdp2", torch.bfloat16)):
            trained = parallelize(
                build_model(shape, seed=None, device="meta"),
                objective.loss,
                dist_ctx=ranks,
                dtype=dtype,
                options=ParallelOptions(engine=engine),
                init_weights=lambda model: init_weights(model, seed),
            )
            optimizer, found = build_optimizer(trained.model, OptimizerOptions(), trained.parameter_shapes()), []
            for step in range(2):
                with trained.unsharded() as model, trained.autocast():
                    found.append(written(model, seed + step, ranks.rank_info.rank))
                first = 2 * ranks.rank_info.rank
                batch = task.batch(step, shape.vocab_size)[first : first + 2]
                train_step(
                    trained, optimizer, [batch], objective.num_items, lr=1e-3, max_grad_norm=1.0, set_phase=lambda phase: None
                )
            if expected is None:
                before = build_model(shape, seed=seed)
                assert found[0] == written(before, seed, ranks.rank_info.rank), f"{engine} {dtype}"
                expected = found
            if dtype == torch.float32:
                assert found == expected, f"{engine} {dtype}"
    cluster.destroy_distributed()
