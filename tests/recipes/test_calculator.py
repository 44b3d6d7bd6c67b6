"""The calculator recipe: its problems, its reward, and that its model learns to call."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.options.load import STAGES, parse_config
from lmforge.ops.options.running import PipelineOptions
from lmforge.ops.verbs.running.pipeline import plan_stages
from lmforge.post.rewards.functions import load_reward_functions

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the recipe and its data, made as its file says."""
    shutil.copytree(RECIPE, tmp_path / "recipes" / "calculator")
    words = [sys.executable, "recipes/calculator/problems.py", "data/calculator"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp_path


@pytest.mark.slow
def test_its_answers_are_right_and_no_problem_is_in_two_of_its_files(place: Path) -> None:
    data = place / "data" / "calculator"
    chats, prompts, validation, texts = (
        lines(data / f"{name}.jsonl") for name in ("chats", "prompts", "validation", "texts")
    )
    asked = [row["prompt"][0]["content"] for row in prompts + validation]
    asked += [row["messages"][0]["content"] for row in chats]
    asked += [re.findall("What is [^?]*[?]", row["text"])[0] for row in texts]
    assert len(set(asked)) == len(asked)
    values = {
        question: str(eval(question.removeprefix("What is ").removesuffix("?")))
        for question in asked
    }
    assert all(row["answer"] == values[row["prompt"][0]["content"]] for row in prompts + validation)
    calls = 0
    for row in chats:
        question, *middle, answer = row["messages"]
        assert answer["content"] == f"It is {values[question['content']]}."
        assert [turn["content"] for turn in middle] in ([], ["", values[question["content"]]])
        calls += len(middle) == 2
    assert calls == -(-len(chats) // 3)


def test_an_answer_is_rewarded_if_it_is_right_and_nothing_else() -> None:
    answers = [
        [{"role": "assistant", "content": content}]
        for content in ("It is 700.", "It is 7.", "700", "It is 700. Or 8.")
    ]
    with load_reward_functions([f"{RECIPE}/reward.py:right"]) as rewards:
        assert rewards(["?"] * 4, answers, {"answer": ["700"] * 4}).rewards == [1.0, 0.0, 0.0, 0.0]


def test_the_stages_of_its_pipeline_are_valid() -> None:
    file = RECIPE / "pipeline.toml"
    stages = plan_stages(PipelineOptions.model_validate(tomllib.loads(file.read_text())), file)
    assert [stage.name for stage in stages] == ["prepare", "pretrain", "sft", "align"]
    for stage in stages[1:]:
        assert stage.name in STAGES
        parse_config(STAGES[stage.name], stage.arguments[1:])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_model_learns_to_call_the_calculator_and_its_held_out_reward_rises(place: Path) -> None:
    words = [sys.executable, "-m", "lmforge", "run", "recipes/calculator/pipeline.toml"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = lines(place / "runs" / "calculator-align" / "metrics.jsonl")
    rewards = [record["val/reward"] for record in records if "val/reward" in record]
    assert rewards[-1] > rewards[0] + 0.5
    calls = [record["tool_calls"] for record in records if "tool_calls" in record]
    assert calls[-1] > calls[0]
