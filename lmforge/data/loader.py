"""Step → micro-batches on the device, read one step ahead of the computation.

Which samples a step takes follows from its number. The loader has no state to checkpoint.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Self

import torch

from lmforge.data.batch import Batch
from lmforge.data.dataset import PackedDataset
from lmforge.data.order import token_rng_keys

log = logging.getLogger(__name__)

# Reading a step takes milliseconds; a stall of the storage is reported long before a collective times out.
SLOW_BATCH_WARNING_SECONDS = 10.0


class BatchLoader:
    """This data-parallel rank's part of every global batch.

    The global batch of step k is the samples k·B … (k + 1)·B − 1 of the dataset, B = `global_batch_size`. Data-parallel rank r
    of W (`data_parallel_rank_and_size` in parallel/dims.py) takes the r-th of W equal contiguous parts of it, in micro-batches
    of `micro_batch_size`. So the global batch is the same for any number of ranks. With `rng_seed` batches have keys to draw
    randomness from. Raises ValueError if a size does not divide.

    `data_wait_seconds` is the total time for which callers of `batches` waited. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        device: torch.device | str = "cpu",
        rng_seed: int | None = None,
    ):
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"rank {data_parallel_rank} of {data_parallel_size}")
        if global_batch_size < 1 or global_batch_size % data_parallel_size:
            raise ValueError(f"a global batch of {global_batch_size} sequences does not divide by {data_parallel_size} ranks")
        local_batch_size = global_batch_size // data_parallel_size
        if micro_batch_size < 1 or local_batch_size % micro_batch_size:
            raise ValueError(f"{local_batch_size} sequences a rank do not divide into micro-batches of {micro_batch_size}")
        self.data_wait_seconds = 0.0
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._local_batch_size = local_batch_size
        self._local_offset = data_parallel_rank * local_batch_size
        self._device = torch.device(device)
        self._rng_seed = rng_seed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._prefetched: tuple[int, Future[Batch]] | None = None

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of global step `step` (from 0), in order, on the device.

        Reading of the next step starts before this returns. Any other step may be requested, at the cost of one wait.
        Exceptions of the reading thread are raised here.
        """
        began = time.perf_counter()
        expected, future = self._prefetched or (None, None)
        if future is None or expected != step:
            future = self._thread.submit(self._read, step)
        self._prefetched = None
        while not wait([future], timeout=SLOW_BATCH_WARNING_SECONDS).done:
            waited = time.perf_counter() - began
            log.warning("step %d: no data for %.0f s from %s", step, waited, self._dataset.location)
        batch = future.result()
        self._prefetched = step + 1, self._thread.submit(self._read, step + 1)
        batch = batch.to(self._device, non_blocking=True)
        self.data_wait_seconds += time.perf_counter() - began
        return [batch[i : i + self._micro_batch_size] for i in range(0, self._local_batch_size, self._micro_batch_size)]

    def _read(self, step: int) -> Batch:
        first = step * self._global_batch_size + self._local_offset
        batch = Batch.from_sequences(self._dataset.sequences(first, first + self._local_batch_size))
        if self._rng_seed is not None:
            keys = token_rng_keys(self._rng_seed, first, first + self._local_batch_size, batch.sequence_length)
            batch = replace(batch, rng_keys=torch.from_numpy(keys))
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def close(self) -> None:
        """Wait for the reading thread to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
