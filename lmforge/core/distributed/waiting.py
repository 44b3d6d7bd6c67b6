"""Waiting for other processes and nodes: polling with progress messages, and calls that may never
return over a broken network. This module does not import torch, since `rendezvous.py` waits before
that.
"""

import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
# Pauses grow from the first to the last value: an early success is noticed at once, and thousands
# of ranks do not overload the store.
FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.2
PAUSE_FACTOR = 1.5
REPORT_AFTER_SECONDS = 30.0
CONNECT_SECONDS = 5.0


def wait_until(
    reached: Callable[[], bool],
    seconds: float = math.inf,
    report: Callable[[float], str] | None = None,
) -> bool:
    """Poll `reached` until it returns True. Returns False if it has not after `seconds`.

    report: gives a line for standard error from the seconds waited so far. It is printed after
        REPORT_AFTER_SECONDS, and again each time the wait has doubled.
    """
    began = time.monotonic()
    report_after = REPORT_AFTER_SECONDS
    pause = FIRST_PAUSE_SECONDS
    while not reached():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if report is not None and waited > report_after:
            report_after = 2 * waited
            print_line(report(waited))
        time.sleep(pause)
        pause = min(LAST_PAUSE_SECONDS, PAUSE_FACTOR * pause)
    return True


def await_listener(
    address: str, port: int, seconds: float, report: Callable[[str, float], str] | None = None
) -> None:
    """Wait until the port accepts connections.

    Raises OSError otherwise, which is clearer than torch's own message. report: as for
    `wait_until`, with the reason as first argument.
    """
    problem: OSError | None = None

    def listens() -> bool:
        nonlocal problem
        try:
            socket.create_connection((address, port), timeout=min(CONNECT_SECONDS, seconds)).close()
        except OSError as raised:
            problem = raised
            return False
        return True

    def line(waited: float) -> str:
        assert report is not None
        return report(describe_connection_error(problem), waited)

    if not wait_until(listens, seconds, line if report else None):
        assert problem is not None
        raise problem


def describe_connection_error(problem: OSError | None) -> str:
    """Why a connection failed, in a few words."""
    return (problem and problem.strerror) or "no answer"


def start_in_thread(fn: Callable[[], T], name: str) -> Future[T]:
    """Call `fn` in a thread that does not keep the process alive."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(fn())
        except BaseException as problem:
            result.set_exception(problem)

    threading.Thread(target=call, name=name, daemon=True).start()
    return result


def call_bounded(fn: Callable[[], T], seconds: float) -> T:
    """Call `fn` in a thread, and return or raise its result.

    Raises TimeoutError where it takes too long; the thread continues. Over a broken network, a call
    of a TCPStore neither returns nor times out, and ignores signals.
    """
    return start_in_thread(fn, "bounded call").result(seconds)


def print_line(line: str) -> None:
    """Print the line of a waiting process on standard error.

    It goes on where nothing reads it any more.
    """
    with suppress(OSError):
        print(f"lmforge: {line}", file=sys.stderr, flush=True)
