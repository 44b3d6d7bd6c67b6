"""Which launcher started a process, and as which rank: recorded variables of each, alone and in
contradiction.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.core.distributed import processes
from lmforge.core.distributed.environment import (
    ENVIRONMENT_VARIABLE,
    RankInfo,
    read_environment,
    under_launcher,
)
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.distributed.rendezvous import (
    candidate_ports,
    hosts_to_ask,
    job_identity,
    list_hosts,
    own_address,
)
from lmforge.core.errors import UserError

Variables = dict[str, str]


def variables(text: str) -> Variables:
    return dict(word.split("=", 1) for word in text.split())


# As recorded: task 3 of `srun -N2 --ntasks-per-node=2` (Slurm 22.05).
SRUN = variables(
    "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=1"
    " SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2"
    " SLURM_PROCID=3 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1-2]"
    " SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
    " SLURM_TASKS_PER_NODE=2(x2)"
)
# The script of `sbatch -N2 -n4` itself.
BATCH_SHELL = variables(
    "SLURM_JOB_ID=3 SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=4"
    " SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=3,1"
)
SRUN_PMI2 = {
    **SRUN,
    **variables("PMI_FD=10 PMI_JOBID=1.0 PMI_RANK=3 PMI_SIZE=4 SLURM_MPI_TYPE=pmi2"),
}
# Rank 3 of 4, on its host alone: mpiexec of MPICH 4.0 in a Slurm job, whose daemons srun started as
# a step of two tasks.
MPICH_IN_SLURM = variables(
    "MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_FD=5 PMI_RANK=3 PMI_SIZE=4 SLURM_JOB_ID=3"
    " SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NPROCS=2 SLURM_NTASKS=4"
    " SLURM_PROCID=1 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
MPICH = variables("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1 PMI_SIZE=4")
# Open MPI 4.1; its NODE_RANK is a local rank.
OPENMPI = variables(
    "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1"
    " OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=1699610625 PMIX_RANK=3"
)
OPENMPI_IN_SLURM = {
    **OPENMPI,
    **variables("SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NODEID=0"),
}
# By the documents of Polaris; not recorded.
PALS = variables(
    "PALS_APID=6e1 PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_NODEID=1 PMI_RANK=5 PMI_SIZE=8"
    " PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4"
)
TORCHRUN = variables(
    "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=host"
    " MASTER_PORT=29500 TORCHELASTIC_RUN_ID=x"
)
# What container hooks and wrappers export, for rank 3 of 4.
EXPORTED = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=host MASTER_PORT=29500")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankInfo(5, 8, 1, 4, True, 1, "torchrun")),
        (SRUN, RankInfo(3, 4, 1, 2, True, 1, "slurm")),
        (SRUN_PMI2, RankInfo(3, 4, 1, 2, True, 1, "slurm")),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
            RankInfo(3, 4, 0, 1, True, 1, "slurm"),
        ),
        (OPENMPI, RankInfo(3, 4, 1, 2, True, 1, "openmpi")),
        (OPENMPI_IN_SLURM, RankInfo(3, 4, 1, 2, True, 1, "openmpi")),
        (MPICH, RankInfo(1, 4, 1, 2, True, 0, "mpich")),
        (MPICH_IN_SLURM, RankInfo(3, 4, 0, 1, True, 3, "mpich")),
        (PALS, RankInfo(5, 8, 1, 4, True, 1, "pals")),
        # torchrun on each node, which something else started.
        ({**SRUN, **TORCHRUN}, RankInfo(5, 8, 1, 4, True, 1, "torchrun")),
        ({**PALS, **TORCHRUN}, RankInfo(5, 8, 1, 4, True, 1, "torchrun")),
        # A container hook or a wrapper has exported some of torchrun's: the launcher counts the
        # ranks of this host.
        ({**SRUN, **EXPORTED}, RankInfo(3, 4, 1, 2, True, 1, "torchrun")),
        (
            {**SRUN, **EXPORTED, "SLURM_STEP_TASKS_PER_NODE": "1,3"},
            RankInfo(3, 4, 1, 3, True, 1, "torchrun"),
        ),
        ({**OPENMPI_IN_SLURM, **EXPORTED}, RankInfo(3, 4, 1, 2, True, 1, "torchrun")),
        # It has started other processes than these ranks, or does not count.
        (
            {**SRUN, **EXPORTED, "RANK": "7", "WORLD_SIZE": "8"},
            RankInfo(7, 8, 1, 8, True, 0, "torchrun", is_counted=False),
        ),
        (
            {**variables("SLURM_STEP_ID=1 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4"), **EXPORTED},
            RankInfo(3, 4, 1, 4, True, 0, "torchrun", is_counted=False),
        ),
        # Nobody started these as one of several.
        (BATCH_SHELL, RankInfo()),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "4294967291"}, RankInfo()),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "4294967290"}, RankInfo()),
        (variables("SLURM_JOB_ID=4 SLURM_NTASKS=4 SLURM_TASKS_PER_NODE=3,1"), RankInfo()),
        (variables("PBS_NODEFILE=/x PBS_JOBID=7 PBS_NODENUM=0 PBS_TASKNUM=1"), RankInfo()),
        (variables("LSB_DJOB_NUMPROC=4 LSB_JOBID=3 LSB_DJOB_RANKFILE=/x"), RankInfo()),
        (variables("FLUX_TASK_RANK=0 FLUX_JOB_SIZE=1"), RankInfo()),
        (variables("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1"), RankInfo()),
    ],
)
def test_the_variables_of_a_launcher_say_which_rank_a_process_is(
    environ: Variables, expected: RankInfo
) -> None:
    assert read_rank_info(environ) == expected
    if expected.launched:
        forced = {**environ, ENVIRONMENT_VARIABLE: expected.environment}
        assert read_rank_info(forced) == expected
    assert read_environment(environ, "single") == RankInfo()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**SRUN, **MPICH}, ""),  # srun that started the daemons of mpiexec
        (
            {**OPENMPI, **MPICH},
            (
                "OMPI_COMM_WORLD_RANK = 3 and OMPI_COMM_WORLD_SIZE = 4, but PMI_RANK = 1 and"
                " PMI_SIZE = 4"
            ),
        ),
        (
            {**SRUN_PMI2, "PMI_RANK": "0"},
            "SLURM_PROCID = 3 and SLURM_STEP_NUM_TASKS = 4, but PMI_RANK = 0",
        ),
        # Exported once, in a batch script.
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
            "RANK = 0 and WORLD_SIZE = 4, but SLURM_PROCID = 3",
        ),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            "RANK = 0 and WORLD_SIZE = 1, but SLURM_PROCID = 3",
        ),
        (
            {**SRUN, "SLURM_PROCID": "4"},
            "rank 4 of 4, local rank 1 of 2: ranks count from 0 to below SLURM_STEP_NUM_TASKS",
        ),
        (
            {**SRUN, "SLURM_NODEID": "2"},
            'SLURM_NODEID = 2, but SLURM_STEP_TASKS_PER_NODE = "2(x2)" has 2 nodes',
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"},
            "SLURM_STEP_TASKS_PER_NODE: expected tasks per node such as 2(x3),1",
        ),
        ({**SRUN, "SLURM_PROCID": "first"}, "SLURM_PROCID: expected a whole number"),
        (
            variables("SLURM_STEP_ID=0 SLURM_PROCID=1"),
            "srun has started this process, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
        ),
        (
            variables("OMPI_COMM_WORLD_SIZE=4"),
            "mpiexec of Open MPI has started this process, but OMPI_COMM_WORLD_RANK is not",
        ),
        (
            variables("PALS_RANKID=1 PALS_APID=7"),
            "mpiexec of Cray PALS has started this process, but PMI_SIZE is not set",
        ),
        # Launchers that are there and not understood.
        (
            variables("MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=4"),
            "mpirun of MVAPICH2 has started this process",
        ),
        (
            variables("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4"),
            "flux run has started this process, and lmforge does not know",
        ),
        (variables("ALPS_APP_PE=3"), "aprun has started this process"),
        (variables("PMIX_RANK=3"), "a PMIx launcher has started this process"),
        (variables("PMI_RANK=3 PMI_SIZE=4"), "a PMI launcher has started this process"),
        (variables("PBS_NODENUM=1 PBS_JOBID=7"), "pbsdsh or the like has started this process"),
    ],
)
def test_contradictions_and_unknown_launchers_are_named(environ: Variables, message: str) -> None:
    if not message:
        assert read_rank_info(environ).environment == "mpich"
        return
    with pytest.raises(UserError, match=r"^environment: [^\n]{0,400}$") as raised:
        read_rank_info(environ)
    assert message in str(raised.value)


def test_a_run_is_continued_with_the_launcher_that_started_it() -> None:
    for environ, expected in (
        (TORCHRUN, "torchrun … -m lmforge"),
        (SRUN, "srun … lmforge"),
        (OPENMPI, "mpiexec … lmforge"),
    ):
        assert under_launcher(read_environment(environ), "lmforge") == expected


def test_pbs_is_whichever_mpiexec_it_has_and_local_is_this_machine() -> None:
    assert read_environment(MPICH, "pbs") == read_environment(MPICH, "mpich")
    assert read_environment(OPENMPI, "pbs") == read_environment(OPENMPI, "openmpi")
    assert (
        read_environment({**SRUN, "RANK": "x"}, "single")
        == read_environment(SRUN, "local")
        == RankInfo()
    )
    assert read_environment({**SRUN, **TORCHRUN}, "local") == read_environment(TORCHRUN, "torchrun")


def test_an_environment_that_is_asked_for_and_not_there_is_refused() -> None:
    for name in ("slurm", "openmpi", "mpich", "pals", "torchrun"):
        with pytest.raises(
            UserError,
            match=f"^--environment {name}: .* not set, so .* has not started this process",
        ):
            read_rank_info({ENVIRONMENT_VARIABLE: name})
    with pytest.raises(
        UserError, match=r"^--environment pals: .* not set, so .* has not started this process"
    ):
        read_rank_info({ENVIRONMENT_VARIABLE: "pbs"})
    with pytest.raises(
        UserError,
        match=f"{ENVIRONMENT_VARIABLE}: expected one of auto, single, local, .*, got .k8s.",
    ):
        read_rank_info({ENVIRONMENT_VARIABLE: "k8s"})


def test_the_hosts_of_a_job_are_those_of_its_node_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x3006\nx3006\nx3007\nx3007\n")
    assert list_hosts({"PBS_NODEFILE": str(nodes)}) == ["x3006", "x3007"]
    assert list_hosts({"SLURM_JOB_NODELIST": "node7"}) == ["node7"]
    assert list_hosts({}) == []
    nodes.write_text("\n")
    for file, reason in ((nodes, "this file names no host"), (tmp_path / "absent", "No such file")):
        with pytest.raises(UserError, match=f"^environment: PBS_NODEFILE.*{reason}"):
            list_hosts({"PBS_NODEFILE": str(file)})


@pytest.mark.parametrize("variable", ["PBS_NODEFILE"])
def test_a_node_file_is_bounded_and_a_pipe_is_not_waited_for(variable: str, tmp_path: Path) -> None:
    pipe, endless = tmp_path / "pipe", tmp_path / "endless"
    os.mkfifo(pipe)
    with endless.open("wb") as file:
        file.truncate(2**40)
    for path, reason in (
        (pipe, "this file names no host"),
        (endless, "larger than"),
        (Path("/dev/zero"), "got a device"),
    ):
        with pytest.raises(UserError, match=f"^environment: {variable}.*{reason}"):
            list_hosts({variable: str(path)})


def test_a_list_of_slurm_hosts_is_expanded_by_slurm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError,
        match=r"scontrol is not here \(in a container\?\); set MASTER_ADDR in the batch script",
    ):
        list_hosts(SRUN)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$3-expanded"\n')
    scontrol.chmod(0o755)
    assert list_hosts(SRUN) == ["node[1-2]-expanded"]
    scontrol.write_text("#!/bin/sh\necho bad list >&2\nexit 1\n")
    with pytest.raises(
        UserError,
        match=r"scontrol show hostnames .node\[1-2\]. failed \(.bad list.\); set MASTER_ADDR",
    ):
        list_hosts(SRUN)


def test_a_scontrol_that_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(processes, "COMMAND_SECONDS", 0.2)
    with pytest.raises(
        UserError, match=r"failed \(.scontrol has not answered for 0.2 s.\); set MASTER_ADDR"
    ):
        list_hosts(SRUN)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_whose_name_is_not_text_can_be_looked_up() -> None:
    own_name = Path("/proc/self/comm")
    before = own_name.read_bytes()
    own_name.write_bytes(b"\xff) \xfe (")
    try:
        with pytest.raises(
            UserError, match="mpiexec does not say which job this is; set MASTER_ADDR"
        ):
            job_identity(read_rank_info(MPICH), {})
        stat = processes.read_process_stat(os.getpid())
    finally:
        own_name.write_bytes(before.rstrip(b"\n"))
    assert stat is not None
    assert stat.parent == os.getppid()


def test_where_rank_0_may_be() -> None:
    info = read_rank_info(MPICH)
    assert hosts_to_ask(info, {**MPICH, "MASTER_ADDR": "host7"}) == ["host7"]
    with pytest.raises(UserError, match="nothing says where rank 0 is; set MASTER_ADDR"):
        hosts_to_ask(info, MPICH)
    assert hosts_to_ask(RankInfo(1, 2, 1, 2, True, 0, "mpich"), MPICH) == ["127.0.0.1"]
    # 192.0.2.9 is no machine's address (RFC 5737).
    assert own_address(["192.0.2.9", "localhost"]) == "localhost"


def test_two_steps_of_one_job_have_ports_of_their_own() -> None:
    identities = [
        job_identity(read_rank_info(SRUN), {**SRUN, "SLURM_STEP_ID": str(step)})
        for step in range(2)
    ]
    assert identities == ["slurm-1-0", "slurm-1-1"]
    ports = [candidate_ports(identity) for identity in identities]
    assert ports[0] != ports[1]
    assert all(20_000 <= port < 32_000 for port in ports[0] + ports[1])
    with pytest.raises(
        UserError, match="sets no PALS_APID; set MASTER_ADDR, the host of rank 0, and MASTER_PORT"
    ):
        job_identity(read_rank_info(PALS), {})
    with pytest.raises(UserError, match="mpiexec does not say which job this is; set MASTER_ADDR"):
        job_identity(read_rank_info(MPICH), {})


def test_who_a_process_is_can_be_asked_without_torch() -> None:
    program = (
        "import sys\n"
        "from lmforge.core.distributed import rank_info, rendezvous\n"
        "rank_info.read_rank_info()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "False\n"
