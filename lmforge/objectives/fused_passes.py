"""Passes over the logits of a chunk that are compiled into one kernel each, by Triton on a GPU.

Logits stay in the dtype of the head's product, bf16 in mixed precision, and are read twice and written once: by the
statistics, with an online logsumexp in fp32, and by the gradient, which takes their place. language.py calls these
functions on shards of the vocabulary too, and combines what they return.

On a CPU exponentials cost more than anything else that is done to logits, and memory less: `store_exponentials` keeps them
for `write_stored_gradient`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmforge.model.layers import cap_logits


def final_logits(logits: Tensor, bias: Tensor | None, softcap: float | None, temperature: float) -> Tensor:
    """What the softmax is taken of, in fp32 (fp64 if `logits` are), from the head's product [n, vocab] and `bias` [vocab]."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values = cap_logits(values if bias is None else values + bias, softcap)
    return values if temperature == 1 else values / temperature


def softcap_slopes(values: Tensor, softcap: float, temperature: float) -> Tensor:
    """The derivative of soft-capping, from what `final_logits` returned."""
    return 1 - (values * (temperature / softcap)).square()


def logit_statistics(
    logits: Tensor, bias: Tensor | None, local_labels: Tensor, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest final logit of each token, the sum of exp(logit − largest), and that of its label: [n, 1] each.

    `local_labels` int64 [n, 1] are columns of `logits`.
    """
    values = final_logits(logits, bias, softcap, temperature)
    largest = values.amax(-1, keepdim=True)
    sums = (values - largest).exp().sum(-1, keepdim=True)
    label_bias = None if bias is None else bias[local_labels]
    return largest, sums, final_logits(logits.gather(1, local_labels), label_bias, softcap, temperature)


def negative_entropies(
    logits: Tensor, bias: Tensor | None, largest: Tensor, softcap: float | None, temperature: float
) -> Tensor:
    """The sum of e · log e over the vocabulary [n, 1], where e = exp(final logit − largest)."""
    shifted = final_logits(logits, bias, softcap, temperature) - largest
    return (shifted.exp() * shifted).sum(-1, keepdim=True)


def write_logit_gradient(
    logits: Tensor,
    bias: Tensor | None,
    local_labels: Tensor,
    logsumexps: Tensor,
    softmax_scales: Tensor,
    label_scales: Tensor,
    softcap: float | None,
    temperature: float,
) -> None:
    """softmax_scales · softmax − label_scales · one-hot, back through soft-capping, in place of `logits`.

    `local_labels`, `logsumexps` and the scales are [n, 1]; a label below 0 or above the columns is in another shard.
    """
    values = final_logits(logits, bias, softcap, temperature)
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = (values - logsumexps).exp() * softmax_scales - torch.where(columns == local_labels, label_scales, 0.0)
    if softcap is not None:
        gradient = gradient * softcap_slopes(values, softcap, temperature)
    logits.copy_(gradient)


def store_exponentials(
    logits: Tensor, bias: Tensor | None, local_labels: Tensor, temperature: float, exponentials: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `logit_statistics` returns; exp(logit − largest) goes to `exponentials` [n, vocab], which may be `logits`."""
    values = final_logits(logits, bias, None, temperature)
    largest = values.amax(-1, keepdim=True)
    shifted = (values - largest).exp()
    sums, label_logits = shifted.sum(-1, keepdim=True), values.gather(1, local_labels)
    exponentials.copy_(shifted)
    return largest, sums, label_logits


def write_stored_gradient(
    exponentials: Tensor, local_labels: Tensor, softmax_scales: Tensor, label_scales: Tensor, gradient: Tensor
) -> None:
    """softmax_scales · exponentials − label_scales · one-hot, to `gradient` [n, vocab], which may be `exponentials`.

    `local_labels` and the scales are [n, 1]; a label below 0 is none.
    """
    columns = torch.arange(exponentials.shape[1], device=exponentials.device)
    gradient.copy_(exponentials * softmax_scales - torch.where(columns == local_labels, label_scales, 0.0))


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of these functions, compiled when it is first called. A second number of tokens makes that dimension dynamic."""
    return torch.compile(function)
