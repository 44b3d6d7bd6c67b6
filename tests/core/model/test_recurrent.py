"""How ranks share the work of recurrent mixers."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmforge.core.model.modules.recurrent import Share
from tests.core.model.conftest import built, drawn_config

# One for each module that is a recurrent mixer.
LINEAR = ("qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear")
RECURRENT = {**dict.fromkeys(LINEAR, "linear_attention"), "lfm2": "conv"}
VALUE_HEADS = {"linear_num_value_heads": 12}


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
        **({} if model_type in ("lfm2", "kimi_linear") else VALUE_HEADS),
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
