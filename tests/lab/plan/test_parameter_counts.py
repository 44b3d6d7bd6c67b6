"""Parameters and FLOPs of a recipe's model, checked against counting."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.lora import LoraLinear, add_lora
from lmforge.core.stages.parameter_counts import (
    count_parameters,
    get_lora_config,
    training_flops_per_token,
)
from lmforge.post.options.align import AlignConfig

LENGTH, ROWS = 40, 2


@pytest.mark.parametrize("method", ["dpo", "reward"])
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "k_proj", "v_proj"]])
def test_adapters_cost_what_torch_counts(method: str, targets: list[str]) -> None:
    config = AlignConfig.model_validate(
        {
            "model": {"source": Path("somewhere")},
            "data": {"sequence_length": LENGTH},
            "lora": {"rank": 3, "target_modules": targets},
            "align": {"method": method},
        }
    )
    shape = ModelConfig(
        vocab_size=70,
        hidden_size=24,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        reward=method == "reward",
    )
    model = build_model(shape, "meta")
    lora = get_lora_config(config)
    assert lora is not None
    add_lora(model, lora)
    counts = count_parameters(shape, lora)
    total, trained = counts.total, counts.trained
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert trained == sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.lm_head(model(tokens, tokens, tokens.int())).sum().backward()
    # Norms are counted by the convention and are no matrix products; and nobody asks for the
    # gradient of the embeddings, which the first layers would have to be gone back through for.
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    first = model.blocks[0].self_attn
    projections = first.q_proj, first.k_proj, first.v_proj
    unasked = sum(layer.weight.numel() for layer in projections)
    unasked += sum(
        layer.lora_A.weight.numel() for layer in projections if isinstance(layer, LoraLinear)
    )
    assert (
        counter.get_total_flops() / (ROWS * LENGTH)
        == training_flops_per_token(config, shape, LENGTH) - 4 * vectors - 2 * unasked
    )
