"""Rewards for a model that plays chess in text: `reward.py:legal_move` and `reward.py:engine_move`.

Prompts are those of games.py: a game up to the move to predict. Only the first word of a completion
counts.
"""

from collections.abc import Sequence
from typing import Any

from notation import board_of, move_of


def legal_move(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float | None]:
    """1 for a legal move, 0 for anything else; None if the prompt is not a game."""
    return [_score(prompt, completion, None) for prompt, completion in zip(prompts, completions, strict=True)]


def engine_move(
    prompts: Sequence[str], completions: Sequence[str], engine_move: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """1 for the engine's move (column `engine_move`), 0 for anything else; None where that column
    is None.
    """
    items = zip(prompts, completions, engine_move, strict=True)
    return [_score(prompt, completion, best) if best else None for prompt, completion, best in items]


def _score(prompt: str, completion: str, expected: str | None) -> float | None:
    try:
        board = board_of(prompt)
    except ValueError:
        return None
    move = move_of(completion, board)
    return float(move is not None and (expected is None or move == expected))
