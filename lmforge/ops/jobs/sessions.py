"""Jobs without a scheduler: a script that runs without a terminal on this machine, or on each host
of a file by ssh.

It continues after logout, and is identified by its process id and that process's start time.
"""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from lmforge import __version__
from lmforge.core.distributed.environment import (
    ADDRESS_VARIABLE,
    NODE_RANK_VARIABLE,
    NODES_VARIABLE,
)
from lmforge.core.distributed.hosts import (
    Answer,
    export_lines,
    forwarded_variables,
    raise_for_hosts,
    read_hosts,
    run_on_hosts,
)
from lmforge.core.distributed.processes import NO_ANSWER, try_call
from lmforge.core.distributed.rendezvous import PORTS, free_port
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import parse_json
from lmforge.ops.jobs.job import JOB_SCRIPT, NODE_SCRIPT, Job, JobPlan, JobState, Session
from lmforge.ops.jobs.scripts import IMPORT_CHECK

# Runs on each host before anything is started, and checks what a run would need there. Prints a
# line of JSON.
HOST_CHECK = """
import json, os, random, socket, sys
import lmforge
given, first, last = map(int, sys.argv[1:])
port = -1
# Not one of those that systems give to outgoing connections, which could take it before the ranks begin.
for candidate in [given] if given else random.sample(range(first, last), 100):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", candidate))
            port = candidate
            break
        except OSError:
            pass
connection = os.environ.get("SSH_CONNECTION", "").split()
facts = {"lmforge": lmforge.__version__, "name": socket.gethostname(), "address": (connection + [""] * 4)[2], "port": port}
print("lmforge-host", json.dumps(facts))
"""
CHECKED_PATTERN = re.compile(r"^lmforge-host (.*)$", re.M)
STARTED_PATTERN = re.compile(r"^lmforge-session ([0-9]+) ([0-9]*)$", re.M)


@dataclass(frozen=True)
class Hosts:
    """Where a job will run: `names` as ssh takes them, or one None for this machine.

    `address` and `port` are those of the first host, where ranks meet.
    """

    names: tuple[str | None, ...]
    address: str
    port: int
    ssh_options: tuple[str, ...] = ()


def find_hosts(plan: JobPlan) -> Hosts:
    """Check on every host whether it can run the job.

    Raises UserError naming those that cannot; nothing has been changed then.
    """
    options = plan.options
    if options.on != "ssh":
        return Hosts((None,), options.address or "localhost", options.port or free_port())
    if options.hosts is None:
        raise UserError(
            "launch.hosts: missing; with ssh give a file of hosts, one per line: --hosts hosts.txt"
        )
    names = read_hosts(options.hosts)
    if plan.nodes > len(names):
        raise UserError(f"launch.nodes = {plan.nodes}: {options.hosts} names {len(names)} hosts")
    names = names[: plan.nodes]
    ssh_options = tuple(word for line in options.directive_options for word in shlex.split(line))
    environment = export_lines(forwarded_variables())
    scripts = [
        _check_script(plan, environment, (options.port or 0) if name == names[0] else 0)
        for name in names
    ]
    answers = run_on_hosts(names, scripts, ssh_options)
    raise_for_hosts(answers, "nothing was started")
    facts = [_facts(answer) for answer in answers]
    if facts[0].port == -1:
        raise UserError(
            f"launch.port = {options.port}: in use on {names[0]}; give another, or none; nothing"
            " was started"
        )
    for name, each in zip(names, facts, strict=True):
        if each.lmforge != __version__:
            raise UserError(
                f"{name}: has lmforge {each.lmforge}, this machine {__version__}; nothing was"
                " started"
            )
    _check_hosts_differ(names, facts)
    address = options.address or facts[0].address or names[0].rpartition("@")[2]
    return Hosts(tuple(names), address, facts[0].port, ssh_options)


def _check_script(plan: JobPlan, environment: str, port: int) -> str:
    directory = shlex.quote(str(plan.directory))
    setup = "".join(f"{line}\n" for line in plan.options.setup)
    python = plan.python_command()
    return f"""\
{environment}cd {directory} 2>/dev/null || {{ echo no folder {directory} there, and all hosts need it >&2; exit 3; }}
{setup}reason=$({python} -c {shlex.quote(IMPORT_CHECK)} 2>&1) || {{
    echo {shlex.quote(python)} "does not run lmforge there (${{reason##*$'\\n'}}); see launch.python and launch.setup" >&2
    exit 3
}}
{python} -c {shlex.quote(HOST_CHECK)} {port} {PORTS.start} {PORTS.stop}
"""


def _check_hosts_differ(names: Sequence[str], facts: Sequence["_HostFacts"]) -> None:
    """Raise UserError where two entries are the same host, such as its name and its address: its
    GPUs would have two ranks each.
    """
    seen: dict[tuple[str, str], str] = {}
    for name, each in zip(names, facts, strict=True):
        if (first := seen.setdefault((each.name, each.address), name)) != name:
            raise UserError(
                f"{name}: the same host as {first}; a host is started once; nothing was started"
            )


@dataclass(frozen=True)
class _HostFacts:
    """What HOST_CHECK prints; the port is -1 where it is in use."""

    lmforge: str
    name: str
    address: str
    port: int


def _facts(answer: Answer) -> _HostFacts:
    match = CHECKED_PATTERN.search(answer.printed)
    if match is None:
        raise UserError(
            f"{answer.host}: launch.python does not run Python there; nothing was started"
        )
    return parse_json(match[1].encode(), _HostFacts, str(answer.host))


def submit(plan: JobPlan, hosts: Hosts) -> list[Session]:
    """Start the job's script on all hosts, or on none. Raises UserError."""
    several = plan.options.on == "ssh"
    environment = {}
    if several:
        environment = forwarded_variables()
    labels = [str(name).rpartition("@")[2] for name in hosts.names]
    scripts = []
    for rank, label in enumerate(labels):
        variables = dict(environment)
        if several:
            variables |= {NODES_VARIABLE: ",".join(labels), NODE_RANK_VARIABLE: str(rank)}
            variables |= {ADDRESS_VARIABLE: f"{hosts.address}:{hosts.port}"}
        log = plan.log if rank == 0 else plan.folder / f"output-{label}.log"
        scripts.append(_start_script(plan, export_lines(variables), str(log)))
    answers = run_on_hosts(hosts.names, scripts, hosts.ssh_options)
    sessions = [
        Session(answer.host, int(match[1]), match[2])
        for answer in answers
        if answer.status == 0 and (match := STARTED_PATTERN.search(answer.printed))
    ]
    if len(sessions) < len(answers):
        _signal(sessions, hosts.ssh_options, "KILL")
        raise_for_hosts(answers, "what had been started on the others was ended")
        silent = next(
            answer.host
            for answer in answers
            if answer.host not in {session.host for session in sessions}
        )
        raise UserError(
            f"{silent}: did not report the process that it has started; those on the other hosts"
            f" were ended; look there for one that runs {JOB_SCRIPT}"
        )
    return sessions


def _start_script(plan: JobPlan, environment: str, log: str) -> str:
    folder = shlex.quote(str(plan.folder))
    return f"""\
test -f {folder}/{NODE_SCRIPT} || {{ echo does not see {folder}: all hosts need the folder of the run >&2; exit 3; }}
{environment}setsid bash {folder}/{JOB_SCRIPT} >>{shlex.quote(log)} 2>&1 </dev/null &
echo lmforge-session $! $(cut -d ' ' -f 22 /proc/$!/stat 2>/dev/null)
"""


def state(job: Job) -> tuple[JobState, str]:
    """The state of a job, and which hosts do not answer or do not run it any more while others
    do.
    """
    check = (
        'kill -0 {0} 2>/dev/null && [ "$(cut -d " " -f 22 /proc/{0}/stat)" = {1} ] && echo alive;'
        " true"
    )
    scripts = [check.format(each.process, shlex.quote(each.started)) for each in job.sessions]
    answers = run_on_hosts([each.host for each in job.sessions], scripts, job.ssh_options)
    alive = [answer.host for answer in answers if answer.printed.strip() == "alive"]
    unreachable = [f"{answer.host}: {answer.message}" for answer in answers if answer.status != 0]
    ended = [
        str(answer.host) for answer in answers if answer.status == 0 and answer.host not in alive
    ]
    has_status = len(job.sessions) == 1 and job.status_path.exists()
    if alive and not has_status:
        notes = list(unreachable)
        if alive != [None]:
            notes.insert(0, f"{len(alive)} of {len(answers)} hosts")
        if ended:
            notes.append(f"ended on {', '.join(ended)}")
        return JobState.RUNNING, "; ".join(notes)
    state = job.state_by_status()
    if state != JobState.LOST:
        unreachable = []
    return state, "; ".join(unreachable)


def stop(job: Job, now: JobState, kill: bool) -> None:
    """Make the job save and end on all hosts, or end it at once.

    Raises UserError naming hosts that do not answer.
    """
    raise_for_hosts(
        _signal(job.sessions, job.ssh_options, "KILL" if kill else "TERM"),
        "the others have got the signal",
    )


def _signal(sessions: Sequence[Session], ssh_options: Sequence[str], name: str) -> list[Answer]:
    """Send a signal to scripts, or SIGKILL to everything that they have started."""
    scripts = []
    for each in sessions:
        target = f"$(tree {each.process})" if name == "KILL" else str(each.process)
        scripts.append(
            "tree() { for child in $(cat /proc/$1/task/*/children 2>/dev/null); do tree $child;"
            " done; echo $1; }\n"
            f'[ "$(cut -d " " -f 22 /proc/{each.process}/stat 2>/dev/null)" ='
            f" {shlex.quote(each.started)} ] || exit 0\n"
            f"kill -{name} {target}\n"
        )
    if sessions:
        return run_on_hosts([each.host for each in sessions], scripts, ssh_options)
    return []


def mpi_command(plan: JobPlan, hosts: Hosts) -> list[str]:
    """The mpiexec command that starts every rank, with the options of its implementation.

    Raises UserError where there is none.
    """
    options = plan.options
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        raise UserError("mpiexec is not installed here; load the cluster's module for MPI first")
    status, version, message = try_call([mpiexec, "--version"])
    if status == NO_ANSWER:
        raise UserError(message)
    ranks = plan.nodes * options.processes
    per_node = options.processes
    # With several nodes in an allocation, ranks find the first one themselves (rendezvous.py).
    variables = {}
    if plan.nodes == 1 or options.address or options.hosts:
        first = "localhost"
        if options.hosts:
            first = read_hosts(options.hosts)[0].rpartition("@")[2]
        variables = {"MASTER_ADDR": options.address or first, "MASTER_PORT": str(hosts.port)}
    extra = [word for line in options.directive_options for word in shlex.split(line)]
    if "Open MPI" in version or "OpenRTE" in version:
        command = [
            mpiexec,
            "-n",
            str(ranks),
            "--map-by",
            f"ppr:{per_node}:node",
            "--bind-to",
            "none",
        ]
        command += ["--hostfile", os.path.abspath(options.hosts)] if options.hosts else []
        command += [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    elif "HYDRA" in version or "Intel(R) MPI" in version:
        command = [mpiexec, "-n", str(ranks), "-ppn", str(per_node)]
        command += ["-f", os.path.abspath(options.hosts)] if options.hosts else []
        command += [word for name, value in variables.items() for word in ("-genv", name, value)]
    else:  # Cray's PALS and others
        command = [mpiexec, "-n", str(ranks), "--ppn", str(per_node)]
        command += [
            word for name, value in variables.items() for word in ("--env", f"{name}={value}")
        ]
    return [*command, *extra]
