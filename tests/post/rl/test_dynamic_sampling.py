"""Dynamic sampling: further prompts in place of groups whose rewards are all equal."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.cli import run as command
from lmforge.serve.decoding.model_loading import load_model
from tests.conftest import Command

REWARDS = """
def half_even(prompts, completions):
    # Nothing can be learned from prompts that begin with one of the first four letters.
    return [1.0 if prompt[0] in "abcd" else len(set(text)) / 10 for prompt, text in zip(prompts, completions)]

def even(prompts, completions):
    return [0.0 for _ in prompts]
"""


@pytest.fixture
def sampling(grpo: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "rewards.py").write_text(REWARDS)

    def words(
        name: str, *more: object, steps: int = 4, reward: str = "half_even", rounds: int = 8
    ) -> list[str]:
        rounds_of = ["--rollout.dynamic_sampling_rounds", rounds, "--rollout.num_iterations", 2]
        return grpo(
            name,
            *rounds_of,
            "--train.global_batch_size",
            16,
            "--train.threads",
            1,
            *more,
            steps=steps,
            reward=reward,
        )

    return words


def rows(run: Path, pattern: str) -> list[dict[str, Any]]:
    tables = sorted((run / "completions").glob(pattern))
    lines = [json.loads(line) for table in tables for line in table.read_text().splitlines()]
    return sorted(lines, key=lambda row: (row["prompt"], row["completion"]))


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_groups_of_equal_rewards_are_replaced_alike_on_any_number_of_ranks(
    sampling: Callable[..., list[str]], lmforge: Command, tmp_path: Path
) -> None:
    assert command(sampling("one")) == 0
    done = lmforge(*sampling("two"), cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    one, two = tmp_path / "one", tmp_path / "two"
    first = rows(one, "set-000000-rank-*")
    assert {row["prompt"] for row in first if row["reward"] == 1.0}
    replaced = rows(one, "set-000000-round-1-rank-*")
    assert 0 < len(replaced) < len(first) == 32
    for pattern in (
        "set-000000-rank-*",
        *(f"set-000000-round-{number}-rank-*" for number in range(1, 9)),
    ):
        assert rows(one, pattern) == rows(two, pattern)
    for ours, theirs in zip(records(one), records(two), strict=True):
        assert ours["frac_reward_zero_std"] == theirs["frac_reward_zero_std"] == 0
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_run_that_resumes_amid_a_set_replaces_what_an_uninterrupted_one_does(
    sampling: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert command(sampling("whole")) == 0
    assert command(sampling("parts", "--train.steps", 1)) == 0
    assert command(sampling("parts")) == 0
    for pattern in ("set-000000-*", "set-000001-*"):
        assert rows(tmp_path / "whole", pattern) == rows(tmp_path / "parts", pattern)
    ours, theirs = (
        load_model(tmp_path / name, torch.device("cpu"), torch.float32).model.state_dict()
        for name in ("whole", "parts")
    )
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_where_rewards_stay_equal_a_line_says_so_once_and_a_metric_how_many(
    sampling: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(sampling("run", reward="even", rounds=2)) == 0
    assert (
        capfd.readouterr().err.count(
            "the rewards of 8 groups are still all equal after 2 rounds of further prompts"
        )
        == 1
    )
    assert [record["frac_reward_zero_std"] for record in records(tmp_path / "run")] == [1.0] * 4
    tables = {table.name for table in (tmp_path / "run" / "completions").glob("set-000001-*")}
    assert tables == {f"set-000001-{which}rank-0.jsonl" for which in ("", "round-1-", "round-2-")}
