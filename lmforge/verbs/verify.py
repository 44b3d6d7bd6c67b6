"""`lmforge prepare --verify`: reads every block of a token folder and compares it with its checksum."""

import json
import time

from lmforge.data.shards.folder import TokenFolder
from lmforge.data.shards.verify import verify_best_fit, verify_shards

PRINT_EVERY_SECONDS = 5.0


def verify(path: str) -> int:
    """Print a line per damaged shard or index and a summary. Returns the exit status: 1 where something is damaged.

    Raises UserError where the folder's manifest or its tokenizer cannot be used.
    """
    folder = TokenFolder.open(path, check_sizes=False)
    _ = folder.tokenizer
    began = printed_at = time.monotonic()
    total, damaged = sum(len(shards) for shards in folder.manifest.splits.values()), []
    for done, shard in enumerate(verify_shards(folder), start=1):
        if shard is not None:
            damaged.append(shard)
            print(f"{shard.name}: {shard.problem}", flush=True)
        if time.monotonic() - printed_at > PRINT_EVERY_SECONDS:
            printed_at = time.monotonic()
            print(f"{done:,} of {total:,} shards read", flush=True)
    problems = list(verify_best_fit(folder))
    for problem in problems:
        print(problem)
    if not damaged:
        best_fit = f", {len(problems):,} files of best-fit packing damaged" if problems else ""
        words = f"{total:,} shards, every block as it was written{best_fit}"
        print(f"{path}: {words}, in {time.monotonic() - began:.0f}s")
        return 1 if problems else 0
    print(f"{path}: {len(damaged):,} of {total:,} shards are damaged: restore them, or train without, with this under [data]")
    print(f"quarantine = {json.dumps([entry for shard in damaged for entry in shard.quarantine])}")
    return 1
