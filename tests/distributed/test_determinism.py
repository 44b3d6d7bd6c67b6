"""`--deterministic` reaches torch in every rank, and two runs under it have the same bits."""

import json
from pathlib import Path

import pytest
import torch

from lmforge.core.errors import UserError
from lmforge.core.records.runs import Run
from lmforge.core.steps.determinism import (
    REQUIRED_ENVIRONMENT,
    explain_nondeterministic_op,
    set_determinism,
)
from tests.distributed.conftest import HERE, Recipe, losses, weights
from tests.support.preloaded import on_ranks

RANKS = 2


@pytest.fixture(scope="module")
def folder(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with the option, with dropout and micro-batches, and one without."""
    folder = tmp_path_factory.mktemp("deterministic")
    more = ["--model.dropout", "0.1", "--train.micro_batch_size", "3", "--train.steps", "4"]
    lines = [recipe(folder, name, *more, "--deterministic") for name in ("a", "b")] + [
        recipe(folder, "usual", *more)
    ]
    (folder / "cases.json").write_text(json.dumps(lines))
    on_ranks(RANKS, HERE / "deterministic_ranks.py", folder, folder, folder / "cases.json")
    return folder


@pytest.mark.slow
def test_determinism_is_set_on_every_rank(folder: Path) -> None:
    for rank in range(RANKS):
        for name in ("a", "b"):
            settings = json.loads((folder / f"{name}-{rank}.json").read_text())
            assert (settings["algorithms"], settings["cudnn"], settings["warn_only"]) == (
                True,
                True,
                False,
            )
            assert settings["environment"] == {
                variable: values[0] for variable, values in REQUIRED_ENVIRONMENT.items()
            }
        assert not json.loads((folder / f"usual-{rank}.json").read_text())["algorithms"]


def test_two_runs_have_the_same_bits_and_on_a_cpu_so_has_one_without_the_option(
    folder: Path,
) -> None:
    first = Run(folder / "a")
    for name in ("b", "usual"):
        assert losses(Run(folder / name)) == losses(first)
        assert losses(Run(folder / name), "grad_norm") == losses(first, "grad_norm")
        theirs = weights(Run(folder / name))
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in weights(first).items())


def test_the_recipe_keeps_it(folder: Path) -> None:
    assert "deterministic = true" in Run(folder / "a").recipe_path.read_text()


def test_an_environment_that_says_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, values in REQUIRED_ENVIRONMENT.items():
        monkeypatch.setenv(variable, values[0])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        UserError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 is set, .* unset it or set it to :4096:8$"
    ):
        set_determinism(True)
    assert not torch.are_deterministic_algorithms_enabled()
    set_determinism(False)  # nobody asked


def test_what_has_no_deterministic_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, values in REQUIRED_ENVIRONMENT.items():
        monkeypatch.setenv(variable, values[0])
    set_determinism(True)
    try:
        with pytest.raises(RuntimeError) as refused:
            torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))
    finally:
        set_determinism(False)
    assert (explain_nondeterministic_op(refused.value) or "").startswith(
        "train.deterministic: put_ has no deterministic implementation"
    )
    assert explain_nondeterministic_op(RuntimeError("anything else")) is None
