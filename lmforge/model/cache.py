"""The keys and values of tokens already read, so that generation reads each token once.

A row holds one text: the keys and values of its token at position p are in its slot p. Rows have lengths of their own, and
the rows in use are always the first ones, so that a step of decoding reads and writes one block of memory.
"""

from collections.abc import Sequence

import torch

from lmforge.errors import UserError
from lmforge.model.attention import AttentionMask, create_cache_mask
from lmforge.model.config import ModelConfig


class LayerKVCache:
    """One layer's keys and values of the rows that a forward pass reads: views [rows, key_value_heads, slots, head_dim]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, batch_index: torch.Tensor, positions: torch.Tensor) -> None:
        self._keys = keys
        self._values = values
        self._index = batch_index, positions

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' [rows, key_value_heads, length, head_dim]; returns all so far, as views."""
        rows, positions = self._index
        self._keys[rows, :, positions] = keys.transpose(1, 2).to(self._keys.dtype)
        self._values[rows, :, positions] = values.transpose(1, 2).to(self._values.dtype)
        return self._keys, self._values


class KVCacheView:
    """What one forward pass reads and writes of a cache: some of its rows, and of them the slots that are in use.

    `layers` has a LayerCache for each block.
    """

    def __init__(self, cache: "KVCache", first_sequence: int, positions: torch.Tensor, end: int) -> None:
        self._positions = positions
        self._slots = torch.arange(end, device=positions.device)
        last = first_sequence + positions.shape[0]
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.layers = [
            LayerKVCache(keys[first_sequence:last, :, :end], values[first_sequence:last, :, :end], rows, positions)
            for keys, values in cache.key_values
        ]

    def mask(self, window: int | None) -> AttentionMask:
        """What a token sees: the slots of its row up to its own, at most `window` of them."""
        return create_cache_mask(self._positions, self._slots, window)


class KVCache:
    """Room for `max_length` tokens in each of `rows`, allocated at once and filled by the model's forward.

    Raises UserError when the shape cannot read that many tokens (learned positions).
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        limit = config.max_sequence_length
        if limit is not None and max_length > limit:
            raise UserError(f"this model reads at most {limit} tokens, not {max_length}: shorten prompt plus new tokens")
        # Of each layer keys, then values. Zeros: what attention leaves out is still multiplied, by 0.
        shape = (2, batch_size, config.num_key_value_heads, max_length, config.head_dim)
        self.key_values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.max_length = max_length

    def view(self, first_sequence: int, positions: torch.Tensor, end: int) -> KVCacheView:
        """For a forward pass over tokens at `positions` int64 [rows, length] of the rows from `first` on.

        `end` is one more than the largest of the positions. Those of a row are consecutive; where its tokens end before
        the others', what pads it at the right is written to slots that its later tokens take.
        """
        if end > self.max_length:
            raise ValueError(f"the cache has {self.max_length} slots and {end} tokens")
        return KVCacheView(self, first_sequence, positions, end)

    def copy_sequences(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over other rows."""
        for kept in self.key_values:
            kept[:, list(targets)] = kept[:, list(sources)]
