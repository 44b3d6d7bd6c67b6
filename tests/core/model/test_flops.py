"""Parameters and FLOPs of a model config, checked against counting."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import active_parameters, flops_per_token, parameter_count
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.lab.plan.hardware import data_sheets
from tests.core.model.conftest import MODEL_TYPES, drawn_config, one_document


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_parameters_are_those_of_the_model(model_type: str, draw: random.Random) -> None:
    for _ in range(5):
        config = drawn_config(model_type, draw)
        model = build_model(config, "meta")
        counts = parameter_count(config)
        assert counts.total == sum(parameter.numel() for parameter in model.parameters())
        assert counts.input_embedding == sum(module.weight.numel() for module in model.embeddings)
        head = 0 if not config.tie_word_embeddings else model.lm_head.weight.numel()
        matrices = [
            each
            for name, each in model.blocks.named_parameters()
            if each.ndim >= 2 and not config.vector(f".{name}")
        ]
        experts = sum(each.numel() for each in matrices if each.ndim == 3)
        idle = experts - experts * config.num_experts_per_tok // max(1, config.num_experts)
        assert counts.active_matmul == counts.total - counts.input_embedding + head - idle
        assert active_parameters(config) == counts.total - idle
        assert counts.block_matrices == sum(each.numel() for each in matrices)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_flops_are_those_that_torch_counts(model_type: str, draw: random.Random) -> None:
    config = drawn_config(model_type, draw)
    if config.family.recurrent_type:  # which is counted as its recurrence, and computed in chunks
        types = config.written_layer_types
        recurrent = config.family.recurrent_type
        config = replace(
            config,
            layer_types=["full_attention" if each == recurrent else each for each in types],
        )
    model = build_model(config, "meta")
    length = 40
    rows = one_document(2, length, config.vocab_size)
    with FlopCounterMode(display=False) as counted:
        model.lm_head(
            model(*(x.to("meta") for x in (rows.tokens, rows.positions, rows.documents)))
        ).sum().backward()
    # Norms and biases have parameters, which the convention counts, and no matrix product.
    vectors = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 1 or config.vector(name)
    )
    print(counted.get_flop_counts()["Global"])
    # Latent attention computes with queries and values of one width, and the convention counts what
    # they have.
    heads = sum(block.attends for block in config.blocks) * config.num_attention_heads
    padding = (
        6
        * length
        * heads
        * (2 * config.head_dim - config.qk_head_dim - (config.v_head_dim or config.head_dim))
    )
    if config.family.attention_sinks:
        # A sink is a key more, and a multiple of 8 channels; gradients of experts' biases are products.
        wide = config.head_dim + 8 - config.head_dim % 8
        padding = 12 * heads * ((length + 1) * wide - length * config.head_dim)
        biases = 2 * config.expert_size + config.hidden_size
        padding += 2 * config.num_hidden_layers * config.num_experts_per_tok * biases
    assert (
        counted.get_total_flops() / (2 * length)
        == flops_per_token(config, length) - 6 * vectors + padding
    )


def test_a_recurrent_layer_counts_what_a_token_does_with_its_state_and_no_length() -> None:
    config = ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
        layer_types=("linear_attention",),
    )
    # Three products with the state [6, 5] of each of 4 heads: what is held under a key, what is
    # added, and what a query reads. And a kernel of 4 for each channel.
    state, channels = 3 * 2 * 4 * 6 * 5, 2 * 2 * 6 + 4 * 5
    expected = 6 * parameter_count(config).active_matmul + 3 * (state + 2 * 4 * channels)
    assert flops_per_token(config, 10) == flops_per_token(config, 1000) == expected


def test_published_sizes() -> None:
    billions = {
        "llama2-7b": 6.74,
        "llama2-70b": 68.98,
        "llama3-8b": 8.03,
        "llama3.1-405b": 405.85,
        "1b": 1.236,
        "olmo2-1b": 1.4849,
        "gemma3-270m": 0.2681,
        "gemma3-1b": 0.99989,
        "gemma3-12b": 1.0069 + 10.759,
        "olmoe-1b-7b": 6.919,
        "mixtral-8x7b": 46.70,
        "qwen3-30b-a3b": 30.53,
        "gpt-oss-20b": 20.91,
        "qwen3.5-9b": 8.95,
        "deepseek-v3": 671.0,
        "gpt2-124m": 0.1244,
    }
    for name, size in billions.items():
        assert parameter_count(get_preset(name)).total / 1e9 == pytest.approx(size, rel=1e-3)
    assert set(billions) < set(PRESETS)
    active = {"olmoe-1b-7b": 1.3, "mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "deepseek-v3": 37.0}
    # With the embedding that is looked up, as their reports count.
    for name, size in active.items():
        assert active_parameters(get_preset(name)) / 1e9 == pytest.approx(size, rel=0.02)


def test_peaks_are_known_by_the_names_that_cuda_gives() -> None:
    def peak_flops(device_name: str, dtype: str) -> float | None:
        gpu = data_sheets().find(device_name)
        return None if gpu is None else gpu.peak_flops(dtype)

    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp16") == 312e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Some Future Chip", "bf16") is None
    assert torch.cuda.is_available() or peak_flops("cpu", "fp32") is None
