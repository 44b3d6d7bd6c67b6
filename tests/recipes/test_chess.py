"""The chess recipe: games by an engine and without one, the rewards, and the measure of a model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import chess
import pytest

from lmforge.rewards.functions import load_reward_functions
from lmforge.runs import Run
from tests.conftest import Command
from tests.tools import need

RECIPE = Path(__file__).parents[2] / "recipes" / "chess"
FILES = ("games.jsonl", "prompts.jsonl", "validation.jsonl")


def carried_out(script: str, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(RECIPE / script), *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, env={**os.environ, **variables})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def played(prompt: str) -> chess.Board:
    board = chess.Board()
    for word in prompt.split():
        if not word.rstrip(".").isdigit() and word not in ("1-0", "0-1", "1/2-1/2"):
            board.push_san(word)
    return board


@pytest.fixture(scope="module")
def by_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("stockfish")
    out = tmp_path_factory.mktemp("chess") / "engine"
    done = carried_out("games.py", out, "--games", 14, "--positions", 6, "--nodes", 10, "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "14 games by stockfish" in done.stdout
    return out


@pytest.fixture(scope="module")
def by_chance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chess") / "chance"
    done = carried_out("games.py", out, "--games", 3, "--positions", 2, "--engine", "random", "--workers", 1)
    assert done.returncode == 0, done.stderr
    assert "no engine: both sides play any legal move" in done.stderr
    return out


@pytest.mark.parametrize("who", ["by_engine", "by_chance"])
def test_games_are_legal_and_end_as_they_say_and_positions_are_theirs(who: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(who)
    games, prompts, held_out = (lines(folder / name) for name in FILES)
    assert len(games) == len(prompts) == (14 if who == "by_engine" else 3)
    for game, position in zip(games, prompts, strict=True):
        outcome = played(game["text"]).outcome(claim_draw=True)
        assert game["text"].endswith(outcome.result() if outcome else "1/2-1/2")
        assert game["text"].startswith(position["prompt"] + " ")
    for position in prompts + held_out:
        board = played(position["prompt"])
        assert board.fen() == position["fen"]
        assert position["prompt"].endswith(".") == (board.turn == chess.WHITE)
        assert board.parse_san(position["completion"].removeprefix(" ")) in board.legal_moves
        assert position["engine_move"] == (position["completion"].removeprefix(" ") if who == "by_engine" else None)
    if who == "by_chance":
        for game, position in zip(games, prompts, strict=True):
            assert game["text"].startswith(position["prompt"] + position["completion"])
    assert held_out
    assert not [p for p in held_out for game in games if game["text"].startswith(p["prompt"] + " ")]


def test_games_are_the_same_for_any_number_of_processes_and_others_for_another_seed(by_engine: Path, tmp_path: Path) -> None:
    words = ("--games", 14, "--positions", 6, "--nodes", 10)
    assert carried_out("games.py", tmp_path / "again", *words, "--workers", 2).returncode == 0
    assert carried_out("games.py", tmp_path / "other", *words, "--seed", 1, "--workers", 1).returncode == 0
    for name in FILES:
        assert (tmp_path / "again" / name).read_text() == (by_engine / name).read_text()
    other = {game["text"] for game in lines(tmp_path / "other" / "games.jsonl")}
    assert not other & {game["text"] for game in lines(by_engine / "games.jsonl")}


@pytest.mark.needs("stockfish")
def test_an_engine_is_found_without_a_path_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    words = ("--games", 1, "--positions", 1, "--nodes", 2, "--workers", 1)
    # On Debian it is in a folder that is on the PATH of few.
    away = {"PATH": "/nowhere"} if Path("/usr/games/stockfish").exists() else {}
    assert "by stockfish" in carried_out("games.py", tmp_path / "games", *words, **away).stdout
    done = carried_out("games.py", tmp_path / "none", *words, "--engine", "no-such-engine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no-such-engine: no such engine" in done.stderr
    assert "exists; name another folder" in carried_out("games.py", tmp_path / "games", *words).stderr


def test_a_legal_move_is_rewarded_and_the_engines_is_told_from_another() -> None:
    prompts = ["1. e4 e5 2.", "1. e4", "1. e4 e5 2.", "1. e4 e5 2.", "1. e4 e5 2.", "1. e4 e5 2.", "not a game"]
    completions = [" Nf3 Nc6", " c5", " Nf6", "", " -- Nc6", " Nc", " e4"]
    legal, engine = f"{RECIPE / 'reward.py'}:legal_move", f"{RECIPE / 'reward.py'}:engine_move"
    with load_reward_functions([legal, engine]) as rewards:
        scores = rewards(prompts, completions, {"engine_move": ["Nf3", "e5", "Nf3", "Nf3", None, "Nf3", "e4"]})
    assert scores.by_function[legal] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert scores.by_function[engine] == [1.0, 0.0, 0.0, 0.0, None, 0.0, None]


def test_a_model_is_measured_and_one_that_writes_noise_plays_nothing_legal(tiny_run: Path, by_engine: Path) -> None:
    done = carried_out("measure.py", tiny_run, by_engine / "validation.jsonl", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured == {"positions": len(lines(by_engine / "validation.jsonl")), "legal": 0.0, "agrees": 0.0}


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (RECIPE / "README.md").read_text(), re.M | re.S)
    return [shlex.split(line) for line in "".join(blocks).splitlines()]


def shortened(words: list[str], engine: str) -> list[str]:
    """A line of the README with a few games, a tiny model and a few steps."""
    if "recipes/chess/games.py" in words:
        return [*words, "--games", "24", "--positions", "8", "--nodes", "5", "--workers", "1", "--engine", engine]
    if words[0] == "lmforge" and words[1] != "prepare":
        few = {"train.steps": 2, "train.global_batch_size": 16, "train.compile": "off", "launch.processes": 1}
        few |= {"train.device": "cpu", "train.threads": 1, "validation.sequences": 4, "log.every_steps": 1}
        if words[1] == "pretrain":
            shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
            few |= {f"model.{name}": size for name, size in {**shape, "num_key_value_heads": 2}.items()}
            few |= {"schedule.warmup_steps": 1}
        return [*words, *(word for name, value in few.items() for word in (f"--{name}", str(value)))]
    return words


@pytest.mark.parametrize("engine", [pytest.param("stockfish", marks=pytest.mark.needs("stockfish")), "random"])
def test_what_the_readme_says_works_from_the_first_game_to_rewards(engine: str, tmp_path: Path, lmforge: Command) -> None:
    shutil.copytree(RECIPE.parent, tmp_path / "recipes")
    measured = []
    for words in readme_commands():
        line = shortened(words, engine)
        if line[0] == "lmforge":
            done = lmforge(*line[1:], cwd=tmp_path)
        else:
            done = subprocess.run([sys.executable, *line[1:]], capture_output=True, text=True, timeout=200, cwd=tmp_path)
        assert done.returncode == 0, f"{shlex.join(line)}\n{done.stdout}\n{done.stderr}"
        if "recipes/chess/measure.py" in line:
            measured.append(json.loads(done.stdout))
    assert len(measured) == 2
    for each in measured:
        assert 0 <= each["legal"] <= 1
        assert (each["agrees"] is None) == (engine == "random")
    begun = Run(tmp_path / "runs" / "chess-legal").load_config().model.source
    assert begun is not None
    assert begun.is_relative_to("runs/chess-moves")
    answers = lines(tmp_path / "runs" / "chess-legal" / "completions" / "set-000000-rank-0.jsonl")
    assert all(answer["reward"] in (0.0, 1.0) for answer in answers)


def test_the_recipe_of_codellama_begins_from_its_weights_and_tokens_of_its_tokenizer(
    tmp_path: Path, tiny_run: Path, lmforge: Command, by_engine: Path
) -> None:
    recipe = RECIPE.parent / "codellama-7b-chess.toml"
    assert lmforge("export", tiny_run, tmp_path / "models" / "CodeLlama-7b-hf").returncode == 0
    shutil.copytree(by_engine, tmp_path / "data" / "chess")
    commands = [line.removeprefix("#   ") for line in recipe.read_text().splitlines() if line.startswith("#   lmforge")]
    [prepare] = [line for line in commands if line.startswith("lmforge prepare")]
    prepared = lmforge(*prepare.split()[1:], cwd=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    few = ["--data.sequence_length", 64, "--train.global_batch_size", 4, "--train.steps", 1, "--train.device", "cpu"]
    done = lmforge("pretrain", recipe, *few, "--train.compile", "off", "--launch.processes", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    begun = Run(tmp_path / "runs" / "codellama-7b-chess").load_config()
    assert begun.model.source == Path("models/CodeLlama-7b-hf")
    assert begun.data.folder == Path("data/chess/tokens-codellama")
    [dry] = [line for line in commands if "--dry-run" in line]
    told = lmforge(*dry.replace("recipes/codellama-7b-chess.toml", str(recipe)).split()[1:], cwd=tmp_path)
    assert "sharding   full-shard: one copy over 4 of 4 ranks" in told.stdout, told.stderr
