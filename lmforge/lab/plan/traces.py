"""Traces of what a block computes and keeps, and of what the head and its loss keep.

They are real forward and backward passes on fake tensors, without memory or values.

A block that is not compiled runs under an ActivationTracker. One that is compiled goes through
torch.compile to the two graphs that AOT autograd's partition makes of it, as inductor is given
them. All numbers are of one sequence on one rank; they are linear in the number of sequences.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lmforge.core.data.batch import Batch, Extras
from lmforge.core.errors import UserError
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.losses.objective import Objective
from lmforge.core.model.attention import AttentionMask, attend
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import LanguageModel
from lmforge.core.model.lora import add_lora
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.model.mixture.experts import MixtureOfExperts
from lmforge.core.model.modules.fused_feed_forward import FusedFeedForward
from lmforge.core.model.quantization.formats import quantized_matrices
from lmforge.core.model.rng.token_rng import TokenRng
from lmforge.core.model.setup import ModelSetup
from lmforge.core.parallel.activation_checkpointing import apply_activation_checkpointing
from lmforge.lab.plan.operators import ActivationTracker, Work, WorkCounter, graph_work, source_node
from lmforge.post.objectives.preference import PreferenceObjective, RewardModelObjective, simpo

Shapes = tuple[tuple[int, int], ...]
# Any rate traces the same.
DROPOUT_RATE = 0.1
# What tensor parallelism splits, in a config; of a mixture only the heads.
SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class TracedModel:
    """A model whose block and head are traced, as they are on one rank.

    dtype: of weights and activations. lora: its adapters. tensor: how many ranks split the
    matrices, and the sequence between them; `vocabulary` how many split the embedding and the head.
    config has one layer, but for wrapped models.
    """

    config: ModelConfig
    dtype: torch.dtype
    lora: LoraConfig | None = None
    tensor: int = 1
    vocabulary: int = 1

    def build(self) -> LanguageModel:
        """The model with one block, on the meta device."""
        config = self.config
        if config.implementation == "lmforge":
            config = copy(config.with_layers(1))
            sizes = SPLIT_SIZES[:2] if config.sparse_layers[0] else SPLIT_SIZES
            split = dict.fromkeys(sizes, self.tensor)
            for name, ranks in {**split, "vocab_size": self.vocabulary}.items():
                # Not by `replace`, which refuses what no whole model has.
                object.__setattr__(config, name, getattr(config, name) // ranks)
        model = build_model(config, "meta")
        model.set_submodule(model.blocks_name, nn.ModuleList([*model.blocks][:1]))
        if self.lora is not None:
            add_lora(model, self.lora)
        model.setup = ModelSetup(sequence_shard=(0, self.tensor))
        return model.to(self.dtype)


@dataclass(frozen=True)
class ModelShapes:
    """(rows, columns) of the parameters of a model, vectors as [size, 1].

    tables: of the embedding. trained, frozen: of a block. experts, frozen_experts: of its experts,
    which are among these. rest: of all else but the head, such as the last norm.
    quantized: (rows, bytes) of those of a block in 4 or 8 bits, and `widest` the numbers of the
    largest of these.
    """

    tables: Shapes
    trained: Shapes
    frozen: Shapes
    experts: Shapes
    frozen_experts: Shapes
    head: Shapes
    rest: Shapes
    quantized: Shapes = ()
    widest: int = 0


def is_stack(parameter: Tensor) -> bool:
    """Whether it is a stack of matrices, such as experts; the kernels of a convolution have a row."""
    return parameter.dim() > 2 and parameter.shape[1] > 1


@cache
def model_shapes(traced: TracedModel) -> ModelShapes:
    model = traced.build()

    def rows(parameter: nn.Parameter) -> int:
        # Of stacked experts those of each one too: FSDP2 shards by these where ranks do not divide
        # the experts.
        return parameter.shape[:-1].numel() if parameter.dim() == 3 else parameter.shape[0]

    def shapes(parameters: Iterable[nn.Parameter]) -> Shapes:
        return tuple((rows(each), each.numel() // rows(each)) for each in parameters)

    tables, head, block = (
        [*each.parameters()]
        for each in (nn.ModuleList(model.embeddings), model.lm_head, model.blocks)
    )
    known = {*tables, *head, *block}
    matrices = quantized_matrices(model)
    quantized = {model.get_parameter(name) for name in matrices}
    trained = [each for each in block if each.requires_grad]
    frozen = [each for each in block if not each.requires_grad and each not in quantized]
    return ModelShapes(
        shapes(tables),
        shapes(trained),
        shapes(frozen),
        shapes(each for each in trained if is_stack(each)),
        shapes(each for each in frozen if is_stack(each)),
        shapes(head),
        shapes(each for each in model.parameters() if each not in known),
        shapes(each for each in block if each in quantized),
        max((each.shape.numel() for each in matrices.values()), default=0),
    )


@dataclass(frozen=True)
class BlockTrace:
    """The cost of one sequence for a block on a rank.

    forward, backward: what the two passes compute; the backward pass also what it recomputes.
    saved_bytes: kept from the forward to the backward pass, with the block's input, which has
    `input_bytes`.
    fixed_bytes: kept too, but once for all sequences, such as weights in another dtype.
    embedded_bytes: kept before the first block, such as rotary angles, but for masks of attention.
    """

    forward: Work
    backward: Work
    saved_bytes: int
    fixed_bytes: int
    input_bytes: int
    embedded_bytes: int


@cache
def trace_block(
    traced: TracedModel,
    length: int,
    mode: str,
    *,
    compiled: bool,
    on_gpu: bool,
    has_dropout: bool = False,
) -> BlockTrace:
    """Trace a block that `mode` of activation checkpointing applies to.

    length: of the sequence, in tokens. On a GPU attention is causal and has no mask; on a CPU it
    has a dense one. Raises UserError where a model cannot be traced, such as one whose work depends
    on its data.
    """
    with fake_model(traced) as model:
        is_stacked = any(is_stack(parameter) for parameter in model.blocks.parameters())
        if is_stacked and not traced.config.num_experts:
            raise UserError(
                f"a {traced.config.model_type} model cannot be traced without data: its blocks have"
                " stacked weights, such as experts, of which a token uses some"
            )
        if has_dropout:
            model.setup = replace(model.setup, dropout=DROPOUT_RATE)
        apply_activation_checkpointing(model, mode, every=1)
        block = model.blocks[0]
        args, kwargs, embedded = _block_inputs(model, length, on_gpu, has_dropout)
        for module in block.modules():
            if on_gpu and hasattr(module, "sinks"):
                module.attend = partial(_attend_beside_sinks, module)  # type: ignore[assignment]
        if traced.tensor > 1:
            _split_sequence(block, traced.tensor)
        trace = _trace_compiled if compiled else _trace_eager
        return BlockTrace(*trace(block, args, kwargs), args[0].nbytes, embedded)


@contextmanager
def fake_model(traced: TracedModel) -> Iterator[LanguageModel]:
    """The model with weights that have no memory, in a context where tensors have none."""
    model = traced.build()
    gc.freeze()  # else each count of live tensors would look at every object of this process
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models whose code is not ours
            for module in model.modules():
                module._buffers |= {
                    name: each if each is None else torch.zeros(each.shape, dtype=each.dtype)
                    for name, each in module._buffers.items()
                }
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                        module._parameters[name] = nn.Parameter(
                            fake, requires_grad=parameter.requires_grad
                        )
            yield model
    except UserError:
        raise
    except Exception as problem:  # of any library's code, on tensors without values
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        model_type = traced.config.model_type
        raise UserError(
            f"a {model_type} model cannot be traced without data: {reason[0][:120]}"
        ) from problem
    finally:
        gc.unfreeze()


class _Reached(Exception):
    """Ends a forward pass at its first block."""


def _block_inputs(
    model: LanguageModel, length: int, on_gpu: bool, has_dropout: bool
) -> tuple[list[Any], dict[str, Any], int]:
    """The arguments of the first block, as the model makes them, and the bytes kept until then."""
    reached: dict[str, Any] = {}

    def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached.update(args=[*args], kwargs=kwargs)
        raise _Reached

    tracker = ActivationTracker()
    tokens = torch.zeros(1, length, dtype=torch.long)
    batch = (tokens, tokens.clone(), tokens.int())  # made before, so that it does not count
    keys = tokens.clone() if has_dropout else None
    hook = model.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with tracker:
            model(*batch, rng_keys=keys)
    except _Reached:
        pass
    hook.remove()
    args = reached["args"]
    kwargs = reached["kwargs"]
    if not args:  # all by name
        args = [kwargs.pop("hidden_states")]
    hidden = args[0]
    masks = [each.dense_mask for each in args if isinstance(each, AttentionMask)]
    of_block = [hidden, *masks, *(each.rng_keys for each in args if isinstance(each, TokenRng))]
    embedded = tracker.live_bytes() - sum(each.nbytes for each in of_block if each is not None)
    if on_gpu:
        args = [
            AttentionMask(document_ids=each.document_ids)
            if isinstance(each, AttentionMask)
            else each
            for each in args
        ]
    ranks = model.setup.sequence_shard[1]
    shape = (hidden.shape[0], hidden.shape[1] // ranks, hidden.shape[2])
    args[0] = torch.empty(shape, dtype=hidden.dtype, requires_grad=True)
    return args, kwargs, embedded


def _attend_beside_sinks(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: None
) -> Tensor:
    """What attention with sinks costs on a GPU, where heads are multiplied by a function of the
    log-sum-exp of their scores, for which a channel stands here.
    """
    attended = attend(q, k, v, mask)
    kept = (attended[..., 0].float() - module.sinks[:, None]).sigmoid().to(attended.dtype)
    return (attended * kept.unsqueeze(-1)).transpose(1, 2).flatten(2)


def _split_sequence(block: nn.Module, ranks: int) -> None:
    """Gather the sequence before each module that has matrices, and sum and scatter it after it.

    Tensor parallelism does the same.
    """
    operators: Any = torch.ops._c10d_functional_autograd

    def split(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gathered_forward(hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
            gathered = torch.ops._c10d_functional.wait_tensor(
                operators.all_gather_into_tensor(hidden, ranks, "")
            )
            whole = forward(gathered.view(1, -1, hidden.shape[-1]), *rest, **named)
            parts = whole.view(ranks, -1, whole.shape[-1])
            return torch.ops._c10d_functional.wait_tensor(
                operators.reduce_scatter_tensor(parts, "sum", ranks, "")
            )

        return gathered_forward

    for module in block.children():
        # Of a mixture the tokens are split.
        if any(parameter.dim() > 1 for parameter in module.parameters()) and not isinstance(
            module, MixtureOfExperts | FusedFeedForward
        ):
            module.forward = split(module.forward)


def _trace_eager(
    block: nn.Module, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Work, Work, int, int]:
    tracker = ActivationTracker()
    forward = WorkCounter()
    backward = WorkCounter()
    with tracker:
        hidden = args[0] + 0  # made in this context, so that it counts where it is kept
        block_args = [
            hidden,
            *(each.for_block(0) if isinstance(each, TokenRng) else each for each in args[1:]),
        ]
        with forward:
            result = block(*block_args, **kwargs)
        del hidden, block_args
        output = result if isinstance(result, Tensor) else result[0]
        fixed = tracker.live_bytes(only_of_parameters=True)
        saved = tracker.live_bytes() - fixed - output.nbytes
    gradient = torch.empty_like(output)
    with backward:
        output.backward(gradient)
    return forward.work, backward.work, saved, fixed


def _trace_compiled(
    block: nn.Module, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Work, Work, int, int]:
    # Compilers are imported where blocks are compiled.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    works = list[Work]()
    saved = 0
    fixed = 0

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        nonlocal saved, fixed
        graphs = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
        )
        works.extend(graph_work(each.graph) for each in graphs)
        output = next(iter(graphs[0].graph.find_nodes(op="output")))
        saved, fixed = _saved_bytes(
            output.args[0][num_fwd_outputs:], args[0], {each.shape for each in block.parameters()}
        )
        return graphs

    def run_as_it_is(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def traced_block(*args: Any, **kwargs: Any) -> Any:
        return block(*args, **kwargs)

    backend = aot_autograd(
        fw_compiler=run_as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    # Its graphs of other blocks would count as recompilations.
    torch._dynamo.reset_code(traced_block.__code__)
    torch.compile(traced_block, backend=backend, dynamic=False)(*args, **kwargs)
    torch._dynamo.reset_code(traced_block.__code__)
    forward, backward = works
    return forward, backward, saved, fixed


def _saved_bytes(
    nodes: list[torch.fx.Node], hidden: Tensor, parameters: set[torch.Size]
) -> tuple[int, int]:
    """Bytes (saved, fixed) of what a compiled forward pass hands to its backward pass.

    Each memory counts once. `fixed` are those that are computed from parameters alone, whose shapes
    are `parameters`. Of the block's inputs its hidden states and its own rng keys count: parameters
    are there in any case, and all blocks share the others.
    """
    saved = fixed = 0
    for node in {source_node(each) for each in nodes}:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(value.numel(), int):
            continue  # the state of random numbers that attention on a CPU keeps has no size
        own = value.shape == hidden.shape or value.dtype == torch.int64
        if node.op != "placeholder" and _is_of_parameters(node, parameters):
            fixed += value.nbytes
        elif node.op != "placeholder" or own:
            saved += value.nbytes
    return saved, fixed


def _is_of_parameters(node: torch.fx.Node, shapes: set[torch.Size]) -> bool:
    if node.op == "placeholder":
        return getattr(node.meta.get("val"), "shape", None) in shapes
    return bool(node.all_input_nodes) and all(
        _is_of_parameters(each, shapes) for each in node.all_input_nodes
    )


# Sequences of these lengths are traced: bytes grow linearly with tokens.
LENGTHS = (128, 256)
# The output of the head that a loss reads: the cross-entropy of tokens, whose gradients the forward
# pass computes; log-probabilities of tokens, whose backward pass computes the logits again; or the
# reward of each document.
LossKind = Literal["tokens", "logprobs", "rewards"]
OBJECTIVES: dict[LossKind, Objective] = {
    "tokens": NextTokenObjective(),
    "logprobs": PreferenceObjective(partial(simpo, beta=1.0, gamma=0.0), uses_reference=False),
    "rewards": RewardModelObjective(center_rewards_coefficient=0.0),
}


@dataclass(frozen=True)
class HeadTrace:
    """Bytes per token that the norm and the loss keep; and those of the head's gradient."""

    norm_bytes: float
    loss_bytes: float
    gradient_bytes: float


@cache
def trace_head(traced: TracedModel, loss: LossKind, *, is_trained: bool) -> HeadTrace:
    """Trace the head with its loss. is_trained: the head's weights are trained."""
    norm = list[int]()
    whole = list[int]()
    with fake_model(traced) as model:
        model.set_submodule(model.blocks_name, nn.ModuleList())
        for embedding in model.embeddings:
            embedding.requires_grad_(True)  # as hidden states do, also where weights are frozen
        model.lm_head.requires_grad_(is_trained)
        for length in LENGTHS:
            tokens = torch.zeros(1, length, dtype=torch.long)
            extras = Extras(margins=torch.zeros(1, length))
            batch = Batch(tokens, tokens.clone(), tokens.clone(), tokens.int(), extras=extras)
            tracker = ActivationTracker()
            with tracker:
                normed = model(batch.tokens, batch.positions, batch.document_ids)
                norm.append(tracker.live_bytes() - normed.nbytes)
            del normed
            tracker = ActivationTracker()
            with tracker:
                total = OBJECTIVES[loss].loss(model, batch)
                whole.append(tracker.live_bytes())
            del total
    tokens_more = LENGTHS[1] - LENGTHS[0]
    norm_bytes, all_bytes = ((each[1] - each[0]) / tokens_more for each in (norm, whole))
    return HeadTrace(norm_bytes, all_bytes - norm_bytes, whole[0] - all_bytes * LENGTHS[0])
