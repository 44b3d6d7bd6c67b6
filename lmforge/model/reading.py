"""Reading several texts that grow by a token at a time, each token once: what generation asks of a model.

Texts join and leave while others go on; those being read are rows 0, 1, …, in the order in which they joined. Which token
comes next is not decided here.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lmforge.model.cache import Cache
from lmforge.model.fused import Fused, fusible

if TYPE_CHECKING:
    from lmforge.model.layers import LanguageModel

# Texts are read together where the shortest has at least this share of the longest one's tokens; the rest is padding.
ALIKE = 0.75
# With more tokens at once, activations take more memory than keys and values do, and nothing gets faster.
TOGETHER_TOKENS = 1 << 14
# Attention that is computed in more pieces than this is slower than reading slots that are empty.
MOST_PIECES = 8


class Reader:
    """At most `rows` texts of at most `max_length` tokens, with a cache of keys and values in `dtype`.

    Raises Mistake when the model cannot read that many tokens (learned positions).
    """

    def __init__(self, model: "LanguageModel", rows: int, max_length: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._cache = Cache(model.config, rows, max_length, device=device, dtype=dtype)
        self._fused = Fused(model, self._cache, dtype) if fusible(model, dtype) else None
        self._device = device
        self._lengths: list[int] = []
        self._positions = torch.zeros(0, dtype=torch.long, device=device)

    def begin(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read prompts in new rows after the others; hidden states of each one's last token [prompts, width].

        Prompts that follow each other in order of length are read with little padding.
        """
        first = len(self._lengths)
        hidden = [self._read(first + start, prompts[start:stop]) for start, stop in alike([*map(len, prompts)])]
        self._lengths += map(len, prompts)
        self._positions = torch.tensor(self._lengths, device=self._device)
        return torch.cat(hidden)

    def _read(self, first: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = [*map(len, prompts)]
        longest = max(lengths)
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self._device)
        last = torch.tensor(lengths, device=self._device) - 1
        if self._fused is not None:
            return self._fused.begin(tokens, first, last)
        positions = torch.arange(longest, device=self._device).expand(len(prompts), -1)
        return self._forward(first, tokens, positions, longest)[torch.arange(len(prompts), device=self._device), last]

    def go_on(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read the next token of every row, int64 [rows]; its hidden states [rows, width]."""
        if self._fused is not None:
            pieces = [*alike(self._lengths)]
            if self._device.type != "cpu" or len(pieces) > MOST_PIECES:
                pieces = [(0, len(self._lengths))]
            hidden = self._fused.go_on(tokens, self._positions, self._lengths, pieces)
        else:
            hidden = self._forward(0, tokens[:, None], self._positions[:, None], max(self._lengths) + 1)[:, 0]
        self._lengths = [length + 1 for length in self._lengths]
        self._positions = self._positions + 1
        return hidden

    def _forward(self, first: int, tokens: torch.Tensor, positions: torch.Tensor, end: int) -> torch.Tensor:
        documents = torch.zeros_like(tokens, dtype=torch.int32)
        return self._model(tokens, positions, documents, cache=self._cache.reading(first, positions, end))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows go on, and become rows 0, 1, … in this order."""
        moved = [(source, target) for target, source in enumerate(rows) if source != target]
        if moved:
            self._cache.move(*zip(*moved, strict=True))
        self._lengths = [self._lengths[row] for row in rows]
        self._positions = torch.tensor(self._lengths, device=self._device)


def alike(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of stretches of neighbours to be read together: of lengths that differ little, and not too many."""
    start, shortest, longest = 0, lengths[0], lengths[0]
    for place, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if shortest < ALIKE * longest or (place > start and (place + 1 - start) * longest > TOGETHER_TOKENS):
            yield start, place
            start, shortest, longest = place, length, length
    yield start, len(lengths)
