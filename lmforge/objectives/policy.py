"""Learning from the rewards of sampled completions: one objective with orthogonal switches, of which GRPO, Dr. GRPO, DAPO,
GSPO and RLOO are settings. Where the rewards come from, and the completions, is not known here.

In a batch each document is a prompt with a sampled completion, of which the completion is scored. Extras: "advantage", the
same in all of a completion; "old", the log-probability of each target as it was sampled; "reference" where the KL
divergence to a reference is part of the loss; "overlong" where completions that were cut are masked.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lmforge.config.post_training import RolloutOptions
from lmforge.data.batch import Batch, Metrics
from lmforge.errors import UserError
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import IGNORE_INDEX
from lmforge.objectives.logprobs import broadcast_to_tokens, document_label_counts, document_sums, token_logprobs_and_entropy

# TRL's, so that the advantages of a group with almost no spread stay as small.
STD_EPSILON = 1e-4


@dataclass(frozen=True)
class PolicyLossConfig:
    """How completions are learned from.

    ratio            importance ratio of each token, of the sequence per token (its geometric mean; GSPO, arXiv
                     2507.18071), or of the sequence as a whole (the product; RLOO)
    epsilon/high    the ratio gains nothing outside 1 − low … 1 + high; high above low is DAPO's clip-higher
    aggregate        sequence: mean of each completion's tokens, mean over completions; token: mean over the tokens of the
                     global batch; constant: sum over tokens / (completions × `constant_tokens`)
    baseline, scale  see `advantages`
    kl, beta    divergence from the reference: none; k1, in the reward (see `penalised`); k2 or k3, in the loss of each
                     token (Schulman's estimators); `use_bias_correction_kl` multiplies those by the importance ratio, so that their
                     gradient is that of the divergence off policy too (arXiv 2512.02556)
    mask_truncated_completions    completions that were cut at the longest allowed teach nothing and are not counted
    temperature      what logits are divided by, as when they were sampled from
    """

    importance_sampling_level: Literal["token", "sequence", "product"] = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    loss_aggregation: Literal["sequence", "token", "constant"] = "token"
    max_completion_length: int = 1
    baseline: Literal["group", "leave-one-out"] = "group"
    scale_rewards: Literal["none", "group-population", "group"] = "group"
    kl_estimator: Literal["none", "k1", "k2", "k3"] = "none"
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    mask_truncated_completions: bool = False
    temperature: float = 1.0


# By name: to be taken with `replace(PRESETS[name], …)`. Dr. GRPO wants `constant_tokens`, the longest completion allowed.
LOSS_TYPE_PRESETS = MappingProxyType(
    {
        # arXiv 2402.03300; with the deviation of the few samples corrected by Bessel, as TRL has it.
        "grpo": PolicyLossConfig(loss_aggregation="sequence", kl_estimator="k3", beta=0.04),
        "dr_grpo": PolicyLossConfig(loss_aggregation="constant", scale_rewards="none"),  # arXiv 2503.20783
        "dapo": PolicyLossConfig(epsilon_high=0.28, mask_truncated_completions=True),  # arXiv 2503.14476
        "gspo": PolicyLossConfig(
            importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, loss_aggregation="sequence"
        ),
        # arXiv 2402.14740
        "rloo": PolicyLossConfig(
            importance_sampling_level="product",
            loss_aggregation="sequence",
            baseline="leave-one-out",
            scale_rewards="none",
            kl_estimator="k1",
            beta=0.05,
        ),
    }
)


def build_policy_loss_config(options: RolloutOptions) -> PolicyLossConfig:
    """The preset of `rollout.loss_type` with the options of `[rollout]` that the recipe sets."""
    given = {field.name: getattr(options, field.name) for field in fields(PolicyLossConfig)}
    preset = LOSS_TYPE_PRESETS[options.loss_type]
    loss_config = replace(preset, **{name: value for name, value in given.items() if value is not None})
    if loss_config.kl_estimator != "none" and not loss_config.beta:
        raise UserError(
            f"rollout.kl_estimator = {loss_config.kl_estimator}: without a weight it does nothing; give rollout.beta, such as"
            " 0.04"
        )
    return loss_config


def compute_advantages(rewards: Tensor, loss_config: PolicyLossConfig) -> Tensor:
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
    found = from_mean * others if loss_config.baseline == "leave-one-out" else from_mean
    if loss_config.scale_rewards != "none":
        counted = count if loss_config.scale_rewards == "group-population" else (count - 1).clamp(min=1)
        found = found / ((from_mean.square().sum(1, keepdim=True) / counted.clamp(min=1)).sqrt() + STD_EPSILON)
    return torch.where(count > 1, found, 0.0)


def has_nonzero_std(rewards: Tensor) -> Tensor:
    """Whether there is anything to learn from a group of rewards [groups, samples]: bool [groups]. NaN is left out."""
    highest = rewards.nan_to_num(nan=-torch.inf).amax(1)
    return highest > rewards.nan_to_num(nan=torch.inf).amin(1)


def subtract_kl_penalty(
    rewards: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, loss_config: PolicyLossConfig
) -> Tensor:
    """Rewards less the weighted KL divergence of each completion from the reference: k1, log old − log reference.

    All of one shape, a place for each completion; `old` and `reference` are log-probabilities of whole completions.
    """
    return rewards - loss_config.beta * (old_logprobs - reference_logprobs) if loss_config.kl_estimator == "k1" else rewards


def policy_loss(batch: Batch, logprobs: Tensor, loss_config: PolicyLossConfig) -> tuple[Tensor, Metrics]:
    """The clipped objective's negative, summed as `switches.aggregate` says, from log p of each target [rows, length].

    Divided by `policy_weight` of the global batch it is the loss. Metrics are by token, of raw ratios.
    """
    targets = masked_labels(batch, loss_config)
    scored, tokens = targets != IGNORE_INDEX, document_label_counts(targets, batch.document_ids)
    old, advantage = batch.extra("old"), batch.extra("advantage")
    log_ratio = torch.where(scored, logprobs - old, 0.0)
    if loss_config.importance_sampling_level != "token":
        whole = document_sums(log_ratio, batch.document_ids)
        whole = whole / tokens.clamp(min=1) if loss_config.importance_sampling_level == "sequence" else whole
        log_ratio = broadcast_to_tokens(whole, batch.document_ids)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - loss_config.epsilon, 1 + loss_config.epsilon_high)
    losses = -torch.minimum(ratio * advantage, clipped * advantage)
    told = {
        "ratio": ratio,
        "clip/low": ((ratio < 1 - loss_config.epsilon) & (advantage < 0)).float(),
        "clip/high": ((ratio > 1 + loss_config.epsilon_high) & (advantage > 0)).float(),
    }
    if loss_config.kl_estimator == "k1" and batch.extras is not None and "reference" in batch.extras.tensors:
        told["kl"] = old - batch.extra("reference")  # which the rewards were lessened by
    if loss_config.kl_estimator in ("k2", "k3"):
        further = torch.where(scored, batch.extra("reference") - logprobs, 0.0)
        told["kl"] = further.square() / 2 if loss_config.kl_estimator == "k2" else further.expm1() - further
        told["kl"] = told["kl"] * ratio if loss_config.use_bias_correction_kl else told["kl"]
        losses = losses + loss_config.beta * told["kl"]
    if loss_config.loss_aggregation == "sequence":
        losses = losses / broadcast_to_tokens(tokens, batch.document_ids).clamp(min=1)
    total = torch.where(scored, losses, 0.0).sum()
    count = scored.sum().float()
    metrics = {name: (torch.where(scored, value.detach(), 0.0).sum(), count) for name, value in told.items()}
    return total, {"loss": (total.detach(), policy_num_items(batch, loss_config)), **metrics}


def masked_labels(batch: Batch, loss_config: PolicyLossConfig) -> Tensor:
    """The batch's targets, less those of overlong completions where they are masked."""
    if not loss_config.mask_truncated_completions:
        return batch.labels
    return torch.where(batch.extra("overlong") > 0, IGNORE_INDEX, batch.labels)


def policy_num_items(batch: Batch, loss_config: PolicyLossConfig) -> Tensor:
    """What the sum of losses is divided by: completions, tokens, or completions × a constant; an fp32 scalar."""
    targets = masked_labels(batch, loss_config)
    if loss_config.loss_aggregation == "token":
        return (targets != IGNORE_INDEX).sum().float()
    completions = (document_label_counts(targets, batch.document_ids) > 0).sum().float()
    return completions * (loss_config.max_completion_length if loss_config.loss_aggregation == "constant" else 1)


class PolicyObjective:
    """The objective under some switches."""

    def __init__(self, loss_config: PolicyLossConfig) -> None:
        self._loss_config = loss_config

    def num_items(self, batch: Batch) -> Tensor:
        """See policy_weight."""
        return policy_num_items(batch, self._loss_config)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum, metrics as (sum, count) pairs). A batch without scored completions gives 0, not NaN."""
        hidden = model(batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys)
        targets = masked_labels(batch, self._loss_config)
        score = partial(token_logprobs_and_entropy, labels=targets, temperature=self._loss_config.temperature)
        logprobs, entropy = model.lm_head(hidden, score)
        total, metrics = policy_loss(batch, logprobs, self._loss_config)
        return total, metrics | {"entropy": (entropy.sum(), (targets != IGNORE_INDEX).sum().float())}
