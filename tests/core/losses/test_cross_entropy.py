"""Head and cross-entropy in chunks against `F.cross_entropy` of the full logits."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lmforge.core.data.labels import CHUNK_TOKENS, IGNORE_INDEX
from lmforge.core.losses.language import cross_entropy_and_z_loss, head_chunks
from lmforge.core.losses.logprobs import token_losses
from lmforge.core.losses.sharded_head import Scoring
from tests.seeds import fresh_seed
from tests.support.rounding import assert_rounding_apart, each_apart

# Sums over thousands of tokens in another order; relative to the largest entry of a gradient.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
TOKENS = [1, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 3]


def summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy that training adds up, without a z-loss."""
    return cross_entropy_and_z_loss(hidden, weight, labels, 0.0)[0]


def drawn(tokens: int, dtype: torch.dtype, masked: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels of a random shape; the fraction `masked` of the labels is
    ignored.
    """
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    width, vocab = (
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 40), (2, 90))
    )
    hidden = torch.randn(tokens, width, dtype=dtype, generator=generator)
    weight = torch.randn(vocab, width, dtype=dtype, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    return (
        hidden,
        weight,
        labels.masked_fill(torch.rand(tokens, generator=generator) < masked, IGNORE_INDEX),
    )


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def assert_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    scale = max(1.0, float(reference.abs().max()))
    torch.testing.assert_close(
        ours / scale, reference / scale, rtol=0, atol=tolerance, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", TOKENS)
def test_sum_and_gradients_are_those_of_full_logits(tokens: int, dtype: torch.dtype) -> None:
    hidden, weight, labels = drawn(tokens, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    ours = summed(hidden, weight, labels)
    reference = cross_entropy(
        hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    assert ours.shape == ()
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # The upstream gradient is what the trainer divides by: it scales, and nothing else.
    for mine, theirs in zip(
        gradients(ours / 7, hidden, weight), gradients(reference / 7, hidden, weight), strict=True
    ):
        assert_close(mine, theirs, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("vocab", "tokens"),
    [(2, CHUNK_TOKENS), (4096, 512), (8192, 256), (8193, CHUNK_TOKENS), (100_000, CHUNK_TOKENS)],
)
def test_logits_of_a_chunk_stay_in_the_cache_of_a_cpu_where_chunks_are_not_too_short(
    vocab: int, tokens: int
) -> None:
    hidden, labels = (
        torch.randn(2 * CHUNK_TOKENS, 1),
        torch.zeros(2 * CHUNK_TOKENS, dtype=torch.int64),
    )
    chunks = head_chunks(hidden, torch.randn(vocab, 1), None, labels, Scoring())
    assert next(iter(chunks)).tokens == slice(0, tokens)


def test_gradients_pass_gradcheck_with_several_sequences_and_ignored_labels() -> None:
    hidden, weight, labels = drawn(12, torch.float64)
    hidden, labels = hidden.view(3, 4, -1).requires_grad_(), labels.view(3, 4)
    labels[0, 0] = IGNORE_INDEX
    assert torch.autograd.gradcheck(
        lambda h, w: summed(h, w, labels), (hidden, weight.requires_grad_())
    )


@pytest.mark.parametrize("tokens", [1, CHUNK_TOKENS + 5])
def test_without_labels_loss_and_gradients_are_zero(tokens: int) -> None:
    hidden, weight, _ = drawn(tokens, torch.float32)
    nothing = torch.full((tokens,), IGNORE_INDEX)
    loss = summed(hidden.requires_grad_(), weight.requires_grad_(), nothing)
    assert loss.item() == 0.0
    for gradient in gradients(loss, hidden, weight):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert torch.equal(token_losses(hidden, weight, nothing), torch.zeros(tokens))


def test_losses_of_parts_of_a_batch_add_up() -> None:
    hidden, weight, labels = drawn(100, torch.float64)
    whole = summed(hidden, weight, labels)
    parts = [
        summed(hidden[rows], weight, labels[rows])
        for rows in (slice(0, 1), slice(1, 60), slice(60, 100))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        summed(hidden.repeat(2, 1), weight, labels.repeat(2)), 2 * whole, rtol=1e-12, atol=0
    )


def test_a_token_without_label_has_no_gradient_and_no_influence() -> None:
    hidden, weight, labels = drawn(50, torch.float64)
    labels[::2] = IGNORE_INDEX
    disturbed = hidden.clone()
    disturbed[::2] += 100
    hidden.requires_grad_()
    loss = summed(hidden, weight, labels)
    assert torch.equal(
        gradients(loss, hidden)[0][::2], torch.zeros(25, hidden.shape[1], dtype=torch.float64)
    )
    assert summed(disturbed, weight, labels).item() == loss.item()


def test_token_losses_add_up_to_the_sum() -> None:
    hidden, weight, labels = drawn(2 * CHUNK_TOKENS + 10, torch.float64)
    losses = token_losses(hidden.view(2, -1, hidden.shape[1]), weight, labels.view(2, -1))
    reference = cross_entropy(
        hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="none"
    )
    assert losses.shape == (2, CHUNK_TOKENS + 5)
    torch.testing.assert_close(losses.flatten(), reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses.sum(), summed(hidden, weight, labels), rtol=1e-12, atol=0)


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = drawn(20, torch.float32, masked=0.0)
    hidden = (hidden * 1e4).requires_grad_()
    loss = summed(hidden, weight, labels)
    assert loss.isfinite()
    assert gradients(loss, hidden)[0].isfinite().all()


def test_under_autocast_logits_are_bf16_and_the_sum_and_the_weight_gradient_are_fp32() -> None:
    hidden, weight, labels = drawn(64, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed(hidden, weight, labels)
    assert loss.dtype == torch.float32
    ours = gradients(loss, hidden, weight)
    assert [gradient.dtype for gradient in ours] == [torch.float32, torch.float32]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    logits = (rounded[0] @ rounded[1].t()).float()
    reference = cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    # The gradient of the logits is rounded to the 8 bits of bf16 on its way, once more than by
    # autograd.
    for mine, theirs in zip(ours, gradients(reference, *rounded), strict=True):
        assert (mine - theirs.float()).norm() < 2e-2 * theirs.float().norm() + 1e-6


def test_the_weight_gradient_of_a_bf16_model_adds_up_in_fp32() -> None:
    """After a chunk that adds 1,024 come forty that add a half each: to a bf16 sum they would add
    nothing.
    """
    hidden = torch.ones(41 * CHUNK_TOKENS, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.full((len(hidden),), IGNORE_INDEX)
    labels[:CHUNK_TOKENS] = 0
    labels[CHUNK_TOKENS::CHUNK_TOKENS] = 0
    loss = summed(hidden, weight, labels)
    numbers = {"loss": (CHUNK_TOKENS + 40) * math.log(2)}
    one_by_one = {"loss": float(np.cumsum(np.full(CHUNK_TOKENS + 40, math.log(2), np.float32))[-1])}
    assert_rounding_apart(
        each_apart({"loss": loss.item()}, numbers), each_apart(one_by_one, numbers)
    )
    total = (CHUNK_TOKENS + 40) / 2
    torch.testing.assert_close(
        gradients(loss, weight)[0].float(), torch.tensor([[-total], [total]]), rtol=2**-8, atol=0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
def test_on_a_gpu_sum_and_gradients_are_those_of_the_cpu(tokens: int) -> None:
    hidden, weight, labels = drawn(tokens, torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        inputs = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
        loss = summed(*inputs, labels.to(device))
        results.append([loss, *gradients(loss, *inputs)])
    for ours, reference in zip(*results, strict=True):
        assert_close(reference.cpu(), ours, 1e-12)
