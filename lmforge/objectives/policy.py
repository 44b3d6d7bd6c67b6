"""Learning from the rewards of sampled completions: one objective with orthogonal switches, of which GRPO, Dr. GRPO, DAPO,
GSPO and RLOO are settings. Where the rewards come from, and the completions, is not known here.

In a batch each document is a prompt with a sampled completion, of which the completion is scored. Extras: "advantage", the
same in all of a completion; "old", the log-probability of each target as it was sampled; "reference" where the KL
divergence to a reference is part of the loss; "overlong" where completions that were cut are masked.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel
from lmforge.objectives.chunked import IGNORED
from lmforge.objectives.logprobs import document_sums, document_tokens, of_their_documents, token_logprobs_and_entropy

# TRL's, so that the advantages of a group with almost no spread stay as small.
SPREAD_FLOOR = 1e-4


@dataclass(frozen=True)
class Switches:
    """How completions are learned from.

    ratio            importance ratio of each token, of the sequence per token (its geometric mean; GSPO, arXiv
                     2507.18071), or of the sequence as a whole (the product; RLOO)
    clip_low/high    the ratio gains nothing outside 1 − low … 1 + high; high above low is DAPO's clip-higher
    aggregate        sequence: mean of each completion's tokens, mean over completions; token: mean over the tokens of the
                     global batch; constant: sum over tokens / (completions × `constant_tokens`)
    baseline, scale  see `advantages`
    kl, kl_weight    divergence from the reference: none; k1, in the reward (see `penalised`); k2 or k3, in the loss of each
                     token (Schulman's estimators); `kl_corrected` multiplies those by the importance ratio, so that their
                     gradient is that of the divergence off policy too (arXiv 2512.02556)
    mask_overlong    completions that were cut at the longest allowed teach nothing and are not counted
    temperature      what logits are divided by, as when they were sampled from
    """

    ratio: Literal["token", "sequence", "product"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregate: Literal["sequence", "token", "constant"] = "token"
    constant_tokens: int = 1
    baseline: Literal["group", "leave-one-out"] = "group"
    scale: Literal["none", "population", "bessel"] = "bessel"
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_weight: float = 0.0
    kl_corrected: bool = False
    mask_overlong: bool = False
    temperature: float = 1.0


# By name: to be taken with `replace(PRESETS[name], …)`. Dr. GRPO wants `constant_tokens`, the longest completion allowed.
PRESETS = MappingProxyType(
    {
        # arXiv 2402.03300; with the deviation of the few samples corrected by Bessel, as TRL has it.
        "grpo": Switches(aggregate="sequence", kl="k3", kl_weight=0.04),
        "dr_grpo": Switches(aggregate="constant", scale="none"),  # arXiv 2503.20783
        "dapo": Switches(clip_high=0.28, mask_overlong=True),  # arXiv 2503.14476
        "gspo": Switches(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregate="sequence"),
        # arXiv 2402.14740
        "rloo": Switches(
            ratio="product", aggregate="sequence", baseline="leave-one-out", scale="none", kl="k1", kl_weight=0.05
        ),
    }
)


def advantages(rewards: Tensor, switches: Switches) -> Tensor:
    """How much better each sample was than its group: [groups, samples], from rewards of that shape.

    A reward that is NaN (a reward function that gave None) is left out of baseline and deviation; its own advantage is 0.
    The baseline is the mean of the group, or of the others in it (leave-one-out). The deviation that is divided by is that
    of the population (÷ n) or Bessel's (÷ n − 1): they differ by 15 % at four samples. A group with less than two
    rewards has nothing to compare: 0.
    """
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True).to(rewards.dtype)
    from_mean = torch.where(known, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    # r − mean of the others = (r − mean of all) × n / (n − 1)
    others = count / (count - 1).clamp(min=1)
    found = from_mean * others if switches.baseline == "leave-one-out" else from_mean
    if switches.scale != "none":
        counted = count if switches.scale == "population" else (count - 1).clamp(min=1)
        found = found / ((from_mean.square().sum(1, keepdim=True) / counted.clamp(min=1)).sqrt() + SPREAD_FLOOR)
    return torch.where(count > 1, found, 0.0)


def has_spread(rewards: Tensor) -> Tensor:
    """Whether there is anything to learn from a group of rewards [groups, samples]: bool [groups]. NaN is left out."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(1)
    return highest > rewards.nan_to_num(nan=torch.inf).amin(1)


def penalised(rewards: Tensor, old: Tensor, reference: Tensor, switches: Switches) -> Tensor:
    """Rewards less the weighted KL divergence of each completion from the reference: k1, log old − log reference.

    All of one shape, a place for each completion; `old` and `reference` are log-probabilities of whole completions.
    """
    return rewards - switches.kl_weight * (old - reference) if switches.kl == "k1" else rewards


def policy_loss(batch: Batch, logprobs: Tensor, switches: Switches) -> tuple[Tensor, Metrics]:
    """The clipped objective's negative, summed as `switches.aggregate` says, from log p of each target [rows, length].

    Divided by `policy_weight` of the global batch it is the loss. Metrics are by token, of raw ratios.
    """
    targets = scored_targets(batch, switches)
    scored, tokens = targets != IGNORED, document_tokens(targets, batch.documents)
    old, advantage = batch.extra("old"), batch.extra("advantage")
    log_ratio = torch.where(scored, logprobs - old, 0.0)
    if switches.ratio != "token":
        whole = document_sums(log_ratio, batch.documents)
        whole = whole / tokens.clamp(min=1) if switches.ratio == "sequence" else whole
        log_ratio = of_their_documents(whole, batch.documents)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - switches.clip_low, 1 + switches.clip_high)
    losses = -torch.minimum(ratio * advantage, clipped * advantage)
    told = {
        "ratio": ratio,
        "clip/low": ((ratio < 1 - switches.clip_low) & (advantage < 0)).float(),
        "clip/high": ((ratio > 1 + switches.clip_high) & (advantage > 0)).float(),
    }
    if switches.kl == "k1" and batch.extras is not None and "reference" in batch.extras.tensors:
        told["kl"] = old - batch.extra("reference")  # which the rewards were lessened by
    if switches.kl in ("k2", "k3"):
        further = torch.where(scored, batch.extra("reference") - logprobs, 0.0)
        told["kl"] = further.square() / 2 if switches.kl == "k2" else further.expm1() - further
        told["kl"] = told["kl"] * ratio if switches.kl_corrected else told["kl"]
        losses = losses + switches.kl_weight * told["kl"]
    if switches.aggregate == "sequence":
        losses = losses / of_their_documents(tokens, batch.documents).clamp(min=1)
    total = torch.where(scored, losses, 0.0).sum()
    count = scored.sum().float()
    metrics = {name: (torch.where(scored, value.detach(), 0.0).sum(), count) for name, value in told.items()}
    return total, {"loss": (total.detach(), policy_weight(batch, switches)), **metrics}


def scored_targets(batch: Batch, switches: Switches) -> Tensor:
    """The batch's targets, less those of overlong completions where they are masked."""
    if not switches.mask_overlong:
        return batch.targets
    return torch.where(batch.extra("overlong") > 0, IGNORED, batch.targets)


def policy_weight(batch: Batch, switches: Switches) -> Tensor:
    """What the sum of losses is divided by: completions, tokens, or completions × a constant; an fp32 scalar."""
    targets = scored_targets(batch, switches)
    if switches.aggregate == "token":
        return (targets != IGNORED).sum().float()
    completions = (document_tokens(targets, batch.documents) > 0).sum().float()
    return completions * (switches.constant_tokens if switches.aggregate == "constant" else 1)


class Policy:
    """The objective under some switches."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    def weight(self, batch: Batch) -> Tensor:
        """See policy_weight."""
        return policy_weight(batch, self._switches)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum, metrics as (sum, count) pairs). A batch without scored completions gives 0, not NaN."""
        hidden = model(batch.tokens, batch.positions, batch.documents, keys=batch.keys)
        targets = scored_targets(batch, self._switches)
        score = partial(token_logprobs_and_entropy, targets=targets, temperature=self._switches.temperature)
        logprobs, entropy = model.lm_head(hidden, score)
        total, metrics = policy_loss(batch, logprobs, self._switches)
        return total, metrics | {"entropy": (entropy.sum(), (targets != IGNORED).sum().float())}
