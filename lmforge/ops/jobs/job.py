"""`JobPlan`, what is to be started; `Job`, what was started, as `launch/job.json` in the run's
directory records it.
"""

import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from lmforge.core.distributed.processes import INTERRUPTED_STATUSES
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import cut, describe_os_error, open_file, read_bounded, read_json
from lmforge.core.options.operation import LauncherName, LaunchOptions
from lmforge.core.records.runs import JOB_FILE, LAUNCH_FOLDER

JOB_SCRIPT = "job.sh"
NODE_SCRIPT = "node.sh"
MAX_STATUS_BYTES = 1024  # of the small files of a job
LAST_BYTES, MAX_REASON = 2**14, 300  # of its output; characters of the reason in it
DELETE_HINT = "delete it; the run itself is not changed"
# Those without a scheduler, whose scripts are found by their processes.
SESSION_LAUNCHERS = ("local", "ssh", "mpi")
# Tells a script that a user asked it to stop, which the signal alone does not say.
STOP_FILE = "stop"


class JobState(StrEnum):
    """The state of a job, as `lmforge runs` prints it; the same words as in `monitor.run_status`
    for states that both have.
    """

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"

    @property
    def is_active(self) -> bool:
        return self in (JobState.PENDING, JobState.RUNNING)


@dataclass(frozen=True)
class Session:
    """A process that has no terminal: the script of a job on a host (None for this machine), found
    by its id and start.
    """

    host: str | None
    process: int
    started: str


@dataclass(frozen=True)
class JobPlan:
    """What is to be started. Paths are absolute.

    name, folder  of the job; the folder holds its scripts and logs
    verb          pretrain, sft, align, or doctor
    recipe        the frozen recipe of the run
    on_cpu        whether it is known that no rank takes a GPU
    arguments     of doctor, which takes no frozen recipe
    directory     where the command was typed, and where the run works
    """

    name: str
    verb: str
    folder: Path
    recipe: Path
    options: LaunchOptions
    on_cpu: bool
    arguments: tuple[str, ...] = ()
    directory: Path = field(default_factory=Path.cwd)

    @property
    def nodes(self) -> int:
        return self.options.nodes or 1

    @property
    def gpus(self) -> int:
        """GPUs of a node to ask a scheduler for."""
        if self.options.gpus is not None:
            return self.options.gpus
        if self.on_cpu:
            return 0
        return self.options.processes

    @property
    def log(self) -> Path:
        """The output of the job."""
        return self.folder / "output.log"

    def python_command(self) -> str:
        """Words of a shell that start Python on a node."""
        return self.options.python or shlex.quote(sys.executable)


@dataclass
class Job:
    """What `lmforge launch` has started for one run.

    folder       with scripts, log and status
    submitted_at seconds since the epoch
    job_id       of Slurm or PBS
    ssh_options  with which its hosts are reached
    """

    name: str
    launcher: LauncherName
    folder: str
    nodes: int
    processes: int
    submitted_at: float = field(default_factory=time.time)
    job_id: str | None = None
    sessions: list[Session] = field(default_factory=list)
    ssh_options: list[str] = field(default_factory=list)

    @property
    def status_path(self) -> Path:
        return Path(self.folder) / "status"

    @property
    def log(self) -> Path:
        return Path(self.folder) / "output.log"

    @property
    def requeues(self) -> int:
        """How often its scheduler has started it again."""
        try:
            return int(read_bounded(Path(self.folder) / "requeues", MAX_STATUS_BYTES, ValueError))
        except (OSError, ValueError):
            return 0

    @property
    def has_ended(self) -> bool:
        """Whether its status says that it runs no more.

        A scheduler queues a job again by itself whose node is lost, or whose place another takes;
        its script may have written a status before.
        """
        state = self.state_by_status()
        return state in (JobState.DONE, JobState.REFUSED) or (
            state != JobState.LOST and self.job_id is None
        )

    def last_words(self) -> str:
        """The last line of its output that says how the run ended; empty where there is none."""
        try:
            with open_file(self.log) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
                lines = file.read(LAST_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ""
        words = next(
            (line for line in reversed(lines) if line.startswith(("lmforge: ", "stopped by "))), ""
        )
        return cut(words.removeprefix("lmforge: ").partition("; to continue: ")[0], MAX_REASON)

    def state_by_status(self) -> JobState:
        """The state of a job that no longer runs, from the exit status that its script wrote."""
        try:
            status = int(read_bounded(self.status_path, MAX_STATUS_BYTES, ValueError))
        except (OSError, ValueError):
            return JobState.LOST
        if status in INTERRUPTED_STATUSES:
            return JobState.INTERRUPTED
        return {0: JobState.DONE, 2: JobState.REFUSED}.get(status, JobState.FAILED)


def read_job(run_folder: Path) -> Job | None:
    """The job of a run's directory; None where `lmforge launch` has not started it.

    Raises UserError.
    """
    path = run_folder / LAUNCH_FOLDER / JOB_FILE
    try:
        job = read_json(path, Job, hint=DELETE_HINT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise UserError(describe_os_error(problem, path)) from None
    if job.launcher in SESSION_LAUNCHERS and not job.sessions:
        raise UserError(
            f"{path}: sessions: expected those that launcher = {job.launcher} started, got none;"
            f" {DELETE_HINT}"
        )
    return job


def write_job(run_folder: Path, job: Job) -> None:
    """Record a job in a run's directory."""
    atomic_write_json(run_folder / LAUNCH_FOLDER / JOB_FILE, asdict(job))
