"""A checkpoint written under any strategy goes on under any other, its optimizer's state included."""

import shutil
from pathlib import Path

import pytest

from lmforge.interop.export import export_folder
from lmforge.runs import Run
from tests.distributed.conftest import Recipe, losses, newest_checkpoint, run_cases, weights

LOSS_TOLERANCE = 1e-6
SCHEDULE = ["--train.steps", "10", "--checkpoint.every_steps", "5", "--validation.every_steps", "5"]
SAMPLES = ["--sample.every_steps", "5", "--sample.max_tokens", "3"]
TIED = ["--model.tie_word_embeddings", "true"]
FSDP1 = ["--parallel.engine", "fsdp1"]
HYBRID = ["--parallel.shard_degree", "2", "--parallel.sharding"]
TENSOR = ["--parallel.tensor_parallel_degree", "2"]
PIPELINE = ["--parallel.pipeline_parallel_degree", "2", "--train.micro_batch_size", "3"]
WRITERS: dict[str, tuple[int, list[str]]] = {
    "single": (1, SAMPLES),
    "tied single": (1, TIED),
    "ddp on 2": (2, ["--parallel.engine", "ddp", "--parallel.activation_checkpointing", "selective-ops"]),
    "fsdp1 on 2": (2, [*FSDP1, *SAMPLES]),
    "tied fsdp1 on 2": (2, [*FSDP1, *TIED]),
    "fsdp2 offloaded on 2": (2, ["--parallel.cpu_offload", "--parallel.activation_checkpointing", "full", *SAMPLES]),
    "context of 2, grad-shard": (2, ["--parallel.context_parallel_degree", "2", "--parallel.sharding", "grad-shard", *SAMPLES]),
    "tensor on 2": (2, TENSOR),
    "tied tensor on 2": (2, [*TENSOR, *TIED]),
    "fsdp1 hybrid on 4": (4, [*FSDP1, *HYBRID, "hybrid-full-shard"]),
    "tensor and pipeline on 4": (4, [*TENSOR, *PIPELINE]),
}
# From whom, and under what it goes on.
READERS: dict[str, tuple[str, int, list[str]]] = {
    "fsdp1 on 2, then single": ("fsdp1 on 2", 1, []),
    "tied fsdp1 on 2, then single": ("tied fsdp1 on 2", 1, []),
    "tensor and pipeline on 4, then single": ("tensor and pipeline on 4", 1, []),
    "context of 2, then tensor on 2": ("context of 2, grad-shard", 2, TENSOR),
    "tied tensor on 2, then single": ("tied tensor on 2", 1, []),
    "tensor on 2, then a pipeline on 2": ("tensor on 2", 2, PIPELINE),
    "single, then fsdp1 on 2": ("single", 2, [*FSDP1, "--parallel.sharding", "grad-shard"]),
    "tied single, then fsdp1 on 2": ("tied single", 2, FSDP1),
    "fsdp1 hybrid on 4, then fsdp2 offloaded on 2": ("fsdp1 hybrid on 4", 2, ["--parallel.cpu_offload"]),
    "ddp on 2, then tensor and fsdp2 hybrid on 4": ("ddp on 2", 4, [*TENSOR, *HYBRID, "hybrid-grad-shard"]),
    "fsdp2 offloaded on 2, then no-shard on 4": ("fsdp2 offloaded on 2", 4, ["--parallel.sharding", "no-shard"]),
}


BF16_MASTERS = ["--train.master_dtype", "bf16"]


@pytest.fixture(scope="module")
def runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("across")
    for ranks in (1, 2, 4):
        lines = [recipe(folder, name, *SCHEDULE, *more) for name, (count, more) in WRITERS.items() if count == ranks]
        run_cases(ranks, lines, folder)
    for name, (writer, _, _) in READERS.items():
        shutil.copytree(folder / writer, folder / name, ignore=shutil.ignore_patterns(".lock", "step-00000010"))
    for ranks in (1, 2, 4):
        lines = []
        for name, (writer, count, more) in READERS.items():
            if count == ranks:
                lines.append(recipe(folder, name, *SCHEDULE, *(TIED if "tied" in writer else []), *more))
        run_cases(ranks, lines, folder)
    return {name: Run(folder / name) for name in (*WRITERS, *READERS)}


def test_a_pipeline_begins_from_a_folder_and_keeps_its_masters_in_bf16(
    recipe: Recipe, runs: dict[str, Run], tmp_path: Path
) -> None:
    folder, manifest = newest_checkpoint(runs["single"].path)
    tensors = weights(runs["single"])
    export_folder(tensors, manifest.model_config, tmp_path / "source", folder)
    source = ["--model.source", str(tmp_path / "source")]
    begun = {"single": (1, []), "pipeline": (2, PIPELINE), "tensor": (2, TENSOR)}
    for ranks in (1, 2):
        lines = []
        for name, (count, more) in begun.items():
            if count == ranks:
                lines.append(recipe(tmp_path, name, *SCHEDULE, *source, *more))
                lines.append(recipe(tmp_path, f"bf16 {name}", *SCHEDULE, *source, *BF16_MASTERS, *more))
        run_cases(ranks, lines, tmp_path)
    for name in ("pipeline", "tensor"):
        assert losses(Run(tmp_path / name)) == pytest.approx(losses(Run(tmp_path / "single")), rel=LOSS_TOLERANCE)
        # Sums in another order round to other bf16 numbers, which differ by 2^-8.
        narrow = losses(Run(tmp_path / "bf16 single"), "val/loss")
        assert losses(Run(tmp_path / f"bf16 {name}"), "val/loss") == pytest.approx(narrow, rel=2e-3)
    assert losses(Run(tmp_path / "single"))[1] < losses(runs["single"])[1] - 0.05


def reference(runs: dict[str, Run], name: str) -> dict[int, float]:
    return losses(runs["tied single" if "tied" in name else "single"])


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.endswith("single")])
def test_a_run_is_the_same_run_under_every_strategy(runs: dict[str, Run], name: str) -> None:
    assert losses(runs[name]) == pytest.approx(reference(runs, name), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("name", READERS)
def test_a_checkpoint_goes_on_under_another_strategy_with_the_same_losses(runs: dict[str, Run], name: str) -> None:
    log = runs[name].log_path(2, 0).read_text()
    assert "from step 5" in log
    assert losses(runs[name]) == pytest.approx(reference(runs, name), rel=LOSS_TOLERANCE)


def test_the_losses_that_are_compared_change_with_each_step(runs: dict[str, Run]) -> None:
    by_step = losses(runs["single"])
    assert len(set(by_step.values())) == len(by_step) == 10
    assert by_step[10] < by_step[6]
    assert losses(runs["tied single"])[10] != pytest.approx(by_step[10], rel=1e-3)


def test_samples_are_written_under_every_engine(runs: dict[str, Run]) -> None:
    def sampled(name: str) -> list[str]:
        log = runs[name].log_path(1, 0).read_text()
        return [line.partition("sample: ")[2] for line in log.splitlines() if "sample: " in line]

    assert len(sampled("single")) == 2
    for name in ("fsdp1 on 2", "fsdp2 offloaded on 2", "context of 2, grad-shard"):
        assert sampled(name) == sampled("single"), name
