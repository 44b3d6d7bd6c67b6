"""Smaller models of the proportions of one."""

from dataclasses import replace

import pytest

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import parameter_count
from lmforge.core.model.presets import get_preset
from lmforge.lab.proportions import in_proportion

LFM2 = ModelConfig(
    model_type="lfm2",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    linear_conv_kernel_dim=3,
    layer_types=("conv", "conv", "full_attention", "conv", "full_attention", "conv"),
)


# As Nemotron 3 Nano.
NEMOTRON = ModelConfig(
    model_type="nemotron_h",
    vocab_size=64,
    hidden_size=2688,
    intermediate_size=1856,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=8,
    linear_num_value_heads=64,
    linear_key_head_dim=128,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    conv_bias=True,
    num_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    shared_expert_intermediate_size=3712,
    layer_types=(*("linear_attention", "moe") * 3, "full_attention", "moe"),
)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("name", ["qwen3.5-9b", "nano-hybrid", "lfm2"])
def test_a_smaller_hybrid_has_layers_of_both_kinds(name: str, layers: int) -> None:
    config = LFM2 if name == "lfm2" else get_preset(name)
    small = in_proportion(config, 64, 4, 16, layers)
    assert small.layer_types is not None
    assert len(small.layer_types) == layers
    assert "full_attention" in small.layer_types
    assert layers == 1 or len(set(small.layer_types)) == 2


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_a_smaller_nemotron_has_experts_where_a_layer_is_a_mixture(layers: int) -> None:
    small = in_proportion(NEMOTRON, 336, 4, 128, layers)
    assert (small.linear_num_value_heads, small.linear_num_key_heads) == (8, 8)
    assert bool(small.num_experts) == ("moe" in small.written_layer_types)


def test_linear_attention_shrinks_with_the_width() -> None:
    config = get_preset("qwen3.5-9b")
    small = in_proportion(config, 512, 2, 256, 4)
    assert (small.linear_num_key_heads, small.linear_num_value_heads) == (2, 4)
    wide, narrow = (
        parameter_count(replace(each, vocab_size=1)).total / each.num_hidden_layers
        for each in (config, small)
    )
    # Matrices shrink by the square of the width: eight by eight times.
    assert wide / narrow == pytest.approx(64, rel=0.1)
