"""One safetensors file: parts of tensors read directly into their destination, and tensors written one at a time.

The format (github.com/huggingface/safetensors): the length of the header in 8 bytes, a JSON header that says where each tensor
lies, then their bytes. The library's reader maps the file into memory, which fetches the pages around what is touched: twice
the bytes that a rank needs which wants half of each tensor. Here a contiguous part is one positioned read, with readahead.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from typing_extensions import TypedDict

from lmforge.errors import UserError
from lmforge.untrusted import parse_json

# Tensors that are converted or sent to a device pass through host memory in blocks of this size.
BLOCK_BYTES = 1 << 24
# How far ahead of the current read the system is told what comes next.
READAHEAD_BYTES = 1 << 26
# Less than a page is not read by itself: disks read whole pages.
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
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


class _HeaderEntry(TypedDict):
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]


def _without_metadata(header: Any) -> Any:
    return {name: entry for name, entry in header.items() if name != "__metadata__"} if isinstance(header, dict) else header


_Header = Annotated[dict[str, _HeaderEntry], BeforeValidator(_without_metadata)]


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a file, and the byte of the file at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A file whose header has been read and checked. Raises UserError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, SafetensorsEntry] = {}
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size - 8, MAX_HEADER_BYTES):
                raise self._damaged(f"a header of {header_bytes:,} bytes in a file of {size:,}")
            content = file.read(header_bytes)
        header: dict[str, _HeaderEntry] = parse_json(
            content, _Header, "header", max_bytes=MAX_HEADER_BYTES, error=self._damaged
        )
        data = 8 + header_bytes
        for name, entry in header.items():
            if entry["dtype"] not in DTYPE_BY_NAME:
                raise self._damaged(f"{name} is {entry['dtype']}, an unknown dtype")
            begin, end = entry["data_offsets"]
            stored = SafetensorsEntry(DTYPE_BY_NAME[entry["dtype"]], tuple(entry["shape"]), data + begin)
            if end - begin != math.prod(stored.shape) * stored.dtype.itemsize:
                raise self._damaged(f"{name} has {end - begin:,} bytes")
            self.entries[name] = stored
        expected = data + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if expected != size:
            raise self._damaged(f"{size:,} bytes instead of {expected:,}")

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self.path}: damaged or not a safetensors file ({reason}); copy it again")

    @contextmanager
    def open_for_reading(self) -> Iterator[None]:
        """Keep the file open for `read_into` and `read_all`."""
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # without it the system reads ahead, into the parts of other ranks
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            yield
        finally:
            os.close(self._descriptor)

    def read_all(self, requests: list[tuple[Tensor, str, tuple[slice, ...]]]) -> None:
        """`read_into` for each (target, name, part), in the order of their offsets."""
        ordered = sorted(requests, key=lambda each: self.entries[each[1]].offset)
        spans = [self._byte_range(name, part) for _, name, part in ordered]
        advised = ahead = 0
        for number, (target, name, part) in enumerate(ordered):
            while advised < len(spans) and ahead < READAHEAD_BYTES:
                if spans[advised][1] and hasattr(os, "posix_fadvise"):  # a length of 0 means up to the end of the file
                    os.posix_fadvise(self._descriptor, *spans[advised], os.POSIX_FADV_WILLNEED)
                ahead += spans[advised][1]
                advised += 1
            self.read_into(target, name, part)
            ahead -= spans[number][1]

    def _byte_range(self, name: str, part: tuple[slice, ...]) -> tuple[int, int]:
        """The byte range of a part that is full rows; 0 bytes, which is no readahead, for a choice of columns."""
        stored = self.entries[name]
        row = math.prod(stored.shape[1:]) * stored.dtype.itemsize
        first, rows = (part[0].start, part[0].stop - part[0].start) if part else (0, 1)
        full_rows = all((cut.start, cut.stop) == (0, size) for cut, size in zip(part[1:], stored.shape[1:], strict=True))
        return stored.offset + first * row, rows * row if full_rows else 0

    def read_into(self, target: Tensor, name: str, part: tuple[slice, ...]) -> None:
        """Fill `target` (any float dtype, any device) with a part of a tensor, all of whose slices have both bounds."""
        stored = self.entries[name]
        if not target.numel():
            return
        if not stored.shape:
            self._read_rows(target.view(1, 1), stored, 0, 1, slice(0, 1))
            return
        # A part is a range of rows and a range of columns: dimensions beyond the second are never split.
        if any((cut.start, cut.stop) != (0, size) for cut, size in zip(part[2:], stored.shape[2:], strict=True)):
            raise ValueError(f"{name}: split beyond its second dimension")
        beyond = math.prod(stored.shape[2:])
        columns = slice(part[1].start * beyond, part[1].stop * beyond) if len(part) > 1 else slice(0, 1)
        width = math.prod(stored.shape[1:])
        self._read_rows(target.view(target.shape[0], -1), stored, part[0].start, width, columns)

    def _read_rows(self, target: Tensor, entry: SafetensorsEntry, first: int, width: int, columns: slice) -> None:
        """Fill target [rows, columns] from rows of `width` numbers, beginning with row `first`."""
        item = entry.dtype.itemsize
        full = (columns.stop - columns.start) == width
        in_place = target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous()
        narrow = not full and (columns.stop - columns.start) * item < PAGE_BYTES
        read_width = width if full or narrow else columns.stop - columns.start
        skipped = columns.start if narrow or full else 0
        rows = len(target) if in_place and not narrow else max(1, BLOCK_BYTES // (read_width * item))
        for row in range(0, len(target), rows):
            into = target[row : row + rows]
            block = into if in_place and not narrow else torch.empty(len(into), read_width, dtype=entry.dtype)
            begin = entry.offset + (first + row) * width * item
            if full or narrow:
                self._read_exactly(block, begin)
            else:
                for number, line in enumerate(block):
                    self._read_exactly(line, begin + (number * width + columns.start) * item)
            if block is not into:
                into.copy_(block[:, skipped : skipped + into.shape[1]])

    def _read_exactly(self, block: Tensor, offset: int) -> None:
        out = memoryview(block.view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(out):  # the system reads 2 GiB at most at a time
            count = os.preadv(self._descriptor, [out[done:]], offset + done)
            if not count:
                raise UserError(f"{self.path}: ends {len(out) - done:,} bytes early; copy it again")
            done += count


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], read_tensor: Callable[[str], torch.Tensor], dtype: torch.dtype | None
) -> None:
    """Write one safetensors file, a tensor at a time: the library's own writer needs all of them in memory.

    `tensors` may be on the meta device: each one's value is `read_tensor(name)`. `dtype` None keeps each one's own.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, stored = end, dtype or tensor.dtype
        end += tensor.numel() * stored.itemsize
        header[name] = {"dtype": NAME_BY_DTYPE[stored], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name, tensor in tensors.items():
            value = read_tensor(name).detach().to("cpu", dtype or tensor.dtype).contiguous()
            file.write(value.flatten().view(torch.uint8).numpy().data)
