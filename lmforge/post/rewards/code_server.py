"""The process that runs programs that a model wrote: it forks a confined child for each program and
watches it.

sandbox.py starts it as a bare interpreter and sends it lines of JSON, one program at a time.
Besides confinement.py, only the standard library is imported.
"""

import fcntl
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from lmforge.post.rewards import confinement

POLL_SECONDS = 0.05
ERROR_CHARACTERS = 500
# ast.PyCF_ONLY_AST, without importing ast.
ONLY_SYNTAX_TREE = 0x400
# The descriptor on which a child reports its progress, and the one on which it says why it could
# not be confined. The second is closed before the program is compiled. By writing to the first, a
# program can only falsify its own result.
REPORT_FD = 3
FAILURE_FD = 4
STAGES = ("parses", "compiles", "runs")
# The limit of what a program prints, and of its report.
MAX_OUTPUT_BYTES = 1 << 16
MAX_FOLDER_BYTES = 32 << 20
MAX_THREADS = 256


# Runs first, confined like all programs, and prints as JSON which attempts failed.
_PROBE = """
import json, os, socket
def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False
def child():
    if os.fork() == 0:
        os._exit(0)
print(json.dumps({
    "network": refused(socket.socket),
    "processes": refused(child),
    "signals": refused(os.kill, os.getppid(), 0),
    "writing": refused(os.mkdir, os.path.abspath("../" + os.path.basename(os.getcwd()) + "-outside")),
    "reading": refused(os.listdir, "/"),
}))
"""


def _run_program(job: dict[str, Any], scratch: str, landlock: bool) -> dict[str, Any]:
    """Run one program, from the fork to the deletion of its files.

    Returns the fields of sandbox.ProgramResult.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="lmforge-code-", dir=scratch))
    output = os.pipe()
    report = os.pipe()
    failure = os.pipe()
    parent = os.getpid()
    began = time.monotonic()
    # Every line of the report begins with this. The program does not know it, though it could find
    # it out.
    secret = os.urandom(8).hex()
    pid = os.fork()
    if pid == 0:
        try:
            _redirect_descriptors(output[1], report[1], failure[1])
            _confine(job, folder, parent, landlock)
            os.close(FAILURE_FD)
            _execute(job, secret)
        except BaseException as error:
            os.write(FAILURE_FD, json.dumps(_error_line(error)).encode())
        finally:
            os._exit(1)
    for _, written in (output, report, failure):
        os.close(written)
    exit_status, killed_for, printed, reported = _watch(
        pid, output[0], report[0], began + job["seconds"], folder
    )
    seconds = time.monotonic() - began
    _remove(folder)
    with open(failure[0], "rb") as file:
        unconfined = file.read()
    progress = _read_progress(reported, secret, len(job["checks"]))
    status, reason = _classify(killed_for, exit_status, progress)
    return {
        "status": "unconfined" if unconfined else status,
        "stages_reached": progress.stages,
        "checks_passed": progress.passed,
        "error": json.loads(unconfined) if unconfined else reason,
        "output": printed,
        "seconds": seconds,
    }


# --- in the child ---------------------------------------------------------------------------------


def _redirect_descriptors(output: int, report: int, failure: int) -> None:
    """Leave open /dev/null as 0, `output` as 1 and 2, `report` as REPORT_FD and `failure` as
    FAILURE_FD, and nothing else.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    # Duplicated above FAILURE_FD first: otherwise dup2 could close one of them by taking its number
    # for another.
    null, output, report, failure = (
        fcntl.fcntl(x, fcntl.F_DUPFD, FAILURE_FD + 1) for x in (null, output, report, failure)
    )
    for target, source in enumerate((null, output, output, report, failure)):
        os.dup2(source, target)
    # The server was started with 0 to 2 only, and opens few.
    os.closerange(FAILURE_FD + 1, confinement.MAX_OPEN_FILES)


def _confine(job: dict[str, Any], folder: str, parent: int, landlock: bool) -> None:
    """Permanently give up all rights except to `folder`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.chown(folder, confinement.NOBODY, confinement.NOBODY)
        os.chmod(folder, 0o777)
    confinement.set_resource_limits(
        cpu_seconds=int(job["seconds"]) + 2, memory_bytes=job["memory_mib"] << 20
    )
    confinement.drop_root()
    confinement.set_visible(True)  # to the server, which looks for deleted files
    confinement.set_no_new_privs(parent)
    if landlock:
        confinement.restrict_files_to(folder)
    confinement.install_seccomp_filter(allow_writes=landlock)


def _execute(job: dict[str, Any], secret: str) -> NoReturn:
    """Run the program, then each check in its global names, and report the progress.

    Never returns.
    """
    # Created now, since later there may be no memory for it.
    out_of_memory = f"{secret} memory\n".encode()

    def report(event: str, detail: str = "") -> None:
        os.write(REPORT_FD, f"{secret} {event} {detail}\n".encode())

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 (open as long as the process)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
    try:
        # "return 1" parses, but does not compile.
        compile(job["code"], "<code>", "exec", flags=ONLY_SYNTAX_TREE)
        report("parses")
        compiled = compile(job["code"], "<code>", "exec", dont_inherit=True)
        report("compiles")
        exec(compiled, main.__dict__)
        sys.stdout.flush()
        report("runs")
    except MemoryError:
        os.write(REPORT_FD, out_of_memory)
    except SystemExit:
        report("exit")
    except BaseException as error:
        report("error", json.dumps(_error_line(error)))
    else:
        for number, check in enumerate(job["checks"]):
            try:
                exec(
                    compile(check, f"<check {number + 1}>", "exec", dont_inherit=True),
                    main.__dict__,
                )
            except BaseException as error:
                report("failed", json.dumps(f"check {number + 1}: {_error_line(error)}"))
            else:
                report("passed")
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)


def _error_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(error)[-1].strip()[:ERROR_CHARACTERS]
    except Exception:  # the program's own exception class may fail to print
        return type(error).__name__


# --- in the parent --------------------------------------------------------------------------------


def _watch(
    pid: int, output: int, report: int, deadline: float, folder: str
) -> tuple[int, str, str, str]:
    """Read what the child writes until it ends or has to be killed: (exit status, killed for,
    output, report).

    It is killed for "time", "files", "threads" or "output"; "" if it was not killed. The child can
    start no processes, so when it is dead only files are left.
    """
    received = {output: bytearray(), report: bytearray()}
    killed_for = ""
    ended = False
    next_look = time.monotonic() + POLL_SECONDS
    poll = select.poll()
    pidfd = os.pidfd_open(pid)
    for descriptor in (pidfd, output, report, 0):
        poll.register(descriptor, select.POLLIN)
    while not ended:
        now = time.monotonic()
        if not killed_for and now >= deadline:
            killed_for = "time"
        if not killed_for and now >= next_look:
            killed_for = _excess(pid, folder)
            next_look = time.monotonic() + POLL_SECONDS
        if killed_for:
            os.kill(pid, signal.SIGKILL)
        timeout_ms = 1000 if killed_for else max(0.0, min(deadline, next_look) - now) * 1000
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == pidfd:
                ended = True
            elif descriptor == 0:
                # No request comes before this one's response: the client has exited.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _remove(folder)
                os._exit(0)
            elif not _read(descriptor, received[descriptor]):
                poll.unregister(descriptor)
                killed_for = killed_for or (
                    "output" if len(received[descriptor]) > MAX_OUTPUT_BYTES else ""
                )
    for descriptor, content in received.items():
        # The child is dead: what is left to read is what it wrote, and then the end.
        while _read(descriptor, content):
            pass
        killed_for = killed_for or ("output" if len(content) > MAX_OUTPUT_BYTES else "")
        os.close(descriptor)
    os.close(pidfd)
    texts = [content[:MAX_OUTPUT_BYTES].decode("utf-8", "replace") for content in received.values()]
    return os.waitpid(pid, 0)[1], killed_for, texts[0], texts[1]


def _read(descriptor: int, content: bytearray) -> bool:
    """Read once, one byte more than the limit at most.

    False at the end of the file and above the limit.
    """
    piece = os.read(descriptor, MAX_OUTPUT_BYTES + 1 - len(content))
    content += piece
    return bool(piece) and len(content) <= MAX_OUTPUT_BYTES


def _excess(pid: int, folder: str) -> str:
    """The limit that a program exceeds: "threads", "files" or ""."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        tasks = []
    if len(tasks) > MAX_THREADS:
        return "threads"
    taken = confinement.folder_bytes(folder) + confinement.deleted_bytes(pid, tasks, folder)
    return "files" if taken > MAX_FOLDER_BYTES else ""


def _remove(folder: str) -> None:
    """Delete what a dead program has left, following no link.

    Folders may lack permissions, and be too deep for paths: each is moved up before it is emptied.
    """
    folders = [folder]
    with suppress(OSError):
        for path in folders:
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in list(entries):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)  # else only root may move it
                        folders.append(f"{folder}/{os.urandom(16).hex()}")
                        os.rename(entry.path, folders[-1])
                    else:
                        os.unlink(entry.path)
        for path in reversed(folders):
            os.rmdir(path)


@dataclass
class _Progress:
    """What a report says: stages reached, which checks passed, how many ran.

    `ending`: "memory", "exit", "error" or "".
    """

    stages: list[str]
    passed: list[bool]
    checks_run: int = 0
    ending: str = ""
    error: str = ""


def _read_progress(reported: str, secret: str, num_checks: int) -> _Progress:
    """Read a report, which the program can write too: any bytes give some progress that a program
    can have made.
    """
    progress = _Progress([], [False] * num_checks)
    for line in reported.split("\n"):
        mark, _, rest = line.partition(" ")
        event, _, detail = rest.partition(" ")
        if mark != secret or progress.ending:
            continue
        if event in STAGES[len(progress.stages) :][:1]:
            progress.stages.append(event)
        elif event in ("memory", "exit", "error") and len(progress.stages) < len(STAGES):
            progress.ending = event
            progress.error = _read_detail(detail)
        elif (
            event in ("passed", "failed")
            and len(progress.stages) == len(STAGES)
            and progress.checks_run < num_checks
        ):
            progress.passed[progress.checks_run] = event == "passed"
            progress.checks_run += 1
            progress.error = _read_detail(detail) or progress.error
    return progress


def _read_detail(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return (
        value[: 2 * ERROR_CHARACTERS].encode("utf-8", "replace").decode()
        if isinstance(value, str)
        else ""
    )


def _classify(killed_for: str, exit_status: int, progress: _Progress) -> tuple[str, str]:
    """The status and the error of sandbox.ProgramResult."""
    if killed_for == "threads":
        return "killed", f"more than {MAX_THREADS} threads"
    if killed_for:
        return killed_for, ""
    if os.WIFSIGNALED(exit_status):
        number = os.WTERMSIG(exit_status)
        names = {int(each): each.name for each in signal.Signals}  # real-time signals have none
        return (
            "time" if number == signal.SIGXCPU else "killed",
            f"killed by {names.get(number, f'signal {number}')}",
        )
    if progress.ending in ("memory", "error") and "compiles" not in progress.stages:
        return "syntax", progress.error  # the parser runs out of memory on deeply nested code
    if progress.ending:
        return {"error": "raised"}.get(progress.ending, progress.ending), progress.error
    finished = len(progress.stages) == len(STAGES) and progress.checks_run == len(progress.passed)
    return "done" if finished else "exit", progress.error


def main() -> None:
    """Answer each request on standard input with a line on standard output, until the input closes.

    A request holds code, checks, seconds and memory_mib; a response the fields of
    sandbox.ProgramResult. The first response, without a request, tells what programs cannot do
    here.
    """
    scratch = sys.argv[1]
    # A program gets the standard library only: neither the package's folder nor what was imported
    # of it.
    del sys.path[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmforge"]:
        del sys.modules[name]
    # Objects created before the first fork are the same for every program, and never scanned by the
    # garbage collector.
    gc.collect()
    gc.freeze()
    os.environ.clear()
    # It ends when its input is closed, and deletes what was written.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    confinement.set_visible(False)  # a program of the same user could read its requests
    landlock = confinement.landlock_version() > 0
    probe = {"code": _PROBE, "checks": [], "seconds": 20.0, "memory_mib": 256}
    print(json.dumps(_run_program(probe, scratch, landlock)), flush=True)
    # Bytes, not text: a text decoder would read ahead of what poll() sees.
    buffered = b""
    while piece := os.read(0, 1 << 16):
        buffered += piece
        if buffered.endswith(b"\n"):
            print(json.dumps(_run_program(json.loads(buffered), scratch, landlock)), flush=True)
            buffered = b""
