"""The costs of the parts of a model on a rank for one micro-batch, in bytes and seconds.

They come from the traces of a block, and of the head with its loss. Blocks differ only in their
windows, and in whether they are a mixture of experts.
"""

from dataclasses import dataclass

from lmforge.core.data.labels import loss_chunk_tokens, stores_exponentials
from lmforge.core.losses.top_logprobs import CHUNK_TOKENS
from lmforge.core.model.blocks import Block
from lmforge.core.model.state_bytes import DTYPE_BYTES
from lmforge.core.options.activation_checkpointing import FullCheckpointing, NoCheckpointing
from lmforge.lab.plan.operators import Product, Work
from lmforge.lab.plan.prediction.rates import Rates, make_group
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.lab.plan.traces import BlockTrace, trace_block, trace_head

# The length of traces that stand for all.
LENGTH = 1024
# FLOPs of the backward pass of attention for one of its forward pass: five products for two.
BACKWARD_ATTENTION = 2.5
INT64_BYTES = 8
FP32_BYTES = 4  # losses and the head's gradient are in fp32, whatever the compute dtype
# A divergence from a teacher, by its beta (0, 1, or between): the number of fp32 arrays of logits
# that exist at once, and of bytes that its operators move for each logit. Measured.
DIVERGENCE = {0.0: (6, 200), 1.0: (7, 246)}
BETWEEN = (8, 274)

# (suffix of a name, seconds, kind of operation)
Parts = list[tuple[str, float, str]]


@dataclass(frozen=True)
class BlockCost:
    """The cost of a block.

    forward, backward: the operations of the two passes, without `recomputed`, what the backward
    pass computes again.
    saved_bytes: kept from forward to backward. recomputed_bytes: what is computed again, and then
    held too.
    input_bytes: the hidden states that the block is given. widest_bytes: the largest input of its
    products.
    dispatch_bytes: rows of tokens on their way to and from the ranks of their experts, while these
    compute.
    """

    forward: Parts
    backward: Parts
    recomputed: Parts
    saved_bytes: float
    recomputed_bytes: float
    input_bytes: float
    widest_bytes: float
    dispatch_bytes: float = 0.0


def traced_length(step_config: StepConfig) -> int:
    """The number of tokens of the sequence that is traced.

    It is a full one where there are masks, on a CPU or in a wrapped model. Elsewhere all but
    attention grows with the tokens, and one length stands for all.
    """
    if not step_config.on_gpu or step_config.model.implementation != "lmforge":
        return step_config.sequence_length
    most = step_config.model.max_sequence_length or LENGTH
    return min(LENGTH, most) // step_config.tensor * step_config.tensor


def block_trace(step_config: StepConfig, block: Block, *, checkpointed: bool) -> BlockTrace:
    mode = step_config.checkpointing
    if not checkpointed:
        mode = NoCheckpointing()
    elif not mode.keeps_operators:  # which blocks it recomputes makes no difference to a block
        mode = FullCheckpointing()
    return trace_block(
        step_config.traced_model(block),
        traced_length(step_config),
        mode.name,
        compiled=step_config.compiled,
        on_gpu=step_config.on_gpu,
        has_dropout=step_config.has_dropout,
    )


def count_block(
    step_config: StepConfig, rates: Rates, window: int | None, block: Block, checkpointed: bool
) -> BlockCost:
    """The cost of a block whose attention reaches `window` tokens back (None: all).

    checkpointed: `activation_checkpointing` applies to it.
    """
    plain, trace = (
        block_trace(step_config, block, checkpointed=each) for each in (False, checkpointed)
    )
    sequences = step_config.tokens / traced_length(step_config)
    length = step_config.sequence_length
    keys = length
    if window is not None and step_config.on_gpu:
        # The trace has the causal half, which a window may shorten.
        keys = min(length, 2 * window)
    span = keys / traced_length(step_config)
    forward, backward, again = (
        each.scaled(sequences, span) for each in (plain.forward, plain.backward, trace.backward)
    )
    saved, unchecked = (sequences * each.saved_bytes + each.fixed_bytes for each in (trace, plain))
    number_bytes = step_config.dtype_bytes
    input_bytes = sequences * trace.input_bytes
    for work in (forward, backward, again):  # each rank has as many rows of fewer experts
        work.products = [
            each._replace(experts=max(1, each.experts // step_config.expert))
            for each in work.products
        ]
    dispatched = 0.0
    if block.mixture:
        dispatched = dispatched_rows(step_config) * step_config.model.hidden_size * number_bytes
    if dispatched:  # the order of the rows that came, and its reverse
        unchecked += 2 * INT64_BYTES * dispatched_rows(step_config)
        if not checkpointed:
            saved = unchecked

    def product_seconds(work: Work, *, backward: bool = False) -> tuple[float, float]:
        """The seconds of dense products, and of those of experts."""
        seconds = [
            (each, rates.product_seconds(each, step_config.float8, backward))
            for each in work.products
        ]
        experts = sum(count for each, count in seconds if each.experts > 1)
        return sum(count for _, count in seconds) - experts, experts

    def parts(
        product: str,
        seconds: tuple[float, float],
        work: Work,
        attention_flops: float,
        *,
        backward: bool = False,
    ) -> Parts:
        head_dim = step_config.model.head_dim
        colon = ":" if backward else ""
        attention = rates.attention_seconds(attention_flops, head_dim, length, backward=backward)
        element_wise = rates.element_wise_seconds(work.moved_bytes, input_bytes)
        operations = [
            (product, seconds[0], "matrix products"),
            (f"{colon} attention", attention, "attention"),
            (f"{colon} element-wise", element_wise, "element-wise"),
        ]
        if seconds[1]:
            operations.append((f"{colon} experts", seconds[1], "products of experts"))
        return operations + _collectives(step_config, rates, block, backward)

    def of_forward(work: Work) -> Parts:
        return parts("", product_seconds(work), work, work.attention_flops)

    # Frozen weights need no gradients.
    needed = backward.product_flops / (2 * forward.product_flops)
    dense, experts = (needed * seconds for seconds in product_seconds(forward, backward=True))
    flops = BACKWARD_ATTENTION * forward.attention_flops
    return BlockCost(
        of_forward(forward),
        parts(": feed-forward", (dense, experts), backward, flops, backward=True),
        of_forward(again.beyond(backward)),
        saved,
        max(0.0, unchecked - saved) if checkpointed else 0.0,
        input_bytes,
        max(each.rows * each.inner for each in forward.products) * number_bytes,
        2.0 * dispatched,
    )


def dispatched_rows(step_config: StepConfig) -> float:
    """The rows that a rank sends for a mixture and a micro-batch.

    It gets as many where experts are equally busy.
    """
    if step_config.expert == 1:
        return 0.0
    return step_config.tokens / step_config.tensor * step_config.model.num_experts_per_tok


def _collectives(step_config: StepConfig, rates: Rates, block: Block, backward: bool) -> Parts:
    """The collectives that a block's forward or backward pass waits for."""
    parts = Parts()
    tensor = step_config.tensor
    context = step_config.context
    tokens = step_config.tokens
    number_bytes = step_config.dtype_bytes
    model = step_config.model
    if tensor > 1:
        group = make_group(tensor, 1, step_config.gpus_per_host)
        hidden_bytes = float(tokens * model.hidden_size * number_bytes)
        split = sum(not mixer.splits_tokens for mixer in block.mixers)
        seconds = 2 * split * rates.gather_seconds(hidden_bytes, group)
        # Every rank has all experts, for its own tokens.
        if block.mixture and backward and step_config.expert == 1:
            weights = sum(each.weights for each in block.mixture.linears)
            seconds += rates.all_reduce_seconds(float(weights * number_bytes), group)
        parts.append((" tensor parallel", seconds, "tensor-parallel collectives"))
    if context > 1:
        group = make_group(context, tensor, step_config.gpus_per_host)
        keys = 2 * model.num_key_value_heads * model.head_dim // tensor
        seconds = rates.gather_seconds(float(tokens * context * keys * number_bytes), group)
        parts.append((" context parallel", seconds, "context-parallel gathers"))
    if block.mixture and step_config.expert > 1:
        rows = dispatched_rows(step_config) * model.hidden_size * number_bytes
        seconds = 2 * rates.all_to_all_seconds(
            rows, make_group(step_config.expert, 1, step_config.gpus_per_host)
        )
        parts.append((" dispatch", seconds, "all-to-all of tokens"))
    return parts


def is_checkpointed(step_config: StepConfig, number: int) -> bool:
    """Return True where `activation_checkpointing` applies to block `number`, counted from 1."""
    return step_config.checkpointing.recomputes_block(
        number, step_config.options.activation_checkpointing_every
    )


def mask_bytes(step_config: StepConfig, *, only_kept: bool = False) -> int:
    """Bytes of the dense masks of a CPU, one for each window, which all blocks share.

    While one is built there are three more. only_kept: masks of compiled blocks and of blocks that
    are recomputed; others keep copies in the compute dtype.
    """
    if step_config.on_gpu:
        return 0
    windows = {
        window
        for number, window in enumerate(step_config.model.layer_windows, start=1)
        if not only_kept or step_config.compiled or is_checkpointed(step_config, number)
    }
    return len(windows) * step_config.sequence_length * step_config.tokens


def embedded_bytes(step_config: StepConfig) -> float:
    """Bytes that are kept before the first block: rotary angles, masks of attention and dropout.

    The block counts its input itself.
    """
    first = step_config.model.blocks[0]
    traced = block_trace(step_config, first, checkpointed=False).embedded_bytes
    return step_config.tokens / traced_length(step_config) * traced + mask_bytes(
        step_config, only_kept=True
    )


@dataclass(frozen=True)
class HeadCost:
    """The cost of the last norm, the head and the loss.

    norm_bytes, loss_bytes: kept from the forward to the backward pass. forward_transient,
    backward_transient: while it runs.
    product_seconds, loss_seconds: of the forward pass, which for a loss of tokens computes
    gradients at once.
    backward_seconds: of the backward pass. scoring_seconds: of a forward pass without gradients.
    """

    norm_bytes: float
    loss_bytes: float
    forward_transient: float
    backward_transient: float
    product_seconds: float
    loss_seconds: float
    backward_seconds: float
    scoring_seconds: float


def count_head(step_config: StepConfig, rates: Rates, parameters: int) -> HeadCost:
    """The cost of a head with this number of parameters on this rank."""
    tokens = step_config.tokens
    width = step_config.model.hidden_size
    number_bytes = step_config.dtype_bytes
    on_gpu = step_config.on_gpu
    compiled = step_config.compiled
    vocabulary = parameters // width
    traced = step_config.traced_model(step_config.model.blocks[0])
    trace = trace_head(traced, step_config.loss, is_trained=step_config.trains_head)
    norm = tokens * trace.norm_bytes / step_config.tensor
    # Autocast casts the head.
    cast = 0
    if not step_config.is_fsdp and number_bytes < DTYPE_BYTES[step_config.master_dtype]:
        cast = parameters * number_bytes
    distilled = step_config.distillation
    fused = on_gpu and compiled and distilled is None
    logits = float(tokens * vocabulary)
    chunk = tokens
    if step_config.logit_bytes is None:
        chunk = min(tokens, loss_chunk_tokens(vocabulary, number_bytes, on_gpu=on_gpu, fused=fused))
    if distilled is not None:
        chunk = min(chunk, CHUNK_TOKENS)
    forward, backward = (
        tokens
        / chunk
        * rates.product_seconds(Product(chunk, width, vocabulary, number_bytes), backward=each)
        for each in (False, True)
    )
    # Another program: each array is written once, and read once or twice.
    if step_config.logit_bytes is not None:
        kept, added = step_config.logit_bytes
        seconds = rates.element_wise_seconds(
            (2 * number_bytes + 2 * kept) * logits, FP32_BYTES * logits
        )
        backward += (kept + 2 * added + 2 * number_bytes) * logits / rates.memory
        loss_bytes = tokens * width * number_bytes + kept * logits
        return HeadCost(
            norm,
            loss_bytes,
            number_bytes * logits + cast,
            added * logits,
            forward,
            seconds,
            backward,
            0.0,
        )
    # On a CPU losses are computed in fp32, in place where that is the dtype of the logits.
    once = number_bytes if fused or number_bytes == FP32_BYTES else number_bytes + FP32_BYTES
    if distilled is not None:
        arrays, moved = DIVERGENCE.get(distilled.beta, BETWEEN)
        once = number_bytes + arrays * FP32_BYTES
    transient = float(chunk * vocabulary * once + cast)
    if (
        not on_gpu
        and number_bytes < FP32_BYTES
        and step_config.loss == "tokens"
        and distilled is None
    ):
        # A CPU has no product of bf16 into fp32.
        transient += parameters * number_bytes
        if chunk < tokens:  # to add it to that of earlier chunks torch widens it
            transient += parameters * FP32_BYTES
    softcap = step_config.model.final_logit_softcapping
    if distilled is None:
        moved = 10 * FP32_BYTES
        if fused:
            moved = 3 * number_bytes
        elif compiled and not on_gpu and stores_exponentials(softcap, step_config.tensor):
            moved = 2 * (number_bytes + FP32_BYTES)
    seconds = rates.element_wise_seconds(logits * moved, FP32_BYTES * chunk * vocabulary)
    if distilled is not None and distilled.teacher is not None:
        # Its logits of a chunk are computed beside the student's.
        product = Product(chunk, distilled.teacher.hidden_size, vocabulary, number_bytes)
        forward += tokens / chunk * rates.product_seconds(product)
    gradient = float(FP32_BYTES * parameters * step_config.trains_head)
    loss_bytes = tokens * trace.loss_bytes + trace.gradient_bytes
    scoring = forward + seconds / 2
    if step_config.loss == "tokens":
        update = 4 * gradient / rates.memory
        return HeadCost(
            norm, loss_bytes, transient, gradient, forward + backward, seconds, update, scoring
        )
    # The backward pass computes the logits of each chunk again, and then the gradients.
    held = transient + gradient + tokens * width * number_bytes
    again = forward + backward + seconds
    return HeadCost(norm, loss_bytes, transient, held, forward, seconds / 2, again, scoring)
