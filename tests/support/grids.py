"""Tables of cases of which `make test` takes a part, and `make test-all` all."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def grid(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Each pair of a row and a column, for `pytest.mark.parametrize`.

    Fast are so many that every row and every column is there, each row with the next column; the
    others are slow.
    """
    longer = max(len(rows), len(columns))
    fast = {(number % len(rows), number % len(columns)) for number in range(longer)}
    return [
        pytest.param(row, column, marks=() if (at, beside) in fast else pytest.mark.slow)
        for at, row in enumerate(rows)
        for beside, column in enumerate(columns)
    ]


def parametrize(
    names: str | Sequence[str],
    cases: Iterable[Any],
    *,
    fast: Collection[int],
    ids: Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` with slow cases: all but those at the places `fast`."""
    marked = []
    for place, case in enumerate(cases):
        of_case = ParameterSet.extract_from(case, force_tuple=isinstance(names, str))
        slow = () if place in fast else (pytest.mark.slow,)
        marked.append(pytest.param(*of_case.values, marks=[*of_case.marks, *slow], id=of_case.id))
    return pytest.mark.parametrize(names, marked, ids=ids)
