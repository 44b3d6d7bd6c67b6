"""What the train split of a token folder holds: documents and their lengths, tokens, bytes of
text.
"""

from dataclasses import dataclass

import numpy as np

from lmforge.core.data.shards.folder import ShardReader, TokenFolder
from lmforge.core.errors import UserError, format_count

# The limit for one source; each shard has a file of 8 bytes per document, which is read completely.
MAX_SHARDS_READ = 20
BAR_WIDTH = 40


@dataclass(frozen=True)
class SourceReport:
    """The train split of one source.

    text_bytes  of the text that its tokens stand for; 0 where that is not known, as of imported
                tokens
    lengths     int64, tokens of each document in the shards that were read, the end-of-text token
                included
    """

    name: str
    documents: int
    tokens: int
    text_bytes: int
    lengths: np.ndarray
    shards: int
    shards_read: int

    def histogram(self) -> np.ndarray:
        """int64: at k the documents of 2^k to 2^(k+1) − 1 tokens."""
        return np.bincount(np.frexp(self.lengths)[1] - 1)

    def describe_lengths(self) -> list[str]:
        """Lines: what was counted, its minimum, median and maximum, and a bar for each power of
        two.
        """
        of = f"{len(self.lengths):,} of {format_count(self.documents, 'document')}"
        lines = [
            (
                f"documents  of {self.name}, in tokens; {of} in {self.shards_read:,} of"
                f" {format_count(self.shards, 'shard')}"
            )
        ]
        least, median, late, most = np.quantile(
            self.lengths, [0, 0.5, 0.99, 1], method="inverted_cdf"
        )
        lines.append(
            f"  min {least:,}, median {median:,}, mean {self.lengths.mean():,.1f}, p99 {late:,},"
            f" max {most:,}"
        )
        counts = self.histogram()
        for k in range(int(np.flatnonzero(counts)[0]), len(counts)):
            bar = "█" * -(-BAR_WIDTH * int(counts[k]) // int(counts.max()))
            lines.append(f"  {2**k:>9,} to {2 ** (k + 1) - 1:<9,} {counts[k]:>12,}  {bar}".rstrip())
        return lines


def read_source(name: str, folder: TokenFolder) -> SourceReport:
    """The report of a source, from at most MAX_SHARDS_READ shards, evenly spaced.

    Raises UserError where there is nothing to read.
    """
    entries = folder.manifest.splits["train"]
    readable = [
        entry for entry in entries if entry.documents and entry.name not in folder.quarantine
    ]
    if not readable:
        raise UserError(f"{folder.path}: no shard with documents outside quarantine")
    count = min(MAX_SHARDS_READ, len(readable))
    readers = [ShardReader(folder, readable[at * len(readable) // count]) for at in range(count)]
    ends = [reader.read_ends(0, len(reader.block_first_ends)) for reader in readers]
    split = folder.split("train")
    return SourceReport(
        name,
        split.num_documents,
        split.num_tokens,
        folder.manifest.text_bytes.get("train", 0),
        np.concatenate([np.diff(each, prepend=0) for each in ends]),
        len(entries),
        count,
    )
