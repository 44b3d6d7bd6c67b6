"""One safetensors file: parts of tensors are read into their destination, tensors written singly.

The format (github.com/huggingface/safetensors): the length of the header in 8 bytes, a JSON header
that says where each tensor lies, then their bytes. The library's reader maps the file into memory,
which fetches the pages around what is touched: twice the bytes that a rank needs which wants half
of each tensor. Here a contiguous part is one positioned read, with readahead.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from typing_extensions import TypedDict

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import open_file, parse_json

# Tensors that are converted or sent to a device pass through host memory in blocks of this size.
BLOCK_BYTES = 1 << 24
# The bytes ahead of the current read that the system is told to read.
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
    if isinstance(header, dict):
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    return header


_Header = Annotated[dict[str, _HeaderEntry], BeforeValidator(_without_metadata)]


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a file, and the byte of the file at which it begins."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def meta(self) -> Tensor:
        """The tensor on the meta device: its shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class SafetensorsFile:
    """A file whose header has been read and checked. Raises UserError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, SafetensorsEntry] = {}
        with open_file(path) as file:
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
            stored = SafetensorsEntry(
                DTYPE_BY_NAME[entry["dtype"]], tuple(entry["shape"]), data + begin
            )
            if end - begin != math.prod(stored.shape) * stored.dtype.itemsize:
                raise self._damaged(f"{name} has {end - begin:,} bytes")
            self.entries[name] = stored
        expected = data + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if expected != size:
            raise self._damaged(f"{size:,} bytes instead of {expected:,}")

    def _damaged(self, reason: str) -> UserError:
        return UserError(
            f"{self.path}: damaged or not a safetensors file ({reason}); copy it again"
        )

    def read(self, name: str) -> Tensor:
        """A full tensor, on the CPU."""
        entry = self.entries[name]
        full = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_parts([(name, full, tuple(slice(0, size) for size in entry.shape))])
        return full

    def read_parts(self, requests: list[tuple[str, Tensor, tuple[slice, ...]]]) -> None:
        """Fill the target of each (name, target, part) with a part of a tensor.

        Targets may have any float dtype and device. All slices of a part have both bounds. The
        tensors are read in the order of their offsets.
        """
        parts = [
            _StoredPart(self.entries[name], target, part)
            for name, target, part in requests
            if target.numel()
        ]
        parts.sort(key=lambda part: part.begin)
        upcoming = iter(parts)
        ahead = 0
        with open(self.path, "rb") as file:
            # Else the system reads ahead, into the parts of other ranks.
            _advise(file, 0, 0, "POSIX_FADV_RANDOM")
            for part in parts:
                while ahead < READAHEAD_BYTES:
                    following = next(upcoming, None)
                    if following is None:
                        break
                    if following.readahead:  # a length of 0 means up to the end of the file
                        _advise(file, following.begin, following.readahead, "POSIX_FADV_WILLNEED")
                    ahead += following.readahead
                part.read(file)
                ahead -= part.readahead


class _StoredPart:
    """A part of a stored tensor that is read into `target`.

    It is a range of rows, and of numbers in each row.
    """

    def __init__(self, entry: SafetensorsEntry, target: Tensor, part: tuple[slice, ...]) -> None:
        rows = part[0] if part else slice(0, 1)
        columns = part[1] if len(part) > 1 else slice(0, 1)
        for cut, size in zip(part[2:], entry.shape[2:], strict=True):
            if (cut.start, cut.stop) != (0, size):
                raise ValueError("a part is split beyond its second dimension")
        beyond = math.prod(entry.shape[2:])
        self._columns = slice(columns.start * beyond, columns.stop * beyond)
        self._width = math.prod(entry.shape[1:])
        self._row_bytes = self._width * entry.dtype.itemsize
        self._target = target.view(rows.stop - rows.start, -1)
        self._dtype = entry.dtype
        self.begin = entry.offset + rows.start * self._row_bytes
        # The bytes of full rows; no readahead for a choice of columns.
        self.readahead = 0
        if self._columns == slice(0, self._width):
            self.readahead = len(self._target) * self._row_bytes

    def read(self, file: BufferedReader) -> None:
        target = self._target
        columns = self._columns
        item = self._dtype.itemsize
        taken = columns.stop - columns.start
        by_line = PAGE_BYTES <= taken * item < self._row_bytes
        width = taken if by_line else self._width
        in_memory = target.device.type == "cpu" and target.is_contiguous()
        in_place = in_memory and target.dtype == self._dtype and width == taken
        rows = len(target) if in_place else max(1, BLOCK_BYTES // (width * item))
        for row in range(0, len(target), rows):
            into = target[row : row + rows]
            block = into if in_place else torch.empty(len(into), width, dtype=self._dtype)
            begin = self.begin + row * self._row_bytes
            if by_line:
                first = begin + columns.start * item
                for number, line in enumerate(block):
                    _read_exactly(file, line, first + number * self._row_bytes)
            else:
                _read_exactly(file, block, begin)
            if not in_place:
                skipped = 0 if by_line else columns.start
                into.copy_(block[:, skipped : skipped + taken])


def _advise(file: BufferedReader, offset: int, length: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), offset, length, getattr(os, advice))


def _read_exactly(file: BufferedReader, block: Tensor, offset: int) -> None:
    out = memoryview(block.view(-1).view(torch.uint8).numpy().data)
    done = 0
    while done < len(out):  # the system reads 2 GiB at most at a time
        count = os.preadv(file.fileno(), [out[done:]], offset + done)
        if not count:
            raise UserError(f"{file.name}: ends {len(out) - done:,} bytes early; copy it again")
        done += count


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    read_tensor: Callable[[str], Tensor],
) -> None:
    """Write one safetensors file, a tensor at a time.

    The library's own writer needs all of them in memory. `tensors` may be on the meta device: each
    one's value is `read_tensor(name)`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": NAME_BY_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        for name, tensor in tensors.items():
            value = read_tensor(name).detach().to("cpu", tensor.dtype).contiguous()
            file.write(value.flatten().view(torch.uint8).numpy().data)
