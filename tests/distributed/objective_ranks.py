"""Run in every rank: gradients of preference and policy objectives under each engine, against one process.

objective_ranks.py SEED     fails where an engine gives another loss or gradient than one process, or narrows the extras
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lmforge.cluster import ranks as cluster
from lmforge.data.batch import Batch, Metrics
from lmforge.model import build
from lmforge.model.layers import LanguageModel
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.policy import Policy, Switches
from lmforge.objectives.preference import Preference, dpo
from lmforge.parallel.apply import Strategy, spread
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
    "ddp": Strategy(engine="ddp"),
    "fsdp1": Strategy(engine="fsdp1"),
    "fsdp2": Strategy(engine="fsdp2"),
    "fsdp2, recompute": Strategy(engine="fsdp2", recompute="full"),
    "tensor": Strategy(engine="fsdp2", tensor_ranks=2),
}
OBJECTIVES: dict[str, Any] = {
    "dpo": Preference(partial(dpo, beta=0.1), reference=True),
    "grpo": Policy(Switches(clip_low=0.5, clip_high=1.0, aggregate="sequence", kl="k3", kl_weight=0.04)),
}
# Of importance ratios, within the clipped range, below and above it. Where a ratio crosses a bound (-0.69 and 0.69) the
# gradient jumps by all that a token gives: no bf16 log-probability is as far off as these are from the bounds.
LOG_RATIOS = torch.tensor([0.0, -1.1, 1.1])


def whole_batch(model: LanguageModel, seed: int) -> Batch:
    """Four rows of two pairs with all that either objective asks for, of an even length."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[side for pair in drawn_pairs(generator, 2) for side in pair] for _ in range(4)]
    batch = packed(rows)
    batch = packed(rows, padding=4) if batch.length % 2 else batch
    return with_extras(
        batch,
        reference=logprobs_under(moved(model, 0.02, seed), batch),
        old=logprobs_under(model, batch) - LOG_RATIOS[torch.randint(3, batch.tokens.shape, generator=generator)],
        advantage=torch.randn(4, 4, generator=generator).tolist(),
    )


def in_fp32(objective: Any, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
    assert all(tensor.dtype == torch.float32 for tensor in batch.extras.tensors.values())  # type: ignore[union-attr]
    return objective.loss(model, batch)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    seed, ranks = int(sys.argv[1]), cluster.start("cpu", threads=1)
    for vocabulary, shape in SHAPES.items():
        for name, objective in OBJECTIVES.items():
            model = build(shape, seed=seed)
            batch = whole_batch(model, seed)
            weight = objective.weight(batch)
            total, _ = objective.loss(model, batch)
            (total / weight).backward()
            expected = {key: parameter.grad for key, parameter in model.named_parameters()}
            norm = torch.cat([gradient.flatten() for gradient in expected.values() if gradient is not None]).norm()
            for engine, strategy in STRATEGIES.items():
                for dtype in (torch.float32, torch.bfloat16):
                    # What fp32 leaves of sums in another order; of bf16 products it is the order of magnitude.
                    tolerance = 1e-5 if dtype == torch.float32 else 0.2
                    loss = partial(in_fp32, objective)
                    made = spread(build(shape, seed=seed), loss, ranks=ranks, dtype=dtype, strategy=replace(strategy))
                    part, parts = ranks.place.rank // made.batch_copies, ranks.count // made.batch_copies
                    size = batch.rows // parts
                    mine = batch[part * size : (part + 1) * size]
                    told = made.accumulate([mine[:1], mine[1:]], weight, lambda phase: None)
                    where = f"{name} under {engine} in {dtype}, vocabulary {vocabulary}"
                    assert abs(made.gradient_norm() - norm) <= tolerance * norm, where
                    if engine != "fsdp1":
                        for key, parameter in made.model.named_parameters():
                            assert parameter.grad is not None
                            apart = (whole(parameter.grad) - expected[key]).norm()  # type: ignore[operator]
                            assert apart <= tolerance * norm, f"{where}: {key}"
                    found = ranks.sum_(torch.stack([each["loss"][0] for each in told]).sum()) / made.batch_copies
                    assert abs(found - total.detach()) <= tolerance * max(1.0, abs(float(total.detach()))), where
            if ranks.first:
                print(f"{name}, vocabulary {vocabulary}: the same")
    cluster.stop()
