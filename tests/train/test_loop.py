"""The loop: what it keeps in which dtype, when it says that it compiled again, and that it never waits for a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lmforge import checkpoint
from lmforge.checkpoint import Keep, Saver
from lmforge.cli import run as command
from lmforge.cluster import ranks as cluster
from lmforge.config import BatchPlan, CheckpointOptions, OptimizerOptions
from lmforge.data.batch import Batch
from lmforge.data.loader import Loader
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Stream
from lmforge.data.tokenizer import train_tokenizer
from lmforge.model import build
from lmforge.model.shapes import ModelConfig
from lmforge.objectives.language import NextToken
from lmforge.parallel.apply import spread
from lmforge.runs import Run
from lmforge.train.guard import Guard
from lmforge.train.loop import Parts, train
from lmforge.train.metrics import Teller
from lmforge.train.optim import build_optimizer
from lmforge.train.recovery import Recovery
from lmforge.train.saves import Saves
from lmforge.train.watch import Watch
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
        return sum(described["bytes"] for described in checkpoint.read_manifest(run.checkpoint(6)).files.values())

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
    ranks = cluster.start(device, threads=1)
    objective = NextToken()
    model = build(
        ModelConfig(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2),
        seed=0,
        device=ranks.device,
    )
    spreaded = spread(model, objective.loss, ranks=ranks, dtype=torch.float32, compiled=compiled)
    (tmp_path / "health").mkdir()
    watch, teller = Watch(ranks, tmp_path / "health"), Teller(ranks, steps, None)
    optimizer = build_optimizer(model, OptimizerOptions())
    about = {"plan_hash": "", "rows": 2, "model": {}, "recipe": {}, "tokenizer_hash": "", "rng": "", "world": {}}
    tokenizer = train_tokenizer(["some text"], 300)
    saves = Saves(
        Saver(Run(tmp_path), ranks, Keep(1), about=about, tokenizer=tokenizer, say=teller.say),
        CheckpointOptions(),
        every_steps=1000,
        steps=steps,
        first=True,
        state=lambda kinds: {"model": dict(model.named_parameters())},
        about=lambda step: {"samples": 2 * step},
    )
    try:
        train(
            Parts(
                spread=spreaded,
                weight=objective.weight,
                optimizer=optimizer,
                learning_rate=rate,
                batches=batches,
                plan=BatchPlan(2, 16, 1, 2, 1),
                ranks=ranks,
                watch=watch,
                teller=teller,
                metrics=None,
                steps=steps,
                clip_norm=1.0,
                log_every=1000,
                validate_every=None,
                sample_every=None,
                guard=Guard(ranks, spike_sigmas=6.0, window_steps=4),
                bad_steps=5,
                recovery=cast(Recovery, None),  # there are no bad steps here
                saves=saves,
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
    stream = Stream(TokenFolder.open(tiny_tokens), length=128)
    loader = Loader(stream, global_batch_rows=4, micro_batch_rows=2, device=torch.device("cuda", 0))

    def watched(step: int) -> float:
        # The learning rate is asked for once a step: from the third on, whatever waits raises. The last step logs.
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 8 else "default")
        return 1e-3

    try:
        trained(loader, 9, tmp_path, device="cuda", compiled=compiled, rate=watched)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        loader.close()
