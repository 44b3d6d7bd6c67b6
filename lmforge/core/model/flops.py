"""What a model costs: parameters, and floating-point operations per token.

Arithmetic on a ModelConfig, without torch. What a run needs in memory, and how fast it will be, is
estimated in plan/, which has the peak FLOP/s of GPUs too (lab/plan/hardware.py).
"""

import math
from dataclasses import dataclass

from lmforge.core.errors import format_count
from lmforge.core.model.blocks import Block
from lmforge.core.model.config import ModelConfig

FLOPS_CONVENTION = (
    "FLOPs per token = 6 x (parameters without input embedding; a tied one counts, as the head) +"
    " 12 x layers with attention x heads x head_dim x length; no causal discount, no recomputation;"
    " of experts those that a token goes to; head_dim of latent attention is the mean of those of"
    " queries and values; of a recurrent layer 3 x what a token does with its state"
)


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model: all, those of its input embeddings, and those in matrix products with
    each token.

    `active_matmul` leaves out the input embeddings, which are looked up; a tied one is also the
    head and is counted. It has the fraction of the experts that one token is routed to.
    `block_matrices` counts the 2-D parameters of the blocks.
    """

    total: int
    input_embedding: int
    active_matmul: int
    block_matrices: int


def parameter_count(config: ModelConfig) -> ParameterCount:
    """The parameters of a model, a tied embedding counted once.

    Those of a wrapped model are counted from its modules.
    """
    counted = config.counted_parameters()
    if counted is not None:
        return ParameterCount(*counted)
    linears = [each for block in config.blocks for each in block.linears]
    matrices = sum(each.weights for each in linears)
    blocks = sum(block_parameters(config, block) for block in config.blocks)
    blocks += norm_parameters(config, config.hidden_size)
    idle = sum(
        (each.experts - config.num_experts_per_tok) * each.inputs * each.outputs
        for each in linears
        if each.experts > 1
    )
    head = config.num_outputs * config.hidden_size
    positions = config.max_sequence_length or 0
    embeddings = (config.vocab_size + positions) * config.hidden_size
    total = embeddings + blocks + (0 if config.tie_word_embeddings else head)
    return ParameterCount(total, embeddings, blocks + head - idle, matrices)


def active_parameters(config: ModelConfig) -> int:
    """The parameters that a token uses, of experts those that it goes to; with the input embedding,
    which is looked up.
    """
    count = parameter_count(config)
    tied = config.num_outputs * config.hidden_size if config.tie_word_embeddings else 0
    return count.active_matmul + count.input_embedding - tied


def describe_experts(config: ModelConfig) -> str:
    """How many experts of a mixture a token goes to, in which layers, and the parameters that it
    uses.
    """
    layers = format_count(sum(config.sparse_layers), "layer")
    each = f"{config.num_experts_per_tok} of {config.num_experts} for each token"
    return f"{each}, in {layers}, so {active_parameters(config):,} parameters are active"


def block_parameters(config: ModelConfig, block: Block) -> int:
    """The parameters of one block."""
    linears = sum(each.weights + each.bias * each.outputs for each in block.linears)
    norms = sum(norm_parameters(config, each.size) for each in block.norms(config.hidden_size))
    return linears + norms + sum(math.prod(each.shape) for each in block.vectors)


def norm_parameters(config: ModelConfig, size: int) -> int:
    """The parameters of a norm over `size` channels."""
    return 2 * size if config.family.layer_norm else size


def adapted_flops_per_token(
    config: ModelConfig, sequence_length: int, total: int, trained: int
) -> int:
    """`flops_per_token` less the gradients of frozen weights, of a model whose parameters are
    `total` with its adapters.

    A weight takes two FLOPs in the forward pass, two for the gradient of its input, and two for its
    own.
    """
    count = parameter_count(config)
    return (
        flops_per_token(config, sequence_length)
        - 2 * count.active_matmul
        + 4 * (total - count.total)
        + 2 * trained
    )


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Floating-point operations of training per token, forward and backward, of sequences of
    `sequence_length` tokens.

    By FLOPS_CONVENTION; docs/tuning.md says how it is used. Packed sequences and sliding windows do
    less attention than it counts.
    """
    channels = config.qk_head_dim + (config.v_head_dim or config.head_dim)
    attending = sum(block.attends for block in config.blocks)
    attention = 6 * attending * config.num_attention_heads * channels * sequence_length
    states = 3 * sum(mixer.state_flops for block in config.blocks for mixer in block.mixers)
    return 6 * parameter_count(config).active_matmul + attention + states
