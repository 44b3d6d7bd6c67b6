"""A Llama-family model for incremental decoding: the same sums as llama.py in fewer and larger operations.

One product computes the queries, keys and values of a token, another gate and up of its feed-forward; a pair of rotary
channels is one complex number. The weights of those products are copied, in the dtype of the cache, when this is created:
later changes of the model's weights are not seen. No gradients, no dropout.

Measured on one CPU thread in fp32 with the model of benchmarks/engine.py (6 layers, width 256, torch 2.13): without it,
prefill and decoding together take 1.16 times the CPU time for one sequence, and 1.13 times for eight.
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

# Copied weights may take this many bytes. The products of a larger model take so long that fusing them gains nothing.
MAX_COPY_BYTES = 1 << 30


def can_fuse(model: Any, dtype: torch.dtype) -> bool:
    """Whether LlamaDecodeModel can replace `model`: a Llama with plain, unsharded layers that are not too large to copy."""
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
    """Computes what `model`, a Llama, would compute with `cache`; only it can read what it has written to the cache."""

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
        """The channels of each head, in the first dimension, with those of a rotary pair side by side."""
        heads = per_channel.unflatten(0, (-1, 2, self._width // 2))
        return heads.transpose(1, 2).flatten(0, 2)

    def prefill(self, tokens: Tensor, first_sequence: int, last_positions: Tensor) -> Tensor:
        """Compute new sequences int64 [sequences, length], which are `first_sequence` and following in the cache.

        Returns hidden states [sequences, hidden_size] of the tokens at `last_positions` int64 [sequences]; the rest is padding.
        """
        sequences, length = tokens.shape
        slots = torch.arange(length, device=tokens.device)
        positions = slots.expand(sequences, -1)
        windows = self._model.config.layer_windows
        masks = {window: create_cache_mask(positions[:1], slots, window) for window in set(windows) if window}
        last_tokens = torch.arange(sequences, device=tokens.device), last_positions

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = windows[layer]
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if window is not None:
                return attend(q, k, v, masks[window]).transpose(1, 2)
            grouped = self._groups != self._heads
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

        return self._forward(tokens, first_sequence, positions, attend_layer, last_tokens)

    def decode_step(
        self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], groups: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Compute one token of each of the first sequences; hidden states [sequences, hidden_size].

        `tokens` and `positions` are int64 [sequences]; `lengths` are the positions on the host. The sequences of a group,
        (start, stop), attend together, up to the longest of them.
        """
        windows = self._model.config.layer_windows
        masks = {window: [self._group_mask(positions, lengths, *group, window) for group in groups] for window in set(windows)}

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.key_values[layer]
            queries = q.view(len(tokens), self._groups, -1, self._width)
            attended = [
                scaled_dot_product_attention(queries[part], keys[part, :, slots], values[part, :, slots], attn_mask=mask)
                for part, slots, mask in masks[windows[layer]]
            ]
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return self._forward(tokens[:, None], 0, positions[:, None], attend_layer, None)[:, 0]

    def _group_mask(
        self, positions: Tensor, lengths: Sequence[int], start: int, stop: int, window: int | None
    ) -> tuple[slice, slice, Tensor]:
        """Of a group: its sequences, the slots that any of them sees, and what is added to the scores of each sequence."""
        first = 0 if window is None else max(0, min(lengths[start:stop]) + 1 - window)
        slots = slice(first, max(lengths[start:stop]) + 1)
        numbers = torch.arange(slots.start, slots.stop, device=positions.device)
        seen = create_cache_mask(positions[start:stop, None], numbers, window).dense_mask
        assert seen is not None
        bias = torch.zeros(seen.shape, dtype=self._dtype, device=positions.device).masked_fill_(~seen, -torch.inf)
        # Query heads of the same key head are computed as queries of one head: each key is read once.
        return slice(start, stop), slots, bias.expand(-1, -1, self._heads // self._groups, -1)

    def _forward(
        self,
        tokens: Tensor,
        first_sequence: int,
        positions: Tensor,
        attend_layer: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        last_tokens: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        sequences, length = tokens.shape
        device = tokens.device.type
        indices = torch.arange(first_sequence, first_sequence + sequences, device=tokens.device)[:, None]
        rotations = self._rotations[positions]
        # The weights already have the dtype of autocast, which would cast them again for each product.
        with torch.inference_mode(), torch.autocast(device, enabled=False):
            hidden = self._model.embed(tokens, positions)
            for layer, (block, products) in enumerate(zip(self._model.blocks, self._blocks, strict=True)):
                qkv = products.qkv(block.input_layernorm(hidden).to(self._dtype))
                heads = qkv.view(sequences, length, -1, self._width)
                q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
                self._apply_rotary(heads[:, :, : self._heads + self._groups], rotations, products)
                self._cache.key_values[layer][:, indices, :, positions] = heads[:, :, self._heads :].unflatten(2, (2, -1))
                attended = attend_layer(layer, q, k, v).reshape(sequences, length, -1)
                if last_tokens is not None and layer == len(self._blocks) - 1:
                    # Of the other tokens only keys and values are needed.
                    hidden, attended = hidden[last_tokens], attended[last_tokens]
                hidden = hidden + products.o_proj(attended)
                gate, up = products.gate_up(block.post_attention_layernorm(hidden).to(self._dtype)).chunk(2, dim=-1)
                hidden = hidden + products.down_proj(silu(gate).mul_(up))
            normed: Tensor = self._model.final_norm(hidden)
            return normed

    def _apply_rotary(self, heads: Tensor, rotations: Tensor, layers: "_FusedLlamaLayers") -> None:
        """Normalize, if the model does, and rotate queries and keys [sequences, length, heads, head_dim] in place, in fp32."""
        normed = heads if layers.qk_norm_weights is None else layers.apply_qk_norm(heads, self._heads)
        rotated = normed.float()
        torch.view_as_complex(rotated.unflatten(-1, (-1, 2))).mul_(rotations)
        if rotated is not heads:
            heads.copy_(rotated)


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
        x = heads.float()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps)).to(heads.dtype)
        q, k = self.qk_norm_weights
        return torch.cat([normed[:, :, :num_query_heads] * q, normed[:, :, num_query_heads:] * k], dim=2).to(heads.dtype)


def _fuse_linears(
    parts: Iterable[tuple[nn.Linear, Callable[[Tensor], Tensor]]], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """One product instead of several of the same input, with the outputs of each in the order that its function returns."""
    pairs = list(parts)
    weights = [order(layer.weight).to(dtype) for layer, order in pairs]
    biases = [order(layer.bias).to(dtype) for layer, order in pairs if layer.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = torch.cat(biases) if biases else None
    return lambda x: linear(x, weight, bias)
