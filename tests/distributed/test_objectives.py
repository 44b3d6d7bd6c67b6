"""Objectives on several ranks: the loss of a batch does not depend on the ranks that compute it."""

from pathlib import Path

import pytest

from tests.distributed.conftest import HERE
from tests.distributed.objective_ranks import STRATEGIES
from tests.seeds import fresh_seed
from tests.support.preloaded import on_ranks


@pytest.mark.parametrize("which", ["sample", pytest.param("all", marks=pytest.mark.slow)])
def test_losses_and_gradients_of_all_objectives_are_those_of_one_process_under_every_engine(
    tmp_path: Path, which: str
) -> None:
    """The sample has each pair of an objective and an engine, in one vocabulary and one dtype by
    turns.
    """
    seed = fresh_seed()
    assert on_ranks(2, HERE / "objective_ranks.py", tmp_path, seed, which).count("the same") == 15


@pytest.mark.slow
def test_references_have_no_dropout_and_no_noise_under_any_engine(tmp_path: Path) -> None:
    seed = fresh_seed()
    assert on_ranks(2, HERE / "reference_ranks.py", tmp_path, seed).count("the same") == len(
        STRATEGIES
    )
