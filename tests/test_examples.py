"""What docs/barriers.md says of its examples is what they do: the mistake fails, the cure does not."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preloaded import preloaded

ROOT = Path(__file__).parents[1]
Example = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def carried_out(tmp_path: Path) -> Example:
    """`carried_out(example, *words)`: on two ranks, as torchrun would start them."""

    def run(example: str, *words: str) -> subprocess.CompletedProcess[str]:
        return preloaded().run(words, tmp_path, script=ROOT / "examples" / example, ranks=2, timeout=120)

    return run


def test_ranks_that_decide_for_themselves_wait_for_each_other_in_different_places(carried_out: Example) -> None:
    done = carried_out("barrier_ddp.py")
    assert done.returncode != 0
    assert "rank 0: step 2 done, not saved" in done.stdout
    assert "rank 1: step 2 done" not in done.stdout
    assert "in backward" in done.stderr or "dist.barrier()" in done.stderr


def test_a_save_on_the_group_of_training_crosses_with_it_although_a_barrier_comes_before(carried_out: Example) -> None:
    done = carried_out("barrier_fsdp2.py")
    assert done.returncode != 0
    assert "step 11" not in done.stdout


@pytest.mark.parametrize(("example", "cure"), [("barrier_ddp.py", "agree"), ("barrier_fsdp2.py", "own-group")])
def test_with_the_cure_they_run_to_the_end(carried_out: Example, example: str, cure: str) -> None:
    done = carried_out(example, cure)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("example", "cure"), [("barrier_ddp.py", "agree"), ("barrier_fsdp2.py", "own-group")])
def test_as_the_page_starts_them_they_do_the_same(example: str, cure: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"examples/{example}"]
    for words, succeeds in (([], False), ([cure], True)):
        done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == succeeds, done.stderr[-3000:]
