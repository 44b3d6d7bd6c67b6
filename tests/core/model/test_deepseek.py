"""What only DeepSeek-V3 has: folders in float8, layers that predict further tokens, the bias of its
routers, its options.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from lmforge.core.errors import UserError
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import config_fields_from_json, to_config_json
from lmforge.core.model.init_weights import init_weights, named_tensors
from lmforge.core.model.mixture.experts import BIAS
from lmforge.core.model.presets import get_preset
from lmforge.hf.export import export_folder
from lmforge.hf.resolve import resolve_model_config
from lmforge.hf.weights import describe_folder, load_folder
from lmforge.serve.decoding.incremental import incremental_decoder
from tests.core.model.conftest import (
    ONE_BY_ONE,
    built,
    drawn_config,
    logits,
    one_document,
    quantized,
)

LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
# What the published config.json has of the router.
PUBLISHED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "granitemoehybrid"])
def test_a_folder_in_float8_is_dequantized_and_exported_without(
    model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    """Granite's experts are stacked on disk."""
    config = drawn_config(model_type, draw, **LAYERS if model_type == "deepseek_v3" else {})
    export_folder(built(config), config, tmp_path / "in")
    wanted = quantized(tmp_path / "in", (16, 8))
    assert wanted
    assert describe_folder(tmp_path / "in") == ["dequantized from float8"]
    opened = resolve_model_config(tmp_path / "in", {})
    model = build_model(opened)
    load_folder(tmp_path / "in", model)
    export_folder(model, opened, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    lost = load_file(tmp_path / "in" / "model.safetensors")
    name = draw.choice([each for each in lost if each.endswith("_scale_inv")])
    save_file(
        {each: tensor for each, tensor in lost.items() if each != name},
        tmp_path / "in" / "model.safetensors",
    )
    with pytest.raises(UserError, match=f"missing {name}, against its quantization_config"):
        load_folder(tmp_path / "in", build_model(opened))


def test_layers_that_predict_further_tokens_are_left_unread_and_named(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("deepseek_v3", draw, **LAYERS)
    export_folder(built(config), config, tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    more = {
        f"model.layers.2.{name}": torch.zeros(3)
        for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")
    }
    save_file({**tensors, **more}, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected model\.layers\.2\."):
        load_folder(tmp_path / "plain", build_model(config))
    content = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(
        json.dumps(content | {"num_nextn_predict_layers": 1})
    )
    assert describe_folder(tmp_path / "plain") == ["without layer 2, which predicts further tokens"]
    model = build_model(resolve_model_config(tmp_path / "plain", {}))
    load_folder(tmp_path / "plain", model)
    export_folder(model, config, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_the_bias_of_a_router_is_fp32_in_a_bf16_model_and_its_folder(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("deepseek_v3", draw, **LAYERS)
    model = built(config)
    name, bias = next(
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith(BIAS)
    )
    export_folder(model.to(torch.bfloat16), config, tmp_path / "out", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[name], bias)
    assert {each.dtype for key, each in found.items() if key != name} == {torch.bfloat16}
    assert all(
        not each.any()
        for key, each in named_tensors(init_weights(build_model(config), 1))
        if key.endswith(BIAS)
    )


@pytest.mark.parametrize("latent", [0, 14])
def test_decoding_with_a_cache_continues_as_transformers_does(
    latent: int, draw: random.Random, tmp_path: Path
) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    }
    config = drawn_config("deepseek_v3", draw, q_lora_rank=latent, rope_scaling=yarn, **LAYERS)
    ours = built(config)
    export_folder(ours, config, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **ONE_BY_ONE)
    tokens = one_document(1, 20, config.vocab_size, ours).tokens
    greedy = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    wanted = theirs.generate(
        tokens, generation_config=greedy, attention_mask=torch.ones_like(tokens)
    )[0, 20:]
    decoder = incremental_decoder(ours, 1, 64, device=torch.device("cpu"), dtype=torch.float32)
    hidden, found = decoder.prefill([tokens[0].tolist()]), []
    for _ in range(20):
        with torch.no_grad():
            found.append(int(ours.lm_head(hidden).argmax(-1)))
        hidden = decoder.decode_step(torch.tensor(found[-1:]))
    assert found == wanted.tolist()


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            'scoring_func: "softmax" is not supported for deepseek_v3',
        ),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            'topk_method: "greedy" is not supported for deepseek_v3',
        ),
        (
            "deepseek_v3",
            {"seq_aux": False},
            "seq_aux: false is not supported for deepseek_v3; use a model with true",
        ),
        (
            "deepseek_v3",
            {"moe_layer_freq": 2},
            "moe_layer_freq: 2 is not supported for deepseek_v3; use a model with 1",
        ),
        (
            "deepseek_v3",
            {"n_group": 3},
            "n_group: 3 does not divide 256 experts into equal groups of at least two",
        ),
        (
            "deepseek_v3",
            {"n_group": 256},
            "n_group: 256 does not divide 256 experts into equal groups of at least two",
        ),
        (
            "deepseek_v3",
            {"topk_group": 9},
            "topk_group: 9 of 8 groups cannot give 8 experts to a token",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4},
            "num_key_value_heads: a deepseek_v3 model has as many as query heads",
        ),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 5},
            "qk_rope_head_dim: rotary positions need an even width, got 5",
        ),
        (
            "deepseek_v3",
            {"kv_lora_rank": "many"},
            'kv_lora_rank: expected a whole number above zero, got "many"',
        ),
        (
            "deepseek_v3",
            {"n_shared_experts": 0},
            "n_shared_experts: expected a whole number above zero, got 0",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: quantized weights cannot",
        ),
        (
            "mixtral",
            {"scoring_func": "sigmoid"},
            'scoring_func: "sigmoid" is not supported for mixtral; use a model with',
        ),
        (
            "mixtral",
            {"norm_topk_prob": False},
            "norm_topk_prob: false is not supported for mixtral",
        ),
        (
            "qwen3_moe",
            {"n_group": 8},
            "n_group: 8 is not supported for qwen3_moe; use a model with 1",
        ),
        (
            "qwen3_moe",
            {"routed_scaling_factor": 2.5},
            "routed_scaling_factor: 2.5 is not supported for qwen3_moe",
        ),
        (
            "olmoe",
            {"n_shared_experts": 1},
            "n_shared_experts: 1 is not supported for olmoe; use a model with 0",
        ),
        (
            "olmoe",
            {"topk_method": "noaux_tc"},
            'topk_method: "noaux_tc" is not supported for olmoe',
        ),
    ],
)
def test_what_a_router_or_latent_attention_cannot_be_is_refused_by_its_name(
    model_type: str, change: dict[str, Any], words: str
) -> None:
    presets = {
        "deepseek_v3": "deepseek-v3",
        "mixtral": "mixtral-8x7b",
        "qwen3_moe": "qwen3-30b-a3b",
        "olmoe": "olmoe-1b-7b",
    }
    content = to_config_json(get_preset(presets[model_type]))
    if model_type == "deepseek_v3":
        content |= PUBLISHED
    assert ModelConfig(**config_fields_from_json(content)) == get_preset(presets[model_type])
    with pytest.raises(UserError) as refused:
        ModelConfig(**config_fields_from_json(content | change))
    assert words in str(refused.value)


def test_the_scores_are_scaled_by_the_mscale_of_yarn(draw: random.Random) -> None:
    """Without it the logits are other ones, so that the equality with transformers elsewhere means
    something.
    """
    yarn = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = drawn_config("deepseek_v3", draw, rope_scaling=yarn, **LAYERS)
    model, plain = built(config), build_model(config)
    plain.load_state_dict(model.state_dict())
    for block in plain.blocks:
        assert block.self_attn.scale > config.qk_head_dim**-0.5
        block.self_attn.scale = config.qk_head_dim**-0.5
    rows = one_document(1, 30, config.vocab_size)
    assert not torch.allclose(logits(model, rows), logits(plain, rows), rtol=0, atol=1e-4)
