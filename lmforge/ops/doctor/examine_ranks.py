"""The checks of `lmforge doctor` on all ranks, in phases: hosts, storage, devices, network.

Rank 0 evaluates the answers.

Ranks report to rank 0 through the store of the rendezvous, in bounded time and before there is a
process group. A phase that a rank does not finish in time ends without it: the rank is named, and
the rest is examined without what needs it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lmforge.core.distributed.distributed import choose_device
from lmforge.core.distributed.environment import NODES_VARIABLE, count_by_host
from lmforge.core.distributed.joining import (
    allow_open_connections,
    choose_gloo_interface,
    find_rank0,
)
from lmforge.core.distributed.rank_info import RankInfo, count_restarts, threads_per_rank
from lmforge.core.distributed.waiting import await_listener, call_bounded, wait_until
from lmforge.core.errors import RunFailed, UserError, format_count, name_some
from lmforge.core.options.stage import StageConfig
from lmforge.ops.doctor import Finding, rank_checks
from lmforge.ops.doctor.storage_checks import check_storage, compare_contents

# Additional time for the answer of a rank to arrive after a phase.
ANSWER_SECONDS = 2.0
# The others time out later than rank 0, which waits for a late rank in each of several phases.
PATIENCE_FACTOR = 3.0

Reports = dict[int, dict[str, Any]]


@dataclass
class Examination:
    """What this rank is asked about.

    `machine` are the findings of its host, on the first rank of each.
    """

    info: RankInfo
    config: StageConfig | None
    device_name: str
    timeout_seconds: float
    machine: Sequence[Finding]
    _hosts: list[str] = field(default_factory=list)  # of each rank, once they are known
    _named: set[int] = field(default_factory=set)  # the ranks that are known not to answer

    def examine(self, print_findings: Callable[[list[Finding]], None]) -> int:
        """Carry out all phases; rank 0 prints the findings.

        Returns the exit status. Every rank calls it.
        """
        began = time.monotonic()
        self.reports = RankReports(self.info, self.timeout_seconds + ANSWER_SECONDS)
        torch.set_num_threads(threads_per_rank(self.info.local_world_size))
        if not self.info.is_rank0:
            return self._answer()
        findings = list(self._ask(began))
        status = int(any(finding.status == "fail" for finding in findings))
        # mpiexec ends this rank as soon as another one has ended with status 1.
        print_findings(findings)
        self.reports.publish(f"step-{self._steps}", {"phase": "end", "status": status})
        self.reports.await_departures()
        return status

    def _answer(self) -> int:
        """On the other ranks: carry out phases until rank 0 ends them. Returns its status."""
        self._steps = 0
        while (step := self.reports.receive(f"step-{self._steps}"))["phase"] != "end":
            step["time"] = time.time()
            self._work(step)
        self.reports.leave()
        return int(step["status"])

    def _carry_out(self, phase: str, **step: Any) -> Reports:
        """On rank 0: a phase on all ranks. Returns what they report."""
        step |= {"phase": phase, "time": time.time(), "hosts": self._hosts}
        self.reports.publish(f"step-{self._steps}", step)
        return self.reports.collect(self._work(step))

    def _work(self, step: dict[str, Any]) -> str:
        """Carry out this rank's part of a phase, and report the result.

        Returns the name of the report.
        """
        name = f"{step['phase']}-{self._steps}"
        if step["hosts"] and not self.info.is_counted:
            self.info = count_by_host(self.info, step["hosts"])
            torch.set_num_threads(threads_per_rank(self.info.local_world_size))
        phases = {
            "host": self._host,
            "storage": self._storage,
            "device": self._device,
            "network": self._network,
        }
        self.reports.post(
            name, run_bounded(partial(phases[step["phase"]], step), self.timeout_seconds)
        )
        self._steps += 1
        return name

    # --- what each rank does ----------------------------------------------------------------------

    def _host(self, step: dict[str, Any]) -> dict[str, Any]:
        try:
            device: torch.device | None = choose_device(self.device_name, self.info.local_rank)
        except UserError as problem:
            device = None
            self.machine = [*self.machine, Finding("device", "fail", str(problem))]
        identity = ""
        if device and device.type == "cuda":
            identity = str(torch.cuda.get_device_properties(device).uuid)
        return {
            "facts": rank_checks.describe_host(),
            "findings": [asdict(finding) for finding in self.machine if self.info.local_rank == 0],
            "local_rank": self.info.local_rank,
            "device": device.type if device else "",
            "gpu": identity,
            "time": step["time"],
        }

    def _storage(self, step: dict[str, Any]) -> dict[str, Any]:
        if self.info.local_rank:
            return {}
        if self.info.launched or self.config is None:
            ranks = self.info.world_size
        else:
            ranks = self.config.launch.processes
        return check_storage(self.config, ranks)

    def _device(self, step: dict[str, Any]) -> dict[str, Any]:
        return rank_checks.measure_device(choose_device(self.device_name, self.info.local_rank))

    def _network(self, step: dict[str, Any]) -> dict[str, Any]:
        allow_open_connections(self.info.world_size)
        choose_gloo_interface(several_hosts=self.info.local_world_size < self.info.world_size)
        device = choose_device(self.device_name, self.info.local_rank)
        info = self.info
        seconds = self.timeout_seconds
        return rank_checks.measure_network(
            self.reports.store, info.rank, info.world_size, device, step["leaders"], seconds
        )

    # --- what rank 0 makes of it ------------------------------------------------------------------

    def _ask(self, began: float) -> Iterator[Finding]:
        self._steps = 0
        info = self.info
        reports = self._carry_out("host")
        usable = {rank: report for rank, report in reports.items() if "facts" in report}
        hosts = {
            rank: usable[rank]["facts"]["host"] if rank in usable else f"rank {rank}"
            for rank in reports
        }
        names = {
            rank: f"rank {rank} on {hosts[rank]}" if rank in usable else f"rank {rank}"
            for rank in range(info.world_size)
        }
        self._hosts = [hosts.get(rank, f"rank {rank}") for rank in range(info.world_size)]
        several_hosts = len({hosts[rank] for rank in usable}) > 1
        yield from self._judge_joining(hosts, began)
        yield from merge_findings(reports, hosts)
        yield from self._failures("host", reports, names)
        if usable:
            yield from rank_checks.compare_versions(
                {rank: report["facts"] for rank, report in usable.items()}
            )
        if several_hosts and usable.get(0):
            yield rank_checks.compare_clocks(
                {rank: report["time"] for rank, report in usable.items()}, names
            )
        leaders = [rank for rank, report in usable.items() if report["local_rank"] == 0]
        reports = self._carry_out("storage")
        yield from self._failures("storage", reports, names)
        yield from merge_findings(reports, hosts)
        yield from compare_contents(
            {
                hosts[rank]: report["contents"]
                for rank, report in reports.items()
                if "contents" in report
            }
        )
        kinds = {report["device"] for report in usable.values()}
        if "" in kinds:
            return
        yield from _check_devices_differ(usable, names, kinds)
        reports = self._carry_out("device")
        yield from self._failures("device", reports, names)
        yield from rank_checks.check_devices(reports, names, "cuda" if kinds == {"cuda"} else "cpu")
        if info.world_size == 1 or len(kinds) > 1:
            return
        if len(usable) < info.world_size or self.reports.missing:
            yield Finding("network", "warn", "not measured: not all ranks answer")
            return
        reports = self._carry_out("network", leaders=leaders)
        failures = list(self._failures("network", reports, names))
        yield from failures
        if not failures:
            yield from rank_checks.check_network(reports, hosts)

    def _judge_joining(self, hosts: dict[int, str], began: float) -> Iterator[Finding]:
        info = self.info
        if info.world_size == 1:
            return
        where = f"at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if missing := self.reports.missing:
            # Of the hosts of a job, where its script says so.
            names = os.environ.get(NODES_VARIABLE, "").split(",")
            each = info.local_world_size
            known = len(names) * each == info.world_size
            shown = name_some(
                [f"{rank} ({names[rank // each]})" if known else rank for rank in missing]
            )
            what = "ranks"
            if len(missing) == 1:
                what = "rank"
            text = (
                f"{what} {shown} of {info.world_size} did not answer {where} within"
                f" {self.timeout_seconds:g} s"
            )
            todo = "not started, still importing, cut off by a firewall, or stopped: see its host"
            yield Finding("ranks", "fail", text, todo, tuple(f"rank {rank}" for rank in missing))
        else:
            count = len(set(hosts.values()))
            text = (
                f"{info.world_size} on {format_count(count, 'host')} met {where} in"
                f" {time.monotonic() - began:.1f} s"
            )
            yield Finding("ranks", "pass", text)

    def _failures(self, phase: str, reports: Reports, names: dict[int, str]) -> Iterator[Finding]:
        """A finding for each error of a phase, and for the ranks that did not answer in it."""
        by_error: dict[str, list[int]] = {}
        for rank, report in reports.items():
            if "error" in report:
                by_error.setdefault(report["error"][:300], []).append(rank)
        for error, ranks in by_error.items():
            where = tuple(names[rank] for rank in ranks)
            yield Finding(
                phase,
                "fail",
                error,
                "see the logs of these ranks" if phase == "network" else "",
                where,
            )
        late = [rank for rank in self.reports.missing if rank in names and rank not in reports]
        if phase != "host" and (new := [rank for rank in late if rank not in self._named]):
            self._named.update(new)
            where = tuple(names[rank] for rank in new)
            yield Finding(
                phase,
                "fail",
                f"no answer within {self.timeout_seconds:g} s",
                "it stopped or was cut off",
                where,
            )
        self._named.update(late)


def _check_devices_differ(
    usable: Reports, names: dict[int, str], kinds: set[str]
) -> Iterator[Finding]:
    """Whether all ranks have the same kind of device, and no GPU is used by two ranks."""
    if len(kinds) > 1:
        where = tuple(names[rank] for rank, report in usable.items() if report["device"] == "cpu")
        yield Finding(
            "devices",
            "fail",
            "a CPU, and GPUs on other ranks",
            "see nvidia-smi there, or give --device cpu",
            where,
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, report in usable.items():
        gpu = report["facts"]["host"], report["gpu"]
        if report["gpu"] and (first := owners.setdefault(gpu, rank)) != rank:
            yield Finding(
                "devices",
                "fail",
                f"the same GPU as rank {first}",
                "start one rank for each GPU",
                (names[rank],),
            )


def merge_findings(reports: Reports, hosts: dict[int, str]) -> Iterator[Finding]:
    """The findings of each host as one for all, where they agree: what passes is that of the first
    host. Others with their hosts.
    """
    groups: dict[tuple[str, ...], dict[str, list[Finding]]] = {}
    for rank, report in reports.items():
        for each in report.get("findings", ()):
            finding = Finding(**each)
            text = "" if finding.status == "pass" else finding.description
            key = finding.name, finding.status, finding.todo, text
            groups.setdefault(key, {}).setdefault(hosts.get(rank, f"rank {rank}"), []).append(
                finding
            )
    num_hosts = len(set(hosts.values()))
    for by_host in groups.values():
        where = tuple(by_host) if len(by_host) < num_hosts else ()
        values = {
            host: finding.values
            for host, findings in by_host.items()
            for finding in findings
            if finding.values
        }
        (host, first), *_ = by_host.items()
        differ = len(
            {finding.description for findings in by_host.values() for finding in findings}
        ) > len(first)
        note = ""
        if differ and not where:
            note = f" (on {host}; figures of the other hosts differ)"
        for finding in first:
            yield Finding(
                finding.name,
                finding.status,
                finding.description + note,
                finding.todo,
                where,
                values,
            )


class RankReports:
    """The reports of each phase, by rank. Values are whatever JSON holds.

    Raises RunFailed where rank 0 cannot be reached in time.
    """

    def __init__(self, info: RankInfo, timeout_seconds: float) -> None:
        self._rank = info.rank
        self._timeout = timeout_seconds
        self._answering = set(range(info.world_size))
        self.missing: list[int] = []
        self.store: dist.Store = dist.HashStore()
        if info.world_size > 1:
            find_rank0(info)
            self.store = _connect(info, timeout_seconds)

    def post(self, phase: str, value: Any) -> None:
        """Send this rank's report of a phase to rank 0."""
        self.store.set(f"{phase}/{self._rank}", json.dumps(value))

    def collect(self, phase: str) -> dict[int, Any]:
        """The reports by rank, on rank 0.

        A rank that has not answered in time is `missing` from then on.
        """
        reports = dict[int, Any]()

        def all_have_answered() -> bool:
            for rank in self._answering - reports.keys():
                if self.store.check([f"{phase}/{rank}"]):
                    reports[rank] = json.loads(self.store.get(f"{phase}/{rank}"))
            return reports.keys() == self._answering

        wait_until(all_have_answered, self._timeout)
        self.missing += sorted(self._answering - reports.keys())
        self._answering &= reports.keys()
        return dict(sorted(reports.items()))

    def publish(self, name: str, value: Any) -> None:
        """Publish a value for all ranks, on rank 0."""
        self.store.set(name, json.dumps(value))

    def receive(self, name: str) -> Any:
        """Wait for the value that rank 0 publishes."""
        seconds = PATIENCE_FACTOR * self._timeout

        def wait() -> dict[str, Any]:
            self.store.wait([name], timedelta(seconds=seconds))
            return {"value": json.loads(self.store.get(name))}

        answer = run_bounded(wait, seconds)
        if "error" in answer:
            raise RunFailed(
                f"rank {self._rank}: rank 0 has not answered ({answer['error'][:200]}); see its"
                " output"
            )
        return answer["value"]

    def await_departures(self) -> None:
        """On rank 0, whose process serves the store: wait until the others have read the last
        answer, or a moment.
        """
        wait_until(
            lambda: self.store.add("left", 0) >= len(self._answering) - 1, min(self._timeout, 5.0)
        )

    def leave(self) -> None:
        """Tell rank 0 that this rank no longer needs the store."""
        run_bounded(lambda: {"left": self.store.add("left", 1)}, self._timeout)


def _connect(info: RankInfo, timeout_seconds: float) -> dist.Store:
    """The store of all ranks. Unlike `dist.rendezvous` this does not wait for the others."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    serves = info.is_rank0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not serves:
            await_listener(address, port, timeout_seconds)
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.TCPStore(
            address,
            port,
            is_master=serves,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timeout,
        )
    except (RuntimeError, OSError) as problem:
        what = "cannot reach"
        if serves:
            what = "cannot listen at"
        reason = " ".join(str(problem).split())[:200]
        hint = "check that rank 0 runs, MASTER_ADDR, and firewalls between hosts"
        if serves:
            hint = "choose a free MASTER_PORT"
        raise RunFailed(f"rank {info.rank} {what} {address}:{port} ({reason}); {hint}") from None
    return dist.PrefixStore(f"lmforge-doctor-{count_restarts()}", store)


def run_bounded(fn: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The result of `fn`, or {"error": reason} where it raises or takes too long; it then continues
    in a thread.
    """
    try:
        return call_bounded(fn, seconds)
    except TimeoutError as problem:
        return {"error": f"{problem}" or f"not done after {seconds:g} s"}
    except Exception as problem:
        return {"error": " ".join(f"{problem}".split()) or type(problem).__name__}
