"""The shapes that strategies are tried on: untied and tied heads, grouped and single key heads, biases, GPT-2."""

from dataclasses import replace

from lmforge.bench.parity import SMALL_MODEL, ParityCase, strategy_cases
from lmforge.model.config import ModelConfig
from lmforge.model.lora import LoraConfig

_SIZES = {"vocab_size": 131, "hidden_size": 30, "num_hidden_layers": 3, "num_attention_heads": 5}
_EVEN = {"vocab_size": 132, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SHAPES = {
    "llama": SMALL_MODEL,
    "tied": ModelConfig(intermediate_size=42, num_key_value_heads=1, tie_word_embeddings=True, **_SIZES),
    "qwen3": ModelConfig(model_type="qwen3", intermediate_size=42, qk_norm=True, **_SIZES),
    "gpt2": ModelConfig(model_type="gpt2", tie_word_embeddings=True, max_position_embeddings=64, **_SIZES),
    # For tensor, context and pipeline parallelism: sizes that divide, with all that is split in a way of its own.
    "split qwen3": ModelConfig(model_type="qwen3", intermediate_size=44, num_key_value_heads=2, qk_norm=True, **_EVEN),
    "split tied": ModelConfig(
        intermediate_size=44,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        **_EVEN,
    ),
    "split gpt2": ModelConfig(model_type="gpt2", max_position_embeddings=64, tie_word_embeddings=False, **_EVEN),
}
# What a shape can change: what is a unit, what is flat, what is recomputed, what is split.
CASES_OF_SHAPES = (
    "ddp",
    "fsdp1 full",
    "fsdp1 hybrid-full",
    "fsdp2 full",
    "fsdp2 hybrid-full",
    "fsdp2, recompute op",
    "fsdp2, offload",
)
CASES_OF_SPLIT_SHAPES = {
    "split qwen3": ("tensor 2", "context 2", "pipeline 2, inter"),
    "split tied": ("tensor 2", "context 2"),
    "split gpt2": ("context 2", "pipeline 2, 4"),
}

# Those that cut batches, rows, blocks or the sequence in a way of their own, or compute a part of them again.
CASES_OF_DROPOUT = {
    "llama": (
        "one process",
        "ddp",
        "fsdp1 full",
        "fsdp2 full",
        "fsdp2, recompute",
        "fsdp2, 2 micro-batches",
        "fsdp2, compiled, recompute",
        "tensor 2",
        "context 2",
        "pipeline 2",
    ),
    "split gpt2": ("context 2", "pipeline 2, 4"),
}

# Those in which frozen and trained parameters meet in one unit, bucket or flat tensor, or are computed again.
CASES_OF_LORA = {
    "llama": (
        "ddp",
        "fsdp1 full",
        "fsdp2 full",
        "fsdp2 hybrid-grad",
        "fsdp2, 2 micro-batches reduced once",
        "fsdp2, offload",
        "fsdp2, compiled, recompute",
        "context 2",
    ),
    "gpt2": ("ddp", "fsdp1 grad", "fsdp2 full", "fsdp2, recompute op"),
}


def shapes_on(ranks: int) -> list[str]:
    """Which shapes are tried on so many ranks."""
    return {1: ["llama", "gpt2"], 2: list(SHAPES)}.get(ranks, ["llama"])


def chosen_cases(shape: str, ranks: int) -> list[ParityCase]:
    """The cases that are tried on a shape. Compiled ones, which take a quarter of a minute each, on one shape only."""
    found = strategy_cases(ranks, compile_model=shape == "llama" and ranks == 2)
    if shape == "llama":
        return found
    return [case for case in found if case.name.startswith(CASES_OF_SPLIT_SHAPES.get(shape, CASES_OF_SHAPES))]


def dropout_cases(shape: str, ranks: int) -> list[ParityCase]:
    """The cases that are tried on a shape with dropout; one of them compiled."""
    found = [case for case in chosen_cases(shape, ranks) if case.name.startswith(CASES_OF_DROPOUT.get(shape, ()))]
    return [
        replace(case, dropout=0.2)
        for case in found
        if not case.compile_model or case.strategy.activation_checkpointing != "none"
    ]


def lora_cases(shape: str, ranks: int) -> list[ParityCase]:
    """The cases that are tried on a shape with adapters and their dropout, one of them compiled; and of GPT-2 with NEFTune."""
    chosen = CASES_OF_LORA.get(shape, ())
    found = [case for case in chosen_cases(shape, ranks) if chosen and case.name.startswith(chosen)]
    # Ranks of a context do not see how long a document is.
    alpha = 5.0 if shape == "gpt2" else 0.0
    return [
        replace(case, lora=LoraConfig(3, 6.0, dropout=0.1), neftune_noise_alpha=alpha)
        for case in found
        if not case.compile_model or case.strategy.activation_checkpointing != "none"
    ]
