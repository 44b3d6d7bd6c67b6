"""The parts of `make test-all`: together they contain all tests, and no test is in two of them."""

from collections import Counter
from pathlib import Path

import pytest

from tests.parts import PARTS, main

ROOT = Path(__file__).parents[1]


def test_every_test_is_in_exactly_one_part(request: pytest.FixtureRequest) -> None:
    counted = Counter(file for part in PARTS.values() for file in part.files())
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if path.match("test_*.py")
    }
    assert there <= counted.keys()
    assert set(counted.values()) == {1}
    # Tests are in such files only: all that were collected here are.
    assert {str(item.path.relative_to(ROOT)) for item in request.session.items} <= there


def test_a_part_that_is_not_there_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["nowhere"]) == 2
    said = capsys.readouterr().err
    assert said == f"PART=nowhere: no such part; there are {', '.join(PARTS)}\n"
