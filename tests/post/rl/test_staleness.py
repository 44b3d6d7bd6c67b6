"""Completions that are sampled while earlier ones are learned from: order, versions, and what a
restart does.
"""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmforge.cli import run as command
from lmforge.core.data.batch import Batch
from lmforge.core.losses.logprobs import label_logprobs
from lmforge.post.rl.journal import SEQUENCE_TENSORS
from lmforge.serve.decoding.model_loading import load_model
from tests.conftest import Command, Refusal
from tests.post.rl.test_rollout_engines import STARTED, started
from tests.serve.conftest import Server
from tests.support.rounding import assert_rounding_apart, other_rounding

STEPS = 8


@pytest.fixture(scope="module")
def rollout_server(serving: Callable[..., Server], models: Path) -> Server:
    return serving(models / "noise", "--weight_updates", "--max_batch_size", 8, "--max_length", 32)


@pytest.fixture
def ahead(grpo: Callable[..., list[str]], rollout_server: Server) -> Callable[..., list[str]]:
    """`ahead(name, staleness, *words)`: the command with a server, and a checkpoint after every two
    steps.
    """

    def words(
        name: str, staleness: int, *more: object, steps: int = STEPS, reward: str = "variety"
    ) -> list[str]:
        options = {
            "rollout.engine": "lmforge",
            "rollout.engine_urls": rollout_server.url,
            "rollout.max_staleness": staleness,
        }
        options |= {
            "checkpoint.every_steps": 2,
            "checkpoint.keep_last": 20,
            "validation.every_steps": 100,
        }
        return grpo(
            name,
            *(word for pair in options.items() for word in (f"--{pair[0]}", pair[1])),
            *more,
            steps=steps,
            reward=reward,
        )

    return words


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run, torch.device("cpu"), torch.float32).model.state_dict()


def equal(one: Path, other: Path) -> bool:
    theirs = weights(other)
    return all(torch.equal(tensor, theirs[name]) for name, tensor in weights(one).items())


def prompts_by_set(run: Path) -> dict[str, list[str]]:
    tables = sorted((run / "completions").glob("set-*"))
    return {
        table.name: [json.loads(line)["prompt"] for line in table.read_text().splitlines()]
        for table in tables
    }


def versions_of(file: Path) -> list[int]:
    """Those of each token of a set in the journal that was sampled."""
    versions = load_file(file)["versions"]
    return [int(each) for each in versions.flatten().tolist() if each >= 0]


def assert_equals_its_journal(
    run: Path, words: list[str], call: Callable[[list[str]], int]
) -> None:
    """From the first checkpoint again: the journal has all, nothing is sampled, and the weights
    become the same.
    """
    again = run.parent / "again"
    shutil.copytree(run, again / "run")
    for folder in (again / "run" / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > 2:
            shutil.rmtree(folder)
    shutil.rmtree(again / "run" / "completions")
    assert call([*words, "--run.folder", str(again)]) == 0
    [sampled] = (again / "run" / "completions").iterdir()
    assert sampled.name == f"step-{STEPS:06d}-validation-rank-0.jsonl"
    assert equal(again / "run", run)


def assert_not_older_than(staleness: int, run: Path, first: int = 0) -> None:
    """The tokens of each set that the journal has: from the first that a checkpoint needs."""
    journal = sorted((run / "rollouts").iterdir())
    numbers = range(first, STEPS)
    assert [file.name for file in journal] == [
        f"set-{number:06d}-rank-0-of-1.safetensors" for number in numbers
    ]
    for number, file in zip(numbers, journal, strict=True):
        assert max(0, number - staleness) <= min(versions_of(file))
        assert max(versions_of(file)) <= number


@pytest.mark.parametrize("staleness", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_groups_are_learned_once_in_the_order_of_the_data_from_tokens_that_are_not_older_than_allowed(
    staleness: int, ahead: Callable[..., list[str]], grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert command(grpo("inside", steps=STEPS)) == 0
    assert command(ahead("run", staleness, "--checkpoint.every_steps", 100)) == 0
    assert prompts_by_set(tmp_path / "run") == prompts_by_set(tmp_path / "inside")
    assert_not_older_than(staleness, tmp_path / "run")
    journal = sorted((tmp_path / "run" / "rollouts").iterdir())
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for number, (file, record) in enumerate(zip(journal, records, strict=True)):
        assert record["staleness/max"] <= number - min(versions_of(file))
        assert 0 <= record["staleness"] <= staleness
        assert record["generation_wait_seconds"] > 0
    assert max(record["staleness/max"] for record in records) == staleness


def test_a_run_that_is_killed_resumes_as_its_journal_says_and_asks_for_no_set_twice(
    ahead: Callable[..., list[str]], lmforge: Command, rollout_server: Server, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ahead("run", 2, reward="variety_until_the_end_of_the_trainer")
    (tmp_path / "end-at").write_text("6")
    assert lmforge(*words).returncode == -9
    before = {file.name: file.read_bytes() for file in (run / "rollouts").iterdir()}
    assert 1 <= len(before) < STEPS
    assert command(words) == 0
    after = {file.name: file.read_bytes() for file in (run / "rollouts").iterdir()}
    assert {
        name: content for name, content in after.items() if name in before
    }.items() <= before.items()
    assert_equals_its_journal(run, words, command)


def test_a_run_that_has_lost_its_lock_writes_no_set_into_the_journal(
    ahead: Callable[..., list[str]], refused: Refusal, tmp_path: Path
) -> None:
    line = refused(*ahead("run", 1, reward="variety_until_the_lock_is_removed"), status=1)
    assert line.startswith(f"{tmp_path / 'run'}: this process has lost its lock")
    names = sorted(file.name for file in (tmp_path / "run" / "rollouts").iterdir())
    assert names == [f"set-00000{number}-rank-0-of-1.safetensors" for number in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "context", "pipeline"])
def test_ranks_that_split_the_policy_sample_ahead_and_resume_as_their_journal_says(
    split: str, ahead: Callable[..., list[str]], lmforge: Command, tmp_path: Path
) -> None:
    def call(words: list[str]) -> int:
        return lmforge(*words, ranks=2).returncode

    words = ahead(
        "run",
        1,
        f"--parallel.{split}_parallel_degree",
        2,
        "--train.micro_batch_size",
        4,
        "--train.threads",
        1,
    )
    assert call(words) == 0
    assert_not_older_than(1, tmp_path / "run", first=2)
    assert_equals_its_journal(tmp_path / "run", words, call)


@pytest.mark.slow  # interpreters start
def test_servers_that_a_run_starts_sample_ahead_and_it_resumes_as_its_journal_says(
    grpo: Callable[..., list[str]], tmp_path: Path
) -> None:
    words = grpo(
        "run",
        *STARTED,
        "cpu",
        "--rollout.max_staleness",
        1,
        "--checkpoint.every_steps",
        2,
        steps=STEPS,
    )
    words += ["--checkpoint.keep_last", "20", "--validation.every_steps", "100"]
    assert command(words) == 0
    assert_not_older_than(1, tmp_path / "run", first=2)
    assert_equals_its_journal(tmp_path / "run", words, command)


@pytest.mark.slow
def test_after_a_rollback_no_token_is_of_weights_that_were_left(
    ahead: Callable[..., list[str]],
    grpo: Callable[..., list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(grpo("inside", steps=STEPS)) == 0
    bad = prompts_by_set(tmp_path / "inside")["set-000005-rank-0.jsonl"]
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    # The bad step 6 is read when step 7 has begun: batch 6 had weights of step 5, and then has
    # those of step 4.
    options = ["--faults.max_bad_steps", 1, "--log.every_steps", 10, "--checkpoint.every_steps", 4]
    options += ["--rollout.scale_rewards", "none"]
    assert command(ahead("run", 2, *options, reward="variety_and_bad_steps")) == 0
    assert "back to step 4" in "".join(capfd.readouterr())
    journal = tmp_path / "run" / "rollouts"
    file = load_file(journal / "set-000006-rank-0-of-1.safetensors")
    assert {*versions_of(journal / "set-000006-rank-0-of-1.safetensors")} == {6}
    batch = Batch(**{name: file[name].to(dtype) for name, dtype in SEQUENCE_TENSORS.items()})
    step = tmp_path / "run" / "checkpoints" / "step-00000004"
    model = load_model(step, torch.device("cpu"), torch.float32).model
    with torch.no_grad():
        logprobs = label_logprobs(model, batch)
        with other_rounding():
            rounded = label_logprobs(model, batch)
    sampled = file["versions"] >= 0

    def apart(others: torch.Tensor) -> dict[str, float]:
        """The relative distance from the log-probabilities of the weights of step 4."""
        difference = (others - logprobs)[sampled].norm() / logprobs[sampled].norm()
        return {"log-probabilities": difference.item()}

    assert_rounding_apart(apart(file["old_logprobs"]), apart(rounded))
    for number in (7, 8):
        assert min(versions_of(journal / f"set-{number:06d}-rank-0-of-1.safetensors")) >= 6


@pytest.mark.slow
def test_a_server_that_is_restarted_while_nobody_asks_it_gets_the_weights_again(
    ahead: Callable[..., list[str]], models: Path, tmp_path: Path
) -> None:
    victim = started(models / "noise", tmp_path)
    (tmp_path / f"victim-{victim.process.pid}").touch()

    def restart() -> Server:
        victim.process.wait(timeout=120)
        again = started(models / "noise", tmp_path, port=int(victim.url.rpartition(":")[2]))
        (tmp_path / "url").write_text(again.url)
        (tmp_path / "url").rename(tmp_path / "restarted")
        return again

    words = ahead(
        "run",
        1,
        "--rollout.engine_urls",
        victim.url,
        steps=1,
        reward="variety_after_a_restart_of_an_idle_server",
    )
    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(restart)
        assert command(words) == 0
        again = restarting.result()
    [record] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert record.get("reward_failures", 0) == 0
    again.process.kill()
    assert again.process.wait(timeout=60) != 0


@pytest.mark.slow
def test_a_journal_is_read_on_other_numbers_of_ranks(
    ahead: Callable[..., list[str]], lmforge: Command, tmp_path: Path
) -> None:
    even = ["--optimizer.eps", 1e-3, "--rollout.num_iterations", 2]
    done = lmforge(*ahead("run", 1, *even, "--parallel.engine", "ddp", steps=6), ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(tmp_path / "run", tmp_path / "again" / "run")
    for folder in (tmp_path / "again" / "run" / "checkpoints").iterdir():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    files = {file.name for file in (tmp_path / "run" / "rollouts").iterdir()}
    words = ahead(
        "run",
        1,
        *even,
        "--run.folder",
        tmp_path / "again",
        "--rollout.engine_timeout_seconds",
        60,
        steps=6,
    )
    assert command(words) == 0
    assert {file.name for file in (tmp_path / "again" / "run" / "rollouts").iterdir()} <= files
    theirs = weights(tmp_path / "run")
    for name, tensor in weights(tmp_path / "again" / "run").items():
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1e-5), name


@pytest.mark.slow
def test_sets_that_are_damaged_or_of_other_options_are_sampled_again_with_one_line(
    ahead: Callable[..., list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(ahead("run", 1, steps=4)) == 0
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    [damaged] = (run / "rollouts").glob("set-000003-*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    capfd.readouterr()
    assert command(ahead("run", 1, steps=4)) == 0
    assert f"{damaged}: damaged (checksum); what is missing is sampled again" in "".join(
        capfd.readouterr()
    )
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert command(ahead("run", 2, steps=4)) == 0
    assert "of another run, or of other options or data" in "".join(capfd.readouterr())
    rewards = tmp_path / "rewards.py"
    for options, comment in (
        (["--optimizer.lr", 1e-3], ""),
        (["--optimizer.lr", 1e-3], "# others"),
    ):
        rewards.write_text(rewards.read_text() + comment)
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        assert command(ahead("run", 2, *options, steps=4)) == 0
        assert "of another run, or of other options or data" in "".join(capfd.readouterr())
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert command(ahead("run", 2, *options, steps=4)) == 0
    assert "of another run" not in "".join(capfd.readouterr())


def test_a_trainer_that_samples_itself_does_not_sample_ahead(
    grpo: Callable[..., list[str]], refused: Refusal
) -> None:
    line = refused(*grpo("run", "--rollout.max_staleness", 1))
    assert (
        "rollout.max_staleness: a trainer that samples itself cannot train meanwhile; give"
        " rollout.engine" in line
    )
