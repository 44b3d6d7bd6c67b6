"""The `lmforge` command: parses a command line, carries out its verb (see `core/options/verbs.py`),
and ends with a status.

The module of a verb is imported when it is called, so that `--help` answers before torch could be
imported.
"""

import atexit
import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lmforge import __version__
from lmforge.core.distributed.environment import (
    CLOSED_VARIABLE,
    ENVIRONMENT_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    NODES_VARIABLE,
)
from lmforge.core.distributed.rank_info import count_restarts, read_rank_info
from lmforge.core.errors import DISK_FULL_ERRNOS, RunFailed, UserError, did_you_mean
from lmforge.core.files.untrusted import check_text, cut, describe_os_error
from lmforge.core.options.help_text import format_help
from lmforge.core.options.load import (
    RESUME_ARGUMENTS,
    STAGES,
    load_extended,
    parse_config,
    parse_verb,
)
from lmforge.core.options.options import MAX_NAME_WIDTH, Options, iter_options, read_recipe
from lmforge.core.options.stage import StageConfig
from lmforge.core.options.verbs import VERBS
from lmforge.core.parallel.dims import plan_batches
from lmforge.core.plugins import load_plugins
from lmforge.core.records.runs import Run
from lmforge.core.registry import import_named
from lmforge.ops.monitor.rank_log import losing_output

if TYPE_CHECKING:  # loaded where ranks are started
    from lmforge.core.distributed.node_group import NodeGroup

HELP_WORDS = ("-h", "--help", "help")
# Set by --debug, and so passed on to the ranks that a verb starts.
DEBUG_VARIABLE = "LMFORGE_DEBUG"
# Characters of an error line: a path may be longer than other values.
MAX_LINE = 2000
MAX_WORD = 300
LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")
# Errors of the files that a user names, not of the program: circular links, a folder in the place
# of a file or the other way round, a name that is too long, a file that may not or cannot be read.
FILE_ERRNOS = {
    errno.ELOOP,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
}
FILE_ERRNOS |= {errno.ENODEV, errno.ENXIO}  # a device or a socket
# What libraries have to do at exit may take this long, such as a tracker's that waits for a server.
EXIT_SECONDS = 10.0
# Rounds of a loop of libgomp, some 50 microseconds in all. Its own default is 300,000.
SPIN_COUNT = 2000
TRAINING_NOTES = """\
  --dry-run [all]     print the batch arithmetic and the options that differ from the defaults (all: every option), and stop
  --resume [VALUE]    the same as --run.resume; without a value, required
  --deterministic     the same as --train.deterministic"""


def main() -> None:
    """Entry of the `lmforge` command: runs a verb and ends the process with its status."""
    # The next files that are opened would take the place of standard streams that are closed.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for stream in os.environ.pop(CLOSED_VARIABLE, "").split():
        setattr(sys, stream, None)
    limit_spinning()
    # A profiler's own output would mix with that of a run.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    exit_process(run(sys.argv[1:]))


def limit_spinning() -> None:
    """Bound how long threads spin that wait for each other, unless the user has said how they wait.
    torch's OpenMP, libgomp, reads it when torch is imported.

    By default they spin for milliseconds. As soon as another program computes too, they take the
    cores from the thread that they wait for, and a step takes four times as long and more. Not to
    spin at all costs a lone run a sixth (docs/log.md).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def exit_process(status: int) -> NoReturn:
    """End the process.

    With torch loaded, the interpreter is not finalized, which takes up to a second. After ranks
    have communicated, finalization could also crash: threads of torch that free a tensor then take
    a lock that no longer exists, and sometimes a rank died of it (SIGABRT) after everything was
    saved. A rank does not wait for threads; another process waits EXIT_SECONDS for them and for
    what is registered at exit, since a client of a tracker may hang in either.
    """
    if "torch" in sys.modules:
        # The second timer is for a flush that hangs: a thread that is stuck in a write holds the
        # stream.
        for seconds, end in ((EXIT_SECONDS, _end), (EXIT_SECONDS + 1.0, os._exit)):
            timer = threading.Timer(seconds, end, (status,))
            timer.daemon = True
            timer.start()
        if "RANK" in os.environ:  # set when ranks join, whatever started them
            _leave(status)
        atexit.register(_leave, status)  # the function registered last is called first
    sys.exit(status)


def _leave(status: int) -> NoReturn:
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    _end(status)


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # None where it was closed before
            stream.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Carry out a command line.

    Returns its exit status: 0; 1 for a failed run, or an unexpected exception; 2 for bad input; 75
    for a lost rank; 128 + signal.
    """
    if "--debug" in arguments:
        os.environ[DEBUG_VARIABLE] = "1"
    debug = bool(os.environ.get(DEBUG_VARIABLE))
    chosen: Options | None = None
    try:
        words = [word for word in arguments if word != "--debug"]
        plugins: list[str] = []
        while words[:1] == ["--plugins"] and len(words) > 1:
            plugins += words[:2]
            words = words[2:]
        name, *rest = words or ["--help"]
        _load_plugins_before(name, plugins[1::2])
        status = 0
        answer = _answer(name, rest)
        works = answer is None and (VERBS[name].writes or VERBS[name].distributed)
        if sys.stdout is None and not works:
            raise UserError(
                "standard output is closed; redirect it, to /dev/null where nobody reads it"
            )
        if answer is not None:
            print(
                wrap_help(answer, shutil.get_terminal_size().columns)
                if sys.stdout.isatty()
                else answer
            )
        else:
            chosen = parse_command(name, rest)
            with losing_output(keeps_stdout=not VERBS[name].writes) if works else nullcontext():
                status = _carry_out(name, rest, chosen, plugins)
        if sys.stdout is not None:
            sys.stdout.flush()  # while a closed pipe can still be detected
        return status
    except (UserError, RunFailed) as problem:
        if debug:
            raise
        _print_error(str(problem))
        return problem.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _discard_output()  # its reader has ended (`| head`)
        return 128 + signal.SIGPIPE
    except Exception as problem:
        if debug:
            if sys.__stderr__ is not None:
                sys.stderr = sys.__stderr__  # a rank's sys.stderr may be its log
            raise
        if foreseen := _output_problem(problem) or _foreseen(problem):
            _print_error(str(foreseen))
            return foreseen.exit_status
        saved = _save_traceback(problem, chosen)
        what = " ".join(traceback.format_exception_only(problem)[-1].split())
        _print_error(f"unexpected {what}; its traceback is in {saved} (--debug prints it here)")
        return 1


def _load_plugins_before(name: str, files: list[str]) -> None:
    """Load the plugin `files` named before a verb, and installed ones, which may have that verb.

    Raises UserError for a verb that takes plugins itself, and so records them with its run.
    """
    if name in VERBS and "plugins" in VERBS[name].options.model_fields:
        if files:
            raise UserError(f"--plugins {cut(files[0])}: write it after {name}")
    elif files or name not in (*VERBS, "-V", "--version"):
        load_plugins(files)


def _answer(name: str, arguments: list[str]) -> str | None:
    """What is printed where no verb is to be carried out: help, or the version.

    Raises UserError for an unknown verb.
    """
    if name in HELP_WORDS:
        words = list(dropwhile(HELP_WORDS.__contains__, arguments))
        if words:
            return _answer(words[0], ["--help", *words[1:]])
        return _overview()
    if name in ("-V", "--version"):
        return f"lmforge {__version__}"
    if name not in VERBS:
        raise UserError(
            f"{cut(name)}: no such verb{did_you_mean(name, VERBS) or ';'} lmforge --help lists them"
        )
    at = next((at for at, word in enumerate(arguments) if word in ("-h", "--help")), None)
    if at is None:
        return None
    everything = arguments[at + 1 : at + 2] == ["all"]
    verb = VERBS[name]
    before = arguments[:at]
    if issubclass(verb.options, StageConfig) and before and not before[0].startswith("-"):
        recipe = Path(before[0])
    else:
        recipe = None
    options_class = load_extended(
        verb.options, read_recipe(recipe) if recipe else {}, recipe, before
    )
    option = "--option"
    if issubclass(verb.options, StageConfig):
        option = "--section.option"
    listed = format_help(options_class, everything).lstrip("\n")
    text = f"{verb.summary}\n\nusage: {verb.usage} [{option} value]\n\n{listed}"
    text += f"\n\n{TRAINING_NOTES}" if name in STAGES else ""
    if verb.options.ESSENTIAL and not everything:
        text += (
            f"\n\nlmforge {name} --help all lists all {len(list(iter_options(options_class)))}"
            " options"
        )
    return text


def wrap_help(text: str, columns: int) -> str:
    """Help for a terminal of this many columns: long lines are wrapped below the meaning of their
    option.
    """
    lines = []
    for line in text.splitlines():
        option_end = re.match(r"(  \S.*?  +)?", line)
        assert option_end is not None
        indent = " " * min(option_end.end(), MAX_NAME_WIDTH + 4, columns * 2 // 3)
        lines += textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False) or [
            line
        ]
    return "\n".join(lines)


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "lmforge: language-model training end to end in plain PyTorch\n\nusage: lmforge VERB"
        f" [ARGUMENTS] [--option value]\n\n{verbs}\n\nlmforge VERB --help lists the options of a"
        " verb with their defaults (--help all: every one of a verb that has many). --debug prints"
        " the traceback of an error."
    )


def parse_command(name: str, arguments: list[str]) -> Any:
    """The options of a command line whose verb is `name`. Raises UserError."""
    check_text(arguments)  # the recipe is not an option
    verb = VERBS[name]
    options_class = verb.options
    if verb.parse is not None:
        return import_named(verb.parse)(arguments)
    if not issubclass(options_class, StageConfig):
        return parse_verb(options_class, arguments)
    config = parse_config(
        options_class, _split_dry_run(arguments)[0] if name in STAGES else arguments
    )
    if name in STAGES and count_restarts() > 0:
        return config.again()
    return config


def _split_dry_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without --dry-run and its value, and the options to print: "changed", "all", or
    None without --dry-run.
    """
    if "--dry-run" not in arguments:
        return arguments, None
    at = arguments.index("--dry-run")
    everything = arguments[at + 1 : at + 2] == ["all"]
    rest = [word for word in arguments[at + 1 + everything :] if word != "--dry-run"]
    return [*arguments[:at], *rest], "all" if everything else "changed"


def _carry_out(name: str, arguments: list[str], chosen: Any, plugins: list[str]) -> int:
    """Call the function of a verb in this process, or on ranks that are started for it, which load
    the `plugins` named before it too.

    Returns the exit status.
    """
    verb = VERBS[name]
    command = [*plugins, name, *arguments]
    if name in STAGES and (scope := _split_dry_run(arguments)[1]):
        from lmforge.ops.verbs.show.describe import dry_run

        print(dry_run(chosen, everything=scope == "all"))
        return 0
    if NODES_VARIABLE in os.environ and (name in STAGES or name == "doctor"):
        from lmforge.core.distributed.node_group import read_node_group

        if group := read_node_group():
            return _launch_on_node(name, command, chosen, group)
    # Ranks that lmforge started have the same command line; their environment variables tell their
    # rank.
    if isinstance(chosen, StageConfig):
        environment = chosen.launch.environment
    else:
        environment = getattr(chosen, "environment", "auto")
    if environment != "auto" and LAUNCHER_PID_VARIABLE not in os.environ:
        os.environ[ENVIRONMENT_VARIABLE] = environment
    if verb.distributed and chosen.uses_ranks and not read_rank_info().launched:
        processes = chosen.launch.processes if isinstance(chosen, StageConfig) else chosen.processes
        if processes > 1:
            return _launch(name, command, chosen, processes)
    if verb.pass_arguments:
        return verb.load()(chosen, arguments)
    return verb.load()(chosen)


def _launch(name: str, command: list[str], chosen: Any, processes: int) -> int:
    """Start all ranks on this machine."""
    from lmforge.core.distributed.launch import launch_local

    if isinstance(chosen, StageConfig):  # refused here, before ranks are started
        plan_batches(chosen, processes)
    if name not in STAGES:
        return launch_local(processes, command)
    return _launch_stage(launch_local, command, chosen)


def _launch_on_node(name: str, command: list[str], chosen: Any, group: "NodeGroup") -> int:
    """Start the ranks of this machine, a node of the `group` that `lmforge launch` has started."""
    from lmforge.core.distributed.launch import launch_plainly
    from lmforge.core.distributed.node_group import agree_on_address, launch_on_node

    if name not in STAGES:
        address, port = agree_on_address(group, chosen.timeout_seconds)
        number = len(group.names)
        return launch_plainly(chosen.processes, command, group.rank, number, address, port)
    plan_batches(chosen, chosen.launch.processes * len(group.names))
    return _launch_stage(partial(launch_on_node, group), command, chosen)


def _launch_stage(launch: Callable[..., int], command: list[str], chosen: StageConfig) -> int:
    """Start ranks that train, and again where one was lost after the run had begun."""
    run = Run.from_config(chosen)
    before = run.started_at_ns
    return launch(
        chosen.launch.processes,
        command,
        max_restarts=chosen.launch.max_restarts,
        restart_arguments=RESUME_ARGUMENTS,
        has_begun=lambda: run.started_at_ns != before,
    )


def _output_problem(problem: Exception) -> UserError | None:
    """The message for standard output that takes nothing, such as a file on a full disk; None for
    another exception.
    """
    if (
        not isinstance(problem, OSError)
        or problem.filename
        or problem.errno not in DISK_FULL_ERRNOS
    ):
        return None
    try:
        print(flush=True)  # only another attempt shows whether it was standard output
    except OSError as again:
        if again.errno == problem.errno:
            _discard_output()
            return UserError(f"standard output: {again.strerror}; nothing more could be printed")
    return None


def _discard_output() -> None:
    """Make standard output lead nowhere, since nothing can be printed any more, not even at
    exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _foreseen(problem: Exception) -> UserError | RunFailed | None:
    """The message for an error of a library or the system; None for an unexpected exception."""
    if isinstance(problem, OSError) and problem.errno in FILE_ERRNOS and problem.filename:
        return UserError(describe_os_error(problem, ""))
    if "torch" in sys.modules:
        from lmforge.core.distributed.memory import describe_request, is_out_of_memory

        if is_out_of_memory(problem):
            return RunFailed(
                f"out of memory: {describe_request(problem)}; use smaller batches, shorter"
                " sequences or a smaller model"
            )
    return None


def _reports_errors() -> bool:
    """Whether this process is the one of the ranks that reports the error to the user."""
    try:
        if "torch" not in sys.modules:
            return read_rank_info().is_rank0
        from lmforge.core.distributed.distributed import claim_error_reporting

        return claim_error_reporting()
    except UserError:  # the error is that it cannot determine its rank
        return True


def _print_error(line: str) -> None:
    """One line on standard error, from one rank only."""
    if _reports_errors():
        # User values are truncated where messages name them. Here the full line is limited, and
        # control characters are removed.
        printable = "".join(each if each.isprintable() else " " for each in line)
        printable = LONG_WORD.sub(lambda word: cut(word[0], MAX_WORD), printable)
        if len(printable) > MAX_LINE:
            printable = f"{printable[: MAX_LINE // 2]} … {printable[-MAX_LINE // 2 :]}"
        with suppress(OSError):  # nothing reads it any more
            print(f"lmforge: {printable}", file=sys.__stderr__, flush=True)
    else:
        # A launcher ends all ranks as soon as one ends, possibly before the reporting rank has
        # reported. So ranks that fail before they have joined wait here.
        time.sleep(2)


def _save_traceback(problem: Exception, chosen: Options | None) -> Path | str:
    """The file with the traceback: the rank's log where its attempt had begun; else it is written
    to the logs of the run, where there is one, or to a new temporary file.
    """
    if log_path := getattr(problem, "log_path", None):  # the rank has written it to its log
        return log_path
    text = "".join(traceback.format_exception(problem))
    with suppress(Exception):
        if (
            isinstance(chosen, StageConfig)
            and (logs := Run.from_config(chosen).logs_folder).is_dir()
        ):
            path = logs / f"error-rank-{read_rank_info().rank}.txt"
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
            return path
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lmforge-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
            return file.name
    except OSError:  # such as a full disk
        return "no file, for none could be written"
