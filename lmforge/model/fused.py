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

from lmforge.model.attention import attend, slots_seen
from lmforge.model.cache import Cache
from lmforge.model.rope import frequencies

# Copied weights may take this many bytes. A larger model's products are so long that fusing them gains nothing.
LARGEST_COPY = 1 << 30


def fusible(model: Any, dtype: torch.dtype) -> bool:
    """Whether a Fused can stand for `model`: every layer plain, whole on this device, and not too large."""
    blocks = [*model.blocks]
    if not all(hasattr(block, "self_attn") for block in blocks):
        return False
    products = [layer for block in blocks for layer in (*_first(block), *_second(block))]
    others = [layer for block in blocks for layer in (block.self_attn.o_proj, block.mlp.down_proj)]
    plain = all(type(layer) is nn.Linear and not isinstance(layer.weight, DTensor) for layer in (*products, *others))
    return plain and sum(layer.weight.numel() for layer in products) * dtype.itemsize <= LARGEST_COPY


def _first(block: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj


def _second(block: Any) -> tuple[nn.Linear, nn.Linear]:
    return block.mlp.gate_proj, block.mlp.up_proj


class Fused:
    """Reads what `model`, a Decoder, would read into `cache`; a cache that it has written is for its own reading only."""

    @torch.no_grad()
    def __init__(self, model: Any, cache: Cache, dtype: torch.dtype) -> None:
        config = model.config
        self._model, self._cache, self._dtype = model, cache, dtype
        self._heads, self._groups, self._width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._blocks = [_Products(block, self._paired, dtype) for block in model.blocks]
        device = model.embeddings[0].weight.device
        angles = torch.arange(cache.max_length, device=device)[:, None].float() * frequencies(config, device)
        self._turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # complex64 [positions, 1, head_dim / 2]

    def _paired(self, per_channel: Tensor) -> Tensor:
        """The channels of each head, in the first dimension, with each one beside the one that it turns with."""
        heads = per_channel.unflatten(0, (-1, 2, self._width // 2))
        return heads.transpose(1, 2).flatten(0, 2)

    def begin(self, tokens: Tensor, first: int, last: Tensor) -> Tensor:
        """Read texts from their first token on, int64 [rows, length], into the cache's rows from `first` on.

        Returns the hidden states [rows, hidden_size] of the tokens at `last`, int64 [rows]; what follows them is padding.
        """
        rows, length = tokens.shape
        slots = torch.arange(length, device=tokens.device)
        positions = slots.expand(rows, -1)
        masks = {window: slots_seen(positions[:1], slots, window) for window in set(self._model.config.windows) if window}
        ends = torch.arange(rows, device=tokens.device), last

        def see(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = self._model.config.windows[number]
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            if window is not None:
                return attend(q, k, v, masks[window]).transpose(1, 2)
            grouped = self._groups != self._heads
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

        return self._run(tokens, first, positions, see, ends)

    def go_on(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Tensor:
        """Read the token at `positions` of each of the first rows, int64 [rows] both; hidden states [rows, hidden_size].

        `lengths` are the positions as the host knows them. Rows of one of the `pieces`, (start, stop) of neighbours, are
        attended to together, up to the longest of them.
        """
        config = self._model.config
        looks = {window: [self._look(positions, lengths, *piece, window) for piece in pieces] for window in set(config.windows)}

        def see(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.kept[number]
            asked = q.view(len(tokens), self._groups, -1, self._width)
            attended = [
                scaled_dot_product_attention(asked[rows], keys[rows, :, slots], values[rows, :, slots], attn_mask=mask)
                for rows, slots, mask in looks[config.windows[number]]
            ]
            return torch.cat(attended) if len(attended) > 1 else attended[0]

        return self._run(tokens[:, None], 0, positions[:, None], see, None)[:, 0]

    def _look(
        self, positions: Tensor, lengths: Sequence[int], start: int, stop: int, window: int | None
    ) -> tuple[slice, slice, Tensor]:
        """Of a piece: its rows, the slots that any of them sees, and what is added to each row's scores."""
        first = 0 if window is None else max(0, min(lengths[start:stop]) + 1 - window)
        slots = slice(first, max(lengths[start:stop]) + 1)
        seen = slots_seen(positions[start:stop, None], torch.arange(slots.start, slots.stop, device=positions.device), window)
        assert seen.dense is not None
        added = torch.zeros(seen.dense.shape, dtype=self._dtype, device=positions.device).masked_fill_(~seen.dense, -torch.inf)
        # Query heads that read the same keys are given as so many queries of one head: each key is read once.
        return slice(start, stop), slots, added.expand(-1, -1, self._heads // self._groups, -1)

    def _run(
        self,
        tokens: Tensor,
        first: int,
        positions: Tensor,
        see: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        ends: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rows, length = tokens.shape
        device = tokens.device.type
        places = torch.arange(first, first + rows, device=tokens.device)[:, None]
        turns = self._turns[positions]
        # Weights are in the dtype of autocast already, which would cast them again for each product.
        with torch.inference_mode(), torch.autocast(device, enabled=False):
            hidden = self._model.embed(tokens, positions)
            for number, (block, products) in enumerate(zip(self._model.blocks, self._blocks, strict=True)):
                mixed = products.first(block.input_layernorm(hidden).to(self._dtype))
                heads = mixed.view(rows, length, -1, self._width)
                q, k, v = heads.split([self._heads, self._groups, self._groups], dim=2)
                self._turn(heads[:, :, : self._heads + self._groups], turns, products)
                self._cache.kept[number][:, places, :, positions] = heads[:, :, self._heads :].unflatten(2, (2, -1))
                attended = see(number, q, k, v).reshape(rows, length, -1)
                if ends is not None and number == len(self._blocks) - 1:
                    # Of the other tokens nobody asks more than their keys and values.
                    hidden, attended = hidden[ends], attended[ends]
                hidden = hidden + products.out(attended)
                gate, up = products.second(block.post_attention_layernorm(hidden).to(self._dtype)).chunk(2, dim=-1)
                hidden = hidden + products.down(silu(gate).mul_(up))
            normed: Tensor = self._model.final_norm(hidden)
            return normed

    def _turn(self, heads: Tensor, turns: Tensor, products: "_Products") -> None:
        """Norm, if any, and rotate queries and keys [rows, length, heads, head_dim] in place, in fp32."""
        normed = heads if products.scale is None else products.normed(heads, self._heads)
        wide = normed.float()
        torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turns)
        if wide is not heads:
            heads.copy_(wide)


class _Products:
    """The linear maps of one block, as functions of their input."""

    def __init__(self, block: Any, paired: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        attention, feed_forward = block.self_attn, block.mlp
        q, k, v = _first(block)
        self.first = _joined([(q, paired), (k, paired), (v, lambda channels: channels)], dtype)
        self.second = _joined([(layer, lambda channels: channels) for layer in _second(block)], dtype)
        self.out = _joined([(attention.o_proj, lambda channels: channels)], dtype)
        self.down = _joined([(feed_forward.down_proj, lambda channels: channels)], dtype)
        self.scale = None
        if attention.qk_norm:
            self.scale = paired(attention.q_norm.weight), paired(attention.k_norm.weight)
            self._eps = attention.q_norm.eps

    def normed(self, heads: Tensor, queries: int) -> Tensor:
        """RMSNorm of each head, as layers.RMSNorm computes it, with the weights of queries and of keys."""
        assert self.scale is not None
        wide = heads.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(heads.dtype)
        q, k = self.scale
        return torch.cat([normed[:, :, :queries] * q, normed[:, :, queries:] * k], dim=2).to(heads.dtype)


def _joined(parts: Iterable[tuple[nn.Linear, Callable[[Tensor], Tensor]]], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """One product in place of several of the same input, with the outputs of each in the order that its function gives."""
    pairs = list(parts)
    weights = [order(layer.weight).to(dtype) for layer, order in pairs]
    biases = [order(layer.bias).to(dtype) for layer, order in pairs if layer.bias is not None]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = torch.cat(biases) if biases else None
    return lambda x: linear(x, weight, bias)
