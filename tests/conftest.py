"""Shared fixtures: a small corpus, prepared once, a small run trained on it, and the command
itself.

And pytest hooks: seeds of random numbers, tools that a test needs, and repetitions.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import hypothesis
except ImportError:  # where only the tests for a GPU run: none of them draws with it
    hypothesis = None

from lmforge.cli import limit_spinning, run
from lmforge.core import plugins, registry
from lmforge.text.prepare.prepare import prepare
from tests import seeds
from tests.ops.cluster.laboratory import Laboratory
from tests.support import tools
from tests.support.preloaded import TIMEOUT_SECONDS, preloaded
from tests.support.text import write_documents

if hypothesis is not None:
    # How fast a machine draws or computes is no claim of a test.
    hypothesis.settings.register_profile(
        "untimed",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("untimed")

ROOT = Path(__file__).parents[1]
# A process that a test starts imports this checkout, and the modules of its tests, from whichever
# folder it is in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
# A shell that starts the tests in the background has SIGINT ignored in them, and so in every
# process that they start. A test that interrupts one would wait for its time-out.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# It ignores SIGQUIT too, and nohup SIGHUP.
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
# The models here are so small that a second thread takes more time than it saves, and most while it
# waits. Read when torch is imported, by the processes that this one starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
limit_spinning()
# A folder that is not there may be the name of a model: only tests with a hub of their own look for
# it.
os.environ["HF_HUB_OFFLINE"] = "1"

Command = Callable[..., subprocess.CompletedProcess[str]]
Refusal = Callable[..., str]


# --- pytest hooks ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="carry out all chosen tests N times, each with another seed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # the process that started this one has settled the seed
    if config.getoption("repeat") > 1 and config.getoption("numprocesses", None):
        raise pytest.UsageError("--repeat repeats in one process: leave --numprocesses out")
    try:
        origin = seeds.settle()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SEED] = (
        f"seed {seeds.run_seed()}, {origin} (to repeat what is drawn:"
        f" {seeds.VARIABLE}={seeds.run_seed()})"
    )


_SEED = pytest.StashKey[str]()


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and _SEED in session.config.stash:
        reporter.write_line(session.config.stash[_SEED])


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests `--repeat` times.

    Between two repetitions all fixtures are torn down, those of the session too.
    """
    times = session.config.getoption("repeat")
    if times == 1 or session.testsfailed or session.config.option.collectonly:
        return None
    first = seeds.run_seed()
    for number in range(times):
        seeds.repetition(first, number)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with seeds.drawing(item.nodeid):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Random numbers without a seed of their own do not depend on earlier tests.
    torch.manual_seed(0)
    test = getattr(item, "obj", None)
    if hypothesis is not None and hypothesis.is_hypothesis_test(test):
        hypothesis.seed(seeds.of_test(item.nodeid))(test)
    if item.get_closest_marker("gpu") and not (
        tools.rehearses_gpu() and "gpu_device" in item.fixturenames
    ):
        tools.need("a GPU")
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            tools.need(name)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """A shared fixture draws the same random numbers whichever test uses it first."""
    if fixturedef.scope == "function":
        return (yield)
    with seeds.drawing(
        f"{fixturedef.baseid}:{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"
    ):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.failed:
        report.sections.append(
            ("to repeat", f"{seeds.VARIABLE}={seeds.run_seed()} python -m pytest '{item.nodeid}'")
        )
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """For each missing tool: how many tests were not run, and how to install it."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    reasons = [
        reason[2].removeprefix("Skipped: ") for reason in skipped if isinstance(reason, tuple)
    ]
    for reason, count in sorted(
        Counter(reason for reason in reasons if reason.startswith(tools.REASON)).items()
    ):
        terminalreporter.write_line(f"{count} test{'s' * (count != 1)} not run: {reason}")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(terminalreporter.config.stash[_SEED])


# --- shared fixtures ------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def working_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """New working folders, one a test. Shared fixtures work in an empty one.

    So nothing depends on what a user's checkout holds: `data/`, `runs/` and recipes, which are
    defaults of options.
    """
    folder = tmp_path_factory.mktemp("work")
    (folder / "shared").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "shared")
        yield (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def working_folder(working_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in an empty folder of its own."""
    folder = next(working_folders)
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture(scope="session")
def tiny_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token folder: some 200 short documents, vocabulary 512."""
    folder = tmp_path_factory.mktemp("tiny")
    write_documents(folder / "text")
    prepare(
        str(folder / "text"), folder / "tokens", vocab_size=512, validation_ratio=0.1, workers=1
    )
    return folder / "tokens"


@pytest.fixture(scope="session")
def lmforge(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`lmforge(*args, stdin="", cwd=None, ranks=1, **variables)`: runs the command in a process of
    its own and waits for it.

    `ranks` are started as torchrun would, which takes seconds less than `--launch.processes`. With
    variables that are not of the tests, or of Hugging Face's hub, whose library is imported late, a
    new interpreter is started: imports read some.
    """

    def command(
        *args: object, stdin: str = "", cwd: Path | None = None, ranks: int = 1, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        line = [str(arg) for arg in args]
        if all(name.startswith(("HF_", "LMFORGE_TEST_")) for name in variables):
            out = tmp_path_factory.mktemp("output")
            return preloaded().run(
                line, out, ranks=ranks, stdin=stdin, cwd=cwd, variables=variables
            )
        return subprocess.run(
            [sys.executable, "-m", "lmforge", *line],
            input=stdin,
            cwd=cwd,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )

    return command


@pytest.fixture(scope="session")
def gpu_device() -> torch.device:
    """The GPU; in a rehearsal (`python tests/gpu.py --device cpu`) the CPU. A test that takes it
    can run on either.
    """
    return torch.device("cpu") if tools.rehearses_gpu() else torch.device("cuda", 0)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced, forward and backward, as they are for inductor, but no code is
    generated.
    """
    traced = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)


@pytest.fixture(scope="session")
def laboratory() -> Iterator[Laboratory]:
    """A cluster of two hosts with sshd and Slurm. A test that cuts a host heals it."""
    for tool in ("network namespaces", "sshd", "Slurm"):
        tools.need(tool)
    with Laboratory() as started:
        yield started


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`program(text, *args, ranks=1)`: runs a Python program in processes of its own that have
    imported lmforge already.
    """

    def command(text: str, *args: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("program")
        (folder / "script.py").write_text(text)
        return preloaded().run(
            [str(arg) for arg in args], folder, script=folder / "script.py", ranks=ranks
        )

    return command


def only_line(errors: str) -> str:
    """The one `lmforge: ...` line of standard error, without that prefix."""
    assert errors.startswith("lmforge: "), errors
    assert errors.count("\n") == 1, errors
    assert errors.endswith("\n")
    return errors.removeprefix("lmforge: ").rstrip("\n")


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refusal:
    """`refused(*args, status=2)`: runs a command line in this process and returns its one line of
    error.
    """

    def error_of(*args: object, status: int = 2) -> str:
        capfd.readouterr()
        assert run([str(arg) for arg in args]) == status
        return only_line(capfd.readouterr().err)

    return error_of


def without_shape(options: list[str]) -> list[str]:
    """The options without those of the model config."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [
        word for name, value in pairs if not name.startswith("--model.") for word in (name, value)
    ]


@pytest.fixture(scope="session")
def tiny_options(tiny_tokens: Path) -> list[str]:
    """Options of a run of 6 steps of 4 sequences of 48 tokens: 2 layers of width 32, grouped heads,
    fp32, one line per step.
    """
    chosen = {
        "data.folder": tiny_tokens,
        "data.sequence_length": 48,
        "model.hidden_size": 32,
        "model.intermediate_size": 48,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "train.steps": 6,
        "train.global_batch_size": 4,
        "train.dtype": "fp32",
        "train.device": "cpu",
        "train.compile": "off",
        "train.threads": 1,
        "optimizer.lr": 1e-2,
        "schedule.warmup_steps": 2,
        "validation.every_steps": 3,
        "validation.sequences": 4,
        "checkpoint.every_steps": 2,
        "log.every_steps": 1,
    }
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def tiny_run(
    tiny_options: list[str], lmforge: Command, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory of a finished run of `tiny_options`; for reading only, copy it to train on."""
    folder = tmp_path_factory.mktemp("runs")
    done = lmforge("pretrain", *tiny_options, "--run.folder", folder, "--run.name", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tiny"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers, or a plugin that it loads, is gone after it."""
    before = dict(registry._entries), dict(plugins._files)
    yield
    for current, earlier in zip((registry._entries, plugins._files), before, strict=True):
        current.clear()  # type: ignore[attr-defined]
        current.update(earlier)  # type: ignore[attr-defined]
