"""Code that the benchmarks share: a small real corpus, a description of the machine, and writing of
results.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.records.runs import Run, describe_environment
from lmforge.text.prepare.prepare import prepare

RESULTS = Path(__file__).parent / "results"


def benchmark_parser(docstring: str, rounds: int, what: str) -> argparse.ArgumentParser:
    """A parser with the shared options: --rounds, which `what` explains, and --out.

    `docstring` is its module's.
    """
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"{what} (default: {rounds})")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the result (default: benchmarks/results)",
    )
    return parser


def add_threads(parser: argparse.ArgumentParser, of: str = "each") -> None:
    """Give a parser the option --threads, by default all that one process may use."""
    parser.add_argument(
        "--threads",
        type=int,
        default=threads_per_rank(1),
        help=f"CPU threads of {of} (default: all cores)",
    )


def add_turns(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of contenders that take turns on a CPU: --seconds, --threads and
    --force-bf16.
    """
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="length of a turn (default: 10)"
    )
    add_threads(parser)
    parser.add_argument(
        "--force-bf16", action="store_true", help="measure bf16 also where the CPU only emulates it"
    )


def tokens_of_stdlib(
    folder: Path, *, files: int | None, vocab_size: int, long_documents: int = 0
) -> TokenFolder:
    """Prepare the standard library's top-level modules (the first `files` of them, or all) into
    token shards in `folder`; put together into so many `long_documents`, if any.
    """
    text = folder / "text"
    text.mkdir()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    for number, module in enumerate(modules):
        if not long_documents:
            shutil.copy(module, text)
            continue
        with (text / f"{number % long_documents}.txt").open("ab") as file:
            file.write(module.read_bytes())
    prepare(str(text), folder / "tokens", vocab_size=vocab_size)
    return TokenFolder.open(folder / "tokens")


def run_lmforge(*words: object) -> None:
    """Run lmforge with these words in a process of its own.

    Where it fails, this ends with what it said.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "lmforge", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"lmforge {words[0]}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def train_run(folder: Path, name: str, metric: str, *words: object) -> float:
    """Train a run of this name in `folder`, or go on with it where it stands; the last value of a
    metric.
    """
    run_lmforge(*words, "--run.folder", folder, "--run.name", name)
    return float(Run(folder / name).read_last_metrics()[metric])


def summarize(values: list[float]) -> dict[str, Any]:
    """Median, lowest, highest, and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": values,
    }


def machine() -> dict[str, Any]:
    """Hardware, versions, date, commit and command; nothing that names this host or its folders."""
    facts = describe_environment()
    environment = {
        name: facts[name]
        for name in ("time", "platform", "processor", "cores", "python", "packages", "git_commit")
    }
    for name in ("accelerate", "torchao", "peft", "bitsandbytes"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            environment["packages"][name] = importlib.metadata.version(name)
    environment["instructions"] = torch.backends.cpu.get_cpu_capability()
    environment["memory_gib"] = round(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
    )
    environment["load_before"] = round(os.getloadavg()[0], 2)
    environment["command"] = shlex.join(
        ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    )
    return environment


def machine_lines(environment: dict[str, Any]) -> list[str]:
    """The same, to be read by people; with a warning where other work can have disturbed the
    figures.
    """
    versions = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    instructions = environment["instructions"]
    gpu = [f"- {environment['gpu']}"] if "gpu" in environment else []
    lines = [
        *gpu,
        (
            f"- {environment['processor']}, {environment['cores']} cores, {instructions},"
            f" {environment['memory_gib']} GiB"
        ),
        f"- {environment['platform']}",
        f"- Python {environment['python']}, {versions}; commit {environment['git_commit']}",
        f"- {environment['time']}, load before: {environment['load_before']}",
        f"- `{environment['command']}`",
    ]
    if environment["load_before"] > 0.3:
        lines.append("- **The machine was busy with other work: read the ratios, not the speeds.**")
    return lines


def make_environment(
    folder: Path, packages: Sequence[str], files: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """(a Python of its own with these packages over those of this environment, why it cannot be
    had).

    `files` are written beside the packages: by path, their text.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    beside = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Packages installed there have precedence.
    (beside / "zz-below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for path, text in files.items():
        (beside / path).parent.mkdir(parents=True, exist_ok=True)
        (beside / path).write_text(text)
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        *packages,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
    return (
        python,
        (
            ""
            if not ended.returncode
            else f"cannot be installed: {errors[-1] if errors else 'see pip'}"
        ),
    )


def word(hardware: str) -> str:
    """A name of hardware, for the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")


def write_result(benchmark: str, record: dict[str, Any], table: str, folder: Path) -> Path:
    """Write `record` as JSON and `table` as Markdown, named by benchmark, processor and minute.

    Returns the latter's path.
    """
    machine = record["machine"]
    hardware = machine.get("gpu") or f"{machine['processor'] or 'cpu'} {machine['cores']} cores"
    name = f"{benchmark}-{word(hardware)}-{time.strftime('%Y-%m-%d-%H%M')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    readable = folder / f"{name}.md"
    readable.write_text(table + "\n", encoding="utf-8")
    return readable
