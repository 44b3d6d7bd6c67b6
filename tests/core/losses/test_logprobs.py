"""Log-probabilities of tokens in chunks against `log_softmax` of the full logits, and their sums
over documents.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmforge.core.data.labels import CHUNK_TOKENS, IGNORE_INDEX
from lmforge.core.losses.language import cross_entropy_and_z_loss
from lmforge.core.losses.logprobs import (
    broadcast_to_tokens,
    document_label_counts,
    document_sums,
    token_logprobs,
    token_logprobs_and_entropy,
)
from tests.core.losses.test_cross_entropy import TOLERANCE, assert_close, drawn
from tests.seeds import fresh_seed

TOKENS = [1, CHUNK_TOKENS, CHUNK_TOKENS + 1]


def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy that training adds up, without a z-loss."""
    return cross_entropy_and_z_loss(hidden, weight, labels, 0.0)[0]


def whole(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    every = (hidden @ weight.t() / temperature).log_softmax(-1)
    chosen = every.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    scored = labels != IGNORE_INDEX
    return torch.where(scored, chosen, 0.0), torch.where(
        scored, -(every.exp() * every).sum(-1), 0.0
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", TOKENS)
def test_values_and_gradients_are_those_of_full_logits(
    tokens: int, temperature: float, dtype: torch.dtype
) -> None:
    hidden, weight, labels = drawn(tokens, dtype)
    hidden, labels = hidden.view(1, tokens, -1).requires_grad_(), labels.view(1, tokens)
    weight.requires_grad_()
    ours, entropy = token_logprobs_and_entropy(hidden, weight, labels, temperature)
    reference, of_whole = whole(hidden, weight, labels, temperature)
    assert ours.shape == labels.shape
    assert ours.dtype == dtype
    assert not entropy.requires_grad
    assert_close(ours, reference, TOLERANCE[dtype])
    assert_close(entropy, of_whole, TOLERANCE[dtype])
    assert torch.equal(token_logprobs(hidden, weight, labels, temperature), ours)
    # Each token with a gradient of its own from above.
    upstream = torch.randn(labels.shape, dtype=dtype)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (hidden, weight), upstream),
        torch.autograd.grad(reference, (hidden, weight), upstream),
        strict=True,
    ):
        assert_close(mine, theirs, TOLERANCE[dtype])


class _Largest(TorchDispatchMode):
    """The largest number of elements of any tensor created under it."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max(
            [
                self.numbers,
                *(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor)),
            ]
        )
        return made


def test_full_logits_exist_in_neither_pass() -> None:
    tokens, vocab = 3 * CHUNK_TOKENS, 50
    hidden = torch.randn(1, tokens, 8).requires_grad_()
    weight, labels = torch.randn(vocab, 8).requires_grad_(), torch.randint(0, vocab, (1, tokens))
    with _Largest() as largest:
        values, _ = token_logprobs_and_entropy(hidden, weight, labels)
        values.sum().backward()
    assert largest.numbers == CHUNK_TOKENS * vocab
    assert hidden.grad is not None


@pytest.mark.parametrize("of", [token_logprobs, summed])
def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_get_the_same(
    of: Callable[..., Tensor],
) -> None:
    hidden, weight, labels = drawn(20, torch.float64)
    results = []
    for frozen in (False, True):
        below, head = (
            hidden.clone()[None].requires_grad_(),
            weight.clone().requires_grad_(not frozen),
        )
        of(below, head, labels[None]).sum().backward()
        assert (head.grad is None) == frozen
        results.append(below.grad)
    assert torch.equal(*results)


def test_gradients_pass_gradcheck_with_masked_targets() -> None:
    hidden, weight, labels = drawn(12, torch.float64)
    hidden, labels = hidden.view(3, 4, -1).requires_grad_(), labels.view(3, 4)
    labels[0, 0] = IGNORE_INDEX
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, labels, 1.3), (hidden, weight.requires_grad_())
    )


def test_without_labels_values_and_gradients_are_zero() -> None:
    hidden, weight, _ = drawn(30, torch.float32)
    hidden, weight = hidden.view(2, 15, -1).requires_grad_(), weight.requires_grad_()
    values, entropy = token_logprobs_and_entropy(hidden, weight, torch.full((2, 15), IGNORE_INDEX))
    assert torch.equal(values, torch.zeros(2, 15))
    assert torch.equal(entropy, torch.zeros(2, 15))
    for gradient in torch.autograd.grad(values.exp().sum(), (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_under_autocast_values_are_fp32_of_bf16_logits_and_a_long_sum_of_them_is_fp32_too() -> None:
    """1,024 log-probabilities near −5 summed in bf16 would be off by whole nats."""
    hidden, weight, labels = drawn(1024, torch.float32, masked=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        values = token_logprobs(hidden[None], weight, labels[None])
        total = document_sums(values, torch.zeros(1, 1024, dtype=torch.int32))[0, 0]
    assert values.dtype == total.dtype == torch.float32
    reference, _ = whole(
        (hidden.bfloat16() @ weight.bfloat16().t()).double(),
        torch.eye(len(weight)).double(),
        labels,
        1.0,
    )
    # 1,024 additions in fp32, one after another: bf16 would be off by a hundredth.
    torch.testing.assert_close(total.double(), reference.sum(), rtol=1e-5, atol=0)


def test_document_sums_are_those_of_a_loop_and_broadcast_back_to_their_tokens() -> None:
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (3, 5), generator=generator)
    documents = torch.full((3, 30), -1, dtype=torch.int32)
    for row, sizes in enumerate(lengths.tolist()):
        numbers = torch.arange(5).repeat_interleave(torch.tensor(sizes))
        documents[row, : len(numbers)] = numbers
    values = torch.randn(3, 30, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 9, (3, 30), generator=generator)
    labels[torch.rand(3, 30, generator=generator) < 0.5] = IGNORE_INDEX
    sums, tokens = document_sums(values, documents), document_label_counts(labels, documents)
    for row in range(3):
        for number in range(30):
            here = documents[row] == number
            torch.testing.assert_close(
                sums[row, number], values[row][here].sum(), rtol=1e-12, atol=1e-12
            )
            assert tokens[row, number] == (labels[row][here] != IGNORE_INDEX).sum()
            assert (broadcast_to_tokens(sums, documents)[row][here] == sums[row, number]).all()
    assert (broadcast_to_tokens(sums, documents)[documents < 0] == 0).all()
    (back,) = torch.autograd.grad(sums[:, :5].sum(), values)
    assert torch.equal(back, (documents >= 0).double())
