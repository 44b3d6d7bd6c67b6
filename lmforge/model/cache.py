"""The keys and values of tokens already read, so that generation reads each token once.

A row is a line of slots filled from the left, the same number in every row: rows of unlike lengths are padded at their
left. Slots say what came before what, positions (given to the model) say which angle a token turns by, and the document
of a slot, -1 on padding, says what belongs together.
"""

import torch

from lmforge.errors import Mistake
from lmforge.model.shapes import ModelConfig


class LayerCache:
    """One layer's keys and values: [rows, key_value_heads, max_length, head_dim] each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.filled = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' [rows, key_value_heads, length, head_dim]; returns all so far, as views."""
        end = self.filled + keys.shape[2]
        self.keys[:, :, self.filled : end] = keys
        self.values[:, :, self.filled : end] = values
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class Cache:
    """Room for `max_length` tokens in each of `rows`, allocated at once and filled by the model's forward.

    Raises Mistake when the shape cannot read that many tokens (learned positions).
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        max_length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        limit = config.longest_row_tokens
        if limit is not None and max_length > limit:
            raise Mistake(f"this model reads at most {limit} tokens, not {max_length}: shorten prompt plus new tokens")
        shape = (rows, config.num_key_value_heads, max_length, config.head_dim)
        self.layers = [
            LayerCache(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))
            for _ in range(config.num_hidden_layers)
        ]
        self.max_length = max_length
        self.length = 0
        self._documents = torch.full((rows, max_length), -1, device=device, dtype=torch.int32)

    def extend(self, documents: torch.Tensor) -> torch.Tensor:
        """Take the documents [rows, length] of the tokens about to be read; returns those of all tokens so far."""
        end = self.length + documents.shape[1]
        if end > self.max_length:
            raise ValueError(f"the cache has {self.max_length} slots and {end} tokens")
        self._documents[:, self.length : end] = documents
        self.length = end
        return self._documents[:, :end]
