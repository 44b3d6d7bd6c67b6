"""The same recipe gives the same run under every strategy, and for every split of its batches."""

from pathlib import Path

import pytest
import torch

from lmforge.core.records.runs import Run
from tests.distributed.conftest import (
    RECIPE_STEPS,
    Recipe,
    assert_agree,
    losses,
    run_cases,
    weights,
    with_needs,
)
from tests.support.rounding import OTHER_ROUNDING
from tests.support.tools import has_compiler

STRATEGIES: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "single in 4 micro-batches": (1, ["--train.micro_batch_size", "3"]),
    "fsdp2 on 2 in 3 micro-batches": (2, ["--train.micro_batch_size", "2"]),
}
TIED = ["--model.tie_word_embeddings", "true"]
GPT2 = ["--model.preset", "gpt2-124m", "--model.num_key_value_heads", "6"]
MODELS: dict[str, tuple[int, list[str]]] = {
    "tied single": (1, TIED),
    "tied fsdp2": (2, TIED),
    "gpt2 single": (1, GPT2),
    "gpt2 ddp": (2, [*GPT2, "--parallel.engine", "ddp"]),
}
# Only in make test-all.
SLOW: dict[str, tuple[int, list[str]]] = {
    "fsdp2 on 1": (1, ["--parallel.engine", "fsdp2"]),
    "ddp on 2 in 3 micro-batches": (
        2,
        ["--parallel.engine", "ddp", "--train.micro_batch_size", "2"],
    ),
    "fsdp2 on 3": (3, []),
    "ddp on 3": (3, ["--parallel.engine", "ddp"]),
    "fsdp2 on 4": (4, ["--train.micro_batch_size", "1"]),
    "ddp on 4": (4, ["--parallel.engine", "ddp"]),
    "tied ddp": (2, [*TIED, "--parallel.engine", "ddp"]),
    "gpt2 fsdp2": (2, GPT2),
    "fsdp2 on 2 compiled": (2, ["--train.compile", "on"]),
}


def run_all(
    cases: dict[str, tuple[int, list[str]]], recipe: Recipe, folder: Path
) -> dict[str, Run]:
    present = {
        name: case for name, case in cases.items() if "compiled" not in name or has_compiler()
    }
    for ranks in sorted({count for count, _ in present.values()}):
        lines = [
            recipe(folder, name, *more) for name, (count, more) in present.items() if count == ranks
        ]
        run_cases(ranks, lines, folder)
    return {name: Run(folder / name) for name in present}


@pytest.fixture(scope="module")
def runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder, cases = tmp_path_factory.mktemp("same"), STRATEGIES | MODELS
    rounded = [
        recipe(folder, f"{name} rounded", *more)
        for name, (_, more) in cases.items()
        if name.endswith("single")
    ]
    run_cases(1, rounded, folder, **OTHER_ROUNDING)
    return run_all(cases, recipe, folder)


@pytest.fixture(scope="module")
def slow_runs(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_all(SLOW, recipe, tmp_path_factory.mktemp("same-slow"))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "single"])
def test_losses_and_weights_do_not_depend_on_the_strategy_or_the_micro_batches(
    runs: dict[str, Run], name: str
) -> None:
    assert_agree(runs[name], runs["single"])


@pytest.mark.parametrize(
    ("name", "reference"), [("tied fsdp2", "tied single"), ("gpt2 ddp", "gpt2 single")]
)
def test_nor_do_those_of_other_models(runs: dict[str, Run], name: str, reference: str) -> None:
    assert_agree(runs[name], runs[reference])


@pytest.mark.slow
@pytest.mark.parametrize("name", with_needs((name,) for name in SLOW))
def test_losses_and_weights_are_the_same_under_the_other_strategies(
    runs: dict[str, Run], slow_runs: dict[str, Run], name: str
) -> None:
    model = name.split()[0]
    assert_agree(
        slow_runs[name], runs[f"{model} single" if model in ("tied", "gpt2") else "single"]
    )


def test_training_lowers_the_loss(runs: dict[str, Run]) -> None:
    by_step = losses(runs["single"])
    assert by_step[RECIPE_STEPS] < by_step[1] - 0.03


def test_other_models_and_other_steps_differ(runs: dict[str, Run]) -> None:
    """The comparisons above would pass if every run were the same."""
    assert losses(runs["tied single"])[RECIPE_STEPS] != pytest.approx(
        losses(runs["single"])[RECIPE_STEPS], rel=1e-3
    )
    assert any(
        not torch.equal(tensor, weights(runs["single"], RECIPE_STEPS // 2)[name])
        for name, tensor in weights(runs["single"]).items()
    )


@pytest.mark.slow
def test_a_rank_of_full_shard_saves_only_its_part(slow_runs: dict[str, Run]) -> None:
    files = sorted(slow_runs["fsdp2 on 4"].checkpoint_path(RECIPE_STEPS).glob("*.distcp"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) == 4
    assert max(sizes) < 2 * min(sizes)
