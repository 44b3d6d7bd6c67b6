"""Recurrent mixers with a state, against their recurrences token by token in fp64, and cut into
documents in every way; and how ranks share their work.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, silu, softplus
from torch.utils.flop_counter import FlopCounterMode

from lmforge.core.model.attention import AttentionMask
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.modules import gated_delta, mamba2
from lmforge.core.model.modules.recurrent import CHUNK, CausalConvolution, Share
from tests.core.model.conftest import built, drawn_config, shaken

HEADS, GROUPS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
# Against the recurrence in fp64, of the largest number of a tensor.
EXACT = 1e-5
# A document that is packed rounds in other chunks than alone: in fp64, where that is far below
# whatever leaks; and in fp32 before the norm, which divides small outputs by themselves.
PACKED = 1e-10
PACKED_FP32 = 1e-6


def begins(documents: Tensor, at: int) -> Tensor:
    """bool [sequences, 1, 1, 1]: whether a document begins at this token."""
    if not at:
        return torch.ones(len(documents), 1, 1, 1, dtype=torch.bool)
    return (documents[:, at] != documents[:, at - 1])[:, None, None, None]


def delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, documents: Tensor
) -> Tensor:
    """S ← e^g S; S ← S + β k (v − Sᵀk)ᵀ; o = Sᵀq, with S = 0 at the first token of a document."""
    state = q.new_zeros(len(q), *q.shape[2:], v.shape[-1])
    outputs = []
    for at in range(q.shape[1]):
        state = state.masked_fill(begins(documents, at), 0) * decay[:, at].exp()[..., None]
        missing = v[:, at] - torch.einsum("shkv,shk->shv", state, k[:, at])
        state = state + torch.einsum("shk,shv,sh->shkv", k[:, at], missing, beta[:, at])
        outputs.append(torch.einsum("shkv,shk->shv", state, q[:, at]))
    return torch.stack(outputs, dim=1)


def mamba_recurrence(
    written: Tensor, decay: Tensor, b: Tensor, c: Tensor, documents: Tensor
) -> Tensor:
    """S ← e^{dt·A} S + dt·x Bᵀ; y = S·C, with S = 0 at the first token of a document."""
    copies = written.shape[2] // b.shape[2]
    b, c = (each.repeat_interleave(copies, dim=2) for each in (b, c))
    state = written.new_zeros(len(written), *written.shape[2:], b.shape[-1])
    outputs = []
    for at in range(written.shape[1]):
        state = state.masked_fill(begins(documents, at), 0) * decay[:, at].exp()[..., None, None]
        state = state + torch.einsum("shp,shn->shpn", written[:, at], b[:, at])
        outputs.append(torch.einsum("shpn,shn->shp", state, c[:, at]))
    return torch.stack(outputs, dim=1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def drawn_decay(length: int, forgetting: float, channels: int = 1) -> Tensor:
    return -forgetting * torch.rand(2, length, HEADS, channels, dtype=torch.float64)


def delta_inputs(
    length: int, forgetting: float, channels: int = 1, largest_beta: float = 1.0
) -> list[Tensor]:
    """Queries, keys, values, decays and betas in fp64 of two sequences; a decay is for so many
    channels of a head.
    """
    q, k = (normalize(drawn(2, length, HEADS, KEY_DIM), dim=-1) for _ in "qk")
    beta = largest_beta * torch.rand(2, length, HEADS, dtype=torch.float64)
    decay = drawn_decay(length, forgetting, channels)
    return [q, k, drawn(2, length, HEADS, VALUE_DIM), decay, beta]


def mamba_inputs(length: int, forgetting: float) -> list[Tensor]:
    """What is written, decays, B and C in fp64 of two sequences."""
    b, c = (drawn(2, length, GROUPS, KEY_DIM) for _ in "bc")
    return [drawn(2, length, HEADS, VALUE_DIM), drawn_decay(length, forgetting)[..., 0], b, c]


@dataclass(frozen=True)
class Recurrent:
    """A mixer: its module's function that computes its state, of which document ids are the next
    argument after `inputs`; the same token by token; and a layer of it.
    """

    module: ModuleType
    name: str
    inputs: Callable[[int, float], list[Tensor]]
    recurrence: Callable[..., Tensor]
    config: dict[str, Any]

    def compute(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = getattr(self.module, self.name)(*inputs)
        return result


_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": ("linear_attention",),
    "initializer_range": 0.3,
}
_VALUES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 5,
}
_LATENTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
MIXERS = {
    "gated delta rule": Recurrent(
        gated_delta,
        "gated_delta_rule",
        delta_inputs,
        delta_recurrence,
        {"model_type": "qwen3_5_text", **_SIZES, **_VALUES},
    ),
    "reflecting delta rule": Recurrent(
        gated_delta,
        "gated_delta_rule",
        partial(delta_inputs, largest_beta=2.0),
        delta_recurrence,
        {"model_type": "olmo_hybrid", **_SIZES, **_VALUES, "head_dim": 12},
    ),
    "Kimi delta attention": Recurrent(
        gated_delta,
        "gated_delta_rule",
        partial(delta_inputs, channels=KEY_DIM),
        delta_recurrence,
        {"model_type": "kimi_linear", **_SIZES, **_LATENTS},
    ),
    "Mamba-2": Recurrent(
        mamba2,
        "state_space_scan",
        mamba_inputs,
        mamba_recurrence,
        {"model_type": "nemotron_h", "conv_bias": True, **_SIZES, **_VALUES},
    ),
}
of_all = pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)


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


@of_all
@pytest.mark.parametrize("forgetting", [0.0, 0.01, 1.0, 20.0])
@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 1, 200])
def test_outputs_and_gradients_are_those_of_the_recurrence_in_fp64(
    mixer: Recurrent, length: int, forgetting: float, draw: random.Random
) -> None:
    inputs = mixer.inputs(length, forgetting)
    documents = torch.stack([drawn_documents(draw, length, draw.choice([1, 2, 5])) for _ in "12"])
    direction = drawn(2, length, HEADS, VALUE_DIM)
    results = []
    for compute, dtype in ((mixer.recurrence, torch.float64), (mixer.compute, torch.float32)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
        found: Any = compute(*leaves, documents)
        outputs = found if isinstance(found, Tensor) else found[0]
        (outputs * direction.to(dtype)).sum().backward()
        # A sequence of one token has no gradient of what decays.
        gradients = [each.grad for each in leaves if each.grad is not None and each.grad.any()]
        results.append([outputs.detach(), *gradients])
    assert max(differences(results[1], results[0])) < EXACT


def drawn_layer(mixer: Recurrent, draw: random.Random) -> tuple[Any, ModelConfig]:
    """A layer that forgets slowly, so that a state that leaks is seen for long."""
    config = ModelConfig(**mixer.config)
    model: Any = init_weights(build_model(config, "cpu"), draw.randrange(1000))
    layer = model.blocks[0].get_submodule(config.blocks[0].mixers[0].name)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-7.0)
    return layer.double(), config


def mamba_layer(layer: Any, x: Tensor, documents: Tensor) -> Tensor:
    """What a layer of Mamba-2 computes of one sequence, document by document."""
    values, _, *keys, heads = layer.parts
    outputs = []
    for number in documents.unique():
        projected = layer.in_proj(x[documents == number])
        z, convolved, dt = projected.split((values, values + sum(keys), heads), dim=-1)
        convolution = layer.conv1d
        convolved = conv1d(
            convolved.t(),
            convolution.weight,
            convolution.bias,
            padding=convolution.weight.shape[-1] - 1,
            groups=len(convolution.weight),
        )[:, : len(z)]
        inner, b, c = silu(convolved).t().split((values, *keys), dim=-1)
        dt = softplus(dt + layer.dt_bias).clamp(*layer.limits)
        inner = inner.unflatten(-1, (heads, -1))
        b, c = (each.unflatten(-1, (layer.heads, -1))[None] for each in (b, c))
        decay = -layer.A_log.exp() * dt
        y = mamba_recurrence((dt[..., None] * inner)[None], decay[None], b, c, 0 * documents[None])
        gated = (y[0] + layer.D[:, None] * inner).flatten(1) * silu(z)
        normed = gated.unflatten(-1, (layer.heads, -1))
        normed = normed * (normed.square().mean(-1, keepdim=True) + layer.norm.eps).rsqrt()
        outputs.append(layer.out_proj(normed.flatten(1) * layer.norm.weight))
    return torch.cat(outputs)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.02, 0.5)])
def test_a_layer_of_mamba2_has_the_outputs_and_gradients_of_its_recurrence_in_fp64(
    limits: tuple[float, float], draw: random.Random
) -> None:
    exact, config = drawn_layer(MIXERS["Mamba-2"], draw)
    shaken(exact)
    with torch.no_grad():
        exact.A_log.uniform_(-5.0, 1.0)
    exact.limits = limits
    layer = MIXERS["Mamba-2"].module.Mamba2(config, config.blocks[0].mixers[0])
    layer.load_state_dict(exact.state_dict())
    layer.limits = limits
    length = 2 * CHUNK + draw.randrange(CHUNK)
    documents = drawn_documents(draw, length, 3)
    x, direction = drawn(length, config.hidden_size), drawn(length, config.hidden_size)
    expected = mamba_layer(exact, x, documents)
    (expected * direction).sum().backward()
    out = layer(x.float()[None], None, AttentionMask(document_ids=documents[None]), None)[0]
    (out * direction.float()).sum().backward()
    ours, theirs = ([each.grad for each in one.parameters()] for one in (layer, exact))
    assert {*dict(layer.named_parameters())} >= {"A_log", "dt_bias", "D", "conv1d.bias"}
    assert max(differences([out.detach(), *ours], [expected.detach(), *theirs])) < EXACT


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


def worst_difference(mixer: Recurrent, draw: random.Random, count: int) -> float:
    """The largest difference of a document that is packed from the same one alone, of the largest
    number of all.
    """
    layer, config = drawn_layer(mixer, draw)
    worst = 0.0
    for documents in cut_ups(draw, count):
        x = drawn(1, len(documents), config.hidden_size)
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


@of_all
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_document_computes_the_same_packed_as_alone_wherever_it_is_cut(
    mixer: Recurrent, count: int, draw: random.Random
) -> None:
    assert worst_difference(mixer, draw, count) < PACKED


@of_all
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_in_fp32_a_document_differs_from_itself_alone_by_rounding(
    mixer: Recurrent, count: int, draw: random.Random
) -> None:
    for documents in cut_ups(draw, count):
        inputs = [each[:1].float() for each in mixer.inputs(len(documents), 0.01)]
        packed = mixer.compute(*inputs, documents[None])[0]
        for number in documents.unique():
            part = (documents == number).nonzero()[:, 0]
            one = slice(int(part[0]), int(part[-1]) + 1)
            alone = mixer.compute(*(each[:, one] for each in inputs), None)[0]
            assert (packed[:, one] - alone).abs().max() < PACKED_FP32 * packed.abs().max()


@of_all
@pytest.mark.parametrize("what", ["state", "convolution"])
def test_without_the_reset_of_either_a_document_sees_the_one_before(
    mixer: Recurrent, what: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "state":
        compute = getattr(mixer.module, mixer.name)
        count = len(mixer.inputs(1, 1.0))
        monkeypatch.setattr(
            mixer.module, mixer.name, lambda *inputs: compute(*inputs[:count], None)
        )
    else:
        forward = CausalConvolution.forward

        def leaking_window(module: Any, x: Tensor, ids: Any, *rest: Any) -> Tensor:
            return forward(module, x, None, *rest)

        monkeypatch.setattr(CausalConvolution, "forward", leaking_window)
    assert worst_difference(mixer, draw, 2) > 1e-2


@of_all
def test_strong_forgetting_and_near_equal_keys_give_no_nan(
    mixer: Recurrent, draw: random.Random
) -> None:
    inputs = [each.float() for each in mixer.inputs(2 * CHUNK, 200.0)]
    if len(inputs) == 5:
        inputs[1] = normalize(inputs[1][:, :1] + 1e-4 * inputs[1], dim=-1)
        inputs[4] = torch.full_like(inputs[4], float(inputs[4].max() > 1) + 1)
    leaves = [each.requires_grad_() for each in inputs]
    mixer.compute(*leaves, torch.zeros(2, 2 * CHUNK, dtype=torch.int32))[0].sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in leaves)


@of_all
def test_a_state_is_computed_in_fp32_under_autocast_too(mixer: Recurrent) -> None:
    inputs = [each.float() for each in mixer.inputs(2 * CHUNK, 0.1)]
    for length in (2 * CHUNK, 1):
        part = [each[:, :length] for each in inputs]
        expected = mixer.compute(*part, None)
        with torch.autocast("cpu", torch.bfloat16):
            computed = mixer.compute(*part, None)
        assert all(torch.equal(one, other) for one, other in zip(computed, expected, strict=True))


# One for each module that is a recurrent mixer.
RECURRENT = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "nemotron_h"),
        "linear_attention",
    ),
    "lfm2": "conv",
}


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("model_type", RECURRENT)
def test_shares_add_up_to_the_mixer_and_each_has_its_part_of_the_products(
    model_type: str, parts: int, draw: random.Random
) -> None:
    config = drawn_config(
        model_type,
        draw,
        num_hidden_layers=1,
        layer_types=[RECURRENT[model_type]],
        **({} if model_type == "lfm2" else {"linear_num_key_heads": 6}),
        **({} if model_type in ("lfm2", "kimi_linear") else {"linear_num_value_heads": 12}),
        **({"num_experts": 0} if model_type == "nemotron_h" else {}),
    )
    block = built(config).blocks[0]  # type: ignore[operator, index]
    mixer = next(getattr(block, each.name) for each in config.blocks[0].mixers if each.states)
    x = torch.randn(2, 70, config.hidden_size)
    ids = torch.tensor([[0] * 9 + [1] * 61, [0] * 66 + [1] + [-1] * 3], dtype=torch.int32)

    def computed(share: Share) -> tuple[torch.Tensor, int]:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            out = mixer._project_out(mixer.mix(x, ids, None, None, share), None, share)
        return out, counter.get_total_flops()

    whole, products = computed(Share())
    shares = [computed(Share(part, parts)) for part in range(parts)]
    # fp32 sums of as many terms, in another order.
    torch.testing.assert_close(
        sum(out for out, _ in shares), whole, atol=1e-5 * whole.abs().max().item(), rtol=0
    )
    # Each has what all heads of Kimi delta attention are computed from.
    latents = [
        layer for name, layer in mixer.named_modules() if name.endswith(("f_a_proj", "g_a_proj"))
    ]
    shared = sum(2 * len(x) * x.shape[1] * layer.weight.numel() for layer in latents)
    assert [parts * (count - shared) for _, count in shares] == [products - shared] * parts
