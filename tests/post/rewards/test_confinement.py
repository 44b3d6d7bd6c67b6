"""What confined programs try against other processes, the limits and the server that watches
them.
"""

import errno
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from lmforge.post.rewards.code_server import MAX_FOLDER_BYTES, STAGES
from lmforge.post.rewards.confinement import DENIED_CALLS, WRITE_CALLS, architecture
from lmforge.post.rewards.sandbox import ProgramResult, Sandbox
from tests.seeds import fresh_random
from tests.support.tools import syscall_header


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as opened:
        yield opened


# --- the filter of system calls, without Landlock -------------------------------------------------

# `confine` is "filtered" or "free"; `victim` is a process of the same user.
PRELUDE = """
import contextlib, ctypes, fcntl, json, os, socket, struct, sys, tempfile, threading
from lmforge.post.rewards import confinement
confine, victim = sys.argv[1], int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
one, other = socket.socketpair()
file, (pipe, _), folder = tempfile.TemporaryFile(), os.pipe(), os.open(".", os.O_RDONLY)
room = ctypes.create_string_buffer(4096)
if confine == "filtered":
    confinement.set_no_new_privs(os.getppid())
    confinement.install_seccomp_filter(allow_writes=True)
"""


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user, in a group of its own."""
    waits = "import time\nprint(1, flush=True)\ntime.sleep(600)"
    command = [sys.executable, "-S", "-c", waits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def run_script(script: str, confine: str, victim: "subprocess.Popen[bytes]") -> Any:
    command = [sys.executable, "-c", PRELUDE + script, confine, str(victim.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout or "null")


@pytest.mark.parametrize(
    "set_owner",
    [
        "fcntl.ioctl(one, 0x8901, struct.pack('i', victim))",  # FIOSETOWN
        "fcntl.ioctl(one, 0x8902, struct.pack('i', victim))",  # SIOCSPGRP
        "fcntl.ioctl(one, 0x8901, struct.pack('i', -os.getpgid(victim)))",
        "fcntl.fcntl(one, 8, victim)",  # F_SETOWN
        "fcntl.fcntl(one, 15, struct.pack('ii', 1, victim))",  # F_SETOWN_EX
        "fcntl.fcntl(one, 15, struct.pack('ii', 0, victim))",
    ],
)
@pytest.mark.parametrize(
    "switch",
    ["fcntl.fcntl(one, 4, os.O_RDWR | 0o20000)", "fcntl.ioctl(one, 0x5452, bytes([1, 0, 0, 0]))"],
)
def test_a_descriptor_cannot_have_signals_sent_to_another_process(
    victim: "subprocess.Popen[bytes]", set_owner: str, switch: str
) -> None:
    """Without the filter the same program kills the victim."""
    script = f"""
for attempt in (lambda: {set_owner}, lambda: fcntl.fcntl(one, 10, 9), lambda: {switch}):
    try:
        attempt()
        assert confine == "free"
    except PermissionError:
        assert confine == "filtered"
other.send(b"x")
"""
    run_script(script, "filtered", victim)
    assert victim.poll() is None
    run_script(script, "free", victim)
    assert victim.wait(30) == -signal.SIGKILL


# Without the filter none of these fails for lack of permission on a usual machine.
ATTEMPTS = {
    "send a signal": "libc.kill(victim, 0)",
    "send a signal to a thread": "call(234, 131, victim, victim, 0)",
    "send a signal to a group": "libc.kill(0, 0)",
    "limit another process": "call(302, 261, victim, 7, None, room)",
    "look at a process by a descriptor": "call(434, 434, victim, 0)",
    "put off who opens a file": "libc.fcntl(file.fileno(), 1024, 2)",  # F_SETLEASE
    "be told of changes in a folder": "libc.fcntl(folder, 1026, 0)",  # F_NOTIFY
    "enlarge a pipe": "libc.fcntl(pipe, 1031, 65536)",
    "choose the signal of a descriptor": "libc.fcntl(pipe, 10, 10)",
    "lock a file that others use": "libc.flock(file.fileno(), 1)",
    "allocate disk": "libc.fallocate(file.fileno(), 1, 0, 4096)",
    "look at a file's flags": "libc.ioctl(file.fileno(), 0x80086601, room)",
    "type into a terminal": "libc.ioctl(pipe, 0x5412, room)",
    "have a timer send signals": "call(222, 107, 0, None, room)",
    "watch files": "libc.inotify_init1(0)",
    "keep memory in a file without a folder": "libc.memfd_create(b'x', 0)",
    "get a table of descriptors of its own": "call(436, 436, 1000, 1000, 2)",
    "start a thread with descriptors of its own": "call(56, 220, 0x10000, 0, 0, 0, 0)",
    "start a process": "call(56, 220, 0x10000 | 17, 0, 0, 0, 0)",
    "start a process in the new way": "call(435, 435, None, 0)",
    "remove semaphores": "libc.semctl(1 << 30, 0, 0)",
    "use semaphores": "libc.semop(1 << 30, room, 1)",
    "send a message to a queue": "libc.msgsnd(1 << 30, room, 1, 0)",
    "remove a queue": "call(241, 181, b'lmforge-none')",
    "pass descriptors": "libc.sendmsg(pipe, room, 0)",
    "send to any socket": "libc.socketpair(1, 2, 0, room)",
    "use other kinds of sockets": "libc.socketpair(2, 1, 0, room)",
    "change the scheduling of others": "call(203, 122, victim, 0, None)",
    "move pages between files": "libc.splice(pipe, None, pipe, None, 1, 0)",
    "change the user": "call(117, 147, -1, -1, -1)",
    "share less": "call(272, 97, 0)",
}
# Not tried without the filter: one harms the tests, the others are refused in containers.
UNTRIED = ("send a signal to a group", "start a process in the new way", "share less")
CALL = """
def call(*numbers_and_arguments):
    first, second, *arguments = numbers_and_arguments
    number = (first, second)[confinement.architecture()]
    return libc.syscall(ctypes.c_long(number), *(ctypes.c_long(x) if isinstance(x, int) else x for x in arguments))
"""


def test_what_reaches_others_or_escapes_the_limits_is_refused_by_the_filter_alone(
    victim: "subprocess.Popen[bytes]",
) -> None:
    script = f"""{CALL}
found = {{}}
for name, attempt in json.loads({json.dumps(json.dumps(ATTEMPTS))}).items():
    if confine == "free" and name in {UNTRIED!r}:
        continue
    ctypes.set_errno(0)
    found[name] = ctypes.get_errno() if eval(attempt) == -1 else 0
print(json.dumps(found))
"""
    refused = {errno.EPERM, errno.ENOSYS}
    filtered, free = (run_script(script, confine, victim) for confine in ("filtered", "free"))
    assert {name: number for name, number in filtered.items() if number not in refused} == {}
    assert {name: number for name, number in free.items() if number in refused} == {}


def test_the_filter_permits_what_libraries_do_with_descriptors_and_threads(
    victim: "subprocess.Popen[bytes]",
) -> None:
    script = f"""{CALL}
for command in (0x541B, 0x5421, 0x5450, 0x5451):  # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    fcntl.ioctl(one, command, struct.pack("i", 1))
for descriptor in (0, 1, one.fileno()):
    os.isatty(descriptor) or os.get_inheritable(descriptor)
try:
    fcntl.ioctl(pipe, 0x5401, bytes(256))  # TCGETS
except OSError as error:
    assert error.errno == 25, error  # not a terminal
os.set_blocking(pipe, False)
os.set_inheritable(pipe, True)
fcntl.lockf(file, fcntl.LOCK_EX)
fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 0)
os.closerange(900, 1000)
thread = threading.Thread(target=print, args=["true"])
thread.start()
thread.join()
"""
    assert run_script(script, "filtered", victim) is True


@pytest.mark.needs("the kernel's headers")
def test_every_number_of_a_denied_call_is_that_of_its_name() -> None:
    header = syscall_header()
    assert header is not None
    words = [
        line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR")
    ]
    numbers = {
        word[1].removeprefix("__NR3264_").removeprefix("__NR_"): word[2]
        for word in words
        if word[2:3] and word[2].isdigit()
    }
    assert len(numbers) > 250
    for name, columns in (DENIED_CALLS | WRITE_CALLS).items():
        assert numbers.get(name, "-1") == str(columns[architecture()]), name


# --- the limits -----------------------------------------------------------------------------------

LARGE = 7 << 20
WRITE = """
import ctypes, mmap, os, tempfile, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def fill(descriptor):
    for _ in range(7):
        os.write(descriptor, bytes(1 << 20))
    return descriptor
def create(name, flags=os.O_CREAT):
    return fill(os.open(name, os.O_RDWR | flags, 0o600))
def deleted(name="f"):
    descriptor = create(name)
    os.unlink(name)
    return descriptor
def temporary():
    file = tempfile.TemporaryFile(dir=".")
    fill(file.fileno())
    return file
def only_path(name="f"):
    descriptor, path = create(name), os.open(name, os.O_PATH)
    os.close(descriptor)
    os.unlink(name)
    return path
def replaced(name="f"):
    descriptor = create(name)
    os.replace(tempfile.mkstemp(dir=".")[1], name)
    return descriptor
held = []
"""
IN_A_THREAD = """
def work():
    held = [deleted() for _ in range(6)]
    time.sleep(600)
threading.Thread(target=work).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
MAPPED = "for _ in range(6):\n    descriptor = deleted()\n    {}\n    os.close(descriptor)"
DEEP = "for _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)\nopen('f', 'w')"
HOLDERS = {
    "open": "held = [deleted() for _ in range(6)]",
    "by its path only": "held = [only_path() for _ in range(6)]",
    "replaced": "held = [replaced() for _ in range(6)]",
    "without a name from the start": "held = [create('.', os.O_TMPFILE) for _ in range(6)]",
    "of the library": "held = [temporary() for _ in range(6)]",
    "mapped": MAPPED.format("assert libc.mmap(None, 4096, 1, 2, descriptor, 0)"),
    "mapped by Python": MAPPED.format("held.append(mmap.mmap(descriptor, 4096))"),
    "while the first thread has ended": IN_A_THREAD,
    "in a folder that cannot be read": (
        "os.mkdir('d', 0o300)\nheld = [create(f'd/{n}') for n in range(6)]"
    ),
    "in a folder too deep to look at": DEEP,
}


@pytest.mark.needs("Landlock")
@pytest.mark.parametrize("program", HOLDERS.values(), ids=HOLDERS)
def test_files_count_wherever_they_are_held(sandbox: Sandbox, program: str) -> None:
    assert MAX_FOLDER_BYTES < 6 * LARGE
    result = sandbox.run(f"{WRITE}{program}\ntime.sleep(600)", seconds=60.0)
    assert (result.status, result.error) == ("files", ""), result


@pytest.mark.needs("Landlock")
def test_deleted_files_within_the_limit_are_no_violation(sandbox: Sandbox) -> None:
    few = "held = [deleted() for _ in range(4)]\ncopies = [os.dup(held[0]) for _ in range(9)]"
    result = sandbox.run(f"{WRITE}{few}\ntime.sleep(0.3)")
    assert result.status == "done", result


def test_threads_that_take_no_memory_are_limited_too(sandbox: Sandbox) -> None:
    start = "threading.Thread(target=time.sleep, args=[99]).start()"
    many = (
        "import threading, time\nthreading.stack_size(1 << 16)\nfor _ in range(300):\n   "
        f" {start}\ntime.sleep(99)"
    )
    result = sandbox.run(many, seconds=60.0, memory_mib=1 << 16)
    assert (result.status, result.error) == ("killed", "more than 256 threads")


# --- forged reports -------------------------------------------------------------------------------

FORGE = """
import os, sys
frame = sys._getframe()
while "secret" not in frame.f_locals:
    frame = frame.f_back
secret = frame.f_locals["secret"].encode()
def forge(*lines):
    for line in lines:
        os.write(3, secret + b" " + line + b"\\n")
"""
FORGED_LINES = [
    "parses",
    "compiles",
    "runs",
    "passed",
    "failed",
    "error",
    "exit",
    "memory",
    "unconfined",
    "",
    'unconfined "no"',
    "unconfined {",
    "error {",
    "error " + "[" * 3000,
    'error "\\ud800"',
    "failed nonsense",
    "failed 1",
    "passed 0",
    "passed -1",
    "passed 99999999999999999999",
    "passed x",
    "error " + "9" * 6000,
    "done",
    "confined",
    "\0",
    "é",
]


def check_valid(result: ProgramResult, checks: int) -> None:
    assert result.stages_reached == STAGES[: len(result.stages_reached)]
    assert [type(each) for each in result.checks_passed] == [bool] * checks
    (result.error + result.output).encode()  # no half of a surrogate pair


def test_whatever_a_program_reports_about_itself_the_result_is_valid_and_the_server_continues(
    sandbox: Sandbox,
) -> None:
    draw: random.Random = fresh_random()
    ends = [
        "",
        "os._exit(0)",
        "1 / 0",
        "os.close(3)",
        "os._exit = print",
        "os.write = None",
        "os.kill(os.getpid(), 9)",
    ]
    for _ in range(40):
        lines = [line.encode() for line in draw.choices(FORGED_LINES, k=draw.randint(0, 8))]
        raw = draw.choice(
            [
                b"",
                draw.randbytes(draw.randint(0, 3000)),
                b"x" * draw.choice([10, 60_000, 70_000]),
                b"\n" * 500,
            ]
        )
        program = (
            f"{FORGE}forge(*{lines!r})\nos.write({draw.choice([3, 3, 2])},"
            f" {raw!r})\n{draw.choice(ends)}"
        )
        result = sandbox.run(program, checks=["pass", "1 / 0"])
        check_valid(result, 2)
    assert sandbox.run("x = 1", checks=["assert x == 1"]).checks_passed == (True,)


@pytest.mark.parametrize(
    "attack",
    [
        "forge(b'unconfined \"forged\"')",
        "os.write(3, b'unconfined \"forged\"\\n')",
        "forge(b'error {', b'memory')",
        "os.write(4, b'\"forged\"')",
        "os.closerange(0, 64)",
        "os._exit = lambda status: None\nos.closerange(0, 64)",
        "import json\njson.dumps = lambda *a: 1 / 0\nraise OSError",
        "sys._getframe(1).f_globals['REPORT_FD'] = 77\nraise OSError",
    ],
)
def test_a_program_cannot_say_that_it_was_not_confined(sandbox: Sandbox, attack: str) -> None:
    """That would end the training."""
    result = sandbox.run(f"{FORGE}{attack}", checks=["pass"])
    assert result.status in ("done", "exit", "raised", "killed"), result
    check_valid(result, 1)
