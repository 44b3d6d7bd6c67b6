"""Ready-made model configs, as fields of ModelConfig.

Presets named after a published model have its config, so its weights can be loaded; `nano` and
`124m` are ours.
"""

from typing import Any

from lmforge.core.errors import UserError, did_you_mean
from lmforge.core.files.untrusted import cut
from lmforge.core.model.config import ModelConfig

_LLAMA2: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_CODELLAMA: dict[str, Any] = {**_LLAMA2, "max_position_embeddings": 16384, "rope_theta": 1e6}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_LLAMA31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA31 = {**_LLAMA3, "max_position_embeddings": 131072, "rope_scaling": _LLAMA31_SCALING}
_LLAMA32 = {"rope_scaling": {**_LLAMA31_SCALING, "factor": 32.0}, "tie_word_embeddings": True}
_LONG = {"max_position_embeddings": 32768}
_QWEN: dict[str, Any] = {"rope_theta": 1e6, "tie_word_embeddings": True}
_QWEN35: dict[str, Any] = {
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GEMMA3 = {
    **_QWEN,
    **_LONG,
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
}


def _preset(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    **fields: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        **fields,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "nano": _preset(192, 512, 4, 3, vocab_size=4096),
    "124m": _preset(768, 2048, 12, 12, vocab_size=50257, tie_word_embeddings=True),
    "1b": _preset(2048, 8192, 16, 32, 8, **_LLAMA31 | _LLAMA32),
    "gpt2-124m": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "smollm-135m": _preset(
        576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "qwen2.5-0.5b": _preset(
        896, 4864, 24, 14, 2, model_type="qwen2", vocab_size=151936, **_QWEN, **_LONG
    ),
    "qwen3-0.6b": _preset(
        1024,
        3072,
        28,
        16,
        8,
        model_type="qwen3",
        vocab_size=151936,
        max_position_embeddings=40960,
        head_dim=128,
        **_QWEN,
    ),
    "mistral-7b": _preset(
        4096, 14336, 32, 32, 8, model_type="mistral", sliding_window=4096, **_LLAMA2 | _LONG
    ),
    "olmo2-1b": _preset(
        2048,
        8192,
        16,
        16,
        model_type="olmo2",
        vocab_size=100352,
        max_position_embeddings=4096,
        rope_theta=5e5,
    ),
    # As many parameters multiply a token as in nano's feed-forward, out of four times as many.
    "nano-moe": _preset(
        *(192, 512, 4, 3),
        model_type="qwen3_moe",
        vocab_size=4096,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
    ),
    "nano-hybrid": _preset(
        *(192, 512, 4, 3),
        model_type="qwen3_5_text",
        vocab_size=4096,
        head_dim=64,
        partial_rotary_factor=0.25,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=48,
        linear_value_head_dim=48,
        linear_conv_kernel_dim=4,
    ),
    "qwen3.5-9b": _preset(
        *(4096, 12288, 32, 16, 4),
        model_type="qwen3_5_text",
        **_QWEN35,
    ),
    "qwen3.5-35b-a3b": _preset(
        *(2048, 512, 40, 16, 2),
        model_type="qwen3_5_moe_text",
        **_QWEN35,
        num_experts=256,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        router_aux_loss_coef=0.001,
    ),
    "olmoe-1b-7b": _preset(
        *(2048, 1024, 16, 16),
        model_type="olmoe",
        vocab_size=50304,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    ),
    "mixtral-8x7b": _preset(
        *(4096, 14336, 32, 32, 8),
        model_type="mixtral",
        vocab_size=32000,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.02,
    ),
    "gpt-oss-20b": _preset(
        *(2880, 2880, 24, 64, 8),
        model_type="gpt_oss",
        vocab_size=201088,
        max_position_embeddings=131072,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        router_aux_loss_coef=0.9,
    ),
    "qwen3-30b-a3b": _preset(
        *(2048, 6144, 48, 32, 4),
        model_type="qwen3_moe",
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    ),
    "deepseek-v3": _preset(
        *(7168, 18432, 61, 128),
        model_type="deepseek_v3",
        vocab_size=129280,
        max_position_embeddings=163840,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_interleave=True,
        router_aux_loss_coef=0.001,
    ),
    "gemma3-270m": _preset(640, 2048, 18, 4, 1, **_GEMMA3),
    "gemma3-1b": _preset(1152, 6912, 26, 4, 1, **_GEMMA3),
    # Of its folder, which reads images too, the language model.
    "gemma3-12b": _preset(
        *(3840, 15360, 48, 16, 8),
        **_GEMMA3
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "codellama-7b": _preset(4096, 11008, 32, 32, **_CODELLAMA | {"vocab_size": 32016}),
    "codellama-34b": _preset(8192, 22016, 48, 64, 8, **_CODELLAMA),
    "llama2-7b": _preset(4096, 11008, 32, 32, **_LLAMA2),
    "llama2-13b": _preset(5120, 13824, 40, 40, **_LLAMA2),
    "llama2-34b": _preset(8192, 22016, 48, 64, 8, **_LLAMA2),
    "llama2-70b": _preset(8192, 28672, 80, 64, 8, **_LLAMA2),
    "llama3-8b": _preset(4096, 14336, 32, 32, 8, **_LLAMA3),
    "llama3-70b": _preset(8192, 28672, 80, 64, 8, **_LLAMA3),
    "llama3.1-8b": _preset(4096, 14336, 32, 32, 8, **_LLAMA31),
    "llama3.1-405b": _preset(16384, 53248, 126, 128, 8, **_LLAMA31),
}


def get_preset(name: str) -> ModelConfig:
    """A ready-made config by its name in presets.py.

    Raises UserError, with the nearest name, when there is none.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or ";"
        raise UserError(
            f'"{cut(name)}" is neither a preset nor a folder{hint} presets: {", ".join(PRESETS)}'
        )
    return ModelConfig(**PRESETS[name])
