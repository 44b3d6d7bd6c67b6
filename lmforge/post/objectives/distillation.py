"""Distillation: the divergence of a student from a teacher at every scored token, mixed with the
language model's loss.

As in language.py, a chunk of tokens is scored at a time, here through both heads, and its gradient
is computed while its logits exist: the full logits of neither model ever do. A teacher is its
hidden states and its head, or tokens of it that were stored before: the likeliest, or drawn ones.
What runs teachers and stores tokens is in post/distillation/.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch, BatchView, Extra, Metrics, OptionalExtra
from lmforge.core.data.labels import IGNORE_INDEX, loss_chunk_tokens
from lmforge.core.losses.language import HeadChunk, HeadGradients, final_logits, loss_dtype
from lmforge.core.losses.objective import apply_head
from lmforge.core.losses.sharded_head import Scoring, ShardedHead, VocabShard
from lmforge.core.losses.top_logprobs import CHUNK_TOKENS, NO_TOKEN, token_log_probs
from lmforge.core.model.layers import PLAIN_HEAD, HeadOptions, LanguageModel


@dataclass(frozen=True)
class TeacherHead:
    """The output head of a teacher: weight [rows, width] of the ids from `start` on; bias [rows]
    and softcap as HeadOptions.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    start: int = 0

    def rows(self, start: int, count: int) -> "TeacherHead":
        """The head of `count` ids from `start` on; ids that the teacher does not have get zeros."""

        def cut(values: Tensor) -> Tensor:
            found = values[start - self.start :][:count]
            return (
                found
                if len(found) == count
                else torch.cat([found, found.new_zeros(count - len(found), *found.shape[1:])])
            )

        return TeacherHead(
            cut(self.weight), None if self.bias is None else cut(self.bias), self.softcap, start
        )


@dataclass(frozen=True)
class DistillationConfig:
    """What the loss of a token is: `kd_ratio` × divergence + (1 − `kd_ratio`) × cross-entropy.

    beta         of the generalised Jensen–Shannon divergence: 0 is the forward KL divergence, 1 the
                 reverse one
    temperature  both models' logits are divided by it in the divergence (which is not multiplied by
                 its square, as in TRL)
    vocab_size   ids from here on pad a head: they are no part of either distribution in the
                 divergence; None: all are tokens
    sampled      what is stored of a teacher was drawn (SampledTeacher); beta is 0
    """

    beta: float
    temperature: float
    kd_ratio: float
    vocab_size: int | None = None
    sampled: bool = False


class Teacher(Protocol):
    """What a teacher says of tokens [tokens]."""

    def log_probs(
        self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard
    ) -> Tensor:
        """Its log-probabilities [n, vocab] of some tokens on this shard of the vocabulary, as
        `student` has those of the student.
        """

    def excess(self, tokens: slice) -> Tensor | float:
        """By how much the divergence from these is too large: [n, 1], whatever the student says."""
        return 0.0


@dataclass(frozen=True)
class HeadTeacher(Teacher):
    """A teacher beside the student: its hidden states [tokens, width], and the rows of its head for
    this shard.
    """

    hidden: Tensor
    head: TeacherHead

    def log_probs(
        self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard
    ) -> Tensor:
        logits = self.hidden[tokens] @ self.head.weight.t()
        return token_log_probs(
            final_logits(logits, self.head.bias, self.head.softcap, config.temperature),
            config.vocab_size,
            shard,
        )


@dataclass(frozen=True)
class StoredTeacher(Teacher):
    """A teacher of which the k likeliest `ids` int64 [tokens, k] were stored, with the logarithms
    of their probabilities and, last, of that of all other ids together: `values` [tokens, k + 1].

    The other ids share theirs as they do under the student. So the divergence and its gradient are
    those of k + 1 outcomes, the last of which is any other id.
    """

    ids: Tensor
    values: Tensor

    def log_probs(
        self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard
    ) -> Tensor:
        columns = self.ids[tokens] - shard.start
        # A column more, for ids of other shards.
        columns = torch.where(
            (columns >= 0) & (columns < student.shape[1]), columns, student.shape[1]
        )
        values, other = self.values[tokens].to(student.dtype).tensor_split([-1], dim=1)
        beside = student.new_zeros(len(student), 1)
        others = torch.cat([student.exp(), beside], 1).scatter_(1, columns, 0.0)
        (mass,) = shard.all_reduce_sum(others.sum(-1, keepdim=True))
        shift = other - mass.clamp(min=torch.finfo(mass.dtype).tiny).log()
        return torch.cat([student + shift, beside], 1).scatter_(1, columns, values)[:, :-1]


@dataclass(frozen=True)
class SampledTeacher(StoredTeacher):
    """A teacher of which `drawn_tokens` were stored: p of a drawn token is taken as max(p, τ), and
    as 0 of all others. The expectation of that is p, so forward KL divergence and gradient are
    expected to be those of the whole teacher.
    """

    def log_probs(
        self, tokens: slice, student: Tensor, config: DistillationConfig, shard: VocabShard
    ) -> Tensor:
        columns = self.ids[tokens] - shard.start
        # A column more, for ids of other shards.
        columns = torch.where(
            (columns >= 0) & (columns < student.shape[1]), columns, student.shape[1]
        )
        nothing = student.new_full((len(student), student.shape[1] + 1), NO_TOKEN)
        return nothing.scatter_(1, columns, self._taken(tokens).to(student.dtype))[:, :-1]

    def excess(self, tokens: slice) -> Tensor:
        taken = self._taken(tokens)
        return (taken.exp() * (taken - self.values[tokens, :-1])).sum(-1, keepdim=True)

    def _taken(self, tokens: slice) -> Tensor:
        return torch.maximum(self.values[tokens, :-1], self.values[tokens, -1:])


def divergence(
    student: Tensor, teacher: Tensor, beta: float, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """The generalised Jensen–Shannon divergence [n, 1] of log-probabilities [n, vocab], and its
    gradient by the student's logits [n, vocab] (Agarwal et al., arXiv 2306.13649, equation 1; TRL's
    `generalized_jsd_loss`).

    β KL(t ‖ m) + (1 − β) KL(s ‖ m), where m = β t + (1 − β) s. With β = 0 it is KL(t ‖ s), with β =
    1 KL(s ‖ t).
    """
    probs = student.exp()
    if beta == 0:
        teacher_probs = teacher.exp()
        (total,) = shard.all_reduce_sum((teacher_probs * (teacher - student)).sum(-1, keepdim=True))
        return total, probs.sub_(teacher_probs)
    mixture = (
        teacher
        if beta == 1
        else torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    )
    ratios = student - mixture
    student_weight = 1 - beta or 1.0
    of_student, of_teacher = shard.all_reduce_sum(
        (probs * ratios).sum(-1, keepdim=True),
        (teacher.exp() * (teacher - mixture)).sum(-1, keepdim=True),
    )
    return beta * of_teacher + student_weight * of_student, ratios.sub_(of_student).mul_(
        probs
    ).mul_(student_weight)


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
        self._teacher = teacher
        self._config = config
        super().__init__(tokens, hidden, weight, bias, labels, scoring)

    def _score(self, logits: Tensor) -> Tensor:
        scoring = self._scoring
        config = self._config
        shard = self._scoring.vocab_shard
        final = final_logits(logits, self._bias, scoring.softcap, config.temperature)
        # Which are read again for the cross-entropy.
        final = final.clone() if final is logits else final
        student = token_log_probs(final, config.vocab_size, shard)
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
        gradients = (
            HeadGradients(ctx.needs_input_grad, hidden, bias) if any(ctx.needs_input_grad) else None
        )
        rows = weight.to(hidden.dtype)
        size = min(
            CHUNK_TOKENS,
            loss_chunk_tokens(len(rows), hidden.element_size(), on_gpu=hidden.is_cuda, fused=False),
        )
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
            ctx.weight_dtype = weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
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


class DistillationBatch(BatchView):
    """A batch with what the teacher says of its tokens, [sequences, length, …].

    teacher_hidden: the teacher's hidden states, [.., width of the teacher].
    teacher_ids, teacher_logprobs: its most likely ids [.., k] and their log-probabilities, with
        that of all others [.., k + 1], as StoredTeacher or SampledTeacher has them.
    sampled: 1 where the student has sampled the label.
    """

    teacher_hidden = Extra()
    teacher_ids = Extra()
    teacher_logprobs = Extra()
    sampled = OptionalExtra()


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
    """The sum of the losses of a batch's tokens with a label, differentiable, and the sums [2] of
    divergences and of cross-entropies, in nats: fp32 (fp64 if `hidden` is).

    `hidden` [sequences, length, width], `weight` [vocab, width]; a token's cross-entropy counts
    `text_weights` [sequences, length] times. What the teacher says is in the batch: with a
    `teacher`'s head the extra "teacher_hidden" [sequences, length, width of the teacher], without
    one "teacher_ids" [sequences, length, k] and "teacher_logprobs" [sequences, length, k + 1], as
    StoredTeacher or SampledTeacher has them. With a sharded head (sharded_head.py) every rank gets
    the full sums.
    """
    sharded = ShardedHead.from_weight(hidden, weight, labels, head)
    inputs = sharded.inputs()
    own = DistillationBatch(batch)
    if teacher is None:
        ids = sharded.local_tokens(own.teacher_ids)
        values = sharded.local_tokens(own.teacher_logprobs)
        chosen: Teacher = (SampledTeacher if config.sampled else StoredTeacher)(ids.long(), values)
    else:
        states = sharded.local_tokens(own.teacher_hidden).to(inputs[0].dtype)
        rows = teacher.rows(sharded.vocab_shard.start, len(inputs[1]))
        chosen = HeadTeacher(
            states, TeacherHead(rows.weight.to(states.dtype), rows.bias, rows.softcap)
        )
    with torch.autocast(hidden.device.type, enabled=False):
        total, sums = _ChunkedDistillation.apply(
            *inputs, sharded.local_tokens(text_weights), chosen, config
        )
    return sharded.sum_over_tokens(total), sharded.sum_over_tokens(sums)


class DistillationObjective:
    """The loss of DistillationConfig.

    Batches bring what the teacher says of them, as `distillation_loss` takes it.

    Where the extra "sampled" is 1 the student has sampled the label: there is no cross-entropy,
    since it is no text to learn. `config.vocab_size`, and `teacher_head` where the teacher is
    beside the student, are set before the first batch.
    """

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        self.teacher_head: TeacherHead | None = None

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labels, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs).

        A batch without labels gives 0, not NaN.

        Metrics: "loss", and of what it consists, unweighted: "kd_loss" (the divergence), "lm_loss"
        (the cross-entropy of text).
        """
        scored = batch.labels != IGNORE_INDEX
        of_text = torch.ones_like(scored, dtype=torch.float32)
        sampled = DistillationBatch(batch).sampled
        if sampled is not None:
            of_text = of_text - sampled
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
