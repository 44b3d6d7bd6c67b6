"""Games as text: numbered moves in standard algebraic notation, and the result.

Used by the other files here.
"""

import chess


def text_of(moves: list[str], result: str = "") -> str:
    """["e4", "e5", "Nf3"] → "1. e4 e5 2. Nf3"; a complete game has its result at the end."""
    words = [f"{ply // 2 + 1}. {move}" if ply % 2 == 0 else move for ply, move in enumerate(moves)]
    return " ".join([*words, result] if result else words)


def prompt_of(moves: list[str]) -> str:
    """A game up to the move to predict, which follows after a space: "1. e4 e5 2." or "1. e4"."""
    return text_of(moves) + (f" {len(moves) // 2 + 1}." if len(moves) % 2 == 0 else "")


def board_of(prompt: str) -> chess.Board:
    """The position that a prompt leads to. Raises ValueError if it is not a game."""
    board = chess.Board()
    for word in prompt.split():
        if not word.rstrip(".").isdigit():
            board.push_san(word)
    return board


def move_of(completion: str, board: chess.Board) -> str | None:
    """The first word of a completion as a move in standard notation, None if it is not a legal move
    in this position.
    """
    words = completion.split(maxsplit=1)
    try:
        move = board.parse_san(words[0]) if words else None
    except ValueError:
        return None
    return board.san(move) if move else None  # "--" is parsed as a null move, which is false
