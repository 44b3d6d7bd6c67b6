"""`lmforge top`: the usage of hosts and GPUs and the state of ranks, as a live page, once as text,
or as JSON. A run is read from its directory, where its ranks and hosts publish their state; ranks
are not contacted. Named hosts are queried over ssh, and those of a Slurm job over srun.
"""

import json
import os
import platform
import select
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from lmforge import __version__
from lmforge.core.distributed.hosts import HOST_PATTERN, read_hosts, ssh_command
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import cut
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.run_status import RUN_GOES_ON, RunStatus, read_run_status
from lmforge.ops.monitor.usage.host import HostSampler
from lmforge.ops.monitor.usage.remote_hosts import (
    HostAnswer,
    RemoteHost,
    remote_line,
    slurm_hosts,
    srun_words,
)
from lmforge.ops.options.running import TopOptions
from lmforge.ops.verbs.running.jobs import JobWatch
from lmforge.ops.verbs.running.top_screen import Snapshot, render_screen

# Rates are between two samples.
FIRST_SAMPLE_SECONDS = 0.5
INTERVAL_SECONDS = 2.0
NUM_PROCESSES = 5
# The width of the page if it is not on a terminal and COLUMNS is not set.
PLAIN_COLUMNS = 120


def run_top(options: TopOptions) -> int:
    """Show the requested runs and hosts, once or until interrupted. Returns 0. Raises UserError."""
    runs, hosts = _sort_names(options.names)
    slurm = []
    if options.slurm_job is not None:
        slurm = slurm_hosts(options.slurm_job)
    local_names = [name for name in hosts if name in ("localhost", platform.node())]
    samples_this_host = bool(local_names) or not (runs or hosts or slurm)
    # A page needs a terminal.
    once = options.once or not (options.output == "json" or sys.stdout.isatty())
    line = remote_line(options.remote_command, once=once)
    ssh = shlex.split(options.ssh_command)
    commands = {
        host: ssh_command(host, line, program=ssh, connect_seconds=options.timeout_seconds)
        for host in hosts
        if host not in local_names
    }
    commands |= {
        host: srun_words(options.slurm_job, host, line)
        for host in slurm
        if options.slurm_job is not None
    }
    for run in runs:
        read_run_status(run)  # a directory that is not a run is refused here
    sources = _Sources(
        HostSampler(NUM_PROCESSES) if samples_this_host else None,
        [RemoteHost(host, words, repeats=not once) for host, words in commands.items()],
        {run: JobWatch(run) for run in runs},
    )
    try:
        _show(sources, options, once=once)
    except KeyboardInterrupt:
        pass
    finally:
        sources.close()
    return 0


def _sort_names(names: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs and the hosts among the names. A file holds names of hosts. Raises UserError."""
    runs = []
    hosts = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            runs.append(Run(path))
        elif path.is_file():
            hosts += read_hosts(path, may_repeat=True)
        elif HOST_PATTERN.fullmatch(name):
            hosts.append(name)
        else:
            raise UserError(f"{cut(name)}: no such run, nor a file of host names, nor a host name")
    return runs, list(dict.fromkeys(hosts))


def _status_with_job(run: Run, job: JobWatch) -> RunStatus:
    status = read_run_status(run)
    if status.state in RUN_GOES_ON:
        return status
    return replace(status, job=job.look()[1])


@dataclass
class _Sources:
    """The sources of what is shown."""

    sampler: HostSampler | None
    remote_hosts: list[RemoteHost]
    runs: dict[Run, JobWatch]

    def snapshot(self) -> Snapshot:
        """The current state, without waiting for any host."""
        hosts = []
        if self.sampler is not None:
            usage = self.sampler.sample()
            hosts.append(HostAnswer(usage.host, usage, 0.0))
        hosts += [host.answer() for host in self.remote_hosts]
        runs = [_status_with_job(run, job) for run, job in self.runs.items()]
        return Snapshot(time.time(), hosts, runs)

    def wait(self, timeout_seconds: float) -> None:
        """Wait for the first rates of this host, and for the same time for the answers of the
        others.
        """
        deadline = time.monotonic() + timeout_seconds
        if self.sampler is not None:
            self.sampler.sample()
            time.sleep(FIRST_SAMPLE_SECONDS)
        for host in self.remote_hosts:
            host.wait(deadline - time.monotonic())

    def close(self) -> None:
        for host in self.remote_hosts:
            host.close()


def _show(sources: _Sources, options: TopOptions, *, once: bool) -> None:
    if once or options.output == "json":
        sources.wait(options.timeout_seconds if once else FIRST_SAMPLE_SECONDS)
        while True:
            snapshot = sources.snapshot()
            print(
                _as_json(snapshot) if options.output == "json" else _as_text(snapshot), flush=True
            )
            if once:
                return
            time.sleep(INTERVAL_SECONDS)
    console = Console(highlight=False)
    sources.wait(FIRST_SAMPLE_SECONDS)
    with (
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
        _keys() as key_pressed,
    ):
        while True:
            snapshot = sources.snapshot()
            live.update(render_screen(snapshot, console.width, console.height), refresh=True)
            if key_pressed(INTERVAL_SECONDS) == "q":
                return


def _as_json(snapshot: Snapshot) -> str:
    return json.dumps({"lmforge": __version__, **asdict(snapshot)})


def _as_text(snapshot: Snapshot) -> str:
    """The whole page as text, as wide as the terminal or COLUMNS."""
    columns = shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns
    console = Console(width=columns, highlight=False, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render_screen(snapshot, columns, None))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits up to the given seconds for a key, and returns it or an empty
    string.
    """
    import termios
    import tty

    # Without one, `select` waits all the same.
    keyboard = []
    if sys.stdin.isatty():
        keyboard = [sys.stdin.fileno()]

    def key_pressed(seconds: float) -> str:
        ready, _, _ = select.select(keyboard, [], [], seconds)
        if ready:
            return os.read(ready[0], 1).decode(errors="replace")
        return ""

    if not keyboard:
        yield key_pressed
        return
    before = termios.tcgetattr(keyboard[0])
    try:
        tty.setcbreak(keyboard[0])
        yield key_pressed
    finally:
        with suppress(termios.error):
            termios.tcsetattr(keyboard[0], termios.TCSADRAIN, before)
