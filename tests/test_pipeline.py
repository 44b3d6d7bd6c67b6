"""`lmforge run`: stages in order, each from the last one's run, going on where they stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lmforge.errors import EXIT_PEER_LOST
from lmforge.runs import Run
from tests.conftest import Command, Refusal

FEW = ["--data.sequence_length", "64", "--train.global_batch_size", "4", "--train.dtype", "fp32", "--train.device", "cpu"]
FEW += ["--train.compile", "off", "--train.threads", "1", "--log.every_steps", "1", "--train.steps"]


def pipeline(folder: Path, *stages: dict[str, object]) -> Path:
    """A file of stages that trains in `folder`."""
    file = folder / "talk.toml"
    lines = [f"folder = {json.dumps(str(folder / 'runs'))}"]
    for stage in stages:
        lines += ["[[stages]]", *(f"{name} = {json.dumps(value)}" for name, value in stage.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    turns = [[{"role": "user", "content": f"{n} or {n + 1}?"}, {"role": "assistant", "content": str(n)}] for n in range(40)]
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return file


def test_stages_follow_each_other_and_are_not_done_twice(tiny_run: Path, chats: Path, tmp_path: Path, lmforge: Command) -> None:
    sft = {"verb": "sft", "words": ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "3"]}
    again = {"verb": "sft", "name": "more", "words": ["--data.files", str(chats), *FEW, "2"]}
    file = pipeline(tmp_path, sft, again, {"verb": "export", "words": ["{more}", str(tmp_path / "out")]})
    done = lmforge("run", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "runs" / "talk-sft").checkpoint_steps()[-1] == 3
    begun = Run(tmp_path / "runs" / "talk-more").load_config().model.source
    assert begun == tmp_path / "runs" / "talk-sft" / "checkpoints" / "step-00000003"
    assert (tmp_path / "out" / "model.safetensors").exists()
    repeated = lmforge("run", file, cwd=tmp_path)
    assert repeated.stdout.count("finished before") == 3
    longer = pipeline(tmp_path, sft, again | {"words": ["--data.files", str(chats), *FEW, "4"]})
    changed = lmforge("run", longer, cwd=tmp_path)
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.count("finished before") == 1
    assert Run(tmp_path / "runs" / "talk-more").checkpoint_steps()[-1] == 4
    slower = sft | {"words": [*sft["words"], "--optimizer.lr", "1e-6"]}  # type: ignore[misc]
    nothing = lmforge("run", pipeline(tmp_path, slower, again), cwd=tmp_path)
    assert nothing.returncode == 2
    assert "was finished with other words, and these train nothing; add --run.overwrite" in nothing.stderr
    anew = sft | {"words": [*sft["words"], "--run.overwrite"]}  # type: ignore[misc]
    stale = lmforge("run", pipeline(tmp_path, anew, again), cwd=tmp_path)
    assert stale.returncode == 2
    assert "talk-more was trained from what has changed since; delete it, or add --run.overwrite" in stale.stderr


def test_a_pipeline_that_is_stopped_goes_on_in_the_stage_where_it_was(tiny_run: Path, chats: Path, tmp_path: Path) -> None:
    words = ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "4000"]
    file = pipeline(tmp_path, {"verb": "sft", "words": words})
    run = Run(tmp_path / "runs" / "talk-sft")
    process = subprocess.Popen([sys.executable, "-m", "lmforge", "run", str(file)], cwd=tmp_path, stdout=subprocess.DEVNULL)
    while not run.read_metrics():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    stopped = run.checkpoint_steps()[-1]
    assert 0 < stopped < 4000
    file = pipeline(tmp_path, {"verb": "sft", "words": [*words[:-1], str(stopped + 2)]})
    done = subprocess.run([sys.executable, "-m", "lmforge", "run", str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"continuing {run.path} from step {stopped}" in done.stdout
    assert os.path.exists(run.checkpoint_path(stopped + 2))


def started(file: Path, **variables: object) -> subprocess.Popen[str]:
    """`lmforge run FILE`, beside this process; what it says comes by its pipes."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    words = [sys.executable, "-m", "lmforge", "run", str(file)]
    return subprocess.Popen(
        words, cwd=file.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def awaited(process: subprocess.Popen[str], run: Run) -> None:
    """Until a run has told of a step."""
    while not run.read_metrics():
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.02)


def test_a_stage_that_overwrites_its_run_deletes_it_once_and_goes_on_after_that(
    tiny_run: Path, chats: Path, tmp_path: Path, lmforge: Command
) -> None:
    words = ["--model.source", str(tiny_run), "--data.files", str(chats), "--run.overwrite", *FEW]
    run = Run(tmp_path / "runs" / "talk-sft")
    done = lmforge("run", pipeline(tmp_path, {"verb": "sft", "words": [*words, "2"]}), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    endless = pipeline(tmp_path, {"verb": "sft", "words": [*words, "1000000"]})
    first_time = run.started_at_ns
    process = started(endless)
    while run.started_at_ns == first_time:
        assert process.poll() is None
        time.sleep(0.02)
    awaited(process, run)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert "continuing" not in told
    stopped = run.checkpoint_steps()[-1]
    process = started(endless)
    while run.read_metrics()[-1]["step"] <= stopped:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=120)
    assert f"continuing {run.path} from step {stopped}" in told
    anew = lmforge("run", pipeline(tmp_path, {"verb": "sft", "words": [*words, "3"]}), cwd=tmp_path)
    assert anew.returncode == 0, anew.stderr
    assert "continuing" not in anew.stdout
    assert run.checkpoint_steps()[-1] == 3


def test_a_pipeline_that_was_asked_to_stop_says_so_although_its_stage_ends_well(tiny_run: Path, tmp_path: Path) -> None:
    process = started(pipeline(tmp_path, {"verb": "serve", "words": [str(tiny_run), "--port", "0", "--device", "cpu"]}))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM


def test_a_rank_that_was_lost_is_told_by_a_pipeline_with_the_status_of_its_stage(
    tiny_run: Path, chats: Path, tmp_path: Path
) -> None:
    words = ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "1000000"]
    file = pipeline(tmp_path, {"verb": "sft", "words": words})
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [started(file, RANK=rank, LOCAL_RANK=rank, **common) for rank in range(2)]
    awaited(ranks[0], Run(tmp_path / "runs" / "talk-sft"))
    [trainer] = psutil.Process(ranks[1].pid).children()
    trainer.kill()
    told, _ = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == EXIT_PEER_LOST, told
    ranks[1].communicate(timeout=120)
    assert ranks[1].returncode == 1


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{"verb": "sft"}, {"verb": "sft"}], "stages: two are called sft; give each a name of its own"),
        (
            [{"verb": "export", "words": ["{sft}"]}],
            "export: {sft}: no stage of this name trains before it; there are: none",
        ),
        ([{"verb": "export", "recipe": "a.toml"}], "stage export: export takes no recipe; give its words"),
        ([{"verb": "sft", "words": ["a.toml"]}], "stage sft: a.toml: give a recipe as `recipe`, and words as --section.option"),
        ([{"verb": "sft", "word": ["a"]}], "stages.word: no such option; did you mean stages.words?"),
        (
            [{"verb": "sft", "words": ["--run.name=mine"]}],
            "stage sft: --run.name=mine: the pipeline says where runs are; leave it out, and give the stage a `name`",
        ),
        ([{"verb": "sft", "words": ["--run.folder", "there"]}], "stage sft: --run.folder: the pipeline says where runs are"),
        ([{"verb": "sing"}], "stage sing: sing: no such verb; lmforge --help lists them"),
    ],
)
def test_a_pipeline_that_makes_no_sense_is_refused_before_anything_is_done(
    stages: list[dict[str, object]], said: str, tmp_path: Path, refused: Refusal
) -> None:
    assert said in refused("run", pipeline(tmp_path, *stages))
    assert not (tmp_path / "runs").exists()


def test_a_stage_that_fails_ends_the_pipeline_with_its_status(tmp_path: Path, tiny_run: Path, lmforge: Command) -> None:
    file = pipeline(tmp_path, {"verb": "sft", "words": ["--model.source", str(tiny_run), "--data.files", "nothing.jsonl"]})
    done = lmforge("run", file, cwd=tmp_path)
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert first == "lmforge: nothing.jsonl: no such file or folder"
    assert last == f"lmforge: {file}: stage sft ended with status 2; `lmforge run {file}` goes on with this stage"
