"""The cost of one block for one micro-batch on one rank, from its trace. Blocks differ only in their windows, so a model is an
embedding, many times a block, and a head."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from lmforge.config.activation_checkpointing import FullCheckpointing, NoCheckpointing
from lmforge.model.config import ModelConfig
from lmforge.model.lora import LoraConfig
from lmforge.plan.block_trace import BlockTrace, ModelShapes, TracedModel, model_shapes, trace_block
from lmforge.plan.operators import Work
from lmforge.plan.prediction.step_config import StepConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The length of traces that stand for all.
LENGTH = 1024
# Kernels that a block launches in its forward pass.
EAGER_KERNELS, COMPILED_KERNELS = 60, 20


@dataclass(frozen=True)
class BlockCost:
    """What a block costs a rank.

    forward, backward: what the two passes compute, without `recomputed`, what the backward pass computes again.
    saved_bytes: kept from forward to backward. recomputed_bytes: what is computed again, and then held too.
    input_bytes: the hidden states that the block is given. widest_bytes: the largest result of its products.
    """

    forward: Work
    backward: Work
    recomputed: Work
    saved_bytes: float
    recomputed_bytes: float
    input_bytes: float
    widest_bytes: float


def traced_model(step_config: StepConfig) -> TracedModel:
    """The part of the model on a rank, whose trace serves every depth."""
    return _rank_part(step_config.model, DTYPES[step_config.dtype], step_config.lora, step_config.tensor)


@cache  # a search asks often
def _rank_part(model: ModelConfig, dtype: torch.dtype, lora: LoraConfig | None, tensor: int) -> TracedModel:
    vocabulary = tensor if model.vocab_size % tensor == 0 else 1
    return TracedModel(replace(model, num_hidden_layers=1, layer_types=None), dtype, lora, tensor, vocabulary)


def shapes_of(step_config: StepConfig) -> ModelShapes:
    """The shapes of the parameters on a rank."""
    return model_shapes(traced_model(step_config))


def traced_length(step_config: StepConfig) -> int:
    """Tokens of the sequence that is traced: of a full one where there are masks, on a CPU or in a wrapped model. Elsewhere all
    but attention grows with the tokens, and one length stands for all."""
    if not step_config.on_gpu or step_config.model.implementation != "lmforge":
        return step_config.sequence_length
    most = step_config.model.max_sequence_length or LENGTH
    return min(LENGTH, most) // step_config.tensor * step_config.tensor


def block_trace(step_config: StepConfig, *, checkpointed: bool) -> BlockTrace:
    mode = step_config.checkpointing
    if not checkpointed:
        mode = NoCheckpointing()
    elif not mode.keeps_operators:  # which blocks it recomputes makes no difference to a block
        mode = FullCheckpointing()
    return trace_block(
        traced_model(step_config),
        traced_length(step_config),
        mode.name,
        compiled=step_config.compiled,
        on_gpu=step_config.on_gpu,
        has_dropout=step_config.has_dropout,
    )


def count_block(step_config: StepConfig, window: int | None, *, checkpointed: bool) -> BlockCost:
    """The costs of a block whose attention reaches `window` tokens back (None: all); `checkpointed` says whether
    `activation_checkpointing` applies to this one."""
    plain, trace = (block_trace(step_config, checkpointed=each) for each in (False, checkpointed))
    sequences, length = step_config.tokens / traced_length(step_config), step_config.sequence_length
    # On a GPU the trace has the causal half, which a window may shorten.
    keys = min(length, 2 * window) if window is not None and step_config.on_gpu else length
    span = keys / traced_length(step_config)
    forward, backward, again = (each.scaled(sequences, span) for each in (plain.forward, plain.backward, trace.backward))
    saved, unchecked = (sequences * each.saved_bytes for each in (trace, plain))
    return BlockCost(
        forward,
        backward,
        again.beyond(backward),
        saved,
        max(0.0, unchecked - saved) if checkpointed else 0.0,
        sequences * trace.input_bytes,
        max(rows * columns for rows, _, columns in forward.products) * step_config.dtype_bytes,
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
    traced = block_trace(step_config, checkpointed=False).embedded_bytes
    return step_config.tokens / traced_length(step_config) * traced + mask_bytes(step_config, only_kept=True)
