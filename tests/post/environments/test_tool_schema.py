"""Schemas of tools: those of transformers for all that it takes, and one line for what cannot be a
tool.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from lmforge.core.errors import UserError
from lmforge.post.environments.tool_schema import tool_schema


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


def weather(city: str, days: int = 1, unit: Literal["c", "f"] = "c") -> str:
    """The weather of a city.

    It is not always right.

    Args:
        city: The city, of which there are
            many: name one.
        days: For how many days
        unit: celsius: c, fahrenheit: f

    Returns:
        A sentence about the weather.

    Raises:
        KeyError: never
    """
    return city


def everything(
    a: list[int],
    b: dict[str, float],
    c: str | None,
    d: int | str,
    e: tuple[int, str],
    f: list[dict[str, int]] | str,
    g: Any,
    h: Unit,
    i: bool = False,
    j: Literal[1, "one", None] = 1,
) -> Callable[[], None]:
    """All that there is.

    Args:
        a: one

        b: two
        c: three (choices: ["x ", "y"])
        d: four
        e: five
        f: six
        g: seven
        h: eight
        i: nine
        j: ten
    """
    return print


def nothing() -> None:
    """Does nothing."""


class Tool:
    def method(self, x: float) -> float:
        """A method.

        Args:
            x: A number
        """
        return x

    async def later(self, x: "int | None" = None) -> "list[str]":
        """Later.

        Args:
            x: A number
        Returns:
            some
        """
        return []


@pytest.mark.parametrize(
    "tool", [weather, everything, nothing, Tool.method, Tool().method, Tool.later]
)
def test_the_schema_is_that_of_transformers(tool: Callable[..., Any]) -> None:
    assert tool_schema(tool) == get_json_schema(tool)


def no_docstring(x: int) -> int:
    return x


def no_hint(x, y: int) -> int:  # type: ignore[no-untyped-def]
    """A tool.

    Args:
        x: one
        y: two
    """
    return y


def no_description(x: int) -> int:
    """A tool."""
    return x


def of_a_class(x: Tool) -> None:
    """A tool.

    Args:
        x: what is no JSON
    """


def many(*x: int) -> None:
    """A tool.

    Args:
        x: one
    """


def unknown(x: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
    """A tool.

    Args:
        x: one
    """


REFUSED = [
    (no_docstring, "tool no_docstring: has no docstring"),
    (no_hint, "tool no_hint: parameter 'x' has no type hint, such as x: str"),
    (no_description, "tool no_description: parameter 'x' has no description in the docstring"),
    (
        of_a_class,
        "tool of_a_class: parameter 'x' has a type hint that JSON has nothing for: .*Tool",
    ),
    (many, "tool many: parameter 'x': a model cannot be told"),
    (unknown, "tool unknown: its type hints cannot be read: name 'Nowhere' is not defined"),
]


@pytest.mark.parametrize(("tool", "message"), REFUSED)
def test_what_cannot_be_a_tool_is_refused_in_one_line(
    tool: Callable[..., Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        tool_schema(tool)
    assert "\n" not in str(refused.value)
