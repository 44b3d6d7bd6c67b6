"""The process that runs what a model wrote: a bare interpreter that forks a confined child for each program and watches it.

It is started by sandbox.py, which asks it by lines of JSON, one program at a time. Only the standard library is imported.
"""

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
from pathlib import Path
from typing import Any, NoReturn

from lmforge.rewards import confinement as confine

POLL_SECONDS = 0.05
ERROR_CHARACTERS = 500
# The descriptor by which a child says how far it came.
REPORT_FD = 3
MAX_FOLDER_BYTES = 32 << 20
MAX_FOLDER_FILES = 1000


def serve(scratch: str) -> None:
    """Answer on standard output what is asked on standard input, until it closes. The first line says what is shut off."""
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    landlock = confine.landlock_version() > 0
    _send_result(
        _run_program(
            {"code": _PROBE, "checks": [], "seconds": 20.0, "memory_mib": 256, "output_bytes": 4096}, scratch, landlock
        )
    )
    # Bytes, not text: a decoder would read ahead of what select() sees.
    buffered = b""
    while piece := os.read(0, 1 << 16):
        buffered += piece
        if buffered.endswith(b"\n"):
            _send_result(_run_program(json.loads(buffered), scratch, landlock))
            buffered = b""


def _send_result(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


# What a program could do here if it tried: printed as JSON by the first child, in the confinement that all others get.
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
    """One program from fork to the last of its files."""
    folder = tempfile.mkdtemp(prefix="lmforge-code-", dir=scratch)
    output, told = os.pipe(), os.pipe()
    parent = os.getpid()
    began = time.monotonic()
    # A line of the report is one that begins with this; the program does not know it, though it could find it out.
    secret = os.urandom(8).hex()
    pid = os.fork()
    if pid == 0:
        try:
            _redirect_descriptors(output[1], told[1])
            _confine(job, folder, parent, landlock)
        except BaseException as error:
            try:
                os.write(REPORT_FD, f"{secret} unconfined {json.dumps(_error_line(error))}\n".encode())
            finally:
                os._exit(1)
        _execute(job, secret)
    os.close(output[1])
    os.close(told[1])
    watched = _watch(pid, output[0], told[0], began + job["seconds"], job["output_bytes"], folder)
    spent = time.monotonic() - began
    _remove(folder)
    return _build_result(watched, secret, len(job["checks"]), spent)


# --- in the child -----------------------------------------------------------------------------------------------------


def _redirect_descriptors(output: int, report: int) -> None:
    """Nothing open but no input, `output` as 1 and 2, and `told` as TOLD."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    # Away from 0 to 3 first, or the one would be closed by the other's taking its place.
    nothing, output, report = (os.dup(_dup_above_report_fd(at)) for at in (nothing, output, report))
    for at, place in ((nothing, 0), (output, 1), (output, 2), (report, REPORT_FD)):
        os.dup2(at, place)
    os.closerange(REPORT_FD + 1, confine.MAX_OPEN_FILES)  # the server was started with none but 0 to 2, and opens few


def _dup_above_report_fd(at: int) -> int:
    while at <= REPORT_FD:
        at = os.dup(at)
    return at


def _confine(job: dict[str, Any], folder: str, parent: int, landlock: bool) -> None:
    """Give up every right but to `folder`: there is no way back."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    os.chdir(folder)
    if os.geteuid() == 0:
        os.chown(folder, confine.NOBODY, confine.NOBODY)
        os.chmod(folder, 0o777)
    confine.set_resource_limits(cpu_seconds=int(job["seconds"]) + 2, memory_bytes=job["memory_mib"] << 20)
    confine.drop_root()
    confine.set_no_new_privs(parent)
    if landlock:
        confine.restrict_files_to(folder)
    confine.install_seccomp_filter(allow_writes=landlock)


def _execute(job: dict[str, Any], secret: str) -> NoReturn:
    """Run the program, then each check in the names it left, and say how far it came. Never returns."""
    out_of_memory = f"{secret} memory\n".encode()  # made beforehand, for there will be no room

    def tell(word: str, detail: str = "") -> None:
        os.write(REPORT_FD, f"{secret} {word} {detail}\n".encode())

    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace")  # noqa: SIM115 (it lives as long as the process)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
    try:
        compile(job["code"], "<code>", "exec", flags=0x400)  # to a syntax tree: "return 1" parses, but does not compile
        tell("parses")
        compiled = compile(job["code"], "<code>", "exec", dont_inherit=True)
        tell("compiles")
        exec(compiled, main.__dict__)
        sys.stdout.flush()
        tell("runs")
    except MemoryError:
        os.write(REPORT_FD, out_of_memory)
    except SystemExit:
        tell("exit")
    except BaseException as error:
        tell("error", json.dumps(_error_line(error)))
    else:
        for number, check in enumerate(job["checks"]):
            _check(check, number, main, tell)
    try:
        sys.stdout.flush()
    finally:
        os._exit(0)


def _check(check: str, number: int, main: types.ModuleType, tell: Any) -> None:
    try:
        exec(compile(check, f"<check {number + 1}>", "exec", dont_inherit=True), main.__dict__)
    except BaseException as error:
        tell("failed", json.dumps(f"check {number + 1}: {_error_line(error)}"))
    else:
        tell("passed", str(number))


def _error_line(error: BaseException) -> str:
    try:
        return traceback.format_exception_only(error)[-1].strip()[:ERROR_CHARACTERS]
    except Exception:  # the program's own class may not let itself be printed
        return type(error).__name__


# --- in the parent ----------------------------------------------------------------------------------------------------


def _watch(pid: int, output: int, report: int, deadline: float, output_limit: int, folder: str) -> dict[str, Any]:
    """Read what the child says until it ends or has to: {"status", "output", "told", "cut": why it was killed, if it was}.

    It has no children of its own, so when it is dead nothing is left but files.
    """
    pidfd = os.pidfd_open(pid)
    kept = {output: b"", report: b""}
    room = {output: output_limit, report: 1 << 16}
    cut, over, next_look = "", False, time.monotonic() + POLL_SECONDS
    poll = select.poll()
    for at in (pidfd, output, report, 0):
        poll.register(at, select.POLLIN)
    while not over:
        now = time.monotonic()
        if not cut and now >= deadline:
            cut = "time"
        if not cut and now >= next_look:
            cut = "files" if _exceeds_quota(folder) else ""
            next_look = time.monotonic() + POLL_SECONDS
        if cut:
            os.kill(pid, signal.SIGKILL)
        for at, _ in poll.poll(max(0.0, min(deadline, next_look) - now) * 1000 if not cut else 1000):
            if at == pidfd:
                over = True
            elif at == 0:  # the next program is not sent before this one's answer: it is the end of whoever asked
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _remove(folder)
                os._exit(0)
            elif not _read(at, kept, room):
                poll.unregister(at)
                cut = cut or ("output" if room[at] == 0 else "")
    for at in kept:
        # Whoever could write is dead: what is left to read is what was written, and then the end.
        while room[at] > 0 and _read(at, kept, room):
            pass
        if room[at] == 0:
            cut = cut or "output"
        os.close(at)
    os.close(pidfd)
    return {"status": os.waitpid(pid, 0)[1], "output": kept[output], "told": kept[report], "cut": cut}


def _read(at: int, kept: dict[int, bytes], room: dict[int, int]) -> bool:
    """Take a piece into `kept`; False at the end of it, or of its room."""
    piece = os.read(at, min(room[at] + 1, 1 << 16))
    kept[at] += piece[: room[at]]
    room[at], full = room[at] - len(piece), len(piece) > room[at]
    if full:
        room[at] = 0
    return bool(piece) and not full


def _exceeds_quota(folder: str) -> bool:
    """Whether the folder holds more than a program may write. Stops counting as soon as it does."""
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
            continue  # gone since, or made unreadable by the program
    return False


def _remove(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # Folders that may not be read, or too deep for Python: these two go where rmtree does not.
        for words in (["/bin/chmod", "-R", "u+rwx", folder], ["/bin/rm", "-rf", folder]):
            subprocess.run(words, stderr=subprocess.DEVNULL, check=False)


def _build_result(watched: dict[str, Any], secret: str, checks: int, seconds: float) -> dict[str, Any]:
    """What happened, in the words of sandbox.Outcome."""
    said = [
        line.partition(" ")[2] for line in watched["told"].decode("utf-8", "replace").split("\n") if line.startswith(secret)
    ]
    words = [line.partition(" ")[0] for line in said]
    details = {word: line.partition(" ")[2] for word, line in zip(words, said, strict=True)}
    reached = [word for word in ("parses", "compiles", "runs") if word in words]
    passed = {line for line in said if line.startswith("passed ")}
    error, status = "", watched["status"]
    ended = watched["cut"]
    if not ended and os.WIFSIGNALED(status):
        ended = "time" if os.WTERMSIG(status) == signal.SIGXCPU else "killed"
        error = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    elif not ended and "unconfined" in words:
        ended, error = "unconfined", json.loads(details["unconfined"])
    elif not ended and "memory" in words:
        ended = "memory" if "compiles" in words else "syntax"  # the parser says so of what is nested too deeply
    elif not ended and "error" in words:
        ended = "raised" if "compiles" in words else "syntax"
        error = json.loads(details["error"])
    elif not ended:
        finished = "runs" in words and words.count("passed") + words.count("failed") >= checks
        ended = "done" if finished else "exit"
        error = json.loads(details.get("failed", '""'))
    return {
        "ended": ended,
        "reached": reached,
        "passed": [f"passed {number}" in passed for number in range(checks)],
        "error": error,
        "output": watched["output"].decode("utf-8", "replace"),
        "seconds": seconds,
    }


def main() -> None:
    """`serve`, with what is the same for every program made before the first fork and never looked at by the collector."""
    del sys.path[0]  # ours: a program gets the standard library
    confine.fill_caches()
    gc.collect()
    gc.freeze()
    serve(str(Path(sys.argv[1])))
