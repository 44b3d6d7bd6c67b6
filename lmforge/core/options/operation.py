"""The sections of a recipe about saving, logging, monitoring and launching; none changes the
training.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lmforge.core.files.untrusted import quoted, words_problem
from lmforge.core.options.options import Options, choice, option
from lmforge.core.options.ranges import COUNT, COUNT_OR_0, DURATION, RANKS, THREADS

# The launchers whose variables say which rank a process is; `core/distributed/environment.py` reads
# them.
EnvironmentName = Literal[
    "auto", "single", "local", "torchrun", "slurm", "pbs", "openmpi", "mpich", "pals"
]
ENVIRONMENT = option(
    "auto",
    "launcher that started the ranks, if it is not detected; single: none, each process trains"
    " alone",
)
MAX_PORT = 65_535


class CheckpointOptions(Options):
    """Which checkpoints are saved and kept.

    Newer ones replace temporary ones; only a rollback deletes kept ones.
    """

    every_steps: int | None = option(
        None,
        "steps between checkpoints; the last step always saves (default: a tenth of the run)",
        **COUNT,
    )
    every_minutes: float | None = option(
        None, "minutes between checkpoints, in addition to those by steps", **DURATION
    )
    keep_last: int = option(
        3, "newest temporary checkpoints to keep (transformers: save_total_limit)", **COUNT
    )
    keep_every_steps: int | None = option(
        None,
        "steps between checkpoints that are kept; only a rollback deletes those after the step it"
        " returns to",
        **COUNT,
    )
    keep_best: int = option(0, "best checkpoints to keep in addition to the newest", **COUNT_OR_0)
    best_metric: str = option(
        "val/loss",
        "metric in metrics.jsonl that decides which is best: the lowest, but the highest accuracy,"
        " reward or pass rate; a val/… metric is measured at each checkpoint",
    )
    last_save_model_only: bool = option(
        False,
        "save the last step without optimizer states: a third of the size, but no run can resume"
        " from it",
    )
    folder: str | None = option(
        None,
        "save checkpoints in FOLDER/NAME: a folder, or an address such as s3://bucket/runs (extra:"
        " cloud) (default: in the run's directory)",
    )
    async_save: bool = option(
        True, "write in the background; needs host memory for a copy of what a rank writes"
    )


class LogOptions(Options):
    """What is logged."""

    every_steps: int = option(
        10, "steps between lines of metrics (transformers: logging_steps)", **COUNT
    )
    trackers: tuple[str, ...] = choice((), "where metrics go besides metrics.jsonl", "tracker")
    project: str = option("lmforge", "project of the run in the trackers (mlflow: experiment)")
    profile_steps: str | None = option(
        None,
        "trace these steps with torch's profiler, one file per rank: FIRST:LAST, such as 10:13",
    )
    calibration: Path | None = option(
        None,
        "with log.predict: a file of `lmforge bench --calibrate`, from which the speed is"
        " predicted",
    )
    predict: bool = option(
        False, "predict memory and speed of the run, and compare them with its first 20 steps"
    )
    prediction: Path | None = option(
        None,
        "a file of `lmforge ladder`: the report draws the predicted loss, and a run that leaves its"
        " interval says so",
    )
    memory_snapshot: bool = option(
        False, "on a GPU: record allocations, and write them at the end or when memory runs out"
    )

    @property
    def profile_window(self) -> tuple[int, int] | None:
        """The first and the last step to trace; None for none."""
        match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", self.profile_steps or "")
        return (int(match[1]), int(match[2])) if match else None

    def problems(self) -> Iterator[str]:
        window = self.profile_window
        if self.profile_steps is not None and (window is None or not 1 <= window[0] <= window[1]):
            yield (
                f"log.profile_steps = {quoted(self.profile_steps)}: expected FIRST:LAST, two steps"
                " from 1 on, such as 10:13"
            )


class WatchOptions(Options):
    """The watchdog: what is reported when ranks make no progress, and when a rank that cannot
    continue ends itself.
    """

    stall_seconds: float = option(
        30.0,
        "without progress for so long (at least 3 times the usual time of the phase), report where"
        " ranks are",
        ge=0.5,
        le=1e6,
    )
    timeout_seconds: float | None = option(
        1800.0,
        "without progress for so long, end with status 75, for a launcher to restart; none for"
        " never",
        **DURATION,
    )

    def problems(self) -> Iterator[str]:
        if self.timeout_seconds is not None and self.timeout_seconds < 2 * self.stall_seconds:
            yield (
                f"watch.timeout_seconds = {self.timeout_seconds:g}: at least twice"
                f" watch.stall_seconds = {self.stall_seconds:g}, so that stacks are reported before"
                " the end; raise it or lower the other"
            )


LauncherName = Literal["local", "ssh", "slurm", "pbs", "mpi"]


class JobOptions(Options):
    """Where ranks are started, by whom, and with what: of `lmforge launch` and `lmforge doctor
    --on`.
    """

    processes: int = option(
        1, "ranks to start on each node (torchrun: --nproc-per-node); not under torchrun", **RANKS
    )
    environment: EnvironmentName = ENVIRONMENT
    on: LauncherName = option(
        "local",
        "what starts the ranks: this machine, the hosts of a file by ssh, sbatch, qsub, or mpiexec",
    )
    nodes: int | None = option(
        None, "nodes to run on (default: 1; with ssh the hosts of launch.hosts)", **RANKS
    )
    time: str | None = option(
        None, "time limit of the job: MINUTES, HH:MM:SS or DAYS-HH:MM:SS (default: the scheduler's)"
    )
    account: str | None = option(None, "account that is charged (slurm, pbs)")
    partition: str | None = option(None, "partition of slurm, or queue of pbs")
    gpus: int | None = option(
        None,
        "GPUs to request per node (default: launch.processes, none with train.device = cpu)",
        ge=0,
        le=1024,
    )
    cpus: int | None = option(
        None, "CPU cores to request per node (default: the scheduler's)", **THREADS
    )
    directives: tuple[str, ...] = option(
        (),
        "further options of the scheduler, such as constraint=a100 (slurm) or 'l filesystems=home'"
        " (pbs), with or without leading dashes; with ssh and mpi: options of ssh and mpiexec",
    )
    setup: tuple[str, ...] = option(
        (), "shell commands to run first on each node, such as module load cuda"
    )
    python: str | None = option(
        None,
        "command that is Python on the nodes, such as 'apptainer exec --nv image.sif python'"
        " (default: the one that runs this command)",
    )
    hosts: Path | None = option(None, "file with one host per line (ssh, mpi)")
    address: str | None = option(
        None, "name or address at which the other nodes reach the first one (default: detected)"
    )
    port: int | None = option(
        None,
        "port of the first node, for the others to connect to (default: a free one)",
        ge=1024,
        le=MAX_PORT,
    )

    def problems(self) -> Iterator[str]:
        if self.time is not None and self.time_seconds is None:
            yield f"launch.time = {quoted(self.time)}: expected minutes, HH:MM:SS or DAYS-HH:MM:SS"
        for name in ("account", "partition", "address"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^\s\-#'\"$`\\][^\s'\"$`\\]*", value):
                yield f"launch.{name} = {quoted(value)}: expected one word, without quotes"
        for name in ("directives", "setup"):
            if lines := [line for line in getattr(self, name) if "\n" in line or not line.strip()]:
                yield f"launch.{name}: {quoted(lines[0])}: expected one line each"
        if self.on in ("ssh", "mpi"):  # a scheduler reads its directives itself
            for problem in filter(None, map(words_problem, self.directives)):
                yield f"launch.directives: {problem}"
        if self.python is not None and ("\n" in self.python or not self.python.strip()):
            yield f"launch.python = {quoted(self.python)}: expected a command in one line"

    @property
    def directive_options(self) -> list[str]:
        """`directives` with their dashes: two before a word of several letters, or one."""
        return [
            line if line.startswith("-") else f"-{'-' * (len(line.split()[0]) > 1)}{line}"
            for line in self.directives
        ]

    @property
    def time_seconds(self) -> int | None:
        """The time limit in seconds; None where there is none."""
        return parse_time_limit(self.time or "")

    @property
    def world_size(self) -> int:
        """Ranks on all nodes; with ssh and no number of nodes, on one."""
        return (self.nodes or 1) * self.processes


class LaunchOptions(JobOptions):
    """How processes are started.

    `lmforge launch` reads all of them, the verbs that train `processes`, `environment` and
    `max_restarts`.
    """

    max_restarts: int = option(
        3,
        "restarts of all ranks, from the last checkpoint, after one of them was lost",
        **COUNT_OR_0,
    )
    signal_seconds: int = option(
        120,
        "seconds before the end of launch.time at which the run saves, and the job is queued again",
        ge=1,
        le=86_400,
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.time_seconds is not None and self.time_seconds <= self.signal_seconds:
            yield (
                f"launch.time = {self.time}: not longer than the {self.signal_seconds} s of"
                " launch.signal_seconds, which are left for saving"
            )


def parse_time_limit(text: str) -> int | None:
    """Seconds of a time limit as Slurm and PBS write it: MINUTES, HH:MM:SS, DAYS-HH:MM:SS; None for
    anything else.
    """
    if re.fullmatch(r"[0-9]{1,6}", text):
        return 60 * int(text) or None
    match = re.fullmatch(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None
