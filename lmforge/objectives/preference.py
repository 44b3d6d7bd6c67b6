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
from lmforge.objectives.chunked import IGNORED
from lmforge.objectives.logprobs import document_sums, document_tokens, token_logprobs

Kind = Literal["sigmoid", "hinge", "ipo", "robust", "exo", "nca", "apo-zero", "apo-down"]


@dataclass(frozen=True)
class Pairs:
    """Tensors of one shape, a place for each pair: log-probabilities of whole completions in nats, fp32, and their lengths.

    `there` bool: whether there is a pair in this place. The reference's are None for the methods that have none.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    there: Tensor
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

    def total(self, losses: Tensor) -> Tensor:
        """The sum over those pairs that are there."""
        return torch.where(self.there, losses, 0.0).sum()

    def count(self) -> Tensor:
        return self.there.sum().to(self.chosen.dtype)


Method = Callable[[Pairs], tuple[Tensor, Metrics]]


def both_sides(values: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the documents 2i and of the documents 2i + 1, of values by document [rows, length]: [rows, length // 2]."""
    end = values.shape[1] // 2 * 2
    return values[:, 0:end:2], values[:, 1:end:2]


def pairs_of(batch: Batch, logprobs: Tensor, reference: Tensor | None = None) -> Pairs:
    """The pairs of a batch from log p of each token [rows, length] under the policy and, if any, under the reference."""
    scored = batch.targets != IGNORED
    lengths = both_sides(document_tokens(batch.targets, batch.documents))
    ours = both_sides(document_sums(logprobs, batch.documents))
    theirs = (None, None) if reference is None else both_sides(document_sums(reference * scored, batch.documents))
    return Pairs(*ours, *lengths, (lengths[0] > 0) & (lengths[1] > 0), *theirs)


def dpo(pairs: Pairs, *, beta: float, kind: Kind = "sigmoid", label_smoothing: float = 0.0) -> tuple[Tensor, Metrics]:
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
    match kind:
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
    return _told(pairs, losses, beta * chosen, beta * rejected)


def orpo(pairs: Pairs, *, weight: float) -> tuple[Tensor, Metrics]:
    """NLL of the chosen side + `weight` × −log σ(log of the ratio of the odds), per-token means (arXiv 2403.07691).

    The NLL is the mean over each chosen completion's tokens, summed over pairs; TRL takes the mean over all tokens of a
    micro-batch, prompts included, which depends on how the batch is split.
    """
    log_odds = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
    losses = -pairs.chosen_mean - weight * logsigmoid(log_odds)
    total, metrics = _told(pairs, losses, weight * pairs.chosen_mean, weight * pairs.rejected_mean)
    metrics["nll"] = -pairs.total(pairs.chosen_mean).detach(), pairs.count()
    metrics["log_odds"] = pairs.total(log_odds).detach(), pairs.count()
    return total, metrics


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean), stable for p near 0 and near 1."""
    # The odds of what is certain are infinite and have no gradient.
    mean = mean.clamp(max=-1e-7)
    rest = torch.where(mean > -math.log(2), (-torch.expm1(mean)).log(), torch.log1p(-mean.exp()))
    return mean - rest


def simpo(pairs: Pairs, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """−log σ(β(mean log-probability of chosen − of rejected) − γ), without a reference (arXiv 2405.14734)."""
    chosen, rejected = beta * pairs.chosen_mean, beta * pairs.rejected_mean
    return _told(pairs, -logsigmoid(chosen - rejected - gamma), chosen, rejected)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, there: Tensor, *, margin: Tensor | float = 0.0, centre: float = 0.0
) -> tuple[Tensor, Metrics]:
    """−log σ(r_c − r_r − margin) + `centre` × (r_c + r_r)² of scalar rewards, summed over the pairs that are there.

    The margin is that of Llama 2 (arXiv 2307.09288), the second term keeps rewards near zero (arXiv 2312.09244).
    """
    losses = -logsigmoid(chosen - rejected - margin) + centre * (chosen + rejected).square()
    total = torch.where(there, losses, 0.0).sum()
    return total, {"loss": (total.detach(), there.sum().to(chosen.dtype)), **reward_metrics(chosen, rejected, there)}


@torch.no_grad()
def reward_metrics(chosen: Tensor, rejected: Tensor, there: Tensor) -> Metrics:
    """Rewards of both sides, their margin, and how often the chosen one's is higher, a tie being a failure."""
    values = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": (chosen > rejected).float()}
    count = there.sum().to(chosen.dtype)
    return {f"rewards/{name}": (torch.where(there, value, 0.0).sum(), count) for name, value in values.items()}


def _told(pairs: Pairs, losses: Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """The sum and the metrics of pairs with these losses and these implied rewards."""
    total, count = pairs.total(losses), pairs.count()
    metrics = {"loss": (total.detach(), count), **reward_metrics(chosen, rejected, pairs.there)}
    for name in ("chosen", "rejected"):
        metrics[f"logps/{name}"] = pairs.total(getattr(pairs, name).detach()), count
        metrics[f"tokens/{name}"] = pairs.total(getattr(pairs, f"{name}_tokens")), count
    return total, metrics


class Preference:
    """The objective of pairs under one of the methods above, such as `partial(dpo, beta=0.1)`.

    With `reference`, batches bring the extra "reference": its log-probability of each scored target, made in the
    policy's compute dtype.
    """

    def __init__(self, method: Method, *, reference: bool) -> None:
        self._method = method
        self._reference = reference

    def weight(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return count_pairs(batch)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs). A batch without pairs gives 0, not NaN."""
        reference = batch.extra("reference") if self._reference else None
        hidden = model(batch.tokens, batch.positions, batch.documents, keys=batch.keys)
        logprobs = model.lm_head(hidden, partial(token_logprobs, targets=batch.targets))
        total, metrics = self._method(pairs_of(batch, logprobs, reference))
        return total, metrics if reference is None else metrics | reference_gap(batch, logprobs, reference)


def count_pairs(batch: Batch) -> Tensor:
    """Number of pairs with something scored on both sides: an fp32 scalar."""
    chosen, rejected = both_sides(document_tokens(batch.targets, batch.documents))
    return ((chosen > 0) & (rejected > 0)).sum().float()


@torch.no_grad()
def reference_gap(batch: Batch, logprobs: Tensor, reference: Tensor) -> Metrics:
    """How far policy and reference are apart: |log π − log reference| of the scored targets."""
    scored = batch.targets != IGNORED
    return {"reference_gap": (torch.where(scored, logprobs - reference, 0.0).abs().sum(), scored.sum().float())}


def disagreement(means: Mapping[str, float], tolerance: float = 1e-3) -> str | None:
    """What is to be said if the policy is not its own reference before its first update, else None.

    `means` are the metrics of the first step. Then every log-ratio is 0: the loss of DPO is ln 2, whatever β and the
    labels' smoothing. Where it is not the reference has other weights, or runs in another dtype than the policy.
    """
    gap = means["reference_gap"]
    if gap <= tolerance:
        return None
    return (
        f"before the first update policy and reference differ by {gap:.2g} nats a token (loss {means['loss']:.4f}; ln 2 is "
        f"{math.log(2):.4f}): the reference has other weights, or computes in another dtype"
    )


class RewardModel:
    """The objective of a model whose head has one output: what it gives at a document's last token is the reward.

    With `margins`, batches bring the extra "margin", the same at every token of a chosen document.
    """

    def __init__(self, *, centre: float = 0.0, margins: bool = False) -> None:
        self._centre = centre
        self._margins = margins

    def weight(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return count_pairs(batch)

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs). A batch without pairs gives 0, not NaN."""
        rewards = rewards_of(model, batch)
        last = _last_tokens(batch.documents)
        lengths = both_sides(document_tokens(batch.targets, batch.documents))
        there = (lengths[0] > 0) & (lengths[1] > 0)
        margin: Tensor | float = 0.0
        if self._margins:
            margin, _ = both_sides(document_sums(batch.extra("margin") * last, batch.documents))
        return bradley_terry(*both_sides(rewards), there, margin=margin, centre=self._centre)


def rewards_of(model: LanguageModel, batch: Batch) -> Tensor:
    """The reward of each document under a model whose head has one output: fp32 [rows, length], by document number."""
    hidden = model(batch.tokens, batch.positions, batch.documents, keys=batch.keys)
    values = model.lm_head(hidden).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return document_sums(torch.where(_last_tokens(batch.documents), values, 0.0), batch.documents)


def _last_tokens(documents: Tensor) -> Tensor:
    """Whether a token is the last of its document."""
    following = torch.cat([documents[:, 1:], torch.full_like(documents[:, :1], -1)], dim=1)
    return documents != following
