"""The loop: the dtypes of its tensors, its message about recompilation, and that it never waits for
a GPU.
"""

import errno
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from lmforge.cli import run as command
from lmforge.core import checkpoint
from lmforge.core.checkpoint import AsyncCheckpointer, RetentionPolicy
from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import PackedDataset, TokenDataset
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.distributed import distributed as cluster
from lmforge.core.distributed.rank_info import RankInfo
from lmforge.core.loop import train
from lmforge.core.losses.language import NextTokenObjective
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.optim.optimizer import build_optimizer
from lmforge.core.options.batch_plan import BatchPlan
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import OptimizerOptions, ParallelOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.parallel.parallelize import parallelize
from lmforge.core.records.runs import Run
from lmforge.core.seams import Monitors
from lmforge.core.stages.build_model import BuiltModel
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.core.stages.observer import ObservedRun
from lmforge.core.stages.observers import Observers, StepProfiler
from lmforge.core.stages.run_files import MetricsFile, RunEvents
from lmforge.core.steps import metrics
from lmforge.core.steps.bad_steps import BadStepDetector
from lmforge.core.steps.callbacks import LoopCallbacks
from lmforge.core.steps.checkpoints import Checkpoints
from lmforge.core.steps.metrics import Throughput
from lmforge.core.steps.resume import ResumePoint
from lmforge.ops.monitor.console import ConsoleLogger
from lmforge.ops.monitor.usage.other_trainings import SharedCores
from lmforge.ops.monitor.watchdog import Watchdog
from tests.conftest import Command, Refusal

Capture = pytest.CaptureFixture[str]


def pretrained(folder: Path, name: str, *words: str) -> Run:
    assert command(["pretrain", *words, "--run.folder", str(folder), "--run.name", name]) == 0
    return Run(folder / name)


def test_with_bf16_masters_a_run_learns_is_half_as_large_and_continues_to_the_same_losses(
    tmp_path: Path, tiny_options: list[str], tiny_run: Path, lmforge: Command
) -> None:
    narrow = [*tiny_options, "--train.master_dtype", "bf16"]
    whole = pretrained(tmp_path, "whole", *narrow)
    steps = [
        "--run.folder",
        tmp_path,
        "--run.name",
        "broken",
        "--schedule.name",
        "constant",
        "--train.steps",
        3,
    ]
    assert lmforge("pretrain", *narrow, *steps).returncode == 0
    broken = pretrained(tmp_path, "broken", *narrow, "--schedule.name", "constant")
    steady = pretrained(tmp_path, "steady", *narrow, "--schedule.name", "constant")
    assert [record["loss"] for record in broken.read_metrics()] == [
        record["loss"] for record in steady.read_metrics()
    ]
    masters = Run(tiny_run).read_metrics()
    assert whole.read_metrics()[-1]["loss"] == pytest.approx(masters[-1]["loss"], rel=0.02)
    assert whole.read_metrics()[-1]["loss"] < whole.read_metrics()[0]["loss"] - 0.1

    def size(run: Run) -> int:
        return sum(
            described["bytes"]
            for described in checkpoint.read_manifest(run.checkpoint_path(6)).files.values()
        )

    assert size(whole) < 0.75 * size(Run(tiny_run))


class RandomBatches:
    """Batches of random tokens; from step `changed_at` on, a sequence more."""

    data_wait_seconds = 0.0
    dataset = PackedDataset(cast(Any, None), name="", location="", plan=[], sequence_length=16)
    global_batch_size = 2

    def __init__(self, changed_at: int | None) -> None:
        self._changed_at = changed_at

    def batches(self, step: int) -> list[Batch]:
        size = 3 if self._changed_at is not None and step >= self._changed_at else 2
        tokens = torch.randint(0, 64, (size, 16))
        return [
            Batch(
                tokens,
                tokens,
                torch.arange(16).expand(size, 16),
                torch.zeros(size, 16, dtype=torch.int32),
            )
        ]

    def validate(self, step: int) -> dict[str, float]:
        return {}

    def warning(self, step: int, record: dict[str, Any]) -> None:
        return None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}


class LoaderBatches(RandomBatches):
    """Batches of a loader."""

    def __init__(self, loader: BatchLoader) -> None:
        self.batches = loader.batches  # type: ignore[method-assign]


def run_loop(
    batches: Any,
    steps: int,
    tmp_path: Path,
    *,
    device: str,
    compiled: bool,
    hidden_from_compiler: bool = False,
    learning_rate: Callable[[int], float] = lambda step: 1e-3,
    observed: bool = True,
) -> torch.nn.Module:
    """The loop by itself, with a small model, under the default options. Returns the model."""
    dist_ctx = cluster.init_distributed(device, threads=1)
    objective, tokenizer = NextTokenObjective(), train_tokenizer(["some text"], 300)
    model_config = ModelConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = init_weights(build_model(model_config, dist_ctx.device), 0)
    for block in model.blocks if hidden_from_compiler else ():
        block.forward = torch.compiler.disable(block.forward)  # type: ignore[method-assign]
    parallel_model = parallelize(
        model,
        objective.loss,
        dist_ctx=dist_ctx,
        dtype=torch.float32,
        options=ParallelOptions(),
        compile_model=compiled,
    )
    (tmp_path / "health").mkdir(exist_ok=True)
    never = {"every_steps": 1000}
    options = {
        "train": {"steps": steps},
        "schedule": {"warmup_steps": 0},
        "log": never,
        "checkpoint": never,
    }
    ctx = RunContext(
        validate_options(PretrainConfig, options),
        Run(tmp_path),
        dist_ctx,
        Monitors(
            cast(Any, None),
            Watchdog(dist_ctx, tmp_path / "health", tmp_path / "log"),
            ConsoleLogger(dist_ctx, steps, None),
        ),
        RunEvents(None),
    )
    metadata = {
        "plan_hash": "",
        "global_batch_size": 2,
        "hf_config": {},
        "recipe": {},
        "tokenizer_hash": "",
        "written_by": {},
    }
    checkpointer = AsyncCheckpointer(
        ctx.run,
        dist_ctx,
        RetentionPolicy(1),
        metadata=metadata,
        tokenizer=tokenizer,
        log=ctx.console.info,
    )
    inputs = RunInputs(
        tokenizer, batches.dataset, None, model_config, BatchPlan(2, 16, 1, 2, 1), "", "", None
    )
    optimizer, detector = (
        build_optimizer(model, OptimizerOptions()),
        BadStepDetector(dist_ctx, spike_sigmas=6.0, window_steps=4),
    )
    built = BuiltModel(
        parallel_model, optimizer, objective, detector, ResumePoint(), torch.float32, compiled, ""
    )
    throughput = Throughput(parallel_model, batches, lambda length: 1.0, None, steps, {})
    observers = Observers(ObservedRun(ctx, inputs, built, batches, throughput), checkpointer)
    try:
        train(
            parallel_model,
            optimizer,
            learning_rate,
            objective,
            batches,
            detector,
            Checkpoints(checkpointer, ctx.config, parallel_model, optimizer, batches, detector),
            throughput,
            observers if observed else LoopCallbacks(),
            start_step=0,
            steps=steps,
            max_grad_norm=1.0,
            max_bad_steps=3,
            log_every_steps=1000,
        )
    finally:
        ctx.watch.stop("done")
        observers.close()
        ctx.console.close()
    return model


def test_what_cannot_be_closed_leaves_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    for observer in (MetricsFile, SharedCores):
        monkeypatch.setattr(observer, "close", lambda self: closed.append(type(self)))
    for observer, name, number in (
        (StepProfiler, "close", errno.ENOSPC),
        (ConsoleLogger, "stop_progress", errno.EIO),
    ):
        monkeypatch.setattr(observer, name, Mock(side_effect=OSError(number, "")))
    with pytest.raises(OSError, match="Errno"):
        run_loop(RandomBatches(None), 1, tmp_path, device="cpu", compiled=False)
    assert closed == [SharedCores, MetricsFile]


def test_what_observes_a_run_changes_no_bit_of_it(tmp_path: Path) -> None:
    trained = []
    for observed in (False, True):
        torch.manual_seed(0)
        trained.append(
            run_loop(
                RandomBatches(None), 4, tmp_path, device="cpu", compiled=False, observed=observed
            )
        )
    for (name, alone), watched in zip(
        trained[0].named_parameters(), trained[1].parameters(), strict=True
    ):
        assert torch.equal(alone, watched), name


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_blocks_that_are_compiled_again_or_not_at_all_are_reported_and_others_are_not(
    capsys: Capture, tmp_path: Path
) -> None:
    run_loop(RandomBatches(5), 8, tmp_path, device="cpu", compiled=True)
    printed = capsys.readouterr().out
    reported = [line for line in printed.splitlines() if "compiled again" in line]
    assert reported == [
        "step 6: compiled again, which stalls every rank; TORCH_LOGS=recompiles shows why"
    ]
    assert "no block was compiled" not in printed
    torch._dynamo.reset()
    run_loop(
        RandomBatches(None), 2, tmp_path, device="cpu", compiled=True, hidden_from_compiler=True
    )
    assert "compile is on, but no block was compiled" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_between_log_steps_the_host_never_waits_for_the_gpu(
    tiny_tokens: Path, tmp_path: Path, compiled: bool
) -> None:
    dataset = TokenDataset(TokenFolder.open(tiny_tokens), sequence_length=128)
    loader = BatchLoader(
        dataset, global_batch_size=4, micro_batch_size=2, device=torch.device("cuda", 0)
    )

    def learning_rate(step: int) -> float:
        # Called once per step: from the third on, whatever waits raises. The last step logs.
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 8 else "default")
        return 1e-3

    try:
        run_loop(
            LoaderBatches(loader),
            9,
            tmp_path,
            device="cuda",
            compiled=compiled,
            learning_rate=learning_rate,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
        loader.close()


class Clock:
    """Stands for the module `time` of the metrics: stands still unless it is moved."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_time_that_is_left_counts_usual_steps_and_what_comes_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    dist_ctx = cluster.DistributedContext(RankInfo(), torch.device("cpu"), None)
    parallel_model: Any = SimpleNamespace(dist_ctx=dist_ctx, model_parallel_size=1)
    batches: Any = RandomBatches(None)
    throughput = Throughput(
        parallel_model,
        batches,
        lambda length: 1.0,
        None,
        100,
        {"validation": 20, "save": 50, "sample": None},
    )
    throughput.reset(0)

    def steps(number: int, seconds: float, unusual: bool = False) -> None:
        for _ in range(number):
            clock.now += seconds
            if unusual:
                throughput.count_unusual_step(seconds)

    steps(2, 300.0, unusual=True)
    assert throughput.take(2)["seconds_left"] is None, "nothing is known but steps that compile"
    steps(1, 60.0, unusual=True)
    steps(7, 2.0)
    assert throughput.take(10)["seconds_left"] == pytest.approx(90 * 2.0)
    steps(10, 2.0)
    with throughput.excluded("validation"):
        clock.now += 7.0
    assert throughput.take(20)["seconds_left"] == pytest.approx(80 * 2.0 + 4 * 7.0)
    steps(1, 60.0, unusual=True)
    assert throughput.take(21)["seconds_left"] == pytest.approx(79 * 2.0 + 4 * 7.0), (
        "the last usual step counts"
    )
    with throughput.excluded("save"):
        clock.now += 1.0
    steps(29, 3.0)
    assert throughput.take(50)["seconds_left"] == pytest.approx(50 * 3.0 + 3 * 7.0 + 1.0)
    steps(50, 3.0)
    assert throughput.take(100)["seconds_left"] == 0.0


def test_a_run_with_capped_logits_and_a_z_loss_tells_both_losses_and_is_not_exported(
    tiny_options: list[str], tiny_tokens: Path, tmp_path: Path, refused: Refusal
) -> None:
    words = ["--train.z_loss", "1", "--model.final_logit_softcapping", "3", "--train.steps", "2"]
    run = pretrained(tmp_path, "z", *tiny_options, *words)
    first, log_vocab = (
        run.read_metrics()[0],
        math.log(TokenFolder.open(tiny_tokens).tokenizer.vocab_size),
    )
    # Weights are random and small: the logits are near zero.
    assert first["loss"] == pytest.approx(log_vocab, rel=0.05)
    assert first["z_loss"] == pytest.approx(log_vocab**2, rel=0.1)
    assert "final_logit_softcapping" in refused("export", run.path, tmp_path / "out")
