"""Reading several texts that grow by a token at a time, each token once: what generation asks of a model.

Texts join and leave while others go on; those being read are rows 0, 1, …, in the order in which they joined. Which token
comes next is not decided here.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lmforge.model.cache import KVCache
from lmforge.model.decode_model import LlamaDecodeModel, can_fuse

if TYPE_CHECKING:
    from lmforge.model.layers import LanguageModel

# Texts are read together where the shortest has at least this share of the longest one's tokens; the rest is padding.
MIN_LENGTH_RATIO = 0.75
# With more tokens at once, activations take more memory than keys and values do, and nothing gets faster.
MAX_GROUP_TOKENS = 1 << 14
# Attention that is computed in more pieces than this is slower than reading slots that are empty.
MAX_GROUPS = 8


class IncrementalDecoder:
    """At most `rows` texts of at most `max_length` tokens, with a cache of keys and values in `dtype`.

    Raises UserError when the model cannot read that many tokens (learned positions).
    """

    def __init__(
        self, model: "LanguageModel", batch_size: int, max_length: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._cache = KVCache(model.config, batch_size, max_length, device=device, dtype=dtype)
        self._decode_model = LlamaDecodeModel(model, self._cache, dtype) if can_fuse(model, dtype) else None
        self._device = device
        self._lengths: list[int] = []
        self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read prompts in new rows after the others; hidden states of each one's last token [prompts, width].

        Prompts that follow each other in order of length are read with little padding.
        """
        first = len(self._lengths)
        hidden = [
            self._prefill_group(first + start, prompts[start:stop]) for start, stop in group_by_length([*map(len, prompts)])
        ]
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
        """Read the next token of every row, int64 [rows]; its hidden states [rows, width]."""
        if self._decode_model is not None:
            pieces = [*group_by_length(self._lengths)]
            if self._device.type != "cpu" or len(pieces) > MAX_GROUPS:
                pieces = [(0, len(self._lengths))]
            hidden = self._decode_model.decode_step(tokens, self._positions, self._lengths, pieces)
        else:
            hidden = self._forward(0, tokens[:, None], self._positions[:, None], max(self._lengths) + 1)[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        return hidden

    def _forward(self, first_sequence: int, tokens: torch.Tensor, positions: torch.Tensor, end: int) -> torch.Tensor:
        documents = torch.zeros_like(tokens, dtype=torch.int32)
        return self._model(tokens, positions, documents, cache=self._cache.view(first_sequence, positions, end))

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Only these rows go on, and become rows 0, 1, … in this order."""
        moved = [(source, target) for target, source in enumerate(indices) if source != target]
        if moved:
            self._cache.copy_sequences(*zip(*moved, strict=True))
        self._lengths = [self._lengths[row] for row in indices]
        self._positions = torch.tensor(self._lengths, device=self._device)


def group_by_length(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of stretches of neighbours to be read together: of lengths that differ little, and not too many."""
    start, shortest, longest = 0, lengths[0], lengths[0]
    for place, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < MIN_LENGTH_RATIO * longest or (place > start and (place + 1 - start) * longest > MAX_GROUP_TOKENS):
            yield start, place
            start, shortest, longest = place, length, length
    yield start, len(lengths)
