"""What many tests share: a small corpus, prepared once, a small run trained on it, and the command itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmforge.cli import run
from lmforge.data.prepare.prepare import prepare
from tests.preloaded import preloaded

# The models here are so small that a second thread takes more time than it saves. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A folder that is not there may be the name of a model: no test but those with a hub of their own asks for it.
os.environ["HF_HUB_OFFLINE"] = "1"

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"

Command = Callable[..., subprocess.CompletedProcess[str]]
Refusal = Callable[..., str]


def corpus() -> str:
    """Real text: Shakespeare where it is at hand, else the source of this repository."""
    if SHAKESPEARE.exists():
        return SHAKESPEARE.read_text(encoding="utf-8")
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parents[1].rglob("lmforge/**/*.py")))


@pytest.fixture(scope="session")
def tiny_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token shards: some 200 short documents, vocabulary 512."""
    folder = tmp_path_factory.mktemp("tiny")
    speeches = corpus()[:200_000].split("\n\n")
    (folder / "text").mkdir()
    for number in range(0, len(speeches), 4):
        (folder / "text" / f"{number:05d}.txt").write_text("\n\n".join(speeches[number : number + 4]), encoding="utf-8")
    prepare(str(folder / "text"), folder / "tokens", vocab_size=512, validation_ratio=0.1, workers=1)
    return folder / "tokens"


@pytest.fixture(scope="session")
def lmforge(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`lmforge(*words, stdin="", cwd=None, **variables)`: the command in a process of its own, awaited.

    With variables it is started anew: some are read by what is imported.
    """

    def command(*words: object, stdin: str = "", cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        line = [str(word) for word in words]
        if not variables:
            return preloaded().run(line, tmp_path_factory.mktemp("said"), stdin=stdin, cwd=cwd)
        return subprocess.run(
            [sys.executable, "-m", "lmforge", *line],
            input=stdin,
            cwd=cwd,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return command


def only_line(errors: str) -> str:
    """The one `lmforge: ...` line of standard error, without its first word."""
    assert errors.startswith("lmforge: "), errors
    assert errors.count("\n") == 1, errors
    assert errors.endswith("\n")
    return errors.removeprefix("lmforge: ").rstrip("\n")


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refusal:
    """`refused(*words, status=2)`: carries out a command line here and returns its only line of complaint."""

    def complaint(*words: object, status: int = 2) -> str:
        capfd.readouterr()
        assert run([str(word) for word in words]) == status
        return only_line(capfd.readouterr().err)

    return complaint


def without_shape(options: list[str]) -> list[str]:
    """Options of a run whose model is named otherwise."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for name, value in pairs if not name.startswith("--model.") for word in (name, value)]


@pytest.fixture(scope="session")
def tiny_options(tiny_tokens: Path) -> list[str]:
    """Options of a run of 6 steps of 4 rows of 48 tokens: 2 layers of width 32, grouped heads, fp32, one line a step."""
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
def tiny_run(tiny_options: list[str], lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of `tiny_options`; for reading only, copy it to train on."""
    folder = tmp_path_factory.mktemp("runs")
    done = lmforge("pretrain", *tiny_options, "--run.folder", folder, "--run.name", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "tiny"
