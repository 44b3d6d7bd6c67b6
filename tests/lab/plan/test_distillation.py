"""Predictions of distillations: the bytes that a run of one has, with the teacher beside the
student, and what a plan says.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run
from tests.conftest import Command, Refusal

# Measures the live tensors at the peak of three steps on each rank, where a run attaches its
# profiler. From the first step on, since the profiler does not see that what was allocated before
# it began is freed.
PLUGIN = """
import gc, json
from torch.profiler import ProfilerActivity, profile
from lmforge.lab.bench.trial import _live_bytes, _peak_bytes
from lmforge.core.stages import observers

class Measure:
    def __init__(self, window, path, *_):
        self._path = path
    def begin(self, step):
        if step == 1:
            gc.unfreeze()  # or what the loop found would not be seen
            self._before = _live_bytes()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()
    def end(self, step):
        if step == 3:
            self._profile.stop()
            events = self._profile.profiler.kineto_results.events()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(_peak_bytes(events, self._before)))
    def close(self):
        pass

observers.StepProfiler = Measure
"""
STUDENT = {
    "model.hidden_size": 128,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 4,
}
TEACHER = STUDENT | {"model.hidden_size": 256, "model.num_hidden_layers": 4}
BATCH: dict[str, object] = {
    "data.sequence_length": 256,
    "data.packing": "none",
    "train.global_batch_size": 12,
    "train.micro_batch_size": 6,
    "train.steps": 3,
    "train.compile": "off",
    "train.dtype": "fp32",
    "train.device": "cpu",
    "optimizer.lr": 1e-4,
    "checkpoint.async_save": "false",  # which has host memory for a copy of the state
}
STORED = ("--distill.logprobs", "stored", "--distill.top_k", "16")


def words(chosen: dict[str, Any]) -> list[str]:
    return [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def models(tiny_tokens: Path, lmforge: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs called student and teacher, chats, and a plugin that measures."""
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "measure.py").write_text(PLUGIN)
    answer = {"role": "assistant", "content": "one two three four five"}
    chat = {"messages": [{"role": "user", "content": "Count to five, please."}, answer]}
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for _ in range(64)))
    trained = {
        "data.folder": tiny_tokens,
        "data.sequence_length": 64,
        "train.steps": 1,
        "schedule.warmup_steps": 0,
    }
    for name, sizes in (("student", STUDENT), ("teacher", TEACHER)):
        options = (
            trained
            | sizes
            | {
                "run.folder": folder,
                "run.name": name,
                "train.compile": "off",
                "train.device": "cpu",
            }
        )
        done = lmforge("pretrain", *words(options))
        assert done.returncode == 0, done.stderr
    return folder


def distillation(folder: Path, *more: object) -> list[str]:
    chosen = {
        "model.source": folder / "student",
        "distill.teacher": folder / "teacher",
        "data.files": folder / "chats.jsonl",
    }
    return [*words(chosen | BATCH), *map(str, more)]


def planned(capfd: pytest.CaptureFixture[str], folder: Path, *more: object) -> dict[str, Any]:
    recipe = folder / "distill.toml"
    recipe.write_text('[run]\nstage = "distill"\n')
    capfd.readouterr()
    assert run(["plan", str(recipe), *distillation(folder, *more), "--output", "json"]) == 0
    return dict(json.loads(capfd.readouterr().out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ["--distill.beta", "0"]),
        (1, ["--distill.beta", "0.5", "--train.dtype", "bf16"]),
        (1, STORED),
        (2, ["--parallel.engine", "fsdp2"]),
    ],
)
def test_live_tensors_at_the_peak_of_a_distillation_are_those_that_are_predicted(
    models: Path,
    lmforge: Command,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    ranks: int,
    more: list[str],
) -> None:
    given = distillation(models, *more, "--train.global_batch_size", 12 * ranks)
    kept = {
        "run.folder": tmp_path,
        "run.name": "a",
        "data.folder": tmp_path / "examples",
        "log.predict": "true",
    }
    done = lmforge(
        "distill",
        *given,
        *words(kept),
        "--plugins",
        models / "measure.py",
        ranks=ranks,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "predicted  memory" in done.stdout
    predicted = planned(
        capfd,
        models,
        *more,
        "--train.global_batch_size",
        12 * ranks,
        "--gpus",
        ranks,
        "--gpu_type",
        "cpu",
    )
    print(predicted["memory_bytes"], predicted["peak_at"])
    for file in (tmp_path / "a" / "profile").iterdir():
        assert predicted["live_bytes"] == pytest.approx(json.loads(file.read_text()), rel=0.05), (
            file
        )


def test_a_plan_has_the_teacher_and_its_forward_pass_and_of_one_that_was_stored_neither(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    beside, stored = planned(capfd, models), planned(capfd, models, *STORED)
    assert beside["memory_bytes"]["teacher"] > 4 * 4 * 8 * 256**2  # of blocks alone
    assert "teacher" not in stored["memory_bytes"]
    assert beside["seconds"]["matrix products"] > 1.5 * stored["seconds"]["matrix products"]
    assert 0 < beside["mfu"] < stored["mfu"]
    sharded = planned(capfd, models, "--gpus", 4, "--parallel.engine", "fsdp2")
    assert sharded["memory_bytes"]["teacher"] < beside["memory_bytes"]["teacher"] / 2


@pytest.mark.slow
def test_a_search_of_a_distillation_splits_no_layers(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    best = planned(capfd, models, "--gpus", 4, "--search", "--train.global_batch_size", 48)["best"]
    assert best
    assert not any("pipeline" in each["configuration"] for each in best)


def test_what_is_not_predicted_of_a_distillation_is_said(
    models: Path, refused: Refusal, tmp_path: Path
) -> None:
    recipe = tmp_path / "d.toml"
    recipe.write_text('[run]\nstage = "distill"\n')
    sampled = distillation(models, "--distill.lmbda", 0.5)
    assert "distill.lmbda = 0.5 is not predicted" in refused("plan", recipe, *sampled)
    without = [*words({"model.source": models / "student"} | BATCH)]
    assert refused("plan", recipe, *without).startswith(
        "distill.teacher: name the model to learn from"
    )
    assert "distill.teacher: " in refused(
        "plan", recipe, *without, "--distill.teacher", tmp_path / "none"
    )


def test_a_dry_run_names_the_memory_and_the_flops_of_the_teacher(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["distill", *distillation(models), "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "\nteacher    " in out
    assert "more FLOPs per token, of its forward pass" in out
