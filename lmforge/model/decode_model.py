"""A Llama-family decoder laid out for reading with a cache: the same sums as decoder.py in fewer and larger operations.

A token's queries, keys and values come from one product, gate and up of its feed-forward from another; a pair of channels
that turns together is one complex number. For this the weights of those products are copied, in the dtype of the cache,
when this is made: later changes of the model's are not seen. No gradients, and no dropout.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from lmforge.model.attention import attend, create_cache_mask
from lmforge.model.cache import KVCache
from lmforge.model.rope import rotary_frequencies

# Copied weights may take this many bytes. A larger model's products are so long that fusing them gains nothing.
MAX_COPY_BYTES = 1 << 30


def can_fuse(model: Any, dtype: torch.dtype) -> bool:
    """Whether a Fused can stand for `model`: every layer plain, whole on this device, and not too large."""
    blocks = [*model.blocks]
    if not all(hasattr(block, "self_attn") for block in blocks):
        return False
    products = [layer for block in blocks for layer in (*_qkv_layers(block), *_gate_up_layers(block))]
    others = [layer for block in blocks for layer in (block.self_attn.o_proj, block.mlp.down_proj)]
    plain = all(type(layer) is nn.Linear and not isinstance(layer.weight, DTensor) for layer in (*products, *others))
    return plain and sum(layer.weight.numel() for layer in products) * dtype.itemsize <= MAX_COPY_BYTES


def _qkv_layers(block: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj


def _gate_up_layers(block: Any) -> tuple[nn.Linear, nn.Linear]:
    return block.mlp.gate_proj, block.mlp.up_proj


class LlamaDecodeModel:
    """Reads what `model`, a Decoder, would read into `cache`; a cache that it has written is for its own reading only."""

    @torch.no_grad()
    def __init__(self, model: Any, cache: KVCache, dtype: torch.dtype) -> None:
        config = model.config
        self._model, self._cache, self._dtype = model, cache, dtype
        self._heads, self._groups, self._width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._blocks = [_FusedLlamaLayers(block, self._interleave_rotary_pairs, dtype) for block in model.blocks]
        device = model.embeddings[0].weight.device
        angles = torch.arange(cache.max_length, device=device)[:, None].float() * rotary_frequencies(config, device)
        self._rotations = torch.polar(torch.ones_like(angles), angles)[:, None]  # complex64 [positions, 1, head_dim / 2]

    def _interleave_rotary_pairs(self, per_channel: Tensor) -> Tensor:
        """The channels of each head, in the first dimension, with each one beside the one that it turns with."""
        heads = per_channel.unflatten(0, (-1, 2, self._width // 2))
        return heads.transpose(1, 2).flatten(0, 2)

    def prefill(self, tokens: Tensor, first_sequence: int, last_positions: Tensor) -> Tensor:
        """Read texts from their first token on, int64 [rows, length], into the cache's rows from `first` on.

        Returns the hidden states [rows, hidden_size] of the tokens at `last`, int64 [rows]; what follows them is padding.
        """
        rows, length = tokens.shape
        slots = torch.arange(length, device=tokens.device)
        positions = slots.expand(rows, -1)
        masks = {
            window: create_cache_mask(positions[:1], slots, window)
            for window in set(self._model.config.layer_windows)
            if window
        }
        ends = torch.arange(rows, device=tokens.device), last_positions

        def see(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = self._model.config.layer_windows[number]
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if window is not None:
                return attend(q, k, v, masks[window]).transpose(1, 2)
            grouped = self._groups != self._heads
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

        return self._forward(tokens, first_sequence, positions, see, ends)

    def decode_step(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], groups: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Read the token at `positions` of each of the first rows, int64 [rows] both; hidden states [rows, hidden_size].

        `lengths` are the positions as the host knows them. Rows of one of the `pieces`, (start, stop) of neighbours, are
        attended to together, up to the longest of them.
        """
        config = self._model.config
        looks = {
            window: [self._group_mask(positions, lengths, *piece, window) for piece in groups]
            for window in set(config.layer_windows)
        }

        def see(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.key_values[number]
            asked = q.view(len(tokens), self._groups, -1, self._width)
            attended = [
                scaled_dot_product_attention(asked[rows], keys[rows, :, slots], values[rows, :, slots], attn_mask=mask)
                for rows, slots, mask in looks[config.layer_windows[number]]
            ]
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return self._forward(tokens[:, None], 0, positions[:, None], see, None)[:, 0]

    def _group_mask(
        self, positions: Tensor, lengths: Sequence[int], start: int, stop: int, window: int | None
    ) -> tuple[slice, slice, Tensor]:
        """Of a piece: its rows, the slots that any of them sees, and what is added to each row's scores."""
        first = 0 if window is None else max(0, min(lengths[start:stop]) + 1 - window)
        slots = slice(first, max(lengths[start:stop]) + 1)
        seen = create_cache_mask(
            positions[start:stop, None], torch.arange(slots.start, slots.stop, device=positions.device), window
        )
        assert seen.dense_mask is not None
        added = torch.zeros(seen.dense_mask.shape, dtype=self._dtype, device=positions.device).masked_fill_(
            ~seen.dense_mask, -torch.inf
        )
        # Query heads that read the same keys are given as so many queries of one head: each key is read once.
        return slice(start, stop), slots, added.expand(-1, -1, self._heads // self._groups, -1)

    def _forward(
        self,
        tokens: Tensor,
        first_sequence: int,
        positions: Tensor,
        attend_layer: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        last_tokens: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rows, length = tokens.shape
        device = tokens.device.type
        places = torch.arange(first_sequence, first_sequence + rows, device=tokens.device)[:, None]
        turns = self._rotations[positions]
        # Weights are in the dtype of autocast already, which would cast them again for each product.
        with torch.inference_mode(), torch.autocast(device, enabled=False):
            hidden = self._model.embed(tokens, positions)
            for number, (block, products) in enumerate(zip(self._model.blocks, self._blocks, strict=True)):
                mixed = products.qkv(block.input_layernorm(hidden).to(self._dtype))
                heads = mixed.view(rows, length, -1, self._width)
                q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
                self._apply_rotary(heads[:, :, : self._heads + self._groups], turns, products)
                self._cache.key_values[number][:, places, :, positions] = heads[:, :, self._heads :].unflatten(2, (2, -1))
                attended = attend_layer(number, q, k, v).reshape(rows, length, -1)
                if last_tokens is not None and number == len(self._blocks) - 1:
                    # Of the other tokens nobody asks more than their keys and values.
                    hidden, attended = hidden[last_tokens], attended[last_tokens]
                hidden = hidden + products.o_proj(attended)
                gate, up = products.gate_up(block.post_attention_layernorm(hidden).to(self._dtype)).chunk(2, dim=-1)
                hidden = hidden + products.down_proj(silu(gate).mul_(up))
            normed: Tensor = self._model.final_norm(hidden)
            return normed

    def _apply_rotary(self, heads: Tensor, rotations: Tensor, layers: "_FusedLlamaLayers") -> None:
        """Norm, if any, and rotate queries and keys [rows, length, heads, head_dim] in place, in fp32."""
        normed = heads if layers.qk_norm_weights is None else layers.apply_qk_norm(heads, self._heads)
        wide = normed.float()
        torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(rotations)
        if wide is not heads:
            heads.copy_(wide)


class _FusedLlamaLayers:
    """The linear maps of one block, as functions of their input."""

    def __init__(self, block: Any, interleave: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        attention, feed_forward = block.self_attn, block.mlp
        q, k, v = _qkv_layers(block)
        self.qkv = _fuse_linears([(q, interleave), (k, interleave), (v, lambda channels: channels)], dtype)
        self.gate_up = _fuse_linears([(layer, lambda channels: channels) for layer in _gate_up_layers(block)], dtype)
        self.o_proj = _fuse_linears([(attention.o_proj, lambda channels: channels)], dtype)
        self.down_proj = _fuse_linears([(feed_forward.down_proj, lambda channels: channels)], dtype)
        self.qk_norm_weights = None
        if attention.qk_norm:
            self.qk_norm_weights = interleave(attention.q_norm.weight), interleave(attention.k_norm.weight)
            self._eps = attention.q_norm.eps

    def apply_qk_norm(self, heads: Tensor, num_query_heads: int) -> Tensor:
        """RMSNorm of each head, as layers.RMSNorm computes it, with the weights of queries and of keys."""
        assert self.qk_norm_weights is not None
        wide = heads.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(heads.dtype)
        q, k = self.qk_norm_weights
        return torch.cat([normed[:, :, :num_query_heads] * q, normed[:, :, num_query_heads:] * k], dim=2).to(heads.dtype)


def _fuse_linears(
    parts: Iterable[tuple[nn.Linear, Callable[[Tensor], Tensor]]], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """One product in place of several of the same input, with the outputs of each in the order that its function gives."""
    pairs = list(parts)
    weights = [order(layer.weight).to(dtype) for layer, order in pairs]
    biases = [order(layer.bias).to(dtype) for layer, order in pairs if layer.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = torch.cat(biases) if biases else None
    return lambda x: linear(x, weight, bias)
