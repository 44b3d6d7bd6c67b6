"""The file of `lmforge bench --calibrate`: the measured speed of a device by shape, dtype and size.

This module defines its format, reads it, and interpolates between measured sizes, without torch.
lab/bench/calibrate.py measures; `Rates` in prediction/rates.py gives predictions its values.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lmforge.core.errors import UserError, format_count
from lmforge.core.files.untrusted import check_content, read_json

VERSION = 1
# What is measured: the names of its sizes, and its unit. FLOP/s of attention count the scores that
# are computed.
SIZES: dict[str, tuple[str, ...]] = {
    "product": ("rows", "inner", "columns"),
    "product backward": ("rows", "inner", "columns"),
    "product of experts": ("rows", "inner", "columns", "experts"),
    "product of experts backward": ("rows", "inner", "columns", "experts"),
    "attention": ("head_dim", "length"),
    "attention backward": ("head_dim", "length"),
    "element-wise": ("bytes",),
    "memory": (),
    "all-reduce": ("bytes",),
    "all-gather": ("bytes",),
    "reduce-scatter": ("bytes",),
    "host to device": (),
    "device to host": (),
    "disk write": (),
    "disk read": (),
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
UNITS = {
    name: "FLOP/s" if name.startswith(("product", "attention")) else "bytes/s" for name in SIZES
}
UNITS |= dict.fromkeys(COLLECTIVES, "s")
# Predictions need at least these.
REQUIRED = (
    "product",
    "product backward",
    "attention",
    "attention backward",
    "element-wise",
    "memory",
)
MAX_MEASUREMENTS = 10_000
Size = Annotated[int, Field(gt=0, le=2**50)]
Count = Annotated[int, Field(gt=0, le=2**20)]


class Measurement(BaseModel):
    """One measured value. Those of collectives are seconds for so many bytes on each rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str = Field(max_length=40)
    dtype: Literal["fp32", "bf16", "fp8"] | None = None
    sizes: dict[str, Size] = Field(max_length=4)
    value: float = Field(ge=1e-9, le=1e20, allow_inf_nan=False)
    unit: Literal["FLOP/s", "bytes/s", "s"]

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.what not in SIZES:
            raise ValueError("an unknown measurement")
        if (tuple(self.sizes), self.unit) != (SIZES[self.what], UNITS[self.what]):
            raise ValueError(
                f"{self.what}: expected sizes {', '.join(SIZES[self.what]) or 'of nothing'} in"
                f" {UNITS[self.what]}"
            )
        return self


class RateTable:
    """Values on a grid of sizes, and between them.

    They are linear in the logarithm of each size, and beyond the grid as at its edge.
    """

    def __init__(self, values: Mapping[tuple[int, ...], float]) -> None:
        self._values = values
        self._known = dict[tuple[float, ...], float]()
        self._axes = [sorted(set(axis)) for axis in zip(*values, strict=True)]
        if any(corner not in values for corner in product(*self._axes)):
            raise ValueError("a size that was measured in one row is missing in another")

    @property
    def largest(self) -> float:
        return max(self._values.values())

    def items(self) -> list[tuple[tuple[int, ...], float]]:
        return sorted(self._values.items())

    def at(self, *sizes: float) -> float:
        if sizes not in self._known:
            self._known[sizes] = self._between(sizes, ())
        return self._known[sizes]

    def _between(self, sizes: tuple[float, ...], chosen: tuple[int, ...]) -> float:
        if len(chosen) == len(sizes):
            return self._values[chosen]
        axis = self._axes[len(chosen)]
        size = sizes[len(chosen)]
        above = bisect_right(axis, size)
        if above in (0, len(axis)):
            return self._between(sizes, (*chosen, axis[min(above, len(axis) - 1)]))
        low = axis[above - 1]
        high = axis[above]
        weight = math.log(size / low) / math.log(high / low)
        below = self._between(sizes, (*chosen, low))
        return (1 - weight) * below + weight * self._between(sizes, (*chosen, high))


# Plans print names from a file.
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"


class Calibration(BaseModel):
    """The content of a file.

    kind, device: "cpu" or "cuda", and the name of the processor or GPU. ranks, hosts: that measured
    at the same time; on a CPU they share its cores. threads: of a rank on a CPU. memory_bytes: of
    the GPU, or of the host.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1]
    kind: Literal["cpu", "cuda"]
    device: str = Field(min_length=1, max_length=200, pattern=PRINTABLE)
    ranks: Count
    hosts: Count
    threads: Count
    memory_bytes: Size
    packages: dict[str, str] = Field(max_length=20)
    time: str = Field(max_length=40, pattern=PRINTABLE)
    measurements: tuple[Measurement, ...] = Field(max_length=MAX_MEASUREMENTS)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.hosts > self.ranks:
            raise ValueError(f"{self.hosts} hosts with {self.ranks} ranks")
        measured = {(each.what, each.dtype) for each in self.measurements}
        for name in COLLECTIVES:
            if self.ranks == 1 and (name, None) in measured:
                raise ValueError(f"{name}: measured with one rank")
        has_bf16 = ("product", "bf16") in measured
        for name in REQUIRED:
            dtype = None if name == "memory" else "fp32"
            if (name, dtype) not in measured:
                raise ValueError(f"{name}: not measured")
            if dtype and has_bf16 and (name, "bf16") not in measured:
                raise ValueError(f"{name}: not measured in bf16, in which product is")
        try:
            _ = self._tables
        except ValueError as problem:
            raise ValueError(f"measurements: {problem}") from None
        return self

    @cached_property
    def _tables(self) -> dict[tuple[str, str | None], RateTable]:
        values: dict[tuple[str, str | None], dict[tuple[int, ...], float]] = {}
        for each in self.measurements:
            values.setdefault((each.what, each.dtype), {})[tuple(each.sizes.values())] = each.value
        return {name: RateTable(table) for name, table in values.items()}

    def table(self, what: str, dtype: str | None = None) -> RateTable | None:
        """The measurement of this in this dtype; None where there is none."""
        return self._tables.get((what, dtype))

    def required(self, what: str, dtype: str | None) -> RateTable:
        """The measurement of one of REQUIRED."""
        return self._tables[what, dtype]

    def value(self, what: str) -> float | None:
        """The measurement of something that has no sizes."""
        table = self.table(what)
        return None if table is None else table.at()

    @property
    def ranks_per_host(self) -> int:
        return -(-self.ranks // self.hosts)

    def describe(self) -> str:
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.device}, {format_count(self.ranks, 'rank')}{hosts}, {self.time[:10]}"


def read_calibration(path: Path) -> Calibration:
    """The content of a file.

    Raises UserError where there is none, and for one that is damaged or of another version.
    """
    again = "run lmforge bench --calibrate again"
    try:
        content = read_json(path, dict[str, Any], hint=again)
    except FileNotFoundError:
        raise UserError(
            f"--calibration: {path}: no such file; lmforge bench --calibrate writes one"
        ) from None
    if content.get("version") != VERSION:
        version = content.get("version")
        words = f"of version {version}" if isinstance(version, int) else "without a version"
        raise UserError(
            f"--calibration: {path}: {words}, and this lmforge reads version {VERSION}; {again}"
        )
    return check_content(
        content, Calibration, str(path), lambda line: UserError(f"--calibration: {line}; {again}")
    )
