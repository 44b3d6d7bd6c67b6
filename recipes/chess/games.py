"""Chess games to train on, played by an engine against itself, and positions that no model is trained on.

    python recipes/chess/games.py data/chess --games 10000

writes games.jsonl ({"text": a game}), prompts.jsonl (a position of each game, for fine-tuning or rewards: {"prompt",
"completion", "engine_move", "fen"}) and validation.jsonl (positions of other games). `completion` is what the engine plays
there. Stockfish is taken where it is found; where it is not, both sides play any legal move, `completion` is what the game
went on with, and `engine_move` is null.
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

from lmforge.data.prepare.worker_pool import WorkerPool
from lmforge.errors import UserError

GAMES, PROMPTS, HELD_OUT = "games.jsonl", "prompts.jsonl", "validation.jsonl"
GAMES_A_JOB = 16
OPENING_PLIES = (4, 10)  # played at random, so that games differ
LONGEST_PLIES = 240


@dataclass(frozen=True)
class Game:
    """Its moves and result, and a position of it: how many moves lead there, and what the engine, if any, plays then."""

    moves: list[str]
    result: str
    ply: int
    fen: str
    engine_move: str | None

    def position(self) -> dict[str, Any]:
        """As a line of JSON."""
        return {
            "prompt": prompt_of(self.moves[: self.ply]),
            # With the space before it, which a tokenizer takes as part of the word.
            "completion": f" {self.engine_move or self.moves[self.ply]}",
            "engine_move": self.engine_move,
            "fen": self.fen,
        }


def find_engine(named: str) -> str | None:
    """The engine's path: the one that is named, else Stockfish if it is there. "random" is none. Raises UserError."""
    if named == "random":
        return None
    # Debian puts it where the PATH of a service does not look.
    found = shutil.which(named or "stockfish", path=os.environ.get("PATH", "") + os.pathsep + "/usr/games")
    if named and found is None:
        raise UserError(f"{named}: no such engine: give its path, or random for games without one")
    return found


def play(numbers: range, *, seed: int, engine: str | None, nodes: int) -> list[Game]:
    """The games of these numbers. A game depends on (seed, its number, engine, nodes) and nothing else."""
    with ExitStack() as closing:
        player = None
        if engine is not None:
            player = closing.enter_context(chess.engine.SimpleEngine.popen_uci(engine))
            player.configure({"Threads": 1, "Hash": 16})  # with one thread and a number of nodes it plays the same again
        return [_game(random.Random(f"{seed} {number}"), player, nodes) for number in numbers]


def _game(draws: random.Random, player: chess.engine.SimpleEngine | None, nodes: int) -> Game:
    board, moves, fens = chess.Board(), list[str](), list[str]()
    opening = draws.randint(*OPENING_PLIES)
    # Sides of unlike strength, so that games are decided.
    strengths = [chess.engine.Limit(nodes=draws.randint(max(1, nodes // 8), nodes)) for _ in range(2)]
    this_game = object()  # a new one makes the engine forget the last
    outcome = None
    while outcome is None and len(moves) < LONGEST_PLIES:
        move = None
        if player is not None and len(moves) >= opening:
            move = player.play(board, strengths[len(moves) % 2], game=this_game).move
        if move is None:
            move = draws.choice(list(board.legal_moves))
        fens.append(board.fen())
        moves.append(board.san(move))
        board.push(move)
        outcome = board.outcome(claim_draw=True)
    ply = draws.randrange(min(opening, len(moves) - 1), len(moves))
    best = None
    if player is not None:
        there = chess.Board(fens[ply])
        best = there.san(
            player.play(there, chess.engine.Limit(nodes=nodes), game=object()).move or next(iter(there.legal_moves))
        )
    return Game(moves, outcome.result() if outcome else "1/2-1/2", ply, fens[ply], best)


def write_games(
    out: Path, *, games: int, positions: int, seed: int = 0, engine: str | None = None, nodes: int = 400, workers: int = 1
) -> dict[str, int]:
    """Write the three files below `out`: {"games": …, "plies": …, "validation": …}. Raises UserError where they are there already.

    The same for any number of `workers`. A held-out position is of a game of its own, and of one that begins as none of the
    others does.
    """
    for name in (GAMES, PROMPTS, HELD_OUT):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    jobs = [range(start, min(start + GAMES_A_JOB, games + positions)) for start in range(0, games + positions, GAMES_A_JOB)]
    by_job: dict[int, list[Game]] = {}
    with WorkerPool(workers) as crew:
        for index, played in crew.map_unordered(partial(play, seed=seed, engine=engine, nodes=nodes), jobs):
            by_job[index] = played
            _show(sum(map(len, by_job.values())), games + positions)
    every = [game for index in range(len(jobs)) for game in by_job[index]]
    texts = [text_of(game.moves, game.result) for game in every[:games]]
    _write(out / GAMES, ({"text": text} for text in texts))
    _write(out / PROMPTS, (game.position() for game in every[:games]))
    begun = {" ".join(text.split()[:length]) for text in texts for length in range(len(text.split()))}
    unseen = [line for game in every[games:] if (line := game.position())["prompt"] not in begun]
    _write(out / HELD_OUT, unseen)
    return {"games": games, "plies": sum(len(game.moves) for game in every[:games]), "validation": len(unseen)}


def _write(path: Path, lines: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _show(done: int, all_games: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,} of {all_games:,} games", end="" if done < all_games else "\n", file=sys.stderr)


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description="Chess games to train on, and positions to measure by.")
    words.add_argument("out", type=Path)
    words.add_argument("--games", type=int, default=10_000)
    words.add_argument("--positions", type=int, default=500, help="held out")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--nodes", type=int, default=400, help="that the stronger engine looks at for a move")
    words.add_argument("--engine", default="", help="path of a UCI engine, or random; Stockfish where it is found")
    words.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = words.parse_args()
    try:
        engine = find_engine(given.engine)
        if engine is None:
            print("no engine: both sides play any legal move, and the move to learn is the game's own", file=sys.stderr)
        counts = write_games(
            given.out,
            games=given.games,
            positions=given.positions,
            seed=given.seed,
            engine=engine,
            nodes=given.nodes,
            workers=given.workers,
        )
    except UserError as mistake:
        print(f"games.py: {mistake}", file=sys.stderr)
        return 2
    by = Path(engine).name if engine else "chance"
    print(
        f"{given.out}: {counts['games']:,} games by {by}, {counts['plies']:,} moves, {counts['held_out']:,} positions held out"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
