"""A mixture of experts in place of a block's feed-forward: a router chooses a few experts for each
token.

Every token goes to all its experts; none is dropped, whatever the load. Tokens are sorted by
expert, so that each product of all experts is one kernel (grouped_mm.py), and shapes do not depend
on what was chosen.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.layers import (
    ACTIVATIONS,
    FeedForward,
    apply_replicated,
    local_weight,
    to_autocast_dtype,
    without_autocast,
)
from lmforge.core.model.mixture.balance import Balance
from lmforge.core.model.mixture.grouped_mm import grouped_linear
from lmforge.core.model.rng.token_rng import TokenRng

BIAS = "e_score_correction_bias"  # a buffer of a router


@torch.library.custom_op("lmforge::choose_experts", mutates_args=("counts",))
def choose_experts(
    scores: Tensor,
    count: int,
    is_token: Tensor | None,
    counts: Tensor,
    replayed: Tensor | None = None,
) -> Tensor:
    """The `count` experts of the highest scores [tokens, experts] of each token: int64 [tokens,
    count].

    counts: int64 [experts], to which the choices of tokens where is_token [tokens] is true are
    added; without numbers nothing is counted (no None, since torch 2.13 cannot compile an operator
    whose argument to write into is None). replayed: integers [tokens, count], the experts that were
    chosen elsewhere (rollouts), negative for tokens that have none.

    An operator of its own, whose result activation checkpointing keeps: rounding in a recomputation
    must not choose others, and nothing is counted twice.
    """
    chosen = scores.topk(count, dim=-1).indices
    if replayed is not None:
        chosen = torch.where(replayed >= 0, replayed.long(), chosen)
    if counts.numel() and is_token is not None:
        counts.scatter_add_(0, chosen.flatten(), is_token.long().repeat_interleave(count))
    return chosen


@choose_experts.register_fake
def _(
    scores: Tensor,
    count: int,
    is_token: Tensor | None,
    counts: Tensor,
    replayed: Tensor | None = None,
) -> Tensor:
    return scores.new_empty(scores.shape[0], count, dtype=torch.long)


class Router(nn.Module):
    """Chooses the experts of each token and their weights, in fp32 whatever the dtype of the model.

    weight: [experts, width]. bias: [experts], of those that have one.

    e_score_correction_bias fp32 [experts]: a buffer of those that score by sigmoids; it is added to
    the scores to choose by.
    """

    bias: Tensor | None
    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_parameter("bias", None)
        self.adapters = nn.ModuleDict()
        self.count = config.num_experts_per_tok
        self.normalized = config.norm_topk_prob
        self.epsilon = config.family.router_epsilon
        self.scaling = config.routed_scaling_factor
        self.groups = config.n_group
        self.kept_groups = config.topk_group
        self.register_buffer(
            BIAS, torch.zeros(config.num_experts) if config.family.sigmoid_router else None
        )

    def forward(
        self,
        x: Tensor,
        is_token: Tensor | None = None,
        counts: Tensor | None = None,
        replayed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [tokens, width] → the weights, fp32, and the numbers, int64, of the experts of each
        token: [tokens, count] each; and the scores of all, and their logits: [tokens, experts]
        each.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            bias = None if self.bias is None else local_weight(self.bias).to(dtype)
            logits = linear(x.to(dtype), local_weight(self.weight).to(dtype), bias)
            logits = add_adapter(self, "weight", logits, x.to(dtype))
        scores = (
            logits.softmax(dim=-1) if self.e_score_correction_bias is None else logits.sigmoid()
        )
        counts = scores.new_empty(0, dtype=torch.long) if counts is None else counts
        chosen = choose_experts(
            self._to_choose_by(scores.detach()), self.count, is_token, counts, replayed
        )
        weights = scores.gather(1, chosen)
        if self.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights if self.scaling == 1 else weights * self.scaling, chosen, scores, logits

    def _to_choose_by(self, scores: Tensor) -> Tensor:
        """The scores to choose by: with the bias, and without the experts of all but the groups
        whose two best are the best together.
        """
        if self.e_score_correction_bias is not None:
            scores = scores + local_weight(self.e_score_correction_bias)
        if self.groups == 1:
            return scores
        groups = scores.unflatten(-1, (self.groups, -1))
        kept = groups.topk(2, dim=-1).values.sum(-1).topk(self.kept_groups, dim=-1).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        return groups.masked_fill(left_out.unsqueeze(-1), -math.inf).flatten(-2)

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """The bias keeps its dtype, as in transformers: its updates are small beside it."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if (
            before is not None
            and (after := self.e_score_correction_bias) is not None
            and after.dtype != before.dtype
        ):
            self.e_score_correction_bias = before.to(after.device)
        return self


class Experts(nn.Module):
    """The feed-forwards of all experts, stacked: gate_up_proj [experts, 2 · inner, width], first the
    gates, and down_proj [experts, width, inner]; or without gates, up_proj [experts, inner, width].
    """

    # What is cast to the compute dtype once a step.
    matrices: tuple[str, str] = ("gate_up_proj", "down_proj")
    # quantization.matrices.QuantizedMatrix of those that are.
    quantized: Mapping[str, Any] = MappingProxyType({})
    # Of expert parallelism (core/parallel/expert_parallel.py): calls `_compute` with the rows of
    # this rank's experts.
    dispatch: Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor] | None = None

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        inwards, outwards = mixer.linears[1:3]
        self.matrices = tuple(each.name.rpartition(".")[2] for each in (inwards, outwards))  # type: ignore[assignment]
        for name, each in zip(self.matrices, (inwards, outwards), strict=True):
            stack = torch.empty(each.experts, each.outputs, each.inputs)
            self.register_parameter(name, nn.Parameter(stack))
        self.adapters = nn.ModuleDict()
        self.num_experts = config.num_experts
        self.is_gated = inwards.outputs > outwards.inputs
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [tokens, width]; weights and chosen [tokens, count] of the router → the weighted sum of
        each token's experts.
        """
        experts, order = chosen.flatten().sort(stable=True)
        inverse = inverse_permutation(order)
        ends = torch.searchsorted(
            experts, torch.arange(self.num_experts, device=x.device), right=True
        )
        rows = permute_rows(x, order, inverse, chosen.shape[1])
        if self.dispatch is None:
            out = self._compute(rows, ends.int())
        else:
            out = self.dispatch(rows, ends.diff(prepend=ends.new_zeros(1)), self._compute)
        out = permute_rows(out, inverse, order).unflatten(0, chosen.shape)
        return (out * weights.to(out.dtype).unsqueeze(-1)).sum(1)

    def _compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [rows, width], sorted by expert; ends int32 [experts]: where those of each one
        end.
        """
        inwards, outwards = self.matrices
        hidden = self._multiply(inwards, rows, ends)
        if self.is_gated:
            hidden = self._gate(*hidden.chunk(2, dim=-1))
        else:
            hidden = self.activation(hidden)
        return self._multiply(outwards, hidden, ends)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up

    def _multiply(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [rows, inputs] times the matrix of each one's expert in a stack; `ends` as in
        `_compute`.
        """
        parameter = local_weight(getattr(self, name))
        if (matrix := self.quantized.get(name)) is not None:
            out = matrix.multiply(to_autocast_dtype(rows), parameter, ends=ends)
        else:
            out = grouped_linear(rows, to_autocast_dtype(parameter), ends)
        return add_adapter(self, name, out, rows, ends)


def add_adapter(module: nn.Module, name: str, out: Tensor, *inputs: Tensor) -> Tensor:
    """`out` of a module's parameter, to which its low-rank adapter (lora.ParameterAdapter) adds, if
    there is one.
    """
    adapters: Any = module.adapters
    result: Tensor = adapters[name](out, *inputs) if name in adapters else out
    return result


class MixtureOfExperts(nn.Module):
    """A mixture of experts: what a sparse block has as its feed-forward."""

    experts_class = Experts
    # Set by Balance.
    balance: Balance | None = None
    counts: Tensor | None = None  # int64 [experts]: the choices of training steps are added
    fractions: Tensor  # fp32 [experts]: of the choices of the global batch before
    # What is chosen is added to it, int64 [sequences, length, count], while a decoder records it.
    recorded: list[Tensor] | None = None

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self._router = mixer.router
        self.add_module(mixer.router, Router(config))
        self.experts = self.experts_class(config, mixer)
        self._latents = mixer.latents
        for each in mixer.linears:
            name = each.name.rpartition(".")[2]
            if name in mixer.latents:
                self.add_module(name, nn.Linear(each.inputs, each.outputs, bias=False))
        self._shared = mixer.shared
        self._shared_gate = mixer.shared_gate
        if mixer.shared:
            self.add_module(
                mixer.shared, FeedForward(config, mixer, f"{mixer.name}.{mixer.shared}")
            )
        if mixer.shared_gate:
            self.add_module(mixer.shared_gate, nn.Linear(config.hidden_size, 1, bias=False))

    def get_router(self) -> Router:
        router: Router = getattr(self, self._router)
        return router

    def forward(
        self,
        x: Tensor,
        token_rng: TokenRng | None = None,
        is_token: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor:
        """x [sequences, length, width] → the same shape.

        There is no dropout between the products of an expert.

        is_token: [sequences, length], false for padding, which is not balanced. routed_experts:
        [sequences, length, count], to be taken in place of the router's own choice where they are
        not negative; their weights are the router's.
        """
        tokens = x.flatten(0, 1)
        if not torch.is_grad_enabled():
            is_token = None  # only training steps are balanced and counted
        counted = (None, None) if is_token is None else (is_token.flatten(), self.counts)
        replayed = None if routed_experts is None else routed_experts.flatten(0, 1)
        weights, chosen, scores, logits = self.get_router()(tokens, *counted, replayed)
        if self.recorded is not None:
            self.recorded.append(chosen.unflatten(0, x.shape[:2]))
        if self.balance is not None and is_token is not None:
            weights = self.balance.add_to(weights, scores, logits, chosen, is_token, self.fractions)
        run = (
            self.experts
            if self.experts.dispatch is None
            else partial(_run_uncompiled, self.experts)
        )
        before, after = self._latents or ("", "")
        if before:
            tokens = apply_replicated(getattr(self, before), tokens, token_rng)
        mixed = run(tokens, weights, chosen)
        if after:
            mixed = apply_replicated(getattr(self, after), mixed, token_rng)
        mixed = mixed.view_as(x)
        if not self._shared:
            return mixed
        shared: Tensor = getattr(self, self._shared)(x, token_rng=token_rng)
        if self._shared_gate:
            gate = apply_replicated(getattr(self, self._shared_gate), x, token_rng)
            shared = gate.sigmoid() * shared
        return mixed + shared


@torch.compiler.disable
def _run_uncompiled(experts: Experts, *inputs: Tensor) -> Tensor:
    """How many rows a rank gets changes from step to step, and its experts are a unit of FSDP:
    graphs end before them.
    """
    result: Tensor = experts(*inputs)
    return result


def inverse_permutation(order: Tensor) -> Tensor:
    """int64 [rows]: where each row of a permutation has come to.

    A sort would be the slower by 3 to 10 times.
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """Row i is row order[i] // copies of x [rows, width]; `inverse` is the reverse of the
    permutation `order`.
    """
    result: Tensor = _PermutedRows.apply(x, order, inverse, copies)
    return result


class _PermutedRows(torch.autograd.Function):
    """Rows in another order.

    The gradient is a gather and a sum; that of an index would be added up in an order that may
    change from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
