"""torch's variable-length flash attention on a CPU, where it has no kernel: its definition,
document by document.

It takes the place of the kernels alone: arguments, autograd, compilation and checkpointing are
torch's own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _documents(
    q: Tensor, k: Tensor, starts: Tensor, window: list[int]
) -> Iterator[tuple[slice, Tensor]]:
    """(tokens, probabilities [heads, tokens, tokens]) of each document."""
    copies = q.shape[1] // k.shape[1]
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        slots, part = torch.arange(end - first), slice(first, end)
        back = slots[:, None] - slots
        seen = (back >= -window[1]) & (back <= (window[0] if window[0] >= 0 else end))
        scores = (
            q[part].transpose(0, 1)
            @ k[part].repeat_interleave(copies, 1).permute(1, 2, 0)
            / q.shape[2] ** 0.5
        )
        yield part, scores.masked_fill(~seen, -torch.inf).softmax(-1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    is_causal: bool,
    scale: None,
    window: list[int],
    *rest: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert starts.dtype == torch.int32
    assert starts.diff().max() <= longest
    out, copies = torch.full_like(q, torch.nan), q.shape[1] // k.shape[1]
    for part, probs in _documents(q, k, starts, window):
        out[part] = (probs @ v[part].repeat_interleave(copies, 1).transpose(0, 1)).transpose(0, 1)
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: None,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    copies, scale_factor = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    grads = tuple(torch.full_like(each, torch.nan) for each in (q, k, v))
    for part, probs in _documents(q, k, starts, window):
        by_head = [
            each[part].transpose(0, 1)
            for each in (grad, q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1))
        ]
        grad_out, queries, keys, values = by_head
        grad_probs = grad_out @ values.transpose(1, 2)
        grad_scores = (
            probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True)) * scale_factor
        )
        grads[0][part] = (grad_scores @ keys).transpose(0, 1)
        for target, of_heads in (
            (grads[1], grad_scores.transpose(1, 2) @ queries),
            (grads[2], probs.transpose(1, 2) @ grad_out),
        ):
            target[part] = of_heads.unflatten(0, (-1, copies)).sum(1).transpose(0, 1)
    return grads


def install() -> None:
    """Register the kernels, for this process."""
    for operator, kernel in (
        (varlen._varlen_attn, forward),
        (varlen._varlen_attn_backward, backward),
    ):
        operator.register_kernel("cpu")(kernel)  # type: ignore[attr-defined]
