"""Documents as sequences of one length: which tokens a sequence holds, and what each of them predicts.

Concat packing: the documents of a split, one after another, cut every `sequence_length` tokens (L). Sequence n holds the tokens
n·L … n·L + L. The last of them is only a label here and the first input of sequence n + 1, so every transition is scored
exactly once. Attention, positions and labels stop at each document's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from lmforge.data.labels import IGNORE_INDEX

PADDING_DOCUMENT_ID = -1


@dataclass(frozen=True)
class PackedSequence:
    """One sample, each array of shape [sequence_length]; the fields are those of `Batch`."""

    tokens: np.ndarray  # int64
    labels: np.ndarray  # int64, IGNORE_INDEX where there is nothing to predict
    positions: np.ndarray  # int64, from 0 at the start of each document and of the sequence
    document_ids: np.ndarray  # int32, 0, 1, … in the sequence; PADDING_DOCUMENT_ID after the last token
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # fp32 per-token values by name

    @classmethod
    def all_padding(cls, sequence_length: int, extras: Sequence[str] = ()) -> Self:
        """An empty sequence, to be filled."""
        return cls(
            np.zeros(sequence_length, np.int64),
            np.full(sequence_length, IGNORE_INDEX, np.int64),
            np.zeros(sequence_length, np.int64),
            np.full(sequence_length, PADDING_DOCUMENT_ID, np.int32),
            {name: np.zeros(sequence_length, np.float32) for name in extras},
        )

    @classmethod
    def of_one_document(cls, tokens: Sequence[int] | np.ndarray, sequence_length: int) -> Self:
        """One document, padded at its end; nothing is scored."""
        sequence, size = cls.all_padding(sequence_length), len(tokens)
        sequence.tokens[:size] = tokens
        sequence.positions[:size] = np.arange(size)
        sequence.document_ids[:size] = 0
        return sequence


@dataclass(frozen=True)
class TokenizedExample:
    """Something to train on: `tokens` int32 [length]; `loss_mask` bool [length], true for tokens that are to be predicted."""

    tokens: np.ndarray
    loss_mask: np.ndarray


class TokenReader(Protocol):
    """Documents one after another, as one array of tokens (`shards.TokenSplit`)."""

    num_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1."""

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64."""


@dataclass(frozen=True)
class ConcatPacking:
    """The sequences of a split under concat packing."""

    split: TokenReader
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        """How many sequences hold every transition; the last may be partly padding."""
        return -(-(self.split.num_tokens - 1) // self.sequence_length)

    def sequence(self, index: int) -> PackedSequence:
        """Sequence `index`; all padding at or beyond `num_sequences`."""
        begin = index * self.sequence_length
        size = max(0, min(self.sequence_length, self.split.num_tokens - 1 - begin))
        packed = PackedSequence.all_padding(self.sequence_length)
        if size:
            tokens = self.split.read(begin, begin + size + 1)
            # A document may start at the token that is only a label here: it crosses a boundary, so it is not scored.
            starts = self.split.document_starts(begin, begin + size + 1) - begin
            packed.tokens[:size] = tokens[:-1]
            packed.labels[:size] = tokens[1:]
            packed.labels[starts - 1] = IGNORE_INDEX
            bounds = np.concatenate(([0], starts[starts < size], [size]))
            lengths = np.diff(bounds)
            packed.positions[:size] = np.arange(size) - np.repeat(bounds[:-1], lengths)
            packed.document_ids[:size] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return packed
