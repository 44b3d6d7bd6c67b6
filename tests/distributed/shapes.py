"""The model configs that strategies are tried on: untied and tied heads, grouped and single key
heads, biases, GPT-2.

`make test` runs a sample of the cases in which every model config, every number of ranks and every
setting of the cases that are not compiled appears; the rest of the matrix is marked slow.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lmforge.core.model.config import ModelConfig
from lmforge.core.model.fields import Multipliers
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.model.mixture.balance import BalanceConfig
from lmforge.core.model.parametrization import Parametrization
from lmforge.core.model.setup import ModelSetup
from lmforge.lab.bench.parity import SMALL_MODEL, ParityCase, expert_parallel_cases, strategy_cases

_SIZES = {"vocab_size": 131, "hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 5}
_EVEN = {"vocab_size": 132, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
# Of linear attention; of mixtures whose experts are in groups; of latent attention.
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_GROUPED_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 18,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_LATENTS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
SHAPES = {
    "llama": SMALL_MODEL,
    "tied": ModelConfig(
        intermediate_size=42, num_key_value_heads=1, tie_word_embeddings=True, **_SIZES
    ),
    "qwen3": ModelConfig(model_type="qwen3", intermediate_size=42, qk_norm=True, **_SIZES),
    "gpt2": ModelConfig(
        model_type="gpt2", tie_word_embeddings=True, max_position_embeddings=64, **_SIZES
    ),
    # For tensor, context and pipeline parallelism: sizes that divide, with everything that is split
    # in a special way.
    "split qwen3": ModelConfig(
        model_type="qwen3", intermediate_size=44, num_key_value_heads=2, qk_norm=True, **_EVEN
    ),
    "split tied": ModelConfig(
        intermediate_size=44,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_EVEN,
    ),
    "split gpt2": ModelConfig(
        model_type="gpt2", max_position_embeddings=64, tie_word_embeddings=False, **_EVEN
    ),
    # Norms over channels that tensor parallelism splits; two kinds of rotary positions, two of
    # masks.
    # Larger weights, since a norm divides what the small ones give: its gradient has as much more
    # rounding.
    "olmo2": ModelConfig(
        model_type="olmo2",
        intermediate_size=44,
        num_key_value_heads=2,
        initializer_range=0.2,
        **_EVEN,
    ),
    "gemma3": ModelConfig(
        model_type="gemma3_text",
        intermediate_size=44,
        num_key_value_heads=2,
        query_pre_attn_scalar=5,
        initializer_range=0.2,
        sliding_window=9,
        layer_types=("sliding_attention", "full_attention") * 2,
        **_EVEN,
    ),
    # Sparse and dense layers, and a number of experts that no number of ranks divides.
    "mixture": ModelConfig(
        model_type="qwen3_moe",
        intermediate_size=44,
        num_key_value_heads=2,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        mlp_only_layers=(1,),
        initializer_range=0.2,
        **_EVEN,
    ),
    # Latents, values narrower than keys, groups of experts and shared ones, balanced in all ways.
    "latents": ModelConfig(
        model_type="deepseek_v3",
        intermediate_size=44,
        **_GROUPED_EXPERTS,
        q_lora_rank=14,
        **_LATENTS,
        rope_interleave=True,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        initializer_range=0.2,
        **_EVEN,
    ),
    # Three layers of the gated delta rule, then attention with gates and some rotated channels. With
    # a large eps, since a norm divides the small outputs of a young state by themselves.
    "hybrid": ModelConfig(
        model_type="qwen3_5_text",
        intermediate_size=44,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        **_LINEAR,
        rms_norm_eps=1e-2,
        initializer_range=0.2,
        **_EVEN,
    ),
    # The same with mixtures, and matrices in the order of key heads.
    "hybrid mixture": ModelConfig(
        model_type="qwen3_next",
        intermediate_size=44,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        **_LINEAR,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        shared_expert_intermediate_size=14,
        norm_topk_prob=True,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        mlp_only_layers=(1,),
        rms_norm_eps=1e-2,
        initializer_range=0.2,
        **_EVEN,
    ),
    # Sinks, a window in every other layer, and experts with biases.
    "sinks": ModelConfig(
        model_type="gpt_oss",
        intermediate_size=18,
        num_key_value_heads=2,
        sliding_window=9,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        initializer_range=0.2,
        **_EVEN,
    ),
    # Six matrices and beta up to 2; then attention that is normalized after, without positions. With
    # smaller weights, since the eps of its norm of states is fixed, and small.
    "olmo hybrid": ModelConfig(
        model_type="olmo_hybrid",
        intermediate_size=44,
        num_key_value_heads=2,
        rope_theta=None,
        **_LINEAR,
        layer_types=("linear_attention", "full_attention") * 2,
        initializer_range=0.1,
        **_EVEN,
    ),
    # A decay for each channel; then latents without positions; groups of experts.
    "kimi": ModelConfig(
        model_type="kimi_linear",
        intermediate_size=44,
        **_GROUPED_EXPERTS,
        **_LATENTS,
        linear_num_key_heads=4,
        linear_key_head_dim=6,
        linear_conv_kernel_dim=4,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        rms_norm_eps=1e-2,
        initializer_range=0.2,
        **_EVEN,
    ),
    # Constants for embeddings, scores, branches and logits; a mixture beside a feed-forward of one
    # matrix inwards; one group of heads.
    "constants": ModelConfig(
        model_type="granitemoehybrid",
        intermediate_size=44,
        num_key_value_heads=2,
        layer_types=("linear_attention", "full_attention") * 2,
        rope_theta=None,
        linear_num_key_heads=1,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        conv_bias=True,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        shared_expert_intermediate_size=14,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        multipliers=Multipliers(3.0, 0.1, 0.5, 2.0),
        rms_norm_eps=1e-2,
        initializer_range=0.2,
        **_EVEN,
    ),
    # One mixer a layer, none with positions: Mamba-2, attention, a feed-forward and a mixture in
    # latents. With a large eps as above.
    "state space": ModelConfig(
        model_type="nemotron_h",
        intermediate_size=44,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=("linear_attention", "mlp", "full_attention", "moe"),
        **_LINEAR,
        conv_bias=True,
        num_experts=5,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=18,
        shared_expert_intermediate_size=14,
        moe_latent_size=20,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-2,
        initializer_range=0.2,
        **_EVEN,
    ),
    # Short convolutions, and mixtures under another name than a block's `mlp`.
    "convolutions": ModelConfig(
        model_type="lfm2_moe",
        intermediate_size=44,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        num_key_value_heads=2,
        linear_conv_kernel_dim=3,
        conv_bias=True,
        layer_types=("conv", "full_attention") * 2,
        initializer_range=0.2,
        **_EVEN,
    ),
}
# Experts that ranks divide.
SHAPES["experts"] = replace(SHAPES["mixture"], num_experts=8)
SHAPES["sink experts"] = replace(SHAPES["sinks"], num_experts=8)
SHAPES["latent experts"] = replace(SHAPES["latents"], num_experts=8, n_group=4)
# What depends on the model config: what is a unit, what is flat, what is recomputed, what is split.
CASES_OF_SHAPES = (
    "ddp",
    "fsdp1 full",
    "fsdp1 hybrid-full",
    "fsdp2 full",
    "fsdp2 hybrid-full",
    "fsdp2, checkpointing selective-ops",
    "fsdp2, CPU offload",
)
CASES_OF_SPLIT_SHAPES = {
    "split qwen3": ("tensor 2", "context 2", "pipeline 2, activation", "pipeline 2, inter"),
    "split tied": ("tensor 2", "context 2"),
    "split gpt2": ("context 2", "pipeline 2, 4"),
    "mixture": (
        *CASES_OF_SHAPES,
        "fsdp2, checkpointing full",
        "tensor 2",
        "context 2",
        "pipeline 2, inter",
    ),
    "latents": (
        "fsdp1 full",
        "fsdp2, checkpointing full",
        "fsdp2, CPU",
        "tensor 2",
        "context 2",
        "pipeline 2, inter",
    ),
    **dict.fromkeys(
        (
            *("olmo2", "gemma3", "hybrid", "hybrid mixture", "convolutions", "sinks"),
            *("olmo hybrid", "kimi", "state space", "constants"),
        ),
        (*CASES_OF_SHAPES, "tensor 2", "context 2", "pipeline 2, inter"),
    ),
}
# Which cases of these are in `make test`, by number of ranks and model config.
SAMPLE: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "llama": ("one process, 2 micro-batches", "fsdp2 full-shard"),
        "gpt2": ("fsdp2, CPU offload",),
    },
    2: {
        "llama": (
            "ddp, checkpointing full, 2 micro-batches",
            "fsdp1 grad-shard",
            "fsdp2, CPU offload",
            "fsdp2, checkpointing selective-blocks",
            "fsdp2 grad-shard, 2 micro-batches",
            "context 2, checkpointing selective-ops",
        ),
        "tied": ("ddp", "fsdp2 hybrid-full-shard, groups of 1"),
        "qwen3": ("fsdp1 full-shard",),
        "gpt2": ("fsdp2 full-shard",),
        "split qwen3": ("pipeline 2, activation offload, 4 micro-batches",),
        "split tied": ("context 2",),
        "split gpt2": ("pipeline 2, 4 micro-batches",),
        "olmo2": ("tensor 2",),
        "gemma3": ("tensor 2",),
        "hybrid": ("context 2",),
        "hybrid mixture": ("tensor 2",),
        "olmo hybrid": ("tensor 2",),
        "kimi": ("context 2",),
        "state space": ("tensor 2",),
        "constants": ("pipeline 2, interleaved, 4 micro-batches",),
        "convolutions": ("fsdp2 full-shard",),
        "sinks": ("tensor 2",),
        "sink experts": ("experts 2, checkpointing full, 2 micro-batches",),
        "mixture": ("fsdp1 full-shard", "fsdp2, checkpointing full"),
        "experts": ("experts 2, checkpointing full, 2 micro-batches",),
        "latents": ("fsdp1 full-shard",),
        "latent experts": ("experts 2, checkpointing full, 2 micro-batches",),
    },
    3: {"llama": ("ddp",)},
    4: {
        "llama": (
            "fsdp1 hybrid-grad-shard, groups of 2",
            "fsdp2 hybrid-full-shard, groups of 2, 2 micro-batches",
            "context 4, grad-shard",
        ),
        "experts": ("experts 4", "experts 2 × tensor 2, no-shard"),
    },
}


def settings_of(case: ParityCase) -> set[tuple[str, object]]:
    """What distinguishes a case from others: its engine, sharding, degrees and ways to save
    memory.
    """
    options = case.options.model_dump()
    named = ("engine", "sharding", "activation_checkpointing", "cpu_offload")
    chosen = {
        name: value
        for name, value in options.items()
        if name in named or name.endswith("_parallel_degree")
    }
    return {*chosen.items(), ("accumulation", case.accumulation)}


# Cases that cut batches, sequences, blocks or the sequence dimension differently, or recompute some
# of them.
CASES_OF_DROPOUT = {
    "llama": (
        "one process",
        "ddp",
        "fsdp1 full",
        "fsdp2 full",
        "fsdp2, checkpointing",
        "fsdp2, 2 micro-batches",
        "tensor 2",
        "context 2",
        "pipeline 2",
    ),
    "split gpt2": ("context 2", "pipeline 2, 4"),
}
SAMPLE_OF_DROPOUT: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"llama": ("one process, 2 micro-batches",)},
    2: {
        "llama": (
            "fsdp1 full-shard",
            "fsdp2, checkpointing selective-ops",
            "ddp, checkpointing full, 2 micro-batches",
            "tensor 2",
            "context 2",
        ),
        "split gpt2": ("pipeline 2, 4 micro-batches",),
    },
}
SAMPLE_OF_LORA: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "llama": ("ddp", "fsdp1 full-shard", "fsdp2 full-shard", "fsdp2, CPU offload", "context 2"),
        "gpt2": ("fsdp2, checkpointing selective-ops",),
        "split gpt2": ("pipeline 2, 4 micro-batches",),
        "mixture": ("fsdp2 full-shard",),
        "experts": ("experts 2 grad-shard, CPU offload",),
    },
}

# Cases in which frozen and trained parameters share a unit, bucket or flat tensor, or are
# recomputed.
CASES_OF_LORA = {
    "llama": (
        "ddp",
        "fsdp1 full",
        "fsdp2 full",
        "fsdp2 hybrid-grad",
        "fsdp2, 2 micro-batches reduced once",
        "fsdp2, CPU offload",
        "fsdp2, checkpointing full, compiled",
        "context 2",
        "pipeline 2",
        "context 2 × pipeline 2",
    ),
    "gpt2": ("ddp", "fsdp1 grad", "fsdp2 full", "fsdp2, checkpointing selective-ops"),
    "split gpt2": ("pipeline 2",),
    "hybrid": ("context 2",),
    "mixture": ("ddp", "fsdp1 full", "fsdp2 full", "fsdp2, checkpointing full", "pipeline 2"),
    "experts": (
        "experts 2 × pipeline 2",
        "experts 2, checkpointing full, 2",
        "experts 2 grad-shard",
    ),
    "latent experts": ("experts 2, checkpointing full, 2",),
}


def shapes_on(world_size: int) -> list[str]:
    """Which model configs are tried on this number of ranks."""
    mixtures = ["mixture", "latents", "experts", "latent experts", "sink experts"]
    shapes = {
        1: ["llama", "gpt2"],
        2: list(SHAPES),
        4: ["llama", "hybrid", "convolutions", *mixtures],
        6: ["experts"],
        8: ["experts"],
    }
    return shapes.get(world_size, ["llama"])


def chosen_cases(shape: str, world_size: int) -> list[ParityCase]:
    """The cases that are tried on a model config.

    Compiled ones, which take a quarter of a minute each, on two only: one whose vocabulary tensor
    parallelism does not split, and one whose it splits.
    """
    if shape in ("experts", "sink experts", "latent experts"):
        cases = expert_parallel_cases(world_size)
        return _balanced_in_all_ways(cases) if shape == "latent experts" else cases
    cases = strategy_cases(
        world_size,
        compile_model=shape in ("llama", "olmo2", "mixture", "latents") and world_size == 2,
    )
    if shape == "llama":
        return cases
    if shape == "latents":
        cases = _balanced_in_all_ways(cases)
    if shape in ("split qwen3", "olmo2"):
        cases = [replace(case, change_model=_follow_a_base_model) for case in cases]
    return [
        case
        for case in cases
        if case.name.startswith(CASES_OF_SPLIT_SHAPES.get(shape, CASES_OF_SHAPES))
    ]


def _balanced_in_all_ways(cases: list[ParityCase]) -> list[ParityCase]:
    return [replace(case, change_model=_balance_in_all_ways) for case in cases]


def _balance_in_all_ways(model: LanguageModel) -> None:
    model.balance.config = BalanceConfig("global_batch", z_loss_coef=0.1, bias_update_speed=0.05)


def _follow_a_base_model(model: LanguageModel) -> None:
    model.setup = ModelSetup(Parametrization(4.0, 2.0))


def _few_compiled(cases: list[ParityCase], names: tuple[str, ...]) -> Iterator[ParityCase]:
    """The cases whose names begin so; of the compiled ones only that which recomputes."""
    for case in cases:
        if (
            names
            and case.name.startswith(names)
            and not (case.compile_model and case.options.activation_checkpointing == "none")
        ):
            yield case


def dropout_cases(shape: str, world_size: int) -> list[ParityCase]:
    """The cases that are tried on a model config with dropout; one of them compiled."""
    cases = _few_compiled(chosen_cases(shape, world_size), CASES_OF_DROPOUT.get(shape, ()))
    return [replace(case, change_model=_set_dropout) for case in cases]


def _set_dropout(model: LanguageModel) -> None:
    model.setup = ModelSetup(dropout=0.2)


def lora_cases(shape: str, world_size: int) -> list[ParityCase]:
    """The cases that are tried with adapters and their dropout, one of them compiled; on GPT-2 with
    NEFTune.
    """
    # Ranks of a context do not see how long a document is.
    alpha = 5.0 if shape == "gpt2" else 0.0
    cases = _few_compiled(chosen_cases(shape, world_size), CASES_OF_LORA.get(shape, ()))
    return [
        replace(case, change_model=partial(_add_lora_and_neftune, alpha=alpha)) for case in cases
    ]


# The strategies that quantized matrices are tried with, and how they are stored.
CASES_OF_QLORA = {
    "llama": (
        "ddp",
        "fsdp2 full",
        "fsdp2, checkpointing full, compiled",
        "fsdp2, CPU offload",
        "context 2",
        "pipeline 2",
    ),
    "gpt2": ("ddp", "fsdp2 full", "fsdp2, checkpointing selective-ops"),
    "mixture": ("ddp", "fsdp2 full", "fsdp2, checkpointing full"),
    # A stage that begins with a quantized matrix: no norm is before attention.
    "olmo2": ("pipeline 2",),
}
STORED: dict[str, dict[str, Any]] = {
    "llama": {"base_dtype": "nf4"},
    "gpt2": {"base_dtype": "nf4", "double_quant": True},
    "mixture": {"base_dtype": "int8"},
    "olmo2": {"base_dtype": "int8"},
}
SAMPLE_OF_QLORA: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "llama": ("ddp", "fsdp2 full-shard"),
        "gpt2": ("fsdp2 full-shard",),
        "mixture": ("fsdp2 full-shard",),
        "olmo2": ("pipeline 2, interleaved, 4 micro-batches",),
    },
}


def qlora_cases(shape: str, world_size: int) -> list[ParityCase]:
    """The cases that are tried with adapters beside matrices in 4 or 8 bits, one of them
    compiled.
    """
    cases = _few_compiled(chosen_cases(shape, world_size), CASES_OF_QLORA.get(shape, ()))
    return [
        replace(case, change_model=partial(_add_lora_and_neftune, alpha=0.0, **STORED[shape]))
        for case in cases
    ]


def _add_lora_and_neftune(model: LanguageModel, alpha: float, **stored: Any) -> None:
    model.setup = ModelSetup(neftune_noise_alpha=alpha)
    # Those of experts and routers have no dropout.
    parameters = ("gate_up_proj", "down_proj", "gate.weight") if model.config.num_experts else ()
    add_lora(
        model,
        LoraConfig(
            3, 6.0, target_parameters=parameters, dropout=0.0 if parameters else 0.1, **stored
        ),
    )


CASES = {"plain": chosen_cases, "dropout": dropout_cases, "lora": lora_cases, "qlora": qlora_cases}
SAMPLES = {
    "plain": SAMPLE,
    "dropout": SAMPLE_OF_DROPOUT,
    "lora": SAMPLE_OF_LORA,
    "qlora": SAMPLE_OF_QLORA,
}


def select_cases(kind: str, which: str, world_size: int) -> dict[str, list[ParityCase]]:
    """The cases of a kind (plain, dropout, lora, qlora) on this number of ranks, by model config.

    which: all; sample: those of `make test`; rest of SHAPE: the others of a model config.
    """
    cases = {shape: CASES[kind](shape, world_size) for shape in shapes_on(world_size)}
    if which == "all":
        return cases
    sample = SAMPLES[kind].get(world_size, {})
    if which == "sample":
        return {
            shape: [case for case in of_shape if case.name in sample.get(shape, ())]
            for shape, of_shape in cases.items()
        }
    shape = which.removeprefix("rest of ")
    return {shape: [case for case in cases[shape] if case.name not in sample.get(shape, ())]}
