"""The last norm, the head and the loss of one micro-batch on one rank: the bytes that they save, and the time that they
take."""

from dataclasses import dataclass

from lmforge.data.labels import loss_chunk_tokens, stores_exponentials
from lmforge.plan.activations import FP32_BYTES, norm_activation_bytes
from lmforge.plan.memory import DTYPE_BYTES
from lmforge.plan.prediction.rates import Rates
from lmforge.plan.prediction.step_config import StepConfig


@dataclass(frozen=True)
class HeadCost:
    """Bytes and seconds.

    norm_bytes, loss_bytes: kept from the forward to the backward pass. forward_transient, backward_transient: while it runs.
    product_seconds, loss_seconds: of the forward pass, which for a chunked loss computes gradients at once.
    backward_seconds: of the backward pass.
    """

    norm_bytes: float
    loss_bytes: float
    forward_transient: float
    backward_transient: float
    product_seconds: float
    loss_seconds: float
    backward_seconds: float


def count_head(step_config: StepConfig, rates: Rates, parameters: int, gradient_bytes: float) -> HeadCost:
    """For a head with this number of parameters on this rank, and bytes of gradient (0 where it is frozen)."""
    tokens, width, number_bytes = step_config.tokens, step_config.model.hidden_size, step_config.dtype_bytes
    hidden = float(tokens * width * number_bytes)
    # Without the norm's output: that, or in a chunked loss its gradient, counts with the loss. A compiled norm keeps its input.
    norm = hidden / step_config.tensor
    if not step_config.compiled:
        norm = float(tokens * norm_activation_bytes(step_config.model, number_bytes) - hidden)
    # Autocast casts the head.
    cast = parameters * number_bytes if not step_config.is_fsdp and number_bytes < DTYPE_BYTES[step_config.master_dtype] else 0
    if step_config.logit_bytes is not None:
        return _whole_loss(step_config, rates, parameters // width, norm, cast)
    vocabulary = parameters // width
    fused = step_config.on_gpu and step_config.compiled
    chunk = min(tokens, loss_chunk_tokens(vocabulary, number_bytes, on_gpu=step_config.on_gpu, fused=fused))
    # On a CPU losses are computed in fp32, in place where that is the dtype of the logits.
    once = number_bytes if fused or number_bytes == FP32_BYTES else number_bytes + FP32_BYTES
    transient = float(chunk * vocabulary * once + cast)
    if not step_config.on_gpu and number_bytes < FP32_BYTES:
        # A CPU has no product of bf16 into fp32; to add it to that of earlier chunks torch widens it.
        transient += parameters * (number_bytes + (FP32_BYTES if chunk < tokens else 0))
    stored = step_config.compiled and not step_config.on_gpu
    stored = stored and stores_exponentials(step_config.model.final_logit_softcapping, step_config.tensor)
    passes = 3 * number_bytes if fused else 2 * (number_bytes + FP32_BYTES) if stored else 10 * FP32_BYTES
    products = sum(rates.product_seconds(chunk, width, vocabulary, number_bytes, backward=each) for each in (False, True))
    logits = float(tokens * vocabulary)
    return HeadCost(
        norm_bytes=norm,
        loss_bytes=hidden + gradient_bytes,
        forward_transient=transient,
        backward_transient=gradient_bytes,
        product_seconds=tokens / chunk * products,
        loss_seconds=rates.element_wise_seconds(logits * passes, FP32_BYTES * chunk * vocabulary),
        backward_seconds=4 * gradient_bytes / rates.memory,
    )


def _whole_loss(step_config: StepConfig, rates: Rates, vocabulary: int, norm: float, cast: float) -> HeadCost:
    """The cost in another program, which computes all logits, and its loss from them."""
    assert step_config.logit_bytes is not None
    kept, added = step_config.logit_bytes
    tokens, width, number_bytes = step_config.tokens, step_config.model.hidden_size, step_config.dtype_bytes
    logits = float(tokens * vocabulary)
    product, backward = (
        rates.product_seconds(tokens, width, vocabulary, number_bytes, backward=each) for each in (False, True)
    )
    # Each array is written once, and read once or twice.
    return HeadCost(
        norm_bytes=norm,
        loss_bytes=tokens * width * number_bytes + kept * logits,
        forward_transient=number_bytes * logits + cast,
        backward_transient=added * logits,
        product_seconds=product,
        loss_seconds=rates.element_wise_seconds((2 * number_bytes + 2 * kept) * logits, FP32_BYTES * logits),
        backward_seconds=backward + (kept + 2 * added + 2 * number_bytes) * logits / rates.memory,
    )
