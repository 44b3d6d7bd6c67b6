"""Random model configs, with a new seed each time, and sequences of packed documents for them."""

import json
import math
import random
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.fields import Multipliers
from lmforge.core.model.init_weights import init_weights
from lmforge.core.options.builtin_names import FAMILIES
from lmforge.hf.stored_experts import stored_name
from lmforge.hf.turned_experts import is_turned, turned
from tests.seeds import fresh_seed
from tests.support.near_ties import drawn_without_near_ties

MODEL_TYPES = tuple(FAMILIES)
# For transformers, whose kernel that multiplies all experts at once refuses most of the sizes that
# are drawn.
MIXTURES = (
    *("mixtral", "olmoe", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next", "minimax_m2"),
    *("lfm2_moe", "gpt_oss"),
)
ONE_BY_ONE = {"experts_implementation": "eager"}


@pytest.fixture
def draw() -> random.Random:
    """A source of randomness whose seed is printed, and with it torch's own."""
    seed = fresh_seed(32)
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes the gated delta rule token by token: in chunks, differences of long sums
    cost it up to 1e-5 where a layer forgets fast. Nemotron-H's steps have the limits that its
    config.json says, as while it decodes, and as in published code.
    """
    mixer = import_module("transformers.models.nemotron_h.modeling_nemotron_h").NemotronHMamba2Mixer
    make = mixer.__init__

    def with_limits(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        make(self, config, *args, **kwargs)
        self.time_step_limit = config.time_step_limit

    monkeypatch.setattr(mixer, "__init__", with_limits)
    for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid"):
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        monkeypatch.setattr(
            module, "torch_chunk_gated_delta_rule", module.torch_recurrent_gated_delta_rule
        )
    kimi = import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    monkeypatch.setattr(kimi, "chunk_kimi_delta_attention", kimi.recurrent_kimi_delta_attention)


def drawn_config(model_type: str, draw: random.Random, **fixed: Any) -> ModelConfig:
    """A small shape with odd sizes, and each option of its kind on or off."""
    groups, queries_each = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 5])
    least = 2 if model_type == "olmo_hybrid" else 1
    layers = fixed.get("num_hidden_layers", draw.choice([least, 2, 3]))
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": draw.randrange(31, 131),
        "hidden_size": draw.choice([18, 30, 42, 54]),
        "intermediate_size": draw.randrange(17, 99),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * queries_each,
        "max_position_embeddings": draw.choice([128, 300]),
        "tie_word_embeddings": draw.random() < 0.5,
        "initializer_range": 0.05,
    }
    if model_type == "gpt2":
        fields["num_attention_heads"] = draw.choice([1, 2, 3, 6])
        fields["layer_norm_epsilon"] = draw.choice([1e-5, 1e-3])
        fields["hidden_act"] = draw.choice(["gelu_new", "gelu"])
        return ModelConfig(**fields | fixed)
    fields |= {
        "num_key_value_heads": groups,
        "head_dim": draw.choice([4, 10, 16, 22]),
        "rms_norm_eps": draw.choice([1e-5, 1e-3]),
        "rope_theta": draw.choice([10000.0, 500000.0, 77.0]),
    }
    if model_type == "nemotron_h":
        return ModelConfig(**fields | drawn_nemotron(draw, layers) | fixed)
    fields["rope_scaling"] = drawn_rope(draw)
    if model_type in ("granite", "granitemoehybrid"):
        fields["head_dim"] = 0
        fields["hidden_size"] = fields["num_attention_heads"] * draw.choice([6, 12])
        fields["attention_bias"] = fields["attention_output_bias"] = draw.random() < 0.5
        # Scores as large as those by 1 / sqrt(head_dim): larger ones magnify rounding.
        scale, *others = draw.uniform(0.05, 0.25), *(draw.uniform(0.3, 3.0) for _ in range(3))
        fields["multipliers"] = Multipliers(others[0], scale, *others[1:])
    if model_type == "granite":
        fields["mlp_bias"] = draw.random() < 0.5
    if model_type == "granitemoehybrid":
        fields |= drawn_granite(draw, layers, fields["hidden_size"])
        if draw.random() < 0.5 and not fixed.get("rope_scaling"):
            fields |= {"rope_theta": None, "rope_scaling": None}
    if model_type == "deepseek_v3":
        fields |= drawn_deepseek(draw, layers)
        return ModelConfig(**fields | {"num_key_value_heads": 0, "head_dim": 0} | fixed)
    if model_type == "kimi_linear":
        fields |= drawn_deepseek(draw, layers)
        del fields["rope_interleave"]
        types = ("linear_attention", "full_attention")
        return ModelConfig(
            **fields
            | {
                "num_key_value_heads": 0,
                "head_dim": 0,
                "rope_theta": 10000.0,
                "rope_scaling": None,
                "tie_word_embeddings": False,
                "layer_types": [*(draw.choice(types) for _ in range(layers - 1)), types[1]],
                "linear_num_key_heads": draw.choice([1, 2, 3]),
                "linear_key_head_dim": draw.choice([4, 5, 8]),
                "linear_conv_kernel_dim": draw.choice([2, 4]),
            }
            | fixed
        )
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"):
        fields |= drawn_recurrent(draw, layers)
    if model_type == "olmo_hybrid":
        del fields["partial_rotary_factor"]
        if draw.random() < 0.5:
            fields |= {"rope_theta": None, "rope_scaling": None}
        if layers > 1:  # transformers needs one that is recurrent, too
            fields["layer_types"][0] = "linear_attention"
    if model_type == "glm4_moe":
        mixture = drawn_deepseek(draw, layers)
        own = ("q_lora_rank", "kv_lora_rank", "rope_interleave", "attention_bias")
        fields |= {
            **{
                name: each
                for name, each in mixture.items()
                if name not in own and "head_dim" not in name
            },
            "head_dim": draw.choice([8, 16]),
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
            "qk_norm": draw.random() < 0.5,
            "attention_bias": draw.random() < 0.5,
            "attention_output_bias": False,
        }
    if model_type in ("lfm2", "lfm2_moe"):
        fields |= {
            "head_dim": 0,
            "hidden_size": fields["num_attention_heads"] * draw.choice([6, 10]),
            "layer_types": [
                *(draw.choice(["conv", "full_attention"]) for _ in range(layers - 1)),
                "full_attention",
            ],
            "linear_conv_kernel_dim": draw.choice([2, 3, 4]),
            "conv_bias": draw.random() < 0.5,
        }
    if model_type in MIXTURES:
        fields["num_experts"] = experts = draw.choice([1, 4, 5])
        fields["num_experts_per_tok"] = draw.randint(1, min(3, experts))
        fields["router_aux_loss_coef"] = draw.choice([0.001, 0.1])
        fields["output_router_logits"] = draw.random() < 0.5
        fields["norm_topk_prob"] = draw.random() < 0.5 or model_type in (
            "mixtral",
            "qwen3_5_moe_text",
            "minimax_m2",
            "gpt_oss",
        )
    if model_type == "minimax_m2":
        fields["head_dim"] = draw.choice([8, 16])
        fields["partial_rotary_factor"] = draw.choice([0.25, 0.5, 1.0])
    if model_type == "lfm2_moe":
        fields["moe_intermediate_size"] = draw.randrange(7, 33)
        fields["routed_scaling_factor"] = draw.choice([1.0, 2.5])
        fields["first_k_dense_replace"] = draw.randint(0, layers)
    if model_type in ("qwen3_5_moe_text", "qwen3_next"):
        fields["moe_intermediate_size"] = draw.randrange(7, 33)
        fields["shared_expert_intermediate_size"] = draw.randrange(7, 33)
    if model_type in ("qwen3_moe", "qwen3_next"):
        fields["moe_intermediate_size"] = draw.randrange(7, 33)
        fields["decoder_sparse_step"] = draw.choice([1, 2])
        fields["mlp_only_layers"] = draw.sample(range(layers), draw.choice([0, 0, 1]))
        sparse = {*range(fields["decoder_sparse_step"] - 1, layers, fields["decoder_sparse_step"])}
        # transformers fails with them where no layer is a mixture.
        fields["output_router_logits"] &= bool(sparse.difference(fields["mlp_only_layers"]))
    if model_type == "olmoe":
        fields["head_dim"] = 0
        fields["hidden_size"] = fields["num_attention_heads"] * draw.choice([6, 10])
    if model_type in (
        *("llama", "qwen3", "olmo2", "olmo3", "gemma3_text", "olmoe", "qwen3_moe", "seed_oss"),
        *("smollm3", "gpt_oss"),
    ):
        fields["attention_bias"] = fields["attention_output_bias"] = draw.random() < 0.5
    if model_type == "seed_oss":
        fields["attention_output_bias"] = draw.random() < 0.5
    if model_type in ("llama", "seed_oss", "smollm3"):
        fields["mlp_bias"] = draw.random() < 0.5
    if model_type in ("llama", "olmo2", "gemma3_text"):
        fields["hidden_size"] = fields["num_attention_heads"] * draw.choice([3, 5, 6])
    if model_type in ("olmo3", "smollm3"):
        fields["head_dim"] = 0
        fields["hidden_size"] = fields["num_attention_heads"] * draw.choice([4, 6])
    if model_type == "smollm3":
        fields["no_rope_layers"] = [draw.choice([0, 1]) for _ in range(layers)]
    if model_type == "qwen2":
        fields["attention_bias"] = True
    if model_type == "gemma3_text":
        fields["query_pre_attn_scalar"] = draw.choice([fields["head_dim"], 7])
        fields["final_logit_softcapping"] = draw.choice([None, 2.0])
        fields["rope_local_base_freq"] = draw.choice([10000.0, 55.0])
    by_layer = ("qwen2", "qwen3", "gemma3_text", "olmo3", "exaone4", "smollm3", "gpt_oss")
    if (
        model_type in (*by_layer, "mistral", "mixtral", "qwen3_moe") and draw.random() < 0.7
    ) or model_type == "olmo3":
        fields["sliding_window"] = draw.randrange(2, 20)
        if model_type in by_layer:
            fields["layer_types"] = [
                draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)
            ]
    return ModelConfig(**fields | fixed)


def drawn_recurrent(draw: random.Random, layers: int) -> dict[str, Any]:
    """The fields of models with layers of the gated delta rule."""
    key_heads = draw.choice([1, 2, 3])
    return {
        # transformers needs one that sees everything.
        "layer_types": [
            *(draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 1)),
            "full_attention",
        ],
        "head_dim": draw.choice([8, 16]),
        "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 6, 8]),
        "linear_value_head_dim": draw.choice([3, 8]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
        "attention_bias": (bias := draw.random() < 0.5),
        "attention_output_bias": bias,
    }


def drawn_mamba(draw: random.Random) -> dict[str, Any]:
    """The fields of layers of Mamba-2."""
    groups = draw.choice([1, 2, 3])
    return {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([5, 8]),
        "linear_value_head_dim": draw.choice([4, 6]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
        "conv_bias": draw.random() < 0.7,
        "time_step_limit": draw.choice([(0.0, math.inf), (0.4, 60.0), (0.3, 0.8)]),
    }


def drawn_granite(draw: random.Random, layers: int, width: int) -> dict[str, Any]:
    """The fields of Granite 4 beside those of attention."""
    experts = draw.choice([0, 1, 4, 5])
    return {
        **drawn_mamba(draw),
        # Mamba-2's channels are a multiple of the width; transformers needs a layer that attends.
        "linear_num_key_heads": draw.choice([1, 3]),
        "linear_num_value_heads": 6,
        "linear_value_head_dim": draw.choice([1, 2]) * width // 6,
        "layer_types": [
            *(draw.choice(["linear_attention", "full_attention"]) for _ in range(layers - 1)),
            "full_attention",
        ],
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(min(1, experts), min(3, experts)),
        "shared_expert_intermediate_size": draw.randrange(7, 33),
        "router_aux_loss_coef": draw.choice([0.001, 0.1]),
        "output_router_logits": experts > 0 and draw.random() < 0.5,
        "norm_topk_prob": True,
    }


def drawn_nemotron(draw: random.Random, layers: int) -> dict[str, Any]:
    """The fields of Nemotron-H."""
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    # transformers needs one that attends.
    types = [*(draw.choice(kinds) for _ in range(layers - 1)), "full_attention"]
    mixture = {
        name: value
        for name, value in drawn_deepseek(draw, layers).items()
        if name.startswith(("num_experts", "n_", "topk", "norm_", "routed", "router", "output_r"))
    }
    return {
        **drawn_mamba(draw),
        **mixture,
        "moe_intermediate_size": draw.randrange(7, 33),
        "shared_expert_intermediate_size": draw.randrange(7, 33),
        "moe_latent_size": draw.choice([0, 12]),
        "layer_types": types,
        **({} if "moe" in types else {"num_experts": 0}),
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def drawn_deepseek(draw: random.Random, layers: int) -> dict[str, Any]:
    """The fields that only DeepSeek-V3 has."""
    groups, size = draw.choice([(1, 4), (1, 5), (2, 3), (3, 2)])
    kept = draw.randint(1, groups)
    return {
        "num_experts": groups * size,
        "num_experts_per_tok": draw.randint(1, min(3, kept * size)),
        "n_group": groups,
        "topk_group": kept,
        "n_shared_experts": draw.choice([1, 2]),
        "moe_intermediate_size": draw.randrange(7, 33),
        "first_k_dense_replace": draw.randint(0, layers),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "router_aux_loss_coef": draw.choice([0.001, 0.1]),
        "output_router_logits": draw.random() < 0.5,
        "q_lora_rank": draw.choice([0, 14]),
        "kv_lora_rank": draw.choice([6, 12]),
        "qk_nope_head_dim": draw.choice([3, 10]),
        "qk_rope_head_dim": draw.choice([4, 6]),
        "v_head_dim": draw.choice([5, 16]),
        "rope_interleave": draw.random() < 0.7,
        "attention_bias": draw.random() < 0.5,
    }


def drawn_rope(draw: random.Random) -> dict[str, Any] | None:
    """A table of rotary positions as in a config.json."""
    linear = {"type": "linear", "factor": draw.uniform(1.5, 9)}
    return draw.choice([None, linear, _llama3(draw), _yarn(draw), _yarn(draw)])


def _yarn(draw: random.Random) -> dict[str, Any]:
    table = {
        "rope_type": "yarn",
        "factor": draw.uniform(1.5, 9),
        "original_max_position_embeddings": draw.choice([16, 64]),
    }
    options = {
        "beta_fast": draw.uniform(2, 40),
        "beta_slow": draw.uniform(0.5, 1.5),
        "attention_factor": draw.uniform(0.5, 1.5),
        "mscale": draw.uniform(0.5, 1.5),
        "mscale_all_dim": draw.uniform(0.5, 1.5),
    }
    return table | {name: options[name] for name in draw.sample(list(options), draw.randrange(6))}


def _llama3(draw: random.Random) -> dict[str, Any]:
    bounds = {"low_freq_factor": draw.uniform(0.5, 1.5), "high_freq_factor": draw.uniform(2, 6)}
    return {
        "rope_type": "llama3",
        "factor": draw.uniform(1.5, 32),
        "original_max_position_embeddings": draw.choice([16, 64]),
    } | bounds


def shaken(model: nn.Module) -> nn.Module:
    """The model with every parameter moved away from its first value, so that no norm or bias is
    without effect.
    """
    with torch.no_grad():
        routers = (
            buffer
            for name, buffer in model.named_buffers()
            if name.endswith("e_score_correction_bias")
        )
        for each in (*model.parameters(), *routers):
            each.add_(torch.randn_like(each) * 0.2)
    return model


@dataclass
class Rows:
    """What a model's forward takes."""

    tokens: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor


def packed(
    lengths: list[list[int]], vocab_size: int, padding: int = 0, model: nn.Module | None = None
) -> Rows:
    """Rows of documents of these lengths, each row followed by `padding` slots of padding.

    With a `model` none of its routers has a near-tie with them.
    """
    if model is not None:
        return drawn_without_near_ties(
            lambda: packed(lengths, vocab_size, padding), partial(logits, model)
        )
    tokens = torch.randint(0, vocab_size, (len(lengths), sum(lengths[0]) + padding))
    positions = [
        [place for length in row for place in range(length)] + [0] * padding for row in lengths
    ]
    documents = [
        [number for number, length in enumerate(row) for _ in range(length)] + [-1] * padding
        for row in lengths
    ]
    return Rows(tokens, torch.tensor(positions), torch.tensor(documents, dtype=torch.int32))


def one_document(rows: int, length: int, vocab_size: int, model: nn.Module | None = None) -> Rows:
    """Rows that are one document each; `model` as in `packed`."""
    return packed([[length]] * rows, vocab_size, model=model)


def logits(model: nn.Module, rows: Rows) -> torch.Tensor:
    """Whole logits of whole rows."""
    with torch.no_grad():
        return model.lm_head(model(rows.tokens, rows.positions, rows.documents))  # type: ignore[operator]


def built(config: ModelConfig, seed: int = 0) -> nn.Module:
    """A model of this shape with weights that all matter."""
    print(config)
    return shaken(init_weights(build_model(config), seed))


def as_transformers_has_them(
    tensors: dict[str, torch.Tensor], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Tensors of a model by their names in memory there: of gpt-oss also those on disk."""
    if config.model_type != "gpt_oss":
        return tensors
    return {
        stored_name(name, config): turned(name, each) if is_turned(name, config) else each
        for name, each in tensors.items()
    }


def quantized(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Write the matrices of a folder's blocks in float8 as DeepSeek-V3 is published.

    Returns what they are dequantized to.
    """
    tensors, wanted = load_file(folder / "model.safetensors"), {}
    for name, weight in [*tensors.items()]:
        plain = ("mlp.gate.weight", "router.layer.weight", "conv1d.weight")
        if weight.ndim < 2 or ".layers." not in name or name.endswith(plain):
            continue
        rows, columns = weight.shape[-2:]
        blocks = [-(-size // each) for size, each in zip((rows, columns), block, strict=True)]
        scale = torch.rand(*weight.shape[:-2], *blocks) + 0.5
        full = scale.repeat_interleave(block[0], -2)[..., :rows, :]
        full = full.repeat_interleave(block[1], -1)[..., :columns]
        tensors[name] = (weight / full).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        wanted[name] = tensors[name].float() * full
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [*block],
    }
    (folder / "config.json").write_text(json.dumps(content))
    return wanted
