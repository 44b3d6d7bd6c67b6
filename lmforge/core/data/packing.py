"""Documents as sequences of one length: which tokens a sequence holds, and what each of them
predicts.

Concat packing: the documents of a split, one after another, cut every `sequence_length` tokens (L).
Sequence n holds the tokens n·L … n·L + L. The last of them is only a label here and the first input
of sequence n + 1, so every transition is scored exactly once. Attention, positions and labels stop
at each document's end.

Best-fit packing: whole documents, or spans of those that are longer than a sequence. Which of them
share a sequence is chosen so that there is hardly any padding. The token after a span is only a
label, so here too every transition within a document is scored exactly once. Only the algorithm is
here; for token shards its result is stored (best_fit_index.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, overload

import numpy as np

from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.errors import prefix_errors

PADDING_DOCUMENT_ID = -1
# The name of an extra; with how many numbers it has of each token, where that is not one.
Extra = str | tuple[str, int]
# `map`, or an executor's `map`.
MapRows = Callable[[Callable[[int], None], Iterable[int]], Iterator[None]]


@dataclass(frozen=True)
class PackedSequence:
    """One sample, each array of shape [sequence_length]; the fields are those of `Batch`."""

    tokens: np.ndarray  # int64
    labels: np.ndarray  # int64, IGNORE_INDEX where there is nothing to predict
    positions: np.ndarray  # int64, from 0 at the start of each document and of the sequence
    # int32, 0, 1, … in the sequence; PADDING_DOCUMENT_ID after the last token.
    document_ids: np.ndarray
    # fp32 per-token values by name, one or several of a token.
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    # int32, the number of its source, the same everywhere, where there are several.
    source_ids: np.ndarray | None = None

    def pad(self, start: int = 0) -> None:
        """Make all padding from column `start` on."""
        of_sequences = (slice(None),) * (self.tokens.ndim - 1)
        for values in (self.tokens, self.positions, *self.extras.values()):
            values[(*of_sequences, slice(start, None))] = 0
        self.labels[..., start:] = IGNORE_INDEX
        self.document_ids[..., start:] = PADDING_DOCUMENT_ID

    def put_document(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Make it one document, padded at its end; nothing is scored."""
        size = len(tokens)
        self.pad()
        self.tokens[:size], self.positions[:size], self.document_ids[:size] = (
            tokens,
            np.arange(size),
            0,
        )


@dataclass(frozen=True)
class PackedSequences(PackedSequence):
    """Samples as rows: each array of shape [sequences, sequence_length]."""

    @classmethod
    def empty(
        cls,
        count: int,
        sequence_length: int,
        extras: Sequence[Extra] = (),
        *,
        with_sources: bool = False,
    ) -> Self:
        """Rows to be written; what is in them before is arbitrary, except `source_ids` (0).

        All arrays are one piece of memory: the C library keeps one for the next batch. Smaller
        arrays would be returned to the system after each batch, and the page faults of allocating
        them again take longer than reading the batch.
        """
        dtypes = [np.int64] * 3 + [np.int32] * (1 + with_sources) + [np.float32] * len(extras)
        widths = dict(
            (each, ()) if isinstance(each, str) else (each[0], each[1:]) for each in extras
        )
        shapes = [(count, sequence_length)] * (4 + with_sources) + [
            (count, sequence_length, *each) for each in widths.values()
        ]
        sizes = [
            math.prod(shape) * np.dtype(dtype).itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        ends = np.cumsum(sizes)
        pieces = zip(np.split(np.empty(ends[-1], np.uint8), ends[:-1]), dtypes, shapes, strict=True)
        arrays = (piece.view(dtype).reshape(shape) for piece, dtype, shape in pieces)
        out = cls(
            tokens=next(arrays),
            labels=next(arrays),
            positions=next(arrays),
            document_ids=next(arrays),
            source_ids=next(arrays) if with_sources else None,
            extras=dict(zip(widths, arrays, strict=True)),
        )
        if out.source_ids is not None:
            out.source_ids.fill(0)
        return out

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[PackedSequence]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, rows: int) -> PackedSequence: ...
    @overload
    def __getitem__(self, rows: slice) -> "PackedSequences": ...
    def __getitem__(self, rows: int | slice) -> PackedSequence:
        """One row, or some, as views."""
        kind = PackedSequences if isinstance(rows, slice) else PackedSequence
        extras = {name: values[rows] for name, values in self.extras.items()}
        source_ids = None if self.source_ids is None else self.source_ids[rows]
        return kind(
            self.tokens[rows],
            self.labels[rows],
            self.positions[rows],
            self.document_ids[rows],
            extras,
            source_ids,
        )

    def fill(
        self,
        samples: Sequence[int],
        sequences: Sequence[tuple["Packing", int]],
        map_rows: MapRows = map,
    ) -> None:
        """Read sequences into the first rows, each given by its packing and index, and make the
        other rows padding.

        `samples` number them in the message of a UserError. `map_rows` reads each row, as that of
        an executor does in threads.
        """

        def read(row: int) -> None:
            packing, index = sequences[row]
            with prefix_errors(f"sample {samples[row]}"):
                packing.read(index, self[row])

        for _ in map_rows(read, range(len(sequences))):
            pass
        self[len(sequences) :].pad()


@dataclass(frozen=True)
class TokenizedExample:
    """Something to train on: `tokens` int32 [length]; `loss_mask` bool [length], true for tokens
    that are to be predicted.

    `part_of` is a hash of the conversation that it is one turn of, if there are others: they go to
    the same split.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    part_of: int | None = None


class Packing(Protocol):
    """How stored tokens become packed sequences: how many there are, and each of them by its
    index.
    """

    @property
    def num_sequences(self) -> int: ...

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras that its sequences have."""
        return ()

    def read(self, index: int, out: PackedSequence) -> None:
        """Write sequence `index` to `out`, which may hold anything; all padding at or beyond
        `num_sequences`.
        """


class TokenReader(Protocol):
    """Documents one after another, as one array of tokens (`shards.TokenSplit`)."""

    num_tokens: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1."""

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin strictly between `start` and `stop`, int64."""


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items of these sizes (int [n], each from 1 to `capacity`) into bins: each into the
    fullest bin with enough space.

    Longer items are placed first (Ding et al., "Fewer Truncations", arXiv 2404.10830). Items are
    not cut; the rest of a bin stays empty. Returns (items int64 [n] in the order of bins, starts
    int64 [bins + 1] of each bin among them). Deterministic.
    """
    bins: list[list[int]] = []
    with_space: defaultdict[int, list[int]] = defaultdict(list)
    # Bit s is set if a bin has space s: the lowest set bit at or above a size is the best fit.
    spaces = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            number = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
            bins[number].append(item)
        else:
            space = capacity
            number = len(bins)
            bins.append([item])
        left = space - size
        with_space[left].append(number)
        spaces |= 1 << left
    starts = np.concatenate(([0], np.cumsum([len(each) for each in bins]))).astype(np.int64)
    return np.array([item for each in bins for item in each], np.int64), starts


@dataclass(frozen=True)
class ConcatPacking(Packing):
    """The sequences of a split under concat packing.

    A sequence is all padding if `overlap_damage` is true for its tokens.
    """

    split: TokenReader
    sequence_length: int
    overlap_damage: Callable[[int, int], bool] = lambda start, stop: False

    @property
    def num_sequences(self) -> int:
        """How many sequences hold every transition; the last may be partly padding."""
        return -(-(self.split.num_tokens - 1) // self.sequence_length)

    def read(self, index: int, out: PackedSequence) -> None:
        begin = index * self.sequence_length
        size = max(0, min(self.sequence_length, self.split.num_tokens - 1 - begin))
        if not size or self.overlap_damage(begin, begin + size + 1):
            out.pad()
            return
        tokens = self.split.read(begin, begin + size + 1)
        starts = self.split.document_starts(begin, begin + size + 1) - begin
        out.tokens[:size] = tokens[:-1]
        out.labels[:size] = tokens[1:]
        # A document may start at the token that is only a label here: it crosses a boundary, so it
        # is not scored.
        out.labels[starts - 1] = IGNORE_INDEX
        bounds = np.concatenate(([0], starts[starts < size], [size]))
        lengths = bounds[1:] - bounds[:-1]
        np.subtract(np.arange(size), np.repeat(bounds[:-1], lengths), out=out.positions[:size])
        out.document_ids[:size] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        out.pad(size)


class SpanIndex(Protocol):
    """Which spans of documents each sequence of best-fit packing holds
    (`best_fit_index.BestFitIndex`).
    """

    @property
    def num_sequences(self) -> int: ...

    def spans(self, sequence: int) -> Sequence[tuple[int, int]]:
        """(first token, length) of each, `sequence_length` or less together. None: all padding."""


@dataclass(frozen=True)
class BestFitPacking(Packing):
    """The sequences of a split under best-fit packing: spans of an index, with positions from 0 in
    each, then padding.
    """

    split: TokenReader
    index: SpanIndex
    sequence_length: int

    @property
    def num_sequences(self) -> int:
        return self.index.num_sequences

    def read(self, index: int, out: PackedSequence) -> None:
        at = 0
        for number, (start, size) in enumerate(
            self.index.spans(index) if index < self.num_sequences else []
        ):
            tokens = self.split.read(start, start + size + 1)
            columns = slice(at, at + size)
            out.tokens[columns] = tokens[:-1]
            out.labels[columns] = tokens[1:]
            out.positions[columns] = np.arange(size)
            out.document_ids[columns] = number
            at += size
        out.pad(at)
