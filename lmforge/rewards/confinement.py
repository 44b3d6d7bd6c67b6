"""How a process gives up its rights before it runs a program that a model wrote: limits, Landlock, and a system call filter.

The Linux kernel enforces each step, and the process cannot undo it, root or not. code_server.py runs and watches programs.
Only the standard library is imported: a bare interpreter loads this file.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sysconfig
from collections.abc import Iterable
from pathlib import Path

NOBODY = 65534
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
MAX_FILE_BYTES = 8 << 20
MAX_OPEN_FILES = 64

# System calls as (x86-64, arm64) numbers; -1 where an architecture has no such call.
# Denied are sockets, starting programs and processes, reaching other processes, memory that no limit counts, and changing a
# file's attributes: Landlock restricts opening files, but not changing their owners, nor in its first versions their length.
# fmt: off
DENIED_CALLS = {
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "socket": (41, 198), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "unshare": (272, 97), "setns": (308, 268), "prctl": (157, 167), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "utimensat": (280, 88), "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "truncate": (76, 45), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}
# Denied too where Landlock is missing: creating, changing and deleting files.
WRITE_CALLS = {
    "creat": (85, -1), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1),
    "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, -1),
    "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1), "mknodat": (259, 33),
}
KILL, TKILL, TGKILL, PRLIMIT, FCNTL = (62, 129), (200, 130), (234, 131), (302, 261), (72, 25)
CLONE, SOCKETPAIR, OPEN, OPENAT, CAPSET = (56, 220), (53, 199), (2, -1), (257, 56), (126, 91)
# fmt: on
SECCOMP_ARCHITECTURE = (0xC000003E, 0xC00000B7)

# From this number on, calls are the same on both architectures. Many of these newer ones do harm (io_uring can open sockets),
# and libraries manage without them: all but those known to be harmless fail as if they did not exist.
FIRST_COMMON_CALL = 424
ALLOWED_NEW_CALLS = (436, 439, 441, 449)  # close_range, faccessat2, epoll_pwait2, futex_waitv
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446

# Found out when this file is imported, so that the children of a process need not. What Python reads while it runs: its
# standard library, and shared libraries.
_LIBRARY = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
_LIBRARY += ["/usr/share/zoneinfo", "/dev/null", "/dev/zero", "/dev/urandom", sysconfig.get_config_var("LIBDIR")]
LIBRARY_PATHS = [path for path in dict.fromkeys(Path(name) for name in _LIBRARY if name) if path.exists()]
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
LIBRARY_IS_WORLD_READABLE = all(folder.stat().st_mode & 0o005 == 0o005 for folder in (_STDLIB, *_STDLIB.parents))

_libc = ctypes.CDLL(None, use_errno=True)


def architecture() -> int:
    """This machine's column of the tables above. Raises OSError if it has none."""
    try:
        return ("x86_64", "aarch64").index(platform.machine())
    except ValueError:
        raise OSError(f"no table of system calls for {platform.machine()}") from None


def _check_syscall(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def set_resource_limits(*, cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process's address space, CPU time, file size and open files; no core dumps."""
    for resource_type, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard_limit = resource.getrlimit(resource_type)[1]
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource_type, (limit, limit))


def drop_root() -> None:
    """Become the user nobody, if that user can read Python's library; in any case drop all capabilities."""
    if os.geteuid() == 0 and LIBRARY_IS_WORLD_READABLE:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("II", 0x20080522, 0)
    _check_syscall(_libc.syscall(CAPSET[architecture()], header, struct.pack("6I", 0, 0, 0, 0, 0, 0)))


def set_no_new_privs(parent: int) -> None:
    """Set-uid programs grant nothing from now on, and this process is killed when `parent` ends."""
    _check_syscall(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check_syscall(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 for none (kernel below 5.13, or not enabled)."""
    return max(0, _libc.syscall(LANDLOCK_CREATE, None, 0, 1))


def restrict_files_to(folder: str) -> None:
    """Landlock (kernel documentation, userspace-api/landlock): write in `folder` only, read there and in Python's library.

    TCP and signals to other processes are denied too, in versions that can. Raises OSError without Landlock.
    """
    version = landlock_version()
    execute, write, read, list_folder = 1, 2, 4, 8
    make_char, make_socket, make_block = 1 << 6, 1 << 9, 1 << 11
    every = (1 << 13) - 1
    for added_in, bit in ((2, 13), (3, 14), (5, 15)):  # linking across folders, truncating, ioctl on devices
        every |= (1 << bit) if version >= added_in else 0
    attributes = struct.pack("Q", every)
    attributes += struct.pack("Q", 3) if version >= 4 else b""
    attributes += struct.pack("Q", 3) if version >= 6 else b""
    rules = _check_syscall(_libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0))
    ours = every & ~(execute | make_char | make_socket | make_block)
    for path, rights in [(Path(folder), ours), *((path, read | list_folder) for path in LIBRARY_PATHS)]:
        if not path.is_dir():
            rights &= read | write
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check_syscall(_libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, descriptor), 0))
        os.close(descriptor)
    _check_syscall(_libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def install_seccomp_filter(*, allow_writes: bool) -> None:
    """Install the system call filter (seccomp, mode 2). Without `allow_writes` files cannot be changed anywhere.

    A denied call fails with EPERM, and the program goes on. Raises OSError if the kernel has no seccomp.
    """
    program = _bpf_program(architecture(), os.getpid(), allow_writes)
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _check_syscall(_libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def _bpf_program(column: int, pid: int, allow_writes: bool) -> list[bytes]:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, argument n at 16 + 8n (its lower half)."""
    load, equal, at_least, any_bit, return_, mask = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
    allow, kill = 0x7FFF0000, 0x80000000
    not_permitted, no_such_call = 0x00050000 | 1, 0x00050000 | 38

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    def on_calls(calls: Iterable[int], answer: int) -> list[bytes]:
        return [instruction for call in calls for instruction in (step(equal, call, 0, 1), step(return_, answer))]

    def check_argument(call: tuple[int, int], argument: int, *tests: bytes) -> list[bytes]:
        """Deny one call unless `tests`, which have its argument loaded, jump over the denial."""
        if call[column] < 0:
            return []
        body = [step(load, 16 + 8 * argument), *tests, step(return_, not_permitted), step(return_, allow)]
        return [step(equal, call[column], 0, len(body)), *body]

    architecture_check = [step(load, 4), step(equal, SECCOMP_ARCHITECTURE[column], 1, 0), step(return_, kill), step(load, 0)]
    if column == 0:  # the x32 calls of x86-64, whose numbers would pass the filter
        architecture_check += [step(at_least, 0x40000000, 0, 1), step(return_, kill)]
    allowed_new = on_calls(ALLOWED_NEW_CALLS, allow)
    newer = [step(at_least, FIRST_COMMON_CALL, 0, len(allowed_new) + 1), *allowed_new, step(return_, no_such_call)]
    denied = DENIED_CALLS if allow_writes else DENIED_CALLS | WRITE_CALLS
    denials = on_calls([numbers[column] for numbers in denied.values() if numbers[column] >= 0], not_permitted)
    thread_flag, stream = 0x10000, 1
    others = [
        *check_argument(CLONE, 0, step(any_bit, thread_flag, 1, 0)),
        *check_argument(SOCKETPAIR, 1, step(mask, 0xF), step(equal, stream, 1, 0)),  # a datagram socket could send to any name
        *check_argument(PRLIMIT, 0, step(equal, 0, 1, 0)),
        # F_SETOWN(_EX) makes the kernel signal another process.
        *check_argument(FCNTL, 1, step(equal, 8, 1, 0), step(equal, 15, 0, 1)),
        *(instruction for call in (KILL, TKILL, TGKILL) for instruction in check_argument(call, 0, step(equal, pid, 1, 0))),
    ]
    if allow_writes:
        # Truncating while opening to read, or to neither read nor write (both bits): Landlock before its third version does
        # not count that as writing.
        truncate, both = os.O_TRUNC, os.O_WRONLY | os.O_RDWR
        changes = [step(mask, truncate | both), step(equal, truncate, 1, 0), step(equal, truncate | both, 0, 1)]
    else:
        changes = [step(any_bit, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0, 1)]
    others += check_argument(OPEN, 1, *changes) + check_argument(OPENAT, 2, *changes)
    return [*architecture_check, *newer, *denials, *others, step(return_, allow)]
