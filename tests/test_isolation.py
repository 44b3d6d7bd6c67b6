"""What a user's checkout holds is not noticed by the tests: data, runs and recipes under the names
that are defaults.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("benchmarks", "lmforge", "recipes", "tests")
# Tests that leave options at their defaults; in the checkout some would find the decoys.
CHOSEN = (
    "tests/test_probe.py",
    "tests/ops/report/test_list_runs.py",
    "tests/lab/plan/test_plan.py",
    "-k",
    "probe or runs or refused",
)
PROBE = """
from pathlib import Path
import pytest

@pytest.fixture(scope="module")
def shared():
    return sorted(Path().iterdir())

def test_a_shared_fixture_and_a_test_work_in_an_empty_folder(shared, lmforge, program):
    assert shared == sorted(Path().iterdir()) == []
    assert "runs: No such file or directory" in lmforge("runs").stderr
    assert program("import lmforge; from tests.support import text; print(lmforge.__file__, text.__file__)").stdout.split() == [
        str(Path(__file__).parents[1] / name) for name in ("lmforge/__init__.py", "tests/support/text.py")
    ]
    Path("left").touch()

def test_another_test_works_in_another_folder():
    assert list(Path().iterdir()) == []
"""


def contents(folder: Path) -> dict[Path, int]:
    """The files in a folder, with the times of their last changes."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_data_runs_and_recipes_in_the_checkout_change_no_test_and_no_test_changes_them(
    tiny_tokens: Path, tiny_run: Path, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in NEEDED:
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    for name in ("stdlib", "examples"):
        shutil.copytree(tiny_tokens, checkout / "data" / name)
    for name in ("quickstart", "pretrain", "run"):
        shutil.copytree(tiny_run, checkout / "runs" / name)
    for folder in (checkout, checkout / "recipes"):
        shutil.copy(tiny_run / "recipe.toml", folder)
    (checkout / "tests" / "test_probe.py").write_text(PROBE)
    before = contents(checkout)
    # As `make test` runs them, but for the number of processes.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
        "--numprocesses",
        "1",
    ]
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "PYTHONPATH"))
    }
    done = subprocess.run(
        [*command, *CHOSEN],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert contents(checkout) == before
