"""Rewards for a model that writes chess: `reward.py:legal_move` and `reward.py:engine_move`.

Prompts are those of games.py: a game up to where a move is asked for. Of a completion only its first word counts.
"""

from collections.abc import Sequence
from typing import Any

from notation import board_of, move_of


def legal_move(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
    """1 for a legal move and 0 for anything else; None where the prompt is not a game."""
    return [_judged(prompt, completion, None) for prompt, completion in zip(prompts, completions, strict=True)]


def engine_move(
    prompts: Sequence[str], completions: Sequence[str], engine_move: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """1 for the engine's move, which the column `engine_move` has, and 0 for another; None where there is none to compare."""
    rows = zip(prompts, completions, engine_move, strict=True)
    return [_judged(prompt, written, answer) if answer else None for prompt, written, answer in rows]


def _judged(prompt: str, completion: str, answer: str | None) -> float | None:
    try:
        board = board_of(prompt)
    except ValueError:
        return None
    move = move_of(completion, board)
    return float(move is not None and (answer is None or move == answer))
