"""The tests that need a GPU, in the environment at hand: `make test-gpu`, or

    python tests/gpu.py [--json PATH] [--minutes 5] [--part 1/4] [--device cpu] [WORDS OF PYTEST …]

Nothing is installed. A test whose package is missing, or that would begin too late, is listed as
not run; tests that have not passed on any GPU, by the records in benchmarks/results/, begin first.
Each outcome is written to the JSON file at once, so that a run that is killed keeps what it has.
With `--device cpu` the bodies that run on either device run on this CPU, to find plain errors: that
is a rehearsal, and says nothing about a GPU.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JSON = ROOT / "build" / "gpu-tests.json"
RECORDS = ROOT / "benchmarks" / "results"
DEVICE = "LMFORGE_TEST_DEVICE"
SECONDS = "LMFORGE_TEST_SECONDS"
# No test begins after so many minutes, and none takes longer than so many seconds: together less
# than 8 minutes.
MINUTES, SECONDS_A_TEST = 5.0, 160
IMPORTED_AS = {"typing-extensions": "typing_extensions", "huggingface-hub": "huggingface_hub", "tomli-w": "tomli_w"}
PLUGINS = {"pytest-timeout": "pytest_timeout"}
# Read when torch makes its first process group, and when it looks for a GPU: through NVML, so that
# a process that has looked can still be forked.
VARIABLES = {"TORCH_FR_BUFFER_SIZE": "2000", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", SECONDS: str(SECONDS_A_TEST)}


def missing_packages() -> list[str]:
    """Packages without which lmforge or its tests do not start, as pip spells them."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.split(r"[^\w-]", each)[0].replace("_", "-") for each in needed]
    return [name for name in (*names, "pytest") if find_spec(IMPORTED_AS.get(name, name)) is None]


def how_to_bring(missing: Sequence[str]) -> str:
    """A line for people whose machine has no network."""
    pins = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    requirements = " ".join(f"{name}=={pins[key]}" if (key := name.replace("-", "_")) in pins else name for name in missing)
    version = ".".join(platform.python_version_tuple()[:2])
    fetch = f"python -m pip download --only-binary :all: --python-version {version} --dest wheels {requirements}"
    use = f"{sys.executable} -m pip install --no-index --no-deps --target site wheels/*.whl"
    return f"missing: {', '.join(missing)}. Where there is a network: {fetch}; here: {use}; then PYTHONPATH=site"


def environment(device: str) -> dict[str, Any]:
    """What the results hold for."""
    import torch

    versions = {}
    for name in ("torch", "triton", "torchao", "transformers", "accelerate", "pytest"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    facts: dict[str, Any] = {"python": platform.python_version(), "packages": {**versions, "torch": torch.__version__}}
    if device == "cpu":
        return {"device": "CPU, a rehearsal", **facts}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "device": gpu.name,
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **facts,
    }


class Outcomes:
    """A plugin of pytest: what became of each test, written as soon as it is known."""

    def __init__(
        self,
        metadata: dict[str, Any],
        path: Path,
        minutes: float,
        part: tuple[int, int] = (1, 1),
        passed_before: Collection[str] = (),
    ) -> None:
        self.metadata, self.path, self._minutes, self._part = metadata, path, minutes, part
        self._passed_before = passed_before
        self.tests: dict[str, dict[str, Any]] = {}
        self._began = time.monotonic()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        number, parts = self._part
        items[:] = sorted(items, key=lambda item: item.nodeid in self._passed_before)[number - 1 :: parts]

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if self.minutes > self._minutes:
            pytest.skip(f"not begun: {self._minutes:g} minutes were over")

    def pytest_runtest_logreport(self, report: Any) -> None:
        before = self.tests.get(report.nodeid, {"seconds": 0.0})
        test = {**before, "seconds": round(before["seconds"] + report.duration, 2)}
        if report.failed:
            test |= {"outcome": "failed", "why": _last_line(report), "text": report.longreprtext[-4000:]}
        elif report.skipped:
            test |= {"outcome": "not run", "why": str(report.longrepr[2]).removeprefix("Skipped: ")}
        elif report.when == "call":
            test |= {"outcome": "passed"}
        self.tests[report.nodeid] = test
        self.write()

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported: for want of a package, its tests do not run."""
        if report.skipped:  # pytest.importorskip in a file
            self.tests[report.nodeid] = {"outcome": "not run", "why": str(report.longrepr[2]).removeprefix("Skipped: ")}
        elif report.failed:
            absent = re.search(r"No module named '([\w.]+)'", report.longreprtext)
            mine = absent is not None and absent[1].partition(".")[0] in ("lmforge", "tests")
            outcome = {"outcome": "not run", "why": f"{absent[1]} is not installed"} if absent and not mine else None
            text = report.longreprtext[-4000:]
            self.tests[report.nodeid] = outcome or {"outcome": "failed", "why": "cannot be imported", "text": text}

    def of(self, outcome: str) -> dict[str, dict[str, Any]]:
        return {name: test for name, test in self.tests.items() if test.get("outcome") == outcome}

    def record(self) -> dict[str, Any]:
        counts = {outcome: len(self.of(outcome)) for outcome in ("passed", "failed", "not run")}
        return {**self.metadata, "minutes": round(self.minutes, 2), **counts, "tests": self.tests}

    def write(self) -> None:
        """Into the file, or where that cannot be (a checkout that is read only) one of that name
        among temporary ones.
        """
        for path in (self.path, Path(tempfile.gettempdir()) / self.path.name):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f"{path.name}.partial")
                partial.write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
                partial.replace(path)
            except OSError:
                continue
            self.path = path
            return
        self.path = Path(os.devnull)

    def summary(self) -> str:
        record = self.record()
        facts = [f"{name} {version}" for name, version in record["packages"].items() if version]
        memory = f", {record['memory_gib']} GiB, CUDA {record['cuda']}, NCCL {record['nccl']}" if "cuda" in record else ""
        lines = [f"{record['device']}{memory}; Python {record['python']}, {', '.join(facts)}"]
        lines += [f"FAILED   {name}: {test['why']}" for name, test in self.of("failed").items()]
        reasons: dict[str, list[str]] = {}
        for name, test in self.of("not run").items():
            reasons.setdefault(test["why"], []).append(name)
        lines += [f"not run  {why}: {len(names)}, such as {names[0]}" for why, names in reasons.items()]
        counts = ", ".join(f"{record[outcome]} {outcome}" for outcome in ("passed", "failed", "not run"))
        return "\n".join([*lines, f"{counts} in {record['minutes']:.1f} minutes; {self.path}"])


def _last_line(report: Any) -> str:
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    lines = (crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return lines[0][:300] if lines else "no message"


def files_with_tests() -> list[str]:
    """Test files that are marked; others may import what is not installed here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [file for file in files if re.search(r"^(@|pytestmark = )pytest\.mark\.gpu", file.read_text(), re.M)]
    return [str(file) for file in sorted(marked, key=lambda file: file.name != "test_gpu.py")]  # what matters most comes first


def passed_before(records: Path = RECORDS) -> set[str]:
    """The tests that a record of outcomes says have passed on a GPU."""
    outcomes = [json.loads(path.read_text(encoding="utf-8"))["tests"] for path in records.glob("gpu-tests-*.json")]
    return {name for tests in outcomes for name, test in tests.items() if test.get("outcome") == "passed"}


def _part(text: str) -> tuple[int, int]:
    """(part, parts) of "1/4"."""
    part, _, parts = text.partition("/")
    if not 1 <= int(part) <= int(parts):
        raise ValueError
    return int(part), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 where no test failed and some passed, 1 else, and 2 where none can start."""
    parser = argparse.ArgumentParser(prog="python tests/gpu.py", description="The tests that need a GPU.")
    parser.add_argument("--json", type=Path, default=JSON, help="file of the outcomes (default: build/gpu-tests.json)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"no test begins later (default: {MINUTES:g})")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="every N-th test, for N processes at once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    chosen, words = parser.parse_known_args(arguments)
    if missing := missing_packages():
        print(how_to_bring(missing), file=sys.stderr)
        return 2
    os.environ.update({**VARIABLES, DEVICE: chosen.device})
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu rehearses the tests", file=sys.stderr)
        return 2
    import pytest

    outcomes = Outcomes(environment(chosen.device), chosen.json.absolute(), chosen.minutes, chosen.part, passed_before())
    os.chdir(ROOT)
    # Plugins that happen to be installed are left out, and of ours xdist: tests would share the
    # GPU.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = [word for name in PLUGINS.values() if find_spec(name) for word in ("-p", name, f"--timeout={SECONDS_A_TEST}")]
    options = ["-o", "addopts=", "--strict-markers", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
    pytest.main(
        [*options, "--continue-on-collection-errors", *plugins, *words, *files_with_tests()],
        plugins=[outcomes],
    )
    outcomes.write()
    print(f"\n{outcomes.summary()}", flush=True)
    return int(bool(outcomes.of("failed")) or not outcomes.of("passed"))


if __name__ == "__main__":
    # A file and not `-m tests.gpu`: the package `tests` imports lmforge, which may lack a package.
    sys.path[0] = str(ROOT)
    sys.exit(main())
