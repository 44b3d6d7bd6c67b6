"""Preference and policy objectives on several ranks: what a batch is worth does not depend on who computes it."""

import secrets
from pathlib import Path

from tests.preloaded import preloaded

HERE = Path(__file__).parent


def test_losses_and_gradients_of_preference_and_policy_are_those_of_one_process_under_every_engine(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    done = preloaded().run([str(seed)], tmp_path, script=HERE / "objective_ranks.py", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same") == 4
