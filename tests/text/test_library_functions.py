"""Requests and functions mined from the standard library."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.errors import UserError
from lmforge.post.rewards.sandbox import Sandbox
from lmforge.text.chat.library_functions import (
    TRAIN_FILE,
    VALIDATION_FILE,
    write_function_conversations,
)
from tests.seeds import fresh_random

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    counts = write_function_conversations(folder / "pairs")
    assert counts == {
        "train": len(lines(folder / "pairs" / TRAIN_FILE)),
        "validation": len(lines(folder / "pairs" / VALIDATION_FILE)),
    }
    return folder / "pairs"


def lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def answer(line: dict[str, Any]) -> ast.FunctionDef:
    text = line["messages"][1]["content"]
    assert text.startswith("```python\ndef ")
    assert text.endswith("\n```")
    [function] = ast.parse(text[len("```python\n") : -len("```")]).body
    assert isinstance(function, ast.FunctionDef)
    return function


@pytest.mark.slow
def test_there_are_thousands_and_each_is_a_request_and_a_function_without_its_docstring(
    written: Path,
) -> None:
    train, validation = lines(written / TRAIN_FILE), lines(written / VALIDATION_FILE)
    assert len(train) > 2000
    assert len(validation) > 100
    for line in train + validation:
        request, reply = line["messages"]
        assert (request["role"], reply["role"]) == ("user", "assistant")
        function = answer(line)
        assert f"`{function.name}`" in request["content"]
        assert ast.get_docstring(function) is None


def test_no_function_is_twice_and_no_package_is_in_both_splits(written: Path) -> None:
    train, validation = lines(written / TRAIN_FILE), lines(written / VALIDATION_FILE)
    bodies = ["\n".join(map(ast.dump, answer(line).body)) for line in train + validation]
    assert len(set(bodies)) == len(bodies)
    packages = [{line["module"].split(".")[0] for line in split} for split in (train, validation)]
    assert not packages[0] & packages[1]


def test_the_librarys_own_answers_pass_their_checks_and_others_do_not(written: Path) -> None:
    some = fresh_random().sample(lines(written / VALIDATION_FILE), 30)
    programs = [ast.unparse(answer(line)) for line in some]
    with Sandbox() as sandbox:
        right = sandbox.run_all(programs, [line["checks"] for line in some], seconds=30.0)
        other = sandbox.run_all(
            ["def other(thing, *things):\n    pass"] * 30,
            [line["checks"] for line in some],
            seconds=30.0,
        )
    assert [outcome.checks_passed for outcome in right] == [(True, True)] * 30
    assert not any(all(outcome.checks_passed) for outcome in other)


def test_nothing_is_overwritten(written: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        write_function_conversations(written)
