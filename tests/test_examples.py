"""The examples work: those of docs/library.md run; in those of docs/barriers.md the mistake fails
and the fix does not.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lmforge
from tests.support.preloaded import preloaded
from tests.support.text import write_documents

ROOT = Path(__file__).parents[1]
Example = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def carried_out(tmp_path: Path) -> Example:
    """`carried_out(example, *words)`: on two ranks, as torchrun would start them."""

    def run(example: str, *words: str) -> subprocess.CompletedProcess[str]:
        return preloaded().run(
            words, tmp_path, script=ROOT / "examples" / example, ranks=2, timeout=120
        )

    return run


@pytest.mark.slow
def test_ranks_that_decide_for_themselves_wait_for_each_other_in_different_places(
    carried_out: Example,
) -> None:
    done = carried_out("barrier_ddp.py")
    assert done.returncode != 0
    assert "rank 0: step 2 done, not saved" in done.stdout
    assert "rank 1: step 2 done" not in done.stdout
    assert "in backward" in done.stderr or "dist.barrier()" in done.stderr


@pytest.mark.slow
def test_a_save_on_the_group_of_training_crosses_with_it_although_a_barrier_comes_before(
    carried_out: Example,
) -> None:
    done = carried_out("barrier_fsdp2.py")
    assert done.returncode != 0
    assert "step 11" not in done.stdout


@pytest.mark.parametrize(
    ("example", "cure"), [("barrier_ddp.py", "agree"), ("barrier_fsdp2.py", "own-group")]
)
def test_with_the_cure_they_run_to_the_end(carried_out: Example, example: str, cure: str) -> None:
    done = carried_out(example, cure)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "cure"), [("barrier_ddp.py", "agree"), ("barrier_fsdp2.py", "own-group")]
)
def test_as_the_page_starts_them_they_do_the_same(example: str, cure: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        ROOT / "examples" / example,
    ]
    for words, succeeds in (([], False), ([cure], True)):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0) == succeeds, done.stderr[-3000:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where examples are run one after another, each with what those before it wrote, and
    the text to begin with.
    """
    folder = tmp_path_factory.mktemp("library")
    write_documents(folder / "text")
    return folder


def run_example(place: Path, example: str, *words: str, ranks: int = 1, output: str = "out") -> str:
    """What an example prints, on `ranks` ranks, in a few steps."""
    (place / output).mkdir(exist_ok=True)
    done = preloaded().run(
        words,
        place / output,
        script=ROOT / "examples" / example,
        ranks=ranks,
        cwd=place,
        variables={"STEPS": "3"},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_text_becomes_a_model_that_is_loaded_measured_and_exported(place: Path) -> None:
    printed = run_example(place, "pretrain_from_text.py", "text", output="1")
    assert "tokens to train on" in printed
    assert "trained 3 steps" in printed
    printed = run_example(place, "load_and_generate.py", "runs/example", "import ", output="2")
    assert printed.count("--- temperature") == 2
    assert "3 layers, 1024 tokens" in printed
    printed = run_example(place, "evaluate_and_export.py", "runs/example", "exported", output="3")
    before, after = re.findall(r"loss (\d+\.\d{4})", printed)
    assert before == after, "what was exported is the same model"
    assert (place / "exported" / "model.safetensors").exists()


def test_an_objective_of_ones_own_is_trained_and_its_metrics_are_logged(place: Path) -> None:
    lmforge.prepare_data(str(place / "text"), place / "prepared", vocab_size=400)
    run_example(place, "custom_objective.py", "prepared", output="4")
    last = json.loads((place / "runs/custom-objective/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 3
    assert 0 < last["val/capped"] <= last["val/loss"]


@pytest.mark.slow
def test_a_loop_of_ones_own_on_two_ranks_trains_as_on_one(place: Path) -> None:
    lmforge.prepare_data(str(place / "text"), place / "data/by-hand", vocab_size=400)
    losses = []
    for ranks in (1, 2):
        printed = run_example(
            place,
            "parallelize_by_hand.py",
            "data/by-hand",
            f"by-hand-{ranks}",
            ranks=ranks,
            output=f"by-hand-ranks-{ranks}",
        )
        losses.append(re.findall(r"loss (\d+\.\d+)", printed))
        assert (place / f"by-hand-{ranks}" / "config.json").exists()
    assert losses[0] == losses[1]
    one, two = (
        lmforge.load_model(place / f"by-hand-{ranks}", device="cpu", dtype="fp32")
        for ranks in (1, 2)
    )
    for name, tensor in one.model.named_parameters():
        torch.testing.assert_close(
            tensor, dict(two.model.named_parameters())[name], rtol=1e-4, atol=1e-6
        )
