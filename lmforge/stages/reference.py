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

from lmforge.atomic_files import atomic_write
from lmforge.cluster.distributed import DistributedContext
from lmforge.data.batch import Batch, Extras
from lmforge.data.dataset import PackedDataset, Packing
from lmforge.data.loader import BatchLoader
from lmforge.data.packing import PackedSequence
from lmforge.objectives.logprobs import token_logprobs
from lmforge.parallel.parallel_model import ParallelModel

# Rows of a piece that is computed and kept at once, by all ranks together: the same for any number of them.
CHUNK_SEQUENCES = 64


def reference_logprobs(model: object, batch: Batch, temperature: float = 1.0) -> Tensor:
    """log p of each scored target, fp32 [rows, length], 0 elsewhere."""
    hidden = model(batch.tokens, batch.positions, batch.document_ids)  # type: ignore[operator]
    found: Tensor = model.lm_head(  # type: ignore[attr-defined]
        hidden, partial(token_logprobs, labels=batch.labels, temperature=temperature)
    )
    return found


class ReferenceModel:
    """Adds what a reference thinks of them to batches. `off` surrounds it: where it is the policy without its adapters."""

    def __init__(
        self,
        parallel_model: ParallelModel,
        adapters_off: Callable[[], AbstractContextManager[object]] = nullcontext,
        temperature: float = 1.0,
    ) -> None:
        self._parallel_model = parallel_model
        self._adapters_off = adapters_off
        self._score = partial(reference_logprobs, temperature=temperature)

    def logprobs(self, batch: Batch) -> Tensor:
        """log p of each scored target: fp32 [rows, length]. Every rank calls it, with as many batches."""
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._adapters_off():
            found: Tensor = self._parallel_model.score(batch, score_fn=self._score)
            return found

    def add_logprobs(self, batch: Batch) -> Batch:
        """The batch with the extra "reference"."""
        return with_extras(batch, reference=self.logprobs(batch))


def with_extras(batch: Batch, **extras: Tensor) -> Batch:
    """The batch with more extras, each [rows, length]."""
    there = batch.extras.tensors if batch.extras else {}
    return Batch(**batch.tensors, extras=Extras(**there, **extras))


class BatchesWithExtras:
    """Batches of a loader, to each of which something is added when they are asked for."""

    def __init__(self, loader: BatchLoader, add_extras: Callable[[Batch], Batch]) -> None:
        self._loader = loader
        self._add_extras = add_extras

    @property
    def data_wait_seconds(self) -> float:
        return self._loader.data_wait_seconds

    def batches(self, step: int) -> list[Batch]:
        return [self._add_extras(batch) for batch in self._loader.batches(step)]

    def close(self) -> None:
        self._loader.close()


class PackingWithReference:
    """Rows with what a reference thinks of their targets: fp32 [rows, length], by the number of the row."""

    def __init__(self, packing: Packing, logprobs: np.ndarray) -> None:
        self._packing = packing
        self._logprobs = logprobs

    @property
    def num_sequences(self) -> int:
        return self._packing.num_sequences

    def sequence(self, index: int) -> PackedSequence:
        row = self._packing.sequence(index)
        values = self._logprobs[index] if index < self.num_sequences else np.zeros(len(row.tokens), np.float32)
        return PackedSequence(row.tokens, row.labels, row.positions, row.document_ids, {**row.extras, "reference": values})


def precompute_reference_logprobs(
    dataset: PackedDataset,
    get_reference: Callable[[], ReferenceModel],
    dist_ctx: DistributedContext,
    folder: Path,
    metadata: dict[str, object],
    log: Callable[[str], None],
    batch_size: int,
    heartbeat: Callable[[int], None],
) -> np.ndarray:
    """What the reference thinks of every row: fp32 [rows, length]; computed in pieces that are kept, so that a pass that was
    stopped goes on where it was.

    `about` says what else the numbers depend on: weights, tokenizer, dtype. Every rank calls it, and computes `batch_rows`
    at once.
    """
    key = xxhash.xxh3_64_hexdigest(json.dumps([dataset.plan_hash, dataset.sequence_length, metadata], sort_keys=True).encode())
    place = folder / f"reference-{key}"
    packing, count = dataset.packing, dataset.packing.num_sequences
    pieces = [place / f"{first:09d}.npy" for first in range(0, count, CHUNK_SEQUENCES)]
    share = -(-CHUNK_SEQUENCES // dist_ctx.world_size)
    if dist_ctx.rank_info.local_rank == 0:
        place.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(pieces):
        if all(dist_ctx.all_gather(path.exists())):
            continue
        if number == 0 or not pieces[number - 1].exists():
            log(f"reference  computing {count:,} rows into {place}")
        first = number * CHUNK_SEQUENCES + dist_ctx.rank_info.rank * share
        mine = Batch.from_sequences([packing.sequence(index) for index in range(first, first + share)]).to(dist_ctx.device)
        found = []
        for start in range(0, share, batch_size):
            heartbeat(0)  # each is progress, however many there are
            found.append(get_reference().logprobs(mine[start : start + batch_size]))
        parts = dist_ctx.all_gather(torch.cat(found).float().cpu().numpy())
        with dist_ctx.raise_on_all():
            # Hosts may share the folder: what one has written the others leave.
            if dist_ctx.rank_info.local_rank == 0 and not path.exists():
                with atomic_write(path) as file:
                    np.save(
                        file,
                        np.concatenate(parts)[: min(CHUNK_SEQUENCES, count - number * CHUNK_SEQUENCES)],
                        allow_pickle=False,
                    )
    dist_ctx.all_gather(None)  # all pieces are there
    return np.concatenate([np.load(path, allow_pickle=False) for path in pieces])
