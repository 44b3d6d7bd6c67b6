"""Generation on several ranks, each with prompts of its own."""

from pathlib import Path

from tests.distributed.conftest import HERE
from tests.preloaded import on_ranks
from tests.seeds import fresh_seed


def test_spread_models_write_ragged_texts_as_one_that_is_whole_does_and_then_train_on(tmp_path: Path) -> None:
    seed = fresh_seed()
    on_ranks(3, HERE / "generation_ranks.py", tmp_path, seed)
