"""What a shape costs: parameters, floating-point operations per token, bytes at rest; and what a GPU could do at best.

Arithmetic on a ModelConfig, without torch. What a run will need in memory, and how fast it will be, is plan/'s business.
"""

import re
from dataclasses import dataclass

from lmforge.interop.transformers_config import TransformersConfig, wrapped_parameter_counts
from lmforge.model.config import ModelConfig

FLOPS_CONVENTION = (
    "FLOPs per token = 6 x (parameters without input embedding; a tied one counts, as the head) "
    "+ 12 x layers x heads x head_dim x length; no causal discount, no recomputation; of experts those that a token goes to"
)


@dataclass(frozen=True)
class ParameterCount:
    """How many numbers a model holds: all of them, those of its input embeddings, and those that multiply each token.

    `multiplied` is all without the input embeddings, which are looked up; a tied one is also the head and is counted. Of
    experts it is the share that one token goes to. `block_matrices` are the two-dimensional ones of the blocks.
    """

    total: int
    input_embedding: int
    active_matmul: int
    block_matrices: int


def parameter_count(config: ModelConfig) -> ParameterCount:
    """The parameters of a shape, a tied embedding counted once. Of a wrapped model they are counted from its modules."""
    if isinstance(config, TransformersConfig):
        return ParameterCount(*wrapped_parameter_counts(config))
    width, inner = config.hidden_size, config.intermediate_size
    matrix = config.vocab_size * width
    head = config.num_outputs * width
    unshared = 0 if config.tie_word_embeddings else head
    if config.family == "gpt2":
        attention = 4 * width * width + 4 * width
        feed_forward = 2 * width * inner + inner + width
        blocks = config.num_hidden_layers * (attention + feed_forward + 4 * width) + 2 * width
        matrices = config.num_hidden_layers * (4 * width * width + 2 * width * inner)
        places = config.max_position_embeddings * width
        return ParameterCount(blocks + matrix + unshared + places, matrix + places, blocks + head, matrices)
    queries = config.num_attention_heads * config.head_dim
    kept = config.num_key_value_heads * config.head_dim
    attention = 2 * width * queries + 2 * width * kept
    matrices = config.num_hidden_layers * (attention + 3 * width * inner)
    attention += config.attention_bias * (queries + 2 * kept) + config.attention_output_bias * width
    attention += config.qk_norm * 2 * config.head_dim
    feed_forward = 3 * width * inner + config.mlp_bias * (2 * inner + width)
    blocks = config.num_hidden_layers * (attention + feed_forward + 2 * width) + width
    return ParameterCount(blocks + matrix + unshared, matrix, blocks + head, matrices)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations that training takes per token of rows of `length` tokens, forward and backward.

    By CONVENTION, which is to be printed next to a utilisation made with it. Packed rows and sliding windows do less
    attention than it counts.
    """
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence_length
    return 6 * parameter_count(config).active_matmul + attention


# Dense figures (without sparsity) from the makers' data sheets, in FLOP/s. First match wins, so that the slower variants
# of a chip stand before the chip. Consumer chips: with fp32 accumulation.
_PEAK_FLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GH200", {"bf16": 989e12, "fp8": 1979e12, "tf32": 494e12, "fp32": 67e12}),
    ("GB200", {"bf16": 2500e12, "fp8": 5000e12, "tf32": 1250e12, "fp32": 80e12}),
    ("B200", {"bf16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12}),
    ("H200 NVL", {"bf16": 835e12, "fp8": 1671e12, "tf32": 417e12, "fp32": 60e12}),
    ("H200", {"bf16": 989e12, "fp8": 1979e12, "tf32": 494e12, "fp32": 67e12}),
    ("H100 PCIe", {"bf16": 756e12, "fp8": 1513e12, "tf32": 378e12, "fp32": 51e12}),
    ("H100 NVL", {"bf16": 835e12, "fp8": 1671e12, "tf32": 417e12, "fp32": 60e12}),
    ("H100", {"bf16": 989e12, "fp8": 1979e12, "tf32": 494e12, "fp32": 67e12}),
    ("A100", {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("L40S", {"bf16": 362e12, "fp8": 733e12, "tf32": 183e12, "fp32": 91.6e12}),
    ("L40", {"bf16": 181e12, "fp8": 362e12, "tf32": 90.5e12, "fp32": 90.5e12}),
    ("L4", {"bf16": 121e12, "fp8": 242e12, "tf32": 60e12, "fp32": 30.3e12}),
    ("A40", {"bf16": 149.7e12, "tf32": 74.8e12, "fp32": 37.4e12}),
    ("A10G", {"bf16": 70e12, "tf32": 35e12, "fp32": 31.5e12}),
    ("A10", {"bf16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}),
    ("V100", {"fp16": 125e12, "fp32": 15.7e12}),
    ("T4", {"fp16": 65e12, "fp32": 8.1e12}),
    ("RTX 4090", {"bf16": 165.2e12, "fp8": 330.3e12, "tf32": 82.6e12, "fp32": 82.6e12}),
    ("RTX 3090", {"bf16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """What a device can do at best, in FLOP/s, or None where that is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it.
        dtype: of the matrix products: "fp32" (without TF32), "tf32", "bf16", "fp16" or "fp8".
    """
    for name, peaks in _PEAK_FLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            # Tensor cores of these chips run both 16-bit formats at one speed; those before them have fp16 alone.
            return peaks.get(dtype, peaks.get("bf16") if dtype == "fp16" else None)
    return None
