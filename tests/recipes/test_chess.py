"""The chess recipe: games with and without an engine, the rewards, and how a model is measured."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chess
import pytest

from lmforge.core.records.runs import Run
from lmforge.post.rewards.functions import load_reward_functions
from tests.conftest import Command
from tests.support.grids import parametrize
from tests.support.preloaded import preloaded
from tests.support.tools import need

RECIPE = Path(__file__).parents[2] / "recipes" / "chess"
GAMES, MEASURE = RECIPE / "games.py", RECIPE / "measure.py"
FILES = ("games.jsonl", "prompts.jsonl", "validation.jsonl")


Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """`script(path, *words, cwd=None, **variables)`: a script in a process of its own, which has
    imported torch already.
    """

    def run(
        path: Path, *words: object, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path_factory.mktemp("script")
        return preloaded().run(
            [*map(str, words)], folder, script=path, cwd=cwd, variables=variables
        )

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def board_after(text: str) -> chess.Board:
    board = chess.Board()
    for word in text.split():
        if not word.rstrip(".").isdigit() and word not in ("1-0", "0-1", "1/2-1/2"):
            board.push_san(word)
    return board


@pytest.fixture(scope="module")
def by_engine(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("stockfish")
    out = tmp_path_factory.mktemp("chess") / "engine"
    done = script(GAMES, out, "--games", 14, "--positions", 6, "--nodes", 10, "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "14 games by stockfish" in done.stdout
    return out


@pytest.fixture(scope="module")
def by_chance(script: Script, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chess") / "chance"
    done = script(GAMES, out, "--games", 3, "--positions", 2, "--engine", "random", "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "no engine: both sides play random legal moves" in done.stderr
    return out


@parametrize("player", ["by_engine", "by_chance"], fast=(1,))
def test_games_are_legal_with_their_results_and_positions_are_from_them(
    player: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(player)
    games, prompts, validation = (lines(folder / name) for name in FILES)
    assert len(games) == len(prompts) == (14 if player == "by_engine" else 3)
    for game, position in zip(games, prompts, strict=True):
        outcome = board_after(game["text"]).outcome(claim_draw=True)
        assert game["text"].endswith(outcome.result() if outcome else "1/2-1/2")
        assert game["text"].startswith(position["prompt"] + " ")
    for position in prompts + validation:
        board = board_after(position["prompt"])
        assert board.fen() == position["fen"]
        assert position["prompt"].endswith(".") == (board.turn == chess.WHITE)
        assert board.parse_san(position["completion"].removeprefix(" ")) in board.legal_moves
        assert position["engine_move"] == (
            position["completion"].removeprefix(" ") if player == "by_engine" else None
        )
    if player == "by_chance":
        for game, position in zip(games, prompts, strict=True):
            assert game["text"].startswith(position["prompt"] + position["completion"])
    assert validation
    assert not [
        p for p in validation for game in games if game["text"].startswith(p["prompt"] + " ")
    ]


@pytest.mark.slow
def test_games_depend_on_the_seed_and_not_on_the_number_of_processes(
    by_engine: Path, script: Script, tmp_path: Path
) -> None:
    options = ("--games", "14", "--positions", "6", "--nodes", "10")
    # Worker processes import the script that started them: that takes a start of its own.
    subprocess.run(
        [sys.executable, GAMES, tmp_path / "again", *options, "--workers", "2"],
        check=True,
        timeout=200,
    )
    for name in FILES:
        assert (tmp_path / "again" / name).read_text() == (by_engine / name).read_text()
    assert script(GAMES, tmp_path / "other", *options, "--seed", 1, "--workers", 1).returncode == 0
    other = {game["text"] for game in lines(tmp_path / "other" / "games.jsonl")}
    assert not other & {game["text"] for game in lines(by_engine / "games.jsonl")}


@pytest.mark.needs("stockfish")
def test_stockfish_is_found_without_a_path_and_a_missing_engine_is_named(
    script: Script, tmp_path: Path
) -> None:
    options = ("--games", 1, "--positions", 1, "--nodes", 2, "--workers", 1)
    # Debian installs it in a folder that is seldom on the PATH.
    variables = {"PATH": "/nowhere"} if Path("/usr/games/stockfish").exists() else {}
    assert "by stockfish" in script(GAMES, tmp_path / "games", *options, **variables).stdout
    done = script(GAMES, tmp_path / "none", *options, "--engine", "no-such-engine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no-such-engine: no such engine" in done.stderr
    assert "exists; name another folder" in script(GAMES, tmp_path / "games", *options).stderr


def test_legal_moves_and_the_engines_moves_are_rewarded() -> None:
    prompts = [
        "1. e4 e5 2.",
        "1. e4",
        "1. e4 e5 2.",
        "1. e4 e5 2.",
        "1. e4 e5 2.",
        "1. e4 e5 2.",
        "not a game",
    ]
    completions = [" Nf3 Nc6", " c5", " Nf6", "", " -- Nc6", " Nc", " e4"]
    legal, engine = f"{RECIPE / 'reward.py'}:legal_move", f"{RECIPE / 'reward.py'}:engine_move"
    with load_reward_functions([legal, engine]) as rewards:
        scores = rewards(
            prompts, completions, {"engine_move": ["Nf3", "e5", "Nf3", "Nf3", None, "Nf3", "e4"]}
        )
    assert scores.by_function[legal] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert scores.by_function[engine] == [1.0, 0.0, 0.0, 0.0, None, 0.0, None]


def test_a_model_that_knows_no_chess_is_measured_to_play_no_legal_move(
    tiny_run: Path, by_engine: Path, script: Script
) -> None:
    done = script(MEASURE, tiny_run, by_engine / "validation.jsonl", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured == {
        "positions": len(lines(by_engine / "validation.jsonl")),
        "legal": 0.0,
        "agrees": 0.0,
    }


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (RECIPE / "README.md").read_text(), re.M | re.S)
    return [shlex.split(line) for line in "".join(blocks).splitlines()]


def shortened(words: list[str], engine: str) -> list[str]:
    """A line of the README with few games, a tiny model and few steps."""
    if "recipes/chess/games.py" in words:
        return [
            *words,
            "--games",
            "24",
            "--positions",
            "8",
            "--nodes",
            "5",
            "--workers",
            "1",
            "--engine",
            engine,
        ]
    if words[0] != "lmforge" or words[1] == "prepare":
        return words
    options = {
        "train.steps": 2,
        "train.global_batch_size": 8,
        "train.compile": "off",
        "train.device": "cpu",
        "train.threads": 1,
        "launch.processes": 1,
        "validation.sequences": 4,
        "log.every_steps": 1,
    }
    if words[1] == "pretrain":
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        options |= {
            f"model.{name}": size for name, size in {**sizes, "num_key_value_heads": 2}.items()
        }
        options |= {"schedule.warmup_steps": 1}
    return [
        *words,
        *(word for name, value in options.items() for word in (f"--{name}", str(value))),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param("stockfish", marks=pytest.mark.needs("stockfish")), "random"]
)
def test_the_commands_of_the_readme_work_from_games_to_rewards(
    engine: str, tmp_path: Path, lmforge: Command, script: Script
) -> None:
    shutil.copytree(RECIPE.parent, tmp_path / "recipes")
    measured = []
    for words in readme_commands():
        program, *arguments = shortened(words, engine)
        if program == "lmforge":
            done = lmforge(*arguments, cwd=tmp_path)
        else:
            done = script(tmp_path / arguments[0], *arguments[1:], cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        if "recipes/chess/measure.py" in words:
            measured.append(json.loads(done.stdout))
    assert len(measured) == 2
    for each in measured:
        assert 0 <= each["legal"] <= 1
        assert (each["agrees"] is None) == (engine == "random")
    source = Run(tmp_path / "runs" / "chess-legal").load_config().model.source
    assert source is not None
    assert source.is_relative_to("runs/chess-moves")
    completions = lines(
        tmp_path / "runs" / "chess-legal" / "completions" / "set-000000-rank-0.jsonl"
    )
    assert all(completion["reward"] in (0.0, 1.0) for completion in completions)


@pytest.mark.slow
def test_the_recipe_of_codellama_trains_from_its_weights_on_tokens_of_its_tokenizer(
    tmp_path: Path, tiny_run: Path, lmforge: Command, by_chance: Path
) -> None:
    recipe = RECIPE.parent / "codellama-7b-chess.toml"
    assert lmforge("export", tiny_run, tmp_path / "models" / "CodeLlama-7b-hf").returncode == 0
    shutil.copytree(by_chance, tmp_path / "data" / "chess")
    commands = [
        line.removeprefix("#   ")
        for line in recipe.read_text().splitlines()
        if line.startswith("#   lmforge")
    ]
    [prepare] = [line for line in commands if line.startswith("lmforge prepare")]
    prepared = lmforge(*prepare.split()[1:], cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    small = [
        "--data.sequence_length",
        64,
        "--train.global_batch_size",
        4,
        "--train.steps",
        1,
        "--train.device",
        "cpu",
    ]
    done = lmforge(
        "pretrain", recipe, *small, "--train.compile", "off", "--launch.processes", 1, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    config = Run(tmp_path / "runs" / "codellama-7b-chess").load_config()
    assert config.model.source == Path("models/CodeLlama-7b-hf")
    assert config.data.folder == "data/chess/tokens-codellama"
    [dry_run] = [line for line in commands if "--dry-run" in line]
    planned = lmforge(
        *dry_run.replace("recipes/codellama-7b-chess.toml", str(recipe)).split()[1:], cwd=tmp_path
    )
    assert "sharding   full-shard: one copy over 4 of 4 ranks" in planned.stdout, planned.stderr
