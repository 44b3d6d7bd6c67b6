"""Biases, capped logits and the z-loss against full logits in fp64, with torch's operators and with
the compiled passes.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from lmforge.core.data import labels as chunk_sizes
from lmforge.core.data.labels import CHUNK_TOKENS, IGNORE_INDEX
from lmforge.core.losses.fused_passes import logit_statistics, write_logit_gradient
from lmforge.core.losses.language import HeadChunk, cross_entropy_and_z_loss
from lmforge.core.losses.logprobs import token_logprobs_and_entropy
from lmforge.core.losses.stored_passes import store_exponentials, write_stored_gradient
from lmforge.core.model.attention import compiled
from lmforge.core.model.layers import HeadOptions, Passes
from tests.core.losses.oracle import whole_logits
from tests.core.losses.test_cross_entropy import TOLERANCE, assert_close, drawn
from tests.seeds import fresh_seed

# What a head may do beside its product: (whether it has a bias, the cap of its logits, the weight
# of the z-loss).
HEADS = [
    (False, None, 0.0),
    (True, None, 0.0),
    (False, 1.5, 0.0),
    (False, None, 0.1),
    (True, 2.0, 0.05),
]
PATHS: list[Passes] = ["operators", "fused", "stored"]
COMPILED_PATHS = PATHS[1:]
# Of fused passes in fp32 to torch's operators, relative to the sums of absolute values: the same
# sums in another order.
FUSED_TOLERANCE = 1e-6


@pytest.fixture
def passes_as_written() -> Iterator[None]:
    """The passes run as they are written, without a compiler: what they compute, for many
    shapes.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens of a chunk fit."""
    monkeypatch.setattr(chunk_sizes, "FUSED_LOGITS_BYTES", 5000)
    monkeypatch.setattr(chunk_sizes, "CACHED_LOGITS_BYTES", 5000)
    monkeypatch.setattr(chunk_sizes, "MIN_CACHED_TOKENS", 1)


def inputs(tokens: int, dtype: torch.dtype, has_bias: bool) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and, if asked for, bias, each with gradients; and labels."""
    hidden, weight, labels = drawn(tokens, dtype)
    tensors = [hidden, weight]
    if has_bias:
        tensors.append(
            torch.randn(
                len(weight), dtype=dtype, generator=torch.Generator().manual_seed(fresh_seed())
            )
        )
    return [tensor.requires_grad_() for tensor in tensors], labels


def head_options(tensors: list[Tensor], softcap: float | None, path: Passes) -> HeadOptions:
    return HeadOptions(tensors[2] if len(tensors) > 2 else None, softcap, path)


def ours(
    tensors: list[Tensor], labels: Tensor, softcap: float | None, z_weight: float, path: Passes
) -> list[Tensor]:
    """Total, z-loss and gradients of a third of the total."""
    head = head_options(tensors, softcap, path)
    total, z_loss, _ = cross_entropy_and_z_loss(*tensors[:2], labels, z_weight, head)
    assert not z_loss.requires_grad
    return [total, z_loss, *torch.autograd.grad(total / 3, tensors)]


def theirs(
    tensors: list[Tensor], labels: Tensor, softcap: float | None, z_weight: float
) -> list[Tensor]:
    bias = tensors[2] if len(tensors) > 2 else None
    every = whole_logits(*tensors[:2], labels, bias, softcap, z_weight)
    total = every.cross_entropy + every.z_loss
    return [total, every.z_loss, *torch.autograd.grad(total / 3, tensors)]


def absolute_sums(
    tensors: list[Tensor], labels: Tensor, softcap: float | None, z_weight: float
) -> list[Tensor]:
    """As `theirs`, with gradients summed in absolute value: rounding follows the size of what is
    summed, not what cancels.
    """
    hidden, weight, *bias = (tensor.detach().double() for tensor in tensors)
    logits = torch.nn.functional.linear(hidden, weight, *bias).requires_grad_()
    every = whole_logits(logits, torch.eye(len(weight)), labels, None, softcap, z_weight)
    total = every.cross_entropy + every.z_loss
    gradient = torch.autograd.grad(total / 3, logits)[0].abs()
    return [
        total,
        every.z_loss,
        gradient @ weight.abs(),
        gradient.t() @ hidden.abs(),
        gradient.sum(0),
    ][: 2 + len(tensors)]


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("has_bias", "softcap", "z_weight"), HEADS)
def test_losses_and_gradients_are_those_of_full_logits(
    has_bias: bool, softcap: float | None, z_weight: float, path: Passes, dtype: torch.dtype
) -> None:
    for tokens in (1, 37, 200):
        tensors, labels = inputs(tokens, dtype, has_bias)
        expected = theirs(tensors, labels, softcap, z_weight)
        for mine, reference in zip(
            ours(tensors, labels, softcap, z_weight, path), expected, strict=True
        ):
            assert mine.dtype == dtype
            assert_close(mine.detach(), reference.detach(), TOLERANCE[dtype])


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("path", COMPILED_PATHS)
@pytest.mark.parametrize(("has_bias", "softcap", "z_weight"), HEADS)
def test_compiled_passes_are_torchs_operators_to_1e_6(
    has_bias: bool, softcap: float | None, z_weight: float, path: Passes
) -> None:
    tensors, labels = inputs(300, torch.float32, has_bias)
    results = (
        ours(tensors, labels, softcap, z_weight, path),
        ours(tensors, labels, softcap, z_weight, "operators"),
    )
    for mine, reference, size in zip(
        *results, absolute_sums(tensors, labels, softcap, z_weight), strict=True
    ):
        assert (mine - reference).norm() <= FUSED_TOLERANCE * size.norm()


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("path", COMPILED_PATHS)
@pytest.mark.parametrize(("has_bias", "softcap", "z_weight"), HEADS)
def test_in_bf16_both_read_the_same_logits_and_round_the_gradient_once(
    has_bias: bool,
    softcap: float | None,
    z_weight: float,
    path: Passes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss to 1e-6: fp32 sums over the same bf16 logits.

    Gradients to 2⁻⁸: single entries are rounded to the other side.
    """
    tensors, labels = inputs(300, torch.float32, has_bias)
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    fused, plain = (ours(tensors, labels, softcap, z_weight, each) for each in (path, PATHS[0]))
    for mine, reference in zip(fused[:2], plain[:2], strict=True):
        assert mine.dtype == torch.float32
        assert (mine - reference).abs() <= 1e-6 * reference.abs()
    for mine, unrounded in zip(
        fused[2:], theirs(tensors, labels, softcap, z_weight)[2:], strict=True
    ):
        # Logits and their gradient are rounded to 8 bits.
        assert (mine.double() - unrounded.double()).norm() <= 2e-2 * unrounded.double().norm()
    # A CPU rounds the weight's gradient of each chunk, and the paths have chunks of different
    # sizes: here both have one.
    for limit in ("FUSED_LOGITS_BYTES", "CACHED_LOGITS_BYTES"):
        monkeypatch.setattr(chunk_sizes, limit, 2**20)
    fused, plain = (ours(tensors, labels, softcap, z_weight, each) for each in (path, PATHS[0]))
    for mine, reference in zip(fused[2:], plain[2:], strict=True):
        assert (mine - reference).float().norm() <= 2**-8 * reference.float().norm()


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("has_bias", "softcap", "temperature"), [(False, None, 0.7), (True, 2.0, 1.0), (True, 1.5, 0.7)]
)
def test_log_probabilities_and_entropies_are_those_of_full_logits(
    has_bias: bool, softcap: float | None, temperature: float, path: Passes, dtype: torch.dtype
) -> None:
    tensors, labels = inputs(100, dtype, has_bias)
    head = head_options(tensors, softcap, path)
    logprobs, entropies = token_logprobs_and_entropy(
        tensors[0][None], tensors[1], labels[None], temperature, head=head
    )
    every = whole_logits(*tensors[:2], labels, head.bias, softcap, temperature=temperature)
    assert_close(logprobs[0].detach(), every.logprobs.detach(), TOLERANCE[dtype])
    assert_close(entropies[0], every.entropies.detach(), TOLERANCE[dtype])
    upstream = torch.randn(100, dtype=dtype)  # each token with a gradient of its own from above
    expected = torch.autograd.grad(every.logprobs, tensors, upstream.double())
    for mine, reference in zip(
        torch.autograd.grad(logprobs[0], tensors, upstream), expected, strict=True
    ):
        assert_close(mine, reference, TOLERANCE[dtype])


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("path", PATHS)
def test_without_labels_z_loss_and_all_gradients_are_zero(path: Passes) -> None:
    tensors, _ = inputs(40, torch.float32, has_bias=True)
    for value in ours(tensors, torch.full((40,), IGNORE_INDEX), 2.0, 0.1, path):
        assert torch.equal(value, torch.zeros_like(value))


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("path", COMPILED_PATHS)
def test_large_logits_stay_finite_in_compiled_passes(path: Passes) -> None:
    tensors, labels = inputs(20, torch.float32, has_bias=False)
    tensors[0] = (tensors[0].detach() * 1e4).requires_grad_()
    assert all(value.isfinite().all() for value in ours(tensors, labels, None, 0.0, path))


@pytest.mark.usefixtures("passes_as_written")
@pytest.mark.parametrize("path", PATHS)
def test_the_logits_of_a_chunk_are_freed_before_the_next_chunk(
    path: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[HeadChunk] = weakref.WeakSet()
    begin, begun = HeadChunk.__init__, 0

    def begin_alone(chunk: HeadChunk, *arguments: Any) -> None:
        nonlocal begun
        assert not alive
        alive.add(chunk)
        begun += 1
        begin(chunk, *arguments)

    monkeypatch.setattr(HeadChunk, "__init__", begin_alone)
    hidden, weight = (
        torch.randn(1, 2 * CHUNK_TOKENS, 4).requires_grad_(),
        torch.randn(9, 4).requires_grad_(),
    )
    labels, head = torch.zeros(1, 2 * CHUNK_TOKENS, dtype=torch.int64), HeadOptions(passes=path)
    cross_entropy_and_z_loss(hidden, weight, labels, 0.0, head)[0].backward()
    token_logprobs_and_entropy(hidden, weight, labels, head=head)[0].sum().backward()
    assert begun >= 6


@pytest.mark.parametrize("path", COMPILED_PATHS)
def test_a_second_number_of_tokens_compiles_each_pass_once_more_and_a_third_none(
    path: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced, no code is generated.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    weight, graphs = torch.randn(50, 8).requires_grad_(), []
    try:
        for tokens in (12, 12, 17, 9, 21):
            labels = torch.randint(0, 50, (tokens,))
            cross_entropy_and_z_loss(
                torch.randn(tokens, 8), weight, labels, 0.0, HeadOptions(passes=path)
            )[0].backward()
            graphs.append(counters["stats"]["unique_graphs"])
    finally:
        compiled.cache_clear()
    assert graphs == [2, 2, 4, 4, 4]
    assert not counters["graph_break"]


def launched(function: Callable[..., Any], logits: Tensor, *arguments: Any) -> tuple[Any, int]:
    """What the compiled function returns, and the kernels that it launches; none may need another
    array of logits.
    """
    torch._dynamo.reset()
    result, (code,) = run_and_get_code(torch.compile(function), logits, *arguments)
    lines = [line.strip() for line in code[code.index("def call(") :].splitlines()]
    assert not [
        line
        for line in lines
        if f"empty_strided_cpu(({logits.shape[0]}, {logits.shape[1]})" in line
    ]
    return result, sum(line.startswith("cpp_fused") for line in lines)


@pytest.mark.slow
def test_each_pass_is_one_kernel_without_another_array_of_logits_and_the_gradient_takes_their_place() -> (
    None
):
    tokens, vocab = 24, 176
    logits, columns = torch.randn(tokens, vocab).bfloat16(), torch.randint(0, vocab, (tokens, 1))
    scales = torch.rand(tokens, 1)
    (largest, sums, label_logits), kernels = launched(
        logit_statistics, logits, None, columns, None, 1.0
    )
    assert kernels == 1
    logsumexps = largest + sums.log()
    expected = torch.nn.functional.cross_entropy(logits.float(), columns[:, 0], reduction="none")
    torch.testing.assert_close((logsumexps - label_logits)[:, 0], expected, rtol=1e-6, atol=1e-6)
    arguments = (None, columns, logsumexps, scales, 2 * scales, 3.0, 0.7)
    uncompiled, place = logits.clone(), logits.data_ptr()
    write_logit_gradient(uncompiled, *arguments)
    _, kernels = launched(write_logit_gradient, logits, *arguments)
    assert kernels == 1
    assert logits.data_ptr() == place
    # One rounding to bf16, to the other side.
    torch.testing.assert_close(logits, uncompiled, rtol=2**-7, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_pass_with_stored_exponentials_is_one_kernel_and_in_fp32_all_are_in_the_place_of_the_logits(
    dtype: torch.dtype,
) -> None:
    tokens, vocab = 24, 176
    logits, columns = torch.randn(tokens, vocab).to(dtype), torch.randint(0, vocab, (tokens, 1))
    before, scales = logits.float().clone().requires_grad_(), torch.rand(tokens, 1)
    losses = torch.nn.functional.cross_entropy(before, columns[:, 0], reduction="none")
    (expected,) = torch.autograd.grad((losses * scales[:, 0]).sum(), before)
    exponentials = logits if dtype == torch.float32 else torch.empty(tokens, vocab)
    (largest, sums, label_logits), kernels = launched(
        store_exponentials, logits, None, columns, 1.0, exponentials
    )
    assert kernels == 1
    torch.testing.assert_close(
        (largest + sums.log() - label_logits)[:, 0], losses.detach(), rtol=1e-6, atol=1e-6
    )
    _, kernels = launched(
        write_stored_gradient, exponentials, columns, scales / sums, scales, logits
    )
    assert kernels == 1
    torch.testing.assert_close(
        logits.float(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6
    )
