"""The modules that all families are made of, and `LanguageModel`: what every model offers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import gelu, linear, relu, silu

from lmforge.core.data.batch import Batch
from lmforge.core.model.attention import ContextParallel, LayerCache, create_attention_mask
from lmforge.core.model.blocks import Mixer
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import FlatShard, InitialValue, initial_value
from lmforge.core.model.lora_config import LoraConfig
from lmforge.core.model.parametrization import (
    STANDARD,
    UNSCALED,
    Place,
    TensorScale,
)
from lmforge.core.model.rng.token_rng import TokenRng, neftune_noise_scale, perturb_embeddings
from lmforge.core.model.rope import rotary_embedding
from lmforge.core.model.setup import PLAIN_SETUP, ModelSetup

if TYPE_CHECKING:  # loaded with the first model that has experts
    from lmforge.core.model.mixture.balance import Balance

_gelu_tanh = partial(gelu, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return relu(x).square()


# By their names in a config.json.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu2": _squared_relu,
}


def local_weight(parameter: Tensor) -> Tensor:
    """A rank's part of a weight.

    Where it is replicated, ranks have tokens of their own, so that gradients are summed.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(
        grad_placements=[
            Partial() if each.is_replicate() else each for each in parameter.placements
        ]
    )


class Conv1D(nn.Module):
    """x @ weight + bias, with the weight [in, out]: GPT-2 stores its linear maps transposed."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def add_linears(module: nn.Module, mixer: Mixer, owner: str = "") -> list[str]:
    """Give `module`, which a block calls `owner` (default: the name of the mixer), the linear layers
    that the description of the mixer has there; returns their names in `module`.
    """
    names = []
    for each in mixer.linears:
        prefix, _, name = each.name.rpartition(".")
        if prefix == (owner or mixer.name):
            module.add_module(name, nn.Linear(each.inputs, each.outputs, bias=each.bias))
            names.append(name)
    return names


def apply_linear(layer: nn.Module, x: Tensor, token_rng: TokenRng | None) -> Tensor:
    """`layer(x)`; a layer with an adapter (lora.py) has its own dropout, and is given the
    `token_rng` for it.
    """
    return layer(x) if token_rng is None or not hasattr(layer, "lora_A") else layer(x, token_rng)


def apply_replicated(layer: nn.Linear, x: Tensor, token_rng: TokenRng | None) -> Tensor:
    """`layer` of plain hidden states, where tensor parallelism has its weights on every rank."""
    if isinstance(layer.weight, DTensor):
        bias = None if layer.bias is None else local_weight(layer.bias)
        return linear(x, local_weight(layer.weight), bias)
    return apply_linear(layer, x, token_rng)


class FeedForward(nn.Module):
    """A feed-forward, which a block calls by the name of its mixer, or `owner`; its linear layers
    there are the gate, the other factor if there is one, and the output.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer, owner: str = "") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self._gate, *self._up, self._down = add_linears(self, mixer, owner)

    def forward(self, x: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        hidden = self.activation(apply_linear(getattr(self, self._gate), x, token_rng))
        for up in self._up:
            hidden = hidden * apply_linear(getattr(self, up), x, token_rng)
        return apply_linear(getattr(self, self._down), hidden, token_rng)


def to_autocast_dtype(hidden: Tensor) -> Tensor:
    """Embeddings in the dtype of autocast, where it is on.

    Autocast does not cast embeddings, so the residual stream would stay fp32. FSDP computes in bf16
    from the embedding on; with this class the other engines do, too.
    """
    device_type = hidden.device.type
    # torch has no autocast on the meta device.
    if hidden.is_meta or not torch.is_autocast_enabled(device_type):
        return hidden
    return hidden.to(torch.get_autocast_dtype(device_type))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operations on the device of `x` keep the dtype of what they are given."""
    # torch has no autocast on the meta device.
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def add_residual(hidden: Tensor, x: Tensor, token_rng: TokenRng | None, site: int) -> Tensor:
    """hidden + dropout(x) at a site of the block; without `token_rng` there is no dropout."""
    return hidden + (x if token_rng is None else token_rng.apply_dropout(x, site))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight (arXiv 1910.07467), over the last dimension.

    Computed in fp32 whatever the dtype of the input, and returned in that dtype, as transformers
    does. Llama multiplies by the weight after rounding to that dtype; with an `offset`, which is
    added to the weight, it is multiplied before.
    """

    def __init__(self, hidden_size: int, eps: float, offset: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight if isinstance(x, DTensor) else local_weight(self.weight)
        if self.offset is not None:
            return (normed * (self.offset + weight.float())).to(x.dtype)
        return (weight * normed.to(x.dtype)).to(x.dtype)


Passes = Literal["operators", "fused", "stored"]


@dataclass(frozen=True)
class HeadOptions:
    """Options of an output head besides its matrix product.

    bias: [vocab], added to the logits. softcap: logits become softcap · tanh(logits / softcap)
    (Gemma 2, arXiv 2408.00118).
    passes: what computes losses from logits. "operators" are torch's; others are compiled, those of
        a file NAME_passes.py in core/losses/.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    passes: Passes = "operators"


PLAIN_HEAD = HeadOptions()


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """`logits` after soft-capping, of the same shape and dtype."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class LMHead(nn.Module):
    """The output projection: weight [vocab, width], or [1, width] of a reward model; bias [vocab],
    if any.
    """

    passes: Passes = "operators"  # as in HeadOptions

    def __init__(
        self, hidden_size: int, vocab_size: int, *, bias: bool = False, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None
        self.softcap = softcap

    def forward(self, hidden: Tensor, head_fn: Callable[..., Any] | None = None) -> Any:
        """Logits [..., vocab] of hidden [..., width]; or head_fn(hidden, weight, head=HeadOptions),
        whatever that returns.

        Objectives use `head_fn`: called through the module, so that hooks which gather a sharded
        weight run, it may go through the weight in chunks, so that the full logits never exist.
        """
        if head_fn is None:
            return cap_logits(nn.functional.linear(hidden, self.weight, self.bias), self.softcap)
        return head_fn(hidden, self.weight, head=HeadOptions(self.bias, self.softcap, self.passes))


class ActivationStorage(Protocol):
    """Keeps what a block saves for its backward pass on the host in between."""

    def saving(
        self, block: nn.Module, is_first: bool, shared: Any
    ) -> AbstractContextManager[None]: ...


class LanguageModel(nn.Module):
    """What every model offers.

    `forward(tokens, positions, document_ids, cache, rng_keys)` returns hidden states, which
    `lm_head` scores; `embeddings`, `blocks`, `final_norm` and `lm_head` are the units that sharding
    wraps. Forward has three parts, so that a pipeline stage can run its own: `embed`, `run_blocks`,
    `final_norm`.
    """

    # Names of modules: the token embedding and then the others, the list of blocks, the norm after
    # them.
    embedding_names: tuple[str, ...]
    blocks_name: str
    final_norm_name: str
    lm_head: LMHead
    setup: ModelSetup = PLAIN_SETUP
    has_dropout: bool = True  # False for models without any, whose adapters have none either
    balance: "Balance | None" = None  # of a model with mixtures of experts
    activation_offload: ActivationStorage | None = None
    lora_config: LoraConfig | None = None  # of a model with adapters
    # With FSDP1, by their names in `named_parameters()`: what this rank holds of them, which their
    # shapes do not say.
    flat_shards: Mapping[str, FlatShard] = MappingProxyType({})

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        document_ids: Tensor,
        cache: Any = None,
        rng_keys: Tensor | None = None,
        document_starts: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm: [sequences, length, hidden_size], ready for
        `lm_head`.

        Args:
            tokens, positions: int64 [sequences, length]; positions restart at each document.
            document_ids: int32 [sequences, length], equal within a document, -1 on padding.
            cache: keys and values of earlier tokens, to which the new ones are added
                (`KVCache.view`); each sequence is one document then.
            rng_keys: int64 [sequences, length], what dropout and NEFTune draw from; None turns both
            off.
            document_starts: as in Batch, or None; with them attention may take a faster kernel.
            routed_experts: int32 [sequences, length, layers, experts of a token], or None: taken in
                place of what routers choose.
        """
        token_rng = self.make_token_rng(rng_keys, document_ids)
        hidden = self.embed(tokens, positions, token_rng)
        hidden = self.run_blocks(
            hidden,
            positions,
            document_ids,
            cache,
            token_rng=token_rng,
            document_starts=document_starts,
            routed_experts=routed_experts,
        )
        return self.final_norm(hidden)

    def make_token_rng(self, rng_keys: Tensor | None, document_ids: Tensor) -> TokenRng | None:
        """The random numbers of dropout and NEFTune on this rank for tokens with these keys; None
        where both are off.
        """
        setup = self.setup
        drops = setup.dropout or (self.lora_config is not None and self.lora_config.dropout)
        if rng_keys is None or not (drops or setup.neftune_noise_alpha):
            return None
        part, parts = setup.sequence_shard
        scale = None
        if setup.neftune_noise_alpha:
            scale = neftune_noise_scale(
                document_ids, self.config.hidden_size, setup.neftune_noise_alpha
            )
            scale = scale.chunk(parts, dim=1)[part]
        return TokenRng(setup.dropout, rng_keys.chunk(parts, dim=1)[part], scale)

    @property
    def context_parallel(self) -> ContextParallel | None:
        return self.setup.context_parallel

    def local_batch(self, batch: Batch) -> Batch:
        """The part of a batch that this rank computes: all of it, except with context parallel."""
        return batch if self.context_parallel is None else self.context_parallel.shard_batch(batch)

    def embed(self, tokens: Tensor, positions: Tensor, token_rng: TokenRng | None = None) -> Tensor:
        """The input of the first block: [sequences, length, hidden_size], in the compute dtype, as
        the residual stream is.

        Raises UserError for sequences longer than the learned positions.
        """
        self.config.check_length(tokens.shape[1])
        token_embedding, *position_embeddings = self.embeddings
        hidden = token_embedding(tokens)
        for embedding in position_embeddings:
            hidden = hidden + embedding(positions)
        hidden = to_autocast_dtype(hidden)
        if self.config.family.scaled_embeddings:  # by a number in that dtype, as transformers does
            hidden = hidden * torch.tensor(
                math.sqrt(self.config.hidden_size), dtype=hidden.dtype, device="cpu"
            )
        if self.config.multipliers is not None:
            hidden = hidden * self.config.multipliers.embedding_multiplier
        return perturb_embeddings(hidden, token_rng)

    def run_blocks(
        self,
        hidden: Tensor,
        positions: Tensor,
        document_ids: Tensor,
        cache: list[LayerCache] | None = None,
        layer_indices: Iterable[int] | None = None,
        token_rng: TokenRng | None = None,
        document_starts: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> Tensor:
        """`hidden` after the blocks of `layer_indices`, all of them by default; the same shape and
        dtype.
        """
        blocks = self.blocks
        windows = self.config.layer_windows
        ropes = self.config.layer_ropes
        if cache is None:
            make_mask = partial(
                create_attention_mask,
                context_parallel=self.context_parallel,
                document_starts=document_starts,
                dtype=hidden.dtype,
                head_dim=self.config.head_dim,
                sinks=self.config.family.attention_sinks,
            )
            masks = {each: make_mask(document_ids, each) for each in set(windows)}
            if any(block.states for block in self.config.blocks):
                ids = document_ids
                if self.context_parallel is not None:
                    ids = self.context_parallel.all_gather_sequence(ids, 1)
                masks = {window: replace(mask, document_ids=ids) for window, mask in masks.items()}
        else:
            masks = {each: cache[0].mask(each) for each in set(windows)}
        rotary = {
            each: rotary_embedding(positions, each, self.config.rotary_dim) for each in set(ropes)
        }
        # Attention has masks; a mixture balances and counts the tokens that are none of padding.
        part, parts = self.setup.sequence_shard
        of_mixture = (
            {"is_token": document_ids.chunk(parts, 1)[part] >= 0} if self.config.num_experts else {}
        )
        indices = [*range(len(blocks))] if layer_indices is None else [*layer_indices]
        for layer in indices:
            layer_cache = None if cache is None else cache[layer]
            layer_rng = None if token_rng is None else token_rng.for_block(layer)
            if routed_experts is not None:
                of_mixture["routed_experts"] = routed_experts.chunk(parts, 1)[part][:, :, layer]
            inputs = rotary[ropes[layer]], masks[windows[layer]], layer_cache, layer_rng
            if self.activation_offload is None:
                hidden = blocks[layer](hidden, *inputs, **of_mixture)
                continue
            with self.activation_offload.saving(blocks[layer], layer == indices[0], inputs):
                hidden = blocks[layer](hidden, *inputs, **of_mixture)
        return hidden

    def initial_values(
        self, shapes: Mapping[str, torch.Size], seed: int, embedding_std: float | None = None
    ) -> Iterator[tuple[str, InitialValue | Tensor]]:
        """(name, first value) of the parameters of these names and full shapes; see
        init_weights.py.
        """
        for name, shape in shapes.items():
            is_embedding = name == f"{self.embedding_names[0]}.weight"
            value = initial_value(name, shape, self.config, embedding_std if is_embedding else None)
            if isinstance(value, Tensor):
                yield name, value
                continue
            offset = 0.0 if name.endswith("bias") else self.config.norm_offset(name)
            yield name, value.scaled(self.tensor_scale(name, shape).init, offset)

    def tensor_scale(self, name: str, shape: tuple[int, ...]) -> TensorScale:
        """The factors of the parameter `name`, of this full shape, by the parametrization."""
        parametrization = self.setup.parametrization
        if parametrization == STANDARD:  # of wrapped models too
            return UNSCALED
        place: Place = "block" if name.startswith(f"{self.blocks_name}.") else "final norm"
        place = (
            "embedding"
            if name.startswith(tuple(f"{each}." for each in self.embedding_names))
            else place
        )
        place = "head" if name.startswith("lm_head.") else place
        return parametrization.scale(name, shape, place, self.config)

    def tie_weights(self) -> None:
        """Tie the head's weight to the embedding's, where the config says so.

        Repeat after `to_empty`, which unties them.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embeddings[0].weight  # type: ignore[assignment]

    @property
    def embeddings(self) -> list[nn.Embedding]:
        """The token embedding, then the others."""
        return [cast(nn.Embedding, self.get_submodule(name)) for name in self.embedding_names]

    @property
    def blocks(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.get_submodule(self.blocks_name))

    @property
    def final_norm(self) -> nn.Module:
        return self.get_submodule(self.final_norm_name)
