"""Tokens of Megatron-LM: `lmforge prepare FILE.bin OUT --plugins examples/token_files/megatron.py
--tokenizer NAME`.

A pair of files: ids in .bin, and an .idx beside it with the tokens and the first byte of each
sequence, and the first sequence of each document.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import lmforge

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])


@lmforge.register("document_source", "bin", gives="tokens")
def read_megatron(path: Path, options: None) -> Iterator[np.ndarray]:
    """The ids of each document."""
    dtype, lengths, pointers, documents = _read_index(path.with_suffix(".idx"))
    with open(path, "rb") as file:
        for first, end in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
            sequences = [np.zeros(0, dtype)]
            for sequence in range(first, end):
                file.seek(int(pointers[sequence]))
                sequences.append(np.fromfile(file, dtype, int(lengths[sequence])))
                if len(sequences[-1]) != lengths[sequence]:
                    raise lmforge.UserError(f"{path}: truncated: its index has more tokens")
            yield np.concatenate(sequences)


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """The dtype of ids; tokens and first byte of each sequence; the first sequence of each
    document, and their number.
    """
    if not path.is_file():
        raise lmforge.UserError(f"{path}: no such file: tokens of Megatron-LM are a pair of .bin and .idx")
    if path.stat().st_size < HEADER.itemsize:
        raise lmforge.UserError(f"{path}: not a Megatron-LM index: too short")
    # Memory-mapped: it has an entry for each sequence of the corpus.
    content = np.memmap(path, np.uint8, "r")
    header = content[: HEADER.itemsize].view(HEADER)[0]
    dtype = DTYPES.get(int(header["dtype"]))
    sequences = int(header["sequences"])
    documents = int(header["documents"])
    if content[:9].tobytes() != MAGIC or header["version"] != VERSION or dtype is None:
        raise lmforge.UserError(f"{path}: not a Megatron-LM index of version {VERSION} with integer ids")
    at = HEADER.itemsize
    if len(content) < at + 12 * sequences + 8 * documents:
        raise lmforge.UserError(f"{path}: truncated: {len(content):,} bytes do not hold {sequences:,} sequences")
    arrays = []
    for count, kind in ((sequences, "<i4"), (sequences, "<i8"), (documents, "<i8")):
        size = count * np.dtype(kind).itemsize
        arrays.append(content[at : at + size].view(kind))
        at += size
    lengths, pointers, first = arrays
    if not len(first) or first[0] != 0 or first[-1] != len(lengths) or (first[1:] < first[:-1]).any():
        raise lmforge.UserError(f"{path}: the documents of its index do not follow each other")
    if len(lengths) and (lengths.min() < 0 or pointers.min() < 0):
        raise lmforge.UserError(f"{path}: the sequences of its index have negative lengths")
    return np.dtype(dtype), lengths, pointers, first
