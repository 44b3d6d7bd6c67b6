"""The reference that a policy is held against: a frozen copy, the policy with its adapters off, or numbers computed before.

Whichever it is, batches come out with the log-probability of each scored target under it, in the policy's compute dtype.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from lmforge.cluster.ranks import Ranks
from lmforge.data.batch import Batch, Extras
from lmforge.data.loader import Loader
from lmforge.data.packing import Row
from lmforge.data.sealing import sealing
from lmforge.data.stream import Packing, Rows
from lmforge.objectives.logprobs import token_logprobs
from lmforge.parallel.engine import Spread

# Rows of a piece that is computed and kept at once, by all ranks together: the same for any number of them.
PIECE_ROWS = 64


def reference_logprobs(model: object, batch: Batch, temperature: float = 1.0) -> Tensor:
    """log p of each scored target, fp32 [rows, length], 0 elsewhere."""
    hidden = model(batch.tokens, batch.positions, batch.documents)  # type: ignore[operator]
    found: Tensor = model.lm_head(  # type: ignore[attr-defined]
        hidden, partial(token_logprobs, targets=batch.targets, temperature=temperature)
    )
    return found


class Reference:
    """Adds what a reference thinks of them to batches. `off` surrounds it: where it is the policy without its adapters."""

    def __init__(
        self,
        spread: Spread,
        off: Callable[[], AbstractContextManager[object]] = nullcontext,
        temperature: float = 1.0,
    ) -> None:
        self._spread = spread
        self._off = off
        self._score = partial(reference_logprobs, temperature=temperature)

    def of(self, batch: Batch) -> Tensor:
        """log p of each scored target: fp32 [rows, length]. Every rank calls it, with as many batches."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._off():
            found: Tensor = self._spread.score(batch, instead=self._score)
            return found

    def add(self, batch: Batch) -> Batch:
        """The batch with the extra "reference"."""
        return with_extras(batch, reference=self.of(batch))


def with_extras(batch: Batch, **more: Tensor) -> Batch:
    """The batch with more extras, each [rows, length]."""
    there = batch.extras.tensors if batch.extras else {}
    return Batch(**batch.tensors, extras=Extras(**there, **more))


class Extended:
    """Batches of a loader, to each of which something is added when they are asked for."""

    def __init__(self, batches: Loader, add: Callable[[Batch], Batch]) -> None:
        self._batches = batches
        self._add = add

    @property
    def data_seconds(self) -> float:
        return self._batches.data_seconds

    def batches(self, step: int) -> list[Batch]:
        return [self._add(batch) for batch in self._batches.batches(step)]

    def close(self) -> None:
        self._batches.close()


class WithReference:
    """Rows with what a reference thinks of their targets: fp32 [rows, length], by the number of the row."""

    def __init__(self, packing: Packing, table: np.ndarray) -> None:
        self._packing = packing
        self._table = table

    @property
    def rows(self) -> int:
        return self._packing.rows

    def row(self, index: int) -> Row:
        row = self._packing.row(index)
        values = self._table[index] if index < self.rows else np.zeros(len(row.tokens), np.float32)
        return Row(row.tokens, row.targets, row.positions, row.documents, {**row.extras, "reference": values})


def compute_reference(
    rows: Rows,
    reference: Callable[[], Reference],
    ranks: Ranks,
    folder: Path,
    about: dict[str, object],
    say: Callable[[str], None],
    batch_rows: int,
    mark: Callable[[int], None],
) -> np.ndarray:
    """What the reference thinks of every row: fp32 [rows, length]; computed in pieces that are kept, so that a pass that was
    stopped goes on where it was.

    `about` says what else the numbers depend on: weights, tokenizer, dtype. Every rank calls it, and computes `batch_rows`
    at once.
    """
    key = xxhash.xxh3_64_hexdigest(json.dumps([rows.plan_hash, rows.length, about], sort_keys=True).encode())
    place = folder / f"reference-{key}"
    packing, count = rows.packing, rows.packing.rows
    pieces = [place / f"{first:09d}.npy" for first in range(0, count, PIECE_ROWS)]
    share = -(-PIECE_ROWS // ranks.count)
    if ranks.place.local_rank == 0:
        place.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(pieces):
        if all(ranks.gather(path.exists())):
            continue
        if number == 0 or not pieces[number - 1].exists():
            say(f"reference  computing {count:,} rows into {place}")
        first = number * PIECE_ROWS + ranks.place.rank * share
        mine = Batch.of([packing.row(index) for index in range(first, first + share)]).to(ranks.device)
        found = []
        for start in range(0, share, batch_rows):
            mark(0)  # each is progress, however many there are
            found.append(reference().of(mine[start : start + batch_rows]))
        parts = ranks.gather(torch.cat(found).float().cpu().numpy())
        with ranks.agreeing():
            # Hosts may share the folder: what one has written the others leave.
            if ranks.place.local_rank == 0 and not path.exists():
                with sealing(path, unique=True) as file:
                    np.save(file, np.concatenate(parts)[: min(PIECE_ROWS, count - number * PIECE_ROWS)], allow_pickle=False)
    ranks.gather(None)  # all pieces are there
    return np.concatenate([np.load(path, allow_pickle=False) for path in pieces])
