"""Generated code always has a clear result in limited time, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lmforge.core.errors import UserError
from lmforge.post.rewards.builtin import _program_reward as program_reward
from lmforge.post.rewards.sandbox import ProgramResult, Sandbox

SECONDS = 1.0


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A sandbox with a scratch folder of its own, so that folders of other sandboxes do not count
    as left behind.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
        with Sandbox() as opened:
            yield opened


def leftovers() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("lmforge-code-*"))


@pytest.fixture(autouse=True)
def nothing_left(sandbox: Sandbox) -> Iterator[None]:
    """After a test, the programs' folders are deleted, and the server has no children."""
    yield
    assert sandbox.run("print('well')", seconds=60.0).output == "well\n"
    assert leftovers() == []
    # Which skips processes that end meanwhile.
    children = psutil.process_iter(["pid", "ppid", "cmdline"])
    results = [child.info for child in children]
    servers = {
        each["pid"]
        for each in results
        if each["ppid"] == os.getpid() and "code_server" in str(each["cmdline"])
    }
    assert servers
    assert not [each for each in results if each["ppid"] in servers]


def test_each_check_is_passed_or_failed(sandbox: Sandbox) -> None:
    checks = [
        "assert double(2) == 4",
        "assert double(2) == 5",
        "assert double('a') == 'aa'",
        "double()",
        "this is no code",
    ]
    result = sandbox.run("def double(x):\n    return 2 * x\nprint('dé', double(3))", checks=checks)
    assert result.status == "done"
    assert result.stages_reached == ("parses", "compiles", "runs")
    assert result.checks_passed == (True, False, True, False, False)
    assert result.output == "dé 6\n"
    assert "check 5: SyntaxError" in result.error


def test_workers_share_the_programs_and_results_come_in_their_order() -> None:
    with Sandbox(2) as pair:
        results = pair.run_all(
            [f"x = {number}" for number in range(8)],
            [[f"assert x == {number}"] for number in range(8)],
        )
    assert [result.checks_passed for result in results] == [(True,)] * 8


def test_without_time_left_a_program_is_not_begun_and_earns_nothing(sandbox: Sandbox) -> None:
    for result in sandbox.run_all(["x = 1"] * 2, [["assert x == 1"], []], total_seconds=0.0):
        assert (result.status, result.stages_reached, any(result.checks_passed)) == (
            "time",
            (),
            False,
        )
        assert program_reward(result) == 0.0


@pytest.mark.parametrize(
    ("code", "reached", "error"),
    [
        ("def f(:", (), "SyntaxError"),
        ("x = 1\0", (), "null byte"),
        ("-" * 100_000 + "1", (), ""),
        ("x = '\ud800'", (), "UnicodeEncodeError"),
        ("return 1", ("parses",), "SyntaxError: 'return' outside function"),
    ],
)
def test_code_that_is_not_a_program_is_distinguished_from_one_that_fails(
    sandbox: Sandbox, code: str, reached: tuple[str, ...], error: str
) -> None:
    result = sandbox.run(code)
    assert (result.status, result.stages_reached) == ("syntax", reached)
    assert error in result.error


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("1 / 0", "raised", "ZeroDivisionError: division by zero"),
        ("def f():\n    f()\nf()", "raised", "RecursionError"),
        ("class E(Exception):\n    def __str__(self):\n        raise self\nraise E", "raised", "E"),
        ("import sys\nsys.exit(0)", "exit", ""),
        ("import os\nos._exit(0)", "exit", ""),
        ("import ctypes\nctypes.string_at(0)", "killed", "SIGSEGV"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
        ("import os\nos.kill(os.getpid(), 40)", "killed", "killed by signal 40"),
        ("while True:\n    pass", "time", ""),
        ("import time\ntime.sleep(1000)", "time", ""),
        (
            "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, 1)\ntime.sleep(1000)",
            "time",
            "",
        ),
        ("import os\nos.closerange(0, 100)\nwhile True:\n    pass", "time", ""),
        ("x = bytearray(1 << 40)", "memory", ""),
        ("x = []\nwhile True:\n    x.append(bytearray(1 << 24))", "memory", ""),
        ("while True:\n    print('y' * 1000)", "output", ""),
        ("import os\nwhile True:\n    os.fork()", "raised", "PermissionError"),
        (
            "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)",
            "raised",
            "PermissionError",
        ),
        ("import os\nos.execv('/bin/sh', ['sh'])", "raised", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 9)", "raised", "PermissionError"),
        ("import os\nos.kill(-1, 9)", "raised", "PermissionError"),
        (
            (
                "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep,"
                " args=[99]).start()"
            ),
            "raised",
            "new",
        ),
        ("open('large', 'w').truncate(1 << 40)", "raised", "OSError"),
        ("n = 0\nwhile True:\n    open(str(n), 'w').write('x' * 1000000)\n    n += 1", "files", ""),
    ],
)
def test_each_violation_has_its_status_in_bounded_time(
    sandbox: Sandbox, code: str, status: str, error: str
) -> None:
    began = time.monotonic()
    result = sandbox.run(
        code, checks=["pass"], seconds=SECONDS if status == "time" else 20.0, memory_mib=256
    )
    assert result.status == status, result
    assert error in result.error
    assert result.checks_passed == (False,)
    # What never ends is ended at its time, and everything else ends by itself; 20 more on a busy
    # machine.
    assert time.monotonic() - began < 20 + 20
    assert len(result.output) <= 1 << 16


def test_a_program_may_print_as_much_as_is_allowed_and_no_byte_more(sandbox: Sandbox) -> None:
    for characters, status in ((1 << 16, "done"), ((1 << 16) + 1, "output")):
        result = sandbox.run(f"import sys\nsys.stdout.write('x' * {characters})")
        assert (result.status, len(result.output)) == (status, 1 << 16)


def test_a_program_cannot_start_a_process_that_outlives_it(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    mark = f"sleep {90_000 + os.getpid()}"
    code = (
        f"import os\nos.system('setsid {mark} &')\nos.posix_spawn('/bin/sh', ['sh', '-c', '{mark}"
        " &'], {})"
    )
    assert sandbox.run(code).status == "raised"
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if " ".join(p.info["cmdline"] or []) == mark
    ]


def test_no_connection_reaches_a_port_that_listens(sandbox: Sandbox, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
    ):
        port = listening.getsockname()[1]
        named.bind(str(tmp_path / "socket"))
        attempts = [
            f"socket.create_connection(('127.0.0.1', {port}), timeout=2)",
            f"urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
            (
                "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x',"
                f" {str(tmp_path / 'socket')!r})"
            ),
            # io_uring can open and connect sockets by itself: its setup is call 425 on every
            # architecture.
            (
                "ctypes.CDLL(None, use_errno=True).syscall(425, 1, bytes(120)) >= 0 or"
                " throw(OSError(ctypes.get_errno(), ''))"
            ),
        ]
        for attempt in attempts:
            code = (
                "import ctypes, socket, urllib.request\ndef throw(error):\n    raise"
                f" error\n{attempt}"
            )
            result = sandbox.run(code)
            assert result.status == "raised", attempt
            assert "Error" in result.error
        listening.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listening.accept()
        named.setblocking(False)
        with pytest.raises(BlockingIOError):
            named.recv(1)


def test_a_program_writes_files_in_its_own_folder_only(sandbox: Sandbox, tmp_path: Path) -> None:
    outside, kept = tmp_path / "outside", tmp_path / "kept"
    kept.write_text("kept")
    os.chmod(tmp_path, 0o777)
    os.chmod(kept, 0o666)
    inside = (
        "import os, tempfile\nopen('f', 'w').write('a')\nos.mkdir('d')\nos.rename('f',"
        " 'd/f')\nprint(open('d/f').read())"
    )
    assert sandbox.run(inside).output == "a\n"
    for code in (
        f"open({str(outside)!r}, 'w')",
        f"open('../{outside.name}', 'w')",
        f"import os\nos.mkdir({str(outside)!r})",
        f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nopen('link/outside', 'w')",
        f"import os\nos.link({str(kept)!r}, 'link')",
        f"import os\nos.unlink({str(kept)!r})",
        f"import os\nos.rename({str(kept)!r}, 'mine')",
        f"import os\nos.truncate({str(kept)!r}, 0)",
        f"import os\nos.chmod({str(kept)!r}, 0)",
        f"import os\nos.utime({str(kept)!r}, (0, 0))",
    ):
        result = sandbox.run(code)
        assert result.status == "raised", code
        # Landlock calls a link or a move out of or into the folder one between devices.
        assert "PermissionError" in result.error or "Invalid cross-device link" in result.error
    assert not outside.exists()
    assert not (Path(tempfile.gettempdir()) / outside.name).exists()
    assert kept.read_text() == "kept"
    assert kept.stat().st_mode & 0o777 == 0o666
    assert kept.stat().st_mtime > 1


@pytest.mark.parametrize("mode", [os.O_RDONLY, os.O_WRONLY | os.O_RDWR])
def test_the_system_call_filter_alone_refuses_truncation_while_opening_to_read(
    tmp_path: Path, mode: int
) -> None:
    """Landlock before its third version permits it; here there is no Landlock at all."""
    (tmp_path / "kept").write_text("kept")
    filtered = "confinement.set_no_new_privs(os.getppid())\nconfinement.install_seccomp_filter(allow_writes=True)"
    attempt = (
        "import os, sys\nfrom lmforge.post.rewards import confinement\nos.open(sys.argv[1],"
        " int(sys.argv[2]))"
    )
    for flags, error in ((mode | os.O_TRUNC, "PermissionError"), (mode, "")):
        code = attempt.replace("\nos.open", f"\n{filtered}\nos.open")
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "kept", str(flags)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert error in done.stderr
        assert bool(error) == bool(done.returncode), done.stderr
        assert (tmp_path / "kept").read_text() == "kept"


def test_a_program_that_cannot_be_confined_is_refused_and_not_run(sandbox: Sandbox) -> None:
    """More memory than a limit can be set to."""
    with pytest.raises(UserError, match="generated code cannot be confined here: OverflowError"):
        sandbox.run("print('run')", memory_mib=1 << 60)


def test_ranks_on_one_machine_share_its_cores() -> None:
    code = (
        "from lmforge.post.rewards.sandbox import shared_sandbox\nprint(shared_sandbox().workers)"
    )
    cores = len(os.sched_getaffinity(0))
    for ranks, workers in ((1, cores), (cores, 1), (2 * cores, 1)):
        local = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place = {**local, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
        variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
        assert (
            subprocess.check_output([sys.executable, "-c", code], env=variables, timeout=120)
            == b"%d\n" % workers
        )


@pytest.mark.needs("Landlock")
def test_no_secret_is_read(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    os.chmod(tmp_path / "secret", 0o644)
    assert sandbox.protections["reading"]
    for path in (
        str(tmp_path / "secret"),
        "/etc/passwd",
        "/proc/self/environ",
        f"/proc/{os.getpid()}/environ",
    ):
        assert "PermissionError" in sandbox.run(f"open({path!r}).read()").error, path
    assert sandbox.run("import os\nprint(dict(os.environ))").output == "{}\n"


def test_folders_that_cannot_be_read_or_are_very_deep_are_removed(sandbox: Sandbox) -> None:
    assert (
        sandbox.run("import os\nos.mkdir('a', 0o300)\nopen('a/b', 'w')\nos.mkdir('c', 0)").status
        == "done"
    )
    deep = "import os\nfor _ in range(900):\n    os.mkdir('d')\n    os.chdir('d')"
    assert sandbox.run(deep, seconds=20.0).status == "done"
    # What is removed is looked at by the fixture, after this.


def test_what_a_program_left_is_removed_without_commands_of_the_system_and_links_are_not_followed(
    tmp_path: Path,
) -> None:
    """In a process of a user without rights, on a host that has no find."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "left").mkdir()
    script = """
import os, subprocess, sys
from lmforge.post.rewards import code_server
if os.geteuid() == 0:
    os.setuid(65534)
def missing(*arguments, **options):
    raise FileNotFoundError
subprocess.Popen = missing
os.chdir("left")
os.symlink("../kept", "link")
os.makedirs("a/b/c")
os.chmod("a/b", 0)
os.mkdir("d", 0o500)
os.makedirs("e/f")
os.chmod("e", 0o500)
for _ in range(2000):
    os.mkdir("deep")
    os.chdir("deep")
os.chdir("/")
code_server._remove(sys.argv[1])
"""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o711)
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
        os.chown(tmp_path / "left", 65534, 65534)
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "left"], cwd=tmp_path)
    left = [path.name for path in tmp_path.iterdir()]
    subprocess.run(["rm", "-rf", tmp_path / "left"])  # too deep for pytest
    assert (done.returncode, left) == (0, ["kept"])
    assert (tmp_path / "kept" / "file").exists()


def test_a_program_imports_nothing_but_the_standard_library(sandbox: Sandbox) -> None:
    for name in ("lmforge", "lmforge.post.rewards.confinement", "numpy"):
        result = sandbox.run(f"import {name}")
        assert (result.status, result.error) == (
            "raised",
            f"ModuleNotFoundError: No module named {name.split('.')[0]!r}",
        )


def test_one_program_does_not_see_another(sandbox: Sandbox) -> None:
    sandbox.run(
        "import json, builtins\nleft = 1\njson.left = 1\nbuiltins.left = 1\nopen('left', 'w')"
    )
    result = sandbox.run(
        "import json, os\nprint('left' in globals(), hasattr(json, 'left'), os.listdir('.'))"
    )
    assert result.output == "False False []\n"


def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    with Sandbox() as another:
        assert (
            sandbox.run("print({*'lmforge'})").output == another.run("print({*'lmforge'})").output
        )


def test_ordinary_programs_run(sandbox: Sandbox) -> None:
    code = """
import asyncio, concurrent.futures, dataclasses, decimal, hashlib, random, re, sqlite3, statistics, typing, zoneinfo
@dataclasses.dataclass
class Point:
    x: int
async def soon():
    await asyncio.sleep(0.01)
    return Point(1)
print(asyncio.run(soon()), sqlite3.connect(":memory:").execute("select 2").fetchone())
with concurrent.futures.ThreadPoolExecutor(2) as threads:
    print(list(threads.map(abs, [-3])), __name__)
"""
    result = sandbox.run(code, seconds=30.0)
    assert result.output == "Point(x=1) (2,)\n[3] __main__\n", result


def test_when_the_server_dies_its_program_has_a_result_and_the_next_gets_a_new_server() -> None:
    with Sandbox() as own:
        # The newest of this process's children is the server of the newest sandbox.
        max(psutil.Process().children(), key=psutil.Process.create_time).kill()
        result = own.run("x = 1", checks=["pass"])
        assert (result.status, result.checks_passed) == ("killed", (False,))
        assert own.run("x = 1").status == "done"


def test_programs_end_with_the_process_that_runs_them() -> None:
    code = """
from lmforge.post.rewards.sandbox import Sandbox
sandbox = Sandbox()
print("open", flush=True)
sandbox.run("while True: pass", seconds=1000.0)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        [server] = psutil.Process(owner.pid).children()
        deadline = time.monotonic() + 60
        while not (programs := server.children()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        owner.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([server, *programs], timeout=30)[1] == []


# A filter of system calls that hides Landlock, as a kernel of another make would: four steps of
# classic BPF.
WITHOUT_LANDLOCK = """
import ctypes, json, struct, sys
from lmforge.post.rewards.sandbox import Sandbox
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)), 0, 0) == 0
with Sandbox() as sandbox:
    results = [sandbox.run(code) for code in json.loads(sys.argv[1])]
    print(json.dumps([sandbox.protections, [[result.status, result.error, result.output] for result in results]]))
"""


def test_without_landlock_nothing_is_written_and_a_warning_says_that_files_can_be_read(
    tmp_path: Path,
) -> None:
    programs = [
        "print(6 * 7)",
        "open('own', 'w')",
        f"open({str(tmp_path / 'x')!r}, 'w')",
        "import os\nos.mkdir('d')",
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANDLOCK, json.dumps(programs)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    protections, results = json.loads(done.stdout)
    assert protections == {
        "network": True,
        "processes": True,
        "signals": True,
        "writing": True,
        "reading": False,
    }
    assert "can read this user's files" in done.stderr
    assert results[0] == ["done", "", "42\n"]
    assert all("PermissionError" in error for _, error, _ in results[1:])
    assert not (tmp_path / "x").exists()


def test_without_seccomp_no_code_is_run() -> None:
    """seccomp itself is refused, as under some container runtimes."""
    refusing = WITHOUT_LANDLOCK.replace("(0x15, 0, 1, 444)", "(0x15, 0, 1, 157)")
    done = subprocess.run(
        [sys.executable, "-c", refusing, "[]"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "UserError: generated code cannot be confined here" in done.stderr


def test_a_result_has_these_fields(sandbox: Sandbox) -> None:
    assert sandbox.run("") == ProgramResult(
        "done", ("parses", "compiles", "runs"), (), "", "", pytest.approx(0, abs=60)
    )
