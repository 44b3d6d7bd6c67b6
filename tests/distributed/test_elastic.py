"""A run continues on any number of ranks: indivisible batches, standby ranks, hosts that leave and
join.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from tests.conftest import Command
from tests.distributed.conftest import RECIPE_STEPS, Recipe, assert_agree, losses
from tests.ops.cluster.laboratory import HostProcess, Laboratory
from tests.support.rounding import OTHER_ROUNDING

FAULTY_RANK = Path(__file__).parent / "faults" / "faulty_rank.py"
# A checkpoint is saved after the first half of the steps; the fault is after the next ones.
SAVED_STEP = RECIPE_STEPS // 2
FAULTY_STEP = RECIPE_STEPS - 1
BATCH = ["--train.global_batch_size", "8"]
PATIENCE_SECONDS, MAX_RESTARTS = 200, 2


def assert_same(run: Run, reference: Run) -> None:
    assert [*losses(run)] == [*losses(reference)] == list(range(1, RECIPE_STEPS + 1))
    assert_agree(run, reference)


@pytest.fixture(scope="module")
def reference(recipe: Recipe, lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One rank, undisturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for name, variables in (("one", {}), ("one rounded", OTHER_ROUNDING)):
        done = lmforge("pretrain", *recipe(folder, name, *BATCH), **variables)
        assert done.returncode == 0, done.stderr
    return Run(folder / "one")


@pytest.mark.parametrize(
    "options",
    [
        ["--train.micro_batch_size", "2"],
        pytest.param(["--parallel.engine", "ddp"], marks=pytest.mark.slow),
        pytest.param(
            ["--parallel.engine", "fsdp1", "--train.micro_batch_size", "1"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda options: " ".join(options),
)
def test_three_ranks_share_a_batch_of_eight_sequences_as_one_rank_reads_it(
    options: list[str], recipe: Recipe, reference: Run, lmforge: Command, tmp_path: Path
) -> None:
    done = lmforge("pretrain", *recipe(tmp_path, "three", *BATCH, *options), ranks=3)
    assert done.returncode == 0, done.stderr
    assert " are padding" in done.stdout or " is padding" in done.stdout
    assert_same(Run(tmp_path / "three"), reference)


@pytest.mark.slow
def test_a_rank_that_fills_no_group_of_tensor_parallelism_stands_by(
    recipe: Recipe, reference: Run, lmforge: Command, tmp_path: Path
) -> None:
    done = lmforge(
        "pretrain",
        *recipe(tmp_path, "five", *BATCH, "--parallel.tensor_parallel_degree", "2"),
        ranks=5,
    )
    assert done.returncode == 0, done.stderr
    assert "lmforge: 1 of 5 ranks stands by (4): " in done.stderr
    assert "1 of 5 ranks stands by (4): " in done.stdout
    assert "tensor over 2, 4 ranks" in done.stdout
    assert_same(Run(tmp_path / "five"), reference)


# Chunks of the delta rule have 64 tokens, so that each of four pieces of a sequence has three.
HYBRID = ["--model.preset", "nano-hybrid", "--model.num_hidden_layers", "4"]
HYBRID += ["--data.sequence_length", "768", "--train.global_batch_size", "4"]
HYBRID += ["--schedule.name", "constant", "--checkpoint.every_steps", "7"]


@pytest.mark.slow
def test_a_hybrid_continues_from_context_to_tensor_parallelism_to_checkpointing(
    recipe: Recipe, lmforge: Command, tmp_path: Path
) -> None:
    stages = [
        (1, "unbroken", "20", []),
        (4, "broken", "7", ["--parallel.context_parallel_degree", "2"]),
        (2, "broken", "14", ["--parallel.tensor_parallel_degree", "2"]),
        (1, "broken", "20", ["--parallel.activation_checkpointing", "full"]),
    ]
    for ranks, name, steps, more in stages:
        words = recipe(tmp_path, name, *HYBRID, "--train.steps", steps, *more)
        done = lmforge("pretrain", *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
    ours = losses(Run(tmp_path / "broken"))
    # A loss is rounded to 1e-7 of itself at each of 20 steps, and no step undoes another's.
    assert ours == pytest.approx(losses(Run(tmp_path / "unbroken")), rel=2e-6, abs=0)
    assert len(ours) == 20


def test_a_rank_that_stands_by_ends_when_the_others_are_refused(
    recipe: Recipe, lmforge: Command, tmp_path: Path
) -> None:
    options = recipe(
        tmp_path,
        "refused",
        *BATCH,
        "--parallel.tensor_parallel_degree",
        "2",
        "--run.resume",
        "required",
    )
    done = lmforge("pretrain", *options, ranks=3)
    assert done.returncode == 2
    assert "there is no such run to resume" in done.stderr
    assert not (tmp_path / "refused" / "recipe.toml").exists()


class Job:
    """torchrun on hosts of the laboratory, of one to two hosts; the run waits before FAULTY_STEP
    until `go_on`.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        command: list[str],
        folder: Path,
        ranks_per_host: int,
        nodes: str,
    ) -> None:
        self._laboratory, self._command, self._folder, self._ranks = (
            laboratory,
            command,
            folder,
            ranks_per_host,
        )
        self._nodes = nodes
        self._variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if nodes == "1:2" else {}
        self.agents: dict[str, HostProcess] = {}

    def start(self, host: str) -> None:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self._nodes}",
            f"--nproc-per-node={self._ranks}",
        ]
        torchrun += [
            f"--max-restarts={MAX_RESTARTS}",
            "--rdzv-backend=c10d",
            "--rdzv-id=job",
            "--rdzv-endpoint=node1:29400",
        ]
        with (self._folder / f"{host}.out").open("w") as output:
            self.agents[host] = self._laboratory.start(
                host,
                [*torchrun, FAULTY_RANK, "pretrain", *self._command],
                stdout=output,
                FAULT="data",
                FAULTY_STEP=str(FAULTY_STEP),
                FAULTY_RANK="0",
                SLEEP="0.05",
                AWAKE=str(self._folder / "awake"),
                **self._variables,
            )

    def go_on(self) -> None:
        (self._folder / "awake").touch()

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        return "".join(
            f"--- {host}\n{(self._folder / f'{host}.out').read_text()}" for host in self.agents
        )

    def wait(self, host: str) -> int:
        try:
            return self.agents[host].wait(timeout=PATIENCE_SECONDS)
        except BaseException:
            print(self.output())
            raise


@contextmanager
def job(
    laboratory: Laboratory,
    command: list[str],
    folder: Path,
    ranks_per_host: int = 1,
    nodes: str = "1:2",
) -> Iterator[Job]:
    started = Job(laboratory, command, folder, ranks_per_host, nodes)
    try:
        yield started
    finally:
        for host, agent in started.agents.items():
            laboratory.heal(host)
            laboratory.run(host, "pkill -9 -f '[p]retrain'")
            agent.wait(timeout=30)


def last_step(run: Run) -> int:
    return (
        max((json.loads(line)["step"] for line in run.metrics_path.open()), default=0)
        if run.metrics_path.exists()
        else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_run_continues_when_a_host_is_lost(
    ranks_per_host: int, laboratory: Laboratory, recipe: Recipe, reference: Run, tmp_path: Path
) -> None:
    """And the recipe says to overwrite the run, which was done once."""
    run = Run(tmp_path / "runs" / "lost")
    command = recipe(tmp_path / "runs", "lost", *BATCH, "--run.overwrite", "true")
    with job(laboratory, command, tmp_path, ranks_per_host) as started:
        for host in laboratory.hosts:
            started.start(host)
        started.await_that(lambda: last_step(run) == FAULTY_STEP)
        laboratory.run("node2", "pkill -9 -f '[p]retrain'")
        started.go_on()
        assert started.wait("node1") == 0, started.output()
        output = started.output()
    assert f"{2 * ranks_per_host} ranks on cpu" in output
    assert f"continuing {run.path} from step {SAVED_STEP}" in output
    assert_same(run, reference)


@pytest.mark.slow
def test_torchrun_on_a_fixed_number_of_hosts_starts_the_ranks_again_when_one_is_lost(
    laboratory: Laboratory, recipe: Recipe, reference: Run, tmp_path: Path
) -> None:
    """Twice: torchrun's count of restarts is another on each host then, and torch without more
    takes it for the same store.
    """
    run = Run(tmp_path / "runs" / "killed")
    kill = (
        "for p in /proc/[0-9]*; do grep -qz '^RANK=' $p/environ 2>/dev/null && kill -KILL"
        " ${p#/proc/}; done"
    )
    with job(
        laboratory, recipe(tmp_path / "runs", "killed", *BATCH), tmp_path, nodes="2"
    ) as started:
        for each in laboratory.hosts:
            started.start(each)
        started.await_that(lambda: last_step(run) == FAULTY_STEP)
        laboratory.run("node1", kill)
        started.await_that(lambda: len(run.attempts()) == 2)
        laboratory.run("node1", kill)
        started.go_on()
        for each in laboratory.hosts:
            assert started.wait(each) == 0, started.output()
        output = started.output()
    assert output.count(f"continuing {run.path} from step {SAVED_STEP}") >= 1
    used_up = (
        rf"torchrun's --max-restarts is used up on .*\bnode1 \({MAX_RESTARTS} of {MAX_RESTARTS}\)"
    )
    assert len(re.findall(used_up, output)) == 1, output
    assert_same(run, reference)


@pytest.mark.slow
def test_a_run_continues_when_a_host_is_cut_off(
    laboratory: Laboratory, recipe: Recipe, reference: Run, tmp_path: Path
) -> None:
    """No connection is closed: the ranks only wait, until the watchdog ends them."""
    run = Run(tmp_path / "runs" / "cut")
    watch = ["--watch.stall_seconds", "2", "--watch.timeout_seconds", "5"]
    with job(laboratory, recipe(tmp_path / "runs", "cut", *BATCH, *watch), tmp_path) as started:
        for host in laboratory.hosts:
            started.start(host)
        started.await_that(lambda: last_step(run) == FAULTY_STEP)
        laboratory.cut("node2")
        started.go_on()
        assert started.wait("node1") == 0, started.output()
        output = started.output()
    assert f"continuing {run.path} from step {SAVED_STEP}" in output
    assert_same(run, reference)


@pytest.mark.slow
def test_a_run_continues_with_a_host_that_joins(
    laboratory: Laboratory, recipe: Recipe, reference: Run, tmp_path: Path
) -> None:
    """Such a start is not a restart by torchrun's count; the recipe says to overwrite the run all
    the same.
    """
    run = Run(tmp_path / "runs" / "joined")
    command = recipe(tmp_path / "runs", "joined", *BATCH, "--run.overwrite", "true")
    with job(laboratory, command, tmp_path) as started:
        started.start("node1")
        started.await_that(lambda: last_step(run) == FAULTY_STEP)
        started.start("node2")
        # The rank that waits does not hear torchrun's SIGTERM, and is killed after half a minute.
        started.await_that(
            lambda: f"continuing {run.path} from step {SAVED_STEP}" in started.output()
        )
        started.go_on()
        assert [started.wait(host) for host in laboratory.hosts] == [0, 0], started.output()
        output = started.output()
    assert "1 rank on cpu" in output
    assert "2 ranks on cpu" in output
    assert_same(run, reference)
