"""Generation on several ranks, each with prompts of its own."""

import secrets
from pathlib import Path

from tests.distributed.conftest import HERE
from tests.preloaded import preloaded


def test_spread_models_write_ragged_texts_as_one_that_is_whole_does_and_then_train_on(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    done = preloaded().run([str(seed)], tmp_path, script=HERE / "generation_ranks.py", ranks=3, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
