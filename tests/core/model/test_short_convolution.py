"""Gated short convolutions, cut into documents in every way."""

import random
from typing import Any

import pytest
import torch

from lmforge.core.model.attention import AttentionMask
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.modules.recurrent import CausalConvolution
from lmforge.core.model.modules.short_convolution import ShortConvolution

LENGTH, WIDTH = 23, 12


def drawn_layer(draw: random.Random) -> ShortConvolution:
    config = ModelConfig(
        model_type="lfm2",
        vocab_size=32,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        linear_conv_kernel_dim=3,
        conv_bias=True,
        layer_types=("conv",),
    )
    mixer: Mixer = config.blocks[0].mixers[0]
    layer = ShortConvolution(config, mixer).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


@pytest.mark.parametrize("leaks", [False, True])
def test_a_document_computes_the_same_packed_as_alone_unless_its_window_leaks(
    leaks: bool, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = drawn_layer(draw)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    if leaks:
        forward = CausalConvolution.forward

        def leaking(module: Any, x: Any, ids: Any, *rest: Any) -> Any:
            return forward(module, x, None, *rest)

        monkeypatch.setattr(CausalConvolution, "forward", leaking)
    worst = 0.0
    for start in range(1, LENGTH):
        ids = (torch.arange(LENGTH) >= start).int()[None]
        packed = layer(x, None, AttentionMask(document_ids=ids), None)
        alone = layer(x[:, start:], None, AttentionMask(), None)
        worst = max(worst, float((packed[:, start:] - alone).abs().max()))
    assert (worst > 1e-2) == leaks
    assert leaks or worst < 1e-12


def test_it_is_the_convolution_of_torch_between_two_factors(draw: random.Random) -> None:
    layer = drawn_layer(draw)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    before, after, values = layer.in_proj(x).chunk(3, dim=-1)
    convolved = torch.nn.functional.conv1d(
        (before * values).transpose(1, 2),
        layer.conv.weight,
        layer.conv.bias,
        padding=2,
        groups=WIDTH,
    )
    expected = layer.out_proj(after * convolved[..., :LENGTH].transpose(1, 2))
    out = layer(x, None, AttentionMask(), None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
