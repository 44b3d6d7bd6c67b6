"""Incremental decoding: several sequences that grow by a token at a time, with each token computed once.

Sequences join and leave while others go on; they are numbered 0, 1, … in the order in which they joined. Which token comes
next is not decided here but in generate/.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lmforge.model.cache import KVCache
from lmforge.model.decode_model import LlamaDecodeModel, can_fuse

# Sequences are computed together where the shortest has at least this fraction of the longest one's tokens.
MIN_LENGTH_RATIO = 0.75
# With more tokens at once, activations take more memory than keys and values do, and nothing gets faster.
MAX_GROUP_TOKENS = 1 << 14
# Attention in more groups than this is slower than attention over empty slots.
MAX_GROUPS = 8


class IncrementalDecoder:
    """At most `batch_size` sequences of at most `max_length` tokens, with a KV cache in `dtype`.

    Raises UserError where the model cannot compute that many tokens (learned positions).
    """

    def __init__(self, model: Any, batch_size: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._cache = KVCache(model.config, batch_size, max_length, device=device, dtype=dtype)
        self._decode_model = LlamaDecodeModel(model, self._cache, dtype) if can_fuse(model, dtype) else None
        self._device = device
        self._lengths: list[int] = []
        self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute prompts as new sequences after the others; hidden states of each last token [prompts, hidden_size].

        Prompts sorted by length are computed with little padding.
        """
        first, groups = len(self._lengths), group_by_length([*map(len, prompts)])
        hidden = [self._prefill_group(first + start, prompts[start:stop]) for start, stop in groups]
        self._lengths += map(len, prompts)
        self._positions = torch.tensor(self._lengths, device=self._device)
        return torch.cat(hidden)

    def _prefill_group(self, first_sequence: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = [*map(len, prompts)]
        longest = max(lengths)
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self._device)
        last = torch.tensor(lengths, device=self._device) - 1
        if self._decode_model is not None:
            return self._decode_model.prefill(tokens, first_sequence, last)
        positions = torch.arange(longest, device=self._device).expand(len(prompts), -1)
        return self._forward(first_sequence, tokens, positions, longest)[torch.arange(len(prompts), device=self._device), last]

    def decode_step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the next token of every sequence, int64 [sequences]; returns hidden states [sequences, hidden_size]."""
        if self._decode_model is not None:
            groups = [*group_by_length(self._lengths)]
            if self._device.type != "cpu" or len(groups) > MAX_GROUPS:
                groups = [(0, len(self._lengths))]
            hidden = self._decode_model.decode_step(tokens, self._positions, self._lengths, groups)
        else:
            hidden = self._forward(0, tokens[:, None], self._positions[:, None], max(self._lengths) + 1)[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        return hidden

    def _forward(self, first_sequence: int, tokens: torch.Tensor, positions: torch.Tensor, end: int) -> torch.Tensor:
        document_ids = torch.zeros_like(tokens, dtype=torch.int32)
        hidden: torch.Tensor = self._model(
            tokens, positions, document_ids, cache=self._cache.view(first_sequence, positions, end)
        )
        return hidden

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only these sequences; they become 0, 1, … in this order."""
        moved = [(source, target) for target, source in enumerate(indices) if source != target]
        if moved:
            self._cache.copy_sequences(*zip(*moved, strict=True))
        self._lengths = [self._lengths[index] for index in indices]
        self._positions = torch.tensor(self._lengths, device=self._device)


def group_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of neighbours to be computed together: of lengths that differ little, and not too many tokens."""
    start, shortest, longest = 0, lengths[0], lengths[0]
    for index, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < MIN_LENGTH_RATIO * longest or (index > start and (index + 1 - start) * longest > MAX_GROUP_TOKENS):
            yield start, index
            start, shortest, longest = index, length, length
    yield start, len(lengths)
