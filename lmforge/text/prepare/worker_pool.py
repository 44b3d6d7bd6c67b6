"""Worker processes for tokenizing. They end when the process that started them is killed."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from types import FrameType
from typing import Any, Self, TypeVar

from lmforge.core.errors import RunFailed

Job = TypeVar("Job")
Result = TypeVar("Result")
# A job reports its progress (an amount), and the caller gets (its index, that amount).
Report = Callable[[int], None]
OnProgress = Callable[[int, int], None]

REPORT_SECONDS = 0.25
WORKER_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class WorkerPool:
    """`num_workers` processes, started when there is work for them.

    With one, the work is done in this process. They are spawned, since a fork would copy the locks
    of the caller's threads. Use it in a `with`: within, SIGTERM raises SystemExit where it would
    end this process at once and leave its processes' semaphores behind.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._handles_sigterm = False

    def map_unordered(
        self,
        function: Callable[..., Result],
        jobs: Sequence[Job],
        on_progress: OnProgress | None = None,
    ) -> Iterator[tuple[int, Result]]:
        """(index of the job, its result) as jobs finish, of `function(job)`.

        An exception of a job is raised here.

        With `on_progress` it is `function(job, report)`; what a job reports reaches
        `on_progress(index, amount)` a few times a second. Raises RunFailed when a process was
        killed from outside.
        """
        if self._num_workers == 1 or len(jobs) <= 1:
            for index, job in enumerate(jobs):
                if on_progress is None:
                    yield index, function(job)
                else:
                    yield index, function(job, _Throttled(partial(on_progress, index)))
            return
        finished: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
        calls: list[tuple[Any, ...]] = [(function, job) for job in jobs]
        if on_progress is not None:
            calls = [(_run_with_report, function, *each) for each in enumerate(jobs)]
        indices = self._submit(calls)
        for future in indices:
            future.add_done_callback(finished.put)
        try:
            for _ in jobs:
                future = self._wait(finished, on_progress)
                yield indices[future], future.result()
        except BrokenProcessPool:
            raise RunFailed(
                "a process of the preparation was killed, most likely for lack of memory: "
                "run it again with fewer workers; what it had finished is kept"
            ) from None

    def _submit(self, calls: Sequence[tuple[Any, ...]]) -> dict[Future[Any], int]:
        """Start the processes, unless they run, and give them calls. Returns their indices.

        A call is a function with its arguments.
        """
        # Ctrl-C reaches every process of a terminal, and a SIGTERM often every process of a group;
        # only the caller may act on it, and then ends the others. A blocked signal stays blocked
        # across spawning, so a starting process cannot print a traceback. Python's resource
        # tracker, which the pool starts, unblocks it: that one has to run before.
        ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        try:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                held, self._lifeline = context.Pipe(duplex=False)
                self._reports, reports = context.Pipe(duplex=False)
                self._pool = ProcessPoolExecutor(
                    self._num_workers, context, _init_worker, (held, reports)
                )
            return {self._pool.submit(*call): index for index, call in enumerate(calls)}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(
        self, finished: "queue.SimpleQueue[Future[Result]]", on_progress: OnProgress | None
    ) -> Future[Result]:
        """The next job that is finished. Meanwhile, what jobs report is passed on."""
        if on_progress is None:
            return finished.get()
        while True:
            while self._reports.poll():
                on_progress(*self._reports.recv())
            with suppress(queue.Empty):
                return finished.get(timeout=REPORT_SECONDS)

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _exit_on_sigterm)
            self._handles_sigterm = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool is not None:
            # Closing the lifeline ends the processes at once: after an interruption a large file
            # need not be finished, and after success they have nothing to do.
            self._lifeline.close()
            self._pool.shutdown(cancel_futures=True)
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: nothing that follows may be interrupted
    raise SystemExit(128 + number)


class _Throttled:
    """A function of one argument, called at most once in REPORT_SECONDS; other calls do nothing."""

    def __init__(self, function: Report) -> None:
        self._function = function
        self._called_at = 0.0

    def __call__(self, amount: int) -> None:
        now = time.monotonic()
        if now - self._called_at >= REPORT_SECONDS:
            self._called_at = now
            self._function(amount)


# In a worker process: the connection that gets (index of the job, amount).
_worker_reports: Connection | None = None


def _run_with_report(function: Callable[[Any, Report], Result], index: int, job: Any) -> Result:
    """Run a job with a way to report, in a worker process."""

    def report(amount: int) -> None:
        assert _worker_reports is not None
        # So short that writes of several processes do not mix.
        _worker_reports.send((index, amount))

    return function(job, _Throttled(report))


def _init_worker(lifeline: Connection, reports: Connection) -> None:
    """Make a new process end when the other end of the lifeline is closed.

    The kernel closes it when its owner ends.
    """
    global _worker_reports
    _worker_reports = reports
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one of many processes needs no thread pool

    def watch() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
