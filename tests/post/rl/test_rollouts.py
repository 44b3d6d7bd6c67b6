"""Where completions end, and metrics of groups of them, against enumerating all ways to draw some
of them.
"""

import json
import math
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.records.runs import Run
from lmforge.ops.report.run_data import read_run, verdict
from lmforge.post.objectives.policy import completion_metric_names, pass_at_k
from lmforge.post.rl.rollout_batches import lay_out
from lmforge.post.rl.sampler import SampledCompletion
from lmforge.serve.decoding.model_loading import load_model
from tests.seeds import fresh_random


def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_hold_a_pass() -> None:
    draw = fresh_random()
    for _ in range(20):
        samples = draw.randint(2, 7)
        rows = [[draw.choice([True, False, None]) for _ in range(samples)] for _ in range(4)]
        passed = torch.tensor([[each is True for each in row] for row in rows])
        known = torch.tensor([[each is not None for each in row] for row in rows])
        for k in range(1, samples + 1):
            for result, row in zip(pass_at_k(k, passed, known).tolist(), rows, strict=True):
                draws = [
                    any(some)
                    for some in combinations([each for each in row if each is not None], k)
                ]
                assert (
                    math.isnan(result)
                    if not draws
                    else math.isclose(result, sum(draws) / len(draws), abs_tol=1e-12)
                )


def test_pass_at_k_is_a_metric_for_powers_of_two_below_the_size_of_a_group() -> None:
    assert [name for name in completion_metric_names(8) if name.startswith("pass")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@n",
    ]
    assert [name for name in completion_metric_names(6) if name.startswith("pass")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@n",
    ]
    assert [name for name in completion_metric_names(2) if name.startswith("pass")] == [
        "pass@1",
        "pass@n",
    ]


def test_given_tokens_between_sampled_ones_are_read_and_never_learned() -> None:
    completion = SampledCompletion([7, 8], [-0.5, -0.25], [3, 3], stopped=True)
    completion.add_given([20, 21])
    completion.extend(SampledCompletion([9], [-2.0], [4]))
    batch = lay_out([[1, 2]], [completion], 8)
    assert batch.tokens.tolist() == [[1, 2, 7, 8, 20, 21, 0, 0]]
    assert batch.labels.tolist() == [[-100, 7, 8, -100, -100, 9, -100, -100]]
    assert batch.extra("old_logprobs").tolist() == [[0, -0.5, -0.25, 0, 0, -2, 0, 0]]
    assert (completion.num_sampled, completion.stopped) == (3, False)


@pytest.mark.parametrize("conversational", [False, True])
def test_completions_end_at_the_stop_tokens_of_the_model_folder(
    conversational: bool, models: Path, byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = shutil.copytree(models / "endless", tmp_path / "model")
    [stop] = byte_tokenizer.encode("b")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, stop], "do_sample": False})
    )
    turn = [{"role": "user", "content": "b"}]
    (tmp_path / "prompts.jsonl").write_text(
        (json.dumps({"prompt": turn if conversational else "b"}) + "\n") * 8
    )
    (tmp_path / "rewards.py").write_text(
        "def reward(prompts, completions):\n    return [1.0 for _ in prompts]\n"
    )
    options = {
        "method": "grpo",
        "model.source": folder,
        "data.files": tmp_path / "prompts.jsonl",
        "train.steps": 1,
    }
    options |= {
        "rollout.reward_functions": tmp_path / "rewards.py:reward",
        "rollout.num_generations": 2,
    }
    options |= {
        "rollout.max_completion_length": 6,
        "rollout.temperature": 0.1,
        "train.global_batch_size": 2,
    }
    options |= {
        "run.folder": tmp_path,
        "run.name": "run",
        "data.sequence_length": 24,
        "train.device": "cpu",
    }
    options |= {"train.dtype": "fp32", "train.compile": "off", "train.threads": 1}
    assert (
        command(
            [
                "align",
                *(str(word) for name, value in options.items() for word in (f"--{name}", value)),
            ]
        )
        == 0
    )
    [table] = (tmp_path / "run" / "completions").glob("*.jsonl")
    loaded = load_model(folder, torch.device("cpu"), torch.float32)
    prompt = (
        loaded.chat_template.encode_prompt(turn) if conversational else byte_tokenizer.encode("b")
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder).generate(
        torch.tensor([prompt]), max_new_tokens=6
    )
    expected = {
        "completion": byte_tokenizer.decode(theirs[0, len(prompt) :].tolist()),
        "ended": True,
    }
    for line in table.read_text().splitlines():
        assert expected.items() <= json.loads(line).items()


@pytest.mark.parametrize(
    ("reward", "words"),
    [("always_raises", "ZeroDivisionError: division by zero"), ("as_in_trl", "TypeError: ")],
)
def test_a_run_whose_rewards_all_fail_ends_with_the_error(
    reward: str,
    words: str,
    grpo: Callable[..., list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(grpo("run", "--faults.max_bad_steps", 2, steps=9, reward=reward)) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    spec = f"{tmp_path / 'rewards.py'}:{reward}"
    assert line.startswith(
        f"lmforge: all rewards of 2 steps in a row have failed: reward {spec}: {words}"
    )
    assert ("; completions are text here, where TRL's are lists of messages: " in line) == (
        reward == "as_in_trl"
    )
    assert [record["step"] for record in Run(tmp_path / "run").read_metrics()] == [1]


def test_a_shorter_run_whose_rewards_all_fail_does_not_finish(
    grpo: Callable[..., list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(grpo("run", steps=1, reward="always_raises")) == 1
    assert "all rewards of 1 step in a row have failed" in capfd.readouterr().err.splitlines()[-1]


def test_a_resumed_run_whose_rewards_all_fail_does_not_finish(
    grpo: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(grpo("run", steps=1, reward="raises_from_now_on")) == 0
    (tmp_path / "now").touch()
    assert command(grpo("run", steps=2, reward="raises_from_now_on")) == 1
    assert "all rewards of 1 step in a row have failed" in capfd.readouterr().err.splitlines()[-1]


def test_each_step_on_a_set_counts_once_where_rewards_fail(
    grpo: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--faults.max_bad_steps",
        3,
        "--rollout.num_iterations",
        2,
        "--rollout.max_completion_length",
        2,
    ]
    assert command(grpo("run", *words, steps=9, reward="always_raises")) == 1
    assert "all rewards of 3 steps in a row have failed" in capfd.readouterr().err.splitlines()[-1]
    assert [record["step"] for record in Run(tmp_path / "run").read_metrics()] == [1, 2]


def test_rewards_of_which_some_fail_are_counted_in_the_log_and_named_in_the_report(
    grpo: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every second call fails."""
    assert (
        command(grpo("run", "--faults.max_bad_steps", 2, steps=4, reward="sometimes_raises")) == 0
    )
    printed = capfd.readouterr().out
    steps = [line for line in printed.splitlines() if "/4  " in line]
    assert ["100% of rewards failed" in line for line in steps] == [True, False, True, False]
    assert not [line for line in steps if "0% of rewards failed" in line.replace("100%", "")]
    reason = (
        f"reward {tmp_path / 'rewards.py'}:sometimes_raises: ZeroDivisionError: division by zero"
    )
    said = verdict(read_run(Run(tmp_path / "run")))
    assert f" 50.00% of rewards failed. {reason}" in said
    assert printed.count(reason) == 1
    assert "Nothing went wrong" not in said
