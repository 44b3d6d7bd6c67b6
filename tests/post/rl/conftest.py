"""Fixtures of the tests of training."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.conftest import KEY, serving  # noqa: F401 - a fixture
from tests.serve.decoding.conftest import byte_tokenizer, models, scripted  # noqa: F401 - fixtures

REWARDS = """\
import json, os, signal, time, urllib.request
from pathlib import Path

def variety(prompts, completions):
    return [len(set(text)) / 10 for text in completions]

def variety_and_bad_steps(prompts, completions):
    # An advantage of these prompts is infinite in fp32.
    bad = json.loads((Path(__file__).parent / "bad.json").read_text())
    rewards = variety(prompts, completions)
    return [1e300 * (n % 2) if prompt in bad else reward for n, (prompt, reward) in enumerate(zip(prompts, rewards))]

def variety_until_the_lock_is_removed(prompts, completions):
    # From the third call on the folder is another run's.
    folder = Path(__file__).parent / "run"
    if (folder / "rollouts" / "set-000001-rank-0-of-1.safetensors").exists():
        (folder / ".lock").write_text("another")
    return variety(prompts, completions)

def raises_from_now_on(prompts, completions):
    return always_raises(prompts, completions) if Path(__file__).with_name("now").exists() else variety(prompts, completions)

def always_raises(prompts, completions):
    return [1 / 0 for _ in completions]

def sometimes_raises(prompts, completions, calls=[]):
    calls.append(1)
    return [1 / (len(calls) % 2 - 1) if len(calls) % 2 else len(text) for text in completions]

def as_in_trl(prompts, completions):
    return [len(completion[0]["content"]) for completion in completions]

def far_apart(prompts, completions):
    return [1e300 * (number % 2) for number in range(len(prompts))]

def variety_after_the_end_of_the_server(prompts, completions):
    for file in Path(__file__).parent.glob("victim-*"):
        os.kill(int(file.name.removeprefix("victim-")), signal.SIGKILL)
        file.unlink()
    return variety(prompts, completions)

def variety_while_a_server_is_restarted(prompts, completions):
    # The first call ends the server, the third waits until it is there again.
    folder = Path(__file__).parent
    calls = folder / "calls"
    number = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(number))
    while number == 3 and not (folder / "restarted").exists():
        time.sleep(0.02)
    return variety_after_the_end_of_the_server(prompts, completions)

def variety_after_a_restart_of_an_idle_server(prompts, completions):
    # Nobody asks the server for tokens meanwhile.
    rewards = variety_after_the_end_of_the_server(prompts, completions)
    url = Path(__file__).parent / "restarted"
    while not url.exists():
        time.sleep(0.02)
    while True:
        key = {"authorization": f"Bearer {os.environ['LMFORGE_API_KEY']}"}
        with urllib.request.urlopen(urllib.request.Request(url.read_text() + "/weight_info", None, key)) as answer:
            if "-" in json.load(answer)["weight_version"]:
                return rewards
        time.sleep(0.02)

def variety_until_the_end_of_the_trainer(prompts, completions):
    # The call whose number is in the file "end-at" ends the run.
    folder = Path(__file__).parent
    (folder / "calls").mkdir(exist_ok=True)
    (folder / "calls" / str(time.time_ns())).touch()
    end = folder / "end-at"
    if end.exists() and len(list((folder / "calls").iterdir())) >= int(end.read_text()):
        end.unlink()
        os.kill(json.loads((folder / "run" / "health" / "rank-0.json").read_text())["process"], signal.SIGKILL)
    return variety(prompts, completions)
"""


@pytest.fixture(autouse=True)
def trainer_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of servers that `serving` starts with --weight_updates."""
    for name, key in KEY.items():
        monkeypatch.setenv(name, key)


# As many as a server takes: other numbers of threads may change the last bits of a sum.
THREADS = len(os.sched_getaffinity(0))


@pytest.fixture
def grpo(models: Path, tmp_path: Path) -> Callable[..., list[str]]:  # noqa: F811 - its fixture
    """`grpo(name, *words)`: the command that trains the model `noise` from prompts of random
    letters.
    """
    chance = random.Random(1)
    prompts = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 9))) for _ in range(100)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    (tmp_path / "rewards.py").write_text(REWARDS)

    def words(name: str, *more: object, steps: int = 2, reward: str = "variety") -> list[str]:
        options = {
            "method": "grpo",
            "model.source": models / "noise",
            "data.files": tmp_path / "prompts.jsonl",
        }
        options |= {
            "rollout.reward_functions": f"{tmp_path / 'rewards.py'}:{reward}",
            "rollout.num_generations": 4,
        }
        options |= {
            "rollout.max_completion_length": 12,
            "train.global_batch_size": 8,
            "data.sequence_length": 32,
        }
        options |= {
            "run.folder": tmp_path,
            "run.name": name,
            "train.steps": steps,
            "optimizer.lr": 2e-3,
        }
        options |= {
            "train.device": "cpu",
            "train.dtype": "fp32",
            "train.compile": "off",
            "train.threads": THREADS,
        }
        options |= {"log.every_steps": 1, "validation.every_steps": 5}
        return [
            "align",
            *(str(word) for option, value in options.items() for word in (f"--{option}", value)),
            *map(str, more),
        ]

    return words
