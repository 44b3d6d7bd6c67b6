"""Documents that contain a text of an evaluation, found by common runs of words.

The method is that of Brown et al. (2020, arXiv 2005.14165). Case and punctuation are ignored. A
document that has 13 words in a row with an evaluation text in common is contaminated; an evaluation
text of 8 to 12 words must be contained completely. Shorter texts are ignored, since they occur in
too many unrelated documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from lmforge.core.files.atomic_files import atomic_write
from lmforge.text.prepare.ngrams import ngram_hashes, word_hashes

NGRAM_WORDS = 13
MIN_NGRAM_WORDS = 8


@dataclass(frozen=True)
class EvaluationNgrams:
    """The hashes of runs of words of evaluation texts.

    by_length: sorted, uint64, by the number of words in a run.
    """

    by_length: dict[int, np.ndarray]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "EvaluationNgrams":
        """The hashes of these texts. Texts of fewer than MIN_NGRAM_WORDS words have none."""
        hashes: dict[int, list[np.ndarray]] = {}
        for words in map(word_hashes, texts):
            if len(words) >= MIN_NGRAM_WORDS:
                n = min(NGRAM_WORDS, len(words))
                hashes.setdefault(n, []).append(ngram_hashes(words, n))
        return cls({n: np.unique(np.concatenate(hashes[n])) for n in sorted(hashes)})

    @property
    def digest(self) -> str:
        """A hash that changes with the texts."""
        content = b"".join(
            bytes([n]) + hashes.astype("<u8").tobytes() for n, hashes in self.by_length.items()
        )
        return xxhash.xxh3_128_hexdigest(content)

    def are_in(self, text: str) -> bool:
        """Return True where a text contains one of these runs of words."""
        words = word_hashes(text)
        for n, hashes in self.by_length.items():
            runs = ngram_hashes(words, n)
            nearest = np.minimum(np.searchsorted(hashes, runs), len(hashes) - 1)
            if (hashes[nearest] == runs).any():
                return True
        return False

    def save(self, path: Path) -> None:
        """Write the hashes to a file for the processes of a preparation."""
        with atomic_write(path) as file:
            np.savez(file, **{str(n): hashes for n, hashes in self.by_length.items()})  # type: ignore[arg-type]

    @classmethod
    @lru_cache(maxsize=1)
    def load(cls, path: Path, digest: str) -> "EvaluationNgrams":
        """Read the hashes from a file, once per process; `digest` is their digest."""
        with np.load(path) as file:
            loaded = cls({int(n): file[n] for n in sorted(file, key=int)})
        assert loaded.digest == digest
        return loaded
