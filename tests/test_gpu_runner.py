"""tests/gpu.py, which runs the tests for a GPU in the environment at hand: what it says of each,
and what it needs.

No GPU is needed here: tests that can run on a CPU too are rehearsed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import Outcomes, files_with_tests, passed_before
from tests.support.preloaded import Preloaded, preloaded

ROOT = Path(__file__).parents[1]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def ran(*words: object, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, ROOT / "tests" / "gpu.py", *map(str, words)]
    return subprocess.run(command, env=HIDDEN, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_what_became_of_each_test_is_in_the_summary_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "test_absent.py").write_text("import no_such_package\n")
    (tmp_path / "test_wrong.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_wrong(gpu_device):\n    assert gpu_device.type"
        " == 'tpu'\n"
    )
    (tmp_path / "conftest.py").write_text("from tests.conftest import gpu_device\n")
    file = tmp_path / "outcomes.json"
    own = [tmp_path / "test_absent.py", tmp_path / "test_wrong.py"]
    done = ran("--device", "cpu", "--json", file, "-k", "small_heads or page_locked or wrong", *own)
    assert done.returncode == 1, done.stdout + done.stderr
    record = json.loads(file.read_text())
    outcomes = {
        name.rpartition("/")[2]: (test["outcome"], test.get("why"))
        for name, test in record["tests"].items()
    }
    assert outcomes["test_gpu.py::test_a_model_with_small_heads_trains_with_dense_masks"] == (
        "passed",
        None,
    )
    assert ("not run", "no_such_package is not installed") in outcomes.values()
    (wrong,) = (outcome for name, (outcome, _) in outcomes.items() if "test_wrong" in name)
    assert wrong == "failed"
    (locked,) = (outcome for name, outcome in outcomes.items() if "page_locked" in name)
    assert locked == ("not run", "need a GPU (one that torch.cuda can use; make test-gpu)")
    assert (record["passed"], record["failed"], record["not run"]) == (1, 1, 2)
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("1 passed, 1 failed, 2 not run in ")
    assert any(line.startswith("FAILED") and "test_wrong" in line for line in lines)
    assert any(line.startswith("CPU, a rehearsal; Python ") and "torch " in line for line in lines)


def test_parts_are_all_tests_and_none_twice_those_first_that_never_passed(tmp_path: Path) -> None:
    names = [f"test_{number}" for number in range(10)]
    outcomes = {name: {"outcome": "passed" if name < "test_4" else "failed"} for name in names}
    (tmp_path / "gpu-tests-a.json").write_text(json.dumps({"tests": outcomes}))
    parts = [[SimpleNamespace(nodeid=name) for name in names] for _ in range(3)]
    for number, items in enumerate(parts, start=1):
        Outcomes(
            {}, Path(), 1.0, (number, 3), passed_before(tmp_path)
        ).pytest_collection_modifyitems(items)
    assert [[item.nodeid[-1] for item in part] for part in parts] == [[*"4703"], [*"581"], [*"692"]]
    assert ran("--part", "4/3").returncode == 2


@pytest.mark.slow
def test_the_tests_are_found_where_only_the_packages_of_a_gpu_image_are(tmp_path: Path) -> None:
    """An image has what trains models, and pytest; it lacks what other tests need, such as
    browsers, servers and stores.
    """
    kept = {"accelerate", "bitsandbytes", "hypothesis", "peft", "pytest", "transformers"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named, *rest = extras["dev"]
    names = re.findall(r"\w+", named.partition("[")[2])
    packages = [*rest, *(each for name in names for each in extras[name])]
    absent = (
        {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in packages}
        - kept
        - {"pytest_timeout", "pytest_xdist"}
    )
    assert {"openai", "playwright", "moto", "chess"} <= absent
    (tmp_path / "sitecustomize.py").write_text(f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        return None if name.partition(".")[0] in {absent} else self.finder.find_spec(name, *args)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
""")
    file = tmp_path / "outcomes.json"
    environment = {**HIDDEN, "PYTHONPATH": str(tmp_path)}
    command = [
        sys.executable,
        ROOT / "tests" / "gpu.py",
        "--device",
        "cpu",
        "--json",
        file,
        "--collect-only",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert json.loads(file.read_text())["tests"] == {}, done.stdout  # none failed
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {str(Path(each).relative_to(ROOT)) for each in files_with_tests()}, (
        done.stdout + done.stderr
    )


def test_packages_that_are_missing_are_named_with_what_to_bring() -> None:
    done = ran(options=("-S",))  # without installed packages
    assert done.returncode == 2
    assert done.stderr.startswith("missing: ")
    assert done.stderr.count("\n") == 1
    assert "pydantic==" in done.stderr
    assert "pip install --no-index" in done.stderr


@pytest.mark.slow
def test_without_a_gpu_nothing_runs() -> None:
    done = ran()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "there is no GPU that torch can use; --device cpu rehearses the tests\n"


def test_outcomes_of_a_checkout_that_cannot_be_written_are_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcomes = Outcomes(
        {"device": "a GPU", "packages": {}, "python": ""}, Path("/proc/none/gpu-tests.json"), 1.0
    )
    outcomes.write()
    assert json.loads((tmp_path / "gpu-tests.json").read_text())["device"] == "a GPU"
    assert outcomes.summary().endswith(str(tmp_path / "gpu-tests.json"))


def test_every_file_with_a_test_for_a_gpu_is_found() -> None:
    names = {str(Path(file).relative_to(ROOT / "tests")) for file in files_with_tests()}
    assert names >= {
        "distributed/test_gpu.py",
        "core/model/test_attention.py",
        "core/steps/test_loop.py",
        "core/parallel/test_float8.py",
    }
    assert Path(files_with_tests()[0]).name == "test_gpu.py"


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_with_an_interpreter_on_the_command_line_nothing_is_made_or_installed(target: str) -> None:
    def commands(*words: str) -> str:
        # Of its own, where these tests are run by `make test` too: a make within another one names
        # its directories.
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
        }
        line = ["make", "-n", "-B", target, *words]
        return subprocess.run(
            line, cwd=ROOT, env=own, capture_output=True, text=True, check=True
        ).stdout

    assert "pip install" in commands()
    given = commands("PYTHON=/opt/python")
    assert given.count("\n") == 1
    assert given.startswith(f'PYTHONPATH="{ROOT}')
    assert " /opt/python " in given


@pytest.mark.slow
def test_a_test_that_takes_too_long_ends_its_ranks_and_spoils_no_other(tmp_path: Path) -> None:
    """The fork server's answer to a request that nobody waits for any more is not taken for that of
    the next one.
    """
    slow = tmp_path / "slow.py"
    slow.write_text(
        f"import os, time\nopen({str(tmp_path / 'rank')!r},"
        " 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    quick = tmp_path / "quick.py"
    quick.write_text("print('quick')\n")
    server = Preloaded()
    rank = tmp_path / "rank"

    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    try:
        interrupt = threading.Thread(
            target=lambda: (_wait_for(rank), os.kill(os.getpid(), signal.SIGALRM))
        )
        interrupt.start()
        with pytest.raises(TimeoutError):
            server.run([], tmp_path, script=slow)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _ends(int(rank.read_text()))
    assert preloaded().run([], tmp_path, script=quick).stdout == "quick\n"


def _wait_for(path: Path) -> None:
    while not path.exists() or not path.read_text():
        time.sleep(0.05)


def _ends(process: int) -> bool:
    for _ in range(200):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
