"""Environments that come with lmforge, named without a file: `calculator` and `python`."""

import ast
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from lmforge.post.rewards.sandbox import Sandbox

MAX_EXPRESSION_CHARACTERS = 1000
MAX_BITS = 4096
MAX_OUTPUT_CHARACTERS = 2000
PYTHON_SECONDS = 5.0
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """A tool for arithmetic."""

    def reset(self, **row: Any) -> None:
        """Nothing is kept between calls."""

    def calculate(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers, brackets and the operators + - * / // % **, such as 2 * (3 + 4)

        Returns:
            The value.
        """
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            raise ValueError(f"longer than {MAX_EXPRESSION_CHARACTERS:,} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError("not an arithmetic expression") from None
        value = _evaluate(tree)
        return str(
            int(value)
            if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
            else value
        )


def _evaluate(tree: ast.expr) -> int | float:
    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return _bounded(tree.value)
    if isinstance(tree, ast.UnaryOp) and type(tree.op) in OPERATORS:
        return _bounded(OPERATORS[type(tree.op)](_evaluate(tree.operand)))
    if isinstance(tree, ast.BinOp) and type(tree.op) in OPERATORS:
        left = _evaluate(tree.left)
        right = _evaluate(tree.right)
        whole = isinstance(left, int) and isinstance(right, int)
        if (
            isinstance(tree.op, ast.Pow)
            and whole
            and abs(right) * max(1, int(left).bit_length()) > MAX_BITS
        ):
            raise ValueError("the value is too large")
        return _bounded(OPERATORS[type(tree.op)](left, right))
    raise ValueError("not an arithmetic expression")


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the value is too large")
    if not isinstance(value, int | float):
        raise ValueError("the value is no real number")
    return value


class PythonTool:
    """A tool that runs programs in the sandbox of the reward `python_code`, each by itself."""

    def reset(self, **row: Any) -> None:
        """Nothing is kept between programs."""

    def run_python(self, code: str) -> str:
        """Run a Python program and return what it printed.

        There is no network, and no file is kept.

        Args:
            code: The program

        Returns:
            What it printed, and its error if it raised one.
        """
        result = _sandbox().run(code, seconds=PYTHON_SECONDS)
        output = result.output[:MAX_OUTPUT_CHARACTERS]
        problem = {"done": "", "exit": "", "time": f"no end in {PYTHON_SECONDS:g} seconds"}.get(
            result.status, result.error
        )
        return "\n".join(
            filter(
                None,
                [
                    output.rstrip("\n"),
                    problem or ("" if result.status == "done" else result.status),
                ],
            )
        )


@cache
def _sandbox() -> Sandbox:
    """The one sandbox of this process, whose episodes take turns; it ends with the process."""
    return Sandbox()
