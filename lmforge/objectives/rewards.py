"""Reward functions that come with lmforge, named without a file: `python_code`."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from lmforge.errors import Mistake
from lmforge.objectives.sandbox import Outcome, shared_sandbox

# What each part of a good program is worth; of the last, as much as the share of checks that it passes.
PARTS = {"parses": 0.1, "compiles": 0.1, "runs": 0.2, "checks": 0.6}
# Of each, at most: where many of a batch never end, their share of the time for all is less.
SECONDS = 2.0
# Of the time for all; the rest is for opening the sandbox and for answering.
SHARE = 0.9
MEMORY_MIB = 512

# A block with whatever is said of it: of another language too, or its end would be taken for the beginning of one.
_FENCED = re.compile(r"^( {0,3})```([^\n`]*)\n(.*?)(?:^ {0,3}```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


def code_of(completion: str) -> str:
    """The program in a completion: its fenced blocks of Python, one after another, or all of it where there is none.

    A block that is set in by some spaces has as many taken from each of its lines, as CommonMark has it.
    """
    blocks = [
        re.sub(f"^ {{0,{len(indent)}}}", "", body, flags=re.MULTILINE)
        for indent, language, body in _FENCED.findall(completion)
        if language.strip().lower() in _PYTHON
    ]
    return "\n".join(blocks) if blocks else completion


def worth(outcome: Outcome) -> float:
    """From 0 to 1, by `PARTS`. Without checks, the parts that are left count for all."""
    earned = sum(PARTS[part] for part in outcome.reached)
    if not outcome.passed:
        return earned / (1 - PARTS["checks"])
    return earned + PARTS["checks"] * sum(outcome.passed) / len(outcome.passed)


def python_code(
    prompts: Sequence[Any],
    completions: Sequence[str],
    checks: Sequence[list[str] | None] | None = None,
    reward_seconds: float = math.inf,
    **columns: Any,
) -> list[float | None]:
    """How good each completion is as a Python program: it parses, compiles, runs, and passes its checks.

    The column `checks` has a list of statements for each item, or None, which are run after the program among the names it
    left and pass where they raise nothing. Nothing but white space earns 0, and so does a program that was not begun within
    `reward_seconds`; one that was cut off keeps what it had earned. Raises Mistake where `checks` holds something else, or
    code cannot be run in safety.
    """
    deadline = time.monotonic() + SHARE * reward_seconds
    programs = [code_of(completion) for completion in completions]
    own = [each or [] for each in checks or [None] * len(programs)]
    for each in own:
        if not isinstance(each, list) or not all(isinstance(check, str) for check in each):
            raise Mistake(f"column checks: expected a list of statements, such as ['assert f(1) == 2'], got {each!r:.100}")
    sandbox = shared_sandbox()
    within = deadline - time.monotonic()
    outcomes = sandbox.run_each(programs, own, seconds=SECONDS, within=within, memory_mib=MEMORY_MIB)
    return [worth(outcome) if program.strip() else 0.0 for program, outcome in zip(programs, outcomes, strict=True)]
