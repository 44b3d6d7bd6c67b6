"""Preference and policy objectives on several ranks: what a batch is worth does not depend on who computes it."""

from pathlib import Path

from tests.distributed.conftest import HERE
from tests.preloaded import on_ranks
from tests.seeds import fresh_seed


def test_losses_and_gradients_of_preference_and_policy_are_those_of_one_process_under_every_engine(tmp_path: Path) -> None:
    seed = fresh_seed()
    assert on_ranks(2, HERE / "objective_ranks.py", tmp_path, seed).count("the same") == 4
