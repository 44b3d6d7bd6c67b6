"""Linear attention by the gated delta rule and Kimi delta attention, against their recurrence token
by token in fp64, and cut into documents in every way.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from lmforge.core.model.attention import AttentionMask
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.modules import gated_delta
from lmforge.core.model.modules.gated_delta import CHUNK, gated_delta_rule

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 6
# For how many channels of a head each decay is, and how large beta may be.
RULES = {"gated": (1, 1.0), "reflecting": (1, 2.0), "by channel": (KEY_DIM, 1.0)}
# Against the recurrence in fp64, of the largest number of a tensor.
EXACT = 1e-5
# A document that is packed rounds in other chunks than alone: in fp64, where that is far below
# whatever leaks; and in fp32 before the norm, which divides small outputs by themselves.
PACKED = 1e-10
PACKED_FP32 = 1e-6


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, documents: Tensor
) -> Tensor:
    """S ← e^g S; S ← S + β k (v − Sᵀk)ᵀ; o = Sᵀq, with S = 0 at the first token of a document."""
    sequences, length, heads, key_dim = q.shape
    state = q.new_zeros(sequences, heads, key_dim, v.shape[-1])
    outputs = []
    for at in range(length):
        if at:
            state = state * (documents[:, at] == documents[:, at - 1])[:, None, None, None]
        state = state * decay[:, at].exp()[..., None]
        missing = v[:, at] - torch.einsum("shkv,shk->shv", state, k[:, at])
        state = state + torch.einsum("shk,shv,sh->shkv", k[:, at], missing, beta[:, at])
        outputs.append(torch.einsum("shkv,shk->shv", state, q[:, at]))
    return torch.stack(outputs, dim=1)


def drawn_inputs(length: int, forgetting: float, rule: str = "gated") -> list[Tensor]:
    """Queries, keys, values, decays and betas in fp64 of two sequences."""
    shape = (2, length, HEADS)
    channels, largest = RULES[rule]
    q, k = (normalize(torch.randn(*shape, KEY_DIM, dtype=torch.float64), dim=-1) for _ in "qk")
    v = torch.randn(*shape, VALUE_DIM, dtype=torch.float64)
    decay = -forgetting * torch.rand(*shape, channels, dtype=torch.float64)
    return [q, k, v, decay, largest * torch.rand(shape, dtype=torch.float64)]


def drawn_documents(draw: random.Random, length: int, count: int) -> Tensor:
    starts = sorted(draw.sample(range(1, length), min(count, length) - 1)) if length > 1 else []
    ids = torch.zeros(length, dtype=torch.int32)
    for start in starts:
        ids[start:] += 1
    return ids


def differences(one: list[Tensor], other: list[Tensor]) -> list[float]:
    return [
        float((a.double() - b.double()).abs().max() / b.abs().max())
        for a, b in zip(one, other, strict=True)
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forgetting", [0.0, 0.01, 1.0, 20.0])
@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 1, 200])
def test_outputs_and_gradients_are_those_of_the_recurrence_in_fp64(
    length: int, forgetting: float, rule: str, draw: random.Random
) -> None:
    inputs = drawn_inputs(length, forgetting, rule)
    documents = torch.stack([drawn_documents(draw, length, draw.choice([1, 2, 5])) for _ in "12"])
    direction = torch.randn(2, length, HEADS, VALUE_DIM, dtype=torch.float64)
    results = []
    for compute, dtype in ((recurrence, torch.float64), (gated_delta_rule, torch.float32)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
        found: Any = compute(*leaves, documents)
        outputs = found if isinstance(found, Tensor) else found[0]
        (outputs * direction.to(dtype)).sum().backward()
        # A sequence of one token has no gradient of what decays.
        gradients = [each.grad for each in leaves if each.grad is not None and each.grad.any()]
        results.append([outputs.detach(), *gradients])
    assert max(differences(results[1], results[0])) < EXACT


VALUES = {"linear_num_value_heads": 4, "linear_value_head_dim": 5}
LATENTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
LAYERS: dict[str, dict[str, int]] = {
    "qwen3_5_text": VALUES,
    "olmo_hybrid": VALUES,
    "kimi_linear": LATENTS,
}
of_each_layer = pytest.mark.parametrize("kind", LAYERS)


def drawn_layer(kind: str, draw: random.Random) -> tuple[nn.Module, ModelConfig]:
    """A layer that forgets slowly, so that a state that leaks is seen for long."""
    config = ModelConfig(
        model_type=kind,
        vocab_size=32,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        linear_num_key_heads=2,
        linear_key_head_dim=6,
        linear_conv_kernel_dim=4,
        layer_types=("linear_attention",),
        initializer_range=0.3,
        **LAYERS[kind],
    )
    model = init_weights(build_model(config, "cpu"), draw.randrange(1000))
    block: Any = model.blocks[0]
    layer: nn.Module = getattr(block, config.blocks[0].mixers[0].name)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-7.0)
    return layer.double(), config


def run(layer: nn.Module, x: Tensor, documents: Tensor | None, direction: Tensor) -> list[Tensor]:
    """The outputs and the gradient of what goes in."""
    x = x.clone().requires_grad_()
    ids = None if documents is None else documents[None]
    out = layer(x, None, AttentionMask(document_ids=ids), None)
    (out * direction).sum().backward()
    assert x.grad is not None
    return [out.detach()[0], x.grad[0]]


def cut_ups(draw: random.Random, count: int) -> list[Tensor]:
    """Documents that begin at every offset of a chunk, of one token, of exactly a chunk, and over
    several chunks; then drawn ones.
    """
    length = 3 * CHUNK + 5
    at = torch.arange(length)
    fixed = [(at >= start).int() for start in range(1, CHUNK + 1, 9)]
    fixed += [(at // CHUNK).int(), at.int(), ((at >= 1).int() + (at >= length - 1).int())]
    drawn = [drawn_documents(draw, length, draw.choice([2, 3, 8])) for _ in range(count)]
    return [each.to(torch.int32) for each in (*fixed, *drawn)]


def worst_difference(kind: str, draw: random.Random, count: int) -> float:
    """The largest difference of a document that is packed from the same one alone, of the largest
    number of all.
    """
    layer, config = drawn_layer(kind, draw)
    worst = 0.0
    for documents in cut_ups(draw, count):
        x = torch.randn(1, len(documents), config.hidden_size, dtype=torch.float64)
        direction = torch.randn_like(x)
        packed = run(layer, x, documents, direction)
        for number in documents.unique():
            part = (documents == number).nonzero()[:, 0]
            one = slice(int(part[0]), int(part[-1]) + 1)
            alone = run(layer, x[:, one], None, direction[:, one])
            for ours, theirs in zip(packed, alone, strict=True):
                difference = float((ours[one] - theirs).abs().max())
                worst = max(worst, difference / float(ours.abs().max()))
    return worst


@of_each_layer
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_document_computes_the_same_packed_as_alone_wherever_it_is_cut(
    count: int, kind: str, draw: random.Random
) -> None:
    assert worst_difference(kind, draw, count) < PACKED


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_in_fp32_a_document_differs_from_itself_alone_by_rounding(
    count: int, rule: str, draw: random.Random
) -> None:
    for documents in cut_ups(draw, count):
        inputs = [each[:1].float() for each in drawn_inputs(len(documents), 0.01, rule)]
        packed = gated_delta_rule(*inputs, documents[None])[0]
        for number in documents.unique():
            part = (documents == number).nonzero()[:, 0]
            one = slice(int(part[0]), int(part[-1]) + 1)
            alone = gated_delta_rule(*(each[:, one] for each in inputs), None)[0]
            assert (packed[:, one] - alone).abs().max() < PACKED_FP32 * packed.abs().max()


@of_each_layer
@pytest.mark.parametrize("what", ["state", "convolution"])
def test_without_the_reset_of_either_a_document_sees_the_one_before(
    what: str, kind: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "state":
        rule = gated_delta.gated_delta_rule

        def leaking_rule(*inputs: Any) -> tuple[Tensor, Tensor]:
            return rule(*inputs[:5], None)

        monkeypatch.setattr(gated_delta, "gated_delta_rule", leaking_rule)
    else:
        forward = gated_delta.CausalConvolution.forward

        def leaking_window(module: Any, x: Tensor, ids: Any, *rest: Any) -> Tensor:
            return forward(module, x, None, *rest)

        monkeypatch.setattr(gated_delta.CausalConvolution, "forward", leaking_window)
    assert worst_difference(kind, draw, 2) > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_near_equal_keys_and_strong_forgetting_give_no_nan(rule: str, draw: random.Random) -> None:
    q, k, v, decay, beta = (each.float() for each in drawn_inputs(2 * CHUNK, 1.0, rule))
    k = normalize(k[:, :1] + 1e-4 * k, dim=-1)
    leaves = [each.requires_grad_() for each in (q, k, v, 200 * decay, beta * 0 + RULES[rule][1])]
    gated_delta_rule(*leaves, torch.zeros(2, 2 * CHUNK, dtype=torch.int32))[0].sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in leaves)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_computed_in_fp32_under_autocast_too(rule: str) -> None:
    inputs = [each.float() for each in drawn_inputs(2 * CHUNK, 0.1, rule)]
    for length in (2 * CHUNK, 1):
        part = [each[:, :length] for each in inputs]
        expected = gated_delta_rule(*part, None)
        with torch.autocast("cpu", torch.bfloat16):
            computed = gated_delta_rule(*part, None)
        assert all(torch.equal(one, other) for one, other in zip(computed, expected, strict=True))
