"""One safetensors file: where its tensors lie, and parts of them read straight to where they belong.

With positioned reads rather than a memory map: a map fetches pages as they are touched, and what lies around them, twice
what was wanted where a rank wants half of each tensor. Here a part that is one stretch of the file is one long read, the
disk is told of the next ones while it is at work, and nothing else comes from it. The format:
github.com/huggingface/safetensors.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmforge.errors import UserError

# What is converted or sent to a device passes through host memory in blocks of this size.
BLOCK_BYTES = 1 << 24
# How far ahead of what is being read the disk is told what comes.
READAHEAD_BYTES = 1 << 26
# Less than a page is not read by itself: a disk gives whole pages.
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
# As the format calls them.
DTYPE_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_BY_DTYPE = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a file: what it is, and at which byte of the file it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A file whose header has been read and found sound. Raises UserError where it is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, SafetensorsEntry] = {}
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
                    raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
                header = json.loads(file.read(length))
            data, ends = 8 + length, [0]
            for name, described in header.items():
                if name == "__metadata__":
                    continue
                begin, end = described["data_offsets"]
                stored = SafetensorsEntry(_parse_dtype(name, described), tuple(described["shape"]), data + begin)
                if end - begin != math.prod(stored.shape) * stored.dtype.itemsize or begin < 0:
                    raise ValueError(f"{name} has {end - begin:,} bytes")
                self.entries[name] = stored
                ends.append(end)
            if data + max(ends) != size:
                raise ValueError(f"{size:,} bytes instead of {data + max(ends):,}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged or not a safetensors file ({error}); copy it again") from None

    @contextmanager
    def open_for_reading(self) -> Iterator[None]:
        """Keep the file open for `read_into` and `read_all`."""
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # or the system reads on by itself, into what other ranks want
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            yield
        finally:
            os.close(self._descriptor)

    def read_all(self, requests: list[tuple[Tensor, str, tuple[slice, ...]]]) -> None:
        """`read_into` for each (target, name, part), in the order in which they lie on the disk."""
        ordered = sorted(requests, key=lambda each: self.entries[each[1]].offset)
        spans = [self._byte_range(name, part) for _, name, part in ordered]
        told = ahead = 0
        for number, (target, name, part) in enumerate(ordered):
            while told < len(spans) and ahead < READAHEAD_BYTES:
                if spans[told][1] and hasattr(os, "posix_fadvise"):  # no bytes would mean all that follow
                    os.posix_fadvise(self._descriptor, *spans[told], os.POSIX_FADV_WILLNEED)
                ahead += spans[told][1]
                told += 1
            self.read_into(target, name, part)
            ahead -= spans[number][1]

    def _byte_range(self, name: str, part: tuple[slice, ...]) -> tuple[int, int]:
        """Where the rows of a part begin in the file, and their bytes; of columns, nothing is told ahead."""
        stored = self.entries[name]
        row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        first, rows = (part[0].start, part[0].stop - part[0].start) if part else (0, 1)
        whole = all((cut.start, cut.stop) == (0, size) for cut, size in zip(part[1:], stored.shape[1:], strict=True))
        return stored.offset + first * row, rows * row if whole else 0

    def read_into(self, target: Tensor, name: str, part: tuple[slice, ...]) -> None:
        """Fill `target` (any float dtype, any device) with a part of a tensor, all of whose slices have both bounds."""
        stored = self.entries[name]
        if not target.numel():
            return
        if not stored.shape:
            self._read_rows(target.view(1, 1), stored, 0, 1, slice(0, 1))
            return
        # Any part is a choice of rows, and of columns of each: what is beyond the second dimension is never split.
        if any((cut.start, cut.stop) != (0, size) for cut, size in zip(part[2:], stored.shape[2:], strict=True)):
            raise ValueError(f"{name}: split beyond its second dimension")
        beyond = math.prod(stored.shape[2:])
        columns = slice(part[1].start * beyond, part[1].stop * beyond) if len(part) > 1 else slice(0, 1)
        width = math.prod(stored.shape[1:])
        self._read_rows(target.view(target.shape[0], -1), stored, part[0].start, width, columns)

    def _read_rows(self, target: Tensor, entry: SafetensorsEntry, first: int, width: int, columns: slice) -> None:
        """target [rows, columns] from `rows` rows of `width` numbers, of which `columns` are wanted."""
        item = entry.dtype.itemsize
        whole = (columns.stop - columns.start) == width
        in_place = target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous()
        narrow = not whole and (columns.stop - columns.start) * item < PAGE_BYTES
        read_width = width if whole or narrow else columns.stop - columns.start
        skipped = columns.start if narrow or whole else 0
        rows = len(target) if in_place and not narrow else max(1, BLOCK_BYTES // (read_width * item))
        for row in range(0, len(target), rows):
            into = target[row : row + rows]
            block = into if in_place and not narrow else torch.empty(len(into), read_width, dtype=entry.dtype)
            begin = entry.offset + (first + row) * width * item
            if whole or narrow:
                self._read_exactly(block, begin)
            else:
                for number, line in enumerate(block):
                    self._read_exactly(line, begin + (number * width + columns.start) * item)
            if block is not into:
                into.copy_(block[:, skipped : skipped + into.shape[1]])

    def _read_exactly(self, block: Tensor, offset: int) -> None:
        wanted = memoryview(block.view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(wanted):  # the system reads 2 GiB at most at a time
            count = os.preadv(self._descriptor, [wanted[done:]], offset + done)
            if not count:
                raise UserError(f"{self.path}: ends {len(wanted) - done:,} bytes early; copy it again")
            done += count


def _parse_dtype(name: str, entry: dict[str, Any]) -> torch.dtype:
    if entry["dtype"] not in DTYPE_BY_NAME:
        raise ValueError(f"{name} is {entry['dtype']}, a dtype that is not known here")
    return DTYPE_BY_NAME[entry["dtype"]]
