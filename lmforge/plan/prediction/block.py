"""The cost of one block for one micro-batch on one rank: its products, and the bytes that it saves and moves. Blocks are
identical, so a model is an embedding, many times a block, and a head. What a compiled block keeps was read off the partition
that torch's AOT autograd makes of it (tests/plan/test_saved_bytes.py compares the two); what an uncompiled one keeps is in
plan/activations.py.
"""

from dataclasses import dataclass

from lmforge.model.config import ModelConfig
from lmforge.model.flops import block_parameters
from lmforge.plan.activations import FP32_BYTES, RNG_KEY_BYTES, block_activation_bytes, num_mask_elements, score_bytes
from lmforge.plan.prediction.step_config import StepConfig

# Kernels that a block launches in its forward pass.
EAGER_KERNELS, COMPILED_KERNELS = 60, 20


@dataclass(frozen=True)
class Product:
    """A matrix product of a block's forward pass: [tokens, inputs] x [inputs, outputs]; `kept` by selective-ops."""

    inputs: int
    outputs: int
    kept: bool


@dataclass(frozen=True)
class BlockCost:
    """What a block costs a rank.

    parameters: of the rank's part of the block, before FSDP shards it.
    attention_flops: of the forward pass, with the causal half left out.
    forward_bytes, backward_bytes: moved by element-wise operators, which includes norms.
    saved_bytes: kept from forward to backward. recomputed_bytes: what the backward pass computes again, and then holds too.
    input_bytes: the hidden states that the block is given.
    feed_forward_bytes: the largest of its arrays [tokens, intermediate_size].
    """

    parameters: int
    products: tuple[Product, ...]
    attention_flops: float
    forward_bytes: float
    backward_bytes: float
    saved_bytes: int
    recomputed_bytes: int
    input_bytes: int
    feed_forward_bytes: int


def block_shapes(config: ModelConfig, tensor: int) -> list[tuple[int, int]]:
    """(rows, columns) of a block's parameters on a rank; vectors together, as columns of a tensor as wide as the model."""
    matrices = [(each.outputs, each.inputs) for each in block_products(config, tensor)]
    if config.family.transposed:
        matrices = [(columns, rows) for rows, columns in matrices]
    rest = block_parameters(config) // tensor - sum(rows * columns for rows, columns in matrices)
    return [*matrices, (config.hidden_size, max(1, rest // config.hidden_size))]


def block_products(config: ModelConfig, tensor: int) -> tuple[Product, ...]:
    """In the order of the forward pass, of which selective-ops keeps every second one."""
    return tuple(
        Product(
            each.inputs // (tensor if each.residual else 1),
            each.outputs // (1 if each.residual else tensor),
            kept=number % 2 == 0,
        )
        for number, each in enumerate(config.family.linears(config))
    )


def compiled_saved_bytes(config: ModelConfig, tokens: int, dtype_bytes: int, tensor: int) -> int:
    """What a compiled block keeps without checkpointing: its input, both norms' outputs, queries, keys, values, attention's
    output with its log-sum-exps, the sum of attention's branch, and the feed-forward's wide arrays."""
    width, inner = config.hidden_size, config.intermediate_size // tensor
    heads, kv_heads = config.num_attention_heads // tensor, config.num_key_value_heads // tensor
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    residual = dtype_bytes * 2 * width // tensor  # the block's input, and attention's branch
    normed = dtype_bytes * 2 * width
    is_llama = not config.family.layer_norm
    scales = (2 if is_llama else 4) * FP32_BYTES
    attention = dtype_bytes * (2 * queries + 2 * keys) + FP32_BYTES * heads
    if config.qk_norm:
        attention += dtype_bytes * (queries + keys) + FP32_BYTES * (heads + kv_heads)
    return tokens * (residual + normed + scales + attention + dtype_bytes * (3 if is_llama else 2) * inner)


def _eager_saved_bytes(step_config: StepConfig, dense_mask: bool) -> int:
    length = step_config.sequence_length // step_config.context
    model, tensor = step_config.model, step_config.tensor
    saved = block_activation_bytes(
        model, step_config.micro_batch_size, length, dtype_bytes=step_config.dtype_bytes, dense_mask=dense_mask
    )
    if tensor == 1:
        return saved
    # Between attention and feed-forward a rank has its part of the sequence; both are given all of it.
    return saved // tensor + 2 * step_config.tokens * model.hidden_size * step_config.dtype_bytes


def _kept_by_selection(step_config: StepConfig) -> int:
    """What selective-ops keeps of a block: its input, attention, and every second product; a compiled block needs no output."""
    model, tensor, number_bytes = step_config.model, step_config.tensor, step_config.dtype_bytes
    products = block_products(model, tensor)
    kept = sum(product.outputs for product in (products[:-1] if step_config.compiled else products) if product.kept)
    heads = model.num_attention_heads // tensor
    per_token = number_bytes * (model.hidden_size // tensor + kept + heads * model.head_dim) + FP32_BYTES * heads
    return step_config.tokens * per_token


def count_block(step_config: StepConfig, *, checkpointed: bool) -> BlockCost:
    """The costs of a block; `checkpointed` says whether `activation_checkpointing` applies to this one."""
    model, tensor, number_bytes, tokens = step_config.model, step_config.tensor, step_config.dtype_bytes, step_config.tokens
    width, inner = model.hidden_size, model.intermediate_size // tensor
    queries = model.num_attention_heads * model.head_dim // tensor
    keys = model.num_key_value_heads * model.head_dim // tensor
    if step_config.compiled:
        unchecked = compiled_saved_bytes(model, tokens, number_bytes, tensor)
        if step_config.stores_weights:
            heads, length = model.num_attention_heads // tensor, step_config.sequence_length // step_config.context
            scores = score_bytes(length, heads, number_bytes, dense_mask=False, stores_weights=True)
            unchecked += step_config.micro_batch_size * scores
    else:
        unchecked = _eager_saved_bytes(step_config, dense_mask=not step_config.on_gpu)
    if step_config.has_dropout:
        unchecked += 2 * tokens * width  # a byte a number of a mask
    saved, input_bytes = unchecked, tokens * width * number_bytes // tensor
    if checkpointed:
        selects = step_config.checkpointing.keeps_operators
        saved = _kept_by_selection(step_config) if selects else input_bytes
        saved += RNG_KEY_BYTES * tokens if step_config.has_dropout else 0
    # The causal half; a window shortens it further.
    window = model.layer_windows[0]
    span = step_config.sequence_length / 2 if window is None else min(window, step_config.sequence_length / 2)
    if not step_config.on_gpu:
        span = num_mask_elements(step_config.sequence_length) / step_config.sequence_length  # in chunks of queries
    # Reads and writes of each token: norms and additions of the residual stream, rotations, the gated product.
    stream, gates = width / tensor, (2 if model.family.layer_norm else 3) * inner
    if step_config.compiled:
        forward, backward = 9 * stream + 2 * (queries + keys) + gates, 25 * stream + 2 * (queries + keys) + 2 * gates
    else:
        forward, backward = 38 * stream + 12 * (queries + keys) + 5 * inner, 76 * stream + 24 * (queries + keys) + 10 * inner
    return BlockCost(
        parameters=block_parameters(model) // tensor,
        products=block_products(model, tensor),
        attention_flops=4.0 * tokens * span * queries,
        forward_bytes=tokens * forward * number_bytes,
        backward_bytes=tokens * backward * number_bytes,
        saved_bytes=saved,
        recomputed_bytes=max(0, unchecked - saved) if checkpointed else 0,
        input_bytes=input_bytes,
        feed_forward_bytes=tokens * inner * number_bytes,
    )


def is_checkpointed(step_config: StepConfig, number: int) -> bool:
    """Whether `activation_checkpointing` applies to block `number`, counted from 1."""
    return step_config.checkpointing.recomputes_block(number, step_config.options.activation_checkpointing_every)


def mask_bytes(step_config: StepConfig, *, only_kept: bool = False) -> int:
    """Bytes of the dense masks of a CPU, one for each window, which all blocks share; while one is built there are three more.
    `only_kept`: masks of compiled blocks and of blocks that are recomputed; others keep copies in the compute dtype.
    """
    windows = {
        window
        for number, window in enumerate(step_config.model.layer_windows, start=1)
        if not only_kept or step_config.compiled or is_checkpointed(step_config, number)
    }
    return 0 if step_config.on_gpu else len(windows) * step_config.sequence_length * step_config.tokens


def embedded_bytes(step_config: StepConfig) -> float:
    """What is kept before the first block, which counts its input itself: rotary angles, masks of attention and dropout."""
    tokens, width = step_config.tokens, step_config.model.hidden_size
    angles = FP32_BYTES * step_config.model.head_dim * tokens if not step_config.model.family.learned_positions else 0
    dropout = tokens * width if step_config.has_dropout else 0
    return float(angles + dropout + mask_bytes(step_config, only_kept=True))
