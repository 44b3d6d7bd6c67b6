"""The reward of the calculator recipe: `reward.py:right`."""

from collections.abc import Sequence
from typing import Any


def right(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 where the last message of a conversation is "It is VALUE." with the right value, 0
    elsewhere.
    """
    return [float(turns[-1]["content"] == f"It is {value}.") for turns, value in zip(completions, answer, strict=True)]
