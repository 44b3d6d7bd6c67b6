"""Run in every rank: gradients of preference and policy objectives under each engine, against one process.

objective_ranks.py SEED     fails where an engine gives another loss or gradient than one process, or narrows the extras
"""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.cluster import distributed as cluster
from lmforge.config.sections import ParallelOptions
from lmforge.data.batch import Batch, Metrics
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.model.layers import LanguageModel
from lmforge.objectives.policy import PolicyLossConfig, PolicyObjective
from lmforge.objectives.preference import PreferenceObjective, dpo
from lmforge.parallel.parallelize import parallelize
from tests.objectives.oracle import drawn_pairs, logprobs_under, moved, packed, with_extras

# A head that tensor parallel shares out by rows, and one that it leaves whole on each rank.
SHAPES = {
    vocabulary: ModelConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    for vocabulary in (64, 61)
}
STRATEGIES = {
    "ddp": ParallelOptions(engine="ddp"),
    "fsdp1": ParallelOptions(engine="fsdp1"),
    "fsdp2": ParallelOptions(engine="fsdp2"),
    "fsdp2, recompute": ParallelOptions(engine="fsdp2", activation_checkpointing="full"),
    "tensor": ParallelOptions(engine="fsdp2", tensor_parallel_degree=2),
}
OBJECTIVES: dict[str, Any] = {
    "dpo": PreferenceObjective(partial(dpo, beta=0.1), uses_reference=True),
    "grpo": PolicyObjective(
        PolicyLossConfig(epsilon=0.5, epsilon_high=1.0, loss_aggregation="sequence", kl_estimator="k3", beta=0.04)
    ),
}
# Of importance ratios, within the clipped range, below and above it. Where a ratio crosses a bound (-0.69 and 0.69) the
# gradient jumps by all that a token gives: no bf16 log-probability is as far off as these are from the bounds.
LOG_RATIOS = torch.tensor([0.0, -1.1, 1.1])


def whole_batch(model: LanguageModel, seed: int) -> Batch:
    """Four rows of two pairs with all that either objective asks for, of an even length."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[side for pair in drawn_pairs(generator, 2) for side in pair] for _ in range(4)]
    batch = packed(rows)
    batch = packed(rows, padding=4) if batch.sequence_length % 2 else batch
    return with_extras(
        batch,
        reference_logprobs=logprobs_under(moved(model, 0.02, seed), batch),
        old_logprobs=logprobs_under(model, batch) - LOG_RATIOS[torch.randint(3, batch.tokens.shape, generator=generator)],
        advantages=torch.randn(4, 4, generator=generator).tolist(),
    )


def in_fp32(objective: Any, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
    assert all(tensor.dtype == torch.float32 for tensor in batch.extras.tensors.values())  # type: ignore[union-attr]
    return objective.loss(model, batch)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    seed, ranks = int(sys.argv[1]), cluster.init_distributed("cpu", threads=1)
    for vocabulary, shape in SHAPES.items():
        for name, objective in OBJECTIVES.items():
            model = init_weights(build_model(shape), seed)
            batch = whole_batch(model, seed)
            weight = objective.num_items(batch)
            total, _ = objective.loss(model, batch)
            (total / weight).backward()
            expected = {key: parameter.grad for key, parameter in model.named_parameters()}
            norm = torch.cat([gradient.flatten() for gradient in expected.values() if gradient is not None]).norm()
            for engine, strategy in STRATEGIES.items():
                for dtype in (torch.float32, torch.bfloat16):
                    # What fp32 leaves of sums in another order; of bf16 products it is the order of magnitude.
                    tolerance = 1e-5 if dtype == torch.float32 else 0.2
                    loss = partial(in_fp32, objective)
                    made = parallelize(
                        init_weights(build_model(shape), seed), loss, dist_ctx=ranks, dtype=dtype, options=strategy
                    )
                    part, parts = ranks.rank_info.rank // made.model_parallel_size, ranks.world_size // made.model_parallel_size
                    size = batch.batch_size // parts
                    mine = batch[part * size : (part + 1) * size]
                    told = made.forward_backward([mine[:1], mine[1:]], weight, lambda phase: None)
                    where = f"{name} under {engine} in {dtype}, vocabulary {vocabulary}"
                    assert abs(made.clip_grad_norm(0.0) - norm) <= tolerance * norm, where
                    if engine != "fsdp1":
                        for key, parameter in made.model.named_parameters():
                            assert parameter.grad is not None
                            apart = (whole(parameter.grad) - expected[key]).norm()  # type: ignore[operator]
                            assert apart <= tolerance * norm, f"{where}: {key}"
                    found = (
                        ranks.all_reduce_sum(torch.stack([each["loss"][0] for each in told]).sum()) / made.model_parallel_size
                    )
                    assert abs(found - total.detach()) <= tolerance * max(1.0, abs(float(total.detach()))), where
            if ranks.is_rank0:
                print(f"{name}, vocabulary {vocabulary}: the same")
    cluster.destroy_distributed()
