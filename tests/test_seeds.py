"""Random numbers of tests can be repeated, missing tools are reported once, and repetitions draw
new numbers.
"""

import re
from pathlib import Path

import pytest

from tests import seeds
from tests.support import tools
from tests.support.preloaded import preloaded

ROOT = Path(__file__).parents[1]
FILE = """
import pytest
from hypothesis import given, settings, strategies
from tests.seeds import fresh_seed
from tests.support.tools import TOOLS, Tool

TOOLS["a unicorn"] = Tool(lambda: False, "apt-get install unicorn")

@pytest.fixture(scope="module")
def shared():
    return fresh_seed()

def note(line):
    with open(__file__ + ".drawn", "a") as file:
        file.write(line + "\\n")

@pytest.mark.parametrize("which", [1, 2])
def test_draws(shared, which):
    note(f"{which}: {shared} {fresh_seed()} {fresh_seed()}")

@settings(max_examples=3)
@given(strategies.integers())
def test_examples(number):
    note(f"example: {number}")

@pytest.mark.needs("a unicorn")
@pytest.mark.parametrize("which", [1, 2])
def test_lacks(which):
    pass

def test_fails():
    assert not fresh_seed()
"""


def pytest_on(
    folder: Path, *words: str, only: tuple[str, ...] = (), **variables: str
) -> tuple[str, list[str]]:
    """What pytest says of FILE or of some tests in it, and what was drawn there."""
    file = folder / "test_drawing.py"
    file.write_text(FILE)
    drawn = folder / "test_drawing.py.drawn"
    drawn.unlink(missing_ok=True)
    options = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    requested = [f"{file}::{test}" for test in only] or [str(file)]
    program, out = folder / "program.py", folder / f"out-{len(list(folder.iterdir()))}"
    program.write_text("import sys, pytest\nsys.exit(pytest.main())\n")
    out.mkdir()
    done = preloaded().run([*options, *words, *requested], out, script=program, variables=variables)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, drawn.read_text().splitlines()


@pytest.mark.slow
def test_a_seed_repeats_samples_and_repetitions_draw_new_ones(tmp_path: Path) -> None:
    said, drawn = pytest_on(
        tmp_path, "--repeat", "2", LMFORGE_TEST_SEED="17", LMFORGE_ALL_TOOLS="0"
    )
    assert said.startswith("seed 17, set by LMFORGE_TEST_SEED")
    assert "4 tests not run: need a unicorn (apt-get install unicorn)\n" in said
    assert "2 failed, 6 passed, 4 skipped" in said
    assert len(drawn) == 2 * (2 + 3)
    of_fixture = [line.split()[1] for line in drawn if line[0] in "12"]
    assert of_fixture[0] == of_fixture[1] != of_fixture[2] == of_fixture[3]
    assert len({number for line in drawn if line[0] in "12" for number in line.split()[2:]}) == 8
    repeat = re.findall(r"LMFORGE_TEST_SEED=(\d+) python -m pytest '", said)
    assert len(set(repeat)) == 2
    # The second repetition by itself, one test alone of those that share a fixture.
    some = ("test_draws[2]", "test_examples", "test_fails")
    _, again = pytest_on(tmp_path, only=some, LMFORGE_TEST_SEED=repeat[1], LMFORGE_ALL_TOOLS="0")
    assert again == drawn[6:]


@pytest.mark.slow
def test_processes_that_share_the_tests_draw_the_same_and_count_what_is_missing_together(
    tmp_path: Path,
) -> None:
    words = {"LMFORGE_TEST_SEED": "17", "LMFORGE_ALL_TOOLS": "0"}
    alone, drawn = pytest_on(tmp_path, **words)
    shared, also = pytest_on(tmp_path, "--numprocesses", "2", **words)
    assert sorted(also) == sorted(drawn)
    for said in (alone, shared):
        assert said.count("2 tests not run: need a unicorn (apt-get install unicorn)\n") == 1
    strict, _ = pytest_on(tmp_path, **{**words, "LMFORGE_ALL_TOOLS": "1"})
    assert "LMFORGE_ALL_TOOLS=1: need a unicorn (apt-get install unicorn)" in strict
    assert "not run" not in strict


def test_the_seed_is_a_fixed_one_unless_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(seeds.VARIABLE)
    assert seeds.settle() == "fixed in tests/seeds.py"
    assert seeds.run_seed() == seeds.FIXED
    monkeypatch.setenv(seeds.VARIABLE, "fresh")
    assert seeds.settle() == "fresh"
    monkeypatch.setenv(seeds.VARIABLE, "x")
    with pytest.raises(ValueError, match="LMFORGE_TEST_SEED=x: expected a whole number or `fresh`"):
        seeds.settle()


def test_every_tool_that_a_test_needs_is_one_that_is_looked_for(
    request: pytest.FixtureRequest,
) -> None:
    named = {
        name
        for item in request.session.items
        for mark in item.iter_markers("needs")
        for name in mark.args
    }
    assert named <= tools.TOOLS.keys()
