"""The texts that a tokenizer is trained on: the pieces of documents with the smallest hashes.

So they depend only on the texts of all training documents and the seed, not on the order of the
documents, their files, or the number of processes.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import xxhash

from lmforge.core.data.order import derive_key
from lmforge.text.prepare.dist_context import DistContext
from lmforge.text.prepare.shard_jobs import UnitReader, validation_threshold
from lmforge.text.prepare.worker_pool import OnProgress, Report, WorkerPool
from lmforge.text.sources.records import ReadProgress

SAMPLE_CHARACTERS = 16_000_000  # more than the standard library has; training on it takes seconds
# A longer document is sampled in pieces, so that one of them is not the whole sample.
PIECE_CHARACTERS = 1 << 14
# Processes return pieces that may be in the sample: at first a few times its size, counting one
# byte as a character.
OVERSAMPLING = 4
NEXT_OVERSAMPLING = 64


class LeastTexts:
    """Keeps the added texts with the smallest keys: as few as have `limit` characters together."""

    def __init__(self, limit: int) -> None:
        self.characters = 0
        self._limit = limit
        self._heap: list[tuple[int, str]] = []  # keys negated: the greatest is on top

    def add(self, key: int, text: str) -> None:
        if self.characters >= self._limit and (-key, text) <= self._heap[0]:
            return
        heapq.heappush(self._heap, (-key, text))
        self.characters += len(text)
        while self.characters - len(self._heap[0][1]) >= self._limit:
            self.characters -= len(heapq.heappop(self._heap)[1])

    def add_all(self, items: Iterable[tuple[int, str]]) -> None:
        for key, text in items:
            self.add(key, text)

    def items(self) -> list[tuple[int, str]]:
        """(key, text), the smallest key first."""
        return [(-negated, text) for negated, text in sorted(self._heap, reverse=True)]


def sample_texts(
    readers: Sequence[UnitReader],
    pool: WorkerPool,
    dist_ctx: DistContext,
    *,
    source_bytes: int,
    ratio: float,
    seed: int,
    on_progress: OnProgress,
) -> list[str]:
    """Texts to learn merges from, of at most SAMPLE_CHARACTERS.

    Those for validation are left out unless there are no others. Each rank has its own `readers`.
    Rank 0 gets the texts of all ranks, other ranks those of their readers.
    """
    least = LeastTexts(SAMPLE_CHARACTERS)
    fraction = min(1.0, OVERSAMPLING * SAMPLE_CHARACTERS / max(1, source_bytes))
    while True:
        read = partial(
            sample_unit, ratio=ratio, key=derive_key(seed, "sample"), below=int(fraction * 2**64)
        )
        with dist_ctx.raise_on_all():
            for _, items in pool.map_unordered(read, readers, on_progress):
                least.add_all(items)
        others = (dist_ctx.gather(least.items()) or [])[1:]
        least.add_all(chain.from_iterable(others))
        characters = dist_ctx.broadcast(least.characters)
        if characters >= SAMPLE_CHARACTERS or fraction == 1.0:
            break
        least = LeastTexts(SAMPLE_CHARACTERS)
        fraction = min(1.0, NEXT_OVERSAMPLING * fraction)
    if not characters and ratio:
        return sample_texts(
            readers,
            pool,
            dist_ctx,
            source_bytes=source_bytes,
            ratio=0,
            seed=seed,
            on_progress=on_progress,
        )
    texts = [text for _, text in least.items()]
    excess = least.characters - SAMPLE_CHARACTERS
    if excess > 0:
        texts[-1] = texts[-1][:-excess]
    return texts


def find_characters(
    readers: Sequence[UnitReader],
    pool: WorkerPool,
    dist_ctx: DistContext,
    *,
    on_progress: OnProgress,
) -> set[str]:
    """The characters of all documents of the readers of all ranks, on every rank."""
    result = set[str]()
    with dist_ctx.raise_on_all():
        for _, characters in pool.map_unordered(_characters_of_unit, readers, on_progress):
            result.update(characters)
    return set().union(*dist_ctx.all_gather(result))


def _characters_of_unit(reader: UnitReader, report: Report) -> set[str]:
    result = set[str]()
    progress = ReadProgress()
    for text, _ in reader.hashed_texts(progress):
        result.update(text)
        report(progress.bytes)
    return result


def sample_unit(
    reader: UnitReader, report: Report, *, ratio: float, key: int, below: int
) -> list[tuple[int, str]]:
    """(hash, text) of the pieces of a unit that may be in the sample.

    Their hashes are below `below`, and there are no more than fill the sample.
    """
    least = LeastTexts(SAMPLE_CHARACTERS)
    progress = ReadProgress()
    for text, digest in reader.hashed_texts(progress):
        if digest >= validation_threshold(ratio):
            for piece in _split_into_pieces(text):
                piece_hash = xxhash.xxh3_64_intdigest(piece.encode(), key)
                if piece_hash < below:
                    least.add(piece_hash, piece)
        report(progress.bytes)
    return least.items()


def _split_into_pieces(text: str) -> Iterator[str]:
    """A document in pieces of about PIECE_CHARACTERS.

    They end with a line, if lines are no longer than that.
    """
    start = 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        middle = start + PIECE_CHARACTERS
        end = text.find("\n", middle, middle + PIECE_CHARACTERS) + 1 or middle
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
