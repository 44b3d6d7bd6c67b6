"""Runs whose experts are balanced in all ways: cut into legs on other ranks, with other
micro-batches.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.model.config_json import to_config_json
from lmforge.core.records.runs import Run
from tests.conftest import Command
from tests.distributed.conftest import Recipe, assert_agree, weights
from tests.distributed.shapes import SHAPES
from tests.support.rounding import OTHER_ROUNDING

BALANCED = ["--model.router_aux_loss_scope", "global_batch", "--model.router_z_loss_coef", "0.1"]
BALANCED += ["--model.bias_update_speed", "0.01", "--schedule.name", "constant"]
PIPELINE = ["--parallel.pipeline_parallel_degree", "2", "--train.micro_batch_size", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json of DeepSeek-V3 with few layers."""
    path = tmp_path_factory.mktemp("deepseek")
    content: dict[str, Any] = to_config_json(SHAPES["latents"]) | {"vocab_size": 1024}
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def whole(
    folder: Path, recipe: Recipe, lmforge: Command, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    place = tmp_path_factory.mktemp("whole")
    train(lmforge, recipe, folder, place, 6, 1, "--run.name", "run rounded", **OTHER_ROUNDING)
    return train(lmforge, recipe, folder, place, 6, 1)


def train(
    lmforge: Command,
    recipe: Recipe,
    source: Path,
    folder: Path,
    steps: int,
    ranks: int,
    *more: str,
    **variables: str,
) -> Run:
    words = without_model(
        recipe(
            folder,
            "run",
            "--model.source",
            str(source),
            "--model.load_weights",
            "false",
            *BALANCED,
            *more,
        )
    )
    done = lmforge("pretrain", *words, "--train.steps", steps, ranks=ranks, **variables)
    assert done.returncode == 0, done.stderr
    for said in (
        "a loss of weight 0.5 over the global batch, with the choices of the one before",
        "biases that move by 0.01",
    ):
        assert said in done.stdout
    return Run(folder / "run")


def without_model(words: list[str]) -> list[str]:
    """Without the sizes of the model that a recipe names."""
    pairs = zip(words[::2], words[1::2], strict=True)
    own = (
        "source",
        "load_weights",
        "router_aux_loss_scope",
        "router_z_loss_coef",
        "bias_update_speed",
    )
    return [
        word
        for pair in pairs
        if not pair[0].startswith("--model.") or pair[0].endswith(own)
        for word in pair
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--train.micro_batch_size", "2"], PIPELINE],
    ids=["fsdp2", "pipeline"],
)
def test_a_run_that_is_cut_and_continued_on_other_ranks_is_the_uncut_one(
    more: list[str], folder: Path, whole: Run, recipe: Recipe, lmforge: Command, tmp_path: Path
) -> None:
    train(lmforge, recipe, folder, tmp_path, 3, 2, *more)
    cut = train(lmforge, recipe, folder, tmp_path, 6, 1, "--train.micro_batch_size", "3")
    assert_agree(cut, whole, validated=False)
    biases = [
        tensor
        for name, tensor in weights(whole).items()
        if name.endswith("e_score_correction_bias")
    ]
    assert len(biases) == 3
    assert all(0 < float(each.abs().max()) <= 0.06 + 1e-6 for each in biases)
