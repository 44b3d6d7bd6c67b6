"""Whole commands on a GPU: fine-tuning in four bits, alignment, distillation, evaluation, serving,
and settings that transfer.

Tests that take `gpu_device` run on a CPU too, where they are rehearsed: `python tests/gpu.py
--device cpu`.
"""

import json
import random
import signal
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.records.runs import Run
from tests.conftest import Command
from tests.distributed.conftest import losses
from tests.distributed.gpu_models import trained
from tests.support.preloaded import preloaded

pytestmark = pytest.mark.gpu

STEPS = 4
THINGS = ("apple", "bread", "chair", "door", "engine", "flute", "garden")
REWARDS = """
def variety(prompts, completions):
    return [len(set(text)) / 10 for text in completions]
"""


@dataclass(frozen=True)
class World:
    """A small pretrained model, a teacher of the same tokenizer, files of examples, and the device
    of all runs.
    """

    folder: Path
    source: Path
    device: str
    lmforge: Command

    def run(self, verb: str, name: str, *more: object) -> Run:
        """A finished run in bf16 on the device."""
        chosen = {
            "model.source": self.source,
            "run.folder": self.folder,
            "run.name": name,
            "data.files": self.folder / "chats.jsonl",
            "data.folder": self.folder / "examples",
            "data.sequence_length": 64,
            "train.steps": STEPS,
            "train.global_batch_size": 8,
            "train.dtype": "bf16",
            "train.compile": "off",
            "train.device": self.device,
            "train.threads": 1,
            "optimizer.lr": 5e-3,
            "schedule.name": "constant",
            "log.every_steps": 1,
            "validation.sequences": 4,
        }
        files = {word for word in more if word == "--data.files"}
        words = [
            word
            for key, value in chosen.items()
            if f"--{key}" not in files
            for word in (f"--{key}", value)
        ]
        done = self.lmforge(verb, *words, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        run = Run(self.folder / name)
        (start,) = (event for event in lines_of(run.events_path) if event["kind"] == "start")
        assert (start["device"], "gpu" in start) == (self.device, self.device == "cuda")
        return run

    def grpo(self, name: str, *more: object) -> Run:
        words = [
            "--method",
            "grpo",
            "--data.files",
            self.folder / "prompts.jsonl",
            "--rollout.num_generations",
            4,
        ]
        return self.run("align", name, *words, "--rollout.max_completion_length", 12, *more)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def world(
    tiny_run: Path,
    tiny_options: list[str],
    lmforge: Command,
    gpu_device: torch.device,
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    folder = tmp_path_factory.mktemp("gpu-tuning")
    chance = random.Random(1)

    def write(name: str, records: list[dict[str, object]]) -> None:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    pairs = [chance.sample(THINGS, 2) for _ in range(120)]
    asked = [
        {"role": "user", "content": f"Which is first, {one} or {other}?"} for one, other in pairs
    ]
    first, last = (
        [{"role": "assistant", "content": choose(pair)} for pair in pairs] for choose in (min, max)
    )
    write(
        "chats.jsonl",
        [{"messages": [each, answer]} for each, answer in zip(asked, first, strict=True)],
    )
    write(
        "pairs.jsonl",
        [
            {"prompt": [q], "chosen": [a], "rejected": [b]}
            for q, a, b in zip(asked, first, last, strict=True)
        ],
    )
    write("prompts.jsonl", [{"prompt": [each]} for each in asked])
    (folder / "rewards.py").write_text(REWARDS)
    wider = ["--model.hidden_size", 48, "--model.num_hidden_layers", 3, "--train.steps", 12]
    trained(lmforge, tiny_options, folder, "teacher", "cpu", *wider)
    return World(folder, tiny_run, gpu_device.type, lmforge)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_compiled_with_mup_a_model_learns_as_on_a_cpu(
    lmforge: Command,
    tiny_options: list[str],
    tmp_path: Path,
    optimizer: str,
    gpu_device: torch.device,
) -> None:
    words = [
        "--model.parametrization",
        "mup",
        "--model.base_width",
        16,
        "--optimizer.name",
        optimizer,
    ]
    on_cpu = trained(lmforge, tiny_options, tmp_path, "reference", "cpu", *words)
    on_gpu = trained(
        lmforge, tiny_options, tmp_path, "a", gpu_device.type, *words, "--train.compile", "on"
    )
    assert on_gpu[6] < on_gpu[1]
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)  # Muon orthogonalizes in bf16 on a GPU


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_adapters_are_fine_tuned_on_a_base_in_four_bits(world: World, compiled: str) -> None:
    bits = [
        "--lora.rank",
        4,
        "--lora.base_dtype",
        "nf4",
        "--lora.double_quant",
        "true",
        "--train.compile",
        compiled,
    ]
    result = losses(world.run("sft", f"sft {compiled}", *bits, "--train.steps", 8))
    assert result[8] < result[1]


def test_preferences_are_learnt(world: World) -> None:
    run = world.run("align", "dpo", "--data.files", world.folder / "pairs.jsonl", "--align.beta", 1)
    result = losses(run)
    assert result[1] == pytest.approx(0.693, abs=0.02)  # policy and reference are one model
    assert result[STEPS] < result[1]


def test_rewards_of_completions_that_the_gpu_sampled_are_learnt_from(world: World) -> None:
    before = losses(
        world.grpo(
            "grpo", "--rollout.reward_functions", world.folder / "rewards.py:variety", "python_code"
        ),
        "reward",
    )
    assert list(before) == [*range(1, STEPS + 1)]
    assert all(each > 0 for each in before.values())
    assert any(norm > 0 for norm in losses(Run(world.folder / "grpo"), "grad_norm").values())


def test_a_server_on_the_gpu_samples_ahead_for_the_run_that_started_it(world: World) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    device = "cuda:0" if world.device == "cuda" else "cpu"
    words = [
        "--rollout.engine",
        "lmforge",
        "--rollout.engine_start",
        device,
        "--rollout.max_staleness",
        1,
    ]
    run = world.grpo(
        "served", "--rollout.reward_functions", world.folder / "rewards.py:variety", *words
    )
    assert all(each > 0 for each in losses(run, "reward").values())
    assert set(losses(run, "staleness/max").values()) == {0, 1}
    assert any(norm > 0 for norm in losses(run, "grad_norm").values())
    (log,) = run.logs_folder.rglob("server-0.log")
    assert "lmforge-server " in log.read_text()


def teacher(world: World) -> list[object]:
    return ["--distill.teacher", world.folder / "teacher"]


def test_a_student_learns_what_a_teacher_says_on_the_gpu_and_what_was_stored_of_it(
    world: World,
) -> None:
    results = []
    for name, more in (
        ("online", []),
        ("stored", ["--distill.logprobs", world.folder / "logprobs", "--distill.top_k", 512]),
    ):
        run = world.run("distill", name, *teacher(world), *more)
        results.append(losses(run, "kd_loss"))
        assert results[-1][STEPS] < results[-1][1]
    # All tokens of the vocabulary, whose log-probabilities are stored in 16 bits.
    assert results[1] == pytest.approx(results[0], rel=0.02)


def test_a_student_learns_what_a_teacher_says_of_answers_that_the_gpu_sampled(world: World) -> None:
    sampled = [
        "--distill.lmbda",
        1,
        "--data.packing",
        "none",
        "--distill.max_completion_length",
        12,
    ]
    result = losses(world.run("distill", "on-policy", *teacher(world), *sampled), "kd_loss")
    assert list(result) == [*range(1, STEPS + 1)]
    assert all(each > 0 for each in result.values())


def test_a_gpu_measures_the_loss_that_a_cpu_measures(world: World) -> None:
    results = []
    for device in ("cpu", world.device):
        words = ["--sequences", 8, "--dtype", "fp32", "--device", device, "--output", "json"]
        done = world.lmforge("evaluate", world.source, *words)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-4)
    assert results[1]["tokens"] == results[0]["tokens"] > 0


def test_a_server_on_the_gpu_writes_what_a_cpu_writes(world: World, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    words = ["serve", world.source, "--port", 0, "--device", world.device, "--dtype", "fp32"]
    process = preloaded().start(words, tmp_path)
    try:
        while "\n" not in (printed := process.out.read_text()):
            assert process.poll() is None, process.errors.read_text()
            time.sleep(0.02)
        url = printed.split()[0]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = json.dumps(
            {"model": model, "prompt": "def ", "max_tokens": 16, "temperature": 0}
        ).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            completion = json.load(answer)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    done = world.lmforge(
        "generate",
        world.source,
        "def ",
        "--temperature",
        0,
        "--max_tokens",
        16,
        "--dtype",
        "fp32",
        "--device",
        "cpu",
    )
    assert completion["usage"]["completion_tokens"] == 16
    assert completion["choices"][0]["text"].strip() in done.stdout
