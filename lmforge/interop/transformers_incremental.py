"""Reading growing texts with a model of the transformers library, whose cache has one length for all rows.

Rows are padded at their left, and every text is read anew when another one joins: right for any family, and slower than
reading.py, which knows where its keys are.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmforge.errors import UserError

if TYPE_CHECKING:
    from lmforge.interop.transformers_model import TransformersModel


class TransformersKVCache:
    """transformers' keys and values, and what ours has to know of the tokens behind them."""

    def __init__(self, past_key_values: Any) -> None:
        self.past_key_values = past_key_values
        self._read_so_far: tuple[Tensor, Tensor] | None = None

    def extend(self, positions: Tensor, document_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of the tokens about to be read, [rows, length]; returns those of all tokens so far."""
        if self._read_so_far is not None:
            positions, document_ids = (
                torch.cat(pair, dim=1) for pair in zip(self._read_so_far, (positions, document_ids), strict=True)
            )
        self._read_so_far = positions, document_ids
        return positions, document_ids

    def select_sequences(self, indices: Tensor) -> None:
        """Only these rows, int64, in this order."""
        assert self._read_so_far
        self.past_key_values.batch_select_indices(indices)
        self._read_so_far = self._read_so_far[0][indices], self._read_so_far[1][indices]


class TransformersIncrementalDecoder:
    """What reading.Reader is, for a ForeignModel."""

    def __init__(self, model: "TransformersModel", max_length: int, device: torch.device) -> None:
        limit = model.config.max_sequence_length
        if limit is not None and max_length > limit:
            raise UserError(f"this model reads at most {limit} tokens, not {max_length}: shorten prompt plus new tokens")
        self._model = model
        self._device = device
        self._lengths: list[int] = []
        self._tokens = torch.zeros(0, 0, dtype=torch.long, device=device)  # of each row, its end in the last column
        self._cache: TransformersKVCache

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts in new rows after the others; hidden states of each one's last token [prompts, width]."""
        lengths = [*self._lengths, *map(len, prompts)]
        longest, before = max(lengths), len(self._lengths)
        tokens = torch.zeros(len(lengths), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts, start=before):
            tokens[row, -len(prompt) :] = torch.tensor(prompt)
        tokens = tokens.to(self._device)
        known = min(longest, self._tokens.shape[1])
        tokens[:before, longest - known :] = self._tokens[:, self._tokens.shape[1] - known :]
        positions = torch.arange(longest, device=self._device) - longest + torch.tensor(lengths, device=self._device)[:, None]
        self._cache = self._model.new_cache()
        self._tokens, self._lengths = tokens, lengths
        documents = torch.where(positions < 0, -1, 0).int()
        return self._model(tokens, positions.clamp(min=0), documents, cache=self._cache)[before:, -1]

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Read the next token of every row, int64 [rows]; its hidden states [rows, width]."""
        positions = torch.tensor(self._lengths, device=self._device)[:, None]
        self._tokens = torch.cat([self._tokens, tokens[:, None]], dim=1)
        self._lengths = [length + 1 for length in self._lengths]
        return self._model(tokens[:, None], positions, torch.zeros_like(positions, dtype=torch.int32), cache=self._cache)[:, 0]

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Only these rows go on, and become rows 0, 1, … in this order."""
        chosen = torch.tensor(indices, dtype=torch.long, device=self._device)
        self._tokens, self._lengths = self._tokens[chosen], [self._lengths[row] for row in indices]
        self._cache.select_sequences(chosen)
