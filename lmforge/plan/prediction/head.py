"""The last norm, the head and the loss of a micro-batch on a rank: the bytes that they hold, and the time that they take."""

from dataclasses import dataclass

from lmforge.data.labels import loss_chunk_tokens, stores_exponentials
from lmforge.plan.head_trace import trace_head
from lmforge.plan.memory import DTYPE_BYTES
from lmforge.plan.prediction.block import traced_model
from lmforge.plan.prediction.rates import Rates
from lmforge.plan.prediction.step_config import StepConfig

FP32_BYTES = 4  # losses and the head's gradient are in fp32, whatever the compute dtype


@dataclass(frozen=True)
class HeadCost:
    """Bytes and seconds.

    norm_bytes, loss_bytes: kept from the forward to the backward pass. forward_transient, backward_transient: while it runs.
    product_seconds, loss_seconds: of the forward pass, which for a loss of tokens computes gradients at once.
    backward_seconds: of the backward pass. scoring_seconds: of a forward pass without gradients.
    """

    norm_bytes: float
    loss_bytes: float
    forward_transient: float
    backward_transient: float
    product_seconds: float
    loss_seconds: float
    backward_seconds: float
    scoring_seconds: float = 0.0


def count_head(step_config: StepConfig, rates: Rates, parameters: int) -> HeadCost:
    """For a head with this number of parameters on this rank."""
    tokens, width, number_bytes = step_config.tokens, step_config.model.hidden_size, step_config.dtype_bytes
    trace = trace_head(traced_model(step_config), step_config.loss, is_trained=step_config.trains_head)
    norm = tokens * trace.norm_bytes / step_config.tensor
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
    if not step_config.on_gpu and number_bytes < FP32_BYTES and step_config.loss == "tokens":
        # A CPU has no product of bf16 into fp32; to add it to that of earlier chunks torch widens it.
        transient += parameters * (number_bytes + (FP32_BYTES if chunk < tokens else 0))
    stored = step_config.compiled and not step_config.on_gpu
    stored = stored and stores_exponentials(step_config.model.final_logit_softcapping, step_config.tensor)
    passes = 3 * number_bytes if fused else 2 * (number_bytes + FP32_BYTES) if stored else 10 * FP32_BYTES
    logits = float(tokens * vocabulary)
    forward, backward = (
        tokens / chunk * rates.product_seconds(chunk, width, vocabulary, number_bytes, backward=each) for each in (False, True)
    )
    loss_seconds = rates.element_wise_seconds(logits * passes, FP32_BYTES * chunk * vocabulary)
    gradient = float(FP32_BYTES * parameters * step_config.trains_head)
    loss_bytes = tokens * trace.loss_bytes + trace.gradient_bytes
    if step_config.loss == "tokens":
        return HeadCost(
            norm, loss_bytes, transient, gradient, forward + backward, loss_seconds, 4 * gradient / rates.memory,
            forward + loss_seconds / 2)  # fmt: skip
    # The backward pass computes the logits of each chunk again, and then the gradients.
    hidden = float(tokens * width * number_bytes)
    again = forward + backward + loss_seconds
    return HeadCost(
        norm, loss_bytes, transient, transient + gradient + hidden, forward, loss_seconds / 2, again, forward + loss_seconds / 2
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
