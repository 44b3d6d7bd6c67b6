"""Batches of random tokens, to time a recipe whose data is not there."""

import torch

from lmforge.config.batch_plan import BatchPlan
from lmforge.data.batch import Batch


class RandomBatches:
    """A batch of random tokens, one document a sequence, for every step: used where the recipe's data is missing."""

    def __init__(self, vocab_size: int, plan: BatchPlan, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = plan.micro_batch_size, plan.sequence_length
        tokens = torch.randint(0, vocab_size, size, generator=generator)
        positions = torch.arange(plan.sequence_length).expand(size).contiguous()
        # Random too, and used only where the model has dropout.
        keys = torch.randint(-(2**63), 2**63 - 1, size, generator=generator)
        batch = Batch(tokens, tokens.roll(-1, dims=1), positions, torch.zeros(size, dtype=torch.int32), keys)
        self._batches = [batch.to(device)] * plan.accumulation

    def batches(self, step: int) -> list[Batch]:
        return self._batches

    def close(self) -> None: ...
