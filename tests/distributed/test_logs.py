"""`lmforge logs` of runs on two real ranks, one of which fails."""

import re
import shutil
import time
from pathlib import Path

import pytest

from lmforge.cli import run as lmforge_here
from lmforge.core.records.runs import Run
from tests.conftest import Refusal
from tests.distributed.conftest import Recipe
from tests.support.preloaded import preloaded

FAULTY_RANK = Path(__file__).parent / "faults" / "faulty_rank.py"


def fails(recipe: Recipe, folder: Path, name: str, **fault: str) -> Path:
    """A run on two ranks whose second one has a fault at step 3."""
    words = recipe(folder, name)
    done = preloaded().run(
        ["pretrain", *words],
        folder,
        script=FAULTY_RANK,
        ranks=2,
        variables={"FAULTY_RANK": "1", **fault},
        timeout=120,
    )
    assert done.returncode != 0
    return folder / name


@pytest.fixture(scope="module")
def raised(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 raises, and stays; rank 0 waits for it until its collective times out."""
    return fails(
        recipe,
        tmp_path_factory.mktemp("raised"),
        "a",
        FAULT="raise",
        SLEEP="5",
        COLLECTIVE_SECONDS="3",
    )


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    capsys.readouterr()
    assert lmforge_here(["logs", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_error_of_the_rank_that_raised_is_printed_before_the_time_out_of_the_other(
    raised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, raised)
    assert re.fullmatch(
        rf"--- {re.escape(str(raised))}, attempt 1: 2 ranks on \S+, failed ---", lines[0]
    )
    first = next(line for line in lines if "ERROR" in line)
    assert re.fullmatch(r"FIRST ERROR: rank 1 on \S+ failed, \d\d:\d\d:\d\d\.\d{3}", first)
    assert lines[lines.index(first) + 1] == "  step 3, data: ValueError: the third batch is bad"
    assert any("faulty_rank.py" in line and "in batches" in line for line in lines)
    [then] = [line for line in lines if line.startswith("--- then ")]
    assert then.startswith("--- then rank 0 (lost another rank), ")
    merged = [line for line in lines if re.match(r"\d\d:\d\d:\d\d\.\d{3} rank [01] │ ", line)]
    assert 40 < len(merged) <= 50
    assert [line[:12] for line in merged] == sorted(line[:12] for line in merged)
    assert lines[-1].startswith("--- first error: rank 1, ")
    assert lines[-1].endswith(": step 3, data: ValueError: the third batch is bad (--errors) ---")
    assert not any("\x1b" in line for line in lines)  # no terminal


def test_only_the_errors_of_all_ranks_or_of_one(
    raised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, raised, "--errors")
    assert [line.split(":")[0] for line in lines if line.startswith(("FIRST ERROR", "ERROR"))] == [
        "FIRST ERROR",
        "ERROR",
    ]
    assert any("Timed out waiting" in line for line in lines)
    lines = printed(capsys, raised, "--errors", "--rank", 0)
    assert not any("third batch" in line for line in lines)
    assert any(line.startswith("ERROR: rank 0 ") for line in lines)
    lines = printed(capsys, raised, "--rank", 0, "--lines", "none")
    assert any("attempt 1, rank 0 of 2 on " in line for line in lines)
    assert not any(" 1 │ " in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", 2], "--rank: attempt 1 of {run} has no log of rank 2; it has 2 ranks"),
        (["--attempt", 7], "--attempt: {run} has no logs of attempt 7; there are 1"),
        (["--rank", -1], "--rank: expected "),
    ],
)
def test_what_is_not_there_is_refused(
    raised: Path, refused: Refusal, words: list[object], message: str
) -> None:
    assert refused("logs", raised, *words).startswith(message.format(run=raised))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, refused: Refusal) -> None:
    assert (
        refused("logs", tmp_path / "nothing")
        == f"{tmp_path / 'nothing'}: no such file or folder; give a run"
    )


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (
            "kill",
            (
                r"last heartbeat at step \d, \w+; nothing in its log: killed, .* \(process \d+ is"
                r" gone\)"
            ),
        ),
        ("abort", "Fatal Python error: Aborted"),
    ],
)
def test_a_rank_that_died_without_an_exception_is_the_first_and_not_the_one_that_lost_it(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, what: str
) -> None:
    lines = printed(capsys, fails(recipe, tmp_path, "a", FAULT=fault), "--errors")
    first = next(at for at, line in enumerate(lines) if line.startswith("FIRST ERROR: rank 1 on "))
    assert re.fullmatch(f"  {what}", lines[first + 1])
    later = [line for line in lines[first + 2 :] if "ERROR: " in line]
    assert len(later) == 1
    assert later[0].startswith("ERROR: rank 0 on ")
    if fault == "abort":
        assert any("in batches" in line for line in lines[first + 1 : first + 8])


def test_following_continues_over_a_failed_attempt_and_ends_with_the_run(
    raised: Path, recipe: Recipe, tmp_path: Path
) -> None:
    run = Run(shutil.copytree(raised, tmp_path / "a"))
    (tmp_path / "follow").mkdir()
    following = preloaded().start(["logs", run.path, "--follow"], tmp_path / "follow")
    while "waiting 60 s for another" not in following.out.read_text():
        assert following.poll() is None, following.errors.read_text()
        time.sleep(0.05)
    assert preloaded().run(["pretrain", *recipe(tmp_path, "a")], tmp_path, ranks=2).returncode == 0
    assert following.wait(30) == 0
    lines = following.out.read_text().splitlines()
    second = next(at for at, line in enumerate(lines) if "attempt 2: " in line)
    assert lines[-1] == "--- the run has ended: done ---"
    steps = [line for line in lines[second:] if " 0 │ step 6/6 " in line]
    assert len(steps) == 1
    for rank in (0, 1):
        assert (
            sum(f"{rank} │ attempt 2, rank {rank} of 2 on " in line for line in lines[second:]) == 1
        )
