"""Files as `lmforge bench --calibrate` writes them, for fictitious devices."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lmforge.lab.plan.calibration import COLLECTIVES, REQUIRED, SIZES, UNITS

GRID = {
    "rows": (128, 1024),
    "inner": (128, 512),
    "columns": (128, 512),
    "head_dim": (32, 64),
    "length": (128, 512),
}
GRID |= {"bytes": (2**16, 2**24), "experts": (8,)}
EXPERTS = ("product of experts", "product of experts backward")


def measurement(what: str, sizes: Sequence[int], value: float, dtype: str | None) -> dict[str, Any]:
    return {
        "what": what,
        "dtype": dtype,
        "sizes": dict(zip(SIZES[what], sizes, strict=True)),
        "value": value,
        "unit": UNITS[what],
    }


def calibration(
    *, kind: str = "cpu", device: str = "A CPU", ranks: int = 1, dtypes: Sequence[str] = ("fp32",)
) -> dict[str, Any]:
    """The content of such a file: products at 1e11 FLOP/s, attention at half of it, arrays and
    memory at 1e10 bytes/s.
    """
    values = {"FLOP/s": 1e11, "bytes/s": 1e10, "s": 1e-3}
    measurements = []
    for what in (*REQUIRED, *EXPERTS, *(COLLECTIVES if ranks > 1 else ()), "disk write"):
        value = values[UNITS[what]] * (0.5 if what.startswith("attention") else 1)
        for dtype in dtypes if what in (*REQUIRED, *EXPERTS) and what != "memory" else (None,):
            corners = product(*(GRID[name] for name in SIZES[what]))
            measurements += [measurement(what, sizes, value, dtype) for sizes in corners]
    head = {
        "version": 1,
        "kind": kind,
        "device": device,
        "ranks": ranks,
        "hosts": 1,
        "threads": 2,
        "memory_bytes": 2**34,
    }
    return {
        **head,
        "packages": {"torch": "2.13.0"},
        "time": "2026-11-23T00:00:00",
        "measurements": measurements,
    }


def write_calibration(folder: Path, table: dict[str, Any]) -> Path:
    path = folder / "calibration.json"
    path.write_text(json.dumps(table))
    return path
