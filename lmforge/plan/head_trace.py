"""What the last norm, the head and the loss keep from the forward to the backward pass, traced on fake tensors."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import nn

from lmforge.data.batch import Batch, Extras
from lmforge.objectives.language import NextTokenObjective
from lmforge.objectives.objective import Objective
from lmforge.objectives.preference import PreferenceObjective, RewardModelObjective, simpo
from lmforge.plan.activation_tracker import ActivationTracker
from lmforge.plan.block_trace import TracedModel, fake_model

# Sequences of these lengths are traced: bytes grow linearly with tokens.
LENGTHS = (128, 256)
# What losses read of the head: the cross-entropy of tokens, whose gradients the forward pass computes; log-probabilities of
# tokens, whose backward pass computes the logits again; or the reward of each document.
LossKind = Literal["tokens", "logprobs", "rewards"]
OBJECTIVES: dict[LossKind, Objective] = {
    "tokens": NextTokenObjective(),
    "logprobs": PreferenceObjective(partial(simpo, beta=1.0, gamma=0.0), uses_reference=False),
    "rewards": RewardModelObjective(center_rewards_coefficient=0.0),
}


@dataclass(frozen=True)
class HeadTrace:
    """Bytes per token that the norm and the loss keep, and those that the loss keeps of the head's gradient."""

    norm_bytes: float
    loss_bytes: float
    gradient_bytes: float


@cache
def trace_head(traced: TracedModel, loss: LossKind, *, is_trained: bool) -> HeadTrace:
    """`is_trained`: whether the head's weights are."""
    norm, whole = list[int](), list[int]()
    with fake_model(traced) as model:
        model.set_submodule(model.blocks_name, nn.ModuleList())
        for embedding in model.embeddings:
            embedding.requires_grad_(True)  # as hidden states do, also where weights are frozen
        model.lm_head.requires_grad_(is_trained)
        for length in LENGTHS:
            tokens = torch.zeros(1, length, dtype=torch.long)
            extras = Extras(margins=torch.zeros(1, length))
            batch = Batch(tokens, tokens.clone(), tokens.clone(), tokens.int(), extras=extras)
            tracker = ActivationTracker()
            with tracker:
                normed = model(batch.tokens, batch.positions, batch.document_ids)
                norm.append(tracker.live_bytes() - normed.nbytes)
            del normed
            tracker = ActivationTracker()
            with tracker:
                total = OBJECTIVES[loss].loss(model, batch)
                whole.append(tracker.live_bytes())
            del total
    tokens_more = LENGTHS[1] - LENGTHS[0]
    norm_bytes, all_bytes = ((each[1] - each[0]) / tokens_more for each in (norm, whole))
    return HeadTrace(norm_bytes, all_bytes - norm_bytes, whole[0] - all_bytes * LENGTHS[0])
