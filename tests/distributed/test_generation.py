"""Generation on several ranks, each with its own prompts."""

from pathlib import Path

from tests.distributed.conftest import HERE
from tests.seeds import fresh_seed
from tests.support.preloaded import on_ranks


def test_parallel_models_generate_as_an_unsharded_model_does_and_then_train_on(
    tmp_path: Path,
) -> None:
    seed = fresh_seed()
    on_ranks(3, HERE / "generation_ranks.py", tmp_path, seed)
