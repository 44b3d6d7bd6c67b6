"""`lmforge launch`, `jobs` and `stop` without a cluster: this machine, mpiexec, a stand-in of PBS,
scripts, and refusals.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmforge.core.distributed import launch, processes
from lmforge.core.errors import UserError
from lmforge.core.options.operation import LaunchOptions, parse_time_limit
from lmforge.core.records.runs import Run
from lmforge.ops.jobs import scripts
from lmforge.ops.jobs.job import JobPlan, read_job
from lmforge.ops.jobs.launchers import check_no_job
from lmforge.ops.options.running import RunsOptions
from lmforge.ops.verbs.running import jobs
from lmforge.ops.verbs.running.list_runs import list_runs
from tests.conftest import Command, Refusal
from tests.ops.cluster.launching import (
    Desk,
    assert_same_result,
    losses,
    with_programs,
    write_executable,
)
from tests.support.grids import parametrize

STANDIN = Path(__file__).with_name("pbs_standin.py")
MANY = ("--train.steps", "100000", "--validation.every_steps", "none")
SCRIPT = re.compile(r"^# ── (\S+)\n(.*?)(?=^# ── |\Z)", re.M | re.S)


@pytest.fixture
def desk(tmp_path: Path, tiny_options: list[str]) -> Iterator[Desk]:
    with Desk(tmp_path, tiny_options) as opened:
        yield opened


@pytest.fixture
def recipe(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in the working folder of the tests, for commands that start nothing."""
    monkeypatch.chdir(desk.folder)
    return desk.recipe


def mpiexec_of(kind: str, folder: Path) -> Path:
    """A folder with an mpiexec of one kind, as a cluster has it."""
    folder.mkdir()
    options = (
        "--allow-run-as-root --oversubscribe" if kind == "openmpi" and os.getuid() == 0 else ""
    )
    write_executable(folder / "mpiexec", f'#!/bin/sh\nexec mpiexec.{kind} {options} "$@"\n')
    return folder


# --- runs on this machine -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_on_this_machine_is_found_stopped_and_continued_by_its_name(desk: Desk) -> None:
    run = desk.launch("--on", "local", *MANY)
    desk.wait_for_step(run, 2)
    running = (
        r"^recipe +local +running +\d+ of 100000 +[0-9.ms ]+ ago +runs/recipe/launch/output.log$"
    )
    desk.wait_for_state(run, running)
    busy = (
        "runs/recipe: its job (local) is running; stop it with lmforge stop recipe, or choose"
        " another --run.name"
    )
    assert desk.refusal("launch", "recipe.toml") == busy
    stopped = desk("stop", "recipe")
    assert (stopped.returncode, stopped.stdout) == (
        0,
        "recipe: asked to save a checkpoint and end\n",
    ), stopped.stderr
    assert desk.wait_for_end(run) == 128 + 15
    desk.wait_for_state(run, " interrupted ")
    last = run.checkpoint_steps()[-1]
    saved = f"stopped by SIGTERM after step {last}, which is saved"
    again = re.search(
        rf"^{saved}; to continue: \S*lmforge launch pretrain (\S+)$", desk.output(run), re.M
    )
    assert again, desk.output(run)
    assert saved in desk.state("recipe")
    assert desk("launch", "pretrain", again[1], "--train.steps", str(last + 1)).returncode == 0
    assert desk.wait_for_end(run) == 0
    assert f"continuing runs/recipe from step {last}" in desk.output(run)
    desk.wait_for_state(run, " done ")
    assert (run.path / "launch" / "previous" / "job.json").exists()


def test_a_run_that_was_refused_exists_and_every_command_says_why(desk: Desk) -> None:
    run = desk.launch("--on", "local", "--data.folder", "nowhere")
    assert desk.wait_for_end(run) == 2, desk.output(run)
    reason = desk.output(run).rpartition("lmforge: ")[2].strip()
    assert "nowhere" in reason
    assert re.match(
        rf"recipe +local +refused +{re.escape(reason)} +[0-9.ms ]+ ago", desk.state("recipe")
    )
    said = f"local job is refused ({reason})"
    assert desk.refusal("logs", "runs/recipe") == f"runs/recipe: {said}; --follow waits for them"
    assert desk("logs", "runs/recipe", "--follow").stdout == f"--- {said} ---\n"
    assert (
        desk.refusal("report", "runs/recipe")
        == f"runs/recipe: {said}; there is nothing to report yet"
    )
    top = desk("top", "runs/recipe", "--once")
    assert top.returncode == 0
    assert "not started" in top.stdout
    assert "local job is refused" in top.stdout


def test_a_host_that_is_down_is_asked_once_for_a_bounded_time_and_only_for_runs_that_have_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lmforge.cli import run
    from lmforge.ops.verbs.running import jobs

    write_executable(tmp_path / "ssh", f"#!/bin/sh\necho $* >>{tmp_path}/asked\nexec sleep 60\n")
    monkeypatch.setenv("PATH", with_programs(tmp_path))
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    down = {"host": "node7", "process": 5, "started": "1"}
    for number in range(6):
        record = job_record(tmp_path, name=f"run-{number}", launcher="ssh", sessions=[down])
        if number > 1:
            record.with_name("status").write_text("0")
    began = time.monotonic()
    assert run(["runs"]) == 0
    assert time.monotonic() - began < 5
    printed = capfd.readouterr().out
    assert (
        len(re.findall(r"^run-[01] +ssh +lost +no answer within 1 s from node7 ", printed, re.M))
        == 2
    ), printed
    assert len(re.findall(r"^run-[2-5] +ssh +done ", printed, re.M)) == 4, printed
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_code_of_a_launched_run_can_be_restored(desk: Desk, tmp_path: Path) -> None:
    def git(*words: object, cwd: Path = tmp_path) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *who, *map(str, words)], cwd=cwd, check=True, capture_output=True, text=True
        ).stdout

    (tmp_path / "reward.py").write_text("def reward(): return 1\n")
    (tmp_path / ".gitignore").write_text("runs\nsaid\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "reward.py").write_text("def reward(): return 2\n")
    (tmp_path / "new.py").write_text("added = True\n")
    (tmp_path / "big.bin").write_bytes(bytes(2**20 + 1))
    run = desk.launch("--on", "local", "--train.steps", "2", "--optimizer.lr", "0.5")
    assert desk.wait_for_end(run) == 0
    code = json.loads((run.path / "launch" / "code.json").read_text())
    assert code["commit"] == git("rev-parse", "HEAD").strip()
    assert code["new_files_left_out"] == [str(tmp_path / "big.bin")]
    restored = tmp_path / "said" / "restored"
    git("clone", "-q", tmp_path, restored)
    git("apply", run.path / "launch" / "code.diff", cwd=restored)
    assert (restored / "reward.py").read_text() == "def reward(): return 2\n"
    assert (restored / "new.py").read_text() == "added = True\n"
    # The run has read the frozen recipe, with what was typed.
    assert run.load_config().optimizer.lr == 0.5
    assert "lr = 0.5" in (run.path / "launch" / "recipe.toml").read_text()


# --- mpiexec and PBS ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("openmpi", marks=[pytest.mark.needs("Open MPI"), pytest.mark.slow]),
        pytest.param("mpich", marks=pytest.mark.needs("MPICH")),
    ],
)
def test_mpiexec_starts_every_rank(tmp_path: Path, tiny_options: list[str], kind: str) -> None:
    with Desk(
        tmp_path, tiny_options, PATH=with_programs(mpiexec_of(kind, tmp_path / "bin"))
    ) as desk:
        run = desk.launch("--on", "mpi", "--processes", "2")
        assert desk.wait_for_end(run) == 0, desk.output(run)
    assert "2 ranks on cpu" in desk.output(run)
    assert sorted(losses(run)) == list(range(1, 7))
    assert "\x1b" not in desk.output(run)


# In the place of Python: the import check; and a rank that ends as $ENDS says, by number of start
# and rank.
ENDING_RANK = """#!/bin/bash
[ "$1" = -c ] && exit
number=$(grep -c "started again" runs/recipe/launch/output.log)
for word in $ENDS; do
    [ ${word%=*} = $number-$PMI_RANK ] || continue
    case ${word#*=} in SIG*) kill -${word#*=} $$ ;; *) exit ${word#*=} ;; esac
done
case $ENDS in $number-*|*" $number-"*) sleep 3 ;; esac
"""


@pytest.mark.needs("MPICH")
@parametrize(
    ("ends", "starts", "state"),
    [
        ("0-1=SIGKILL 1-0=75", 3, "done"),
        ("0-0=SIGSEGV 1-0=SIGKILL 2-1=75 3-0=SIGKILL", 4, "failed"),
        ("0-1=1", 1, "failed"),
        ("0-0=2", 1, "refused"),
    ],
    fast=(3,),
)
def test_mpiexec_is_started_again_as_often_as_asked_where_a_rank_was_lost_and_not_where_it_has_failed(
    tmp_path: Path, tiny_options: list[str], ends: str, starts: int, state: str
) -> None:
    write_executable(tmp_path / "python", ENDING_RANK)
    variables = {"PATH": with_programs(mpiexec_of("mpich", tmp_path / "bin")), "ENDS": ends}
    with Desk(tmp_path, tiny_options, **variables) as desk:
        run = desk.launch("--on", "mpi", "--processes", "2", "--python", tmp_path / "python")
        desk.wait_for_end(run)
        desk.wait_for_state(run, f" {state} ")
    again = [f"lmforge: all ranks are started again ({number} of 3)" for number in range(1, starts)]
    assert [line for line in desk.output(run).splitlines() if "started again" in line] == again
    for number, rank, name in re.findall(r"(\d)-(\d)=(SIG\w+)", ends):
        assert int(number) < starts
        assert f"lmforge: rank {rank} on {os.uname().nodename} was killed by {name}" in desk.output(
            run
        )


def kill_rank(folder: Path, rank: int) -> None:
    """Kill one rank that mpiexec has started below a folder: the process of lmforge, not the script
    around it.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            variables = (process / "environ").read_bytes().split(b"\0")
            here = (process / "cwd").resolve() == folder
        except OSError:
            continue
        numbers = {f"{name}={rank}".encode() for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")}
        if here and b"pretrain" in words and numbers & set(variables):
            os.kill(int(process.name), 9)
            return
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("openmpi", marks=pytest.mark.needs("Open MPI")),
        pytest.param("mpich", marks=pytest.mark.needs("MPICH")),
    ],
)
def test_a_run_of_mpiexec_resumes_after_a_rank_was_killed_and_stops_when_asked(
    tmp_path: Path, tiny_options: list[str], lmforge: Command, kind: str
) -> None:
    words = (
        "--checkpoint.every_steps",
        "5",
        "--validation.every_steps",
        "none",
        "--train.steps",
        "60",
    )
    with Desk(
        tmp_path, tiny_options, PATH=with_programs(mpiexec_of(kind, tmp_path / "bin"))
    ) as desk:
        run = desk.launch("--on", "mpi", "--processes", "2", *words)
        desk.wait_for_step(run, 12)
        kill_rank(tmp_path, 1)
        assert desk.wait_for_end(run) == 0, desk.output(run)
        assert "lmforge: all ranks are started again (1 of 3)" in desk.output(run)
        assert re.search(r"^continuing runs/recipe from step \d+", desk.output(run), re.M)
        desk.launch("--on", "mpi", "--processes", "2", *words[:-2], *MANY[:2], "--run.name", "long")
        long = desk.run("long")
        desk.wait_for_step(long, 2)
        assert desk("stop", "long").returncode == 0
        assert desk.wait_for_end(long) > 128, desk.output(long)
        desk.wait_for_state(long, " interrupted ")
        assert "which is saved" in desk.output(long)
        assert "started again" not in desk.output(long)
        done = lmforge(
            "pretrain", "recipe.toml", *words, "--run.name", "undisturbed", cwd=tmp_path, ranks=2
        )
        assert done.returncode == 0, done.stderr
        assert_same_result(run, desk.run("undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("openmpi", marks=pytest.mark.needs("Open MPI")),
        pytest.param("mpich", marks=pytest.mark.needs("MPICH")),
    ],
)
def test_plain_mpiexec_ends_with_a_lost_rank_and_the_same_command_continues(
    tmp_path: Path, tiny_options: list[str], kind: str
) -> None:
    words = [
        "pretrain",
        *tiny_options,
        "--train.steps",
        "400",
        "--checkpoint.every_steps",
        "5",
        "--validation.every_steps",
        "none",
    ]
    programs = mpiexec_of(kind, tmp_path / "bin")
    line = [programs / "mpiexec", "-n", "2", sys.executable, "-m", "lmforge", *words]
    run = Run(tmp_path / "runs" / "run")
    with subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while max(losses(run), default=0) < 12:
            assert process.poll() is None
            time.sleep(0.05)
        kill_rank(tmp_path, 1)
        assert process.wait(100) != 0
    saved = run.checkpoint_steps()[-1]
    done = subprocess.run(
        [*line, "--train.steps", "420"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert f"continuing runs/run from step {saved}" in done.stdout


@pytest.fixture
def pbs(tmp_path: Path, tiny_options: list[str]) -> Iterator[Desk]:
    """A desk on the login node of a cluster with the stand-in of PBS and MPICH."""
    programs = mpiexec_of("mpich", tmp_path / "bin")
    for name in ("qsub", "qstat", "qsig", "qdel"):
        write_executable(
            programs / name, f'#!/bin/sh\nexec {sys.executable} {STANDIN} {name} "$@"\n'
        )
    (tmp_path / "pbs").mkdir()
    variables = {
        "STANDIN_FOLDER": str(tmp_path / "pbs"),
        "STANDIN_HOSTS": "localhost",
        "PATH": with_programs(programs),
    }
    with Desk(tmp_path, tiny_options, **variables) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.needs("MPICH")
def test_a_job_of_pbs_trains_on_its_nodes(pbs: Desk) -> None:
    words = (
        "--account",
        "science",
        "--partition",
        "prod",
        "--cpus",
        "4",
        "--directives",
        "l filesystems=home:eagle",
    )
    run = pbs.launch("--on", "pbs", "--processes", "2", "--time", "1-02:00:00", *words)
    [directives] = [
        file.read_text().splitlines() for file in (pbs.folder / "pbs").glob("*.directives")
    ]
    assert directives == [
        "-N recipe",
        "-l select=1:ncpus=4:mpiprocs=1",
        "-l place=scatter",
        "-l walltime=26:00:00",
        "-A science",
        "-q prod",
        "-j oe",
        f"-o {run.path}/launch/pbs.log",
        "-r y",
        "-V",
        "-l filesystems=home:eagle",
    ]
    assert pbs.wait_for_end(run) == 0, pbs.output(run)
    assert sorted(losses(run)) == list(range(1, 7))
    pbs.wait_for_state(run, r"^recipe +pbs +\d+.server +done +6 of 6 ")
    refused = pbs.refusal(
        "launch", "recipe.toml", "--on", "pbs", "--partition", "nowhere", "--run.name", "other"
    )
    assert refused == "qsub refuses the job: Unknown queue"


@pytest.mark.slow
@pytest.mark.needs("MPICH")
def test_a_job_of_pbs_resubmits_itself_at_its_time_limit_and_stops_when_asked(pbs: Desk) -> None:
    run = pbs.launch(
        "--on", "pbs", "--processes", "2", "--time", "00:00:40", "--signal_seconds", "15", *MANY
    )
    pbs.wait((run.path / "launch" / "next-job").exists, run)
    pbs.wait(lambda: "continuing runs/recipe from step" in pbs.output(run), run)
    pbs.wait_for_state(run, r"^recipe +pbs .* running")
    submitted = len(list((pbs.folder / "pbs").glob("*.pid")))
    assert submitted >= 2
    assert pbs("stop", "recipe").returncode == 0
    assert pbs.wait_for_end(run) > 128
    assert len(list((pbs.folder / "pbs").glob("*.pid"))) == submitted


# --- scripts and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm", "pbs"])
def test_a_dry_run_prints_scripts_that_bash_reads_and_starts_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    from lmforge.cli import run

    (recipe.parent / "hosts").write_text("node1\nme@node2 slots=8 # second\n\n")
    words = [
        "--nodes",
        "1" if launcher == "local" else "2",
        "--time",
        "02:00:00",
        "--hosts",
        "hosts",
        "--partition",
        "gpu",
    ]
    words += [
        "--setup",
        "module load 'a b'",
        'export X="1"',
        "--python",
        "apptainer exec x.sif python3",
        "--gpus",
        "4",
    ]
    assert run(["launch", str(recipe), "--on", launcher, *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    scripts = {Path(name).name: text for name, text in SCRIPT.findall(printed)}
    assert scripts.keys() == {"job.sh", "node.sh"}
    for text in scripts.values():
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    assert "module load 'a b'\nexport X=\"1\"\n" in scripts["node.sh"]
    assert 'apptainer exec x.sif python3 -m lmforge pretrain "$1"' in scripts["node.sh"]
    expected = {
        "slurm": (
            "#SBATCH --gpus-per-node=4\n#SBATCH --time=02:00:00\n#SBATCH --partition=gpu\n#SBATCH"
            " --signal=B:USR1@120\n"
        ),
        "pbs": (
            "#PBS -l select=2:ngpus=4:mpiprocs=1\n#PBS -l place=scatter\n#PBS -l"
            " walltime=02:00:00\n#PBS -q gpu\n"
        ),
        "ssh": "# job.sh would be started on: node1, me@node2\n",
        "local": 'run bash "$folder/node.sh" "$recipe"\n',
    }
    assert expected[launcher] in printed
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--on somewhere",
            "--launch.on: expected 'local', 'ssh', 'slurm', 'pbs' or 'mpi', got \"somewhere\"",
        ),
        (
            "--nodes 2",
            (
                "launch.nodes = 2: --on local starts one, this machine; choose another, such as"
                " --on slurm"
            ),
        ),
        (
            "--hosts hosts",
            "launch.hosts = hosts has no effect with --on local; choose --on ssh or mpi",
        ),
        (
            "--partition gpu",
            "launch.partition = gpu has no effect with --on local; choose --on slurm or pbs",
        ),
        (
            "--time soon",
            'recipe.toml: launch.time = "soon": expected minutes, HH:MM:SS or DAYS-HH:MM:SS',
        ),
        (
            "--time 1",
            (
                "recipe.toml: launch.time = 1: not longer than the 120 s of launch.signal_seconds,"
                " which are left for"
            ),
        ),
        (
            "--account a;b --on ssh",
            "launch.hosts: missing; with ssh give a file of hosts, one per line: --hosts hosts.txt",
        ),
        (
            "--partition -x",
            'recipe.toml: launch.partition = "-x": expected one word, without quotes',
        ),
        ("--on ssh --hosts absent", "absent: No such file or directory"),
        ("--on ssh --hosts twice", "twice: line 3: node1 is named twice; a host is started once"),
        (
            "--on ssh --hosts option",
            'option: line 1: expected one host, such as node1 or user@10.0.0.7, got "-oProxy',
        ),
        ("--on ssh --hosts empty", "empty: expected 1 to 10,000 hosts, one per line, got 0"),
        ("--on ssh --hosts hosts --nodes 4", "launch.nodes = 4: hosts names 2 hosts"),
        (
            "--on ssh --hosts hosts",
            "no-such-host.invalid: Could not resolve hostname no-such-host.invalid: ",
        ),
        (
            "--on slurm --nodes 8",
            (
                "8 ranks for a global batch of 4 sequences: a rank would have none; use at most 4"
                " ranks"
            ),
        ),
        (
            "--on slurm",
            "sbatch refuses the job: sbatch is not installed here; use a login node of the cluster",
        ),
        (
            "--on pbs",
            "qsub refuses the job: qsub is not installed here; use a login node of the cluster",
        ),
        ("--on mpi", "mpiexec is not installed here; load the cluster's module for MPI first"),
        (
            "--on ssh --hosts hosts --directives 'a",
            (
                "recipe.toml: launch.directives: expected words of a shell, with quotes in pairs,"
                ' got "\'a"'
            ),
        ),
        ("--run.resume required", "runs/recipe: there is no such run to resume"),
        (
            "more",
            (
                "unexpected argument 'more'; give one recipe, such as lmforge launch recipe.toml"
                " --on slurm"
            ),
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line_and_leaves_nothing(
    recipe: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    files = {
        "hosts": "node1\nno-such-host.invalid\n",
        "twice": "node1\n\nnode1\n",
        "option": "-oProxyCommand=x\n",
        "empty": "#\n",
    }
    for name, text in files.items():
        (recipe.parent / name).write_text(text)
    programs = recipe.parent / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "cut", "git", "hostname"):
        if result := shutil.which(name):
            (programs / name).symlink_to(result)
    # Where a host is looked up by name: it is not reached, whatever this machine's network is.
    write_executable(
        programs / "ssh",
        '#!/bin/bash\nfor host; do :; done\n[[ "$*" == *node1* ]] && exit 0\necho "ssh: Could not'
        ' resolve hostname no-such-host.invalid: Name or service not known" >&2\nexit 255\n',
    )
    monkeypatch.setenv("PATH", str(programs))
    assert refused("launch", recipe.name, *words.split()).startswith(message)
    assert not (recipe.parent / "runs").exists() or not any((recipe.parent / "runs").iterdir())


def test_an_mpiexec_that_does_not_answer_is_named(
    recipe: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = recipe.parent / "bin" / "mpiexec"
    silent.parent.mkdir()
    write_executable(silent, f"#!/bin/sh\nexec {shutil.which('sleep')} 60\n")
    monkeypatch.setenv("PATH", str(silent.parent))
    monkeypatch.setattr(processes, "COMMAND_SECONDS", 0.2)
    assert refused("launch", recipe.name, "--on", "mpi") == f"{silent} has not answered for 0.2 s"


def test_a_pipeline_is_not_launched_and_the_line_says_what_to_do_instead(
    recipe: Path, refused: Refusal
) -> None:
    (recipe.parent / "both.toml").write_text(
        '[[stages]]\nverb = "pretrain"\nrecipe = "recipe.toml"\n'
    )
    expected = (
        "both.toml: a pipeline, which is run on one machine (lmforge run both.toml); launch its"
        " stages one after another with a job script (docs/clusters.md)"
    )
    assert refused("launch", "both.toml", "--on", "slurm", "--nodes", "2") == expected
    assert refused("launch", "both.toml") == expected


def test_a_run_that_was_not_launched_is_not_found(
    recipe: Path, refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:

    missing = (
        "runs/other: no run that was launched; there are: none (--folder names another folder of"
        " runs)"
    )
    assert refused("stop", "other") == missing


def job_record(folder: Path, **fields: object) -> Path:
    """The record of a job of this machine that has ended, in a run's directory."""
    run = folder / "runs" / str(fields.get("name", "good"))
    file = run / "launch" / "job.json"
    file.parent.mkdir(parents=True)
    ended = {"host": None, "process": 2**22 + 1, "started": "1"}
    record = {
        "name": run.name,
        "launcher": "local",
        "folder": str(file.parent),
        "nodes": 1,
        "processes": 1,
    }
    file.write_text(json.dumps({**record, "submitted_at": 1.8e9, "sessions": [ended], **fields}))
    return file


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"launcher": "cron"},
            "launcher: expected 'local', 'ssh', 'slurm', 'pbs' or 'mpi', got \"cron\"",
        ),
        ({"sessions": []}, "sessions: expected those that launcher = local started, got none"),
        ({"submitted_at": 10**400}, "submitted_at: expected a finite number, got one beyond"),
    ],
)
def test_a_record_of_a_job_that_cannot_be_read_hides_no_other_job(
    fields: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from lmforge.cli import run

    monkeypatch.chdir(tmp_path)
    for name in ("first", "last"):
        job_record(tmp_path, name=name)
    damaged = job_record(tmp_path, name="middle", **fields).relative_to(tmp_path)
    assert run(["runs"]) == 2
    printed = capfd.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["run", "first", "last"]
    assert printed.err.startswith(f"lmforge: {damaged}: {message}")
    assert printed.err.endswith("; delete it; the run itself is not changed\n")
    assert run(["runs", "runs/first"]) == 0


def test_a_launch_folder_that_cannot_be_read_is_listed_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lmforge.cli import run

    monkeypatch.chdir(tmp_path)
    job_record(tmp_path, name="first")
    (tmp_path / "runs" / "middle").mkdir()
    (tmp_path / "runs" / "middle" / "launch").symlink_to("launch")
    assert run(["runs"]) == 2
    printed = capfd.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["run", "first"]
    assert printed.err.startswith("lmforge: runs/middle/launch/job.json: "), printed.err


@pytest.mark.parametrize("status", ["", "0"], ids=["no status", "a status"])
@pytest.mark.parametrize("launcher", ["ssh", "slurm"])
def test_a_job_that_nobody_answers_for_is_said_and_one_that_has_ended_is_not_asked_for(
    launcher: str,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "ssh" if launcher == "ssh" else "squeue"
    write_executable(
        tmp_path / program,
        f"#!/bin/sh\necho asked >>{tmp_path}/asked\necho no route >&2\nexit 255\n",
    )
    monkeypatch.setenv("PATH", with_programs(tmp_path))
    hosts = [
        {"host": "node7", "process": 5, "started": "1"},
        {"host": "node8", "process": 5, "started": "1"},
    ]
    where = {"sessions": hosts} if launcher == "ssh" else {"sessions": [], "job_id": "7"}
    record = job_record(tmp_path, launcher=launcher, **where)
    if status:
        record.with_name("status").write_text(status)
    check_no_job(tmp_path / "runs" / "good")
    said = capfd.readouterr().err
    if status:
        assert (said, (tmp_path / "asked").exists()) == ("", False)
    else:
        what = "its job (ssh)" if launcher == "ssh" else "job 7 (slurm)"
        assert said.startswith(
            f"lmforge: {tmp_path}/runs/good: not known whether {what} has ended, and taken for"
            " ended: "
        )
        assert "no route" in said


@pytest.mark.parametrize("status", ["143", "75"])
def test_a_job_that_slurm_has_queued_again_by_itself_is_pending_whatever_its_script_wrote(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_executable(tmp_path / "squeue", '#!/bin/sh\necho "PENDING|BeginTime|"\n')
    monkeypatch.setenv("PATH", with_programs(tmp_path))
    record = job_record(tmp_path, launcher="slurm", sessions=[], job_id="7")
    record.with_name("status").write_text(status)
    with pytest.raises(UserError, match=r"job 7 \(slurm\) is pending"):
        check_no_job(tmp_path / "runs" / "good")
    monkeypatch.chdir(tmp_path)
    assert list_runs(RunsOptions()) == 0
    assert re.search(r"^good +slurm +7 +pending +BeginTime ", capfd.readouterr().out, re.M)


def test_a_launch_that_fails_leaves_a_folder_that_is_another_runs_by_then(
    recipe: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe.parent / "programs"
    folder.mkdir()
    replace = (
        "mv runs/recipe aside; mkdir runs/recipe; echo another >runs/recipe/recipe.toml; exit 1"
    )
    write_executable(
        folder / "sbatch", f'#!/bin/sh\ncase "$*" in *--test-only*) exit 0; esac\n{replace}\n'
    )
    monkeypatch.setenv("PATH", with_programs(folder))
    assert "sbatch refuses the job" in refused("launch", "recipe.toml", "--on", "slurm")
    assert Path("runs/recipe/recipe.toml").read_text() == "another\n"


@pytest.mark.slow
@pytest.mark.parametrize(("status", "is_lost"), [(0, False), (75, True)])
def test_a_node_of_slurm_that_is_slow_to_end_after_success_is_not_called_lost(
    status: int, is_lost: bool, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe.parent / "programs"
    folder.mkdir()
    write_executable(
        folder / "srun", f'#!/bin/sh\necho {status} >"$LMFORGE_STATUS_FILE"\nexec sleep 5\n'
    )
    write_executable(folder / "scontrol", "#!/bin/sh\necho node1\n")
    monkeypatch.setenv("PATH", with_programs(folder))
    monkeypatch.setattr(scripts, "END_SECONDS", 1)
    options = LaunchOptions(on="slurm", max_restarts=0)
    job = JobPlan("slow", "pretrain", recipe.parent, (recipe,), options, on_cpu=True)
    done = subprocess.run(["bash", "-c", scripts.slurm_script(job)], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("a node is lost" in done.stderr) == is_lost


def test_used_up_restarts_are_named_with_the_lost_rank_and_the_command_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        launch, "start_ranks", lambda *_: (launch.EXIT_PEER_LOST, "rank 1 was killed by SIGKILL")
    )
    lost = (
        "lmforge: rank 1 was killed by SIGKILL; launch.max_restarts = 1: ranks are not started"
        " again; "
    )
    assert launch.launch_local(2, ["pretrain", "recipe.toml"], max_restarts=1) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"{lost}the same command continues from the last checkpoint"
    monkeypatch.setenv("LMFORGE_JOB", "runs/x/launch")
    assert launch.launch_local(2, ["pretrain", "recipe.toml"], max_restarts=1) == 1
    assert (
        capfd.readouterr().err.splitlines()[-1]
        == f"{lost}to continue: lmforge launch pretrain recipe.toml"
    )


@pytest.mark.parametrize(("written", "requeues"), [("2\n", "2"), ("", ""), ("many", "")])
def test_jobs_counts_starts_by_the_scheduler_apart_from_restarts(
    written: str, requeues: str, tmp_path: Path
) -> None:
    """Four attempts: one at the start, two of a queue, one after a rank was lost."""
    file = job_record(tmp_path, launcher="slurm", job_id="7", sessions=[], submitted_at=1e9)
    file.with_name("requeues").write_text(written)
    for number in range(1, 5):
        log = Run(tmp_path / "runs" / "good").log_path(number, 0)
        log.parent.mkdir(parents=True)
        log.touch()
    job = read_job(tmp_path / "runs" / "good")
    assert job is not None
    assert str(job.requeues or "") == requeues
    assert jobs._restarts(tmp_path / "runs" / "good", job) == 3 - (job.requeues or 0)


@pytest.mark.parametrize(("kills", "why"), [((3, 4), True), ((3, 3), False)])
def test_a_killed_rank_is_named_with_the_memory_of_the_host_only_where_the_kernel_has_killed(
    kills: tuple[int, int], why: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.launcher.api as launcher
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def lost(config: object, program: str) -> Callable[..., None]:
        def start(*arguments: str) -> None:
            raise ChildFailedError("lmforge", {1: ProcessFailure(1, 99, -signal.SIGKILL, "")})

        return start

    assert launch._count_memory_kills() >= 0
    counts = iter(kills)
    monkeypatch.setattr(launch, "_count_memory_kills", lambda: next(counts))
    monkeypatch.setattr(launcher, "elastic_launch", lost)
    status, reason = launch.start_ranks(2, ["pretrain"], launch.Interruption())
    memory = "; the kernel ended a process because host memory was used up"
    assert (status, reason) == (
        launch.EXIT_PEER_LOST,
        f"rank 1 was killed by SIGKILL{memory if why else ''}",
    )


@pytest.mark.parametrize("size", [0, 2**40])
def test_a_status_of_a_job_that_is_a_pipe_or_without_end_says_nothing(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lmforge.cli import run

    monkeypatch.chdir(tmp_path)
    status = job_record(tmp_path).with_name("status")
    if size:
        with status.open("wb") as file:
            file.truncate(size)
    else:
        os.mkfifo(status)
    assert run(["runs"]) == 0
    assert " lost " in capfd.readouterr().out


def test_options_of_a_recipe_and_of_the_command_line_meet(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmforge.cli import run

    text = (
        recipe.read_text()
        + '[launch]\non = "slurm"\nnodes = 2\npartition = "long"\ntime = "30"\nsetup = ["module'
        ' load cuda"]\n'
    )
    recipe.write_text(text)
    assert (
        run(
            ["launch", "pretrain", recipe.name, "--partition", "short", "--run.name=b", "--dry-run"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    for line in ("--partition=short", "--time=30", "--nodes=2", "--job-name=b"):
        assert f"#SBATCH {line}\n" in printed
    assert "\nmodule load cuda\n" in printed
    assert "2 data-parallel ranks" in printed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("02:00:00", 7200),
        ("1-02:00:00", 93600),
        ("0", None),
        ("2h", None),
        ("1:2", None),
        ("00:00:00", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_and_pbs_write_it(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds
