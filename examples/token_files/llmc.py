"""Tokens of llm.c: `lmforge prepare SHARDS OUT --plugins examples/token_files/llmc.py --tokenizer
NAME`.

A header of 256 int32 (magic 20240520 and version 1: uint16 ids; 20240801 and 7: uint32), then ids.
It says nowhere where documents end, so the tokenizer's end-of-text and beginning-of-text ids divide
them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import lmforge

HEADER_BYTES = 256 * 4
DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@lmforge.register("document_source", "bin", gives="tokens")
def read_llmc(path: Path, options: None) -> Iterator[np.ndarray]:
    """All ids of a file, which stay on the disk until they are read."""
    magic, version, tokens = (*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0)[:3]
    if magic not in {known for known, _ in DTYPES}:
        raise lmforge.UserError(f"{path}: not a file of llm.c; leave this plugin out where it is one of nanoGPT")
    dtype = DTYPES.get((magic, version))
    if dtype is None:
        raise lmforge.UserError(
            f"{path}: a file of llm.c of version {version}, which is not read; write it with llm.c's dev/data"
        )
    size = path.stat().st_size
    if size != HEADER_BYTES + tokens * np.dtype(dtype).itemsize:
        raise lmforge.UserError(f"{path}: {size:,} bytes, but its header says {tokens:,} tokens: truncated, or not of llm.c")
    if tokens:
        yield np.memmap(path, dtype, "r", offset=HEADER_BYTES)
