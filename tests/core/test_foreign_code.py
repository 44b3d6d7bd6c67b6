"""A process that communicates in JSON lines: its output is limited, and waiting for it has a time
limit.
"""

import sys

import pytest

from lmforge.core import foreign_code
from lmforge.core.foreign_code import JsonLineProcess, ProcessLost

ECHO = "import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)"


def started(code: str) -> JsonLineProcess:
    return JsonLineProcess([sys.executable, "-S", "-c", code])


def test_a_response_is_that_of_its_request_and_the_heartbeat_is_called() -> None:
    process, beats = started(ECHO), []
    try:
        for number in range(3):
            message = {"number": number, "text": "é" * 100_000}
            assert process.request(message, 60.0, lambda: beats.append(1)) == message
        assert len(beats) >= 3
        with pytest.raises(TypeError):
            process.request({"thing": object()}, 60.0)
        assert process.request({"still": "there"}, 60.0) == {"still": "there"}
    finally:
        process.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("pass", "its process died"),
        ("print('no JSON')", "its response is not JSON"),
        ("print('[' * 100_000 + ']' * 100_000)", "its response is not JSON"),
        ("print('x' * 300_000)", "its response is larger than"),
        ("while True:\n    print('x' * 1000, end='')", "its response is larger than"),
    ],
)
def test_what_is_not_a_response_of_bounded_size_loses_the_process(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_code, "MAX_RESPONSE_BYTES", 1 << 18)
    process = started(code)
    try:
        with pytest.raises(ProcessLost, match=reason):
            process.receive(60.0)
    finally:
        process.close()


def test_a_request_that_nobody_reads_ends_in_a_timeout_however_long_it_is() -> None:
    process = started("import time\ntime.sleep(1000)")
    with pytest.raises(TimeoutError):
        process.request("x" * 1_000_000, 0.1)
    assert process.closed


def test_a_response_that_takes_too_long_ends_in_a_timeout() -> None:
    process = started("import time\ntime.sleep(1000)")
    try:
        with pytest.raises(TimeoutError):
            process.receive(0.1)
    finally:
        process.close()
