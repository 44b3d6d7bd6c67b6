"""Items on their way into a folder: tokens and scores go to the disk as they come, and are parted once all are known.

Memory holds a few numbers of each item, so files of any size can be read. Which items belong to which part is not decided here.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash

from lmforge.atomic_files import atomic_write
from lmforge.data.chat.conversations import TokenizedExample

ARRAY_DTYPES = {"tokens": np.dtype(np.int32), "scored": np.dtype(bool)}
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ExampleGroup:
    """What belongs together: one sequence, or the sides of a pair, each of two tokens or more; and what is known of it as
    numbers by name."""

    sequences: tuple[TokenizedExample, ...]
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def packed_length(self) -> int:
        """Places it takes in a row: what is predicted last is never an input."""
        return sum(len(sequence.tokens) - 1 for sequence in self.sequences)


class SpillBuffer:
    """Items, all of as many sequences and with labels of the same names, in files without a name. Use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, BinaryIO] = {kind: TemporaryFile(dir=folder) for kind in ARRAY_DTYPES}  # noqa: SIM115 - see __exit__
        self._hashes = array("Q")
        self._num_scored_tokens = array("q")
        self._lengths = array("q")
        self._scalars: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> np.ndarray:
        """Of each item a number that follows from its tokens, uint64."""
        return np.array(self._hashes, np.uint64)

    def add(self, group: ExampleGroup) -> None:
        digest = xxhash.xxh3_64()
        for sequence in group.sequences:
            tokens = sequence.tokens.astype(ARRAY_DTYPES["tokens"], copy=False).tobytes()
            digest.update(tokens)
            self._files["tokens"].write(tokens)
            self._files["scored"].write(sequence.loss_mask.astype(bool, copy=False).tobytes())
            self._lengths.append(len(sequence.tokens))
        self._hashes.append(digest.intdigest())
        self._num_scored_tokens.append(sum(int(sequence.loss_mask[1:].sum()) for sequence in group.sequences))
        for name, value in group.scalars.items():
            self._scalars.setdefault(name, array("f")).append(value)

    def write(self, folder: Path, name: str, selected: np.ndarray) -> dict[str, Any]:
        """Write the items that are `chosen`, bool [items], in their order, as arrays named after `name`, and describe them."""
        group = len(self._lengths) // max(1, len(self))
        lengths = np.array(self._lengths, np.int64)
        of_sequence = np.repeat(selected, group)
        starts = np.concatenate(([0], np.cumsum(lengths[of_sequence]))).astype(np.int64)
        spans = _selected_spans(of_sequence, np.concatenate(([0], np.cumsum(lengths))))
        sums = {
            kind: _write_array(folder / f"{name}-{kind}.npy", dtype, int(starts[-1]), self._blocks(kind, spans))
            for kind, dtype in ARRAY_DTYPES.items()
        }
        numbers = {"starts": starts}
        if selected.any():
            labels = {label: np.array(values, np.float32) for label, values in sorted(self._scalars.items())}
            numbers |= {f"label-{label}": values[selected] for label, values in labels.items()}
        for kind, values in numbers.items():
            sums[kind] = _write_array(folder / f"{name}-{kind}.npy", values.dtype, len(values), [values.tobytes()])
        return {
            "examples": int(selected.sum()),
            "group": group if selected.any() else 1,
            "tokens": int(starts[-1]),
            "scored": int(np.array(self._num_scored_tokens, np.int64)[selected].sum()),
            "xxh3": sums,
        }

    def _blocks(self, kind: str, spans: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        file, size = self._files[kind], ARRAY_DTYPES[kind].itemsize
        for start, stop in spans:
            file.seek(start * size)
            for at in range(start * size, stop * size, BLOCK_BYTES):
                yield file.read(min(BLOCK_BYTES, stop * size - at))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files.values():
            file.close()


def _selected_spans(selected: np.ndarray, starts: np.ndarray) -> list[tuple[int, int]]:
    """First and last place of each stretch of chosen sequences, which lie one after another from `starts`, int64 [n + 1]."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], selected, [False])).astype(np.int8)))
    bounds = starts[changes].tolist()
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _write_array(path: Path, dtype: np.dtype[Any], length: int, blocks: Iterator[bytes] | Sequence[bytes]) -> str:
    """An array of one dimension as numpy saves it, from its bytes, whose hash is returned."""
    digest = xxhash.xxh3_64()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    with atomic_write(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            digest.update(block)
            file.write(block)
    return digest.hexdigest()
