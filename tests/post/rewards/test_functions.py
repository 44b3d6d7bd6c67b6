"""Reward functions: each failure gives a clear error or None, and nothing hangs."""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmforge.core.errors import UserError
from lmforge.post.rewards.builtin import _extract_code as extract_code
from lmforge.post.rewards.functions import load_reward_functions
from tests.support.grids import parametrize

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
from lmforge.core.errors import UserError

def timed(prompts, completions, reward_timeout_seconds):
    return [reward_timeout_seconds] * len(prompts)

def length(prompts, completions, **columns):
    return [len(completion) for completion in completions]

def right(prompts, completions, answer):
    return [float(completion == a) if a else None for completion, a in zip(completions, answer)]

def of_numpy(prompts, completions):
    import numpy
    return numpy.array([len(prompt) for prompt in prompts], dtype=numpy.float32)

def process(**everything):
    print("printed by a reward")
    return [os.getpid()] * len(everything["prompts"])

here = set()

async def meet(me, other):
    here.add(me)
    while other not in here:
        await asyncio.sleep(0.01)

async def later(prompts, completions):
    await meet("one", "other")
    return [1.0] * len(prompts)

async def later_too(prompts, completions):
    await meet("other", "one")
    return [2.0] * len(prompts)

async def never_async(prompts, completions):
    await asyncio.sleep(1000)

def raises(prompts, completions):
    return [1 / 0]

def leaves(prompts, completions):
    sys.exit(0)

def dies(prompts, completions):
    os._exit(3)

def never(prompts, completions):
    os.system("sleep 1234.5")

def starts(prompts, completions):
    return [float(subprocess.Popen(["sleep", "1234.5"], start_new_session=True).pid)]

def spins(prompts, completions):
    while True:
        pass

def short(prompts, completions):
    return [1.0]

def one_number(prompts, completions):
    return 1.0

def nothing(prompts, completions):
    pass

def words(prompts, completions):
    return ["good"] * len(prompts)

def infinite(prompts, completions):
    return [float("nan")] * len(prompts)

def refuses(prompts, completions):
    raise UserError("this machine will not do")

def as_in_trl(prompts, completions):
    return [len(completion[0]["content"]) for completion in completions]

async def as_in_trl_async(prompts, completions):
    return as_in_trl(prompts, completions)

def adds_text(prompts, completions):
    return [1 + completion for completion in completions]

def strict(prompts, completions, self, seconds):
    return [float(mine == its) for mine, its in zip(self, seconds)]

def other_names(inputs, outputs):
    return []

NUMBER = 3
"""


@pytest.fixture
def named(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


PROMPTS, COMPLETIONS = ["1+1=", "2+2=", "?"], ["2", "5", "no"]


def test_modules_in_the_working_directory_do_not_shadow_ours(
    named: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "lmforge").mkdir(parents=True)
    for name in ("lmforge/__init__.py", "json.py", "queue.py"):
        (tmp_path / "work" / name).write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.chdir(tmp_path / "work")
    with load_reward_functions([named("length")]) as rewards:
        assert rewards(PROMPTS, COMPLETIONS, {}).rewards == [1.0, 1.0, 2.0]


def test_rewards_are_weighted_and_summed_without_none(named: Callable[[str], str]) -> None:
    length, right, of_numpy = map(named, ("length", "right", "of_numpy"))
    with load_reward_functions([length, right, of_numpy], weights=[0.5, 10.0, 1.0]) as rewards:
        scores = rewards(PROMPTS, COMPLETIONS, {"answer": ["2", "4", ""], "level": [1, 2, 3]})
    assert scores.by_function == {
        length: [1.0, 1.0, 2.0],
        right: [1.0, 0.0, None],
        of_numpy: [4.0, 4.0, 1.0],
    }
    assert scores.rewards == [14.5, 4.5, 2.0]
    assert scores.errors == {}


def test_a_completion_that_no_function_scores_has_no_reward(named: Callable[[str], str]) -> None:
    with load_reward_functions([named("right")]) as rewards:
        assert rewards(PROMPTS, COMPLETIONS, {"answer": ["2", "4", ""]}).rewards == [1.0, 0.0, None]


def test_what_a_function_started_in_a_session_of_its_own_ends_with_its_process(
    named: Callable[[str], str],
) -> None:
    with load_reward_functions([named("starts")]) as rewards:
        [child] = rewards(["a"], ["b"], {}).rewards
        assert psutil.pid_exists(int(child or 0))
    assert not psutil.pid_exists(int(child or 0))


def test_async_functions_run_at_the_same_time(named: Callable[[str], str]) -> None:
    """Each waits until the other is called: one after the other, the first would wait forever."""
    with load_reward_functions([named("later"), named("later_too")]) as rewards:
        assert rewards(["a"], ["b"], {}).rewards == [3.0]


def test_a_file_is_imported_once_and_its_process_is_not_ours(
    named: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    with load_reward_functions([named("process")]) as rewards:
        [first], [second] = rewards(["a"], ["b"], {}).rewards, rewards(["a"], ["b"], {}).rewards
        assert first == second != os.getpid()
        assert psutil.pid_exists(int(first or 0))
    assert not psutil.pid_exists(int(first or 0))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "printed by a reward\n" * 2)


@parametrize(
    ("function", "problem"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("leaves", "SystemExit: 0"),
        ("dies", "its process died"),
        ("never", "no answer in 0.5 seconds"),
        ("spins", "no answer in 0.5 seconds"),
        ("never_async", "no answer in 0.5 seconds"),
    ],
    fast=(0, 1, 2, 3, 5),
)
def test_a_failure_gives_none_and_its_error_and_leaves_the_other_function_alone(
    named: Callable[[str], str], function: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.post.rewards.functions.GRACE_SECONDS", 0.5)
    others = {process.pid for process in psutil.Process().children(recursive=True)}
    bad, good = named(function), named("length")
    with load_reward_functions([bad, good], timeout_seconds=0.5) as rewards:
        began = {process.pid for process in psutil.Process().children(recursive=True)} - others
        for _ in range(2):
            scores = rewards(PROMPTS, COMPLETIONS, {})
            # On a busy machine the good one may miss so short a time as well, but the bad one
            # always does.
            assert scores.by_function[bad] == [None, None, None]
            assert problem in scores.errors[bad]
            assert scores.by_function[good] in ([1.0, 1.0, 2.0], [None, None, None])
    assert began
    assert not {process.pid for process in psutil.Process().children(recursive=True)} - others
    assert not [
        p
        for p in psutil.process_iter(["cmdline", "ppid"])
        if p.info["cmdline"] == ["sleep", "1234.5"]
    ]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("short", "returned 1 rewards for 3 completions"),
        ("one_number", "returned float, not a list"),
        ("nothing", "returned NoneType, not a list"),
        ("words", "returned \"'good'\" for completion 0, not a finite number or None"),
        ("infinite", "returned 'nan' for completion 0, not a finite number or None"),
        ("refuses", "this machine will not do"),
        ("right", "needs the column 'answer', which the data does not have"),
    ],
)
def test_a_function_that_always_returns_something_invalid_ends_the_run_with_its_name(
    named: Callable[[str], str], function: str, problem: str
) -> None:
    with load_reward_functions([named(function)]) as rewards, pytest.raises(UserError) as caught:
        rewards(PROMPTS, COMPLETIONS, {})
    assert named(function) in str(caught.value)
    assert problem in str(caught.value)


def test_a_function_that_cannot_be_loaded_is_named(
    named: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    cases: dict[str, Any] = {
        f"{tmp_path / 'none.py'}:f": "no such file",
        f"{tmp_path / 'broken.py'}:f": "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        named(
            "absent"
        ): "no function 'absent': there are adds_text, as_in_trl, as_in_trl_async, dies",
        named("NUMBER"): "no function 'NUMBER'",
        named(
            "other_names"
        ): "takes (inputs, outputs), but is called by name with prompts, completions",
        "python_cod": 'expected python_code, got "python_cod"; did you mean python_code?',
        "mine.py:": "expected FILE.py:FUNCTION",
        "mine:length": "reward mine:length: expected FILE.py:FUNCTION",
        "mine.py": "reward mine.py: expected FILE.py:FUNCTION",
    }
    for spec, problem in cases.items():
        with pytest.raises(UserError) as caught:
            load_reward_functions([spec])
        assert problem in str(caught.value)
    with pytest.raises(UserError, match="2 functions but 1 weights"):
        load_reward_functions([named("length"), named("later")], weights=[1.0])


NOT_PLAIN = {
    "when": datetime.datetime(2024, 5, 1),
    "bytes": b"b",
    "price": Decimal("1.5"),
    "deep": [{"date": datetime.date.min}],
}


def test_a_column_that_is_not_plain_data_is_refused(named: Callable[[str], str]) -> None:
    with (
        load_reward_functions([named("length")]) as rewards,
        pytest.raises(UserError, match="not plain data"),
    ):
        rewards(["a"], ["b"], {"thing": [object()]})


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_column_that_is_not_plain_data_is_named_before_a_function_gets_it(
    name: str, named: Callable[[str], str]
) -> None:
    plain = {
        "answer": "2",
        "level": 1,
        "share": 0.5,
        "right": True,
        "none": None,
        "tags": ["a"],
        "about": {"b": [1]},
    }
    with load_reward_functions([named("right"), named("length")]) as rewards:
        rewards.check_serializable(plain)
        with pytest.raises(
            UserError,
            match=rf"column '{name}' is not plain data .*, and reward .*mine\.py:length takes it",
        ):
            rewards.check_serializable({**plain, name: NOT_PLAIN[name]})
    with load_reward_functions([named("right")]) as rewards:
        rewards.check_serializable({**plain, name: NOT_PLAIN[name]})
        with pytest.raises(
            UserError,
            match=r"column 'answer' is not plain data .*, and reward .*mine\.py:right takes it",
        ):
            rewards.check_serializable({**plain, "answer": NOT_PLAIN[name]})


def test_a_column_that_no_function_takes_may_hold_anything(named: Callable[[str], str]) -> None:
    columns = {name: [value] * 3 for name, value in NOT_PLAIN.items()}
    with load_reward_functions([named("right"), named("of_numpy")]) as rewards:
        scores = rewards(PROMPTS, COMPLETIONS, {"answer": ["2", "4", ""], **columns})
    assert scores.rewards == [5.0, 4.0, 1.0]


def test_python_code_rewards_each_stage_a_program_reaches() -> None:
    fenced = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles."
    completions = [
        fenced,
        "def double(x):\n    return x",
        "def double(x):\n    return y\ndouble(1)",
        "return 1",
        "def (",
        "  ",
    ]
    checks = [["assert double(2) == 4", "assert double(0) == 0"]] * len(completions)
    with load_reward_functions(["python_code"]) as rewards:
        assert rewards([""] * 6, completions, {"checks": checks}).rewards == pytest.approx(
            [1.0, 0.7, 0.2, 0.1, 0.0, 0.0]
        )
        assert rewards([""] * 2, completions[1:3], {}).rewards == pytest.approx([1.0, 0.5])


@pytest.mark.slow
def test_programs_that_never_end_take_no_time_from_the_others_of_their_batch() -> None:
    # With the full time for each, they would exceed the time-out on any number of cores.
    endless = ["while True:\n    pass"] * (8 * len(os.sched_getaffinity(0)))
    completions = ["x = 1", *endless, "x = 1", "x = 2"]
    with load_reward_functions(["python_code"], timeout_seconds=6.0) as rewards:
        scores = rewards(
            [""] * len(completions), completions, {"checks": [["assert x == 1"]] * len(completions)}
        )
    assert scores.errors == {}
    first, *middle, last, wrong = scores.rewards
    assert (first, last, wrong) == pytest.approx((1.0, 1.0, 0.4))
    assert set(middle) == {0.2}


def test_a_function_with_that_parameter_gets_the_time_out(named: Callable[[str], str]) -> None:
    with load_reward_functions([named("timed")], timeout_seconds=7.5) as rewards:
        assert rewards(["a"], ["b"], {}).rewards == [7.5]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```Python3\nx = 1\n```\nand\n```\ny = 2\n```  \nso", "x = 1\n\ny = 2\n"),
        ("```json\n{}\n```\nWell:\n```py\nx = 1\n```\nas it is.", "x = 1\n"),
        ("```sh\nls\n```\nThat is all.\n```python\nx = 1\n", "x = 1\n"),
        ("1. So:\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass\n"),
        ('```python\nx = """\n```js\n"""\n```', 'x = """\n```js\n"""\n'),
        ("x = 1", "x = 1"),
    ],
)
def test_code_is_the_blocks_fenced_as_python_and_nothing_else(completion: str, code: str) -> None:
    assert extract_code(completion) == code


def test_checks_may_be_missing_and_must_otherwise_be_a_list() -> None:
    with load_reward_functions(["python_code"]) as rewards:
        assert rewards(
            [""] * 2, ["x = 1"] * 2, {"checks": [None, ["assert x == 1"]]}
        ).rewards == pytest.approx([1.0, 1.0])
        for bad in ("assert x == 1", [1], {"a": 1}, 3):
            with pytest.raises(UserError, match="checks: expected a list of statements"):
                rewards([""], ["x = 1"], {"checks": [bad]})


def test_a_function_for_messages_is_told_that_completions_are_text(
    named: Callable[[str], str],
) -> None:
    messages = [[{"role": "assistant", "content": "2"}]]
    specs = [named("as_in_trl"), named("as_in_trl_async"), named("adds_text")]
    with load_reward_functions(specs) as rewards:
        errors = rewards(["a"], ["b"], {}).errors
        assert rewards(["a"], messages, {}).errors.keys() == {specs[2]}
    hint = (
        "; completions are text here, where TRL's are lists of messages: take completion instead of"
        " completion[0]['content']"
    )
    assert [errors[spec].startswith("TypeError: ") for spec in specs] == [True, True, True]
    assert [errors[spec].endswith(hint) for spec in specs] == [True, True, False]


def test_a_column_may_have_any_name_except_reserved_ones(named: Callable[[str], str]) -> None:
    with load_reward_functions([named("strict")]) as rewards:
        columns = {"self": [1, 2], "seconds": [1, 3], "name": [0, 0], "spec": [0, 0]}
        assert rewards(["a", "b"], ["c", "d"], columns).rewards == [1.0, 0.0]
        for name in ("prompts", "completions", "reward_timeout_seconds"):
            with pytest.raises(
                UserError,
                match=f"column '{name}': reward functions get the run's prompts and completions",
            ):
                rewards(["a", "b"], ["c", "d"], {**columns, name: [1, 2]})


@pytest.mark.parametrize("refused", [True, False])
def test_what_ends_a_process_that_serves_functions_is_not_interrupted(refused: bool) -> None:
    """Neither after a refusal nor between requests."""
    program = f"""
import atexit, sys, time
from lmforge.core.errors import UserError
from lmforge.post.rewards.function_server import serve_requests

def ends():
    time.sleep(0.5)
    print("ended", file=sys.stderr, flush=True)

def opened(name, request):
    if {refused}:
        atexit.register(ends)
        raise UserError("no")
    return {{}}, lambda request: request

serve_requests(opened, ends, closing_seconds=5.0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, "name"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("{}\n")
        process.stdin.flush()
        assert process.stdout.readline() == ('{"user_error": "no"}\n' if refused else "{}\n")
        _, errors = process.communicate(timeout=60)
    assert errors == "ended\n"
