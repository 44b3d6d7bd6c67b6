"""The usage of a host: CPUs, memory, network, its busiest processes and its GPUs.

The first rank of each host publishes it with the heartbeats, from a separate thread, since a driver
that hangs must not stop heartbeats. So `lmforge top RUN` needs nothing but the run's directory.
`lmforge top HOST` samples where it runs.
"""

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lmforge.core.records.run_records import Count, EpochSeconds, Measure
from lmforge.ops.monitor.heartbeat import overwrite, read_overwritten
from lmforge.ops.monitor.usage.devices import DeviceReader, DeviceUsage

PUBLISH_SECONDS = 5.0
# Older samples are marked in `top`: the host has missed two samples.
STALE_SECONDS = 3 * PUBLISH_SECONDS


@dataclass(frozen=True)
class ProcessUsage:
    """A process; `cpu_percent` is of one core."""

    pid: Count
    name: str
    cpu_percent: Measure
    memory_bytes: Count


@dataclass(frozen=True)
class HostUsage:
    """A host at `time`, seconds since the epoch.

    Rates are since the sample before; the first ones are None.

    processes   the busiest ones, where they were asked for         notes   what could not be found out, and why
    """

    host: str
    time: EpochSeconds
    cores: Count
    cpu_percent: Measure | None
    load_1m: Measure
    memory_used_bytes: Count
    memory_total_bytes: Count
    received_bytes_per_second: Measure | None
    sent_bytes_per_second: Measure | None
    devices: list[DeviceUsage]
    processes: list[ProcessUsage]
    notes: list[str]


class HostSampler:
    """Samples of this host, with its `num_processes` busiest processes.

    Rates are between two calls of `sample`.
    """

    def __init__(self, num_processes: int = 0) -> None:
        self._num_processes = num_processes
        self._read_devices = DeviceReader()
        self._network: tuple[float, int, int] | None = None
        self._has_begun = False

    def sample(self) -> HostUsage:
        """A sample of the host. It takes a few milliseconds, or tens of them with processes."""
        cpu = psutil.cpu_percent()
        memory = psutil.virtual_memory()
        received, sent = self._network_rates()
        usage = HostUsage(
            host=platform.node(),
            time=time.time(),
            cores=os.cpu_count() or 1,
            cpu_percent=cpu if self._has_begun else None,
            load_1m=os.getloadavg()[0],
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            received_bytes_per_second=received,
            sent_bytes_per_second=sent,
            devices=self._read_devices(),
            processes=self._busiest() if self._num_processes else [],
            notes=list(self._read_devices.notes),
        )
        self._has_begun = True
        return usage

    def _network_rates(self) -> tuple[float | None, float | None]:
        """Bytes a second that all interfaces but the loopback have received and sent."""
        now = time.monotonic()
        counters = [
            each for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo"
        ]
        received = sum(each.bytes_recv for each in counters)
        sent = sum(each.bytes_sent for each in counters)
        before = self._network
        self._network = (now, received, sent)
        if before is None or now <= before[0]:
            return None, None
        seconds = now - before[0]
        return max(0, received - before[1]) / seconds, max(0, sent - before[2]) / seconds

    def _busiest(self) -> list[ProcessUsage]:
        """psutil keeps its Process objects, and in each the times of the last call of
        `cpu_percent`.
        """
        loads = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                loads.append((process.cpu_percent(), process))
        usages = []
        busy = [(percent, process) for percent, process in loads if percent > 0]
        for percent, process in sorted(busy, key=lambda each: -each[0])[: self._num_processes]:
            with suppress(psutil.Error):
                usages.append(
                    ProcessUsage(process.pid, process.name(), percent, process.memory_info().rss)
                )
        return usages


def publish_usage(folder: Path, rank: int, may_write: Callable[[], bool]) -> Callable[[], None]:
    """Publish this host's usage as `host-of-rank-R.json` in the folder of heartbeats, while
    `may_write` says so, in a thread until the returned function is called, which does not wait for
    a sample, since a driver may hang.
    """
    path = folder / f"host-of-rank-{rank}.json"
    stopped = threading.Event()

    def publish() -> None:
        with suppress(Exception):  # monitoring must not end a run
            sampler = HostSampler()
            longest = 0
            while True:
                usage = sampler.sample()
                with suppress(OSError):
                    # In place and padded, as heartbeats.
                    longest = overwrite(path, usage, longest) if may_write() else longest
                if stopped.wait(PUBLISH_SECONDS):
                    return

    threading.Thread(target=publish, name="host usage", daemon=True).start()
    return stopped.set


def read_published(folder: Path) -> list[HostUsage]:
    """What the hosts of a run have published, by name; a file that cannot be read is left out."""
    newest: dict[str, HostUsage] = {}
    for path in folder.glob("host-of-rank-*.json"):
        if (content := read_overwritten(path, HostUsage)) is not None:
            usage = content[1]
            newest[usage.host] = max(
                usage, newest.get(usage.host, usage), key=lambda each: each.time
            )
    return [newest[name] for name in sorted(newest)]
