"""Model configs: reading and writing, their sources, and what is refused."""

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.config_json import config_fields_from_json, to_config_json
from lmforge.core.model.fields import Rope, RopeScaling
from lmforge.core.model.presets import PRESETS, get_preset
from lmforge.core.model.resolve import model_config_from_json
from lmforge.hf.resolve import resolve_model_config
from tests.core.model.conftest import MODEL_TYPES, drawn_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_shape_survives_the_trip_through_its_own_json(
    model_type: str, draw: random.Random
) -> None:
    for _ in range(20):
        tokens = {
            "bos_token_id": draw.choice([None, 1]),
            "eos_token_id": draw.choice([None, 2, (2, 3)]),
        }
        tokens["pad_token_id"] = draw.choice([0, 2, 3])
        config = drawn_config(
            model_type, draw, final_logit_softcapping=draw.choice([None, 30.0]), **tokens
        )
        reward = [dataclasses.replace(config, reward=True)] if config.family.classifier else []
        for each in (config, *reward):
            assert (
                model_config_from_json(json.loads(json.dumps(to_config_json(each))), "here") == each
            )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_shape_survives_the_trip_through_transformers(
    model_type: str, draw: random.Random, tmp_path: Path
) -> None:
    for _ in range(5):
        config = drawn_config(model_type, draw)
        AutoConfig.for_model(**to_config_json(config)).save_pretrained(tmp_path)
        ours = dataclasses.asdict(resolve_model_config(tmp_path, {}))
        # transformers fills in the special tokens of each kind's first model.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ours[name] = None
        assert ours == dataclasses.asdict(config)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_trip_through_its_own_json(name: str) -> None:
    assert model_config_from_json(to_config_json(get_preset(name)), "here") == get_preset(name)


def test_the_spellings_of_transformers_4_and_5_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = {
        **LLAMA,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **scaling},
        "torch_dtype": "bfloat16",
    }
    older = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {
        **LLAMA,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling},
        "dtype": "bfloat16",
    }
    assert (
        model_config_from_json(old, "a")
        == model_config_from_json(new, "b")
        == model_config_from_json(older, "c")
    )
    assert model_config_from_json(new, "b").rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_gemma_3_is_the_same_in_the_spelling_of_transformers_4_and_5() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    sizes = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 9}
    old = {
        **sizes,
        "rope_theta": 2e6,
        "rope_local_base_freq": 5e3,
        "rope_scaling": scaling,
        "sliding_window_pattern": 3,
    }
    ropes = {
        "full_attention": {"rope_theta": 2e6, **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    new = {**sizes, "rope_parameters": ropes, "layer_types": types}
    config = model_config_from_json(old, "a")
    assert config == model_config_from_json(new, "b")
    assert config.layer_windows == (9, 9, None, 9, 9, None, 9)
    assert config.layer_ropes[1:3] == (Rope(5e3), Rope(2e6, RopeScaling("linear", 8.0)))
    assert (config.head_dim, config.query_pre_attn_scalar, config.tie_word_embeddings) == (
        256,
        256,
        True,
    )
    by_default = model_config_from_json(
        {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7}, "c"
    )
    assert by_default.layer_windows == (4096,) * 5 + (None, 4096)
    assert by_default.layer_ropes[4:6] == (Rope(1e4), Rope(1e6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: 50.0 is not supported for gemma3_text; use a model without it",
        ),
        (
            {"use_bidirectional_attention": True},
            (
                "use_bidirectional_attention: true is not supported for gemma3_text; use a model"
                " with false"
            ),
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "rope_parameters: ",
        ),
        ({"rope_parameters": {"full_attention": "x"}}, "rope_parameters: "),
        (
            {"query_pre_attn_scalar": 0},
            "query_pre_attn_scalar: expected a number above zero, got 0",
        ),
        (
            {"hidden_activation": "gelu"},
            'hidden_act: "gelu" is not supported in a gemma3_text model',
        ),
    ],
)
def test_a_gemma_3_that_cannot_be_computed_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refused:
        model_config_from_json({**LLAMA, "model_type": "gemma3_text", **change}, "here")
    assert words in str(refused.value)


def test_windows_name_the_layers_that_have_one() -> None:
    qwen = {
        **LLAMA,
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "max_window_layers": 3,
    }
    assert (
        model_config_from_json({**qwen, "use_sliding_window": False}, "here").layer_windows
        == (None,) * 4
    )
    assert model_config_from_json({**qwen, "use_sliding_window": True}, "here").layer_windows == (
        None,
        None,
        None,
        7,
    )
    kinds = ["sliding_attention", "full_attention"] * 2
    assert model_config_from_json(
        {**qwen, "use_sliding_window": True, "layer_types": kinds}, "here"
    ).layer_windows == (
        7,
        None,
        7,
        None,
    )
    assert model_config_from_json(
        {**LLAMA, "model_type": "mistral", "sliding_window": 5}, "here"
    ).layer_windows == (5, 5)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_a_window_without_layer_types_comes_back_from_a_config_json_as_it_was(
    model_type: str,
) -> None:
    config = ModelConfig(
        90, 32, 3, 4, intermediate_size=40, head_dim=8, model_type=model_type, sliding_window=7
    )
    assert config.layer_windows == (7, 7, 7)
    assert model_config_from_json(to_config_json(config), "here") == config


def test_an_override_of_the_width_gives_the_heads_a_new_size() -> None:
    assert (
        resolve_model_config("nano", {"hidden_size": 384}).head_dim
        == 384 // resolve_model_config("nano", {}).num_attention_heads
    )
    assert resolve_model_config("qwen3-0.6b", {"hidden_size": 512}).head_dim == 128


def test_the_tokenizer_sets_the_vocabulary_of_a_preset_but_not_of_a_folder(tmp_path: Path) -> None:
    assert resolve_model_config("nano", {}, vocab_size=777).vocab_size == 777
    assert resolve_model_config("nano", {"vocab_size": 800}, vocab_size=777).vocab_size == 800
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve_model_config(tmp_path, {}, vocab_size=90).vocab_size == 99
    with pytest.raises(UserError, match="vocab_size is 99 and the tokenizer has 100 entries"):
        resolve_model_config(tmp_path, {}, vocab_size=100)
    with pytest.raises(UserError, match="vocab_size is 50 and the tokenizer has 100 entries"):
        resolve_model_config("nano", {"vocab_size": 50}, vocab_size=100)


def test_a_shape_can_be_given_field_by_field() -> None:
    fields = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    assert resolve_model_config(None, fields, vocab_size=99).head_dim == 8
    with pytest.raises(
        UserError,
        match=r"^model\.num_attention_heads: missing; give it, or begin from a preset \(nano",
    ):
        resolve_model_config(
            None,
            {name: size for name, size in fields.items() if name != "num_attention_heads"},
            vocab_size=99,
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "phi"},
            'model_type: "phi" is not supported; lmforge reads deepseek_v3,',
        ),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_type"),
        (
            {"rope_scaling": "x" * 5000},
            f'rope_scaling: expected an object, got "{"x" * 79}… (5,002 characters)',
        ),
        (
            {"num_local_experts": 8},
            "num_local_experts: a mixture of experts of type llama is not supported",
        ),
        (
            {"model_type": "qwen2_moe", "num_experts": 60},
            "num_experts: a mixture of experts of type qwen2_moe is",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "num_experts_per_tok: expected 1 to 8, the experts of a layer",
        ),
        (
            {"model_type": "olmoe", "clip_qkv": 8.0},
            "clip_qkv: 8.0 is not supported for olmoe; use a model without it",
        ),
        (
            {"model_type": "olmoe", "head_dim": 4},
            "head_dim: a olmoe model has hidden_size / num_attention_heads",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [99]},
            "mlp_only_layers: there is no layer 99",
        ),
        ({"model_type": "qwen3_moe", "output_router_logits": 1}, "output_router_logits"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor: 0.25",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config: quantized weights cannot be trained",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "a classifier of 2 labels is not supported",
        ),
        (
            {
                "architectures": ["LlamaForSequenceClassification"],
                "id2label": {"0": "a", "1": "b", "2": "c"},
            },
            "of 3 labels",
        ),
        (
            {"hidden_act": "gelu"},
            'hidden_act: "gelu" is not supported in a llama model; use "silu"',
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            'rope_type "dynamic" is not supported; choose one of default, lin',
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            'rope_type "linear" needs factor: expected a number above zero, got null',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0.0}},
            "needs attention_factor: expected a number",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8}},
            'rope_type "llama3" needs low_freq_factor',
        ),
        (
            {"num_key_value_heads": 4},
            "num_key_value_heads: 4 does not divide num_attention_heads 6",
        ),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "5 heads do not divide hidden_size 48; change one of the two",
        ),
        (
            {"num_attention_heads": 0},
            "num_attention_heads: expected a whole number above zero, got 0",
        ),
        ({"hidden_size": "48"}, 'hidden_size: expected a whole number above zero, got "48"'),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers: expected a whole number, got 2.0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected a number above zero, got -1"),
        ({"head_dim": 7}, "head_dim: rotary positions need an even width, got 7"),
    ],
)
def test_a_config_json_that_cannot_be_computed_is_refused_by_field(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        model_config_from_json({**LLAMA, **change}, "models/x/config.json")
    assert str(refused.value).startswith("models/x/config.json: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
)
def test_a_config_json_without_a_size_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}: missing"):
        model_config_from_json({key: value for key, value in LLAMA.items() if key != name}, "here")


@pytest.mark.parametrize(
    "name", ["scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"]
)
def test_variants_of_gpt2_that_compute_otherwise_are_refused(name: str) -> None:
    content = to_config_json(get_preset("gpt2-124m"))
    with pytest.raises(UserError, match=f"{name}: .* is not supported"):
        model_config_from_json({**content, name: name != "scale_attn_weights"}, "here")


@pytest.mark.parametrize(
    ("source", "change", "words"),
    [
        ("llama2-7b", {"qk_norm": True}, "qk_norm: True cannot be written as a llama model"),
        ("qwen3-0.6b", {"qk_norm": False}, "qk_norm: False cannot be written as a qwen3 model"),
        ("llama2-7b", {"sliding_window": 99}, "sliding_window: a llama model has none"),
        (
            "mistral-7b",
            {"attention_bias": True},
            "attention_bias, attention_output_bias: (True, True) cannot be written",
        ),
        ("mistral-7b", {"mlp_bias": True}, "mlp_bias: a mistral model has none"),
        ("qwen2.5-0.5b", {"layer_types": ["full_attention"]}, "layer_types: needs sliding_window"),
        (
            "qwen2.5-0.5b",
            {"layer_types": ["full_attention"], "sliding_window": 9},
            "layer_types: names 1 layers of 24",
        ),
        (
            "qwen2.5-0.5b",
            {"layer_types": ["chunked"] * 24, "sliding_window": 9},
            '"chunked" is not supported',
        ),
        (
            "gpt2-124m",
            {"num_key_value_heads": 4},
            "num_key_value_heads, head_dim: a gpt2 model has neither",
        ),
        (
            "gpt2-124m",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling: a gpt2 model has learned positions",
        ),
        (
            "gpt2-124m",
            {"num_attention_heads": 7},
            "7 heads do not divide hidden_size 768; change one of the two",
        ),
        (
            "nano",
            {"router_aux_loss_coef": 0.1},
            "router_aux_loss_coef: a llama model has no experts",
        ),
        (
            "nano",
            {"output_router_logits": True},
            "output_router_logits: a llama model has no experts",
        ),
        ("nano-moe", {"model_type": "llama"}, "num_experts: a llama model has no experts"),
        (
            "nano-moe",
            {"model_type": "mixtral"},
            "moe_intermediate_size: a mixtral model has none to choose; use 0",
        ),
        (
            "olmoe-1b-7b",
            {"model_type": "mixtral"},
            "norm_topk_prob: a mixtral model has none to choose; use true",
        ),
        ("nano", {"hidden_sise": 9}, "model.hidden_sise: no such field; did you mean hidden_size?"),
        ("nanno", {}, '"nanno" is neither a preset nor a folder; did you mean nano?'),
        ("llama-3-8b", {}, "did you mean llama3-8b?"),
        ("nano", {"model_type": "bert"}, 'model_type: "bert" is not supported; choose one of'),
    ],
)
def test_an_impossible_recipe_is_refused_with_the_reason(
    source: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        resolve_model_config(source, change)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        resolve_model_config(tmp_path, {})
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        resolve_model_config(tmp_path, {})
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config\.json: expected an object"):
        resolve_model_config(tmp_path, {})
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        resolve_model_config(tmp_path, {})


def test_reading_shapes_and_costs_does_not_import_torch() -> None:
    program = (
        "import sys, lmforge.core.model.config, lmforge.core.model.flops; sys.exit('torch' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_shape_is_a_value() -> None:
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert ModelConfig(**fields) == ModelConfig(**fields)
    assert hash(ModelConfig(**fields)) == hash(ModelConfig(**fields))


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_preset_becomes_another_family_by_its_model_type(kind: str) -> None:
    shape = resolve_model_config("nano", {"model_type": kind})
    assert (shape.model_type, shape.qk_norm) == (kind, kind == "qwen3")
    assert (shape.attention_bias, shape.attention_output_bias) == (kind == "qwen2", False)
    assert model_config_from_json(to_config_json(shape), "") == shape


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_attention_bias_is_that_of_every_projection(kind: str) -> None:
    shape = resolve_model_config("nano", {"model_type": kind, "attention_bias": True})
    assert (shape.attention_bias, shape.attention_output_bias) == (True, True)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of"),
        ("lfm2", {"block_multiple_of": None}, "block_multiple_of"),
        ("lfm2", {"block_ff_dim": "a"}, "block_ff_dim"),
        ("lfm2", {"block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier"),
        ("lfm2", {"full_attn_idxs": 3}, "full_attn_idxs"),
        ("lfm2", {"full_attn_idxs": [-1]}, "full_attn_idxs"),
        ("lfm2", {"tie_embedding": "yes"}, "tie_embedding"),
        ("qwen3_5_text", {"full_attention_interval": "4"}, "full_attention_interval"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval"),
        ("qwen3_5_text", {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        ("qwen3_5_text", {"layer_types": ["conv"] * 2}, 'layer_types: "conv"'),
        ("qwen3_5_text", {"linear_num_key_heads": None}, "linear_num_key_heads: expected"),
        ("qwen3", {"rope_parameters": {"rope_theta": []}}, "rope_theta"),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": "a"}}, "rope_theta"),
        ("olmo_hybrid", {"rope_parameters": 3}, "rope_parameters"),
        ("olmo_hybrid", {"linear_key_head_dim": "a"}, "linear_key_head_dim"),
        ("olmo_hybrid", {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ("olmo_hybrid", {"hidden_size": "a"}, "hidden_size"),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}, "linear_allow_neg_eigval"),
        ("kimi_linear", {}, "num_key_value_heads"),
        ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config"),
        ("kimi_linear", {"linear_attn_config": {"head_dim": "a"}}, "linear_attn_config.head_dim"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [0]}},
            "linear_attn_config: full_attn_layers and kda_layers",
        ),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, 'hybrid_override_pattern: "X"'),
        ("nemotron_h", {"layers_block_type": ["conv"]}, 'layer_types: "conv"'),
        ("nemotron_h", {"n_groups": 3}, "n_groups: 3 does not divide mamba_num_heads 128"),
        ("nemotron_h", {"ssm_state_size": "8"}, "ssm_state_size"),
        ("nemotron_h", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("nemotron_h", {"mamba_dt_limit": [0.5, 0.1]}, "time_step_limit"),
        ("smollm3", {"no_rope_layers": []}, "no_rope_layers"),
        ("kimi_linear", {"moe_renormalize": "no"}, "moe_renormalize"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings: true"),
        ("granitemoehybrid", {"mamba_d_head": 3}, "mamba_d_head: 3"),
        ("granitemoehybrid", {"mamba_n_heads": "8"}, "mamba_n_heads"),
        ("granitemoehybrid", {"mamba_n_heads": 8, "logits_scaling": "a"}, "logits_scaling"),
        ("granitemoehybrid", {"mamba_n_heads": 8, "position_embedding_type": "x"}, "position_emb"),
    ],
)
def test_what_a_hybrid_cannot_be_is_refused_by_its_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    content = {
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        **changes,
    }
    with pytest.raises(UserError, match=message):
        ModelConfig(**config_fields_from_json(content))


def test_an_infinite_limit_of_steps_is_written_as_transformers_reads_it(
    draw: random.Random, tmp_path: Path
) -> None:
    config = drawn_config("nemotron_h", draw, time_step_limit=(0.4, float("inf")))
    text = json.dumps(to_config_json(config), allow_nan=False)
    (tmp_path / "config.json").write_text(text)
    assert resolve_model_config(tmp_path, {}) == config
    assert AutoConfig.from_pretrained(tmp_path).time_step_limit == [0.4, float("inf")]
    (tmp_path / "config.json").write_text(text.replace('{"__float__": "Infinity"}', "Infinity"))
    assert resolve_model_config(tmp_path, {}) == config


def test_layers_of_an_lfm2_that_says_nothing_attend_as_in_transformers() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = ModelConfig(model_type="lfm2", intermediate_size=8, linear_conv_kernel_dim=3, **sizes)
    assert config.layer_types == ("full_attention",) * 3


def test_layers_of_a_kimi_linear_are_those_of_transformers_however_they_are_said() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    content = {"model_type": "kimi_linear", **sizes, "num_key_value_heads": 2}
    table = {"num_heads": 3, "head_dim": 5, "short_conv_kernel_size": 3}
    numbers = {"full_attn_layers": [1, 4], "kda_layers": [2, 3, 5, 6]}
    for said in ({}, {"linear_attn_config": table | numbers}, {"first_k_dense_replace": 3}):
        theirs = AutoConfig.for_model(**content, **said)
        ours = ModelConfig(**config_fields_from_json(content | said))
        assert ours.written_layer_types == theirs.layer_types
        assert [*ours.sparse_layers] == [each == "sparse" for each in theirs.mlp_layer_types]
        assert ours.linear_num_key_heads == theirs.linear_num_heads
        assert ours.linear_key_head_dim == theirs.linear_head_dim
        assert ours.linear_conv_kernel_dim == theirs.linear_conv_kernel_dim


@pytest.mark.parametrize(
    ("said", "theta"),
    [
        ({}, 10000.0),
        ({"rope_parameters": None}, 10000.0),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, None),
        ({"rope_theta": None}, None),
        ({"rope_theta": 5e5}, 5e5),
    ],
)
def test_an_olmo_hybrid_has_no_positions_only_where_their_base_is_null(
    said: dict[str, Any], theta: float | None
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    content = {"model_type": "olmo_hybrid", **sizes, **said}
    ours = ModelConfig(**config_fields_from_json(content))
    assert ours.rope_theta == theta
    assert AutoConfig.for_model(**content).rope_parameters["rope_theta"] == theta
    assert (ours.linear_num_key_heads, ours.linear_key_head_dim) == (2, 12)
