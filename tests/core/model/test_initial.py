"""Initial values depend only on the seed and the tensor's name."""

import math
import random

import pytest
import torch
from torch.nn.functional import softplus

from lmforge.core.model.build import build_model
from lmforge.core.model.config_json import to_config_json
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.mixture.experts import BIAS
from tests.core.model.conftest import MODEL_TYPES, drawn_config


def parameters(config, seed: int) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    return {
        name: parameter.detach()
        for name, parameter in init_weights(build_model(config), seed).named_parameters()
    }


def test_a_tensor_has_the_same_values_whatever_else_the_model_holds(draw: random.Random) -> None:
    small = drawn_config(
        "llama", draw, num_hidden_layers=2, tie_word_embeddings=True, sliding_window=None
    )
    torch.manual_seed(draw.randrange(1000))
    first = parameters(small, 3)
    torch.manual_seed(draw.randrange(1000))
    deeper = {**to_config_json(small), "num_hidden_layers": 3, "tie_word_embeddings": False}
    from lmforge.core.model.resolve import model_config_from_json

    second = parameters(model_config_from_json(deeper, "here"), 3)
    for name, value in first.items():
        if not name.endswith(("o_proj.weight", "down_proj.weight")):  # their scale is the depth's
            assert torch.equal(value, second[name]), name


def test_another_seed_gives_other_values_and_no_two_tensors_are_alike(draw: random.Random) -> None:
    config = drawn_config("qwen3", draw, num_hidden_layers=3)
    first, second = parameters(config, 1), parameters(config, 2)
    matrices = [name for name, value in first.items() if value.dim() == 2]
    assert not any(torch.equal(first[name], second[name]) for name in matrices)
    flat = [first[name].flatten()[:50] for name in matrices]
    assert len({tuple(values.tolist()) for values in flat}) == len(flat)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_values_have_the_spread_that_is_asked_for(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw, num_hidden_layers=2)
    branches = sum(len(block.branches) for block in config.blocks)
    for name, value in parameters(config, draw.randrange(1000)).items():
        if name.endswith((".bias", "proj_bias", ".sinks")):
            assert not value.any(), name
        elif name.endswith(("mixer.A_log", "mamba.A_log")):
            assert value.exp().min() > 0.99, name
            assert value.exp().max() < 16.01, name
        elif name.endswith(("mixer.dt_bias", "mamba.dt_bias")):
            steps = softplus(value)
            assert steps.min() > 0.99e-3, name
            assert steps.max() < 0.101, name
        elif name.endswith(".A_log"):
            least = 1 if model_type == "kimi_linear" else 0
            places = (torch.arange(value.numel()) + 0.5) / value.numel()
            torch.testing.assert_close(value.exp().flatten(), least + (16 - least) * places)
        elif name.endswith(".dt_bias") and model_type in ("kimi_linear", "olmo_hybrid"):
            steps = torch.nn.functional.softplus(value)
            assert ((steps > 0.00099) & (steps < 0.101)).all(), name
        elif name.endswith((".conv1d.weight", ".conv.conv.weight")):
            assert value.abs().max() <= value.shape[-1] ** -0.5, name
        elif value.dim() == 1:
            added = config.family.norm_offset == 1 and not name.endswith(
                ("linear_attn.norm.weight", "dt_bias")
            )
            assert (value == (0 if added else 1)).all(), name
        else:
            residual = name.endswith(
                (
                    "o_proj.weight",
                    "down_proj.weight",
                    "experts.down_proj",
                    "c_proj.weight",
                    "out_proj.weight",
                    "output_linear.weight",
                    "fc2_latent_proj.weight",
                    "feed_forward.w2.weight",
                )
            )
            if config.moe_latent_size and name.endswith(".experts.down_proj"):
                residual = False  # what leaves the latents is
            deviation = config.initializer_range / (math.sqrt(branches) if residual else 1)
            # Six standard errors of a standard deviation.
            assert abs(value.std().item() / deviation - 1) < 6 / math.sqrt(2 * value.numel()), name
            assert abs(value.mean().item()) < 6 * deviation / math.sqrt(value.numel()), name


def test_a_model_has_no_buffers_but_the_bias_of_a_router_that_publishes_one(
    draw: random.Random,
) -> None:
    for model_type in MODEL_TYPES:
        config = drawn_config(model_type, draw)
        names = {name.rpartition(".")[2] for name, _ in build_model(config, "meta").named_buffers()}
        assert names <= ({BIAS} if config.family.sigmoid_router else set())
