"""Waiting for other machines ends in bounded time, and is reported."""

import socket
import threading
from itertools import pairwise

import pytest

from lmforge.core.distributed import waiting
from lmforge.core.distributed.node_group import NodeGroup, NodeStore, StartAttempt
from lmforge.core.distributed.rendezvous import PORTS, free_port, listen
from lmforge.core.distributed.waiting import await_listener, call_bounded, wait_until


def test_a_call_that_does_not_come_back_is_given_up_and_what_one_raises_is_raised() -> None:
    answered = threading.Event()
    with pytest.raises(TimeoutError):
        call_bounded(answered.wait, 0.02)
    answered.set()
    assert call_bounded(answered.wait, 60)
    with pytest.raises(RuntimeError, match="the store is gone"):
        call_bounded(lambda: exec("raise RuntimeError('the store is gone')"), 60)


def test_a_wait_is_reported_again_when_it_has_doubled_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "REPORT_AFTER_SECONDS", 0.05)
    waits: list[float] = []

    def line(waited: float) -> str:
        waits.append(waited)
        return "waiting for node2"

    assert not wait_until(lambda: False, 0.5, line)
    assert capsys.readouterr().err == "lmforge: waiting for node2\n" * len(waits)
    assert len(waits) >= 1
    assert all(later >= 2 * earlier for earlier, later in pairwise(waits))
    assert wait_until(lambda: True, 0, line)


def test_a_port_where_nobody_listens_is_waited_for_no_longer_than_asked() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await_listener("127.0.0.1", port, 0.02)
        free.listen()
        await_listener("127.0.0.1", port, 60)


def test_a_free_port_is_not_one_that_an_outgoing_connection_could_take() -> None:
    with listen(free_port()) as taken:
        port = taken.getsockname()[1]
        assert port in PORTS
        # Two programs that begin together have two.
        assert len({free_port() for _ in range(20)} - {port}) > 10


def test_the_ports_of_ranks_that_begin_later_are_such_ports() -> None:
    node_store = NodeStore(NodeGroup(("localhost",), 0, "localhost", free_port()))
    endpoints = [StartAttempt(node_store, number).rendezvous.endpoint for number in range(3)]
    assert all(int(endpoint.rpartition(":")[2]) in PORTS for endpoint in endpoints), endpoints
