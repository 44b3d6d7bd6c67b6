"""Reward functions that come with lmforge, named without a file: `python_code`."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from lmforge.core.errors import UserError
from lmforge.post.rewards.sandbox import ProgramResult, shared_sandbox

# The reward of each part; of "checks", the fraction that passes.
PART_REWARDS = {"parses": 0.1, "compiles": 0.1, "runs": 0.2, "checks": 0.6}
# The maximum for one program; if many programs of a batch never end, each gets less.
PROGRAM_TIMEOUT_SECONDS = 2.0
# The fraction of the reward time-out for all programs; the rest is for opening the sandbox and for
# the response.
TIME_FRACTION = 0.9

# A fenced block with its language. Blocks of any language match, or the end of one would be taken
# for the beginning of another.
_FENCED = re.compile(r"^( {0,3})```([^\n`]*)\n(.*?)(?:^ {0,3}```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")


def _extract_code(completion: str) -> str:
    """The program in a completion: its fenced blocks of Python, one after another, or all of it if
    there are none.

    The indentation of a block's fence is removed from each of its lines, as in CommonMark.
    """
    blocks = [
        re.sub(f"^ {{0,{len(indent)}}}", "", body, flags=re.MULTILINE)
        for indent, language, body in _FENCED.findall(completion)
        if language.strip().lower() in _PYTHON
    ]
    return "\n".join(blocks) if blocks else completion


def _program_reward(result: ProgramResult) -> float:
    """From 0 to 1, by PART_REWARDS. Without checks, the other parts are scaled up to 1."""
    earned = sum(PART_REWARDS[part] for part in result.stages_reached)
    if not result.checks_passed:
        return earned / (1 - PART_REWARDS["checks"])
    return earned + PART_REWARDS["checks"] * sum(result.checks_passed) / len(result.checks_passed)


def _last_answer(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion; of one with an environment, whose completions are messages, that of
    its last answer.
    """
    if isinstance(completion, str):
        return completion
    return next((str(turn["content"]) for turn in reversed(completion) if turn["role"] == "assistant"), "")


def python_code(
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[dict[str, Any]]],
    checks: Sequence[list[str] | None] | None = None,
    reward_timeout_seconds: float = math.inf,
    **columns: Any,
) -> list[float | None]:
    """Reward each completion as a Python program: it parses, compiles, runs, and passes its checks.

    The column `checks` has for each completion a list of statements, or None. They are run after
    the program, in its global names, and pass if they raise nothing. White space earns 0, and so
    does a program that was not begun within `reward_timeout_seconds`; one that was killed keeps
    what it had earned. Raises UserError if `checks` holds something else, or if code cannot be
    confined on this machine.
    """
    deadline = time.monotonic() + TIME_FRACTION * reward_timeout_seconds
    programs = [_extract_code(_last_answer(completion)) for completion in completions]
    statements = [each or [] for each in checks or [None] * len(programs)]
    for each in statements:
        if not isinstance(each, list) or not all(isinstance(check, str) for check in each):
            raise UserError(f"column checks: expected a list of statements, such as ['assert f(1) == 2'], got {each!r:.100}")
    sandbox = shared_sandbox()
    limits = {"seconds": PROGRAM_TIMEOUT_SECONDS, "total_seconds": deadline - time.monotonic()}
    results = sandbox.run_all(programs, statements, **limits)
    return [_program_reward(result) if program.strip() else 0.0 for program, result in zip(programs, results, strict=True)]
