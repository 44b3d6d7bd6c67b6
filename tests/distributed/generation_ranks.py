"""Run on every rank: a parallel model generates text between two training steps, with different
prompts on each rank.

generation_ranks.py SEED       fails where a parallel model generates, or continues training, unlike
                               an unsharded one
"""

import sys

import torch

from lmforge.core.distributed import distributed as cluster
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.layers import LanguageModel
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.parallel.parallel_model import train_step
from lmforge.core.parallel.parallelize import parallelize
from lmforge.lab.bench.parity import ParityData
from lmforge.serve.decoding.sampling import SamplingParams
from tests.distributed.strategies import CollectiveCounter
from tests.support.decoding import decode

SIZES = {
    "vocab_size": 131,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": ModelConfig(**SIZES, intermediate_size=40, num_key_value_heads=2),
    "gpt2": ModelConfig(**SIZES, model_type="gpt2", max_position_embeddings=64),
}
SETTINGS = {"vocab_size": 131, "sampling": SamplingParams(1.0), "stop_ids": frozenset({0})}


def generate(model: LanguageModel, seed: int, rank: int) -> list[list[int]]:
    """Two completions of each of this rank's prompts, whose number and length depend on the
    rank.
    """
    generator = torch.Generator().manual_seed(seed + rank)
    prompts = [
        torch.randint(1, 131, (1 + 5 * number + rank,), generator=generator).tolist()
        for number in range(1 + 2 * rank)
    ]
    return decode(model, prompts, num_completions=2, max_tokens=4 + 7 * rank, seed=seed, **SETTINGS)


if __name__ == "__main__":
    seed = int(sys.argv[1])
    dist_ctx = cluster.init_distributed("cpu", threads=1)
    objective, task = (
        NextTokenObjective(),
        ParityData(sequences=2 * dist_ctx.world_size, sequence_length=24, seed=seed),
    )
    for config in CONFIGS.values():
        expected: list[list[list[int]]] | None = None
        for engine, dtype in (
            ("ddp", torch.float32),
            ("fsdp2", torch.float32),
            ("fsdp2", torch.bfloat16),
        ):
            parallel_model = parallelize(
                build_model(config, "meta"),
                objective.loss,
                dist_ctx=dist_ctx,
                dtype=dtype,
                options=ParallelOptions(engine=engine),
                init_weights=lambda model: init_weights(model, seed),
            )
            optimizer, texts = (
                build_optimizer(
                    parallel_model.model, OptimizerOptions(), parallel_model.parameter_shapes
                ),
                [],
            )
            for step in range(2):
                with parallel_model.unsharded() as model, parallel_model.autocast():
                    with CollectiveCounter() as collectives:
                        texts.append(generate(model, seed + step, dist_ctx.rank_info.rank))
                    # Weights are gathered once, before the first token.
                    assert not collectives.counts, (
                        f"{engine} {dtype} step {step}: {collectives.counts}"
                    )
                first = 2 * dist_ctx.rank_info.rank
                batch = task.batch(step, config.vocab_size)[first : first + 2]
                train_step(
                    parallel_model,
                    optimizer,
                    [batch],
                    objective.num_items,
                    lr=1e-3,
                    max_grad_norm=1.0,
                    set_phase=lambda phase: None,
                )
            if expected is None:
                unsharded = init_weights(build_model(config), seed)
                assert texts[0] == generate(unsharded, seed, dist_ctx.rank_info.rank), (
                    f"{engine} {dtype}"
                )
                expected = texts
            if dtype == torch.float32:
                assert texts == expected, f"{engine} {dtype}"
    cluster.destroy_distributed()
