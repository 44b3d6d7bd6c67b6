"""Reward functions that come with lmforge, named without a file: `python_code`."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from lmforge.errors import UserError
from lmforge.rewards.sandbox import ProgramResult, shared_sandbox

# What each part of a good program is worth; of the last, as much as the share of checks that it passes.
PART_REWARDS = {"parses": 0.1, "compiles": 0.1, "runs": 0.2, "checks": 0.6}
# Of each, at most: where many of a batch never end, their share of the time for all is less.
PROGRAM_TIMEOUT_SECONDS = 2.0
# Of the time for all; the rest is for opening the sandbox and for answering.
TIME_FRACTION = 0.9
MEMORY_MIB = 512

# A block with whatever is said of it: of another language too, or its end would be taken for the beginning of one.
_FENCED = re.compile(r"^( {0,3})```([^\n`]*)\n(.*?)(?:^ {0,3}```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


def extract_code(completion: str) -> str:
    """The program in a completion: its fenced blocks of Python, one after another, or all of it where there is none.

    A block that is set in by some spaces has as many taken from each of its lines, as CommonMark has it.
    """
    blocks = [
        re.sub(f"^ {{0,{len(indent)}}}", "", body, flags=re.MULTILINE)
        for indent, language, body in _FENCED.findall(completion)
        if language.strip().lower() in _PYTHON
    ]
    return "\n".join(blocks) if blocks else completion


def program_reward(result: ProgramResult) -> float:
    """From 0 to 1, by `PARTS`. Without checks, the parts that are left count for all."""
    earned = sum(PART_REWARDS[part] for part in result.stages_reached)
    if not result.checks_passed:
        return earned / (1 - PART_REWARDS["checks"])
    return earned + PART_REWARDS["checks"] * sum(result.checks_passed) / len(result.checks_passed)


def python_code(
    prompts: Sequence[Any],
    completions: Sequence[str],
    checks: Sequence[list[str] | None] | None = None,
    reward_timeout_seconds: float = math.inf,
    **columns: Any,
) -> list[float | None]:
    """How good each completion is as a Python program: it parses, compiles, runs, and passes its checks.

    The column `checks` has a list of statements for each item, or None, which are run after the program among the names it
    left and pass where they raise nothing. Nothing but white space earns 0, and so does a program that was not begun within
    `reward_timeout_seconds`; one that was cut off keeps what it had earned. Raises UserError where `checks` holds something else, or
    code cannot be run in safety.
    """
    deadline = time.monotonic() + TIME_FRACTION * reward_timeout_seconds
    programs = [extract_code(completion) for completion in completions]
    own = [each or [] for each in checks or [None] * len(programs)]
    for each in own:
        if not isinstance(each, list) or not all(isinstance(check, str) for check in each):
            raise UserError(f"column checks: expected a list of statements, such as ['assert f(1) == 2'], got {each!r:.100}")
    sandbox = shared_sandbox()
    within = deadline - time.monotonic()
    outcomes = sandbox.run_all(programs, own, seconds=PROGRAM_TIMEOUT_SECONDS, total_seconds=within, memory_mib=MEMORY_MIB)
    return [program_reward(outcome) if program.strip() else 0.0 for program, outcome in zip(programs, outcomes, strict=True)]
