"""Distillation: the divergence of a student from a teacher at every scored token, mixed with the language model's loss.

As in language.py, a chunk of tokens is scored at a time, here through both heads, and its gradient is computed while its
logits exist: the full logits of neither model ever do. A teacher is its hidden states and its head, or tokens of it that were
stored before: the likeliest, or drawn ones. What runs teachers and stores tokens is in post/distillation/.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.data.labels import IGNORE_INDEX, loss_chunk_tokens
from lmforge.core.losses.language import HeadChunk, HeadGradients, final_logits, loss_dtype
from lmforge.core.losses.objective import apply_head
from lmforge.core.losses.sharded_head import Scoring, ShardedHead, VocabShard
from lmforge.core.model.layers import PLAIN_HEAD, HeadOptions, LanguageModel

# A chunk has about six arrays of logits here, where cross-entropy has one or two.
CHUNK_TOKENS = 512
# The logit of an id that no token has. Finite, so that its ratio of two probabilities is a number, which 0 is multiplied by.
NO_TOKEN = -1e30
# So that it has a logarithm where fewer than k tokens have a probability.
LEAST_THRESHOLD = 1e-300
# Tokens are drawn for so many places at a time: an array of their probabilities in fp64 is no larger than a quarter of a chunk.
DRAWN_TOKENS = 64
# The unit of probabilities there: integers, which a GPU adds up in any order to the same. 2^16 of them are below 2^63.
ONE = 2**44


@dataclass(frozen=True)
class TeacherHead:
    """The output head of a teacher: weight [rows, width] of the ids from `start` on; bias [rows] and softcap as HeadOptions."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    start: int = 0

    def rows(self, start: int, count: int) -> "TeacherHead":
        """The head of `count` ids from `start` on; ids that the teacher does not have get zeros."""

        def cut(values: Tensor) -> Tensor:
            found = values[start - self.start :][:count]
            return found if len(found) == count else torch.cat([found, found.new_zeros(count - len(found), *found.shape[1:])])

        return TeacherHead(cut(self.weight), None if self.bias is None else cut(self.bias), self.softcap, start)


@dataclass(frozen=True)
class DistillationConfig:
    """What the loss of a token is: `kd_ratio` × divergence + (1 − `kd_ratio`) × cross-entropy.

    beta         of the generalised Jensen–Shannon divergence: 0 is the forward KL divergence, 1 the reverse one
    temperature  both models' logits are divided by it in the divergence (which is not multiplied by its square, as in TRL)
    vocab_size   ids from here on pad a head: they are no part of either distribution in the divergence; None: all are tokens
    sampled      what is stored of a teacher was drawn (SampledTeacher); beta is 0
    """

    beta: float
    temperature: float
    kd_ratio: float
    vocab_size: int | None = None
    sampled: bool = False


class Teacher(Protocol):
    """What a teacher says of tokens [tokens]."""

    def log_probs(self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard) -> Tensor:
        """Its log-probabilities [n, vocab] of some tokens on this shard of the vocabulary, as `student` has those of the
        student."""

    def excess(self, tokens: slice) -> Tensor | float:
        """By how much the divergence from these is too large: [n, 1], whatever the student says."""
        return 0.0


@dataclass(frozen=True)
class HeadTeacher(Teacher):
    """A teacher beside the student: its hidden states [tokens, width], and the rows of its head for this shard."""

    hidden: Tensor
    head: TeacherHead

    def log_probs(self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard) -> Tensor:
        logits = self.hidden[tokens] @ self.head.weight.t()
        return token_log_probs(final_logits(logits, self.head.bias, self.head.softcap, config.temperature), config, shard)


@dataclass(frozen=True)
class StoredTeacher(Teacher):
    """A teacher of which the k likeliest `ids` int64 [tokens, k] were stored, with the logarithms of their probabilities and,
    last, of that of all other ids together: `values` [tokens, k + 1].

    The other ids share theirs as they do under the student. So the divergence and its gradient are those of k + 1 outcomes,
    the last of which is any other id.
    """

    ids: Tensor
    values: Tensor

    def log_probs(self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard) -> Tensor:
        columns = self.ids[tokens] - shard.start
        # A column more, for ids of other shards.
        columns = torch.where((columns >= 0) & (columns < student.shape[1]), columns, student.shape[1])
        values, other = self.values[tokens].to(student.dtype).tensor_split([-1], dim=1)
        beside = student.new_zeros(len(student), 1)
        others = torch.cat([student.exp(), beside], 1).scatter_(1, columns, 0.0)
        (mass,) = shard.all_reduce_sum(others.sum(-1, keepdim=True))
        shift = other - mass.clamp(min=torch.finfo(mass.dtype).tiny).log()
        return torch.cat([student + shift, beside], 1).scatter_(1, columns, values)[:, :-1]


@dataclass(frozen=True)
class SampledTeacher(StoredTeacher):
    """A teacher of which `drawn_tokens` were stored: p of a drawn token is taken as max(p, τ), and as 0 of all others. The
    expectation of that is p, so forward KL divergence and gradient are expected to be those of the whole teacher."""

    def log_probs(self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard) -> Tensor:
        columns = self.ids[tokens] - shard.start
        # A column more, for ids of other shards.
        columns = torch.where((columns >= 0) & (columns < student.shape[1]), columns, student.shape[1])
        nothing = student.new_full((len(student), student.shape[1] + 1), NO_TOKEN)
        return nothing.scatter_(1, columns, self._taken(tokens).to(student.dtype))[:, :-1]

    def excess(self, tokens: slice) -> Tensor:
        taken = self._taken(tokens)
        return (taken.exp() * (taken - self.values[tokens, :-1])).sum(-1, keepdim=True)

    def _taken(self, tokens: slice) -> Tensor:
        return torch.maximum(self.values[tokens, :-1], self.values[tokens, -1:])


def token_log_probs(logits: Tensor, config: DistillationConfig, shard: VocabShard) -> Tensor:
    """Log-probabilities [n, vocab] of a shard of the vocabulary, in place of its final logits."""
    if config.vocab_size is not None:
        logits[:, max(0, config.vocab_size - shard.start) :] = NO_TOKEN
    largest = shard.all_reduce_max(logits.amax(-1, keepdim=True))
    (sums,) = shard.all_reduce_sum((logits - largest).exp().sum(-1, keepdim=True))
    return logits.sub_(largest + sums.log())


def divergence(student: Tensor, teacher: Tensor, beta: float, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """The generalised Jensen–Shannon divergence [n, 1] of log-probabilities [n, vocab], and its gradient by the student's
    logits [n, vocab] (Agarwal et al., arXiv 2306.13649, equation 1; TRL's `generalized_jsd_loss`).

    β KL(t ‖ m) + (1 − β) KL(s ‖ m), where m = β t + (1 − β) s. With β = 0 it is KL(t ‖ s), with β = 1 KL(s ‖ t).
    """
    probs = student.exp()
    if beta == 0:
        teacher_probs = teacher.exp()
        (total,) = shard.all_reduce_sum((teacher_probs * (teacher - student)).sum(-1, keepdim=True))
        return total, probs.sub_(teacher_probs)
    mixture = teacher if beta == 1 else torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    ratios, student_weight = student - mixture, 1 - beta or 1.0
    of_student, of_teacher = shard.all_reduce_sum(
        (probs * ratios).sum(-1, keepdim=True), (teacher.exp() * (teacher - mixture)).sum(-1, keepdim=True)
    )
    return beta * of_teacher + student_weight * of_student, ratios.sub_(of_student).mul_(probs).mul_(student_weight)


class DistillationChunk(HeadChunk):
    """A chunk's cross-entropies, and `divergences` [n], 0 where a token is not scored."""

    def __init__(
        self,
        tokens: slice,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scoring: Scoring,
        teacher: Teacher,
        config: DistillationConfig,
    ) -> None:
        self._teacher, self._config = teacher, config
        super().__init__(tokens, hidden, weight, bias, labels, scoring)

    def _score(self, logits: Tensor) -> Tensor:
        scoring, config, shard = self._scoring, self._config, self._scoring.vocab_shard
        final = final_logits(logits, self._bias, scoring.softcap, config.temperature)
        final = final.clone() if final is logits else final  # which are read again for the cross-entropy
        student = token_log_probs(final, config, shard)
        teacher = self._teacher.log_probs(self.tokens, student, config, shard)
        totals, self._divergence_gradient = divergence(student, teacher, config.beta, shard)
        totals = totals - self._teacher.excess(self.tokens)
        self.divergences = torch.where(self.is_scored, totals.squeeze(1), 0.0)
        return super()._score(logits)

    def _final_logit_gradient(self, softmax_scales: Tensor, label_scales: Tensor) -> Tensor:
        scale = self._config.kd_ratio / self._config.temperature
        scaled = self._divergence_gradient.mul_(self.is_scored.unsqueeze(1) * scale)
        return super()._final_logit_gradient(softmax_scales, label_scales).add_(scaled)


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scoring: Scoring,
        text_weights: Tensor,
        teacher: Teacher,
        config: DistillationConfig,
    ) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(2, dtype=loss_dtype(hidden), device=hidden.device)
        gradients = HeadGradients(ctx.needs_input_grad, hidden, bias) if any(ctx.needs_input_grad) else None
        rows = weight.to(hidden.dtype)
        size = min(CHUNK_TOKENS, loss_chunk_tokens(len(rows), hidden.element_size(), on_gpu=hidden.is_cuda, fused=False))
        for start in range(0, max(1, len(hidden)), size):
            tokens = slice(start, start + size)
            chunk = DistillationChunk(tokens, hidden, rows, bias, labels, scoring, teacher, config)
            of_text = text_weights[tokens]
            sums += torch.stack([chunk.divergences.sum(), (chunk.losses * of_text).sum()])
            if gradients is not None:
                chunk.add_gradients((1 - config.kd_ratio) * of_text, gradients)
            del chunk  # and its logits, before there are those of the next
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
            ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(sums)
        return config.kd_ratio * sums[0] + (1 - config.kd_ratio) * sums[1], sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        scale = upstream[0]
        return (
            of_hidden * scale.to(of_hidden.dtype),
            None if of_weight is None else (of_weight * scale).to(ctx.weight_dtype),
            None if of_bias is None else (of_bias * scale).to(ctx.bias_dtype),
            *[None] * 5,
        )


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    text_weights: Tensor,
    teacher: TeacherHead | None,
    batch: Batch,
    config: DistillationConfig,
    head: HeadOptions = PLAIN_HEAD,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of a batch's tokens with a label, differentiable, and the sums [2] of divergences and of
    cross-entropies, in nats: fp32 (fp64 if `hidden` is).

    `hidden` [sequences, length, width], `weight` [vocab, width]; a token's cross-entropy counts `text_weights` [sequences,
    length] times. What the teacher says is in the batch: with a `teacher`'s head the extra "teacher_hidden" [sequences, length,
    width of the teacher], without one "teacher_ids" [sequences, length, k] and "teacher_logprobs" [sequences, length, k + 1],
    as StoredTeacher or SampledTeacher has them. With a sharded head (sharded_head.py) every rank gets the full sums.
    """
    sharded = ShardedHead.from_weight(hidden, weight, labels, head)
    inputs = sharded.inputs()
    if teacher is None:
        ids, values = (sharded.local_tokens(batch.extra(f"teacher_{name}")) for name in ("ids", "logprobs"))
        chosen: Teacher = (SampledTeacher if config.sampled else StoredTeacher)(ids.long(), values)
    else:
        states = sharded.local_tokens(batch.extra("teacher_hidden")).to(inputs[0].dtype)
        rows = teacher.rows(sharded.vocab_shard.start, len(inputs[1]))
        chosen = HeadTeacher(states, TeacherHead(rows.weight.to(states.dtype), rows.bias, rows.softcap))
    with torch.autocast(hidden.device.type, enabled=False):
        total, sums = _ChunkedDistillation.apply(*inputs, sharded.local_tokens(text_weights), chosen, config)
    return sharded.sum_over_tokens(total), sharded.sum_over_tokens(sums)


class DistillationObjective:
    """The loss of DistillationConfig. Batches bring what the teacher says of them, as `distillation_loss` takes it.

    Where the extra "sampled" is 1 the student has sampled the label: there is no cross-entropy, since it is no text to learn.
    `config.vocab_size`, and `teacher_head` where the teacher is beside the student, are set before the first batch.
    """

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        self.teacher_head: TeacherHead | None = None

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labels, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs). A batch without labels gives 0, not NaN.

        Metrics: "loss", and of what it consists, unweighted: "kd_loss" (the divergence), "lm_loss" (the cross-entropy of
        text)."""
        scored = batch.labels != IGNORE_INDEX
        of_text = torch.ones_like(scored, dtype=torch.float32)
        if batch.extras is not None and "sampled" in batch.extras.tensors:
            of_text = of_text - batch.extra("sampled")
        head_fn = partial(
            distillation_loss,
            labels=batch.labels,
            text_weights=of_text,
            teacher=self.teacher_head,
            batch=batch,
            config=self.config,
        )
        total, sums = apply_head(model, batch, head_fn)
        num_items = self.num_items(batch)
        return total, {
            "loss": (total.detach(), num_items),
            "kd_loss": (sums[0], num_items),
            "lm_loss": (sums[1], (of_text * scored).sum()),
        }


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    config: DistillationConfig,
    head: HeadOptions = PLAIN_HEAD,
    rng_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What StoredTeacher needs: the `k` likeliest ids int64 [sequences, length, k], the likeliest first, and `values` fp32
    [sequences, length, k + 1]. With `rng_keys` int64 [sequences, length] what SampledTeacher needs.

    With a sharded head of the tokens that `hidden` has, so the weight is gathered."""
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    flat, found = hidden.flatten(0, 1), list[tuple[Tensor, Tensor]]()
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, max(1, len(flat)), CHUNK_TOKENS):
            tokens = slice(start, start + CHUNK_TOKENS)
            logits = final_logits(flat[tokens] @ weight.to(flat.dtype).t(), head.bias, head.softcap, config.temperature)
            logprobs = token_log_probs(logits, config, VocabShard())
            keys = None if rng_keys is None else rng_keys.flatten()[tokens]
            if keys is None:
                found.append(likeliest_tokens(logprobs, k))
            else:
                parts = zip(logprobs.split(DRAWN_TOKENS), keys.split(DRAWN_TOKENS), strict=True)
                found += [drawn_tokens(part, k, part_keys) for part, part_keys in parts]
    ids, values = (torch.cat(each).unflatten(0, hidden.shape[:2]) for each in zip(*found, strict=True))
    return ids, values


def likeliest_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of `logprobs` [n, vocab], which are overwritten: what StoredTeacher has, ids [n, k] and values fp32 [n, k + 1]."""
    values, ids = logprobs.topk(k, dim=-1)
    others = logprobs.scatter_(1, ids, NO_TOKEN).logsumexp(-1, keepdim=True)
    return ids, torch.cat([values, others], 1).float()


def drawn_tokens(logprobs: Tensor, k: int, rng_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Of `logprobs` [n, vocab] `k` ids [n, k], and their values with log τ at the end, fp32 [n, k + 1]. `rng_keys`: int64 [n].

    A token is drawn with probability min(1, p / τ), where τ is such that these add up to k. Anshumann et al. (arXiv 2503.16870)
    draw k times from p, where a likely token comes again and again; here none comes twice (systematic sampling, Madow 1949):
    with u uniform in 0 to 1, those are drawn whose step in the running sum of the probabilities holds one of u, u + 1, ….
    """
    probs = logprobs.double().exp()
    largest, likeliest = probs.topk(k, dim=-1)
    others = probs.scatter(1, likeliest, 0.0).sum(-1, keepdim=True)
    # If the first i are drawn for sure, what is left has k − i draws. The least of these quotients is the one where no other
    # token is as likely as that.
    left = _sums_from_each(largest) + others
    threshold = (left / torch.arange(k, 0, -1, device=left.device)).amin(-1, keepdim=True).clamp(min=LEAST_THRESHOLD)
    steps = ((probs / threshold).clamp_(max=1.0) * ONE).long().cumsum(-1)
    points = (rng_keys & (ONE - 1)).unsqueeze(1) + ONE * torch.arange(k, device=left.device)
    ids = torch.searchsorted(steps, points, right=True).clamp(max=probs.shape[1] - 1)
    return ids, torch.cat([logprobs.gather(1, ids), threshold.log()], 1).float()


def _sums_from_each(values: Tensor) -> Tensor:
    """The sum of each of `values` [n, k] and all after it. A GPU adds up floats in no fixed order in `cumsum`."""
    shift = 1
    while shift < values.shape[1]:
        values = values + F.pad(values[:, shift:], (0, shift))
        shift *= 2
    return values
