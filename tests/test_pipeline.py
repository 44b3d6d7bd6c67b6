"""`lmforge run`: stages in order, each from the run of the one before it; interrupted, it
resumes.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from lmforge.core.errors import EXIT_PEER_LOST
from lmforge.core.records.runs import Run
from tests.conftest import Command, Refusal
from tests.support.preloaded import Forked, preloaded, rank_variables

FEW = [
    "--data.sequence_length",
    "64",
    "--train.global_batch_size",
    "4",
    "--train.dtype",
    "fp32",
    "--train.device",
    "cpu",
]
FEW += ["--train.compile", "off", "--train.threads", "1", "--log.every_steps", "1", "--train.steps"]


def pipeline(folder: Path, *stages: dict[str, object]) -> Path:
    """A pipeline file whose runs are in `folder`."""
    file = folder / "talk.toml"
    lines = [f"folder = {json.dumps(str(folder / 'runs'))}"]
    for stage in stages:
        lines += ["[[stages]]", *(f"{name} = {json.dumps(value)}" for name, value in stage.items())]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"{n} or {n + 1}?"}, {"role": "assistant", "content": str(n)}]
        for n in range(40)
    ]
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return file


def start(file: Path, **variables: str) -> Forked:
    """`lmforge run FILE`, beside this process."""
    folder = file.parent / f"output-{len(list(file.parent.iterdir()))}"
    folder.mkdir()
    return preloaded().start(["run", file], folder, variables=variables)


def printed(process: Forked) -> str:
    return process.out.read_text() + process.errors.read_text()


def wait_for_a_step(process: Forked, run: Run, after: int = 0) -> None:
    """Until a run has logged a step later than `after`."""
    while not (records := run.read_metrics()) or records[-1]["step"] <= after:
        assert process.poll() is None, printed(process)
        time.sleep(0.02)


def interrupt(process: Forked) -> str:
    """Its output, once it has ended by SIGTERM."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 128 + signal.SIGTERM, printed(process)
    return printed(process)


def test_stages_follow_each_other_and_are_not_run_twice(
    tiny_run: Path, chats: Path, tmp_path: Path, lmforge: Command
) -> None:
    sft = {
        "verb": "sft",
        "arguments": ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "2"],
    }
    export = {"verb": "export", "arguments": ["{sft}", str(tmp_path / "out")]}
    file = pipeline(tmp_path, sft, export)
    done = lmforge("run", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "runs" / "talk-sft").checkpoint_steps()[-1] == 2
    assert (tmp_path / "out" / "model.safetensors").exists()
    repeated = lmforge("run", file, cwd=tmp_path)
    assert repeated.stdout.count("finished before") == 2
    slower = sft | {"arguments": [*sft["arguments"], "--optimizer.lr", "1e-6"]}  # type: ignore[misc]
    nothing = lmforge("run", pipeline(tmp_path, slower, export), cwd=tmp_path)
    assert nothing.returncode == 2
    assert "with the new ones there is no step left to train; add --run.overwrite" in nothing.stderr


@pytest.mark.slow
def test_a_stage_that_changes_is_run_again_and_makes_later_ones_stale(
    tiny_run: Path, chats: Path, tmp_path: Path, lmforge: Command
) -> None:
    sft = {
        "verb": "sft",
        "arguments": ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "3"],
    }
    more = {"verb": "sft", "name": "more", "arguments": ["--data.files", str(chats), *FEW, "2"]}
    done = lmforge("run", pipeline(tmp_path, sft, more), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    source = Run(tmp_path / "runs" / "talk-more").load_config().model.source
    assert source == tmp_path / "runs" / "talk-sft" / "checkpoints" / "step-00000003"
    longer = pipeline(tmp_path, sft, more | {"arguments": ["--data.files", str(chats), *FEW, "4"]})
    changed = lmforge("run", longer, cwd=tmp_path)
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.count("finished before") == 1
    assert Run(tmp_path / "runs" / "talk-more").checkpoint_steps()[-1] == 4
    anew = sft | {"arguments": [*sft["arguments"], "--run.overwrite"]}  # type: ignore[misc]
    stale = lmforge("run", pipeline(tmp_path, anew, more), cwd=tmp_path)
    assert stale.returncode == 2
    assert (
        "talk-more was trained from has changed since; delete this run, or add --run.overwrite"
        in stale.stderr
    )


def test_an_interrupted_pipeline_resumes_its_stage_and_overwrites_its_run_only_once(
    tiny_run: Path, chats: Path, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(tiny_run, tmp_path / "runs" / "talk-sft")))
    words = [
        "--model.source",
        str(tiny_run),
        "--data.files",
        str(chats),
        "--run.overwrite",
        *FEW,
        "1000000",
    ]
    file = pipeline(tmp_path, {"verb": "sft", "arguments": words})
    first_start = run.started_at_ns
    process = start(file)
    while run.started_at_ns == first_start:
        assert process.poll() is None
        time.sleep(0.02)
    wait_for_a_step(process, run)
    assert "continuing" not in interrupt(process)
    stopped = run.checkpoint_steps()[-1]
    process = start(file)
    wait_for_a_step(process, run, after=stopped)
    assert f"continuing {run.path} from step {stopped}" in interrupt(process)


@pytest.mark.slow
def test_an_interrupted_stage_resumes_with_other_arguments_too(
    tiny_run: Path, chats: Path, tmp_path: Path
) -> None:
    words = ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW]
    run = Run(tmp_path / "runs" / "talk-sft")
    process = start(pipeline(tmp_path, {"verb": "sft", "arguments": [*words, "4000"]}))
    wait_for_a_step(process, run)
    interrupt(process)
    stopped = run.checkpoint_steps()[-1]
    assert 0 < stopped < 4000
    process = start(pipeline(tmp_path, {"verb": "sft", "arguments": [*words, str(stopped + 2)]}))
    assert process.wait(timeout=300) == 0, printed(process)
    assert f"continuing {run.path} from step {stopped}" in printed(process)
    assert run.checkpoint_path(stopped + 2).exists()


@pytest.mark.slow
def test_an_interrupted_pipeline_says_so_although_its_stage_ends_well(
    tiny_run: Path, tmp_path: Path
) -> None:
    process = start(
        pipeline(
            tmp_path,
            {"verb": "serve", "arguments": [str(tiny_run), "--port", "0", "--device", "cpu"]},
        )
    )
    while "\nhttp://" not in printed(process):
        assert process.poll() is None, printed(process)
        time.sleep(0.02)
    interrupt(process)


@pytest.mark.slow
def test_a_pipeline_ends_with_the_status_of_a_stage_that_lost_a_rank(
    tiny_run: Path, chats: Path, tmp_path: Path
) -> None:
    words = ["--model.source", str(tiny_run), "--data.files", str(chats), *FEW, "1000000"]
    file = pipeline(tmp_path, {"verb": "sft", "arguments": words})
    ranks = [start(file, **variables) for variables in rank_variables(2)]
    wait_for_a_step(ranks[0], Run(tmp_path / "runs" / "talk-sft"))
    [trainer] = psutil.Process(ranks[1].pid).children()
    trainer.kill()
    assert ranks[0].wait(timeout=300) == EXIT_PEER_LOST, printed(ranks[0])
    assert ranks[1].wait(timeout=300) == 1


def test_a_state_file_that_cannot_be_read_is_reported_with_the_way_out(
    tmp_path: Path, refused: Refusal
) -> None:
    file = pipeline(tmp_path, {"verb": "show", "arguments": ["nano"]})
    state = tmp_path / "runs" / ".talk.pipeline.json"
    state.parent.mkdir()
    state.write_text('{"show": {"stale": "yes"}}')
    assert refused("run", file).startswith(
        f'{state}: show.stale: expected true or false, got "yes"; delete it'
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"verb": "sft"}, {"verb": "sft"}], "stages: two are called sft; give each its own name"),
        (
            [{"verb": "export", "arguments": ["{sft}"]}],
            "export: {sft}: no stage of this name trains before it; there are: none",
        ),
        (
            [{"verb": "export", "recipe": "a.toml"}],
            "stage export: export takes no recipe; give its arguments",
        ),
        (
            [{"verb": "sft", "arguments": ["a.toml"]}],
            "stage sft: a.toml: give a recipe as `recipe`, and arguments as --section.option",
        ),
        (
            [{"verb": "sft", "argument": ["a"]}],
            "stages.argument: no such option; did you mean stages.arguments?",
        ),
        (
            [{"verb": "sft", "arguments": ["--run.name=mine"]}],
            (
                "stage sft: --run.name=mine: the pipeline says where runs are; leave it out, and"
                " give the stage a `name`"
            ),
        ),
        (
            [{"verb": "sft", "arguments": ["--run.folder", "there"]}],
            "stage sft: --run.folder: the pipeline says where runs are",
        ),
        ([{"verb": "sing"}], "stage sing: sing: no such verb; lmforge --help lists them"),
        (
            [{"verb": "show", "arguments": ["nano", "a\0b"]}],
            'stages: arguments: expected words of a command line, without NUL, got "a\\u0000b"',
        ),
    ],
)
def test_a_wrong_pipeline_is_refused_before_anything_runs(
    stages: list[dict[str, object]], message: str, tmp_path: Path, refused: Refusal
) -> None:
    assert message in refused("run", pipeline(tmp_path, *stages))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "report", "download"])
def test_a_recipe_of_a_stage_that_cannot_be_read_is_refused_and_a_pipe_is_not_waited_for(
    verb: str, tmp_path: Path, refused: Refusal
) -> None:
    file, recipe = pipeline(tmp_path, {"verb": "pretrain", "recipe": "a.toml"}), tmp_path / "a.toml"
    recipe.write_text("model = 5")
    assert refused(verb, file) == f"{recipe}: model: expected a section, got 5"
    recipe.unlink()
    os.mkfifo(recipe)
    expected = f"recipe: expected a file, got a named pipe ({recipe}), which can be read only once"
    assert refused(verb, file) == f"{file}: stage pretrain: {expected}"
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_a_pipeline_that_cannot_be_made_is_refused(
    tmp_path: Path, refused: Refusal
) -> None:
    file = pipeline(tmp_path, {"verb": "show", "arguments": ["nano"]})
    file.write_text(file.read_text().replace(str(tmp_path / "runs"), "/proc/none"))
    reason = "No such file or directory"
    assert (
        refused("run", file)
        == f"/proc/none: cannot be made a folder ({reason}); choose another `folder` of the"
        " pipeline"
    )


def test_a_stage_that_fails_ends_the_pipeline_with_its_status(
    tmp_path: Path, lmforge: Command
) -> None:
    file = pipeline(tmp_path, {"verb": "show", "arguments": ["nothing"]})
    done = lmforge("run", file, cwd=tmp_path)
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    assert (
        first
        == "lmforge: nothing: no such file or folder; give a recipe, a run, a checkpoint, a token"
        " folder, a Hugging Face folder, a name on the hub or a preset; `lmforge show presets`"
        " lists the presets"
    )
    assert (
        last
        == f"lmforge: {file}: stage show ended with status 2; `lmforge run {file}` continues with"
        " this stage"
    )
