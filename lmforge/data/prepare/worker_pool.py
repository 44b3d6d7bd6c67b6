"""Worker processes for tokenizing; none is left behind when the process that started them is stopped or killed."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from typing import Self, TypeVar

from lmforge.errors import RunFailed

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerPool:
    """`num_workers` processes, started when there is work for them; with one, the work is done in this process.

    They are spawned, since a fork would copy the locks of the caller's threads. Use it in a `with`.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def map_unordered(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        """(index of the job, its result) as jobs finish. An exception of a job is raised here.

        Raises RunFailed when a process was killed from outside.
        """
        if self._num_workers == 1 or len(jobs) <= 1:
            for index, job in enumerate(jobs):
                yield index, function(job)
            return
        # Ctrl-C reaches every process of a terminal; only the caller may act on it, and then ends the others. A blocked signal
        # stays blocked across spawning, so a starting process cannot print a traceback. Python's resource tracker, which the
        # pool starts, unblocks it: that one has to run before.
        ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                held, self._lifeline = context.Pipe(duplex=False)
                self._pool = ProcessPoolExecutor(self._num_workers, context, _init_worker, (held,))
            indices = {self._pool.submit(function, job): index for index, job in enumerate(jobs)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for future in as_completed(indices):
                yield indices[future], future.result()
        except BrokenProcessPool:
            raise RunFailed(
                "a process of the preparation was killed, most likely for lack of memory: "
                "run it again with fewer workers; what it had finished is kept"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            # Closing the lifeline ends the processes at once: after an interruption nobody waits for a large file, and after
            # success they have nothing to do.
            self._lifeline.close()
            self._pool.shutdown(cancel_futures=True)


def _init_worker(lifeline: Connection) -> None:
    """In a new process: end when the other end of the lifeline is closed, which the kernel does when its owner ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one of many processes needs no thread pool of its own

    def watch() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
