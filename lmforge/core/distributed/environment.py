"""Which launcher started this process, and as which rank: one answer from the variables of
torchrun, Slurm and MPI.

A process that no launcher started is the only rank. Variables of a launcher that are unknown or
contradict each other are an error; otherwise each process would train its own copy. This module
does not import torch, since the rank is needed before that. How ranks find rank 0 is in
`rendezvous.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lmforge.core.errors import UserError, name_some
from lmforge.core.files.untrusted import quoted
from lmforge.core.options.operation import MAX_PORT, EnvironmentName
from lmforge.core.options.ranges import RANKS

# The value of `--environment`, for this process and those that it starts.
ENVIRONMENT_VARIABLE = "LMFORGE_ENVIRONMENT"
# Set by the script of a job on each node: names of the nodes in order, separated by commas;
# HOST:PORT of the first one; and which of them this is (without it: SLURM_NODEID, else the one that
# has this host's name).
NODES_VARIABLE = "LMFORGE_NODES"
ADDRESS_VARIABLE = "LMFORGE_ADDRESS"
NODE_RANK_VARIABLE = "LMFORGE_NODE_RANK"
# A file in which the first node writes the status of all, and one that refuses its input 2: that of
# MPICH's mpiexec is 0 after it has passed on a signal, and that of srun is that of nodes whose
# processes it has killed.
STATUS_VARIABLE = "LMFORGE_STATUS_FILE"
# The folder of the job that has started this process.
JOB_VARIABLE = "LMFORGE_JOB"
# Set for ranks that `--launch.processes` starts: the id of the process that started them.
LAUNCHER_PID_VARIABLE = "LMFORGE_LAUNCHER"
# Set for them too: the standard streams that were closed when it began, where they get /dev/null.
CLOSED_VARIABLE = "LMFORGE_CLOSED"
MAX_RANKS: int = RANKS["le"]
# Slurm's step ids from this value on are not steps of tasks: the batch script, an interactive
# shell, the prolog.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0
FORCE_HINT = "choose the launcher with --environment, or start with torchrun"


@dataclass(frozen=True)
class RankInfo:
    """`rank` of `world_size` ranks, `local_rank` of `local_world_size` on its host, which is number
    `node`.

    launched: whether a launcher started this process. False where the launcher started only one
    process, except for torchrun.
    environment: the name of the launcher, as in `--environment`.
    is_counted: whether a launcher says how many ranks are on this host. False until they are
        counted where they meet (`count_by_host`): `local_world_size` is that of all hosts, and
        `node` 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    node: int = 0
    environment: EnvironmentName = "single"
    is_counted: bool = True

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher tells a process its rank.

    If several names are given, the first one that is set counts.
    command: what messages call it.
    """

    name: EnvironmentName
    command: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node: tuple[str, ...] = ()


TORCHRUN = Launcher(
    "torchrun",
    "torchrun",
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("GROUP_RANK",),
)
OPENMPI = Launcher(
    "openmpi",
    "mpiexec of Open MPI",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MPICH = Launcher(
    "mpich",
    "mpiexec of MPICH",
    ("PMI_RANK",),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID",),
    ("MPI_LOCALNRANKS",),
)
PALS = Launcher(
    "pals",
    "mpiexec of Cray PALS",
    ("PALS_RANKID", "PMI_RANK"),
    ("PMI_SIZE",),
    ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    ("PMI_LOCAL_SIZE",),
    ("PALS_NODEID",),
)
# A batch script's SLURM_NTASKS is that of the whole job, and mpiexec leaves it in place where it
# starts its daemons as a step.
SLURM = Launcher(
    "slurm",
    "srun",
    ("SLURM_PROCID",),
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_LOCALID",),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    ("SLURM_NODEID",),
)
LAUNCHERS = {launcher.name: launcher for launcher in (TORCHRUN, OPENMPI, MPICH, SLURM, PALS)}
# Launchers that are recognized but not supported: the variable that shows them → who sets it, and
# its number of processes.
UNKNOWN_LAUNCHERS = {
    "MV2_COMM_WORLD_RANK": ("mpirun of MVAPICH2", "MV2_COMM_WORLD_SIZE"),
    "FLUX_TASK_RANK": ("flux run", "FLUX_JOB_SIZE"),
    "ALPS_APP_PE": ("aprun", ""),
    "PMIX_RANK": ("a PMIx launcher", ""),
    "PMI_RANK": ("a PMI launcher", "PMI_SIZE"),
    "LSF_PM_TASKID": ("blaunch", "LSB_DJOB_NUMPROC"),
    "JSM_NAMESPACE_RANK": ("jsrun", "JSM_NAMESPACE_SIZE"),
}


def read_environment(environ: Mapping[str, str], requested: str = "auto") -> RankInfo:
    """The rank of this process, from the variables of the `requested` launcher, or of the one that
    is detected.

    Raises UserError where variables are missing, contradict each other, or are those of a launcher
    that is not understood.
    """
    if requested == "auto":
        launcher = _find_launcher(environ)
    elif requested == "single" or (requested == "local" and "RANK" not in environ):
        launcher = None
    elif requested == "local":
        launcher = TORCHRUN
    elif requested == "pbs":  # its mpiexec may be any
        launcher = _find_launcher(environ)
        if launcher is None:
            _require(environ, PALS)
    elif requested in LAUNCHERS:
        launcher = LAUNCHERS[requested]
        _require(environ, launcher)
    else:
        known = ", ".join(get_args(EnvironmentName))
        raise UserError(
            f"environment: {ENVIRONMENT_VARIABLE}: expected one of {known}, got {quoted(requested)}"
        )
    if launcher is None:
        return RankInfo()
    return _read_torchrun(environ) if launcher is TORCHRUN else _read_rank_info(environ, launcher)


def _find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process as one of its ranks; None for no launcher.

    Raises UserError.
    """
    started_by = _mpi_launchers(environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        _check_against_torchrun(environ, _launcher_beside_torchrun(environ))
        return TORCHRUN
    for other in started_by[1:]:
        _check_same_rank(environ, started_by[0], other)
    if started_by:  # also in a Slurm job, where srun started its daemons
        return started_by[0]
    has_pmi = "PMI_RANK" in environ and "PMI_SIZE" in environ
    if is_slurm_task(environ):
        if has_pmi:  # srun --mpi=pmi2, or PALS that srun has set up
            _check_same_rank(environ, SLURM, MPICH)
        return SLURM
    if "PALS_RANKID" in environ or "PALS_APID" in environ:
        return PALS
    _check_understood(environ)
    return None


def _mpi_launchers(environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers of MPI whose ranks include this process.

    A launcher that starts another one may be among them.
    """
    started_by = [
        launcher
        for launcher in (OPENMPI, MPICH)
        if _first_set(environ, launcher.rank + launcher.world_size)
    ]
    if MPICH in started_by and not _first_set(environ, MPICH.local_rank + MPICH.local_world_size):
        started_by.remove(MPICH)  # Slurm and PALS, too, set PMI_RANK, or another PMI launcher
    return started_by


def _launcher_beside_torchrun(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process where RANK and WORLD_SIZE are set too."""
    return next(iter(_mpi_launchers(environ)), SLURM if is_slurm_task(environ) else None)


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task.

    A batch script and an interactive shell have a task's variables too.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return step.isdecimal() and len(step) < 20 and int(step) < FIRST_SPECIAL_STEP


def _check_understood(environ: Mapping[str, str]) -> None:
    for variable, (command, size_variable) in UNKNOWN_LAUNCHERS.items():
        if variable in environ and environ.get(size_variable) != "1":
            raise UserError(
                f"environment: {variable} = {quoted(environ[variable])}: {command} has started this"
                " process, and lmforge does not know its variables; start with torchrun, or say"
                " --environment single if each process is to train alone"
            )
    if environ.get("PBS_NODENUM", "0") != "0":  # the job script is on the first node
        raise UserError(
            f"environment: PBS_NODENUM = {quoted(environ['PBS_NODENUM'])}: pbsdsh or the like has"
            " started this process, and no variable says of how many; start with mpiexec or"
            " torchrun, or say --environment single"
        )


def _check_against_torchrun(environ: Mapping[str, str], other: Launcher | None) -> None:
    """Raise UserError where RANK was set by hand to the same value for all processes of a
    launcher.
    """
    if (
        other is None
        or "TORCHELASTIC_RUN_ID" in environ
        or "RANK" not in environ
        or "WORLD_SIZE" not in environ
    ):
        return
    rank, world_size = (
        read_number(environ, name, -MAX_RANKS, MAX_RANKS) for name in ("RANK", "WORLD_SIZE")
    )
    tasks = _read_first(environ, other.world_size, other)
    if world_size < tasks or (
        world_size == tasks and rank != _read_first(environ, other.rank, other)
    ):
        raise _contradiction(environ, TORCHRUN, other)


def _check_same_rank(environ: Mapping[str, str], one: Launcher, other: Launcher) -> None:
    for names in ("rank", "world_size"):
        if _read_first(environ, getattr(one, names), one) != _read_first(
            environ, getattr(other, names), other
        ):
            raise _contradiction(environ, one, other)


def _contradiction(environ: Mapping[str, str], one: Launcher, other: Launcher) -> UserError:
    def numbers(launcher: Launcher) -> str:
        names = [_first_set(environ, names) for names in (launcher.rank, launcher.world_size)]
        return " and ".join(f"{name} = {environ[name]}" for name in names if name)

    return UserError(
        f"environment: {numbers(one)}, but {numbers(other)} of {other.command}; {FORCE_HINT}"
    )


def _require(environ: Mapping[str, str], launcher: Launcher) -> None:
    """Raise UserError where the launcher that was asked for has not set its rank and its number of
    ranks.
    """
    missing = [
        names[0] for names in (launcher.rank, launcher.world_size) if not _first_set(environ, names)
    ]
    if missing:
        raise UserError(
            f"--environment {launcher.name}: {' and '.join(missing)} not set, so {launcher.command}"
            " has not started this process; leave the option out, or start with it"
        )


def _read_torchrun(environ: Mapping[str, str]) -> RankInfo:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if name not in environ)
    if missing:
        raise UserError(
            f"environment: RANK or WORLD_SIZE is set but {missing} is not; start with torchrun, or"
            " unset them"
        )
    info = _read_rank_info(environ, TORCHRUN)
    read_number(environ, "MASTER_PORT", 1, MAX_PORT)
    if not environ["MASTER_ADDR"].strip():
        raise UserError(
            "environment: MASTER_ADDR is empty; give the name or address of the host of rank 0"
        )
    return info


def _read_rank_info(environ: Mapping[str, str], launcher: Launcher) -> RankInfo:
    rank, world_size, local_rank = (
        _read_first(environ, names, launcher)
        for names in (launcher.rank, launcher.world_size, launcher.local_rank)
    )
    node_variable = _first_set(environ, launcher.node)
    node = read_number(environ, node_variable, 0, MAX_RANKS) if node_variable else None
    is_counted = True
    if launcher is SLURM:
        local_world_size = _tasks_on_node(environ, node or 0)
    elif launcher is TORCHRUN and "LOCAL_WORLD_SIZE" not in environ:
        # Container hooks and wrappers export the other variables of torchrun for the tasks of Slurm
        # or MPI.
        other = _launcher_beside_torchrun(environ)
        local_world_size = world_size
        is_counted = world_size == 1
        if other and _first_set(environ, other.local_world_size):
            tasks = _read_rank_info(environ, other)
            if tasks.world_size == world_size:  # else it started processes that start the ranks
                local_world_size = tasks.local_world_size
                node = tasks.node
                is_counted = True
    else:
        local_world_size = _read_first(environ, launcher.local_world_size, launcher)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        counted = f"rank {rank} of {world_size}, local rank {local_rank} of {local_world_size}"
        limits = " and ".join(
            _first_set(environ, names) or names[0]
            for names in (launcher.world_size, launcher.local_world_size)
        )
        raise UserError(f"environment: {counted}: ranks count from 0 to below {limits}")
    if world_size == 1 and launcher is not TORCHRUN:
        return RankInfo()
    # Unless a variable says otherwise, ranks fill one host after the other.
    node = rank // local_world_size if node is None else node
    return RankInfo(
        rank, world_size, local_rank, local_world_size, True, node, launcher.name, is_counted
    )


def count_by_host(info: RankInfo, hosts: Sequence[object]) -> RankInfo:
    """`info` with the number of ranks on its host, and the number of that among the `hosts` of all
    ranks, which are by rank.
    """
    own = hosts[info.rank]
    return replace(
        info,
        local_world_size=hosts.count(own),
        node=list(dict.fromkeys(hosts)).index(own),
        is_counted=True,
    )


def check_local_ranks(places: Sequence[tuple[str, int]]) -> None:
    """Raise UserError where the (host, LOCAL_RANK) of all ranks do not count the ranks of each host
    from 0.
    """
    by_host: dict[str, list[int]] = {}
    for host, local_rank in places:
        by_host.setdefault(host, []).append(local_rank)
    for host, local_ranks in by_host.items():
        if sorted(local_ranks) != [*range(len(local_ranks))]:
            numbers = name_some(sorted(local_ranks))
            said = f"the ranks on {host} have LOCAL_RANK = {numbers}: they count from 0"
            raise UserError(f"environment: {said}; set LOCAL_WORLD_SIZE, {FORCE_HINT}")


def _tasks_on_node(environ: Mapping[str, str], node: int) -> int:
    """The number of tasks on a node, from Slurm's list of runs, such as `2(x3),1`: three nodes with
    2 tasks, one with 1.
    """
    name = _first_set(environ, SLURM.local_world_size)
    if name is None:
        raise _missing(SLURM.local_world_size, SLURM)
    nodes_before = 0
    for run in environ[name].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", run)
        if match is None:
            raise UserError(
                f"environment: {name}: expected tasks per node such as 2(x3),1, got"
                f" {quoted(environ[name])}"
            )
        nodes_before += int(match[2] or 1)
        if node < nodes_before:
            return int(match[1])
    raise UserError(
        f"environment: SLURM_NODEID = {node}, but {name} = {quoted(environ[name])} has"
        f" {nodes_before} nodes"
    )


def under_launcher(info: RankInfo, command: str) -> str:
    """How `lmforge`, typed as `command`, is started with the launcher of these ranks; its options
    are left out.
    """
    if info.environment == TORCHRUN.name:
        return "torchrun … -m lmforge"
    return f"{LAUNCHERS[info.environment].command.partition(' of ')[0]} … {command}"


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environ), None)


def _read_first(environ: Mapping[str, str], names: tuple[str, ...], launcher: Launcher) -> int:
    if (name := _first_set(environ, names)) is None:
        raise _missing(names, launcher)
    return read_number(environ, name, -MAX_RANKS, MAX_RANKS)


def _missing(names: tuple[str, ...], launcher: Launcher) -> UserError:
    return UserError(
        f"environment: {launcher.command} has started this process, but {' or '.join(names)} is not"
        f" set; {FORCE_HINT}"
    )


def read_number(environ: Mapping[str, str], name: str, minimum: int, maximum: int) -> int:
    """A variable as a whole number from `minimum` to `maximum`. Raises UserError."""
    text = environ[name]
    number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if number is None or not minimum <= number <= maximum:
        raise UserError(
            f"environment: {name}: expected a whole number up to {maximum}, got {quoted(text)}"
        )
    return number
