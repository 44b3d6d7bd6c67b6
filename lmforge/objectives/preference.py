"""Learning from which of two completions is better: DPO and its kin, ORPO, SimPO, and reward models.

Each method is a pure function of the log-probabilities of whole completions, which returns a *sum* over pairs, and one
objective serves them all. Completions that are judged one at a time are in kto.py. The normalisations are TRL's but for
one thing: what TRL divides within a micro-batch is here divided once by the pairs of the global batch.

In a preference batch the documents of a row are numbered so that 2i is the chosen and 2i + 1 the rejected side of a pair,
prompt and completion together, and only completions are scored. Where a side has no scored target there is no pair.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lmforge.data.batch import Batch, Metrics
from lmforge.model.layers import LanguageModel
from lmforge.objectives.cross_entropy import IGNORE_INDEX
from lmforge.objectives.logprobs import document_label_counts, document_sums, token_logprobs

LossType = Literal["sigmoid", "hinge", "ipo", "robust", "exo", "nca", "apo-zero", "apo-down"]


@dataclass(frozen=True)
class PairLogprobs:
    """Tensors of one shape, a place for each pair: log-probabilities of whole completions in nats, fp32, and their lengths.

    `there` bool: whether there is a pair in this place. The reference's are None for the methods that have none.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    pair_mask: Tensor
    reference_chosen: Tensor | None = None
    reference_rejected: Tensor | None = None

    @property
    def chosen_mean(self) -> Tensor:
        """Log-probability of the chosen completion, per token."""
        return self.chosen / self.chosen_tokens.clamp(min=1)

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens.clamp(min=1)

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """log π − log reference of the chosen and of the rejected completions. ValueError without a reference."""
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ValueError("this objective needs the reference's log-probabilities")
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def masked_sum(self, values: Tensor) -> Tensor:
        """The sum over those pairs that are there."""
        return torch.where(self.pair_mask, values, 0.0).sum()

    def num_pairs(self) -> Tensor:
        return self.pair_mask.sum().to(self.chosen.dtype)


PreferenceLoss = Callable[[PairLogprobs], tuple[Tensor, Metrics]]


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the documents 2i and of the documents 2i + 1, of values by document [rows, length]: [rows, length // 2]."""
    end = values.shape[1] // 2 * 2
    return values[:, 0:end:2], values[:, 1:end:2]


def pair_logprobs(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor | None = None) -> PairLogprobs:
    """The pairs of a batch from log p of each token [rows, length] under the policy and, if any, under the reference."""
    scored = batch.labels != IGNORE_INDEX
    lengths = split_pairs(document_label_counts(batch.labels, batch.document_ids))
    ours = split_pairs(document_sums(logprobs, batch.document_ids))
    theirs = (
        (None, None)
        if reference_logprobs is None
        else split_pairs(document_sums(reference_logprobs * scored, batch.document_ids))
    )
    return PairLogprobs(*ours, *lengths, (lengths[0] > 0) & (lengths[1] > 0), *theirs)


def dpo(
    pairs: PairLogprobs, *, beta: float, loss_type: LossType = "sigmoid", label_smoothing: float = 0.0
) -> tuple[Tensor, Metrics]:
    """Direct preference optimisation (arXiv 2305.18290) and losses of the same four log-probabilities.

    With c and r the log-ratios of policy to reference of the chosen and the rejected side, and Δ = c − r:
    sigmoid   −log σ(βΔ), with label smoothing ε (1 − ε of it + ε of that with −Δ), the conservative DPO of its authors
    hinge     max(0, 1 − βΔ) (SLiC, arXiv 2305.10425)
    ipo       (Δ − 1 / 2β)², c and r per token (arXiv 2310.12036; the authors' own normalisation is per token too)
    robust    sigmoid without the bias of labels of which a share ε is wrong (arXiv 2403.00409)
    exo       KL from the policy's preference to that of the labels, smoothed by ε > 0 (arXiv 2402.00856, equation 16)
    nca       −log σ(βc) − ½ log σ(−βc) − ½ log σ(−βr) (arXiv 2402.05369)
    apo-zero  1 − σ(βc) + σ(βr) (arXiv 2408.06266, equation 7)   apo-down  σ(βc) + 1 − σ(βΔ) (equation 8)
    """
    chosen, rejected = pairs.log_ratios()
    preferred, dispreferred = logsigmoid(beta * (chosen - rejected)), logsigmoid(-beta * (chosen - rejected))
    match loss_type:
        case "sigmoid":
            losses = -(1 - label_smoothing) * preferred - label_smoothing * dispreferred
        case "hinge":
            losses = (1 - beta * (chosen - rejected)).clamp(min=0)
        case "ipo":
            of_tokens = chosen / pairs.chosen_tokens.clamp(min=1) - rejected / pairs.rejected_tokens.clamp(min=1)
            losses = (of_tokens - 1 / (2 * beta)).square()
        case "robust":
            losses = (label_smoothing * dispreferred - (1 - label_smoothing) * preferred) / (1 - 2 * label_smoothing)
        case "exo":
            losses = preferred.exp() * (preferred - math.log1p(-label_smoothing))
            losses = losses + dispreferred.exp() * (dispreferred - math.log(label_smoothing))
        case "nca":
            losses = -logsigmoid(beta * chosen) - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2
        case "apo-zero":
            losses = 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
        case "apo-down":
            losses = (beta * chosen).sigmoid() + 1 - preferred.exp()
    return _with_metrics(pairs, losses, beta * chosen, beta * rejected)


def orpo(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Metrics]:
    """NLL of the chosen side + `weight` × −log σ(log of the ratio of the odds), per-token means (arXiv 2403.07691).

    The NLL is the mean over each chosen completion's tokens, summed over pairs; TRL takes the mean over all tokens of a
    micro-batch, prompts included, which depends on how the batch is split.
    """
    log_odds = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
    losses = -pairs.chosen_mean - beta * logsigmoid(log_odds)
    total, metrics = _with_metrics(pairs, losses, beta * pairs.chosen_mean, beta * pairs.rejected_mean)
    metrics["nll"] = -pairs.masked_sum(pairs.chosen_mean).detach(), pairs.num_pairs()
    metrics["log_odds"] = pairs.masked_sum(log_odds).detach(), pairs.num_pairs()
    return total, metrics


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean), stable for p near 0 and near 1."""
    # The odds of what is certain are infinite and have no gradient.
    mean = mean.clamp(max=-1e-7)
    rest = torch.where(mean > -math.log(2), (-torch.expm1(mean)).log(), torch.log1p(-mean.exp()))
    return mean - rest


def simpo(pairs: PairLogprobs, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """−log σ(β(mean log-probability of chosen − of rejected) − γ), without a reference (arXiv 2405.14734)."""
    chosen, rejected = beta * pairs.chosen_mean, beta * pairs.rejected_mean
    return _with_metrics(pairs, -logsigmoid(chosen - rejected - gamma), chosen, rejected)


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    pair_mask: Tensor,
    *,
    margin: Tensor | float = 0.0,
    center_rewards_coefficient: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """−log σ(r_c − r_r − margin) + `centre` × (r_c + r_r)² of scalar rewards, summed over the pairs that are there.

    The margin is that of Llama 2 (arXiv 2307.09288), the second term keeps rewards near zero (arXiv 2312.09244).
    """
    losses = -logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected).square()
    total = torch.where(pair_mask, losses, 0.0).sum()
    return total, {"loss": (total.detach(), pair_mask.sum().to(chosen.dtype)), **reward_metrics(chosen, rejected, pair_mask)}


@torch.no_grad()
def reward_metrics(chosen: Tensor, rejected: Tensor, pair_mask: Tensor) -> Metrics:
    """Rewards of both sides, their margin, and how often the chosen one's is higher, a tie being a failure."""
    values = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": (chosen > rejected).float()}
    count = pair_mask.sum().to(chosen.dtype)
    return {f"rewards/{name}": (torch.where(pair_mask, value, 0.0).sum(), count) for name, value in values.items()}


def _with_metrics(pairs: PairLogprobs, losses: Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """The sum and the metrics of pairs with these losses and these implied rewards."""
    total, count = pairs.masked_sum(losses), pairs.num_pairs()
    metrics = {"loss": (total.detach(), count), **reward_metrics(chosen, rejected, pairs.pair_mask)}
    for name in ("chosen", "rejected"):
        metrics[f"logps/{name}"] = pairs.masked_sum(getattr(pairs, name).detach()), count
        metrics[f"tokens/{name}"] = pairs.masked_sum(getattr(pairs, f"{name}_tokens")), count
    return total, metrics


class PreferenceObjective:
    """The objective of pairs under one of the methods above, such as `partial(dpo, beta=0.1)`.

    With `reference`, batches bring the extra "reference": its log-probability of each scored target, made in the
    policy's compute dtype.
    """

    def __init__(self, loss_fn: PreferenceLoss, *, uses_reference: bool) -> None:
        self._loss_fn = loss_fn
        self._uses_reference = uses_reference

    def num_items(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return count_pairs(batch)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs). A batch without pairs gives 0, not NaN."""
        reference = batch.extra("reference") if self._uses_reference else None
        hidden = model(batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys)
        logprobs = model.lm_head(hidden, partial(token_logprobs, labels=batch.labels))
        total, metrics = self._loss_fn(pair_logprobs(batch, logprobs, reference))
        return total, metrics if reference is None else metrics | reference_gap(batch, logprobs, reference)


def count_pairs(batch: Batch) -> Tensor:
    """Number of pairs with something scored on both sides: an fp32 scalar."""
    chosen, rejected = split_pairs(document_label_counts(batch.labels, batch.document_ids))
    return ((chosen > 0) & (rejected > 0)).sum().float()


@torch.no_grad()
def reference_gap(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor) -> Metrics:
    """How far policy and reference are apart: |log π − log reference| of the scored targets."""
    scored = batch.labels != IGNORE_INDEX
    return {"reference_gap": (torch.where(scored, logprobs - reference_logprobs, 0.0).abs().sum(), scored.sum().float())}


def reference_mismatch_warning(first_step_metrics: Mapping[str, float], tolerance: float = 1e-3) -> str | None:
    """What is to be said if the policy is not its own reference before its first update, else None.

    `means` are the metrics of the first step. Then every log-ratio is 0: the loss of DPO is ln 2, whatever β and the
    labels' smoothing. Where it is not the reference has other weights, or runs in another dtype than the policy.
    """
    gap = first_step_metrics["reference_gap"]
    if gap <= tolerance:
        return None
    return (
        f"before the first update policy and reference differ by {gap:.2g} nats a token (loss {first_step_metrics['loss']:.4f}; ln 2 is "
        f"{math.log(2):.4f}): the reference has other weights, or computes in another dtype"
    )


class RewardModelObjective:
    """The objective of a model whose head has one output: what it gives at a document's last token is the reward.

    With `margins`, batches bring the extra "margin", the same at every token of a chosen document.
    """

    def __init__(self, *, center_rewards_coefficient: float = 0.0, margins: bool = False) -> None:
        self._center_rewards_coefficient = center_rewards_coefficient
        self._margins = margins

    def num_items(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return count_pairs(batch)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs). A batch without pairs gives 0, not NaN."""
        rewards = document_rewards(model, batch)
        last = _is_last_token(batch.document_ids)
        lengths = split_pairs(document_label_counts(batch.labels, batch.document_ids))
        there = (lengths[0] > 0) & (lengths[1] > 0)
        margin: Tensor | float = 0.0
        if self._margins:
            margin, _ = split_pairs(document_sums(batch.extra("margin") * last, batch.document_ids))
        return bradley_terry(
            *split_pairs(rewards), there, margin=margin, center_rewards_coefficient=self._center_rewards_coefficient
        )


def document_rewards(model: LanguageModel, batch: Batch) -> Tensor:
    """The reward of each document under a model whose head has one output: fp32 [rows, length], by document number."""
    hidden = model(batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys)
    values = model.lm_head(hidden).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return document_sums(torch.where(_is_last_token(batch.document_ids), values, 0.0), batch.document_ids)


def _is_last_token(document_ids: Tensor) -> Tensor:
    """Whether a token is the last of its document."""
    following = torch.cat([document_ids[:, 1:], torch.full_like(document_ids[:, :1], -1)], dim=1)
    return document_ids != following
