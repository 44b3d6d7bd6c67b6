"""Hosts, their GPUs and their busiest processes on the page of `lmforge top`: in each table the
worst row first.
"""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from lmforge.core.errors import format_count
from lmforge.ops.monitor.run_status import RunStatus
from lmforge.ops.monitor.usage.devices import DeviceUsage
from lmforge.ops.monitor.usage.remote_hosts import HostAnswer
from lmforge.ops.terminal.cells import (
    BAD,
    DOUBTFUL,
    QUIET,
    WIDE_COLUMNS,
    clean,
    format_age,
    format_gib,
    format_known,
    format_short,
    note_table,
    omitted,
)

# A busy GPU with little power draw waits in a collective, whose kernels spin.
BUSY_PERCENT = 90.0
WAITING_POWER_RATIO = 0.25
FULL_RATIO = 0.95
MAX_PROCESSES = 5
HOST_WIDTH = 16  # the minimum for a name, if the notes are long


def cluster_line(hosts: Sequence[HostAnswer]) -> Text:
    """Sums over the hosts and GPUs that answer now, and their number.

    Means exclude those that do not answer.
    """
    fresh = [host.usage for host in hosts if host.usage and not host.is_stale]
    devices = [device for usage in fresh for device in usage.devices]
    alive = [device for device in devices if not device.error]
    answer = "answer"
    if len(hosts) == 1:
        answer = "answers"
    style = "bold" if len(fresh) == len(hosts) else BAD
    parts: list[str | tuple[str, str]] = [
        (f"{len(fresh)} of {format_count(len(hosts), 'host')} {answer}", style)
    ]
    busy = [usage.cpu_percent for usage in fresh if usage.cpu_percent is not None]
    if busy:
        parts.append(f"   CPU {sum(busy) / len(busy):.0f} %")
        if len(busy) > 1:
            parts.append(f" (least {min(busy):.0f} %)")
    if devices:
        style = "" if len(alive) == len(devices) else BAD
        parts.append((f"   {len(alive)} of {format_count(len(devices), 'GPU')} answer", style))
    used = [
        device.utilization_percent for device in alive if device.utilization_percent is not None
    ]
    if used:
        parts.append(f"   use {sum(used) / len(used):.0f} % (least {min(used):.0f} %)")
    power = [device.power_watts for device in alive if device.power_watts is not None]
    if power:
        parts.append(f"   {sum(power) / 1000:.1f} kW")
    return Text.assemble(*parts)


def host_table(hosts: Sequence[HostAnswer], columns: int, rows: int | None) -> list[RenderableType]:
    table = note_table(
        columns,
        [
            _host_column(hosts),
            ("CPU", 6, True),
            ("load/cores", 10, True),
            ("memory GiB", 13, True),
            ("net MB/s in/out", 15, True),
        ],
    )
    ordered = sorted(hosts, key=_host_severity)
    shown = ordered[:rows]
    for host in shown:
        usage = host.usage
        style = ""
        if host.is_stale:
            style = BAD
        note = _host_note(host)
        if usage is None:
            table.add_row(clean(host.name), "?", "?", "?", "?", note, style=BAD)
            continue
        rates = usage.received_bytes_per_second, usage.sent_bytes_per_second
        network = "/".join("?" if rate is None else format_short(rate / 1e6) for rate in rates)
        table.add_row(
            clean(usage.host if usage.host.startswith(host.name) else host.name),
            format_known(usage.cpu_percent, "{:.0f} %"),
            f"{usage.load_1m:.1f}/{usage.cores}",
            format_gib(usage.memory_used_bytes, usage.memory_total_bytes),
            network,
            note,
            style=style,
        )
    return [table, *omitted(len(ordered) - len(shown), "host")]


def _host_column(hosts: Sequence[HostAnswer]) -> tuple[str, int, bool]:
    return "host", min(HOST_WIDTH, max((len(host.name) for host in hosts), default=0)), False


def _host_severity(host: HostAnswer) -> tuple[int, float, str]:
    if host.usage is None or host.is_stale:
        return 0, 0.0, host.name
    has_error = any(device.error for device in host.usage.devices)
    return (
        1 if has_error else 2,
        -host.usage.memory_used_bytes / max(1, host.usage.memory_total_bytes),
        host.name,
    )


def _host_note(host: HostAnswer) -> str:
    notes = []
    if host.usage is not None and host.is_stale:
        notes.append(f"as it was {format_age(host.age_seconds or 0.0)} ago")
    if host.error:
        notes.append(
            f"no answer: {host.error}" if not host.error.startswith("no answer") else host.error
        )
    if host.usage is not None:
        if host.usage.memory_used_bytes > FULL_RATIO * host.usage.memory_total_bytes:
            notes.append("memory is nearly full")
        notes += host.usage.notes
    return clean("; ".join(notes))


def device_table(
    hosts: Sequence[HostAnswer], runs: Sequence[RunStatus], columns: int, rows: int | None
) -> list[RenderableType]:
    """The GPUs of all hosts, with the ranks that compute on them."""
    rank_of = {(rank.host, rank.process): rank.rank for run in runs for rank in run.ranks}
    devices = [(host, device) for host in hosts if host.usage for device in host.usage.devices]
    if not devices:
        return []
    is_wide = columns >= WIDE_COLUMNS
    names = []
    if is_wide:
        names = [("name", 0, False)]
    table = note_table(
        columns,
        [
            _host_column(hosts),
            ("GPU", 3, True),
            *names,
            ("use", 6, True),
            ("memory GiB", 13, True),
            ("power W", 9, True),
            ("°C", 4, True),
            ("processes", 0, False),
        ],
    )
    ordered = sorted(devices, key=lambda pair: _device_severity(*pair))
    shown = ordered[:rows]
    for host, device in shown:
        assert host.usage
        note = _device_note(device)
        if device.error:
            style = BAD
        elif note:
            style = DOUBTFUL
        else:
            style = ""
        if host.is_stale:
            note = f"{format_age(host.age_seconds or 0.0)} ago"
            style = QUIET
        ranks = [rank_of.get((host.usage.host, pid)) for pid in device.processes]
        who = ", ".join(
            f"rank {rank}" if rank is not None else f"{pid}"
            for rank, pid in zip(ranks, device.processes, strict=True)
        )
        table.add_row(
            clean(host.name),
            str(device.index),
            *([clean(device.name)] if is_wide else []),
            format_known(device.utilization_percent, "{:.0f} %"),
            format_gib(device.memory_used_bytes, device.memory_total_bytes),
            f"{format_known(device.power_watts)}/{format_known(device.power_limit_watts)}",
            format_known(device.temperature_celsius),
            who,
            note,
            style=style,
        )
    return ["", table, *omitted(len(ordered) - len(shown), "GPU")]


def _device_note(device: DeviceUsage) -> str:
    if device.error:
        return f"LOST: {clean(device.error)}"
    if device.slowdown:
        return device.slowdown
    watts = device.power_watts
    limit = device.power_limit_watts
    use = device.utilization_percent
    if (
        watts is not None
        and limit
        and use is not None
        and use >= BUSY_PERCENT
        and watts < WAITING_POWER_RATIO * limit
    ):
        return f"busy at {watts / limit:.0%} of its power: waiting?"
    if device.processes and use == 0:
        return "has a process but is idle"
    return ""


def _device_severity(host: HostAnswer, device: DeviceUsage) -> tuple[int, float, str, int]:
    # The problem in an old sample may be over; the table of hosts shows that it is old.
    if device.error:
        level = 0
    elif host.is_stale:
        level = 2
    elif _device_note(device):
        level = 1
    else:
        level = 3
    use = device.utilization_percent
    return level, use if use is not None else 100.0, host.name, device.index


def process_table(hosts: Sequence[HostAnswer], columns: int) -> list[RenderableType]:
    """The busiest processes of all hosts that were asked."""
    processes = [
        (process, host.name) for host in hosts if host.usage for process in host.usage.processes
    ]
    if not processes:
        return []
    heads = [("process", 0, True), ("CPU", 0, True), ("GiB", 0, True), ("host", 0, False)]
    table = note_table(columns, heads)
    for process, host in sorted(processes, key=lambda pair: -pair[0].cpu_percent)[:MAX_PROCESSES]:
        memory = f"{process.memory_bytes / 2**30:.1f}"
        table.add_row(
            str(process.pid),
            f"{process.cpu_percent:.0f} %",
            memory,
            clean(host),
            clean(process.name),
        )
    return ["", table]
