"""The newest result of each benchmark, from benchmarks/results, for the page on performance."""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NAMED = re.compile(r"(?P<benchmark>[a-z_]+)-.*-\d{4}-\d{2}-\d{2}-\d{4}\.md")


def newest_results() -> dict[str, Path]:
    """The newest Markdown file of each benchmark, by the benchmark's name."""
    files = [path for path in RESULTS.glob("*.md") if NAMED.fullmatch(path.name)]
    found = sorted(files, key=lambda path: path.stem[-len("2026-01-01-0000") :])
    return {_benchmark(path): path for path in found}


def results() -> str:
    """Each as a section: which benchmark, what it printed, and its file.

    A GPU has one file, to which calls add.
    """
    sections = []
    of_gpus = [("gpu", path) for path in sorted(RESULTS.glob("gpu-*.md"))]
    for benchmark, path in [*of_gpus, *sorted(newest_results().items())]:
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\A# (.*)\n", "", text)
        text = re.sub(r"^#+ ", lambda mark: f"#{mark[0]}", text, flags=re.M)
        sections.append(f"## benchmarks/{benchmark}.py\n\nFrom `benchmarks/results/{path.name}`:\n\n{text.strip()}")
    return "\n\n".join(sections) + "\n"


def _benchmark(path: Path) -> str:
    found = NAMED.fullmatch(path.name)
    assert found is not None
    return found["benchmark"]
