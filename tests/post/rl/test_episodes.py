"""Rollouts of several turns: what is trained is what was sampled, and nothing that an environment
says or breaks.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmforge.cli import run as command
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from lmforge.post.environments.appending import TurnEncoder
from lmforge.post.environments.process import EnvironmentPool
from lmforge.post.rl.episodes import EpisodePlayer, Turns
from lmforge.post.rl.rollout_batches import lay_out
from lmforge.post.rl.sampler import SamplingSettings, _EngineSession
from lmforge.serve.decoding.engine import Engine
from lmforge.text.chat.preferences import TokenizedPrompt
from tests.conftest import Command
from tests.serve.conftest import Server

# Calls as Python writes them, so that a model that knows one successor of each byte can write one.
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}
{{- '<|assistant|>' + m.content }}{% if m.tool_calls %}[
{%- for call in m.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{{ '<|end|>' }}
{%- else %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
FILE = """
import os
import time
from lmforge import Environment, Reply

if __name__ == "environment":
    with open(__file__ + ".opened", "a") as file:
        print(os.getpid(), file=file)


class DiesElsewhere(Environment):
    reply_roles = ["user"]

    def step(self, message):
        if os.environ.get("RANK") == "1":
            os._exit(1)
        return Reply([{"role": "user", "content": "Again."}])


class FailsLater(Environment):
    reply_roles = ["user"]

    def reset(self, **row):
        with open(__file__ + ".resets", "a") as file:
            file.write("x")
            if file.tell() > 1:
                raise ConnectionError("the database is gone")
        return [{"role": "user", "content": "Go"}]

    def step(self, message):
        return Reply([], 1.0)


class Tool:
    def reset(self, **row):
        self.calls = 0
        if row["limit"] < 0:
            raise RuntimeError("a bad row")
        self.limit = row["limit"]
        return row.get("said")

    def go(self) -> str:
        '''Go on.'''
        self.calls += 1
        if self.calls >= self.limit:
            raise SystemExit("broken")
        return f"<|end|>{self.calls}"

    def get_reward(self):
        return self.calls


class Talk(Environment):
    reply_roles = ["user"]

    def reset(self, limit, **row):
        self.left = limit
        return [{"role": "user", "content": "Hello.", "note": "\\ud800"}]

    def step(self, message):
        self.left -= 1
        return Reply([{"role": "user", "content": "Again."}], reward=len(message["content"]) / 10, done=not self.left)


class Waits(Environment):
    reply_roles = ["user"]
    first = __file__ + ".first"

    def reset(self, limit, **row):
        self.turn = 0
        return [{"role": "user", "content": "Hello."}]

    def step(self, message):
        self.turn += 1
        if self.turn == 1:
            try:
                with open(self.first, "x") as file:
                    while not os.path.getsize(self.first):  # until another is in its second turn
                        time.sleep(0.01)
            except FileExistsError:
                pass
        else:
            with open(self.first, "a") as file:
                print("goes on", file=file)
        return Reply([{"role": "user", "content": "Again."}], reward=1.0, done=self.turn == 2)


class Early(Environment):
    reply_roles = ["user"]
    begins_early, begun = True, 0

    def begin(self, call, given):
        Early.begun += call == "step"

    def step(self, message):
        return Reply([{"role": "user", "content": f"{Early.begun} begun"}], reward=1.0)


def look(word: str) -> str:
    '''Look it up.

    Args:
        word: what
    '''
    return word


class Says(Environment):
    def reset(self, reply, **row):
        self.reply = reply
        return row["prompt"]

    def step(self, message):
        return Reply(self.reply, reward=1.0)


SEVERAL = {"talk": Talk, "look": look}


def lengths(prompts, completions, environments):
    return [float(len(each)) for each in completions]
"""


@pytest.fixture(scope="module")
def caller(
    scripted: Callable[..., LanguageModel],
    byte_tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A model that calls go whatever it is told, with its tokenizer and an environment's file."""
    folder = tmp_path_factory.mktemp("caller")
    byte_tokenizer.save(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    begin, end = (byte_tokenizer.token_to_id(token) for token in ("<|assistant|>", "<|end|>"))
    assert begin is not None
    assert end is not None
    model = scripted(dict(pairwise([begin, *byte_tokenizer.encode("[go()]"), end])), blocks=2)
    export_folder(model, model.config, folder / "model", tokenizer_folder=folder / "tokenizer")
    (folder / "own.py").write_text(FILE)
    return folder


@contextmanager
def player(folder: Path, name: str, **bounds: int) -> Iterator[tuple[EpisodePlayer, TurnEncoder]]:
    with EnvironmentPool(f"{folder}/own.py:{name}", processes=2) as pool:
        declared = pool.declarations[""]
        encoder = TurnEncoder(Tokenizer.open(folder / "tokenizer"), declared.tools)
        given = {"max_turns": 3, "max_tokens": 60, "max_length": 600, **bounds}
        encoder.check(declared.reply_roles, given["max_turns"])
        yield EpisodePlayer(Turns(pool, {"": encoder}), **given), encoder


def play(
    playing: EpisodePlayer,
    encoder: TurnEncoder,
    model: LanguageModel,
    rows: list[dict[str, Any]],
    seeds: list[int] | None = None,
) -> Any:
    prompt = [{"role": "user", "content": "Go"}]
    ids = np.array(encoder.encode_prompt(prompt), np.int32)
    prompts = [TokenizedPrompt(ids, prompt, row) for row in rows]  # type: ignore[arg-type]
    settings = SamplingSettings(1.0, 1.0, 261, 600, encoder.stop_token_ids, 4)
    engine = Engine(model, vocab_size=261, max_batch_size=4, max_length=600)
    session = _EngineSession(engine, settings, 7, greedy=seeds is None)
    return playing.play(prompts, seeds or [0] * len(rows), session, lambda: None)


@pytest.fixture(scope="module")
def model(
    caller: Path, scripted: Callable[..., LanguageModel], byte_tokenizer: Tokenizer
) -> LanguageModel:
    ids = [
        byte_tokenizer.token_to_id("<|assistant|>"),
        *byte_tokenizer.encode("[go()]"),
        byte_tokenizer.token_to_id("<|end|>"),
    ]
    return scripted(dict(pairwise(ids)))  # type: ignore[arg-type]


def test_only_sampled_tokens_are_labels_and_the_sequence_is_the_whole_conversation(
    caller: Path, model: LanguageModel
) -> None:
    with player(caller, "Tool") as (playing, encoder):
        [episode] = play(playing, encoder, model, [{"limit": 9, "said": " on"}])
    assert [message["role"] for message in episode.turns] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [each["content"] for each in episode.turns if each["role"] == "tool"] == [
        "<|end|>1",
        "<|end|>2",
    ]
    assert episode.messages[-1]["content"] == "Go on"
    assert episode.completion.stopped
    ids = [*episode.prompt_ids, *episode.completion.tokens]
    # All that was said, as the template renders it; the environment's <|end|> is text.
    whole = encoder.encode_prompt(
        [*episode.messages, *episode.turns, {"role": "user", "content": "x"}]
    )
    assert whole[: len(ids)] == ids
    batch = lay_out([episode.prompt_ids], [episode.completion], 600)
    tokenizer = Tokenizer.open(caller / "tokenizer")
    labels = [id for id in batch.labels[0].tolist() if id != -100]
    assert tokenizer.decode(labels, include_special_tokens=True) == "[go()]<|end|>" * 3
    assert episode.completion.num_sampled == len(labels)


def test_episodes_do_not_depend_on_others_and_one_that_fails_is_left_out(
    caller: Path, model: LanguageModel
) -> None:
    rows = [
        {"limit": 9},
        {"limit": -1},
        {"limit": 2},
        {"limit": 9},
        {"limit": 9},
        {"limit": 9, "said": "!" * 560},
    ]
    rows.append({"limit": 9, "said": "\ud800"})
    with player(caller, "Tool") as (playing, encoder):
        episodes = play(playing, encoder, model, rows, seeds=list(range(7)))
        [alone] = play(playing, encoder, model, rows[3:4], seeds=[3])
    assert [bool(episode.error) for episode in episodes] == [
        False,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert "a bad row" in episodes[1].error
    assert "broken" in episodes[2].error
    assert "leave no room" in episodes[5].error
    assert "half of a surrogate pair" in episodes[6].error
    assert episodes[3].completion == alone.completion
    assert not episodes[1].completion.tokens


def test_an_episode_ends_where_no_answer_fits_any_more_and_counts_as_truncated(
    caller: Path, model: LanguageModel
) -> None:
    with player(caller, "Tool", max_tokens=17) as (playing, encoder):
        [episode] = play(playing, encoder, model, [{"limit": 9}])
    assert [message["role"] for message in episode.turns] == ["assistant"]
    assert len(episode.completion.tokens) == 7
    assert not episode.completion.stopped
    # And an answer that is cut is no call.
    with player(caller, "Tool", max_tokens=4) as (playing, encoder):
        [episode] = play(playing, encoder, model, [{"limit": 9}])
    assert episode.turns == [{"role": "assistant", "content": "[go("}]


USER = {"role": "user", "content": "Go"}
UNUSABLE = [
    (
        [USER, {"role": "assistant", "content": "I do."}, USER],
        "replied as 'assistant'; its reply_roles are user",
    ),
    ([{"role": "assistant", "content": "I do."}], "replied as 'assistant'"),
    # Without tools there is nothing for them to answer.
    ([{"role": "tool", "content": "1"}], "replied as 'tool'"),
    ([{"role": "user"}], "replied with what is not text alone"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "Go"}]}],
        "replied with what is not text alone",
    ),
    ([{**USER, "tool_calls": [{"name": "go"}]}], "replied with what is not text alone"),
    ([{**USER, "thinking": "Hm."}], "leaves out the reasoning"),
    ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    (
        [{"role": "user", "content": "y" * 10**7}],
        "said 10,000,000 characters, more than a sequence of 600 tokens can hold",
    ),
]


def test_a_reply_that_the_check_has_not_proved_or_that_is_no_text_ends_its_episode(
    caller: Path, model: LanguageModel
) -> None:
    with player(caller, "Says") as (playing, encoder):
        usable, *episodes = play(
            playing,
            encoder,
            model,
            [{"reply": reply} for reply in ([USER], *(said for said, _ in UNUSABLE))],
        )
    assert not usable.error
    assert [turn["role"] for turn in usable.turns] == ["assistant", "user"] * 2 + ["assistant"]
    for episode, (_, problem) in zip(episodes, UNUSABLE, strict=True):
        assert problem in episode.error
        assert "\n" not in episode.error
        assert [turn["role"] for turn in episode.turns] == ["assistant"]


def test_the_call_of_an_only_answer_is_made(caller: Path, model: LanguageModel) -> None:
    with player(caller, "Tool", max_turns=1) as (playing, encoder):
        [episode] = play(playing, encoder, model, [{"limit": 1}])
    assert [list(turn) for turn in episode.turns] == [["role", "content", "tool_calls"]]
    assert "broken" in episode.error


def test_calls_that_json_cannot_hold_or_too_many_of_them_are_content(caller: Path) -> None:
    tokenizer = Tokenizer.open(caller / "tokenizer")
    with player(caller, "Tool") as (_, encoder):
        end = sorted(encoder.turn_end_ids)
        for text in ('[go(x="\\ud800")]', "[go(x=1e999)]", f"[{'go(), ' * 100}go()]"):
            assert encoder.read_answer([*tokenizer.encode(text), *end], 0, ended=True) == {
                "role": "assistant",
                "content": text,
            }
        full = encoder.read_answer(
            [*tokenizer.encode(f"[{'go(), ' * 99}go()]"), *end], 999, ended=True
        )
    assert {len(call["id"]) for call in full["tool_calls"]} == {9}


def step_of_grpo(folder: Path, place: Path, **more: Any) -> list[str]:
    """The command of one step."""
    rows = [{"prompt": "Go", "limit": 2}, {"limit": 3}] * 4
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "method": "grpo",
        "model.source": folder / "model",
        "data.files": place / "prompts.jsonl",
        "train.steps": 1,
    }
    options |= {
        "rollout.num_generations": 2,
        "rollout.max_completion_length": 60,
        "train.global_batch_size": 4,
    }
    options |= {
        "run.folder": place,
        "run.name": "run",
        "data.sequence_length": 600,
        "train.device": "cpu",
    }
    options |= {
        "train.dtype": "fp32",
        "train.compile": "off",
        "train.threads": 1,
        "rollout.temperature": 0.1,
        **more,
    }
    return [
        "align",
        *(str(word) for name, value in options.items() for word in (f"--{name}", value)),
    ]


def aligned(folder: Path, place: Path, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    """The status of one step of GRPO, and the lines of its table."""
    status = command(step_of_grpo(folder, place, **more))
    tables = sorted((place / "run" / "completions").glob("set-*.jsonl"))
    return status, [json.loads(line) for table in tables for line in table.read_text().splitlines()]


def test_a_run_with_an_environment_of_ones_own_learns_from_its_rewards(
    caller: Path, tmp_path: Path
) -> None:
    file = caller / "own.py"
    more = {
        "rollout.environment": f"{file}:Talk",
        "rollout.reward_functions": f"{file}:lengths",
        "rollout.reward_weights": 0.5,
    }
    status, lines = aligned(caller, tmp_path, **more)
    assert status == 0
    assert len(lines) == 4
    for line in lines:
        answers = [turn for turn in line["turns"] if turn["role"] == "assistant"]
        assert line["prompt"] == [{"role": "user", "content": "Hello.", "note": "\ud800"}]
        assert [turn["content"] for turn in line["turns"] if turn["role"] == "user"] == [
            "Again."
        ] * (len(answers) - 1)
        assert len(answers) in (2, 3)
        assert line["parts"] == {
            f"{file}:Talk": pytest.approx(0.6 * len(answers)),
            f"{file}:lengths": len(line["turns"]),
        }
        assert line["reward"] == pytest.approx(0.6 * len(answers) + 0.5 * len(line["turns"]))
        assert line["completion"].startswith("assistant: [go()]\nuser: Again.\n")


def test_a_run_opens_its_environment_once(caller: Path, tmp_path: Path) -> None:
    opened = caller / "own.py.opened"
    opened.unlink(missing_ok=True)
    of_run = {
        "rollout.environment": f"{caller}/own.py:Talk",
        "rollout.reward_functions": f"{caller}/own.py:lengths",
    }
    status, _ = aligned(caller, tmp_path, **of_run, **{"rollout.environment_processes": 1})
    assert (status, len(opened.read_text().splitlines())) == (0, 1)


@pytest.mark.slow
def test_episodes_of_several_sets_are_played_at_a_time(
    caller: Path, serving: Callable[..., Server], tmp_path: Path
) -> None:
    server = serving(
        caller / "model", "--weight_updates", "--max_batch_size", 8, "--max_length", 600
    )
    file = caller / "own.py"
    more = {
        "rollout.environment": f"{file}:Talk",
        "rollout.reward_functions": f"{file}:lengths",
        "train.steps": 4,
    }
    more |= {
        "rollout.engine": "lmforge",
        "rollout.engine_urls": server.url,
        "rollout.max_staleness": 2,
    }
    status, lines = aligned(caller, tmp_path, **more)
    assert status == 0
    assert len(lines) == 4 * 4
    for line in lines:
        assert line["parts"][f"{file}:lengths"] == len(line["turns"])
        assert "error" not in line


def test_calls_of_a_turn_that_is_taken_together_have_all_begun_before_one_is_waited_for(
    caller: Path, model: LanguageModel
) -> None:
    with player(caller, "Early") as (playing, encoder):
        episodes = play(playing, encoder, model, [{}] * 6)
    # Two processes have three episodes each, of three turns.
    said = [
        [turn["content"] for turn in episode.turns if turn["role"] == "user"]
        for episode in episodes
    ]
    assert said == [["3 begun", "6 begun"]] * 6


@pytest.mark.slow
def test_with_sampling_ahead_an_episode_whose_environment_works_for_long_holds_up_no_other(
    caller: Path, serving: Callable[..., Server], tmp_path: Path
) -> None:
    server = serving(
        caller / "model", "--weight_updates", "--max_batch_size", 8, "--max_length", 600
    )
    # The first reply comes once another episode is in its second turn.
    more = {
        "rollout.environment": f"{caller}/own.py:Waits",
        "rollout.environment_processes": 4,
        "rollout.max_staleness": 1,
    }
    status, lines = aligned(
        caller, tmp_path, **{"rollout.engine": "lmforge", "rollout.engine_urls": server.url, **more}
    )
    assert status == 0
    assert [(line["reward"], line.get("error")) for line in lines] == [(2.0, None)] * 4


@pytest.mark.slow  # interpreters start
def test_a_policy_in_a_pipeline_learns_from_episodes_that_a_server_of_its_own_samples(
    caller: Path, lmforge: Command, tmp_path: Path
) -> None:
    more = {
        "rollout.environment": f"{caller}/own.py:Talk",
        "rollout.engine": "lmforge",
        "rollout.engine_start": "cpu",
    }
    more |= {
        "parallel.pipeline_parallel_degree": 2,
        "train.micro_batch_size": 2,
        "rollout.max_staleness": 1,
        "train.steps": 3,
    }
    done = lmforge(*step_of_grpo(caller, tmp_path, **more), ranks=2)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for table in (tmp_path / "run" / "completions").glob("set-*")
        for line in table.open()
    ]
    assert len(lines) == 3 * 4
    for line in lines:
        answers = [turn for turn in line["turns"] if turn["role"] == "assistant"]
        assert len(answers) in (2, 3)
        assert line["reward"] == pytest.approx(0.6 * len(answers))


@pytest.mark.slow
def test_failures_on_another_rank_and_a_set_without_rewards_are_said_and_counted(
    caller: Path, tmp_path: Path, lmforge: Command
) -> None:
    done = lmforge(
        *step_of_grpo(
            caller, tmp_path, **{"rollout.environment": f"{caller}/own.py:DiesElsewhere"}
        ),
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    [failed] = [
        line for line in done.stderr.splitlines() if "DiesElsewhere: its process died" in line
    ]
    assert "(step 0, rank 1): no reward" in failed
    assert "step 0: none of 4 completions has a reward" in done.stderr
    logs = [
        (tmp_path / "run" / "logs" / "attempt-1" / f"rank-{rank}.log").read_text()
        for rank in range(2)
    ]
    assert [log.count("DiesElsewhere: step 0: episode ") for log in logs] == [0, 2]
    [record] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (record["environment_failures"], record["no_reward"], record["reward_failures"]) == (
        0.5,
        1.0,
        0.0,
    )


def test_a_run_whose_episodes_all_fail_ends_with_the_error(
    caller: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = f"{caller}/own.py:FailsLater"
    more = {
        "rollout.environment": spec,
        "rollout.reward_functions": f"{caller}/own.py:lengths",
        "log.every_steps": 1,
    }
    status, _ = aligned(caller, tmp_path, **more, **{"faults.max_bad_steps": 2, "train.steps": 9})
    assert status == 1
    line = capfd.readouterr().err.splitlines()[-1]
    cause = f"environment {spec}: ConnectionError: the database is gone"
    assert line.startswith(f"lmforge: all rewards of 2 steps in a row have failed: {cause}")
    [record] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (record["step"], record["environment_failures"], record["grad_norm"]) == (1, 1.0, 0.0)


def test_environments_of_one_run_have_rows_tools_and_rewards_of_their_own(
    caller: Path, tmp_path: Path
) -> None:
    rows = [
        {"environment": "talk", "limit": 2, "answer": "x"},
        {"environment": "look", "prompt": "Go", "checks": ["1"]},
    ] * 4
    (tmp_path / "several.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "rollout.environment": f"{caller}/own.py:SEVERAL",
        "data.files": tmp_path / "several.jsonl",
    }
    status, lines = aligned(
        caller, tmp_path, **given, **{"rollout.reward_functions": "python_code"}
    )
    assert status == 0
    [record] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    answers = [[turn for turn in line["turns"] if turn["role"] == "assistant"] for line in lines]
    calls = [call for turns in answers for turn in turns for call in turn.get("tool_calls", ())]
    assert record["turns"] == pytest.approx(sum(map(len, answers)) / 4)
    assert record["tool_calls"] == pytest.approx(len(calls) / 4)
    # There is no tool called go.
    assert record["failed_tool_calls"] == record["tool_calls"] > 0
    assert (record["environment_failures"], record["reward_failures"]) == (0.0, 0.0)
    for line in lines:
        talks = line["prompt"][0]["content"] == "Hello."
        assert (line["parts"][given["rollout.environment"]] is None) == (not talks)
        # The last answer's text as a program: [go()] parses, and does not run.
        assert line["parts"]["python_code"] > 0 or not talks


REFUSED = [
    (
        {"rollout.environment": "{file}:SEVERAL"},
        "column environment: expected a name of {file}:SEVERAL (look, talk), got null",
    ),
    ({"rollout.environment": "{file}:Tol"}, "environment {file}:Tol: no class or function 'Tol'"),
    (
        {"rollout.environment": "calculator"},
        "rollout.reward_functions: name one: calculator gives no reward itself",
    ),
    ({"rollout.environment": "calculater"}, "rollout.environment: expected calculator or python"),
    (
        {"rollout.max_turns": 3, "rollout.reward_functions": "{file}:lengths"},
        "rollout.max_turns: there is no environment",
    ),
    (
        {"rollout.environment": "{file}:Tool", "data.fields": "limit="},
        "the first episode: fails: KeyError: 'limit'",
    ),
    (
        {"rollout.reward_functions": "{file}:lengths"},
        "takes environments; name one with rollout.environment",
    ),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_bad_input_ends_in_one_line_with_status_2(
    caller: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    more: dict[str, Any],
    message: str,
) -> None:
    file = caller / "own.py"
    given = {name: str(value).format(file=file) for name, value in more.items()}
    status, _ = aligned(caller, tmp_path, **given)
    assert status == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.format(file=file) in last
    assert not (tmp_path / "run").exists()
