"""A checkpoint written under any strategy can be resumed under any other, including the optimizer's
state.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from lmforge.core.model.resolve import stored_model_config
from lmforge.core.records.runs import Run
from lmforge.hf.export import export_folder
from lmforge.lab.bench import bounds
from tests.distributed.conftest import Recipe, losses, newest_checkpoint, run_cases, weights

SCHEDULE = ["--train.steps", "6", "--checkpoint.every_steps", "3", "--validation.every_steps", "3"]
SAMPLES = ["--sample.every_steps", "3", "--sample.max_tokens", "3"]
TIED = ["--model.tie_word_embeddings", "true"]
BF16 = ["--train.dtype", "bf16"]
FSDP1 = ["--parallel.engine", "fsdp1"]
HYBRID = ["--parallel.shard_degree", "2", "--parallel.sharding"]
TENSOR = ["--parallel.tensor_parallel_degree", "2"]
PIPELINE = ["--parallel.pipeline_parallel_degree", "2", "--train.micro_batch_size", "3"]
WRITERS: dict[str, tuple[int, list[str]]] = {
    "single": (1, SAMPLES),
    "tied single": (1, TIED),
    "bf16 single": (1, BF16),
    "ddp on 2": (
        2,
        ["--parallel.engine", "ddp", "--parallel.activation_checkpointing", "selective-ops"],
    ),
    "fsdp1 on 2": (2, [*FSDP1, *SAMPLES]),
    "tied fsdp1 on 2": (2, [*FSDP1, *TIED]),
    "fsdp2 offloaded on 2": (
        2,
        ["--parallel.cpu_offload", "--parallel.activation_checkpointing", "full", *SAMPLES],
    ),
    "context of 2, grad-shard": (
        2,
        ["--parallel.context_parallel_degree", "2", "--parallel.sharding", "grad-shard", *SAMPLES],
    ),
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
    "bf16 single, then fsdp2 on 2": ("bf16 single", 2, BF16),
    "fsdp1 hybrid on 4, then fsdp2 offloaded on 2": (
        "fsdp1 hybrid on 4",
        2,
        ["--parallel.cpu_offload"],
    ),
    "ddp on 2, then tensor and fsdp2 hybrid on 4": (
        "ddp on 2",
        4,
        [*TENSOR, *HYBRID, "hybrid-grad-shard"],
    ),
    "fsdp2 offloaded on 2, then no-shard on 4": (
        "fsdp2 offloaded on 2",
        4,
        ["--parallel.sharding", "no-shard"],
    ),
}
# Only in make test-all: these, whoever reads what they wrote, and one more reader.
SLOW = (
    "tied ",
    "tensor and pipeline on 4",
    "fsdp1 hybrid on 4",
    "fsdp2 offloaded on 2, then no-shard on 4",
)
BF16_MASTERS = ["--train.master_dtype", "bf16"]


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(SLOW) else [])
        for name in names
    ]


class Runs(dict[str, Run]):
    """Finished runs by name; the slow ones run when the first of them is used."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        super().__init__()
        self._recipe, self._folder = recipe, folder
        self._run(slow=False)

    def __missing__(self, name: str) -> Run:
        self._run(slow=True)
        return self[name]

    def _run(self, slow: bool) -> None:
        writers = {name: case for name, case in WRITERS.items() if name.startswith(SLOW) == slow}
        readers = {name: case for name, case in READERS.items() if name.startswith(SLOW) == slow}
        for ranks in (1, 2, 4):
            lines = [
                self._line(name, *more) for name, (count, more) in writers.items() if count == ranks
            ]
            run_cases(ranks, lines, self._folder)
        for name, (writer, _, _) in readers.items():
            ignored = shutil.ignore_patterns(".lock", "step-00000006")
            shutil.copytree(self._folder / writer, self._folder / name, ignore=ignored)
        for ranks in (1, 2, 4):
            lines = [
                self._line(name, *(TIED if "tied" in writer else []), *more)
                for name, (writer, count, more) in readers.items()
                if count == ranks
            ]
            run_cases(ranks, lines, self._folder)
        self.update({name: Run(self._folder / name) for name in (*writers, *readers)})

    def _line(self, name: str, *more: str) -> list[str]:
        return self._recipe(self._folder, name, *SCHEDULE, *more)


@pytest.fixture(scope="module")
def runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(recipe, tmp_path_factory.mktemp("across"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("pipeline", PIPELINE), ("tensor", TENSOR)],
    ids=["pipeline", "tensor"],
)
def test_ranks_that_split_the_model_begin_from_a_folder_and_keep_their_masters_in_bf16(
    recipe: Recipe, runs: Runs, tmp_path: Path, name: str, more: list[str]
) -> None:
    folder, manifest = newest_checkpoint(runs["single"].path)
    tensors = weights(runs["single"])
    export_folder(tensors, stored_model_config(manifest), tmp_path / "source", folder)
    source = ["--model.source", str(tmp_path / "source")]
    for ranks, begun, own in ((1, "single", []), (2, name, more)):
        lines = [recipe(tmp_path, begun, *SCHEDULE, *source, *own)]
        lines.append(recipe(tmp_path, f"bf16 {begun}", *SCHEDULE, *source, *BF16_MASTERS, *own))
        run_cases(ranks, lines, tmp_path)
    assert losses(Run(tmp_path / name)) == pytest.approx(
        losses(Run(tmp_path / "single")), rel=bounds.FP32.loss
    )
    narrow = losses(Run(tmp_path / "bf16 single"), "val/loss")
    assert losses(Run(tmp_path / f"bf16 {name}"), "val/loss") == pytest.approx(
        narrow, rel=bounds.BF16_STATES.loss
    )
    assert losses(Run(tmp_path / "single"))[1] < losses(runs["single"])[1] - 0.05


def reference(runs: Runs, name: str) -> dict[int, float]:
    return losses(
        runs[
            next((model for model in ("tied single", "bf16 single") if model[:4] in name), "single")
        ]
    )


@pytest.mark.parametrize("name", cases(name for name in WRITERS if not name.endswith("single")))
def test_a_run_is_the_same_run_under_every_strategy(runs: Runs, name: str) -> None:
    assert losses(runs[name]) == pytest.approx(reference(runs, name), rel=bounds.FP32.loss)


@pytest.mark.parametrize("name", cases(READERS))
def test_a_checkpoint_continues_under_another_strategy_with_the_same_losses(
    runs: Runs, name: str
) -> None:
    log = runs[name].log_path(2, 0).read_text()
    assert "from step 3" in log
    assert losses(runs[name]) == pytest.approx(
        reference(runs, name), rel=(bounds.BF16 if "bf16" in name else bounds.FP32).loss
    )


def test_the_losses_that_are_compared_change_with_each_step(runs: Runs) -> None:
    by_step = losses(runs["single"])
    assert len(set(by_step.values())) == len(by_step) == 6
    assert by_step[6] < by_step[4]
    assert losses(runs["bf16 single"]) != by_step


def test_samples_are_written_under_every_engine(runs: Runs) -> None:
    def sampled(name: str) -> list[str]:
        log = runs[name].log_path(1, 0).read_text()
        return [line.partition("sample: ")[2] for line in log.splitlines() if "sample: " in line]

    assert len(sampled("single")) == 2
    for name in ("fsdp1 on 2", "fsdp2 offloaded on 2", "context of 2, grad-shard"):
        assert sampled(name) == sampled("single"), name
