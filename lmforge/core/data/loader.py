"""Step → micro-batches on the device, read some steps ahead of the computation.

The samples of a step depend only on its number, so the loader has no state to checkpoint.
"""

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace

import torch

from lmforge.core.data.batch import Batch
from lmforge.core.data.mixture import TrainingDataset
from lmforge.core.data.order import token_rng_keys
from lmforge.core.data.packing import PackedSequences
from lmforge.core.data.shards.storage import slow_read
from lmforge.core.distributed.distributed import use_device_in_thread

log = logging.getLogger(__name__)

# Reading a step takes milliseconds; a stall of the storage is reported long before a collective
# times out.
SLOW_BATCH_WARNING_SECONDS = 10.0
# One read that a shared file system answers late is not noticed.
READ_AHEAD_STEPS = 4


@dataclass(eq=False)
class BatchLoader(AbstractContextManager["BatchLoader"]):
    """This data-parallel rank's part of every global batch.

    Global batch k is the samples k·B … (k + 1)·B − 1 of the dataset, B = `global_batch_size`.
    Data-parallel rank r of W (`data_parallel_rank_and_size` in core/parallel/dims.py) takes the
    r-th of W contiguous parts of it, in micro-batches of `micro_batch_size`. So the global batch is
    the same for any number of ranks. Where it does not divide, the first parts have one sequence
    more, and all ranks have the same number of micro-batches of one size; the rest is padding,
    which is not scored. With `rng_seed` batches have keys to draw randomness from. Raises
    ValueError for a rank without a sequence.

    `first` is the number of this rank's first sample in a batch; `data_wait_seconds` the total time
    for which callers of `batches` waited. Close it, or use it in a `with`.
    """

    dataset: TrainingDataset
    _: KW_ONLY
    global_batch_size: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    device: torch.device | str = "cpu"
    rng_seed: int | None = None

    def __post_init__(self) -> None:
        size = self.global_batch_size
        rank = self.data_parallel_rank
        ranks = self.data_parallel_size
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        if size < ranks:
            raise ValueError(f"a global batch of {size} sequences for {ranks} ranks")
        if self.micro_batch_size < 1:
            raise ValueError(f"micro-batches of {self.micro_batch_size} sequences")
        base_size, num_larger = divmod(size, ranks)
        self.first = rank * base_size + min(rank, num_larger)
        self._num_sequences = base_size + (rank < num_larger)
        self._local_batch_size = (
            math.ceil(math.ceil(size / ranks) / self.micro_batch_size) * self.micro_batch_size
        )
        self.data_wait_seconds = 0.0
        self._thread = ThreadPoolExecutor(
            1, "loader", use_device_in_thread, (torch.device(self.device),)
        )
        threads = self.dataset.read_threads
        self._readers = ThreadPoolExecutor(threads, "loader-read") if threads > 1 else None
        # The batches that are being read, in order.
        self._read_ahead: dict[int, Future[Batch]] = {}

    def batches(self, batch_index: int) -> list[Batch]:
        """The micro-batches of global batch `batch_index` (from 0), in order, on the device.

        Reading of the next READ_AHEAD_STEPS batches starts before this returns. Any other may be
        requested, at the cost of one wait. Exceptions of the reading thread are raised here.
        """
        began = time.perf_counter()
        if batch_index not in self._read_ahead:
            for future in self._read_ahead.values():
                future.cancel()
            self._read_ahead = {batch_index: self._thread.submit(self._read, batch_index)}
        future = self._read_ahead.pop(batch_index)
        while not wait([future], timeout=SLOW_BATCH_WARNING_SECONDS).done:
            waited = time.perf_counter() - began
            file = slow_read(SLOW_BATCH_WARNING_SECONDS / 2)
            log.warning(
                "batch %d: no data for %.0f s from %s",
                batch_index,
                waited,
                file or self.dataset.location,
            )
        batch = future.result()
        self._read_ahead = {
            later: self._read_ahead.get(later) or self._thread.submit(self._read, later)
            for later in range(batch_index + 1, batch_index + 1 + READ_AHEAD_STEPS)
        }
        batch = batch.to(self.device, non_blocking=True)
        self.data_wait_seconds += time.perf_counter() - began
        size = self.micro_batch_size
        return [batch[start : start + size] for start in range(0, batch.batch_size, size)]

    def _read(self, batch_index: int) -> Batch:
        start = batch_index * self.global_batch_size + self.first
        stop = start + self._num_sequences
        padding = self._local_batch_size - self._num_sequences
        map_rows = map if self._readers is None else self._readers.map
        batch = Batch.from_sequences(
            self.dataset.sequences(start, stop, padding=padding, map_rows=map_rows)
        )
        if self.rng_seed is not None:
            keys = token_rng_keys(self.rng_seed, start, stop + padding, batch.sequence_length)
            batch = replace(batch, rng_keys=torch.from_numpy(keys))
        return (
            batch.with_document_starts().pin_memory()
            if torch.device(self.device).type == "cuda"
            else batch
        )

    def close(self) -> None:
        """Wait for the reading threads to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._readers is not None:
            self._readers.shutdown(wait=True, cancel_futures=True)

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def batch_of_token_lists(token_lists: Sequence[Sequence[int]]) -> Batch:
    """A batch with one document per sequence, padded at the end to the longest; no label is
    scored.
    """
    sequences = PackedSequences.empty(len(token_lists), max(map(len, token_lists)))
    for sequence, tokens in zip(sequences, token_lists, strict=True):
        sequence.put_document(tokens)
    return Batch.from_sequences(sequences)
