"""Examples on their way into a folder.

They are written to the disk as they come, and divided into splits once all are known. Memory holds
a few numbers for each example, so files of any size can be read. Which split an example belongs to
is decided in `examples.py`.
"""

from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import xxhash

from lmforge.core.data.packing import TokenizedExample

ARRAY_DTYPES = {"tokens": np.dtype(np.int32), "scored": np.dtype(bool)}
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class ExampleGroup:
    """Sequences that belong together, and numbers by name.

    There is one sequence, or the two of a pair, each of at least two tokens.
    """

    sequences: tuple[TokenizedExample, ...]
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def packed_length(self) -> int:
        """Tokens it takes in a packed sequence: the last token of each is only a label."""
        return sum(len(sequence.tokens) - 1 for sequence in self.sequences)


class SpillBuffer(ExitStack):
    """Examples in unnamed files, all with as many sequences and the same names of scalars.

    Use it in a `with`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._files = {name: self.enter_context(TemporaryFile(dir=folder)) for name in ARRAY_DTYPES}  # noqa: SIM115
        self._hashes = array("Q")
        self._num_scored_tokens = array("q")
        self._lengths = array("q")
        self._scalars: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def hashes(self) -> np.ndarray:
        """A hash of each example's tokens, or of its whole conversation, uint64 [examples]."""
        return np.array(self._hashes, np.uint64)

    def add(self, group: ExampleGroup) -> None:
        digest = xxhash.xxh3_64()
        for sequence in group.sequences:
            tokens = sequence.tokens.astype(ARRAY_DTYPES["tokens"], copy=False).tobytes()
            digest.update(tokens)
            self._files["tokens"].write(tokens)
            self._files["scored"].write(sequence.loss_mask.astype(bool, copy=False).tobytes())
            self._lengths.append(len(sequence.tokens))
        self._hashes.append(group.sequences[0].part_of or digest.intdigest())
        self._num_scored_tokens.append(
            sum(int(sequence.loss_mask[1:].sum()) for sequence in group.sequences)
        )
        for name, value in group.scalars.items():
            self._scalars.setdefault(name, array("f")).append(value)

    def write(self, folder: Path, split: str, selected: np.ndarray) -> dict[str, Any]:
        """Write the `selected` examples, bool [examples], in order, and describe them.

        They are written as arrays named after the split.
        """
        group = len(self._lengths) // max(1, len(self))
        lengths = np.array(self._lengths, np.int64)
        is_selected = np.repeat(selected, group)
        starts = np.cumsum(np.append(0, lengths[is_selected]))
        # Each run of selected sequences, (start, stop) in tokens.
        edges = np.diff(np.concatenate(([False], is_selected, [False])).astype(np.int8))
        bounds = np.cumsum(np.append(0, lengths))[np.flatnonzero(edges)].tolist()
        spans = list(zip(bounds[::2], bounds[1::2], strict=True))

        def read_blocks(name: str) -> Iterator[bytes]:
            file = self._files[name]
            size = ARRAY_DTYPES[name].itemsize
            for start, stop in spans:
                file.seek(start * size)
                for at in range(start * size, stop * size, BLOCK_BYTES):
                    yield file.read(min(BLOCK_BYTES, stop * size - at))

        num_tokens = int(starts[-1])
        checksums = {}
        for name, dtype in ARRAY_DTYPES.items():
            path = folder / f"{split}-{name}.npy"
            checksums[name] = _write_array(path, dtype, num_tokens, read_blocks(name))
        arrays = {"starts": starts}
        if selected.any():
            for name, scalars in sorted(self._scalars.items()):
                arrays[f"label-{name}"] = np.array(scalars, np.float32)[selected]
        for name, values in arrays.items():
            path = folder / f"{split}-{name}.npy"
            checksums[name] = _write_array(path, values.dtype, len(values), [values.tobytes()])
        return {
            "examples": int(selected.sum()),
            "group": group if selected.any() else 1,
            "tokens": num_tokens,
            "scored": int(np.array(self._num_scored_tokens, np.int64)[selected].sum()),
            "xxh3": checksums,
        }


def _write_array(path: Path, dtype: np.dtype[Any], length: int, blocks: Iterable[bytes]) -> str:
    """Write a 1-D array as numpy saves it, from blocks of its bytes, and return their xxh3."""
    digest = xxhash.xxh3_64()
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (length,),
    }
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            digest.update(block)
            file.write(block)
    return digest.hexdigest()
