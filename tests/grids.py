"""Tables of cases of which `make test` takes a part, and `make test-all` all."""

from collections.abc import Sequence
from typing import Any

import pytest


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
