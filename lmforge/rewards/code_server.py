"""The process that runs programs that a model wrote: it forks a confined child for each program and watches it.

sandbox.py starts it as a bare interpreter and sends it lines of JSON, one program at a time. Besides confinement.py, only the
standard library is imported.
"""

import fcntl
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from typing import Any, NoReturn

from lmforge.rewards import confinement

POLL_SECONDS = 0.05
ERROR_CHARACTERS = 500
# ast.PyCF_ONLY_AST, without importing ast.
ONLY_SYNTAX_TREE = 0x400
# The descriptor on which a child reports its progress.
REPORT_FD = 3
# Of what a program prints, and of its report.
MAX_OUTPUT_BYTES = 1 << 16
MAX_FOLDER_BYTES = 32 << 20
MAX_FOLDER_FILES = 1000


# Run first, confined like all programs: prints as JSON what a program tries in vain.
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
    """Run one program, from the fork to the deletion of its files. Returns the fields of sandbox.ProgramResult."""
    folder = tempfile.mkdtemp(prefix="lmforge-code-", dir=scratch)
    output, report = os.pipe(), os.pipe()
    parent = os.getpid()
    began = time.monotonic()
    # Every line of the report begins with this. The program does not know it, though it could find it out.
    secret = os.urandom(8).hex()
    pid = os.fork()
    if pid == 0:
        try:
            _redirect_descriptors(output[1], report[1])
            _confine(job, folder, parent, landlock)
        except BaseException as error:
            try:
                os.write(REPORT_FD, f"{secret} unconfined {json.dumps(_error_line(error))}\n".encode())
            finally:
                os._exit(1)
        _execute(job, secret)
    os.close(output[1])
    os.close(report[1])
    exit_status, killed_for, printed, reported = _watch(pid, output[0], report[0], began + job["seconds"], folder)
    seconds = time.monotonic() - began
    _remove(folder)
    # (event, " ", its detail) of each line.
    lines = [line.partition(" ")[2].partition(" ") for line in reported.split("\n") if line.startswith(secret)]
    events = [event for event, _, _ in lines]
    details = {event: detail for event, _, detail in lines}
    passed = {detail for event, _, detail in lines if event == "passed"}
    status, reason = _classify(killed_for, exit_status, events, details, len(job["checks"]))
    return {
        "status": status,
        "stages_reached": [event for event in ("parses", "compiles", "runs") if event in events],
        "checks_passed": [str(number) in passed for number in range(len(job["checks"]))],
        "error": reason,
        "output": printed,
        "seconds": seconds,
    }


# --- in the child -----------------------------------------------------------------------------------------------------


def _redirect_descriptors(output: int, report: int) -> None:
    """Leave open /dev/null as 0, `output` as 1 and 2, and `report` as REPORT_FD, and nothing else."""
    null = os.open(os.devnull, os.O_RDONLY)
    # Duplicated above REPORT_FD first: otherwise dup2 could close one of them by taking its number for another.
    null, output, report = (fcntl.fcntl(each, fcntl.F_DUPFD, REPORT_FD + 1) for each in (null, output, report))
    for source, target in ((null, 0), (output, 1), (output, 2), (report, REPORT_FD)):
        os.dup2(source, target)
    os.closerange(REPORT_FD + 1, confinement.MAX_OPEN_FILES)  # the server was started with 0 to 2 only, and opens few


def _confine(job: dict[str, Any], folder: str, parent: int, landlock: bool) -> None:
    """Give up every right except to `folder`, for good."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.chown(folder, confinement.NOBODY, confinement.NOBODY)
        os.chmod(folder, 0o777)
    confinement.set_resource_limits(cpu_seconds=int(job["seconds"]) + 2, memory_bytes=job["memory_mib"] << 20)
    confinement.drop_root()
    confinement.set_no_new_privs(parent)
    if landlock:
        confinement.restrict_files_to(folder)
    confinement.install_seccomp_filter(allow_writes=landlock)


def _execute(job: dict[str, Any], secret: str) -> NoReturn:
    """Run the program, then each check in its global names, and report the progress. Never returns."""
    out_of_memory = f"{secret} memory\n".encode()  # made now: later there may be no memory for it

    def report(event: str, detail: str = "") -> None:
        os.write(REPORT_FD, f"{secret} {event} {detail}\n".encode())

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 (open as long as the process)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
    try:
        compile(job["code"], "<code>", "exec", flags=ONLY_SYNTAX_TREE)  # "return 1" parses, but does not compile
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
                exec(compile(check, f"<check {number + 1}>", "exec", dont_inherit=True), main.__dict__)
            except BaseException as error:
                report("failed", json.dumps(f"check {number + 1}: {_error_line(error)}"))
            else:
                report("passed", str(number))
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)


def _error_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(error)[-1].strip()[:ERROR_CHARACTERS]
    except Exception:  # the program's own exception class may fail to print
        return type(error).__name__


# --- in the parent ----------------------------------------------------------------------------------------------------


def _watch(pid: int, output: int, report: int, deadline: float, folder: str) -> tuple[int, str, str, str]:
    """Read what the child writes until it ends or has to be killed: (exit status, killed for, output, report).

    It is killed for "time", "files" or "output"; "" if it was not killed. The child can start no processes, so when it is
    dead only files are left.
    """
    received = {output: bytearray(), report: bytearray()}
    killed_for, ended, next_look = "", False, time.monotonic() + POLL_SECONDS
    poll = select.poll()
    pidfd = os.pidfd_open(pid)
    for descriptor in (pidfd, output, report, 0):
        poll.register(descriptor, select.POLLIN)
    while not ended:
        now = time.monotonic()
        if not killed_for and now >= deadline:
            killed_for = "time"
        if not killed_for and now >= next_look:
            killed_for = "files" if _exceeds_quota(folder) else ""
            next_look = time.monotonic() + POLL_SECONDS
        if killed_for:
            os.kill(pid, signal.SIGKILL)
        timeout_ms = 1000 if killed_for else max(0.0, min(deadline, next_look) - now) * 1000
        for descriptor, _ in poll.poll(timeout_ms):
            if descriptor == pidfd:
                ended = True
            elif descriptor == 0:  # no request comes before this one's response: the client has exited
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _remove(folder)
                os._exit(0)
            elif not _read(descriptor, received[descriptor]):
                poll.unregister(descriptor)
                killed_for = killed_for or ("output" if len(received[descriptor]) > MAX_OUTPUT_BYTES else "")
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
    """Read once, one byte more than the limit at most. False at the end of the file and above the limit."""
    piece = os.read(descriptor, MAX_OUTPUT_BYTES + 1 - len(content))
    content += piece
    return bool(piece) and len(content) <= MAX_OUTPUT_BYTES


def _exceeds_quota(folder: str) -> bool:
    """Whether the folder holds more than a program may write."""
    files = size = 0
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > MAX_FOLDER_FILES or size > MAX_FOLDER_BYTES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            continue  # deleted meanwhile, or made unreadable by the program
    return False


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # Folders without permissions, or too deep for Python.
        for command in (["/bin/chmod", "-R", "u+rwx", folder], ["/bin/rm", "-rf", folder]):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _classify(
    killed_for: str, exit_status: int, events: list[str], details: dict[str, str], num_checks: int
) -> tuple[str, str]:
    """The status and the error of sandbox.ProgramResult."""
    if killed_for:
        return killed_for, ""
    if os.WIFSIGNALED(exit_status):
        number = os.WTERMSIG(exit_status)
        names = {int(each): each.name for each in signal.Signals}  # real-time signals have none
        return "time" if number == signal.SIGXCPU else "killed", f"killed by {names.get(number, f'signal {number}')}"
    if "unconfined" in events:
        return "unconfined", json.loads(details["unconfined"])
    if "memory" in events:
        return "memory" if "compiles" in events else "syntax", ""  # the parser runs out of it on deeply nested code
    if "error" in events:
        return "raised" if "compiles" in events else "syntax", json.loads(details["error"])
    finished = "runs" in events and events.count("passed") + events.count("failed") >= num_checks
    return "done" if finished else "exit", json.loads(details.get("failed", '""'))


def main() -> None:
    """Answer each request on standard input with a line on standard output, until the input closes.

    A request holds code, checks, seconds and memory_mib; a response the fields of sandbox.ProgramResult. The
    first response, without a request, tells what programs cannot do here.
    """
    scratch = sys.argv[1]
    del sys.path[0]  # the package's folder: a program gets the standard library only
    # What was made before the first fork is the same for every program, and never scanned by the garbage collector.
    gc.collect()
    gc.freeze()
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
