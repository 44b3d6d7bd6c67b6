"""Learning from which of two completions is better: DPO and its variants, ORPO, SimPO, and reward
models;
and from completions that are labelled one at a time: KTO.

Each method is a pure function of the log-probabilities of full completions and returns a *sum* over
pairs; one objective serves them all. To add a loss of policy and reference log-probabilities, add a
case to `dpo` and its name to `align.loss_type` (post/options/align.py); one without a reference is
a function of `PairLogprobs` such as `simpo`. The normalisations are TRL's, except that what TRL
divides within a micro-batch is divided here once, by the number of pairs of the global batch.

In a batch the documents of a sequence are numbered so that 2i is the chosen and 2i + 1 the rejected
side of a pair, prompt and completion together, and only completions have labels. Where a side has
no label there is no pair.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lmforge.core.data.batch import Batch, BatchView, Extra, Metrics
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.losses.logprobs import document_label_counts, document_sums, label_logprobs
from lmforge.core.losses.objective import apply_head
from lmforge.core.model.attention import ContextParallel
from lmforge.core.model.layers import LanguageModel

# The maximum difference of policy and reference before the first update, in nats per token.
MAX_REFERENCE_GAP = 1e-3


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of full completions in nats, fp32, and their lengths in tokens: tensors of
    one shape, one entry a pair.

    `pair_mask` bool: whether the entry holds a pair. The reference's are None for methods without a
    reference.
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
        """Log-probability of the rejected completion, per token."""
        return self.rejected / self.rejected_tokens.clamp(min=1)

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """log π − log reference of the chosen and of the rejected completions.

        Raises ValueError without a reference.
        """
        if self.reference_chosen is None or self.reference_rejected is None:
            raise ValueError("this objective needs the reference's log-probabilities")
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    def masked_sum(self, values: Tensor) -> Tensor:
        """The sum over the entries that hold a pair."""
        return torch.where(self.pair_mask, values, 0.0).sum()

    def num_pairs(self) -> Tensor:
        """The number of pairs, a scalar in the dtype of the log-probabilities."""
        return self.pair_mask.sum().to(self.chosen.dtype)


PreferenceLoss = Callable[[PairLogprobs], tuple[Tensor, Metrics]]


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of documents 2i and of documents 2i + 1 [sequences, length // 2], from values by
    document [sequences, length].
    """
    end = values.shape[1] // 2 * 2
    return values[:, 0:end:2], values[:, 1:end:2]


def pair_logprobs(
    batch: Batch,
    logprobs: Tensor,
    reference_logprobs: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> PairLogprobs:
    """A batch's pairs, from log p of each label [sequences, length] under the policy and, if any,
    under the reference.

    With context parallelism these are of this rank's tokens, and the pairs are those of full
    sequences.
    """
    ids = batch.document_ids
    lengths = split_pairs(document_label_counts(batch.labels, ids, context_parallel))
    policy = split_pairs(document_sums(logprobs, ids, context_parallel))
    reference: tuple[Tensor, ...] = ()
    if reference_logprobs is not None:
        scored = batch.labels != IGNORE_INDEX
        reference = split_pairs(document_sums(reference_logprobs * scored, ids, context_parallel))
    return PairLogprobs(*policy, *lengths, (lengths[0] > 0) & (lengths[1] > 0), *reference)


def dpo(
    pairs: PairLogprobs, *, beta: float, loss_type: str = "sigmoid", label_smoothing: float = 0.0
) -> tuple[Tensor, Metrics]:
    """Direct preference optimisation (arXiv 2305.18290) and other losses of the same four
    log-probabilities.

    With c and r the log-ratios of policy to reference of the chosen and the rejected side, Δ = c −
    r, and ε the `label_smoothing`, `loss_type` is one of (in brackets what TRL's
    `DPOConfig.loss_type` calls it, where it differs):
    sigmoid   −(1 − ε) log σ(βΔ) − ε log σ(−βΔ); with ε > 0 this is conservative DPO, which TRL has
              in its CPO trainer only
    ipo       (Δ − 1 / 2β)², c and r per token (arXiv 2310.12036; the authors' own normalisation is
              per token too)
    hinge     max(0, 1 − βΔ) (SLiC, arXiv 2305.10425)
    robust    sigmoid without the bias of labels of which a fraction ε < 0.5 is wrong (arXiv
              2403.00409)
    exo       [exo_pair] KL from the policy's preference to that of the labels, smoothed by ε > 0
              (arXiv 2402.00856, eq. 16)
    nca       [nca_pair] −log σ(βc) − ½ log σ(−βc) − ½ log σ(−βr) (arXiv 2402.05369)
    apo-zero  [apo_zero] 1 − σ(βc) + σ(βr) (arXiv 2408.06266, eq. 7)
    apo-down  [apo_down] σ(βc) + 1 − σ(βΔ) (eq. 8)
    Only sigmoid, robust and exo read `label_smoothing`.
    """
    chosen, rejected = pairs.log_ratios()
    preferred = logsigmoid(beta * (chosen - rejected))
    dispreferred = logsigmoid(-beta * (chosen - rejected))
    match loss_type:
        case "sigmoid":
            losses = -(1 - label_smoothing) * preferred - label_smoothing * dispreferred
        case "hinge":
            losses = (1 - beta * (chosen - rejected)).clamp(min=0)
        case "ipo":
            per_token = chosen / pairs.chosen_tokens.clamp(
                min=1
            ) - rejected / pairs.rejected_tokens.clamp(min=1)
            losses = (per_token - 1 / (2 * beta)).square()
        case "robust":
            losses = (label_smoothing * dispreferred - (1 - label_smoothing) * preferred) / (
                1 - 2 * label_smoothing
            )
        case "exo":
            losses = preferred.exp() * (preferred - math.log1p(-label_smoothing))
            losses = losses + dispreferred.exp() * (dispreferred - math.log(label_smoothing))
        case "nca":
            losses = (
                -logsigmoid(beta * chosen)
                - (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)) / 2
            )
        case "apo-zero":
            losses = 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
        case "apo-down":
            losses = (beta * chosen).sigmoid() + 1 - preferred.exp()
        case _:
            raise ValueError(f"no loss type {loss_type!r}")
    return _with_metrics(pairs, losses, beta * chosen, beta * rejected)


def orpo(pairs: PairLogprobs, *, beta: float) -> tuple[Tensor, Metrics]:
    """NLL of the chosen side − `beta` × log σ(log of the odds ratio), with per-token means (arXiv
    2403.07691).

    The NLL is the mean over each chosen completion's tokens, summed over pairs. TRL takes the mean
    over all tokens of a micro-batch, prompts included, which depends on how the batch is split.
    """
    log_odds = _log_odds(pairs.chosen_mean) - _log_odds(pairs.rejected_mean)
    losses = -pairs.chosen_mean - beta * logsigmoid(log_odds)
    total, metrics = _with_metrics(
        pairs, losses, beta * pairs.chosen_mean, beta * pairs.rejected_mean
    )
    metrics["nll"] = -pairs.masked_sum(pairs.chosen_mean).detach(), pairs.num_pairs()
    metrics["log_odds"] = pairs.masked_sum(log_odds).detach(), pairs.num_pairs()
    return total, metrics


def _log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 − p)) of p = exp(mean), stable for p near 0 and near 1."""
    # At p = 1 the odds are infinite and have no gradient.
    mean = mean.clamp(max=-1e-7)
    log_complement = torch.where(
        mean > -math.log(2), (-torch.expm1(mean)).log(), torch.log1p(-mean.exp())
    )
    return mean - log_complement


def simpo(pairs: PairLogprobs, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """−log σ(β(mean log-probability of chosen − of rejected) − γ), without a reference (arXiv
    2405.14734).
    """
    chosen = beta * pairs.chosen_mean
    rejected = beta * pairs.rejected_mean
    return _with_metrics(pairs, -logsigmoid(chosen - rejected - gamma), chosen, rejected)


@torch.no_grad()
def reward_metrics(chosen: Tensor, rejected: Tensor, pair_mask: Tensor) -> Metrics:
    """Rewards of both sides, their margin, and how often the chosen one's is higher.

    A tie counts as wrong.
    """
    values = {
        "chosen": chosen,
        "rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).float(),
    }
    count = pair_mask.sum().to(chosen.dtype)
    return {
        f"rewards/{name}": (torch.where(pair_mask, value, 0.0).sum(), count)
        for name, value in values.items()
    }


def _with_metrics(
    pairs: PairLogprobs, losses: Tensor, chosen: Tensor, rejected: Tensor
) -> tuple[Tensor, Metrics]:
    """The sum of the losses, and metrics; `chosen` and `rejected` are the implied rewards."""
    total = pairs.masked_sum(losses)
    count = pairs.num_pairs()
    metrics = {"loss": (total.detach(), count), **reward_metrics(chosen, rejected, pairs.pair_mask)}
    for name in ("chosen", "rejected"):
        metrics[f"logps/{name}"] = pairs.masked_sum(getattr(pairs, name).detach()), count
        metrics[f"tokens/{name}"] = pairs.masked_sum(getattr(pairs, f"{name}_tokens")), count
    return total, metrics


class PreferenceBatch(BatchView):
    """A batch of completions of which some are better: fp32 [sequences, length] of

    reference_logprobs: the label's log-probability under the reference model.
    kto_labels: 1 in a desirable completion, 0 in an undesirable one.
    margins: by how much the chosen completion is better, in both completions of a pair.
    """

    reference_logprobs = Extra()
    kto_labels = Extra()
    margins = Extra()


class PreferenceObjective:
    """One of the losses above, such as `partial(dpo, beta=0.1)`, as an objective.

    With `uses_reference`, batches bring the extra "reference_logprobs": the reference's
    log-probability of each label, computed in the policy's dtype.
    """

    def __init__(self, loss_fn: PreferenceLoss, *, uses_reference: bool) -> None:
        self._loss_fn = loss_fn
        self._uses_reference = uses_reference

    def num_items(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return _pair_mask(batch).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs).

        A batch without pairs gives 0, not NaN.
        """
        reference = PreferenceBatch(batch).reference_logprobs if self._uses_reference else None
        logprobs = label_logprobs(model, batch)
        total, metrics = self._loss_fn(
            pair_logprobs(batch, logprobs, reference, model.context_parallel)
        )
        if reference is not None:
            metrics |= reference_gap(batch, logprobs, reference)
        return total, metrics


def _pair_mask(batch: Batch) -> Tensor:
    """Where there are labels on both sides: bool [sequences, length // 2]."""
    chosen_tokens, rejected_tokens = split_pairs(
        document_label_counts(batch.labels, batch.document_ids)
    )
    return (chosen_tokens > 0) & (rejected_tokens > 0)


@torch.no_grad()
def reference_gap(batch: Batch, logprobs: Tensor, reference_logprobs: Tensor) -> Metrics:
    """The metric "reference_gap": the mean over labels of |log π − log reference|."""
    scored = batch.labels != IGNORE_INDEX
    return {
        "reference_gap": (
            torch.where(scored, logprobs - reference_logprobs, 0.0).abs().sum(),
            scored.sum().float(),
        )
    }


def reference_mismatch_warning(metrics: Mapping[str, float]) -> str | None:
    """A warning if the policy differs from its reference before the first update, else None.

    `metrics` are those of the first step. If both agree, every log-ratio is 0: with `loss_type`
    sigmoid the loss is ln 2 for any beta and label smoothing.
    """
    gap = metrics["reference_gap"]
    if gap <= MAX_REFERENCE_GAP:
        return None
    return (
        f"before the first update policy and reference differ by {gap:.2g} nats per token (loss"
        f" {metrics['loss']:.4f}): the reference has other weights, or computes in another dtype"
    )


class KTOObjective:
    """Learning from completions that are labelled desirable or undesirable, one at a time: KTO
    (arXiv 2402.01306).

    In a batch the documents of a sequence are numbered so that 2i is a prompt with its completion,
    and 2i + 1 the mismatched one: the same prompt with the completion of another document of the
    same sequence (the completions, rotated by one). The mismatched completions' log-ratios estimate
    the KL divergence from the reference, against which gains and losses are measured. The estimate
    is made for each sequence, so that it is the same for any split of the batch; TRL makes it over
    all sequences that happen to share a micro-batch, and averages over ranks.

    Batches bring the extras "reference_logprobs" and "kto_labels" (1 desirable, 0 not; constant in
    a document).
    """

    def __init__(self, *, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
        self._beta = beta
        self._desirable_weight = desirable_weight
        self._undesirable_weight = undesirable_weight

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labelled completions, an fp32 scalar on the batch's device."""
        num_labels, _ = split_pairs(document_label_counts(batch.labels, batch.document_ids))
        return (num_labels > 0).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over completions, metrics as (sum, count) pairs).

        A batch without completions gives 0, not NaN.

        The sum is of w_d (1 − σ(β(x − z))) where desirable and w_u (1 − σ(β(z − x))) where not: x
        is log π − log reference of a completion, z the KL divergence, clamped to at least 0 and not
        differentiated.
        """
        own = PreferenceBatch(batch)
        reference = own.reference_logprobs
        logprobs = label_logprobs(model, batch)
        scored = batch.labels != IGNORE_INDEX
        sums = partial(
            document_sums, document_ids=batch.document_ids, context_parallel=model.context_parallel
        )
        log_ratios, mismatched = split_pairs(sums(logprobs - reference * scored))
        lengths, mismatched_lengths = split_pairs(sums(scored.float()))
        desirable_tokens, _ = split_pairs(sums(own.kto_labels * scored))
        completion_mask = lengths > 0
        desirable = desirable_tokens > 0
        kl_mask = mismatched_lengths > 0
        kl_sum = torch.where(kl_mask, mismatched.detach(), 0.0).sum(1, keepdim=True)
        kl = kl_sum / kl_mask.sum(1, keepdim=True).clamp(min=1)
        gain = self._beta * (log_ratios - kl.clamp(min=0))
        desirable_losses = self._desirable_weight * (-gain).sigmoid()
        losses = torch.where(desirable, desirable_losses, self._undesirable_weight * gain.sigmoid())
        total = torch.where(completion_mask, losses, 0.0).sum()
        metrics = {
            "loss": (total.detach(), completion_mask.sum().float()),
            "kl": (kl_sum.sum(), kl_mask.sum().float()),
        }
        completion_logprobs, _ = split_pairs(sums(logprobs.detach()))
        values = {
            "rewards": self._beta * log_ratios.detach(),
            "logps": completion_logprobs,
            "tokens": lengths,
        }
        for side, mask in (
            ("chosen", completion_mask & desirable),
            ("rejected", completion_mask & ~desirable),
        ):
            for name, value in values.items():
                metrics[f"{name}/{side}"] = torch.where(mask, value, 0.0).sum(), mask.sum().float()
        return total, metrics | reference_gap(batch, logprobs.detach(), reference)


class RewardModelObjective:
    """Bradley-Terry loss of a model whose head has one output; its value at a document's last token
    is the reward.

    −log σ(r_c − r_r − margin) + `center_rewards_coefficient` × (r_c + r_r)², summed over pairs. The
    margin is that of Llama 2 (arXiv 2307.09288); the second term keeps rewards near zero (arXiv
    2312.09244). Batches bring the extra "margins", constant in a document; that of the chosen one
    counts.
    """

    def __init__(self, *, center_rewards_coefficient: float) -> None:
        self._center_rewards_coefficient = center_rewards_coefficient

    def num_items(self, batch: Batch) -> Tensor:
        """Number of pairs, an fp32 scalar on the batch's device."""
        return _pair_mask(batch).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum over pairs, metrics as (sum, count) pairs).

        A batch without pairs gives 0, not NaN.
        """
        chosen, rejected = split_pairs(document_rewards(model, batch))
        last_margins = PreferenceBatch(batch).margins * _is_last_token(batch.document_ids)
        margins, _ = split_pairs(document_sums(last_margins, batch.document_ids))
        losses = -logsigmoid(chosen - rejected - margins)
        losses = losses + self._center_rewards_coefficient * (chosen + rejected).square()
        pair_mask = _pair_mask(batch)
        total = torch.where(pair_mask, losses, 0.0).sum()
        count = pair_mask.sum().to(chosen.dtype)
        return total, {
            "loss": (total.detach(), count),
            **reward_metrics(chosen, rejected, pair_mask),
        }


def document_rewards(model: LanguageModel, batch: Batch) -> Tensor:
    """The reward of each document under a model whose head has one output: fp32 [sequences,
    length], by document number.
    """
    values = apply_head(model, batch).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return document_sums(
        torch.where(_is_last_token(batch.document_ids), values, 0.0), batch.document_ids
    )


def _is_last_token(document_ids: Tensor) -> Tensor:
    """Whether a token is the last of its document."""
    following = torch.cat([document_ids[:, 1:], torch.full_like(document_ids[:, :1], -1)], dim=1)
    return document_ids != following
