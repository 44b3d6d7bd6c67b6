"""How a model runs: compiled, in mixed precision, and under sharding's casts."""

import random
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from lmforge.core.model.layers import RMSNorm
from lmforge.core.model.mixture.experts import Router
from tests.core.model.conftest import MODEL_TYPES, built, drawn_config, packed


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_blocks_compile_once_for_all_layers_and_steps_without_a_break(
    model_type: str, draw: random.Random
) -> None:
    torch._dynamo.reset()
    counters.clear()
    fixed = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 7,
    }
    config = drawn_config(
        model_type, draw, num_hidden_layers=3, **(fixed if model_type in ("qwen2", "qwen3") else {})
    )
    model = built(config)
    expected, result = [], []
    steps = [
        packed([[20, 11], [13, 18]], config.vocab_size, padding=2, model=model) for _ in range(3)
    ]
    for rows in steps:
        rows.documents[:, draw.randrange(33) :] += 1
        expected.append(model(rows.tokens, rows.positions, rows.documents))
    for block in model.blocks:
        # Backend "eager" traces as inductor would be given it, and compiles nothing.
        block.compile(fullgraph=True, dynamic=False, backend="eager")
    for rows in steps:
        result.append(model(rows.tokens, rows.positions, rows.documents))
        result[-1].sum().backward()
    assert counters["stats"]["unique_graphs"] == len(config.block_kinds)
    assert not counters["graph_break"]
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_a_norm_is_computed_in_fp32_and_returned_in_the_dtype_it_was_given() -> None:
    norm = RMSNorm(64, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    # Squares of these overflow in fp16 and lose all but three digits in bf16.
    x = torch.randn(5, 64) * 1000
    exact = norm(x)
    for dtype in (torch.bfloat16, torch.float16):
        result = norm.to(dtype)(x.to(dtype))
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=1e-3)


def keep_chosen(
    kept: torch.Tensor, router: Router, args: object, result: tuple[torch.Tensor, ...]
) -> None:
    kept.copy_(result[1].view_as(kept))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_autocast_gives_fp32_gradients_near_the_fp32_ones(
    model_type: str, draw: random.Random
) -> None:
    config = drawn_config(
        model_type,
        draw,
        hidden_size=30,
        num_attention_heads=3,
        num_key_value_heads=0,
        num_hidden_layers=2,
    )
    model = built(config)
    rows = packed([[20, 11]], config.vocab_size, padding=2)

    def gradients(routed_experts: torch.Tensor | None) -> dict[str, torch.Tensor]:
        model.zero_grad()
        hidden = model(rows.tokens, rows.positions, rows.documents, routed_experts=routed_experts)
        model.lm_head(hidden).float().square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    # Where experts are nearly tied, bf16 may choose another: gradients of another function. So
    # those of fp32 are replayed.
    chosen = torch.full(
        (*rows.tokens.shape, config.num_hidden_layers, config.num_experts_per_tok), -1
    )
    routers = [
        (layer, model.blocks[layer].get_submodule(block.mixture.name).get_router())
        for layer, block in enumerate(config.blocks)
        if block.mixture
    ]
    hooks = [
        router.register_forward_hook(partial(keep_chosen, chosen[:, :, layer]))
        for layer, router in routers
    ]
    exact = gradients(None)
    for hook in hooks:
        hook.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gradients(chosen if routers else None)
    for name, gradient in result.items():
        assert gradient.dtype == torch.float32
        if exact[name].norm() > 1e-3:
            cosine = torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
            assert cosine > 0.9, name
