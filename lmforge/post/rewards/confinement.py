"""How a process gives up its rights before it runs a program that a model wrote: limits, Landlock,
and a system call filter.

The Linux kernel enforces each step, and the process cannot undo it, root or not. code_server.py
runs and watches programs. Only the standard library is imported: a bare interpreter loads this
file.
"""

import ctypes
import math
import os
import platform
import resource
import signal
import stat
import struct
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NOBODY = 65534
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
MAX_FILE_BYTES = 8 << 20
MAX_OPEN_FILES = 64
MAX_PENDING_SIGNALS = 64

# System calls as (x86-64, arm64) numbers; -1 where an architecture has no such call. Among the
# calls below FIRST_COMMON_CALL, those are denied with which a program could reach other processes,
# use resources that no limit counts, or slow the machine down.
DENIED_CALLS = {
    # Sockets; messages can also hold descriptors, and so files that no one sees.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # Programs and processes.
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "uselib": (134, -1),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "get_robust_list": (274, 100),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Objects that processes share, whose ids and names can be guessed.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    "flock": (73, 32),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Memory, disk and kernel objects that no limit counts, or that all processes of a user count
    # together.
    "memfd_create": (319, 279),
    "userfaultfd": (323, 282),
    "mlock": (149, 228),
    "mlockall": (151, 230),
    "mlock2": (325, 284),
    "remap_file_pages": (216, 234),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "fallocate": (285, 47),
    "timer_create": (222, 107),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # What a process is.
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "personality": (135, 92),
    "unshare": (272, 97),
    "setns": (308, 268),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "setgroups": (116, 159),
    "capset": (126, 91),
    # The machine. Most of these need capabilities that were dropped before.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "_sysctl": (156, -1),
    "sysfs": (139, -1),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "membarrier": (324, 283),
    # Attributes of files: Landlock restricts opening files, but not changing owners, nor in its
    # first versions lengths.
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "utimensat": (280, 88),
    "futimesat": (261, -1),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "truncate": (76, 45),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# Denied too where Landlock is missing: creating, changing and deleting files.
WRITE_CALLS = {
    "creat": (85, -1),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, -1),
    "linkat": (265, 37),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "mknod": (133, -1),
    "mknodat": (259, 33),
}
KILL = (62, 129)
TKILL = (200, 130)
TGKILL = (234, 131)
PRLIMIT = (302, 261)
FCNTL = (72, 25)
CLONE = (56, 220)
SOCKETPAIR = (53, 199)
OPEN = (2, -1)
OPENAT = (257, 56)
IOCTL = (16, 29)
CLOSE_RANGE = (436, 436)
# The commands of ioctl that only tell about a descriptor, or change its own flags: TCGETS,
# TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2. Others name a process to be signalled,
# write to terminals, or allocate disk.
IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
# Those of fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_GETLK, F_SETLK, F_SETLKW, their open file
# description versions, and F_DUPFD_CLOEXEC; F_SETFL without O_ASYNC. Others have signals sent, hold
# up those who open a file, or enlarge pipes.
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)
F_SETFL = 4
O_ASYNC = 0o20000
# Flags of clone: a thread must share all of these, so that all threads have one table of
# descriptors; other flags are harmless.
THREAD_FLAGS = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000  # VM, FS, FILES, SIGHAND, THREAD
# SYSVSEM, SETTLS, ids, DETACHED.
HARMLESS_CLONE_FLAGS = 0x40000 | 0x80000 | 0x100000 | 0x200000 | 0x400000 | 0x1000000
SECCOMP_ARCHITECTURE = (0xC000003E, 0xC00000B7)

# From this number on, calls are the same on both architectures. Many of these newer calls are
# harmful (io_uring can open sockets), and libraries work without them. All except known harmless
# ones fail as if they did not exist.
FIRST_COMMON_CALL = 424
# faccessat2, epoll_pwait2, futex_waitv; close_range without flags too.
ALLOWED_NEW_CALLS = (439, 441, 449)
LANDLOCK_CREATE = 444
LANDLOCK_ADD = 445
LANDLOCK_RESTRICT = 446

# What Python reads while it runs: its standard library and shared libraries. Determined at import,
# so that child processes need not.
_LIBRARY = [
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
]
_LIBRARY += [
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    sysconfig.get_config_var("LIBDIR"),
]
LIBRARY_PATHS = [
    path for path in dict.fromkeys(Path(name) for name in _LIBRARY if name) if path.exists()
]
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
LIBRARY_IS_WORLD_READABLE = all(
    folder.stat().st_mode & 0o005 == 0o005 for folder in (_STDLIB, *_STDLIB.parents)
)

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
    """Limit this process's address space, CPU time, file size, open files and waiting signals; no
    core dumps.
    """
    for resource_type, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard_limit = resource.getrlimit(resource_type)[1]
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource_type, (limit, limit))


def becomes_nobody() -> bool:
    """Whether `drop_root` changes the user: root does, if nobody can read Python's library."""
    return os.getuid() == 0 and LIBRARY_IS_WORLD_READABLE


def drop_root() -> None:
    """Become the user nobody, if `becomes_nobody`; in any case drop all capabilities."""
    if becomes_nobody():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("II", 0x20080522, 0)
    capset = DENIED_CALLS["capset"][architecture()]
    _check_syscall(_libc.syscall(capset, header, struct.pack("6I", 0, 0, 0, 0, 0, 0)))


def set_visible(visible: bool) -> None:
    """Whether processes of the same user may look at this one in /proc: its descriptors, memory and
    mappings.
    """
    _check_syscall(_libc.prctl(PR_SET_DUMPABLE, int(visible), 0, 0, 0))


@contextmanager
def as_confined_user() -> Iterator[None]:
    """Act as the user of confined processes: in containers root cannot look at those of others in
    /proc.
    """
    if not becomes_nobody():
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def set_no_new_privs(parent: int) -> None:
    """Disable set-uid programs, and kill this process when `parent` ends."""
    _check_syscall(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check_syscall(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 for none (kernel below 5.13, or not enabled)."""
    return max(0, _libc.syscall(LANDLOCK_CREATE, None, 0, 1))


def restrict_files_to(folder: str) -> None:
    """Landlock (kernel documentation, userspace-api/landlock): write in `folder` only, read there
    and in Python's library.

    TCP and signals to other processes are denied too, in versions that can. Raises OSError without
    Landlock.
    """
    version = landlock_version()
    execute = 1
    write = 2
    read = 4
    list_folder = 8
    make_char = 1 << 6
    make_socket = 1 << 9
    make_block = 1 << 11
    every = (1 << 13) - 1
    # Linking across folders, truncating, ioctl on devices.
    for added_in, bit in ((2, 13), (3, 14), (5, 15)):
        every |= (1 << bit) if version >= added_in else 0
    attributes = struct.pack("Q", every)
    attributes += struct.pack("Q", 3) if version >= 4 else b""
    attributes += struct.pack("Q", 3) if version >= 6 else b""
    rules = _check_syscall(_libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0))
    ours = every & ~(execute | make_char | make_socket | make_block)
    for path, rights in [
        (Path(folder), ours),
        *((path, read | list_folder) for path in LIBRARY_PATHS),
    ]:
        if not path.is_dir():
            rights &= read | write
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _check_syscall(
            _libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, descriptor), 0)
        )
        os.close(descriptor)
    _check_syscall(_libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def install_seccomp_filter(*, allow_writes: bool) -> None:
    """Install the system call filter (seccomp, mode 2).

    Without `allow_writes` files cannot be changed anywhere.

    A denied call fails with EPERM, and the program continues. Raises OSError if the kernel has no
    seccomp.
    """
    program = _bpf_program(architecture(), os.getpid(), allow_writes)
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    _check_syscall(_libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0))


def _bpf_program(column: int, pid: int, allow_writes: bool) -> list[bytes]:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, argument n at 16 + 8n
    (its lower half).
    """
    load = 0x20
    equal = 0x15
    at_least = 0x35
    any_bit = 0x45
    return_ = 0x06
    mask = 0x54
    allow = 0x7FFF0000
    kill = 0x80000000
    not_permitted = 0x00050000 | 1
    no_such_call = 0x00050000 | 38

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    def on_calls(calls: Iterable[int], answer: int) -> list[bytes]:
        return [
            instruction
            for call in calls
            for instruction in (step(equal, call, 0, 1), step(return_, answer))
        ]

    def one_of(values: Sequence[int]) -> list[bytes]:
        return [step(equal, value, len(values) - index, 0) for index, value in enumerate(values)]

    def check_argument(call: tuple[int, int], argument: int, *tests: bytes) -> list[bytes]:
        """Deny one call unless `tests`, which have its argument loaded, jump over the denial."""
        if call[column] < 0:
            return []
        body = [
            step(load, 16 + 8 * argument),
            *tests,
            step(return_, not_permitted),
            step(return_, allow),
        ]
        return [step(equal, call[column], 0, len(body)), *body]

    architecture_check = [
        step(load, 4),
        step(equal, SECCOMP_ARCHITECTURE[column], 1, 0),
        step(return_, kill),
        step(load, 0),
    ]
    if column == 0:  # the x32 calls of x86-64, whose numbers would pass the filter
        architecture_check += [step(at_least, 0x40000000, 0, 1), step(return_, kill)]
    allowed_new = on_calls(ALLOWED_NEW_CALLS, allow)
    # With a flag a thread gets its own table.
    own_descriptors = check_argument(CLOSE_RANGE, 2, step(equal, 0, 1, 0))
    newer = [
        step(at_least, FIRST_COMMON_CALL, 0, len(allowed_new) + 1),
        *allowed_new,
        step(return_, no_such_call),
    ]
    denied = DENIED_CALLS if allow_writes else DENIED_CALLS | WRITE_CALLS
    denials = on_calls(
        [numbers[column] for numbers in denied.values() if numbers[column] >= 0], not_permitted
    )
    # In the Unix domain, streams only: a datagram socket could send to any name.
    socket_type = [step(equal, 1, 0, 3), step(load, 16 + 8), step(mask, 0xF), step(equal, 1, 1, 0)]
    flags = [
        step(load, 16 + 8 * 2),
        step(any_bit, O_ASYNC, len(FCNTL_COMMANDS), len(FCNTL_COMMANDS) + 1),
    ]
    others = [
        *check_argument(
            CLONE, 0, step(mask, ~HARMLESS_CLONE_FLAGS), step(equal, THREAD_FLAGS, 1, 0)
        ),
        *check_argument(SOCKETPAIR, 0, *socket_type),
        *check_argument(PRLIMIT, 0, step(equal, 0, 1, 0)),
        *check_argument(IOCTL, 1, *one_of(IOCTL_COMMANDS)),
        *check_argument(
            FCNTL, 1, step(equal, F_SETFL, 0, len(flags)), *flags, *one_of(FCNTL_COMMANDS)
        ),
        *(
            instruction
            for call in (KILL, TKILL, TGKILL)
            for instruction in check_argument(call, 0, step(equal, pid, 1, 0))
        ),
    ]
    if allow_writes:
        # Truncating while opening to read, or to neither read nor write (both bits): Landlock
        # before its third version does not count that as writing.
        truncate = os.O_TRUNC
        both = os.O_WRONLY | os.O_RDWR
        changes = [
            step(mask, truncate | both),
            step(equal, truncate, 1, 0),
            step(equal, truncate | both, 0, 1),
        ]
    else:
        changes = [step(any_bit, os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0, 1)]
    others += check_argument(OPEN, 1, *changes) + check_argument(OPENAT, 2, *changes)
    return [*architecture_check, *own_descriptors, *newer, *denials, *others, step(return_, allow)]


# --- how much disk a confined program takes: what is in its folder, and the deleted files that it
# holds ---------------------

MAX_FOLDER_FILES = 1000
# The limit of the list of a program's mappings; that of an ordinary program has some 20,000.
MAX_MAPPINGS_BYTES = 4 << 20


def deleted_bytes(pid: int, tasks: list[str], folder: str) -> float:
    """The bytes on disk of deleted files that the program with these threads has open or mapped.

    One that is only mapped counts as if full. Infinite if there are too many mappings to read.
    """
    with as_confined_user():
        for task in tasks:  # all have the same descriptors and memory, but the first may have ended
            process = f"/proc/{pid}/task/{task}"
            with suppress(OSError), open(f"{process}/maps", "rb") as file:
                mappings = file.read(MAX_MAPPINGS_BYTES)
                if len(mappings) == MAX_MAPPINGS_BYTES:
                    return math.inf
                if mappings:
                    return sum(
                        (_mapped_files(mappings, folder) | _open_files(f"{process}/fd")).values()
                    )
    return 0


def _mapped_files(mappings: bytes, folder: str) -> dict[int, int]:
    """The largest size that each deleted file of a list of mappings can have, by its inode."""
    beginning = os.fsencode(folder) + b"/"
    lines = [
        line for line in mappings.splitlines() if line.endswith(b" (deleted)") and beginning in line
    ]
    return {int(line.split()[4]): MAX_FILE_BYTES for line in lines}


def _open_files(descriptors: str) -> dict[int, int]:
    """The bytes on disk of each deleted file in a folder of descriptors, by its inode."""
    sizes = {}
    for descriptor in os.listdir(descriptors):
        with suppress(OSError):
            status = os.stat(f"{descriptors}/{descriptor}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                sizes[status.st_ino] = status.st_blocks * 512
    return sizes


def folder_bytes(folder: str) -> float:
    """The bytes on disk of what a folder holds; infinite if it has too many files or too long
    paths.
    """
    files = size = 0
    folders = [folder]
    while folders:
        path = folders.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    files += 1
                    with suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > MAX_FOLDER_FILES:
                        return math.inf
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except PermissionError:
            if _make_readable(path, folder):
                folders.append(path)
        except (FileNotFoundError, NotADirectoryError):
            continue  # deleted or replaced meanwhile
        except OSError:
            return math.inf
    return size


def _make_readable(path: str, folder: str) -> bool:
    """Make a folder within `folder` readable, which the program made unreadable.

    Never follows a link out of it.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
        opened = f"/proc/self/fd/{descriptor}"
        try:
            if os.readlink(opened).startswith(f"{folder}/"):
                os.chmod(opened, 0o700)
                return os.access(path, os.R_OK | os.X_OK)
        finally:
            os.close(descriptor)
    return False
