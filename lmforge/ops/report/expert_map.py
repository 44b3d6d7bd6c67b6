"""Reads experts.jsonl, the tokens of each expert of a mixture over the run;
ops/monitor/expert_load.py counts them.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from pydantic import BaseModel

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import open_file, parse_json, read_lines
from lmforge.core.records.run_records import Count, StepNumber, without_repeated_steps
from lmforge.core.records.runs import Run

MAX_LINE_BYTES = 2**22


class ExpertRecord(BaseModel):
    """A line of experts.jsonl: `counts` [layers, experts], the tokens that each expert got since
    the log step before.
    """

    step: StepNumber
    layers: list[Count]
    counts: list[list[Count]]


def read_expert_loads(run: Run) -> list[dict[str, Any]]:
    """The load of each expert, a record for each step: the tokens that it got, in hundredths of
    what all would get if they were alike.

    Each has "step", "layers" and "loads", an int32 array [layers, experts] as large as the last
    one's. Empty without a file.
    """
    records: list[dict[str, Any]] = []
    with suppress(OSError), open_file(run.experts_path) as file:
        records = without_repeated_steps(_parsed(read_lines(file, MAX_LINE_BYTES)))
    return [each for each in records if _kind(each) == _kind(records[-1])]


def _kind(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["layers"], record["loads"].shape


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(UserError, ValueError):  # the latter of rows of several lengths
            record = parse_json(line, ExpertRecord, "")
            counts = np.array(record.counts, dtype=np.float64)
            if counts.ndim == 2 and counts.size and len(counts) == len(record.layers):
                loads = 100 * counts * counts.shape[1] / np.maximum(counts.sum(1, keepdims=True), 1)
                yield {
                    "step": record.step,
                    "layers": record.layers,
                    "loads": loads.round().astype(np.int32),
                }
