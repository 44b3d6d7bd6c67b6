"""Attention masks: documents, padding, windows, and the agreement of backends."""

import math
import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmforge.core.model.attention import AttentionMask, attend, create_attention_mask
from lmforge.core.model.config import ModelConfig
from tests.core.model.conftest import (
    MODEL_TYPES,
    Rows,
    built,
    drawn_config,
    logits,
    one_document,
    packed,
)
from tests.support.grids import parametrize


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The definition, slot by slot, in float64."""
    rows, heads, length, width = q.shape
    out = torch.zeros_like(q)
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // k.shape[1])
            for query in range(length):
                first = 0 if window is None else max(0, query - window + 1)
                seen = [
                    key
                    for key in range(first, query + 1)
                    if documents[row, key] == documents[row, query]
                ]
                scores = (k[row, group, seen] @ q[row, head, query]) / width**0.5
                out[row, head, query] = scores.softmax(0) @ v[row, group, seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
def test_attention_is_its_definition(window: int | None, draw: random.Random) -> None:
    documents = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, -1, -1], [0] * 12, [-1] * 12], dtype=torch.int32
    )
    q = torch.randn(3, 6, 12, 10, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 12, 10, dtype=torch.float64)
    result = attend(q, k, v, create_attention_mask(documents, window))
    torch.testing.assert_close(
        result, plain_attention(q, k, v, documents, window), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("length", [300, 2100])
def test_attention_in_chunks_equals_attention_at_once(length: int, draw: random.Random) -> None:
    documents = (torch.arange(length) > draw.randrange(length)).int()[None]
    q, k, v = (torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    mask = create_attention_mask(documents, draw.choice([None, 40]))
    whole = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.dense_mask, enable_gqa=True
    )
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (q, k, v), upstream)
    pieces = attend(q, k, v, mask)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)
    for result, whole_gradient in zip(
        torch.autograd.grad(pieces, (q, k, v), upstream), expected, strict=True
    ):
        torch.testing.assert_close(result, whole_gradient, atol=1e-4, rtol=1e-4)


@parametrize("length", [70, 600], fast=(0,))
def test_compiled_attention_in_bf16_on_a_cpu_is_that_in_fp32_and_stores_its_weights(
    length: int, draw: random.Random
) -> None:
    documents = (torch.arange(length) > draw.randrange(length)).int()[None].repeat(2, 1)
    mask = create_attention_mask(documents, draw.choice([None, 40]))
    q, k, v = (torch.randn(2, heads, length, 16).bfloat16().requires_grad_() for heads in (4, 2, 2))
    wide = [each.detach().float().requires_grad_() for each in (q, k, v)]
    expected = attend(*wide, mask)
    upstream = torch.randn_like(expected)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = torch.compile(attend, backend="aot_eager_decomp_partition", dynamic=False)(
            q, k, v, mask
        )
    chunks = [(0, 256), (256, 512), (512, 600)] if length == 600 else [(0, length)]
    weights = sorted((2, 2, 2 * (stop - start), stop) for start, stop in chunks)
    of_scores = [
        each
        for each in saved.values()
        if each.dtype != torch.bool and each.numel() >= min(map(math.prod, weights))
    ]
    assert (
        sorted(
            tuple(each.unflatten(0, (2, 2)).shape) if each.ndim == 3 else tuple(each.shape)
            for each in of_scores
        )
        == weights
    )
    assert all(each.dtype == torch.bfloat16 for each in of_scores)
    # Two roundings to bf16 (2**-9) of scores up to 4 in size, and one each of the weights and the
    # result.
    torch.testing.assert_close(result.float(), expected, atol=0.03, rtol=0.02)
    gradients = (
        torch.autograd.grad(result, (q, k, v), upstream.bfloat16()),
        torch.autograd.grad(expected, wide, upstream),
    )
    for narrow, exact in zip(*gradients, strict=True):
        assert (narrow.float() - exact).norm() <= 0.01 * exact.norm()


def assert_unchanged(before: torch.Tensor, after: torch.Tensor, config: ModelConfig) -> None:
    """Equal bits.

    An expert multiplies its rows together, and their number decides the order in which products are
    summed.
    """
    tolerance = 1e-11 if config.num_experts else 0
    torch.testing.assert_close(before, after, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_document_does_not_see_the_others_in_its_row(
    model_type: str, draw: random.Random
) -> None:
    config = drawn_config(model_type, draw)
    model = built(config).double() if config.num_experts else built(config)
    rows = packed([[13, 21, 9], [20, 3, 20]], config.vocab_size, padding=4)
    before = logits(model, rows)
    first, second = draw.choice([(0, 1), (1, 2), (2, 0)])
    changed = rows.tokens.clone()
    changed[rows.documents == first] = torch.randint(
        0, config.vocab_size, ((rows.documents == first).sum(),)
    )
    after = logits(model, Rows(changed, rows.positions, rows.documents))
    assert_unchanged(before[rows.documents == second], after[rows.documents == second], config)
    assert not torch.equal(before[rows.documents == first], after[rows.documents == first])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_document_reads_the_same_packed_as_alone(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    # In fp32 some drawn models amplify the rounding of other sums to more than 1e-5.
    model = built(config).double()
    rows = packed([[13, 21, 9]], config.vocab_size, padding=3)
    alone = one_document(1, 21, config.vocab_size)
    alone.tokens[:] = rows.tokens[:, 13:34]
    torch.testing.assert_close(
        logits(model, rows)[:, 13:34], logits(model, alone), atol=1e-11, rtol=1e-11
    )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padding_gives_finite_values_and_gradients(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    model = built(config)
    rows = packed([[11, 12], [8, 15]], config.vocab_size, padding=6)
    rows.documents[1] = -1
    hidden = model(rows.tokens, rows.positions, rows.documents)
    assert hidden.isfinite().all()
    hidden[0, :11].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_token_does_not_see_those_after_it(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    model = built(config).double() if config.num_experts else built(config)
    rows = one_document(1, 30, config.vocab_size)
    before = logits(model, rows)
    rows.tokens[:, 17:] = (rows.tokens[:, 17:] + 1) % config.vocab_size
    assert_unchanged(before[:, :17], logits(model, rows)[:, :17], config)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7])
def test_the_block_mask_allows_what_the_dense_mask_allows(
    window: int | None, draw: random.Random
) -> None:
    from lmforge.core.model.attention import document_mask_mod

    documents = torch.tensor([[0] * 70 + [1] * 50 + [-1] * 20, [-1] * 140], dtype=torch.int32)
    q, k, v = torch.randn(2, 4, 140, 16), torch.randn(2, 2, 140, 16), torch.randn(2, 2, 140, 16)
    blocks = create_block_mask(
        document_mask_mod(documents, documents, torch.arange(140), window),
        2,
        None,
        140,
        140,
        device="cpu",
    )
    result = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(
        result, attend(q, k, v, create_attention_mask(documents, window)), atol=1e-5, rtol=1e-5
    )


class _LargestResult(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.numel = max(
            self.numel,
            *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)),
            0,
        )
        return result


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_decoding_step_with_grouped_heads_copies_no_keys(device: str) -> None:
    heads, groups, slots, width = 8, 2, 100, 16
    with FakeTensorMode(), _LargestResult() as results:
        q = torch.empty(3, heads, 1, width, device=device, dtype=torch.bfloat16)
        k, v = torch.empty(2, 3, groups, slots, width, device=device, dtype=torch.bfloat16)
        results.numel = 0
        attend(q, k, v, AttentionMask(torch.ones(3, 1, 1, slots, device=device, dtype=torch.bool)))
    assert results.numel < heads * k.numel() / groups


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_gpu_gives_the_logits_and_gradients_of_the_cpu(
    model_type: str, compiled: bool, draw: random.Random
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    if model_type in ("gpt2", "deepseek_v3"):
        heads = {"num_attention_heads": 3}
    elif model_type == "olmoe":  # its head_dim follows from the others
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = drawn_config(model_type, draw, hidden_size=96, max_position_embeddings=300, **heads)
    model = built(config)
    rows = packed([[70, 60], [10, 120]], config.vocab_size, padding=17, model=model)
    model(rows.tokens, rows.positions, rows.documents).square().mean().backward()
    expected = logits(model, rows)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.cuda()
    if compiled:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()
    there = Rows(rows.tokens.cuda(), rows.positions.cuda(), rows.documents.cuda())
    model(there.tokens, there.positions, there.documents).square().mean().backward()
    # fp32 products on a GPU, in kernels that sum in another order.
    torch.testing.assert_close(logits(model, there).cpu(), expected, atol=1e-3, rtol=1e-3)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad.cpu(), gradient, atol=1e-3, rtol=1e-2)  # type: ignore[union-attr]
