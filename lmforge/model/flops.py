"""What a model costs: parameters, floating-point operations per token, bytes at rest; and the peak FLOP/s of GPUs.

Arithmetic on a ModelConfig, without torch. What a run needs in memory, and how fast it will be, is estimated in plan/.
"""

import re
from dataclasses import dataclass

from lmforge.model.config import ModelConfig

FLOPS_CONVENTION = (
    "FLOPs per token = 6 x (parameters without input embedding; a tied one counts, as the head) "
    "+ 12 x layers x heads x head_dim x length; no causal discount, no recomputation; of experts those that a token goes to"
)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model: all, those of its input embeddings, and those in matrix products with each token.

    `active_matmul` leaves out the input embeddings, which are looked up; a tied one is also the head and is counted. Of
    experts it has the fraction that one token is routed to. `block_matrices` counts the 2-D parameters of the blocks.
    """

    total: int
    input_embedding: int
    active_matmul: int
    block_matrices: int


def parameter_count(config: ModelConfig) -> ParameterCount:
    """The parameters of a model, a tied embedding counted once. Of a wrapped model they are counted from its modules."""
    counted = config.counted_parameters()
    if counted is not None:
        return ParameterCount(*counted)
    gpt2, layers = config.family == "gpt2", config.num_hidden_layers
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = layers * width * (2 * (queries + keys) + (2 if gpt2 else 3) * inner)
    if gpt2:
        vectors = 5 * width + inner
        norms = (2 * layers + 1) * 2 * width
    else:
        vectors = config.attention_bias * (queries + 2 * keys) + config.attention_output_bias * width
        vectors += config.mlp_bias * (2 * inner + width) + config.qk_norm * 2 * config.head_dim
        norms = (2 * layers + 1) * width
    blocks = matrices + layers * vectors + norms
    head = config.num_outputs * width
    embeddings = width * (config.vocab_size + (config.max_position_embeddings if gpt2 else 0))
    total = embeddings + blocks + (0 if config.tie_word_embeddings else head)
    return ParameterCount(total, embeddings, blocks + head, matrices)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of training per token, forward and backward, of sequences of `sequence_length` tokens.

    By FLOPS_CONVENTION; docs/tuning.md says what is made of it. Packed sequences and sliding windows do
    less attention than it counts.
    """
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence_length
    return 6 * parameter_count(config).active_matmul + attention


_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "tf32": 494e12, "fp32": 67e12}
_HOPPER_NVL = {"bf16": 835e12, "fp8": 1671e12, "tf32": 417e12, "fp32": 60e12}
# Dense figures (without sparsity) from the vendors' data sheets, in FLOP/s. The first match wins, so the slower variants of
# a chip stand before the chip. Consumer chips: with fp32 accumulation.
_PEAK_FLOPS = {
    "GH200": _HOPPER,
    "GB200": {"bf16": 2500e12, "fp8": 5000e12, "tf32": 1250e12, "fp32": 80e12},
    "B200": {"bf16": 2250e12, "fp8": 4500e12, "tf32": 1125e12, "fp32": 75e12},
    "H200 NVL": _HOPPER_NVL,
    "H200": _HOPPER,
    "H100 PCIe": {"bf16": 756e12, "fp8": 1513e12, "tf32": 378e12, "fp32": 51e12},
    "H100 NVL": _HOPPER_NVL,
    "H100": _HOPPER,
    "A100": {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"bf16": 362e12, "fp8": 733e12, "tf32": 183e12, "fp32": 91.6e12},
    "L40": {"bf16": 181e12, "fp8": 362e12, "tf32": 90.5e12, "fp32": 90.5e12},
    "L4": {"bf16": 121e12, "fp8": 242e12, "tf32": 60e12, "fp32": 30.3e12},
    "A40": {"bf16": 149.7e12, "tf32": 74.8e12, "fp32": 37.4e12},
    "A10G": {"bf16": 70e12, "tf32": 35e12, "fp32": 31.5e12},
    "A10": {"bf16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12},
    "V100": {"fp16": 125e12, "fp32": 15.7e12},
    "T4": {"fp16": 65e12, "fp32": 8.1e12},
    "RTX 4090": {"bf16": 165.2e12, "fp8": 330.3e12, "tf32": 82.6e12, "fp32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
}


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The peak of a device in FLOP/s; None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name() gives it.
        dtype: of the matrix products: "fp32" (without TF32), "tf32", "bf16", "fp16" or "fp8".
    """
    for name, peaks in _PEAK_FLOPS.items():
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            # Tensor cores of these chips run both 16-bit formats at the same speed; older ones have only fp16.
            return peaks.get(dtype, peaks.get("bf16") if dtype == "fp16" else None)
    return None
