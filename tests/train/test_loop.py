"""The loop: what it keeps in which dtype, when it says that it compiled again, and that it never waits for a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lmforge import checkpoint
from lmforge.checkpoint import AsyncCheckpointer, RetentionPolicy
from lmforge.cli import run as command
from lmforge.cluster import distributed as cluster
from lmforge.config.batch_plan import BatchPlan
from lmforge.config.sections import CheckpointOptions, OptimizerOptions, ParallelOptions
from lmforge.data.batch import Batch
from lmforge.data.dataset import TokenDataset
from lmforge.data.loader import BatchLoader
from lmforge.data.shards import TokenFolder
from lmforge.data.tokenizer import train_tokenizer
from lmforge.model import build_model
from lmforge.model.config import ModelConfig
from lmforge.model.init_weights import init_weights
from lmforge.monitor.watchdog import Watchdog
from lmforge.objectives.language import NextTokenObjective
from lmforge.parallel.parallelize import parallelize
from lmforge.runs import Run
from lmforge.train.bad_steps import BadStepDetector
from lmforge.train.checkpoint_schedule import CheckpointSchedule
from lmforge.train.loop import Trainer, train
from lmforge.train.metrics import ConsoleLogger
from lmforge.train.optimizer import build_optimizer
from lmforge.train.rollback import Rollback
from tests.conftest import Command

Capture = pytest.CaptureFixture[str]


def pretrained(folder: Path, name: str, *words: str) -> Run:
    assert command(["pretrain", *words, "--run.folder", str(folder), "--run.name", name]) == 0
    return Run(folder / name)


def test_with_bf16_masters_a_run_learns_is_half_as_large_and_goes_on_to_the_same_losses(
    tmp_path: Path, tiny_options: list[str], tiny_run: Path, lmforge: Command
) -> None:
    narrow = [*tiny_options, "--train.master_dtype", "bf16"]
    whole = pretrained(tmp_path, "whole", *narrow)
    steps = ["--run.folder", tmp_path, "--run.name", "broken", "--schedule.name", "constant", "--train.steps", 3]
    assert lmforge("pretrain", *narrow, *steps).returncode == 0
    broken = pretrained(tmp_path, "broken", *narrow, "--schedule.name", "constant")
    steady = pretrained(tmp_path, "steady", *narrow, "--schedule.name", "constant")
    assert [record["loss"] for record in broken.read_metrics()] == [record["loss"] for record in steady.read_metrics()]
    masters = Run(tiny_run).read_metrics()
    assert whole.read_metrics()[-1]["loss"] == pytest.approx(masters[-1]["loss"], rel=0.02)
    assert whole.read_metrics()[-1]["loss"] < whole.read_metrics()[0]["loss"] - 0.1

    def size(run: Run) -> int:
        return sum(described["bytes"] for described in checkpoint.read_manifest(run.checkpoint_path(6)).files.values())

    assert size(whole) < 0.75 * size(Run(tiny_run))


class Rows:
    """Batches of random tokens; from step `changed` on, a row longer."""

    data_seconds = 0.0

    def __init__(self, changed: int | None) -> None:
        self._changed = changed

    def batches(self, step: int) -> list[Batch]:
        rows = 3 if self._changed is not None and step >= self._changed else 2
        tokens = torch.randint(0, 64, (rows, 16))
        return [Batch(tokens, tokens, torch.arange(16).expand(rows, 16), torch.zeros(rows, 16, dtype=torch.int32))]


def trained(
    batches: Any, steps: int, tmp_path: Path, *, device: str, compiled: bool, rate: Callable[[int], float] = lambda step: 1e-3
) -> None:
    ranks = cluster.init_distributed(device, threads=1)
    objective = NextTokenObjective()
    model = init_weights(
        build_model(
            ModelConfig(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2),
            ranks.device,
        ),
        0,
    )
    spreaded = parallelize(
        model, objective.loss, dist_ctx=ranks, dtype=torch.float32, options=ParallelOptions(), compile_model=compiled
    )
    (tmp_path / "health").mkdir()
    watch, teller = Watchdog(ranks, tmp_path / "health"), ConsoleLogger(ranks, steps, None)
    optimizer = build_optimizer(model, OptimizerOptions())
    about = {"plan_hash": "", "rows": 2, "model": {}, "recipe": {}, "tokenizer_hash": "", "rng": "", "world": {}}
    tokenizer = train_tokenizer(["some text"], 300)
    saves = CheckpointSchedule(
        AsyncCheckpointer(Run(tmp_path), ranks, RetentionPolicy(1), metadata=about, tokenizer=tokenizer, log=teller.info),
        CheckpointOptions(),
        every_steps=1000,
        total_steps=steps,
        is_rank0=True,
        get_state=lambda kinds: {"model": dict(model.named_parameters())},
        get_metadata=lambda step: {"samples": 2 * step},
    )
    try:
        train(
            Trainer(
                parallel_model=spreaded,
                num_items=objective.num_items,
                optimizer=optimizer,
                lr_schedule=rate,
                batch_source=batches,
                batch_plan=BatchPlan(2, 16, 1, 2, 1),
                dist_ctx=ranks,
                watch=watch,
                console=teller,
                metrics_file=None,
                steps=steps,
                max_grad_norm=1.0,
                log_every=1000,
                validate_every=None,
                sample_every=None,
                bad_step_detector=BadStepDetector(ranks, spike_sigmas=6.0, window_steps=4),
                max_bad_steps=5,
                rollback=cast(Rollback, None),  # there are no bad steps here
                checkpoint_schedule=saves,
                validate=lambda step: {},
                sample=lambda step: None,
                flops_per_token=1.0,
                peak_flops=None,
            ),
            0,
        )
    finally:
        watch.stop("done")
        teller.close()


@pytest.mark.needs("a C++ compiler")
@pytest.mark.parametrize("changed", [None, 5])
def test_blocks_that_are_compiled_again_are_told_of(capsys: Capture, tmp_path: Path, changed: int | None) -> None:
    trained(Rows(changed), 8, tmp_path, device="cpu", compiled=True)
    told = [line for line in capsys.readouterr().out.splitlines() if "compiled again" in line]
    line = "compiled again, which stalls every rank; TORCH_LOGS=recompiles tells why"
    assert told == ([] if changed is None else [f"step {changed + 1}: {line}"])


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_between_log_steps_the_host_never_waits_for_the_gpu(tiny_tokens: Path, tmp_path: Path, compiled: bool) -> None:
    stream = TokenDataset(TokenFolder.open(tiny_tokens), sequence_length=128)
    loader = BatchLoader(stream, global_batch_size=4, micro_batch_size=2, device=torch.device("cuda", 0))

    def watched(step: int) -> float:
        # The learning rate is asked for once a step: from the third on, whatever waits raises. The last step logs.
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 8 else "default")
        return 1e-3

    try:
        trained(loader, 9, tmp_path, device="cuda", compiled=compiled, rate=watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        loader.close()
