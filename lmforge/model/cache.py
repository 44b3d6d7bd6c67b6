"""The KV cache: keys and values of earlier tokens, so that generation computes each token once.

A row of the cache holds one sequence: keys and values of the token at position p are in slot p. Sequences have lengths of
their own, and the rows in use are always the first ones, so that a decoding step reads and writes one block of memory.
"""

from collections.abc import Sequence

import torch

from lmforge.model.attention import AttentionMask, create_cache_mask
from lmforge.model.config import ModelConfig


class LayerKVCache:
    """One layer's keys and values of the sequences of a forward pass: views [sequences, key_value_heads, slots, head_dim]."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, batch_index: torch.Tensor, positions: torch.Tensor) -> None:
        self._keys = keys
        self._values = values
        self._index = batch_index, positions

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store those of the new tokens, [sequences, key_value_heads, length, head_dim]; returns views of all so far."""
        sequences, positions = self._index
        self._keys[sequences, :, positions] = keys.transpose(1, 2).to(self._keys.dtype)
        self._values[sequences, :, positions] = values.transpose(1, 2).to(self._values.dtype)
        return self._keys, self._values


class KVCacheView:
    """The part of a cache that one forward pass reads and writes: some sequences, and the slots that are in use.

    `layers` has a LayerKVCache for each block.
    """

    def __init__(self, cache: "KVCache", first_sequence: int, positions: torch.Tensor, end: int) -> None:
        self._positions = positions
        self._slots = torch.arange(end, device=positions.device)
        part = slice(first_sequence, first_sequence + positions.shape[0])
        index = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.layers = [
            LayerKVCache(keys[part, :, :end], values[part, :, :end], index, positions) for keys, values in cache.key_values
        ]

    def mask(self, window: int | None) -> AttentionMask:
        """A token sees the slots of its sequence up to its own, at most `window` of them."""
        return create_cache_mask(self._positions, self._slots, window)


class KVCache:
    """`max_length` slots for each of `batch_size` sequences, allocated at once and filled by the model's forward.

    Raises UserError where the model cannot compute that many tokens (learned positions).
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
        config.check_length(max_length)
        # For each layer keys, then values. Zeros: attention still multiplies masked slots, by 0.
        shape = (2, batch_size, config.num_key_value_heads, max_length, config.head_dim)
        self.key_values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.max_length = max_length

    def view(self, first_sequence: int, positions: torch.Tensor, end: int) -> KVCacheView:
        """For a forward pass over tokens at `positions` int64 [sequences, length] of the sequences from `first_sequence` on.

        `end` is one more than the largest position. The positions of a sequence are consecutive; what pads a shorter one at
        the right is written to slots that its later tokens overwrite.
        """
        if end > self.max_length:
            raise ValueError(f"the cache has {self.max_length} slots and {end} tokens")
        return KVCacheView(self, first_sequence, positions, end)

    def copy_sequences(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy sequences over other sequences."""
        for key_values in self.key_values:
            key_values[:, list(targets)] = key_values[:, list(sources)]
