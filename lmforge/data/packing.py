"""Documents into rows of one length: which tokens a row holds, and what each of them predicts.

Concat packing: the documents of a split, one after another, cut every `length` tokens. Row n holds the tokens from
n·length to n·length + length inclusive; the last of them is only a target here and the first input of row n + 1, so
every transition is scored exactly once. The row's own bookkeeping makes it self-contained: attention, positions and
targets stop at each document's edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

IGNORE_INDEX = -100
PADDING_DOCUMENT_ID = -1


@dataclass(frozen=True)
class PackedSequence:
    """One sample, each array of shape [length]; the same four as in `Batch`."""

    tokens: np.ndarray  # int64
    labels: np.ndarray  # int64, UNSCORED where there is nothing to predict
    positions: np.ndarray  # int64, from 0 at each document's start and at the row's
    document_ids: np.ndarray  # int32, 0, 1, … in the row; PADDING after the last token
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # fp32, what else is known of each token, by name

    @classmethod
    def all_padding(cls, sequence_length: int, extras: Sequence[str] = ()) -> Self:
        """A row of nothing, to be filled."""
        return cls(
            np.zeros(sequence_length, np.int64),
            np.full(sequence_length, IGNORE_INDEX, np.int64),
            np.zeros(sequence_length, np.int64),
            np.full(sequence_length, PADDING_DOCUMENT_ID, np.int32),
            {name: np.zeros(sequence_length, np.float32) for name in extras},
        )


class TokenReader(Protocol):
    """Documents one after another, as one sequence of tokens (shards.Split)."""

    num_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1."""

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64."""


@dataclass(frozen=True)
class ConcatPacking:
    """The rows of a split under concat packing."""

    split: TokenReader
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        """How many rows hold every transition; the last may be partly padding."""
        return -(-(self.split.num_tokens - 1) // self.sequence_length)

    def sequence(self, index: int) -> PackedSequence:
        """Row `index`. A row at or beyond `rows` is all padding."""
        begin = index * self.sequence_length
        inputs = max(0, min(self.sequence_length, self.split.num_tokens - 1 - begin))
        row = PackedSequence.all_padding(self.sequence_length)
        if inputs:
            span = self.split.read(begin, begin + inputs + 1)
            # A document may start at the token that is only a target here: it crosses a boundary, so it is unscored.
            starts = self.split.document_starts(begin, begin + inputs + 1) - begin
            row.tokens[:inputs] = span[:-1]
            row.labels[:inputs] = span[1:]
            row.labels[starts - 1] = IGNORE_INDEX
            edges = np.concatenate(([0], starts[starts < inputs], [inputs]))
            lengths = np.diff(edges)
            row.positions[:inputs] = np.arange(inputs) - np.repeat(edges[:-1], lengths)
            row.document_ids[:inputs] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return row
