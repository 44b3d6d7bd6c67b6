"""Next-token prediction, the objective of pretraining and fine-tuning: from hidden states to the
loss.

Output head and cross-entropy are computed together, a chunk of tokens at a time, so that the full
logits never exist. With a vocabulary of 128,000, the fp32 logits of 8,192 tokens take 4 GiB, and
their gradient as much again. Here the gradient of a chunk is computed while its logits exist, and
both are freed before the next chunk. logprobs.py goes through the same chunks where the gradient of
each token's log-probability is known only later. The passes over a chunk are torch's own operators,
or compiled: on GPUs those of fused_passes.py, on CPUs those of stored_passes.py.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lmforge.core.data.batch import Batch, Metrics
from lmforge.core.data.labels import IGNORE_INDEX, loss_chunk_tokens
from lmforge.core.losses.sharded_head import Scoring, ShardedHead
from lmforge.core.model.layers import PLAIN_HEAD, HeadOptions, LanguageModel, cap_logits


class NextTokenObjective:
    """Cross-entropy of every label, as a sum; with `z_loss` above 0 also the z-loss of that weight.

    `source_names` are those of a mixture's sources: each has a metric of its own for batches with
    `source_ids`.
    """

    def __init__(self, z_loss: float = 0.0, source_names: Sequence[str] = ()) -> None:
        self._z_loss = z_loss
        self._source_names = source_names

    def num_items(self, batch: Batch) -> Tensor:
        """Number of labels, an fp32 scalar on the batch's device."""
        return (batch.labels != IGNORE_INDEX).sum().float()

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[Tensor, Metrics]:
        """(sum of losses in nats, metrics as (sum, count) pairs).

        A batch without labels gives 0, not NaN.

        The metric "loss" is the cross-entropy alone, so that runs compare; "z_loss" is what the
        z-loss adds to it.
        """
        by_source = batch.source_ids is not None and bool(self._source_names)
        hidden = model(
            batch.tokens,
            batch.positions,
            batch.document_ids,
            rng_keys=batch.rng_keys,
            document_starts=batch.document_starts,
        )
        head_fn = partial(
            cross_entropy_and_z_loss,
            labels=batch.labels,
            z_loss=self._z_loss,
            with_token_losses=by_source,
        )
        # Through the module of the head, since its hooks gather a sharded weight.
        total, z_total, token_losses = model.lm_head(hidden, head_fn)
        num_items = self.num_items(batch)
        metrics: Metrics = {"loss": (total.detach() - z_total, num_items)}
        if self._z_loss:
            metrics["z_loss"] = (z_total, num_items)
        if by_source:
            metrics |= self._losses_by_source(batch, token_losses)
        return total, metrics

    def _losses_by_source(self, batch: Batch, token_losses: Tensor) -> Metrics:
        """The loss of each source, "loss/NAME"; `token_losses` [sequences, length]."""
        assert batch.source_ids is not None
        sources = batch.source_ids.flatten().long()
        is_scored = (batch.labels != IGNORE_INDEX).flatten().float()
        values = torch.stack([token_losses.detach().flatten().float(), is_scored])
        sums = values.new_zeros(2, len(self._source_names)).index_add_(1, sources, values)
        return {
            f"loss/{name}": (sums[0, n], sums[1, n]) for n, name in enumerate(self._source_names)
        }


def cross_entropy_and_z_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    head: HeadOptions = PLAIN_HEAD,
    with_token_losses: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums over the tokens with a label: −log p(label) in nats plus the z-loss, and the z-loss
    alone, not differentiable.

    Both are scalars in fp32 (fp64 if `hidden` is), 0 where no token has a label. `hidden`
    [sequences, length, width], `weight` [vocab, width], `labels` int64 [sequences, length],
    IGNORE_INDEX where a token is not scored; `head` says what else makes logits. With a sharded
    head (sharded_head.py) every rank gets the full sums. With `with_token_losses` also the
    cross-entropy of each token [sequences, length], not differentiable, 0 without a label.

    The z-loss is `z_loss` · logsumexp(logits)², summed over the tokens with a label; it keeps
    logits from drifting away from normalised log-probabilities (PaLM, arXiv 2204.02311, section 5).
    """
    sharded = ShardedHead.from_weight(hidden, weight, labels, head)
    inputs = sharded.inputs()
    with torch.autocast(hidden.device.type, enabled=False):
        total, z_total, losses = _ChunkedCrossEntropy.apply(*inputs, z_loss)
    token_losses = sharded.gather_tokens(losses) if with_token_losses else None
    # Without a z-loss it is 0 on every rank, so no collective is needed.
    return (
        sharded.sum_over_tokens(total),
        sharded.sum_over_tokens(z_total) if z_loss else z_total,
        token_losses,
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scoring: Scoring,
        z_loss: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(labels.shape, dtype=loss_dtype(hidden), device=hidden.device)
        total, z_total = (
            torch.zeros((), dtype=loss_dtype(hidden), device=hidden.device) for _ in range(2)
        )
        gradients = (
            HeadGradients(ctx.needs_input_grad, hidden, bias) if any(ctx.needs_input_grad) else None
        )
        for chunk in head_chunks(hidden, weight, bias, labels, scoring):
            losses[chunk.tokens] = chunk.losses
            total += chunk.losses.sum()
            if z_loss:
                z_total += chunk.z_losses(z_loss).sum()
            if gradients is not None:
                chunk.add_gradients(1.0, gradients, z_loss)
            del chunk  # and its logits, before there are those of the next
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
            ctx.weight_dtype = weight.dtype
            ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(z_total, losses)
        return total + z_total, z_total, losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, bias_gradient = ctx.saved_tensors
        scale = upstream[0]
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        if bias_gradient is not None:
            bias_gradient = (bias_gradient * scale).to(ctx.bias_dtype)
        return (
            hidden_gradient * scale.to(hidden_gradient.dtype),
            weight_gradient,
            bias_gradient,
            None,
            None,
            None,
        )


def loss_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which losses are computed and summed: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)


class HeadGradients:
    """Gradients of hidden states [tokens, width], weight [vocab, width] and bias [vocab], to which
    each chunk contributes.

    `needs_input_grad` is that of a function whose first inputs these are; None of those that need
    none.
    """

    def __init__(
        self, needs_input_grad: tuple[bool, ...], hidden: Tensor, bias: Tensor | None
    ) -> None:
        _, self._needs_weight, needs_bias, *_ = needs_input_grad
        # In `loss_dtype`: in bf16, the small contributions of late chunks would be lost in the sum
        # of the early ones.
        self._sum_dtype = loss_dtype(hidden)
        self.hidden = torch.empty_like(hidden)
        self.weight: Tensor | None = None
        self.bias = (
            torch.zeros_like(bias, dtype=self._sum_dtype)
            if bias is not None and needs_bias
            else None
        )

    def add_chunk(
        self, tokens: slice, logit_gradient: Tensor, hidden: Tensor, weight: Tensor
    ) -> None:
        """Add what the gradient of a chunk's logits [n, vocab] gives, from its hidden states [n,
        width] and the weight.
        """
        torch.mm(logit_gradient, weight, out=self.hidden[tokens])
        if self.bias is not None:
            self.bias += logit_gradient.sum(0, dtype=self.bias.dtype)
        if not self._needs_weight:
            return
        columns = logit_gradient.t()
        # Only a GPU multiplies bf16 into fp32.
        out_dtype = (
            self._sum_dtype if columns.is_cuda and columns.dtype != self._sum_dtype else None
        )
        if self.weight is None:
            product = (
                torch.mm(columns, hidden)
                if out_dtype is None
                else torch.mm(columns, hidden, out_dtype=out_dtype)
            )
            self.weight = product.to(self._sum_dtype)
        elif out_dtype is not None:
            torch.addmm(self.weight, columns, hidden, out_dtype=out_dtype, out=self.weight)
        elif self.weight.dtype == columns.dtype:
            self.weight.addmm_(columns, hidden)
        else:
            self.weight += columns @ hidden


def final_logits(
    logits: Tensor, bias: Tensor | None, softcap: float | None, temperature: float
) -> Tensor:
    """What the softmax is taken of, in fp32 (fp64 if `logits` are), from the head's product [n,
    vocab] and `bias` [vocab].
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values = cap_logits(values if bias is None else values + bias, softcap)
    return values if temperature == 1 else values / temperature


def softcap_slopes(values: Tensor, softcap: float, temperature: float) -> Tensor:
    """The derivative of soft-capping, from what `final_logits` returned."""
    return 1 - (values * (temperature / softcap)).square()


class HeadChunk:
    """The losses of n tokens, and what their gradients need, in `loss_dtype`.

    tokens: their slice of all tokens. is_scored: bool [n], whether a token has a label. losses:
    −log p(label) [n], 0 where it has none. logsumexps: of the logits of the full vocabulary [n, 1].
    """

    def __init__(
        self,
        tokens: slice,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scoring: Scoring,
    ) -> None:
        self.tokens = tokens
        self._hidden = hidden[tokens]
        self._weight = weight
        self._bias = bias
        self._scoring = scoring
        labels = labels[tokens]
        self.is_scored = labels != IGNORE_INDEX
        self._columns = (labels - scoring.vocab_shard.start).unsqueeze(1)
        # Whether this shard of the vocabulary holds the label; of an unscored token no shard does.
        self._is_local = (self._columns >= 0) & (self._columns < len(weight))
        self._local_labels = self._columns.clamp(0, len(weight) - 1)
        label_logits = self._score(self._hidden @ weight.t())
        losses = (self._largest - label_logits + self._sums.log()).squeeze(1)
        self.losses = torch.where(self.is_scored, losses, 0.0)
        self.logsumexps = self._largest + self._sums.log()

    def _score(self, logits: Tensor) -> Tensor:
        """Set `_largest` and `_sums` [n, 1] of the full vocabulary; return the logits of the labels
        [n, 1].
        """
        scoring = self._scoring
        vocab_shard = self._scoring.vocab_shard
        logits = final_logits(logits, self._bias, scoring.softcap, scoring.temperature)
        self._slopes = (
            None
            if scoring.softcap is None
            else softcap_slopes(logits, scoring.softcap, scoring.temperature)
        )
        label_logits = logits.gather(1, self._local_labels) * self._is_local
        self._largest = vocab_shard.all_reduce_max(logits.amax(-1, keepdim=True))
        # Computed once, for the losses and for their gradients: on a CPU it costs more than any
        # other pass over the logits.
        self._exponentials = logits.sub_(self._largest).exp_()
        self._sums, label_logits = vocab_shard.all_reduce_sum(
            self._exponentials.sum(-1, keepdim=True), label_logits
        )
        return label_logits

    def _logit_gradient(self, softmax_scales: Tensor, label_scales: Tensor) -> Tensor:
        """softmax_scales · softmax − label_scales · one-hot [n, vocab], in the dtype of the hidden
        states. Called once.
        """
        gradient = self._final_logit_gradient(softmax_scales, label_scales)
        if self._slopes is not None:
            gradient.mul_(self._slopes)
        return gradient.to(self._hidden.dtype)

    def _final_logit_gradient(self, softmax_scales: Tensor, label_scales: Tensor) -> Tensor:
        """The same of what `final_logits` returned, in fp32."""
        gradient = self._exponentials.mul_(softmax_scales / self._sums)
        return gradient.scatter_add_(1, self._local_labels, -(self._is_local * label_scales))

    def _negative_entropies(self) -> Tensor:
        return torch.xlogy(self._exponentials, self._exponentials).sum(-1, keepdim=True)

    def entropies(self) -> Tensor:
        """The entropy of p at every token [n], in nats, 0 where it is not scored.

        Before `add_gradients`.
        """
        (weighted,) = self._scoring.vocab_shard.all_reduce_sum(self._negative_entropies())
        return torch.where(
            self.is_scored, (self._sums.log() - weighted / self._sums).squeeze(1), 0.0
        )

    def z_losses(self, weight: float) -> Tensor:
        """`weight` · logsumexp² [n], 0 where a token is not scored (PaLM, arXiv 2204.02311)."""
        return torch.where(self.is_scored, weight * self.logsumexps.square().squeeze(1), 0.0)

    def add_gradients(
        self, upstream: Tensor | float, gradients: HeadGradients, z_loss: float = 0.0
    ) -> None:
        """Add the gradients of `losses` and of `z_losses(z_loss)`.

        Overwrites what is kept of the logits.

        `upstream` is the gradient of each loss [n], ignored where there is no label.
        """
        scales = torch.where(self.is_scored, upstream, 0.0).unsqueeze(1).to(self._sums.dtype)
        softmax_scales = scales if z_loss == 0 else scales * (1 + 2 * z_loss * self.logsumexps)
        gradients.add_chunk(
            self.tokens, self._logit_gradient(softmax_scales, scales), self._hidden, self._weight
        )


def _chunk_class(scoring: Scoring) -> type[HeadChunk]:
    """What scores a chunk: torch's operators, or what a file of compiled passes has for this
    head.
    """
    if scoring.passes == "operators":
        return HeadChunk
    chosen: type[HeadChunk] = import_module(
        f"lmforge.core.losses.{scoring.passes}_passes"
    ).chunk_class(scoring)
    return chosen


def head_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scoring: Scoring
) -> Iterator[HeadChunk]:
    """Score `hidden` [tokens, width] by `weight` [vocab of this shard, width] and `bias`, a chunk
    of tokens at a time.

    `labels` [tokens] are ids of the full vocabulary, IGNORE_INDEX where there is none.
    """
    weight = weight.to(hidden.dtype)
    chunk_class = _chunk_class(scoring)
    size = loss_chunk_tokens(
        len(weight), hidden.element_size(), on_gpu=hidden.is_cuda, fused=scoring.passes == "fused"
    )
    if chunk_class is not HeadChunk:  # chunks of equal size, since another size may be recompiled
        size = -(-len(hidden) // max(1, -(-len(hidden) // size)))
    # One chunk at least, which fills the gradients.
    for start in range(0, max(1, len(hidden)), max(1, size)):
        yield chunk_class(slice(start, start + size), hidden, weight, bias, labels, scoring)
