"""Chess games to train on, played by an engine against itself, and validation positions of other
games.

    python recipes/chess/games.py data/chess --games 10000

writes games.jsonl ({"text": a game}), prompts.jsonl (one position of each game, for fine-tuning or
rewards: {"prompt", "completion", "engine_move", "fen"}) and validation.jsonl (positions of other
games). `completion` is the engine's move in the position. The engine is Stockfish. Without one,
both sides play random legal moves, `completion` is the game's next move, and `engine_move` is null.
"""

import argparse
import json
import os
import random
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chess
import chess.engine
from notation import prompt_of, text_of

from lmforge.core.errors import UserError
from lmforge.text.prepare.worker_pool import WorkerPool

GAMES, PROMPTS, VALIDATION = "games.jsonl", "prompts.jsonl", "validation.jsonl"
GAMES_PER_JOB = 16
OPENING_PLIES = (4, 10)  # random moves, so that games differ
MAX_PLIES = 240


@dataclass(frozen=True)
class Game:
    """Moves, result, and one position: the plies before it, its FEN, and the engine's move in it
    (None without an engine).
    """

    moves: list[str]
    result: str
    ply: int
    fen: str
    engine_move: str | None

    def position(self) -> dict[str, Any]:
        """The position as a line of prompts.jsonl."""
        return {
            "prompt": prompt_of(self.moves[: self.ply]),
            # With the space before it, which a tokenizer treats as part of the word.
            "completion": f" {self.engine_move or self.moves[self.ply]}",
            "engine_move": self.engine_move,
            "fen": self.fen,
        }


def find_engine(name: str) -> str | None:
    """The path of the engine `name`; of Stockfish for "", None if it is not installed; None for
    "random". Raises UserError.
    """
    if name == "random":
        return None
    # Debian installs it in /usr/games, which is not on the PATH of a service.
    path = shutil.which(name or "stockfish", path=os.environ.get("PATH", "") + os.pathsep + "/usr/games")
    if name and path is None:
        raise UserError(f"{name}: no such engine: give its path, or random for games without one")
    return path


def play(numbers: range, *, seed: int, engine: str | None, nodes: int) -> list[Game]:
    """The games of these numbers. A game depends only on (seed, its number, engine, nodes)."""
    with ExitStack() as stack:
        player = None
        if engine is not None:
            player = stack.enter_context(chess.engine.SimpleEngine.popen_uci(engine))
            player.configure({"Threads": 1, "Hash": 16})  # deterministic, with one thread and a limit in nodes
        return [_game(random.Random(f"{seed} {number}"), player, nodes) for number in numbers]


def _game(rng: random.Random, player: chess.engine.SimpleEngine | None, nodes: int) -> Game:
    board, moves, fens = chess.Board(), list[str](), list[str]()
    opening = rng.randint(*OPENING_PLIES)
    # Sides of different strength, so that games are decided.
    limits = [chess.engine.Limit(nodes=rng.randint(max(1, nodes // 8), nodes)) for _ in range(2)]
    game = object()  # a new object makes the engine clear its state
    outcome = None
    while outcome is None and len(moves) < MAX_PLIES:
        move = None
        if player is not None and len(moves) >= opening:
            move = player.play(board, limits[len(moves) % 2], game=game).move
        if move is None:
            move = rng.choice(list(board.legal_moves))
        fens.append(board.fen())
        moves.append(board.san(move))
        board.push(move)
        outcome = board.outcome(claim_draw=True)
    ply = rng.randrange(min(opening, len(moves) - 1), len(moves))
    engine_move = None
    if player is not None:
        position = chess.Board(fens[ply])
        best = player.play(position, chess.engine.Limit(nodes=nodes), game=object()).move
        engine_move = position.san(best or next(iter(position.legal_moves)))
    return Game(moves, outcome.result() if outcome else "1/2-1/2", ply, fens[ply], engine_move)


def write_games(
    out: Path, *, games: int, positions: int, seed: int = 0, engine: str | None = None, nodes: int = 400, workers: int = 1
) -> dict[str, int]:
    """Write the three files to `out`, and return the numbers of "games", "plies" and "validation"
    positions.

    The files are the same for any number of `workers`. Validation positions are of further games,
    and left out if one of the training games begins with the same moves. Raises UserError if a file
    exists.
    """
    for name in (GAMES, PROMPTS, VALIDATION):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    jobs = [range(start, min(start + GAMES_PER_JOB, games + positions)) for start in range(0, games + positions, GAMES_PER_JOB)]
    by_job: dict[int, list[Game]] = {}
    with WorkerPool(workers) as pool:
        for index, played in pool.map_unordered(partial(play, seed=seed, engine=engine, nodes=nodes), jobs):
            by_job[index] = played
            _print_progress(sum(map(len, by_job.values())), games + positions)
    all_games = [game for index in range(len(jobs)) for game in by_job[index]]
    training, others = all_games[:games], all_games[games:]
    texts = [text_of(game.moves, game.result) for game in training]
    _write(out / GAMES, ({"text": text} for text in texts))
    _write(out / PROMPTS, (game.position() for game in training))
    prefixes = {" ".join(text.split()[:length]) for text in texts for length in range(len(text.split()))}
    unseen = [line for game in others if (line := game.position())["prompt"] not in prefixes]
    _write(out / VALIDATION, unseen)
    return {"games": games, "plies": sum(len(game.moves) for game in training), "validation": len(unseen)}


def _write(path: Path, lines: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _print_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {total:,} games", end="" if done < total else "\n", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Chess games to train on, and positions to measure by.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--games", type=int, default=10_000)
    parser.add_argument("--positions", type=int, default=500, help="for validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=400, help="that the stronger side searches for a move")
    parser.add_argument("--engine", default="", help="path of a UCI engine, or random (default: Stockfish, if installed)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = vars(parser.parse_args(arguments))
    try:
        engine = options["engine"] = find_engine(options["engine"])
        if engine is None:
            print("no engine: both sides play random legal moves, and the move to learn is the game's own", file=sys.stderr)
        counts = write_games(**options)
    except UserError as error:
        print(f"games.py: {error}", file=sys.stderr)
        return 2
    games, plies, positions = (f"{counts[name]:,}" for name in ("games", "plies", "validation"))
    by = Path(engine).name if engine else "chance"
    print(f"{options['out']}: {games} games by {by}, {plies} moves, {positions} validation positions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
