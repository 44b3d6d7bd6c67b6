"""`lmforge launch` on two hosts, with real Slurm and real ssh: lost ranks and hosts are restarted,
and the result is the same.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from lmforge.ops.jobs.job import read_job
from tests.conftest import Command
from tests.lab.ladder.test_ladder import RECIPE, SMALL
from tests.ops.cluster.laboratory import Laboratory
from tests.ops.cluster.launching import (
    Desk,
    assert_same_result,
    job_id,
    losses,
    with_programs,
    write_executable,
)

STEPS = 60
LONG = (
    "--train.steps",
    str(STEPS),
    "--checkpoint.every_steps",
    "5",
    "--validation.every_steps",
    "none",
)
ENDLESS = ("--train.steps", "100000", "--validation.every_steps", "none")


@pytest.fixture
def cluster(laboratory: Laboratory, tmp_path: Path, tiny_options: list[str]) -> Iterator[Desk]:
    """A desk from which Slurm and both hosts are reached."""
    (tmp_path / "hosts").write_text("node1\nnode2\n")
    with Desk(tmp_path, tiny_options, **laboratory.environment) as desk:
        yield desk


@pytest.fixture
def by_ssh(laboratory: Laboratory) -> list[object]:
    return ["--on", "ssh", "--hosts", "hosts", "--directives", f"F {laboratory.ssh_config}"]


@pytest.fixture(scope="module")
def undisturbed(
    tiny_options: list[str], lmforge: Command, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """The run of LONG on two ranks, never interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = lmforge("pretrain", *tiny_options, *LONG, "--run.folder", folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return Run(folder / "run")


def requeue_now(desk: Desk, run: Run) -> None:
    """Wait until Slurm has queued the job again, and have it begin at once instead of in two
    minutes.

    Asked before all that was left of the job has ended, Slurm starts it beside that. A node then
    refuses a duplicate job id: it is drained, and the job is held. Each step that is left has a
    socket in the folder of the node's daemon.
    """
    environment = {**os.environ, **desk.variables}
    desk.wait_for_state(run, r" pending ")

    def said(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True).stdout

    def begins() -> bool:
        is_left = any(Path(environment["SLURM_CONF"]).parent.glob(f"spool-*/*_{job_id(run)}.*"))
        if not is_left and "Reason=BeginTime" in said("scontrol", "show", "job", job_id(run)):
            said("scontrol", "update", f"JobId={job_id(run)}", "StartTime=now")
        return " pending " not in desk.state(run.path.name)

    try:
        desk.wait(begins, run)
    except AssertionError as problem:
        shown = [said("scontrol", "show", "job", job_id(run)), said("sinfo", "--long", "--Node")]
        raise AssertionError("\n".join([*shown, str(problem)])) from None


# --- Slurm ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_of_slurm_trains_on_both_hosts(cluster: Desk) -> None:
    run = cluster.launch("--on", "slurm", "--nodes", "2", "--time", "00:30:00")
    assert cluster.wait_for_end(run) == 0, cluster.output(run)
    assert sorted(losses(run)) == list(range(1, 7))
    assert "2 ranks on cpu" in cluster.output(run)
    cluster.wait_for_state(run, rf"^recipe +slurm +{job_id(run)} +done +6 of 6 ")


@pytest.mark.slow
def test_the_rungs_of_a_ladder_are_jobs_that_reach_what_they_reach_here(
    cluster: Desk, tiny_tokens: Path, lmforge: Command
) -> None:
    (cluster.folder / "big.toml").write_text(RECIPE.format(tokens=tiny_tokens))
    words = ["ladder", "big.toml", *SMALL, "--launch.on", "slurm", "--ladder.parallel_runs", "2"]
    done = lmforge(*words, cwd=cluster.folder, **cluster.variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predicted  " in done.stdout
    ladder = cluster.folder / "runs" / "big-ladder"
    recipes = sorted((ladder / "recipes").glob("*.toml"))
    jobs = [read_job(ladder / recipe.stem) for recipe in recipes]
    assert [job and job.launcher for job in jobs] == ["slurm"] * 5
    here = lmforge(
        "pretrain", recipes[0], "--run.folder", cluster.folder / "here", "--launch.on", "local"
    )
    assert here.returncode == 0, here.stderr
    assert losses(Run(cluster.folder / "here" / recipes[0].stem)) == losses(
        Run(ladder / recipes[0].stem)
    )


def test_slurm_and_ssh_refuse_in_one_line_and_nothing_is_started(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object], tmp_path: Path
) -> None:
    slurm = ("launch", "recipe.toml", "--on", "slurm", "--nodes", "2")
    assert cluster.refusal(*slurm, "--partition", "nowhere").startswith(
        "sbatch refuses the job: invalid partition specified: "
    )
    too_many = cluster.refusal(*slurm, "--gpus", "8")
    assert (
        too_many
        == "sbatch refuses the job: allocation failure: Requested node configuration is not"
        " available"
    )
    (tmp_path / "some").write_text("node1\nnode9\n")
    options = by_ssh[-2:]
    unknown = cluster.refusal("launch", "recipe.toml", "--on", "ssh", "--hosts", "some", *options)
    assert re.fullmatch(
        r"node9: Could not resolve hostname node9: .* \(1 of 2 hosts\); nothing was started",
        unknown,
    )
    (tmp_path / "some").write_text(f"node1\nroot@{laboratory.addresses['node1']}\n")
    twice = cluster.refusal("launch", "recipe.toml", "--on", "ssh", "--hosts", "some", *options)
    assert twice.endswith(
        f"@{laboratory.addresses['node1']}: the same host as node1; a host is started once; nothing"
        " was started"
    )
    password = cluster.refusal("launch", "recipe.toml", *by_ssh, "o PubkeyAuthentication=no")
    assert "Permission denied" in password
    assert "it asks for a password; set up a key (ssh-copy-id node1)" in password
    write_executable(tmp_path / "python", "#!/bin/sh\necho 'No module named lmforge' >&2; exit 1\n")
    without_code = cluster.refusal(
        "launch", "recipe.toml", *by_ssh, "--python", tmp_path / "python"
    )
    expected = (
        f"node1: {tmp_path}/python does not run lmforge there (No module named lmforge); see"
        " launch.python"
    )
    assert without_code.startswith(expected)
    server = laboratory.start(
        "node1",
        "python -c 'import socket, time; s = socket.create_server((\"\", 23456)); time.sleep(60)'",
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((laboratory.addresses["node1"], 23456), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        busy = cluster.refusal("launch", "recipe.toml", *by_ssh, "--port", "23456")
        assert (
            busy
            == "launch.port = 23456: in use on node1; give another, or none; nothing was started"
        )
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_job_of_slurm_whose_port_is_taken_is_refused(
    cluster: Desk, laboratory: Laboratory
) -> None:
    """srun kills the other node and gives its status."""
    server = laboratory.start(
        "node1",
        "python -c 'import socket, time; s = socket.create_server((\"\", 23457)); time.sleep(100)'",
    )
    try:
        run = cluster.launch("--on", "slurm", "--nodes", "2", "--port", "23457")
        assert cluster.wait_for_end(run) == 2, cluster.output(run)
    finally:
        server.kill()
        server.wait()
    assert (
        "lmforge: port 23457 of node1 is in use: by another run? no other is taken, since"
        " --launch.port" in cluster.output(run)
    )
    cluster.wait_for_state(run, rf"^recipe +slurm +{job_id(run)} +refused ")


@pytest.mark.slow
def test_a_run_that_waits_in_a_queue_exists_and_is_started_nowhere_else(cluster: Desk) -> None:
    run = cluster.launch("--on", "slurm", "--directives", "begin=now+1hour")
    cluster.wait_for_state(run, r" pending +BeginTime ")
    said = f"slurm job {job_id(run)} is pending (BeginTime)"
    assert cluster.refusal("logs", "runs/recipe") == f"runs/recipe: {said}; --follow waits for them"
    assert (
        cluster.refusal("report", "runs/recipe")
        == f"runs/recipe: {said}; there is nothing to report yet"
    )
    assert said in cluster("top", "runs/recipe", "--once").stdout
    busy = (
        f"runs/recipe: job {job_id(run)} (slurm) is pending; stop it with lmforge stop recipe, or"
        " choose another --run.name"
    )
    assert cluster.refusal("launch", "recipe.toml") == busy
    assert cluster.refusal("pretrain", "recipe.toml") == busy
    assert cluster.refusal("pretrain", "recipe.toml", "--run.overwrite", "true") == busy
    assert cluster("stop", "recipe").returncode == 0
    followed = cluster("logs", "runs/recipe", "--follow").stdout
    assert re.fullmatch(
        rf"--- slurm job {job_id(run)} is interrupted \(cancelled\) ---\n", followed
    ), followed


@pytest.mark.slow
def test_a_launcher_of_slurm_that_is_killed_is_named_and_the_job_is_queued_again(
    cluster: Desk, laboratory: Laboratory, undisturbed: Run
) -> None:
    run = cluster.launch("--on", "slurm", "--nodes", "2", *LONG)
    cluster.wait_for_step(run, 12)
    # The launcher, which is no rank.
    launchers = (
        "for p in $(pgrep -f '[p]retrain'); do grep -qz '^RANK=' /proc/$p/environ || kill -KILL $p;"
        " done"
    )
    laboratory.run("node2", launchers)
    requeue_now(cluster, run)
    cluster.wait_for_state(run, r" done ")
    assert "the launcher of a node was killed by SIGKILL" in cluster.output(run)
    assert re.search(
        r"^stopped by (the loss of its launcher|SIGTERM) after step", cluster.output(run), re.M
    )
    assert_same_result(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_job_of_slurm_does_not_wait_for_a_node_that_is_lost(
    cluster: Desk, laboratory: Laboratory
) -> None:
    """Slurm itself notices after five minutes."""
    run = cluster.launch("--on", "slurm", "--nodes", "2", *LONG)
    cluster.wait_for_step(run, 12)
    with laboratory.without_network("node2"):
        expected = "lmforge: a node is lost: the job does not wait for Slurm to notice"
        cluster.wait(lambda: expected in cluster.output(run), run, 260)
    # Slurm keeps a job that was queued again among those that end until its daemon on that node
    # answers, or is given up.
    cluster.wait_for_state(run, r" pending ")
    assert "lmforge: node2: no heartbeat for 60 s" in cluster.output(run)
    assert cluster("stop", "recipe").returncode == 0


@pytest.mark.slow
def test_a_job_of_slurm_that_is_out_of_time_is_queued_again_and_its_result_is_that_of_an_undisturbed_run(
    cluster: Desk, undisturbed: Run
) -> None:
    run = cluster.launch("--on", "slurm", "--nodes", "2", "--time", "00:30:00", *LONG)
    cluster.wait_for_step(run, 12)
    # What Slurm does before the time limit (--signal=B:USR1@120).
    subprocess.run(
        ["scancel", "--signal=USR1", "--batch", job_id(run)],
        env={**os.environ, **cluster.variables},
        check=True,
    )
    requeue_now(cluster, run)
    cluster.wait_for_state(run, r" done ")
    saved = re.search(
        r"^stopped by SIG\w+ after step (\d+), which is saved", cluster.output(run), re.M
    )
    assert saved, cluster.output(run)
    assert "SIGUSR1 came before the time limit of 00:30:00: job" in cluster.output(run)
    assert 12 <= int(saved[1]) < STEPS
    assert f"continuing runs/recipe from step {saved[1]}" in cluster.output(run)
    assert_same_result(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_time_limit_of_a_minute_is_a_pause(cluster: Desk) -> None:
    run = cluster.launch(
        "--on", "slurm", "--nodes", "1", "--time", "1", "--signal_seconds", "20", *ENDLESS
    )
    cluster.wait(lambda: "which is saved" in cluster.output(run), run, 200)
    cluster.wait_for_state(run, r" pending ")
    assert cluster("stop", "recipe").returncode == 0
    cluster.wait_for_state(run, r" interrupted ")


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("node", ["node2", "node1"])
def test_a_node_that_is_set_down_is_waited_for_and_the_result_is_that_of_an_undisturbed_run(
    node: str, cluster: Desk, undisturbed: Run
) -> None:
    """On node1 are the job's script, rank 0 and the stores at which nodes and ranks meet."""
    run = cluster.launch("--on", "slurm", "--nodes", "2", *LONG)
    cluster.wait_for_step(run, 12)
    environment = {**os.environ, **cluster.variables}
    update = ["scontrol", "update", f"NodeName={node}"]
    subprocess.run([*update, "State=DOWN", "Reason=test"], env=environment, check=True)
    try:
        cluster.wait_for_state(run, r" pending ")
    finally:
        # It comes back by itself as soon as its daemon says that it is well; Slurm then refuses
        # this.
        subprocess.run([*update, "State=RESUME"], env=environment, capture_output=True)
    # Slurm begins it after two minutes. Asked to begin it at once, it can find a node that still
    # knows the first start.
    cluster.wait(lambda: " done " in cluster.state("recipe"), run, 400)
    assert re.search(r"^continuing runs/recipe from step \d+", cluster.output(run), re.M)
    assert_same_result(run, undisturbed)


# --- ssh ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_are_started_and_stopped_together_by_ssh(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object]
) -> None:
    run = cluster.launch(*by_ssh, *ENDLESS)
    cluster.wait_for_step(run, 2)
    cluster.wait_for_state(run, r"^recipe +ssh +running +2 of 2 hosts ")
    assert cluster("stop", "recipe").returncode == 0
    assert cluster.wait_for_end(run) == 128 + signal.SIGTERM, cluster.output(run)
    last = run.checkpoint_steps()[-1]
    assert f"stopped by SIGTERM after step {last}, which is saved" in cluster.output(run)
    cluster.wait_for_state(run, r"^recipe +ssh +interrupted ")
    for host in laboratory.hosts:
        assert str(run.path) not in laboratory.run(host, "cat /proc/[0-9]*/cmdline").stdout


@pytest.mark.slow
def test_variables_reach_the_ranks_by_ssh_and_are_in_no_file(
    cluster: Desk, by_ssh: list[object]
) -> None:
    cluster.variables["HF_HOME"] = "/secret/home"
    run = cluster.launch(*by_ssh, "--setup", 'echo "home: $HF_HOME"')
    assert cluster.wait_for_end(run) == 0, cluster.output(run)
    assert cluster.output(run).count("home: /secret/home") == 2
    for name in ("job.sh", "node.sh", "job.json", "recipe.toml"):
        assert "/secret/home" not in (run.path / "launch" / name).read_text()


def train_to_step_12(cluster: Desk, by_ssh: list[object]) -> Run:
    """The run of LONG, under way on both hosts."""
    run = cluster.launch(*by_ssh, *LONG)
    cluster.wait_for_step(run, 12)
    return run


def assert_continues(cluster: Desk, by_ssh: list[object], run: Run, undisturbed: Run) -> None:
    """Launched once more, a run of LONG ends as if nothing had disturbed it."""
    cluster.launch(*by_ssh, *LONG)
    assert cluster.wait_for_end(run, 200) == 0, cluster.output(run)
    assert_same_result(run, undisturbed)


@pytest.mark.slow
def test_ranks_are_started_again_on_both_hosts_when_one_was_killed(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object], undisturbed: Run
) -> None:
    run = train_to_step_12(cluster, by_ssh)
    # The rank, not its launcher.
    laboratory.run(
        "node2",
        "for p in /proc/[0-9]*; do grep -qz '^RANK=' $p/environ 2>/dev/null && kill -KILL"
        " ${p#/proc/}; done",
    )
    assert cluster.wait_for_end(run) == 0, cluster.output(run)
    assert "lmforge: rank 1 on node2 was killed by SIGKILL" in cluster.output(run)
    assert "lmforge: all ranks are started again (1 of 3)" in cluster.output(run)
    assert_same_result(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_host_that_is_cut_off_is_named_and_the_others_do_not_hang(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object], undisturbed: Run
) -> None:
    run = train_to_step_12(cluster, by_ssh)
    with laboratory.without_network("node2"):
        assert cluster.wait_for_end(run, 300) == 75, cluster.output(run)
        assert "lmforge: node2: no heartbeat for 60 s; the ranks of node1 end" in cluster.output(
            run
        )
        # The host without a network ends its ranks too, and does not wait for the cable.
        cluster.wait(
            lambda: laboratory.run("node2", "pgrep -f '[p]retrain'").returncode != 0, run, 200
        )
    cluster.wait_for_state(run, r"^recipe +ssh +failed ")
    assert_continues(cluster, by_ssh, run, undisturbed)


@pytest.mark.slow
def test_a_network_that_is_back_within_a_minute_is_waited_for(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object], undisturbed: Run
) -> None:
    run = train_to_step_12(cluster, by_ssh)
    with laboratory.without_network("node2"):
        time.sleep(20)  # no longer than what is cut: the claim is about a length of time
        before = len(losses(run))
        time.sleep(2)
        assert len(losses(run)) == before < STEPS, "the run did not wait"
    assert cluster.wait_for_end(run, 200) == 0, cluster.output(run)
    assert "all ranks are started again" not in cluster.output(run)
    assert_same_result(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_host_where_all_meet_is_cut_off_and_the_others_say_so_and_end(
    cluster: Desk, laboratory: Laboratory, by_ssh: list[object], undisturbed: Run
) -> None:
    run = train_to_step_12(cluster, by_ssh)
    log = run.path / "launch" / "output-node2.log"
    with laboratory.without_network("node1"):
        expected = (
            "lmforge: node1 does not answer: lost, or its launcher has ended; the ranks of"
            " node2 end"
        )
        cluster.wait(lambda: expected in log.read_text(), run, 200)
        cluster.wait(
            lambda: str(run.path) not in laboratory.run("node2", "cat /proc/[0-9]*/cmdline").stdout,
            run,
            100,
        )
    assert log.read_text().count("lmforge: node1 does not answer") == 1
    assert cluster.wait_for_end(run, 200) == 75, cluster.output(run)
    cluster.wait(lambda: " failed " in cluster.state("recipe"), run, 100)
    assert_continues(cluster, by_ssh, run, undisturbed)


@pytest.mark.slow
def test_a_host_that_does_not_come_is_named(
    laboratory: Laboratory, tiny_options: list[str], tmp_path: Path
) -> None:
    nodes = {"LMFORGE_NODES": "node1,node2", "LMFORGE_ADDRESS": "node1:23457"}
    words = ["python", "-m", "lmforge", "pretrain", *tiny_options, "--run.folder", str(tmp_path)]
    with open(tmp_path / "said", "w") as said:
        process = laboratory.start("node1", words, stdout=said, **nodes)
    deadline = time.monotonic() + 90
    while not (text := (tmp_path / "said").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.kill()
    process.wait()
    assert text.startswith(
        "lmforge: waiting for node2: not started, or cannot reach node1:23457 (3"
    )


# --- mpiexec on two hosts -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.needs("MPICH")
def test_mpiexec_starts_ranks_on_the_hosts_of_a_file(
    laboratory: Laboratory, cluster: Desk, by_ssh: list[object], tmp_path: Path
) -> None:
    """From node1, where a user of such a cluster types it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    write_executable(programs / "remote", f'#!/bin/sh\nexec ssh -F {laboratory.ssh_config} "$@"\n')
    options = f"-launcher ssh -launcher-exec {programs}/remote"
    write_executable(programs / "mpiexec", f'#!/bin/sh\nexec mpiexec.mpich {options} "$@"\n')
    words = [
        sys.executable,
        "-m",
        "lmforge",
        "launch",
        "recipe.toml",
        "--on",
        "mpi",
        "--hosts",
        "hosts",
        "--nodes",
        "2",
    ]
    done = laboratory.run(
        "node1", f"cd {tmp_path} && {' '.join(words)}", PATH=with_programs(programs)
    )
    assert done.returncode == 0, done.stderr
    run = cluster.run("recipe")
    assert cluster.wait_for_end(run) == 0, cluster.output(run)
    assert sorted(losses(run)) == list(range(1, 7))
