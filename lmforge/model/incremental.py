"""Incremental decoding: several sequences that grow by a token at a time, with each token computed once.

Sequences join and leave while others continue; they are numbered 0, 1, … in the order in which they joined. Sampling the next
token is in generate/.

A model of the Llama family is decoded by `LlamaDecodeModel`: the same sums as decoder.py in fewer and larger operations. One
product computes the queries, keys and values of a token, another gate and up of its feed-forward; a pair of rotary channels
is one complex number. Measured on one CPU thread in fp32 with the model of benchmarks/engine.py (6 layers, width 256, torch
2.13): without it, prefill and decoding together take 1.16 times the CPU time for one sequence, and 1.13 times for eight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.nn.utils.rnn import pad_sequence

from lmforge.model.attention import AttentionMask, KVCache, attend, causal_mask
from lmforge.model.config import ModelConfig
from lmforge.model.decode_graphs import DecodeGraphs, can_record
from lmforge.model.rope import rotary_frequencies

# Sequences are computed together where the shortest has at least this fraction of the longest one's tokens.
MIN_LENGTH_RATIO = 0.75
# With more tokens at once, activations take more memory than keys and values, and the speed does not increase.
MAX_GROUP_TOKENS = 1 << 14
# Attention in more groups than this is slower than attention over empty slots.
MAX_GROUPS = 8
# The limit for copied weights, in bytes. The products of a larger model take so long that fusing them is not faster.
MAX_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences start … stop − 1, which have `shortest` to `longest` tokens."""

    start: int
    stop: int
    shortest: int
    longest: int


class IncrementalDecoder:
    """At most `batch_size` sequences of at most `max_length` tokens, with a KV cache in `dtype`.

    Raises UserError where the model cannot compute that many tokens (learned positions).
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._cache = KVCache(model.config, batch_size, max_length, device=device, dtype=dtype)
        self._decode_model = LlamaDecodeModel(model, self._cache, dtype) if can_fuse(model, dtype) else None
        self._device = device
        self._graphs = None
        if device.type == "cuda" and (self._decode_model is not None or can_record(model)):
            self._graphs = DecodeGraphs(batch_size, max_length, device)
        self._lengths: list[int] = []
        self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Compute prompts as new sequences after the others; hidden states of each last token [prompts, hidden_size].

        Prompts sorted by length are computed with little padding.
        """
        first, groups = len(self._lengths), group_by_length([*map(len, prompts)])
        hidden = [self._prefill_group(first + start, prompts[start:stop]) for start, stop in groups]
        self._lengths += map(len, prompts)
        self._positions = torch.tensor(self._lengths, device=self._device)
        return torch.cat(hidden)

    def _prefill_group(self, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(self._device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        if self._decode_model is not None:
            return self._decode_model.prefill(tokens, first, last)
        sequences, length = tokens.shape
        positions = torch.arange(length, device=self._device).expand(sequences, -1)
        hidden = self._forward(first, tokens, positions, length)
        return hidden[torch.arange(sequences, device=self._device), last]

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Compute the next token of every sequence, int64 [sequences]; returns hidden states [sequences, hidden_size]."""
        longest = max(self._lengths)
        if self._graphs is not None and self._sees_all(self._graphs.shape(len(tokens), longest)[1]):
            hidden = self._graphs.step(self._padded_step, tokens, self._positions, longest)
        elif self._decode_model is not None:
            groups = [*group_by_length(self._lengths)]
            if self._device.type != "cpu" or len(groups) > MAX_GROUPS:
                groups = [(0, len(self._lengths))]
            lengths = [self._lengths[start:stop] for start, stop in groups]
            parts = [DecodeGroup(*group, min(each), max(each)) for group, each in zip(groups, lengths, strict=True)]
            hidden = self._decode_model.decode_step(tokens, self._positions, parts)
        else:
            hidden = self._forward(0, tokens[:, None], self._positions[:, None], longest + 1)[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        return hidden

    def _sees_all(self, slots: int) -> bool:
        """Whether a token may see this many slots in every layer. A recorded step reads all of them, while a window limits
        them."""
        return all(window is None or window >= slots for window in self._model.config.layer_windows)

    def _padded_step(self, tokens: Tensor, positions: Tensor, slots: int) -> Tensor:
        """One token of each of the first sequences, which see at most `slots`. The computation does not depend on their
        lengths."""
        if self._decode_model is not None:
            return self._decode_model.decode_step(tokens, positions, [DecodeGroup(0, len(tokens), 0, slots - 1)])
        return self._forward(0, tokens[:, None], positions[:, None], slots)[:, 0]

    def _forward(self, first: int, tokens: Tensor, positions: Tensor, end: int) -> Tensor:
        cache = self._cache.view(first, positions, end)
        hidden: Tensor = self._model(tokens, positions, torch.zeros_like(tokens, dtype=torch.int32), cache)
        return hidden

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only these sequences; they become 0, 1, … in this order."""
        moved = [(source, target) for target, source in enumerate(indices) if source != target]
        if moved:
            self._cache.copy_sequences(*zip(*moved, strict=True))
        self._lengths = [self._lengths[index] for index in indices]
        self._positions = torch.tensor(self._lengths, device=self._device)


def group_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive sequences to be computed together: with similar lengths, and not too many tokens."""
    start, shortest, longest = 0, lengths[0], lengths[0]
    for index, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < MIN_LENGTH_RATIO * longest or (index > start and (index + 1 - start) * longest > MAX_GROUP_TOKENS):
            yield start, index
            start, shortest, longest = index, length, length
    yield start, len(lengths)


def can_fuse(model: Any, dtype: torch.dtype) -> bool:
    """Whether LlamaDecodeModel can replace `model`: a Llama with plain, unsharded layers that are not too large to copy."""
    if not all(hasattr(block, "self_attn") for block in model.blocks):
        return False
    fused = [layer for block in model.blocks for layer in (*_qkv_layers(block), block.mlp.gate_proj, block.mlp.up_proj)]
    others = [layer for block in model.blocks for layer in (block.self_attn.o_proj, block.mlp.down_proj)]
    plain = all(type(layer) is nn.Linear and not isinstance(layer.weight, DTensor) for layer in (*fused, *others))
    return plain and sum(layer.weight.numel() for layer in fused) * dtype.itemsize <= MAX_COPY_BYTES


def _qkv_layers(block: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj


class LlamaDecodeModel:
    """Computes the same as `model`, a Llama, with `cache`. Only this class can read what it has written to the cache.

    The weights of the fused products are copied, in the dtype of the cache, when this is created: later changes of the
    model's weights are not seen. No gradients, no dropout.
    """

    @torch.no_grad()
    def __init__(self, model: Any, cache: KVCache, dtype: torch.dtype) -> None:
        config = model.config
        self._model, self._cache, self._dtype = model, cache, dtype
        self._heads, self._groups, self._width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._layers = [_FusedLlamaLayers(block, self._interleave, config, dtype) for block in model.blocks]
        device = model.embeddings[0].weight.device
        angles = torch.arange(cache.max_length, device=device)[:, None].float() * rotary_frequencies(
            config.layer_ropes[0], self._width, device
        )
        self._rotations = torch.polar(torch.ones_like(angles), angles)[:, None]  # complex64 [positions, 1, head_dim / 2]

    def _interleave(self, channels: Tensor) -> Tensor:
        """The channels of queries and keys, in the first dimension, with rotary pairs side by side; then those of values."""
        end = (self._heads + self._groups) * self._width
        pairs = channels[:end].unflatten(0, (-1, 2, self._width // 2))
        return torch.cat([pairs.transpose(1, 2).flatten(0, 2), channels[end:]])

    def prefill(self, tokens: Tensor, first: int, last: Tensor) -> Tensor:
        """Compute new sequences int64 [sequences, length], which are `first` and following in the cache.

        Returns hidden states [sequences, hidden_size] of the tokens at positions `last` int64 [sequences]; the rest is padding.
        """
        sequences, length = tokens.shape
        slots = torch.arange(length, device=tokens.device)
        positions = slots.expand(sequences, -1)
        windows = self._model.config.layer_windows
        masks = {
            window: AttentionMask(None if window is None else causal_mask(positions[:1], slots, window)[:, None])
            for window in set(windows)
        }

        def attend_layer(layer: int, *heads: Tensor) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in heads)
            return attend(q, k, v, masks[windows[layer]]).transpose(1, 2)

        last_tokens = torch.arange(sequences, device=tokens.device), last
        return self._forward(tokens, first, positions, attend_layer, last_tokens)

    def decode_step(self, tokens: Tensor, positions: Tensor, groups: Sequence[DecodeGroup]) -> Tensor:
        """Compute one token of each of the first sequences; hidden states [sequences, hidden_size].

        `tokens` and `positions` are int64 [sequences]. The sequences of a group attend together, up to the longest of them.
        """
        windows = self._model.config.layer_windows
        masks = {window: [self._group_mask(positions, group, window) for group in groups] for window in set(windows)}

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.key_values[layer]
            queries = q.view(len(tokens), self._groups, -1, self._width)
            attended = [
                scaled_dot_product_attention(queries[part], keys[part, :, slots], values[part, :, slots], attn_mask=mask)
                for part, slots, mask in masks[windows[layer]]
            ]
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return self._forward(tokens[:, None], 0, positions[:, None], attend_layer, None)[:, 0]

    def _group_mask(self, positions: Tensor, group: DecodeGroup, window: int | None) -> tuple[slice, slice, Tensor]:
        """A group's sequences, the slots that any of them sees, and what is added to the scores of each sequence."""
        first = 0 if window is None else max(0, group.shortest + 1 - window)
        sequences, slots = slice(group.start, group.stop), slice(first, group.longest + 1)
        numbers = torch.arange(slots.start, slots.stop, device=positions.device)
        seen = causal_mask(positions[sequences, None], numbers, window)[:, None]
        bias = torch.zeros(seen.shape, dtype=self._dtype, device=positions.device).masked_fill_(~seen, -torch.inf)
        # Query heads of the same key head are computed as queries of one head: each key is read once.
        return sequences, slots, bias.expand(-1, -1, self._heads // self._groups, -1)

    def _forward(
        self,
        tokens: Tensor,
        first: int,
        positions: Tensor,
        attend_layer: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        last_tokens: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        sequences, length = tokens.shape
        indices = torch.arange(first, first + sequences, device=tokens.device)[:, None]
        rotations = self._rotations[positions]
        # The weights already have the dtype of autocast, which would cast them again for each product.
        with torch.inference_mode(), torch.autocast(tokens.device.type, enabled=False):
            hidden = self._model.embed(tokens, positions).to(self._dtype)
            for layer, (block, fused) in enumerate(zip(self._model.blocks, self._layers, strict=True)):
                qkv = fused.qkv(block.input_layernorm(hidden))
                heads = qkv.view(sequences, length, -1, self._width)
                q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
                # Queries and keys are normalized, if the model does that, and rotated in place, in fp32.
                q_and_k = heads[:, :, : self._heads + self._groups]
                rotated = fused.apply_qk_norm(q_and_k).float()
                torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotations)
                if rotated is not q_and_k:
                    q_and_k.copy_(rotated)
                self._cache.key_values[layer][:, indices, :, positions] = heads[:, :, self._heads :].unflatten(2, (2, -1))
                attended = attend_layer(layer, q, k, v).reshape(sequences, length, -1)
                if last_tokens is not None and layer == len(self._layers) - 1:
                    # Only the keys and values of the other tokens are needed.
                    hidden, attended = hidden[last_tokens], attended[last_tokens]
                hidden = hidden + fused.o_proj(attended)
                gate, up = fused.gate_up(block.post_attention_layernorm(hidden)).chunk(2, dim=-1)
                hidden = hidden + fused.down_proj(silu(gate).mul_(up))
            normed: Tensor = self._model.final_norm(hidden)
            return normed


class _FusedLlamaLayers:
    """The linear maps of one block, as functions of their input."""

    def __init__(self, block: Any, interleave: Callable[[Tensor], Tensor], config: ModelConfig, dtype: torch.dtype) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.qkv = _fuse_linears(_qkv_layers(block), dtype, interleave)
        self.gate_up = _fuse_linears((mlp.gate_proj, mlp.up_proj), dtype)
        self.o_proj = _fuse_linears((attention.o_proj,), dtype)
        self.down_proj = _fuse_linears((mlp.down_proj,), dtype)
        self._qk_norm_weights = None
        if attention.qk_norm:
            norms = [attention.q_norm] * config.num_attention_heads + [attention.k_norm] * config.num_key_value_heads
            self._qk_norm_weights = torch.stack([interleave(norm.weight) for norm in norms])
            self._eps = attention.q_norm.eps

    def apply_qk_norm(self, heads: Tensor) -> Tensor:
        """RMSNorm of each head, as layers.RMSNorm computes it, with the weights of queries and of keys."""
        if self._qk_norm_weights is None:
            return heads
        x = heads.float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)).to(heads.dtype)
        return (normed * self._qk_norm_weights).to(heads.dtype)


def _fuse_linears(
    layers: Sequence[nn.Linear], dtype: torch.dtype, order: Callable[[Tensor], Tensor] = lambda channels: channels
) -> Callable[[Tensor], Tensor]:
    """One product instead of several of the same input; `order` reorders its outputs."""

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        return order(torch.cat([part.to(dtype) for part in parts]) if len(parts) > 1 else parts[0].to(dtype))

    weight = fuse([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else fuse([layer.bias for layer in layers])
    return lambda x: linear(x, weight, bias)
