"""The same run, with the same result, under every launcher: srun, both kinds of mpiexec, and
torchrun on each node.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.distributed.rendezvous import free_port
from tests.conftest import ROOT, Command
from tests.ops.cluster.laboratory import Laboratory

LMFORGE = [sys.executable, "-m", "lmforge"]
MPIEXEC = {
    "openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
    "mpich": ["mpiexec.mpich"],
}
EVERY_LINE = ("loss", "grad_norm", "val/loss")


def losses(run: Path) -> list[dict[str, float]]:
    """What each step computed, without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in EVERY_LINE if name in line} for line in lines]


@pytest.fixture(scope="module")
def reference(
    tiny_options: list[str], lmforge: Command, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    """What two ranks compute that have torchrun's variables."""
    folder = tmp_path_factory.mktemp("reference")
    done = lmforge("pretrain", *tiny_options, "--run.folder", folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


def pretrain(
    launcher: list[object], options: list[str], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Train the tiny run under a launcher on this machine."""
    return subprocess.run(
        [str(word) for word in [*launcher, *LMFORGE, "pretrain", *options, "--run.folder", folder]],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


def assert_trained(
    done: subprocess.CompletedProcess[str], folder: Path, reference: list[dict[str, float]]
) -> None:
    """The run ended well on all ranks, with these losses."""
    assert done.returncode == 0, done.stderr
    assert "report: " in done.stdout  # a launcher may kill the others when one rank has ended
    assert losses(folder / "run") == reference


@pytest.mark.slow
def test_hosts_that_differ_are_named(
    laboratory: Laboratory, tiny_options: list[str], tmp_path: Path
) -> None:
    """In code, in a line; in data, which one of them does not have."""
    other = tmp_path / "other"
    other.write_text((ROOT / "lmforge" / "core" / "errors.py").read_text() + "# another commit\n")
    tokens = tiny_options[tiny_options.index("--data.folder") + 1]
    mounted = {
        f"mount --bind {other}": ROOT / "lmforge" / "core" / "errors.py",
        "mount -t tmpfs none": Path(tokens),
    }
    for mount, where in mounted.items():
        assert laboratory.run("node2", f"{mount} {where}").returncode == 0
        try:
            done = pretrain(
                ["srun", "-N2", "-n2"],
                tiny_options,
                tmp_path / where.name,
                **laboratory.environment,
            )
        finally:
            laboratory.run("node2", f"umount {where}")
        if where.name == "errors.py":
            assert done.returncode == 0, done.stderr
            line = (
                r"^the code of lmforge differs: node1 has \w{8}, node2 has \w{8}; install the same"
                r" on all hosts$"
            )
            assert re.search(line, done.stdout, re.M), done.stdout
        else:
            assert "lmforge: node2: " in done.stderr
            assert tokens in done.stderr


@pytest.mark.parametrize("hosts", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_tasks_of_srun_train_together(
    laboratory: Laboratory,
    hosts: int,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    done = pretrain(["srun", f"-N{hosts}", "-n2"], tiny_options, tmp_path, **laboratory.environment)
    assert_trained(done, tmp_path, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("openmpi", marks=pytest.mark.needs("Open MPI")),
        pytest.param("mpich", marks=pytest.mark.needs("MPICH")),
    ],
)
def test_ranks_of_mpiexec_train_together(
    name: str, tiny_options: list[str], reference: list[dict[str, float]], tmp_path: Path
) -> None:
    done = pretrain([*MPIEXEC[name], "-n", "2"], tiny_options, tmp_path)
    assert_trained(done, tmp_path, reference)


@pytest.mark.slow
def test_ranks_that_lmforge_starts_train_together_where_the_process_itself_is_to_be_alone(
    tiny_options: list[str], reference: list[dict[str, float]], tmp_path: Path
) -> None:
    """Without `single` the variable of an unknown launcher is refused; with it, ranks may still be
    started.
    """
    words = [*tiny_options, "--launch.environment", "single", "--launch.processes", "2"]
    done = pretrain([], words, tmp_path, PMIX_RANK="3")
    assert_trained(done, tmp_path, reference)


@pytest.mark.slow
def test_tasks_of_srun_with_pmi2_train_together(
    laboratory: Laboratory,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    done = pretrain(
        ["srun", "--mpi=pmi2", "-N2", "-n2"], tiny_options, tmp_path, **laboratory.environment
    )
    assert_trained(done, tmp_path, reference)


@pytest.mark.slow
def test_torchrun_on_each_node_that_srun_starts(
    laboratory: Laboratory,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
    ]
    endpoint = [
        "--rdzv-id=job",
        f"--rdzv-endpoint={laboratory.addresses['node1']}:29400",
        "-m",
        "lmforge",
    ]
    command = [
        "srun",
        "-N2",
        "-n2",
        *torchrun,
        *endpoint,
        "pretrain",
        *tiny_options,
        "--run.folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **laboratory.environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert_trained(done, tmp_path, reference)


def write_ssh(laboratory: Laboratory, folder: Path) -> Path:
    """A program that is `ssh` and knows the hosts."""
    ssh = folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec ssh -F {laboratory.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    return ssh


def openmpi_by_ssh(laboratory: Laboratory, ssh: Path) -> str:
    """Options of Open MPI's mpiexec on the login host."""
    network = laboratory.addresses["login"].rsplit(".", 1)[0] + ".0/24"
    return f"--mca plm_rsh_agent {ssh} --mca oob_tcp_if_include {network}"


# What a rank knows of its host, the sizes of its mesh, and whether its host is the one that fills a
# folder that both share.
PLACE = """
import os, sys
from pathlib import Path
import torch
from lmforge.core.distributed.distributed import init_distributed
from lmforge.core.options.sections import ParallelOptions
from lmforge.core.parallel.dims import parallel_dims
with init_distributed("cpu") as dist_ctx:
    info = dist_ctx.rank_info
    hybrid = ParallelOptions(sharding="hybrid-full-shard")
    even = info.world_size == 4
    shape = parallel_dims(hybrid, 4, info.local_world_size).build_mesh("cpu").shape if even else ""
    dist_ctx.run_once_per_folder(lambda: Path(sys.argv[1], f"filled-by-{info.rank}").touch(), Path(sys.argv[1]))
    print("place", info.rank, info.local_world_size, torch.get_num_threads(), *shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "on_second"),
    [
        ("slurm", 2),
        pytest.param("openmpi", 2, marks=pytest.mark.needs("Open MPI")),
        ("neither", 2),
        ("neither", 1),
    ],
)
def test_ranks_with_some_of_torchruns_variables_know_how_many_are_on_their_host(
    launcher: str, on_second: int, laboratory: Laboratory, tmp_path: Path
) -> None:
    """Two on the first host, with variables as a container hook or a wrapper exports them."""
    address, count = laboratory.addresses["node1"], 2 + on_second
    fixed = (
        f"export WORLD_SIZE={count} MASTER_ADDR={address} MASTER_PORT={free_port()}"
        f" PYTHONPATH={ROOT}"
    )
    python = shlex.join([sys.executable, "-c", PLACE, str(tmp_path)])

    def rank(number: str, local_rank: str) -> list[str]:
        return ["bash", "-c", f"{fixed} RANK={number} LOCAL_RANK={local_rank}; exec {python}"]

    if launcher == "neither":
        hosts = [laboratory.hosts[number // 2] for number in range(count)]
        ranks = [rank(f"{number}", f"{number % 2}") for number in range(count)]
        processes = [
            laboratory.start(*each, stdout=subprocess.PIPE)
            for each in zip(hosts, ranks, strict=True)
        ]
        output = "".join(process.communicate(timeout=120)[0] for process in processes)
    elif launcher == "slurm":
        output = laboratory.run(
            "login",
            ["srun", "-N2", "--ntasks-per-node=2", *rank("$SLURM_PROCID", "$SLURM_LOCALID")],
        ).stdout
    else:
        (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
        by_ssh = openmpi_by_ssh(laboratory, write_ssh(laboratory, tmp_path)).split()
        words = [*MPIEXEC["openmpi"], *by_ssh, "--hostfile", str(tmp_path / "hosts"), "-n", "4"]
        done = laboratory.run(
            "login", [*words, *rank("$OMPI_COMM_WORLD_RANK", "$OMPI_COMM_WORLD_LOCAL_RANK")]
        )
        output = done.stdout
    on_host = [2, 2, *[on_second] * on_second]
    mesh = " 2 2" if count == 4 else ""
    expected = [
        f"{number} {each} {threads_per_rank(each)}{mesh}" for number, each in enumerate(on_host)
    ]
    assert sorted(re.findall(r"^place (.+)$", output, re.M)) == expected, output
    assert [path.name for path in tmp_path.glob("filled-by-*")] == ["filled-by-0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("openmpi", marks=pytest.mark.needs("Open MPI")),
        pytest.param("mpich", marks=pytest.mark.needs("MPICH")),
    ],
)
def test_ranks_of_mpiexec_on_two_hosts_meet_where_the_variable_or_a_node_file_says(
    name: str,
    laboratory: Laboratory,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    """mpiexec starts them over ssh.

    With MPICH it is a file as PBS writes it, an emulation: there is no PBS here.
    """
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    ssh = write_ssh(laboratory, tmp_path)
    hosts, login = tmp_path / "hosts", laboratory.addresses["login"]
    ways = {
        "openmpi": (
            f"{openmpi_by_ssh(laboratory, ssh)} --map-by node --hostfile {hosts}"
            " -x MASTER_ADDR=node1 -x PYTHONPATH -n 2"
        ),
        "mpich": f"-launcher ssh -launcher-exec {ssh} -localhost {login} -f {hosts} -n 2 -ppn 1",
    }
    command = [
        *MPIEXEC[name],
        *ways[name].split(),
        *LMFORGE,
        "pretrain",
        *tiny_options,
        "--run.folder",
        tmp_path,
    ]
    variables = {"PBS_NODEFILE": str(tmp_path / "hosts")} if name == "mpich" else {}
    done = laboratory.run("login", command, timeout=200, **variables)
    assert_trained(done, tmp_path, reference)


@pytest.mark.slow
def test_a_batch_script_is_alone_and_its_srun_is_not(
    laboratory: Laboratory,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    """Although the script, too, has SLURM_PROCID = 0 and SLURM_NTASKS = 2."""
    program = (
        "from lmforge.core.distributed.rank_info import read_rank_info; print(read_rank_info())"
    )
    train = " ".join([*LMFORGE, "pretrain", *tiny_options, "--run.folder", str(tmp_path)])
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n{sys.executable} -c '{program}'\nenv | grep -E"
        f" '^SLURM_(PROCID|NTASKS)='\nsrun {train}\n"
    )
    command = ["sbatch", "--wait", "-N2", "-n2", "-o", str(tmp_path / "out"), str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, **laboratory.environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "out").read_text()
    first, *others = (tmp_path / "out").read_text().splitlines()
    assert first.startswith("RankInfo(rank=0, world_size=1, "), first
    assert sorted(others[:2]) == ["SLURM_NTASKS=2", "SLURM_PROCID=0"]
    assert losses(tmp_path / "run") == reference


@pytest.mark.slow
def test_a_job_script_trains_one_stage_after_another_on_all_nodes_and_again_only_what_is_not_finished(
    laboratory: Laboratory,
    tiny_options: list[str],
    reference: list[dict[str, float]],
    tmp_path: Path,
) -> None:
    """As docs/clusters.md shows it."""
    words = [*LMFORGE, "pretrain", "--run.folder", str(tmp_path)]
    pairs = zip(tiny_options[::2], tiny_options[1::2], strict=True)
    again = [word for pair in pairs if not pair[0].startswith("--model.") for word in pair]
    second = [*words, *again, "--run.name", "second", "--model.source", str(tmp_path / "run")]
    evaluate = [
        *LMFORGE,
        "evaluate",
        str(tmp_path / "second"),
        "--sequences",
        "2",
        "--device",
        "cpu",
    ]
    script, out = tmp_path / "job.sh", tmp_path / "out"
    lines = [
        f"srun {shlex.join([*words, *tiny_options])}",
        f"srun {shlex.join(second)}",
        shlex.join(evaluate),
    ]
    script.write_text("\n".join(["#!/bin/bash", "set -e", *lines]) + "\n")
    environment = {**os.environ, **laboratory.environment}
    command = ["sbatch", "--wait", "-N2", "-n2", "-o", str(out), str(script)]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr + out.read_text()
        assert "bits per byte" in out.read_text()
        assert losses(tmp_path / "run") == reference
        assert len(losses(tmp_path / "second")) == 6


@pytest.mark.slow
@pytest.mark.needs("MPICH")
def test_two_jobs_at_once_on_one_machine_do_not_meet(
    tiny_options: list[str], reference: list[dict[str, float]], tmp_path: Path
) -> None:
    processes = []
    for number in range(2):
        command = [
            *MPIEXEC["mpich"],
            "-n",
            "2",
            *LMFORGE,
            "pretrain",
            *tiny_options,
            "--run.folder",
            str(tmp_path),
        ]
        processes.append(subprocess.Popen([*command, "--run.name", f"run{number}"]))
    assert [process.wait(timeout=200) for process in processes] == [0, 0]
    assert losses(tmp_path / "run0") == losses(tmp_path / "run1") == reference


@pytest.mark.slow
def test_tasks_of_srun_share_a_preparation(
    laboratory: Laboratory, tiny_tokens: Path, tmp_path: Path
) -> None:
    """Token for token what one process writes."""
    prepare = [
        *LMFORGE,
        "prepare",
        tiny_tokens.parent / "text",
        tmp_path / "tokens",
        "--vocab_size",
        512,
        "--validation_ratio",
    ]
    command = ["srun", "-N2", "-n2", *prepare, 0.1, "--workers", 1]
    environment = {**os.environ, **laboratory.environment}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    names = [file.name for file in sorted(tiny_tokens.iterdir()) if file.suffix == ".tokens"]
    assert names
    for name in names:
        assert (tmp_path / "tokens" / name).read_bytes() == (tiny_tokens / name).read_bytes()


def test_a_launcher_that_is_not_understood_is_refused_by_one_line(
    lmforge: Command, tiny_options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    done = lmforge(
        "pretrain", *tiny_options, "--run.folder", folder, FLUX_TASK_RANK="1", FLUX_JOB_SIZE="4"
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("lmforge: environment: FLUX_TASK_RANK = ")
    assert not folder.exists()
