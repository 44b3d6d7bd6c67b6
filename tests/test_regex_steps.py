"""No regular expression that is applied to what a model or a client wrote takes more steps than in
proportion to its length.
"""

import ast
import importlib
import re
from pathlib import Path
from re import _constants as ops
from re import _parser as parser
from typing import Any

import pytest

import lmforge
from tests.support import regex_steps
from tests.support.regex_steps import StepCounter, TooManySteps

ROOT = Path(lmforge.__file__).parent
# Where what was written is read.
READERS = [
    "text/chat",
    "post/environments",
    "core/foreign_code.py",
    "post/rewards",
    "serve",
    "core/files/untrusted.py",
]
# Others go through the whole text.
METHODS = {"match": "match", "fullmatch": "fullmatch", "search": "search"}
# Read other things: what users wrote in files of their own, or what is cut to 80 characters before.
OF_USERS = {"_CHOICES", "_SECTION", "LONG_KEY", "UNION_TYPE"}


def expressions() -> dict[str, tuple[str, int, str]]:
    """Place → (expression, flags, method): those of the readers that are compiled once, and those
    that stand where they are.

    Others are built at run time: of special tokens, a fence's indentation, our own page; a task of
    an evaluation has one.
    """
    files = [
        file
        for each in READERS
        for file in ([ROOT / each] if each.endswith(".py") else sorted((ROOT / each).rglob("*.py")))
    ]
    found = {}
    for file in files:
        source, place = file.read_text(), file.relative_to(ROOT).as_posix()
        module = ".".join(["lmforge", *file.relative_to(ROOT).with_suffix("").parts])
        for name, value in (
            vars(importlib.import_module(module)).items() if "re.compile(" in source else ()
        ):
            if isinstance(value, re.Pattern) and name in source and name not in OF_USERS:
                for method in set(re.findall(rf"\b{name}\.(\w+)\(", source)) or {"finditer"}:
                    found[f"{place}: {name}.{method}"] = (
                        value.pattern,
                        value.flags,
                        METHODS.get(method, "finditer"),
                    )
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).startswith("re.")
                and isinstance(node.args[0], ast.Constant)
            ):
                method, words = ast.unparse(node.func).removeprefix("re."), ast.unparse(node)
                flags = re.S if "re.S" in words else re.M if "re.M" in words else 0
                if method != "compile":
                    found[f"{place}: {words}"] = (
                        node.args[0].value,
                        flags,
                        METHODS.get(method, "finditer"),
                    )
    return found


def pumps(pattern: Any) -> tuple[list[str], list[str]]:
    """Characters, and runs of them, that an expression asks for."""
    characters, runs = set(" \na0_."), [""]

    def walk(tree: Any) -> None:
        for op, value in tree:
            if op in (ops.LITERAL, ops.NOT_LITERAL):
                characters.add(chr(value))
                runs[-1] += chr(value)
                continue
            runs.append("")
            for each in value if isinstance(value, list | tuple) else [value]:
                for part in each if isinstance(each, list) else [each]:
                    if isinstance(part, parser.SubPattern):
                        walk(part)
                        runs.append("")
            if op is ops.IN:
                characters.update(chr(each[1]) for each in value if each[0] is ops.LITERAL)

    walk(parser.parse(pattern))
    return sorted(characters), sorted({run for run in runs if len(run) > 1})


def growth(pattern: Any, flags: int, method: str) -> float:
    """How many times the steps of the worst text grow when it is four times as long."""
    pattern = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    characters, runs = pumps(pattern)
    counter, worst = StepCounter(pattern, flags & (re.S | re.M | re.I)), 0.0
    for prefix in ["", "a", *runs[:4]]:
        for pump in [*characters, *runs[:4]]:
            steps = [counter.count(prefix + pump * n + "\0", method) for n in (15, 60)]
            worst = max(worst, steps[1] / steps[0])
    return worst


def test_the_steps_of_an_expression_grow_with_the_text() -> None:
    found = expressions()
    assert {
        "text/chat/tool_calls.py: STRING.findall",
        "post/rewards/builtin.py: _FENCED.findall",
    } <= found.keys()
    assert [place for place, expression in found.items() if growth(*expression) > 6] == []


def test_more_than_proportional_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    blanks = r"\s*([\w.-]+)(?:\[ID\]\w*)?\s*(?:\[ARGS\])?\s*(\{.*\})\s*"
    assert growth(blanks, re.S, "fullmatch") > 8
    assert growth(r"\s+$", 0, "search") > 8
    monkeypatch.setattr(regex_steps, "MAX_STEPS", 50_000)
    with pytest.raises(TooManySteps):
        StepCounter(r"(a+)+b").count("a" * 40, "match")
