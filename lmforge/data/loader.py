"""Step → micro-batches on the device, one step ahead of whoever computes.

Which rows belong to which rank is arithmetic on the step number, done here and nowhere else. The loader keeps nothing
that a checkpoint would need.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from lmforge.data.batch import Batch
from lmforge.data.noise import token_keys
from lmforge.data.stream import Rows

log = logging.getLogger(__name__)

# A healthy step's rows take milliseconds; a storage stall is worth a line long before a collective times out.
PATIENCE_SECONDS = 10.0


class Loader:
    """This rank's share of every global batch.

    The global batch of step k is the rows k·B … (k + 1)·B − 1 of the stream, B = `global_batch_rows`; rank r of W takes
    the r-th of W equal contiguous parts of it, in micro-batches of `micro_batch_rows`. So the global batch is the same
    for any number of ranks. With `noise_seed` its tokens have keys to draw randomness from. ValueError where a size does not
    divide.

    `data_seconds` is the time callers of `batches` have waited, in total. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        stream: Rows,
        *,
        global_batch_rows: int,
        micro_batch_rows: int,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        noise_seed: int | None = None,
    ):
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        if global_batch_rows < 1 or global_batch_rows % ranks:
            raise ValueError(f"a global batch of {global_batch_rows} rows does not divide among {ranks} ranks")
        rank_rows = global_batch_rows // ranks
        if micro_batch_rows < 1 or rank_rows % micro_batch_rows:
            raise ValueError(f"{rank_rows} rows a rank do not divide into micro-batches of {micro_batch_rows}")
        self.data_seconds = 0.0
        self._stream = stream
        self._global_batch_rows = global_batch_rows
        self._micro_batch_rows = micro_batch_rows
        self._rank_rows = rank_rows
        self._offset = rank * rank_rows
        self._device = torch.device(device)
        self._noise_seed = noise_seed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of global step `step` (from 0), in order, on the device.

        The next step is begun before this returns; any other step may be asked for and costs one wait. Whatever went
        wrong in the thread is raised here.
        """
        began = time.perf_counter()
        expected, future = self._ahead or (None, None)
        if future is None or expected != step:
            future = self._thread.submit(self._read, step)
        self._ahead = None
        while not wait([future], timeout=PATIENCE_SECONDS).done:
            waited = time.perf_counter() - began
            log.warning("step %d: its rows have not come for %.0f s from %s", step, waited, self._stream.where)
        rows = future.result()
        self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        rows = rows.to(self._device, non_blocking=True)
        self.data_seconds += time.perf_counter() - began
        return [rows[i : i + self._micro_batch_rows] for i in range(0, self._rank_rows, self._micro_batch_rows)]

    def _read(self, step: int) -> Batch:
        first = step * self._global_batch_rows + self._offset
        batch = Batch.of(self._stream.rows(first, first + self._rank_rows))
        if self._noise_seed is not None:
            keys = token_keys(self._noise_seed, first, first + self._rank_rows, batch.length)
            batch = replace(batch, keys=torch.from_numpy(keys))
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def close(self) -> None:
        """Wait for the thread to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
