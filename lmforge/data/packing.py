"""Documents into rows of one length: which tokens a row holds, and what each of them predicts.

Concat packing: the documents of a split, one after another, cut every `length` tokens. Row n holds the tokens from
n·length to n·length + length inclusive; the last of them is only a target here and the first input of row n + 1, so
every transition is scored exactly once. The row's own bookkeeping makes it self-contained: attention, positions and
targets stop at each document's edge.
"""

from dataclasses import dataclass

import numpy as np

from lmforge.data.shards import Split

UNSCORED = -100
PADDING = -1


@dataclass(frozen=True)
class Row:
    """One sample, each array of shape [length]; the same four as in `Batch`."""

    tokens: np.ndarray  # int64
    targets: np.ndarray  # int64, UNSCORED where there is nothing to predict
    positions: np.ndarray  # int64, from 0 at each document's start and at the row's
    documents: np.ndarray  # int32, 0, 1, … in the row; PADDING after the last token


@dataclass(frozen=True)
class Concat:
    """The rows of a split under concat packing."""

    split: Split
    length: int

    @property
    def rows(self) -> int:
        """How many rows hold every transition; the last may be partly padding."""
        return -(-(self.split.tokens - 1) // self.length)

    def row(self, index: int) -> Row:
        """Row `index`. A row at or beyond `rows` is all padding."""
        begin = index * self.length
        inputs = max(0, min(self.length, self.split.tokens - 1 - begin))
        tokens = np.zeros(self.length, np.int64)
        targets = np.full(self.length, UNSCORED, np.int64)
        positions = np.zeros(self.length, np.int64)
        documents = np.full(self.length, PADDING, np.int32)
        if inputs:
            span = self.split.read(begin, begin + inputs + 1)
            # A document may start at the token that is only a target here: it crosses a boundary, so it is unscored.
            starts = self.split.document_starts(begin, begin + inputs + 1) - begin
            tokens[:inputs] = span[:-1]
            targets[:inputs] = span[1:]
            targets[starts - 1] = UNSCORED
            edges = np.concatenate(([0], starts[starts < inputs], [inputs]))
            lengths = np.diff(edges)
            positions[:inputs] = np.arange(inputs) - np.repeat(edges[:-1], lengths)
            documents[:inputs] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return Row(tokens, targets, positions, documents)
