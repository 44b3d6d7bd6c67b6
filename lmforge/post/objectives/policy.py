"""Learning from the rewards of sampled completions: one objective with orthogonal switches, which
an algorithm sets (algorithms/). It does not depend on the origin of completions and rewards.

In a batch each document is a prompt with a sampled completion, and only the completion has labels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from lmforge.core import registry
from lmforge.core.data.batch import MAXIMUM, Batch, BatchView, Extra, Metrics, OptionalExtra
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.errors import UserError
from lmforge.core.losses.logprobs import (
    broadcast_to_tokens,
    document_label_counts,
    document_sums,
    token_logprobs_and_entropy,
)
from lmforge.core.losses.objective import apply_head
from lmforge.core.losses.sharded_head import sum_gradients
from lmforge.core.model.layers import LanguageModel
from lmforge.post.options.align import RolloutOptions

# TRL's, so that the advantages of a group with almost no spread stay as small.
STD_EPSILON = 1e-4
# TRL's names. |log-probability of the trainer − of what sampled|, at the first use of a set.
MEAN_DIFFERENCE = "sampling_logp_difference/mean"
LARGEST_DIFFERENCE = "sampling_logp_difference/max"


@dataclass(frozen=True)
class PolicyLossConfig:
    """How the loss of completions is computed.

    The fields are the options of the same names in `[rollout]`, which validate them. Names are
    those of TRL's `GRPOConfig`; values that TRL lacks, or calls otherwise, are marked.

    importance_sampling_level
        the importance ratio: `token`; `sequence`, the geometric mean over the completion (GSPO,
        arXiv 2507.18071); `product`, over the completion (not in GRPOConfig; what TRL's RLOOTrainer
        does)
    epsilon, epsilon_high
        a ratio gains nothing outside 1 − epsilon … 1 + epsilon_high; epsilon_high above epsilon is
        DAPO's clip-higher
    loss_aggregation
        `sequence`: mean over each completion's tokens, then over completions (TRL's loss_type
        `grpo`); `token`: mean over the tokens of the global batch (`dapo`; in one micro-batch
        `bnpo`); `constant`: sum over tokens ÷ (completions × max_completion_length) (`dr_grpo`)
    max_completion_length
        in tokens
    baseline
        what a reward is compared with: the mean of its `group`, or of the others in it,
        `leave-one-out` (TRL: the RLOOTrainer)
    scale_rewards
        what the difference is divided by: `none`; `group`, the sample standard deviation of the
        group (÷ n − 1); `group-population` (÷ n; not in TRL). TRL's `batch` does not exist here
    kl_estimator
        KL divergence from the reference: `none`; `k1`, taken off the reward (TRL: the RLOOTrainer);
        `k2` (not in TRL) or `k3` (TRL's GRPOTrainer), Schulman's estimators, in the loss of each
        token
    beta
        the weight of the KL divergence
    use_bias_correction_kl
        k2 and k3 are multiplied by the importance ratio, so that their gradient is that of the KL
        divergence off policy too (arXiv 2512.02556)
    mask_truncated_completions
        completions that were cut at max_completion_length are neither learned from nor counted
    temperature
        what logits are divided by, in sampling and in the loss
    importance_sampling_mode
        corrects for what sampled with other probabilities than the trainer's, by a kernel or by
        older weights: losses are multiplied by the ratio of the policy when a set is first used
        (the proximal policy) to what sampled it, and the ratios above are to the proximal policy
        (decoupled PPO, arXiv 2505.24298). That ratio, of a token or product over the completion
        (`token_…`, `sequence_…`), is bounded by importance_sampling_clip_min and …_clip_max
        (`…_truncate`), or 0 outside of them (`…_mask`). `none`: ratios are to what sampled (TRL:
        vllm_importance_sampling_correction = False)
    off_policy_mask_threshold
        completions with a negative advantage do not contribute where the mean over tokens of log
        (what sampled ÷ policy) is larger (arXiv 2512.02556)
    """

    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    loss_aggregation: str = "token"
    max_completion_length: int = 1
    baseline: str = "group"
    scale_rewards: str = "group"
    kl_estimator: str = "none"
    beta: float = 0.0
    use_bias_correction_kl: bool = False
    mask_truncated_completions: bool = False
    temperature: float = 1.0
    importance_sampling_mode: str = "none"
    importance_sampling_clip_min: float | None = None
    importance_sampling_clip_max: float | None = None
    off_policy_mask_threshold: float | None = None


def build_policy_loss_config(options: RolloutOptions) -> PolicyLossConfig:
    """The algorithm of `rollout.loss_type` with the options of `[rollout]` that the recipe sets."""
    given = {field.name: getattr(options, field.name) for field in fields(PolicyLossConfig)}
    algorithm = registry.find("algorithm", options.loss_type)
    assert algorithm is not None
    loss_config = replace(
        algorithm.build(), **{name: value for name, value in given.items() if value is not None}
    )
    if loss_config.kl_estimator != "none" and not loss_config.beta:
        raise UserError(
            f"rollout.kl_estimator = {loss_config.kl_estimator}: without a weight it does nothing;"
            " give rollout.beta, such as 0.04"
        )
    return loss_config


def compute_advantages(rewards: Tensor, config: PolicyLossConfig) -> Tensor:
    """How much better each completion is than its group: [groups, num_generations], from rewards of
    that shape.

    A reward that is NaN (a reward function returned None) is left out of baseline and standard
    deviation; its own advantage is 0. A group with fewer than two rewards has nothing to compare,
    and its advantages are 0.
    """
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True).to(rewards.dtype)
    centered = torch.where(known, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    # r − mean of the others = (r − mean of all) × n / (n − 1)
    others = count / (count - 1).clamp(min=1)
    advantages = centered * others if config.baseline == "leave-one-out" else centered
    if config.scale_rewards != "none":
        divisor = count if config.scale_rewards == "group-population" else (count - 1).clamp(min=1)
        std = (centered.square().sum(1, keepdim=True) / divisor.clamp(min=1)).sqrt()
        advantages = advantages / (std + STD_EPSILON)
    return torch.where(count > 1, advantages, 0.0)


def has_nonzero_std(rewards: Tensor) -> Tensor:
    """Whether rewards [groups, num_generations] differ within a group: bool [groups].

    NaN is left out.
    """
    largest = rewards.nan_to_num(nan=-torch.inf).amax(1)
    return largest > rewards.nan_to_num(nan=torch.inf).amin(1)


def subtract_kl_penalty(
    rewards: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, config: PolicyLossConfig
) -> Tensor:
    """Rewards minus beta × the KL divergence of each completion from the reference: k1, log old −
    log reference.

    All of one shape, an entry for each completion; the log-probabilities are those of full
    completions. Rewards themselves under any other `kl_estimator`.
    """
    if config.kl_estimator != "k1":
        return rewards
    return rewards - config.beta * (old_logprobs - reference_logprobs)


class PolicyBatch(BatchView):
    """A batch of sampled completions: fp32 [sequences, length] of

    advantages: constant in a completion.
    old_logprobs: the log-probability of each label when it was sampled.
    proximal_logprobs: that under the policy when the set was first used, where the loss corrects
        for the difference and the set is used more than once.
    reference_logprobs: that under the reference model, where the KL divergence from it is part of
        the loss, or of the rewards.
    truncated: 1 in completions that were truncated at the longest allowed, where they are masked.
    reused: there if the set was used before.
    """

    advantages = Extra()
    old_logprobs = Extra()
    proximal_logprobs = OptionalExtra()
    reference_logprobs = Extra()
    truncated = Extra()
    reused = OptionalExtra()

    @property
    def has_reference(self) -> bool:
        return "reference_logprobs" in self.batch.extra_tensors


class PolicyObjective:
    """The negative of the clipped objective, under one configuration."""

    def __init__(self, config: PolicyLossConfig, metric_names: Sequence[str] = ()) -> None:
        """`metric_names`: extras that are metrics too, of batches with one completion in each
        sequence; NaN is not counted.
        """
        self._config = config
        self._metric_names = metric_names

    def _labels(self, batch: Batch) -> Tensor:
        """The batch's labels, without those of truncated completions where they are masked."""
        if not self._config.mask_truncated_completions:
            return batch.labels
        return torch.where(PolicyBatch(batch).truncated > 0, IGNORE_INDEX, batch.labels)

    def num_items(self, batch: Batch) -> Tensor:
        """Number of completions, tokens, or completions × max_completion_length: an fp32 scalar on
        the batch's device.
        """
        return self._count_items(document_label_counts(self._labels(batch), batch.document_ids))

    def _count_items(self, lengths: Tensor) -> Tensor:
        """`num_items` of completions with so many labels, [sequences, length] by document."""
        aggregation = self._config.loss_aggregation
        if aggregation == "token":
            return lengths.sum()
        return (lengths > 0).sum().float() * (
            self._config.max_completion_length if aggregation == "constant" else 1
        )

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum, metrics as (sum, count) pairs).

        A batch without scored completions gives 0, not NaN.

        Metrics are by token, of ratios before clipping. With context parallelism the sum is that of
        this rank's tokens.
        """
        config = self._config
        labels = self._labels(batch)
        document_ids = batch.document_ids
        context = model.context_parallel
        sums = partial(document_sums, document_ids=document_ids, context_parallel=context)
        head_fn = partial(token_logprobs_and_entropy, labels=labels, temperature=config.temperature)
        logprobs, entropy = apply_head(model, batch, head_fn)
        scored = labels != IGNORE_INDEX
        lengths = sums(scored.float())
        own = PolicyBatch(batch)
        old_logprobs = own.old_logprobs
        advantages = own.advantages
        proximal = own.proximal_logprobs
        is_first_use = own.reused is None or proximal is not None
        if proximal is None:
            proximal = logprobs.detach()
        corrects = config.importance_sampling_mode != "none"
        log_ratio = torch.where(scored, logprobs - (proximal if corrects else old_logprobs), 0.0)
        if config.importance_sampling_level != "token":
            by_document = sums(log_ratio)
            by_document = (
                by_document if context is None else sum_gradients(by_document, context.group)
            )
            if config.importance_sampling_level == "sequence":
                by_document = by_document / lengths.clamp(min=1)
            log_ratio = broadcast_to_tokens(by_document, document_ids)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        difference = torch.where(scored, proximal - old_logprobs, 0.0)
        values = {
            "ratio": ratio,
            "clip/low": ((ratio < 1 - config.epsilon) & (advantages < 0)).float(),
            "clip/high": ((ratio > 1 + config.epsilon_high) & (advantages > 0)).float(),
            "entropy": entropy,
        }
        if is_first_use:
            values[MEAN_DIFFERENCE] = difference.abs()
        if corrects:
            values["importance_sampling_ratio"] = self._importance_weights(
                difference, document_ids, sums
            )
            losses = losses * values["importance_sampling_ratio"]
        if config.off_policy_mask_threshold is not None:
            divergence = sums(torch.where(scored, old_logprobs - logprobs.detach(), 0.0))
            divergence = broadcast_to_tokens(divergence / lengths.clamp(min=1), document_ids)
            is_far = divergence > config.off_policy_mask_threshold
            values["off_policy_masked"] = (is_far & (advantages < 0)).float()
            losses = losses * (1 - values["off_policy_masked"])
        if config.kl_estimator == "k1" and own.has_reference:
            # Already subtracted from the rewards.
            values["kl"] = old_logprobs - own.reference_logprobs
        if config.kl_estimator in ("k2", "k3"):
            log_inverse = torch.where(scored, own.reference_logprobs - logprobs, 0.0)
            kl = (
                log_inverse.square() / 2
                if config.kl_estimator == "k2"
                else log_inverse.expm1() - log_inverse
            )
            values["kl"] = kl * ratio if config.use_bias_correction_kl else kl
            losses = losses + config.beta * values["kl"]
        if config.loss_aggregation == "sequence":
            losses = losses / broadcast_to_tokens(lengths, document_ids).clamp(min=1)
        total = torch.where(scored, losses, 0.0).sum()
        count = scored.sum().float()
        metrics = {
            name: (torch.where(scored, value.detach(), 0.0).sum(), count)
            for name, value in values.items()
        }
        if MEAN_DIFFERENCE in values:
            metrics[LARGEST_DIFFERENCE] = values[MEAN_DIFFERENCE].amax(), count
        metrics["loss"] = (
            total.detach(),
            self._count_items(lengths) / (1 if context is None else context.group.size()),
        )
        for name in self._metric_names:
            extra = batch.extra(name)[:, 0]
            known = ~extra.isnan()
            counted = torch.where(known, extra, 0.0)
            metrics[name] = (
                counted.amax() if name.endswith(MAXIMUM) else counted.sum(),
                known.sum().float(),
            )
        return total, metrics

    def _importance_weights(
        self, log_ratio: Tensor, document_ids: Tensor, sums: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """By what losses are multiplied: the bounded ratio of the proximal policy to what sampled,
        [sequences, length].

        `log_ratio`: that of each token, 0 where there is no label. `sums`: those of documents.
        """
        config = self._config
        level, _, bound = config.importance_sampling_mode.partition("_")
        if level == "sequence":
            log_ratio = broadcast_to_tokens(sums(log_ratio), document_ids)
        ratio = log_ratio.exp()
        low = config.importance_sampling_clip_min
        high = config.importance_sampling_clip_max
        bounded = ratio if low is None and high is None else ratio.clamp(low, high)
        return bounded if bound == "truncate" else torch.where(bounded == ratio, ratio, 0.0)


# Metrics of a completion that was sampled ahead: how many versions its tokens are behind, and how
# long its step waited.
STALENESS_METRICS = ("staleness", "staleness/max", "generation_wait_seconds")


def completion_metric_names(
    num_generations: int, with_environment: bool = False
) -> tuple[str, ...]:
    """Metrics of a completion: its reward, whether it has none, whether all in its group are equal,
    the fraction of reward functions that failed on it, whether its environment did, its answers,
    calls of tools and those that failed, pass@k of its group, its length, and whether it was
    truncated.
    """
    passes = [f"pass@{k}" for k in pass_sizes(num_generations)]
    failures = (
        "reward_failures",
        *(
            ("environment_failures", "turns", "tool_calls", "failed_tool_calls")
            if with_environment
            else ()
        ),
    )
    return (
        "reward",
        "no_reward",
        "frac_reward_zero_std",
        *failures,
        *passes,
        "pass@n",
        "completion_tokens",
        "truncated",
    )


def pass_sizes(num_generations: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, … below `num_generations`."""
    return [2**power for power in range(num_generations.bit_length()) if 2**power < num_generations]


def pass_at_k(k: int, passed: Tensor, known: Tensor) -> Tensor:
    """The probability that one of `k` completions of a group passes, fp64 [groups], from bools
    [groups, num_generations].

    NaN where fewer than k have a reward. The unbiased estimate from n completions, of which c pass,
    is 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv 2107.03374).
    """
    count = known.sum(1)
    passes = (passed & known).sum(1)
    estimates = [
        1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan
        for n, c in zip(count.tolist(), passes.tolist(), strict=True)
    ]
    return torch.tensor(estimates, dtype=torch.float64)
