"""Environments of verifiers, by the real package, which has an environment of its own
(build/verifiers, 0.7 GB).
"""

import json
import os
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from lmforge.post.environments.process import EnvironmentPool, identify
from tests.post.environments.packages import ROOT, python_with
from tests.post.rl.test_episodes import TEMPLATE, step_of_grpo

VERSION = "0.4.0"
TASKSETS = Path(__file__).with_name("tasksets")

# Episodes with answers that are known: [[idx, answer, answer …] …] of the environment.
EPISODES = """
import json, sys
from lmforge.post.environments.process import EnvironmentPool
from lmforge.core.errors import UserError

def message(answer):
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    call = {"id": "call00000", "type": "function", "function": {"name": answer["name"], "arguments": {}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}

spec, episodes, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
with EnvironmentPool(spec, timeout_seconds=seconds) as pool:
    try:
        told = {"declared": pool.declarations[""]._asdict()}
    except UserError as problem:
        raise SystemExit(str(problem))
    told["begun"] = [list(reply) for reply in pool.reset([{"idx": idx, "prompt": []} for idx, *_ in episodes])]
    told["steps"] = []
    for turn in range(1, max(map(len, episodes), default=0)):
        failed = pool.failed_episodes
        going = {at: message(given[turn]) for at, given in enumerate(episodes) if turn < len(given) and at not in failed}
        told["steps"].append({at: list(reply) for at, reply in pool.step(going).items()})
    nothing = {"prompts": [""] * len(episodes), "completions": [""] * len(episodes), "columns": {}}
    told["rewards"] = pool.score(nothing, 5.0)[spec].rewards
print(json.dumps(told))
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """The interpreter of verifiers' environment, with the tasksets of these tests, and a home for
    its caches.
    """
    python = python_with("verifiers", f"verifiers=={VERSION}", "uv")
    places = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(python.parents[1] / "home"),
    }
    env = {**os.environ, **places, "PYTHONPATH": f"{ROOT}:{TASKSETS}"}
    return subprocess.run([*map(str, (python, *words))], env=env, capture_output=True, text=True)


def play(taskset: str, *episodes: list[Any], seconds: float = 300) -> Any:
    done = run("-c", EPISODES, f"verifiers:{taskset}", json.dumps(episodes), seconds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(replies: dict[str, Any]) -> dict[int, list[str]]:
    return {
        int(at): [message["content"] for message in messages]
        for at, (messages, *_) in replies.items()
    }


def test_without_the_package_one_line_says_so() -> None:
    with pytest.raises(
        UserError,
        match=r"^environment verifiers:word: needs the package verifiers, from 0\.4, which is not",
    ):
        EnvironmentPool("verifiers:word").declarations  # noqa: B018


def test_a_run_is_another_one_with_another_file_of_the_environment(tmp_path: Path) -> None:
    spec = f"verifiers:{tmp_path}/env.toml"
    (tmp_path / "env.toml").write_text("[env]")
    before = identify(spec)
    (tmp_path / "env.toml").write_text("[env]\nmax_concurrent_agents = 2")
    assert identify(spec) != before
    assert identify("verifiers:word") == ["verifiers:word", ""]


def test_a_run_is_another_one_with_another_taskset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "env.toml").write_text(
        '[env.taskset]\nid = "tasks-alone"\n[env.agent]\nharness.id = "harness_folder"'
    )
    taskset, harness = tmp_path / "tasks_alone.py", tmp_path / "harness_folder" / "__init__.py"
    harness.parent.mkdir()
    seen = []
    for text in ("", "# another one"):
        for path in (taskset, harness):
            path.write_text(text)
            seen.append(
                (identify("verifiers:tasks-alone"), identify(f"verifiers:{tmp_path}/env.toml"))
            )
    by_name, by_file = zip(*seen[1:], strict=True)
    assert [len({*map(tuple, each)}) for each in (by_name, by_file)] == [2, 3]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_answer_goes_to_the_harness_and_the_reward_of_the_rubric_comes_back() -> None:
    told = play("saying", [0, "[go()]"], [1, "go"], [2, "go"])
    assert (told["declared"]["tools"], told["declared"]["reply_roles"]) == ([], ["tool"])
    assert [message["content"] for message in told["begun"][0][0]] == ["Be brief.", "Say [go()]"]
    assert told["begun"][2][3] == "column idx: 2, but the taskset has 2 tasks"
    # Replies as (messages, done, failed calls, error).
    assert told["steps"] == [{"0": [[], True, 0, ""], "1": [[], True, 0, ""]}]
    assert told["rewards"] == [1.5, 0.5, None]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tools_of_the_taskset_are_run_by_its_harness_and_an_episode_that_is_cut_has_a_reward() -> (
    None
):
    go, wrong = {"name": "go"}, {"name": "nothing"}
    told = play("counting", [0, go, go], [1, go, "x"], [1, go], [1, wrong])
    [tool] = told["declared"]["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("go", "Go on.")
    first, last = told["steps"]
    assert contents(first) == {0: ["1"], 1: ["1"], 2: ["1"], 3: ["error: unknown tool 'nothing'"]}
    assert first["0"][0][0] == {
        "role": "tool",
        "name": "go",
        "tool_call_id": "call00000",
        "content": "1",
    }
    # The task's own stop, and an answer without calls.
    assert last == {"0": [[], True, 0, ""], "1": [[], True, 0, ""]}
    assert told["rewards"] == [2.0, 1.0, 1.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_environment_that_answers_as_a_user_is_a_conversation() -> None:
    told = play("guessing", [0, "x", "y", "seven"], [0, "seven"], [0, "x"])
    assert told["declared"]["reply_roles"] == ["tool", "user"]
    assert told["begun"][0][0] == [{"role": "user", "content": "Guess"}]
    assert [contents(step) for step in told["steps"]] == [
        {0: ["No. 2 left"], 1: [], 2: ["No. 2 left"]},
        {0: ["No. 1 left"]},
        {0: []},
    ]
    assert told["rewards"] == [3.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_a_harness_does_wrong_is_one_line_and_its_episode_has_no_reward() -> None:
    acts = ("good", "silent", "hangs", "rewrites", "repeats", "tools", "raises", "images")
    told = play("breaking", *([at, "x"] for at in range(len(acts))), seconds=60)
    errors = {at: reply[3] for at, reply in enumerate(told["begun"]) if reply[3]}
    errors |= {int(at): reply[3] for at, reply in told["steps"][0].items() if reply[3]}
    assert {acts[at]: error for at, error in errors.items()} == {
        "silent": "its harness ended without a request to the model",
        "hangs": "no answer in 60 seconds",
        "rewrites": (
            "its harness did not append to the conversation: message 1 of 2 was left out or is"
            " another one"
        ),
        "repeats": "its harness asked again without a new message",
        "tools": "its harness offers other tools than for the first task: another, not none",
        "raises": (
            "its rollout failed: HarnessError: harness 'breaking': RuntimeError: its line … and"
            " another"
        ),
        "images": "its harness sent a message that is not text alone",
    }
    assert told["rewards"] == [0.0, *[None] * 7]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_answer_that_no_harness_gets_is_a_failure_and_a_retry_is_none(tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text(
        '[env.taskset]\nid = "leaving"\n[env.agent]\nruntime.type ='
        ' "subprocess"\nretries.max_retries = 2\n'
    )
    # good, retried, leaves, after and a task that cannot be loaded: of two that leave before they
    # are read, one is answered.
    told = play(f"{tmp_path}/env.toml", [3, "x"], [2], [2, "x"], [1, "x"], [4, "x"], seconds=60)
    assert [bool(reply[3]) for reply in told["begun"]] == [False, False, False, False, True]
    assert "the disk of the tasks is gone" in told["begun"][4][3]
    assert told["steps"] == [
        {
            "0": [[], True, 0, ""],
            "2": [[], False, 0, "its harness had ended when the model answered"],
            "3": [[], True, 0, ""],
        }
    ]
    assert told["rewards"] == [10.5, 0.5, None, 10.5, None]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing_here", "taskset 'nothing_here' not found"),
        ("json", "taskset module 'json' exports no Taskset subclass"),
        ("{}/nothing.toml", "No such file or directory"),
        ("{}/other.toml", "the file has no table [env], as configurations of verifiers have"),
        ("{}/bound.toml", "env.agent.max_turn: Extra inputs are not permitted"),
        ("raising", "KeyError: 'its own'"),
        ("responding", "harnesses are answered at /v1/chat/completions here, not at /v1/responses"),
    ],
)
def test_an_environment_that_is_not_there_is_one_line(
    name: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text("[model]\n")
    (tmp_path / "bound.toml").write_text('[env]\ntaskset.id = "saying"\nagent.max_turn = 2\n')
    done = run("-c", EPISODES, f"verifiers:{name.format(tmp_path)}", "[]", 300)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    line = done.stderr.strip()
    assert line.startswith("environment verifiers:")
    assert problem in line


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("taskset", ["saying", "counting"])
def test_grpo_learns_from_tasks_of_verifiers(
    taskset: str, scripted: Callable[..., LanguageModel], byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    byte_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    begin, end = (byte_tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    model = scripted(dict(pairwise([begin, *byte_tokenizer.encode("[go()]"), end])))
    export_folder(model, model.config, tmp_path / "model", tokenizer_folder=tmp_path / "tokenizer")
    (tmp_path / "tasks.jsonl").write_text('{"idx": 0}\n{"idx": 1}\n' * 2)
    spec, more = (
        f"verifiers:{taskset}",
        {"data.files": tmp_path / "tasks.jsonl", "train.steps": 2, "rollout.max_turns": 3},
    )
    if taskset == "counting":
        # verifiers' own bound ends the episode before ours does.
        agent = '[env.agent]\nmax_turns = 2\nharness.id = "null"\nruntime.type = "subprocess"\n'
        (tmp_path / "env.toml").write_text(f'[env.taskset]\nid = "counting"\n{agent}')
        spec = f"verifiers:{tmp_path}/env.toml"
    more |= {"rollout.environment": spec, "rollout.environment_timeout_seconds": 300}
    done = run("-m", "lmforge", *step_of_grpo(tmp_path, tmp_path, **more))
    assert done.returncode == 0, done.stderr
    records = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    assert [(record["environment_failures"], record["no_reward"]) for record in records] == [
        (0.0, 0.0)
    ] * 2
    tables = sorted((tmp_path / "run" / "completions").glob("set-*.jsonl"))
    lines = [json.loads(line) for table in tables for line in table.read_text().splitlines()]
    assert len(lines) == 8
    for line in lines:
        answers = [turn for turn in line["turns"] if turn["role"] == "assistant"]
        calls = [turn for turn in answers if turn.get("tool_calls")]
        if taskset == "saying":
            said = answers[0]["content"] == line["prompt"][-1]["content"].removeprefix("Say ")
            assert (len(answers), line["reward"]) == (1, said + 0.5)
        else:
            assert (len(answers) <= 2, line["reward"]) == (True, len(calls))
    assert any(line["reward"] >= 1 for line in lines)
