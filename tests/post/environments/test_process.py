"""Environments in processes of their own: TRL's classes, the fuller protocol, and whatever goes
wrong in them.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmforge.core.errors import UserError
from lmforge.post.environments.environment import tool_message
from lmforge.post.environments.process import LEAST_SECONDS, Declaration, EnvironmentPool
from lmforge.post.rewards.functions import load_reward_functions

FILE = '''
import os, time, subprocess, sys, asyncio, random
from lmforge import Environment, Reply


class Counter:
    """As in TRL: methods are tools, reset begins an episode, and the environment owns the reward."""

    made = 0

    def __init__(self):
        Counter.made += 1
        self.serial = Counter.made

    def reset(self, **kwargs):
        self.count = kwargs["start"]
        return f" (from {self.count})"

    def increase(self, by: int) -> str:
        """Increase the counter.

        Args:
            by: How much to add

        Returns:
            The new count.
        """
        self.count += by
        return f"now {self.count}"

    async def later(self, by: int = 1) -> int:
        """Increase it later.

        Args:
            by: How much to add
        """
        await asyncio.sleep(0)
        self.count += by
        return self.count

    def forever(self) -> None:
        """Never ends."""
        while True:
            time.sleep(0.01)

    def uninterruptible(self) -> None:
        """Not even an alarm ends it."""
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass

    def die(self) -> None:
        """Ends the process."""
        os._exit(3)

    def leave(self) -> None:
        """Exits."""
        sys.exit(0)

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return float(self.count)


def count_is(environments, wanted, **kwargs):
    return [float(each.count == want) for each, want in zip(environments, wanted)]


def of_text(prompts, completions):
    return [0.5 for _ in completions]


def pids(environments, **kwargs):
    return [float(os.getpid()) for _ in environments]


def serials(environments, **kwargs):
    return [float(each.serial) for each in environments]


class Guess(Environment):
    reply_roles = ["user"]

    def reset(self, secret, **row):
        self.secret = secret
        return [{"role": "system", "content": "Guess."}, *row["prompt"]]

    def step(self, message):
        if "tool_calls" in message:
            return 5
        guess = int(message["content"])
        if guess == self.secret:
            return Reply(reward=1.0, done=True)
        return Reply([{"role": "user", "content": "more" if guess < self.secret else "less"}], reward=-0.25)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


class NoHints:
    def reset(self):
        pass

    def tool(self, x):
        """A tool."""


class NoReset:
    def tool(self) -> None:
        """A tool."""


class Raises:
    def __init__(self):
        raise RuntimeError("no connection")

    def reset(self):
        pass


class RolesAreText(Environment):
    reply_roles = "user"


class RolesAreWrong(Environment):
    reply_roles = ["assistant"]


class ToolsAreNames(Environment):
    tools = ["add"]


class ToolsAreBare(Environment):
    tools = [{"name": "add", "parameters": {}}]


class ToolsAreNotJson(Environment):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {1, 2}}}]


class ToolsAreTwice(Environment):
    tools = [add, add]


class ResetRaises:
    def reset(self):
        raise RuntimeError("no connection")


class Returns(Environment):
    def reset(self, first=None, **row):
        return row["prompt"] if first is None else first[0]

    def step(self, message):
        return Reply(reward=eval(message["content"]))


class Rewards:
    def reset(self, reward=None, **row):
        self.reward = reward

    def get_reward(self):
        return eval(self.reward)


class Closes(Environment):
    """Writes down what is opened and closed, and leaves a process in a session of its own."""

    def reset(self, log, name, **row):
        self.log, self.name = log, name
        self.write("opened")
        self.child = subprocess.Popen(["sleep", "1234.5"], start_new_session=True)
        self.write(self.child.pid)
        return row["prompt"]

    def step(self, message):
        if message["content"] == "exit":
            os._exit(1)
        return Reply([{"role": "user", "content": "on"}], reward=1 / float(message["content"]))

    def close(self):
        self.write("closed")
        if self.name == "forever":
            time.sleep(1000)

    def write(self, what):
        with open(self.log, "a") as file:
            print(what, self.name, file=file)


SEVERAL = {"count": Counter, "guess": Guess, "add": add}
NONE = {}
NAMELESS = {1: Counter}
BAD = {"count": Counter, "raises": Raises}
'''

EARLY = """

class Early(Environment):
    begins_early = True
    begun = {"reset": [], "step": [], "reward": []}

    def begin(self, call, given):
        self.number = given.get("number", getattr(self, "number", None))
        self.begun[call].append(self.number)

    def told(self, call):
        return [{"role": "user", "content": " ".join(map(str, [call, *self.begun[call]]))}]

    def reset(self, number, **row):
        if number > 3:
            raise RuntimeError("a bad row")
        return self.told("reset")

    def step(self, message):
        return Reply(self.told("step"))

    def get_reward(self):
        return len(self.begun["reward"])


class Hangs(Environment):
    begins_early, begun = True, []

    def begin(self, call, given):
        self.begun.append(given["number"])
        if self.begun == [0, 1]:
            time.sleep(1000)

    def reset(self, number, **row):
        if number == 0:
            time.sleep(1000)
        return [{"role": "user", "content": str(signal.getitimer(signal.ITIMER_REAL)[0])}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def counters(file: Path) -> Iterator[EnvironmentPool]:
    with EnvironmentPool(f"{file}:Counter", processes=2, timeout_seconds=1.0) as pool:
        yield pool


def rows(*starts: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": "Count"}], "start": start, "wanted": 7}
        for start in starts
    ]


def call(name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    called = {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [called]}


def contents(messages: Any) -> list[str]:
    return [message["content"] for message in messages]


REQUEST: dict[str, Any] = {
    "prompts": ["p"] * 3,
    "completions": ["c"] * 3,
    "columns": {"wanted": [7, 8, 7], "start": [1, 2, 3]},
}


def test_a_class_of_trls_is_an_environment(counters: EnvironmentPool) -> None:
    [declared] = counters.declarations.values()
    names = [tool["function"]["name"] for tool in declared.tools]
    assert names == ["die", "forever", "increase", "later", "leave", "uninterruptible"]
    assert declared.reply_roles == ["tool"]
    begun = counters.reset(rows(1, 2, 3))
    assert [contents(each.messages) for each in begun] == [
        ["Count (from 1)"],
        ["Count (from 2)"],
        ["Count (from 3)"],
    ]
    said = call("increase", by=4)
    replies = counters.step({0: said, 2: call("later", by=4)})
    assert replies[0].messages == [tool_message(said["tool_calls"][0], "now 5")]
    assert not replies[0].done
    assert contents(replies[2].messages) == ["7"]
    ended = counters.step({0: {"role": "assistant", "content": "5"}})
    assert ended[0].done
    assert counters.score(REQUEST, 5.0)[counters.spec].rewards == [5.0, 2.0, 7.0]
    # The instances go on with the next episodes.
    assert [contents(each.messages) for each in counters.reset(rows(9))] == [["Count (from 9)"]]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (call("increase"), "missing 1 required positional argument: 'by'"),
        (call("increase", by="x"), "unsupported operand"),
        (call("reset"), "Tool reset not found."),
        (call("_hidden"), "Tool _hidden not found."),
    ],
)
def test_a_call_that_fails_is_answered_with_its_error(
    counters: EnvironmentPool, said: Any, expected: str
) -> None:
    counters.reset(rows(1))
    reply = counters.step({0: said})[0]
    [message] = reply.messages
    assert reply.failed_calls == 1
    assert message["content"].startswith("{'error': ")
    assert expected in message["content"]


def test_functions_that_take_environments_are_called_where_they_are(
    file: Path, counters: EnvironmentPool
) -> None:
    specs = [f"{file}:{name}" for name in ("count_is", "of_text", "pids", "serials")]
    with load_reward_functions(specs, environment=counters) as rewards:
        counters.reset(rows(1, 2, 3))
        counters.step({0: call("increase", by=6), 1: call("increase", by=6)})
        scores = rewards(REQUEST["prompts"], REQUEST["completions"], REQUEST["columns"])
        assert scores.by_function[specs[0]] == [1.0, 1.0, 0.0]
        assert scores.by_function[specs[1]] == [0.5, 0.5, 0.5]
        assert scores.by_function[counters.spec] == [7.0, 8.0, 3.0]
        assert scores.rewards[2] == sum(
            scores.by_function[spec][2] for spec in (*specs, counters.spec)
        )  # type: ignore[misc]
        # Two processes, neither of them this one.
        assert len({os.getpid(), *scores.by_function[specs[2]]}) == 3
        counters.reset(rows(1, 2, 3))
        again = rewards(REQUEST["prompts"], REQUEST["completions"], REQUEST["columns"])
        assert again.by_function[specs[3]] == scores.by_function[specs[3]]


def test_a_function_that_takes_environments_needs_one(file: Path) -> None:
    with pytest.raises(
        UserError, match=r"count_is: takes environments; name one with rollout\.environment"
    ):
        load_reward_functions([f"{file}:count_is"])


@pytest.mark.parametrize(
    ("tool", "problem"), [("forever", "no answer in 1 seconds"), ("leave", "SystemExit: 0")]
)
def test_a_call_that_does_not_return_ends_its_episode_alone(
    counters: EnvironmentPool, tool: str, problem: str
) -> None:
    counters.reset(rows(1, 2, 3))
    replies = counters.step({0: call(tool), 2: call("increase", by=1)})
    assert problem in replies[0].error
    assert contents(replies[2].messages) == ["now 4"]
    assert counters.score(REQUEST, 5.0)[counters.spec].rewards == [None, 2.0, 4.0]
    assert counters.step({0: call("increase", by=1)})[0].error == replies[0].error


@pytest.mark.parametrize("tool", [pytest.param("uninterruptible", marks=pytest.mark.slow), "die"])
def test_a_process_that_is_lost_ends_its_episodes_and_is_started_again(
    counters: EnvironmentPool, tool: str
) -> None:
    counters.reset(rows(1, 2, 3))
    replies = counters.step({0: call(tool), 1: call("increase", by=5)})
    assert replies[0].error
    assert contents(replies[1].messages) == ["now 7"]
    assert counters.score(REQUEST, 5.0)[counters.spec].rewards == [None, 7.0, None]
    assert set(counters.failed_episodes) == {0, 2}
    assert [each.error for each in counters.reset(rows(1, 2, 3))] == ["", "", ""]


def test_the_fuller_protocol_says_messages_rewards_and_the_end(file: Path) -> None:
    with EnvironmentPool(f"{file}:Guess", timeout_seconds=5.0) as pool:
        assert pool.declarations == {"": Declaration([], ["user"], True)}
        begun = pool.reset(
            [
                {"prompt": [{"role": "user", "content": "Go"}], "secret": secret}
                for secret in (5, 7, 5)
            ]
        )
        assert contents(begun[1].messages) == ["Guess.", "Go"]
        replies = pool.step({at: {"role": "assistant", "content": "5"} for at in range(2)})
        assert replies[0].done
        assert contents(replies[1].messages) == ["more"]
        assert not replies[1].done
        pool.step({1: {"role": "assistant", "content": "7"}})
        assert pool.step({2: {"role": "assistant", "content": "x"}})[2].error.startswith(
            "ValueError: invalid literal"
        )
        assert pool.score(REQUEST, 5.0)[pool.spec].rewards == [1.0, 0.75, None]


def test_of_several_environments_the_column_environment_says_whose_an_episode_is(
    file: Path,
) -> None:
    with EnvironmentPool(f"{file}:SEVERAL", timeout_seconds=5.0) as pool:
        assert {
            name: (each.reply_roles, each.gives_rewards) for name, each in pool.declarations.items()
        } == {
            "count": (["tool"], True),
            "guess": (["user"], True),
            "add": (["tool"], False),
        }
        row = {"prompt": [{"role": "user", "content": "Go"}], "start": 3, "secret": 7}
        # As in TRL the column is not one of the episode's, and instances go on with episodes of
        # their own kind.
        for names in (["add", "count", "guess"], ["count", "guess", "add"]):
            begun = pool.reset([{**row, "environment": name} for name in names])
            assert [len(each.messages) for each in begun] == [
                1 + (name == "guess") for name in names
            ]
            said = {"add": call("add", a=2, b=3), "count": call("increase", by=2)}
            said |= {"guess": {"role": "assistant", "content": "7"}}
            replies = pool.step({at: said[name] for at, name in enumerate(names)})
            told = {name: contents(replies[at].messages) for at, name in enumerate(names)}
            assert told == {"add": ["5"], "count": ["now 5"], "guess": []}
            rewards = pool.score(REQUEST, 5.0)[pool.spec].rewards
            assert dict(zip(names, rewards, strict=True)) == {
                "add": None,
                "count": 5.0,
                "guess": 1.0,
            }


def test_a_function_is_a_tool_and_what_is_built_in_is_named(file: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "?"}]}
    asked = [
        (f"{file}:add", call("add", a=2, b=3), "5"),
        ("calculator", call("calculate", expression="2 * (3 + 4) ** 2 / 7"), "14"),
        (
            "calculator",
            call("calculate", expression="9 ** 9 ** 9"),
            "{'error': 'the value is too large'}",
        ),
        (
            "calculator",
            call("calculate", expression="__import__('os')"),
            "{'error': 'not an arithmetic expression'}",
        ),
        ("calculator", call("calculate", expression="1 / 0"), "{'error': 'division by zero'}"),
        ("python", call("run_python", code="print(6 * 7)"), "42"),
        (
            "python",
            call("run_python", code="print(1)\n1 / 0"),
            "1\nZeroDivisionError: division by zero",
        ),
    ]
    for spec in dict.fromkeys(spec for spec, *_ in asked):
        with EnvironmentPool(spec, timeout_seconds=30.0) as pool:
            pool.reset([row] * 2)
            assert not pool.gives_rewards
            for _, said, result in (each for each in asked if each[0] == spec):
                assert [
                    contents(each.messages) for each in pool.step({0: said, 1: said}).values()
                ] == [[result]] * 2
            if spec == "python":  # one sandbox serves all episodes of a process
                [worker] = pool._workers
                assert worker is not None
                pid = worker._process.pid
                assert len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) == 1


REFUSED = [
    ("NoHints", "parameter 'x' has no type hint, such as x: str"),
    ("NoReset", "has no method reset"),
    ("Raises", "RuntimeError: no connection"),
    (
        "RolesAreText",
        'RolesAreText.reply_roles: expected a list of "tool", "user" or both, got .user.',
    ),
    ("RolesAreWrong", "RolesAreWrong.reply_roles: expected a list of"),
    ("ToolsAreNames", "ToolsAreNames.tools: expected functions and schemas, got 'add'"),
    ("ToolsAreBare", "ToolsAreBare.tools: expected schemas "),
    ("ToolsAreNotJson", "ToolsAreNotJson.tools: the schema of add is not JSON: "),
    ("ToolsAreTwice", "ToolsAreTwice.tools: two tools have one name: add, add"),
    ("NONE", "expected a dict of names and classes or functions, got {}"),
    ("NAMELESS", "expected a dict of names and classes or functions, got {1: "),
    ("BAD", "raises: RuntimeError: no connection"),
    ("Nowhere", "no class or function 'Nowhere': there are Closes, Counter, Guess, "),
    ("", "expected FILE.py:CLASS"),
]


@pytest.mark.parametrize(("name", "problem"), REFUSED)
def test_what_is_no_environment_is_refused_in_one_line(file: Path, name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        EnvironmentPool(f"{file}:{name}").declarations  # noqa: B018
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"environment {file}:{name}: ")


def test_an_unknown_name_and_a_missing_file_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"rollout\.environment: expected calculator or python, got .calculater.; did you",
    ):
        EnvironmentPool("calculater")
    with pytest.raises(UserError, match=r"environment .*nowhere\.py: no such file"):
        EnvironmentPool("nowhere.py:Class").declarations  # noqa: B018


def test_an_environment_whose_reset_fails_says_so(file: Path) -> None:
    with closing(EnvironmentPool(f"{file}:ResetRaises")) as pool:
        first, second = pool.reset([{"prompt": [{"role": "user", "content": "?"}]}] * 2)
        assert first.error == second.error
        assert first.error.startswith("RuntimeError: no connection")
        assert pool.failed_episodes == {0: first.error, 1: first.error}


WRONG_REWARDS = [
    ("float('nan')", "nan, not a finite number"),
    ("float('inf')", "inf, not a finite number"),
    ("'good'", "'good', not a finite number"),
    ("[1.0]", "[1.0], not a finite number"),
]


@pytest.mark.parametrize(("reward", "problem"), WRONG_REWARDS)
def test_a_reward_that_is_no_finite_number_fails_its_episode_alone(
    file: Path, reward: str, problem: str
) -> None:
    said = [{"role": "assistant", "content": each} for each in (reward, "0.5")]
    row = {"prompt": [{"role": "user", "content": "?"}]}
    for name, method in (("Returns", "step"), ("Rewards", "get_reward")):
        with EnvironmentPool(f"{file}:{name}") as pool:
            pool.reset([{**row, "reward": each["content"]} for each in said])
            pool.step(dict(enumerate(said)))
            assert pool.score(REQUEST, 5.0)[pool.spec].rewards == [None, 0.5]
            assert pool.failed_episodes == {0: f"{method} returned the reward {problem}"}


def test_a_reset_that_returns_no_messages_says_so(file: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "first": first}
        for first in ([None], ["Go"], [[]], [["Go"]])
    ]
    with EnvironmentPool(f"{file}:Returns") as pool:
        assert [each.error for each in pool.reset(rows)] == [
            "reset returned NoneType, not a list of messages",
            "reset returned str, not a list of messages",
            "reset returned no messages",
            "reset returned 'Go', not a message with role and content",
        ]


def closing_rows(log: Path, *names: str) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": "?"}], "log": str(log), "name": name}
        for name in names
    ]


@pytest.mark.slow
def test_every_episode_that_was_begun_is_closed_once_whatever_became_of_it(
    file: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with EnvironmentPool(f"{file}:Closes", timeout_seconds=1.0) as pool:
        pool.reset(closing_rows(log, "scored", "failed", "forever"))
        replies = pool.step(
            {at: {"role": "assistant", "content": str(1 - at % 2)} for at in range(3)}
        )
        assert "ZeroDivisionError" in replies[1].error
        assert "closed failed" in log.read_text()
        assert pool.score(REQUEST, 5.0)[pool.spec].rewards == [1.0, None, 1.0]
        assert pool.failed_episodes.keys() == {1}
        pool.reset(closing_rows(log, "left"))
        pool.reset(closing_rows(log, "last"))
        assert "closed left" in log.read_text()
        assert "closed last" not in log.read_text()
    lines = log.read_text().splitlines()
    for name in ("scored", "failed", "forever", "left", "last"):
        assert [line.split()[0] for line in lines if line.endswith(f"ed {name}")] == [
            "opened",
            "closed",
        ]


@pytest.mark.parametrize("ends_itself", [False, True])
def test_what_an_environment_started_in_a_session_of_its_own_ends_with_its_process(
    file: Path, tmp_path: Path, ends_itself: bool
) -> None:
    with EnvironmentPool(f"{file}:Closes") as pool:
        pool.reset(closing_rows(tmp_path / "log", "one"))
        child = int((tmp_path / "log").read_text().splitlines()[1].split()[0])
        assert psutil.pid_exists(child)
        if ends_itself:
            assert (
                "its process died"
                in pool.step({0: {"role": "assistant", "content": "exit"}})[0].error
            )
    assert not psutil.pid_exists(child)


def test_calls_of_an_environment_that_begins_early_have_all_begun_before_one_waits(
    file: Path,
) -> None:
    with file.open("a") as out:
        out.write(EARLY)
    with EnvironmentPool(f"{file}:Early", processes=2) as pool:
        begun = pool.reset([{"prompt": [], "number": number} for number in range(5)])
        assert "a bad row" in begun[4].error
        replies = pool.step({number: {"role": "assistant", "content": "x"} for number in range(4)})
        results = pool.score({"prompts": [""] * 5, "completions": [""] * 5, "columns": {}}, 5.0)
    # Two processes have the even and the odd episodes.
    assert [reply.messages[0]["content"] for reply in begun[:4]] == ["reset 0 2 4", "reset 1 3"] * 2
    assert [replies[number].messages[0]["content"] for number in range(4)] == [
        "step 0 2",
        "step 1 3",
    ] * 2
    assert results[pool.spec].rewards == [2.0, 2.0, 2.0, 2.0, None]


@pytest.mark.slow
def test_calls_that_begin_together_have_one_time_limit_and_a_begin_that_hangs_costs_no_episode(
    file: Path,
) -> None:
    with file.open("a") as out:
        out.write(f"import signal{EARLY}")
    with EnvironmentPool(f"{file}:Hangs", timeout_seconds=2.0) as pool:
        first, *others = pool.reset([{"prompt": [], "number": number} for number in range(3)])
    assert first.error == "no answer in 2 seconds"
    assert [float(each.messages[0]["content"]) <= LEAST_SECONDS for each in others] == [True, True]


@pytest.mark.parametrize("begins_early", [False, True])
def test_a_process_that_does_not_start_again_is_said_to_all_that_wait_for_it(
    file: Path, begins_early: bool
) -> None:
    with file.open("a") as out:
        out.write(
            f"{EARLY}\n\nEarly.begins_early = {begins_early}\nEarly.step = lambda self, message:"
            " os._exit(1)\n"
        )
    with EnvironmentPool(f"{file}:Early") as pool:
        pool.reset([{"prompt": [], "number": number} for number in range(2)])
        replies = pool.step({number: {"role": "assistant", "content": "x"} for number in range(2)})
        assert [reply.error for reply in replies.values()] == ["its process died"] * 2
        file.write_text("raise RuntimeError('no licence left')")
        with pytest.raises(UserError, match=r"cannot be imported: RuntimeError: no licence left"):
            pool.reset([{"prompt": [], "number": number} for number in range(2)])
