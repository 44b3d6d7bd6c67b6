"""Parts of shards that are known to be damaged and are not read: a run may continue without them,
and reports that.

An entry is `SHARD`, all of it, or `SHARD:FIRST` or `SHARD:FIRST-LAST`: blocks of 64 KiB of its
tokens, counted from 0. `lmforge prepare --verify` prints them. A sequence with a token of them
becomes all padding, and is not scored.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.records.manifests import BLOCK_BYTES, ShardEntry

Blocks = list[tuple[int, int]]  # (first, after the last)


def parse_quarantine(
    entries: Sequence[str], shards: Mapping[str, ShardEntry], token_bytes: int
) -> dict[str, Blocks]:
    """The blocks of each shard that is named.

    Raises UserError where there is no such shard or block.
    """
    blocks: dict[str, Blocks] = {}
    for entry in entries:
        match = re.fullmatch(r"([A-Za-z0-9_-]{1,100})(?::([0-9]{1,18})(?:-([0-9]{1,18}))?)?", entry)
        if not match:
            raise UserError(
                f"quarantine: {quoted(entry)}: expected SHARD, SHARD:BLOCK or SHARD:FIRST-LAST"
            )
        if match[1] not in shards:
            raise UserError(f"quarantine: {quoted(entry)}: there is no shard of this name")
        count = -(-shards[match[1]].tokens * token_bytes // BLOCK_BYTES)
        first = int(match[2] or 0)
        stop = int(match[3] or first) + 1 if match[2] else count
        if not first < stop <= count:
            raise UserError(f"quarantine: {quoted(entry)}: the shard has blocks 0 to {count - 1}")
        blocks.setdefault(match[1], []).append((first, stop))
    return blocks


def format_entries(shard: str, blocks: Iterable[int]) -> list[str]:
    """The entries for blocks of a shard, given in order."""
    entries = []
    for _, run in groupby(enumerate(blocks), key=lambda numbered: numbered[1] - numbered[0]):
        numbers = [number for _, number in run]
        entries.append(f"{shard}:{numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""))
    return entries


class QuarantinedSpans:
    """The quarantined tokens of a split."""

    def __init__(
        self, blocks: Mapping[str, Blocks], shards: Sequence[ShardEntry], token_bytes: int
    ) -> None:
        block_tokens = BLOCK_BYTES // token_bytes
        start = 0
        spans = []
        for shard in shards:
            for first, stop in blocks.get(shard.name, []):
                spans.append(
                    (start + first * block_tokens, start + min(stop * block_tokens, shard.tokens))
                )
            start += shard.tokens
        merged: list[list[int]] = []
        for first, stop in sorted(spans):
            if merged and first <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([first, stop])
        self._bounds = np.array(merged, np.int64).reshape(-1)
        self.num_tokens = sum(stop - first for first, stop in merged)

    def overlap(self, start: int, stop: int) -> bool:
        """Whether one of the tokens start … stop − 1 is quarantined."""
        if not self.num_tokens:
            return False
        before, after = np.searchsorted(self._bounds, [start, stop - 1], "right")
        return bool(before % 2 or before != after)

    def cover(self, start: int, stop: int) -> bool:
        """Whether all of the tokens start … stop − 1 are quarantined."""
        before, after = np.searchsorted(self._bounds, [start, stop - 1], "right")
        return bool(before % 2 and before == after)
