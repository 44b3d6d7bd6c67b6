"""Tasks scored while several ranks train: the same scores and the same training under any engine,
even with few questions.
"""

import json
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import FP32
from tests.distributed.conftest import Recipe, losses, run_cases

ENGINES = {
    "fsdp2": "",
    "grad-shard": "--parallel.sharding grad-shard",
    "context": "--parallel.context_parallel_degree 2",
    "fsdp1": "--parallel.engine fsdp1",
    "ddp": "--parallel.engine ddp",
}
ASKED = [
    f"val/{name}"
    for name in ("chosen/acc", "chosen/acc_norm", "written/exact_match", "written/regex")
]


@pytest.fixture(scope="module")
def folder(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs by the names of engines, one of a single rank, and one of two that is asked nothing.

    Of the questions that are written after there is one: a single batch, so that a rank of two has
    nothing to do.
    """
    folder = tmp_path_factory.mktemp("asked")
    choices = [
        {"prompt": f"{name}:", "choices": ["the", "zq", "Speak"], "answer": 0}
        for name in "ABCDEFGHIJKLMNOPQRST"
    ]
    written = [{"prompt": "The king", "answer": "nobody says this", "pattern": "[a-z]"}]
    for name, lines in (("chosen", choices), ("written", written)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ["--train.steps", "4", "--validation.every_steps", "2", "--validation.at_start"]
    options = [
        *few,
        "--validation.tasks",
        str(folder / "chosen.jsonl"),
        str(folder / "written.jsonl"),
    ]
    run_cases(1, [recipe(folder, "single", *options)], folder)
    cases = [recipe(folder, name, *options, *words.split()) for name, words in ENGINES.items()]
    run_cases(2, [recipe(folder, "not asked", *few), *cases], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_scores_and_losses_are_those_of_a_single_rank(folder: Path, name: str) -> None:
    alone, shared = Run(folder / "single"), Run(folder / name)
    for metric in ASKED:
        assert losses(shared, metric) == losses(alone, metric)
        assert losses(shared, metric).keys() == {0, 2, 4}
    assert losses(shared) == pytest.approx(losses(alone), rel=FP32.loss)


@pytest.mark.slow
def test_what_is_asked_changes_no_bit_of_the_training(folder: Path) -> None:
    assert losses(Run(folder / "fsdp2")) == losses(Run(folder / "not asked"))
