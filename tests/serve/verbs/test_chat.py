"""`lmforge chat`: over pipes, and in a terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import pytest
import torch

from lmforge.cli import run as command
from lmforge.core.errors import UserError
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.options.models import ChatOptions
from lmforge.serve.verbs.chat import MAX_ANSWERS, ChatSession, ExitChat
from tests.conftest import Command

GREEDY = ("--temperature", 0)


class Chat(Protocol):
    def __call__(self, *words: object, stdin: str) -> tuple[int, str, str]: ...


@pytest.fixture
def chat(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Chat:
    """`chat(*words, stdin=…)`: status, standard output and standard error of `lmforge chat` in this
    process.
    """

    def run(*words: object, stdin: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        status = command(["chat", *map(str, words), "--device", "cpu", "--dtype", "fp32"])
        output = capfd.readouterr()
        return status, output.out, output.err

    return run


def test_each_line_is_answered(lmforge: Command, models: Path) -> None:
    done = lmforge("chat", models / "hello", *GREEDY, stdin="Hi\n\n  \nHow are you?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hey <s>\nHey <s>\n", "")


def test_an_answer_is_cut_at_max_tokens_and_repeats_with_its_seed(chat: Chat, models: Path) -> None:
    def answers(seed: int) -> str:
        return chat(models / "noise", "--max_tokens", 9, "--seed", seed, stdin="Hi\nHi\n")[1]

    first = answers(3)
    assert first.count("\n") >= 2
    assert answers(3) == first
    assert answers(4) != first


@pytest.fixture(scope="module")
def hello(models: Path) -> LoadedModel:
    return load_model(models / "hello", torch.device("cpu"), torch.float32)


def test_commands_begin_a_new_conversation_with_the_same_system_prompt_and_leave(
    hello: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ChatOptions(model=hello.path, max_length=60, temperature=0, system="Be brief")
    session = ChatSession(hello, options, to_terminal=False)
    session.handle_line("one")
    session.handle_line("/reset")
    session.handle_line("three")
    session.handle_line("/help")
    assert session.turns == [
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "Hey <s>"},
    ]
    assert session.messages == [{"role": "system", "content": "Be brief"}, *session.turns]
    listed = capsys.readouterr().err
    assert all(word in listed for word in ("/help", "/reset", "/exit"))
    with pytest.raises(ExitChat):
        session.handle_line("/exit")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/dance", "/dance: no such command; /help lists them"),
        ("x" * 80, "in the prompt, which leaves no room for an answer; use /reset"),
    ],
)
def test_an_error_is_one_line_and_leaves_the_conversation_as_it_was(
    hello: LoadedModel, line: str, complaint: str
) -> None:
    session = ChatSession(
        hello, ChatOptions(model=hello.path, max_length=60, temperature=0), to_terminal=False
    )
    session.handle_line("Hi")
    for _ in range(2):
        with pytest.raises(UserError) as error:
            session.handle_line(line)
        assert complaint in str(error.value)
        assert "\n" not in str(error.value)
    assert session.turns == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hey <s>"},
    ]


def test_an_answer_that_was_stopped_stays_in_the_conversation(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = load_model(models / "endless", torch.device("cpu"), torch.float32)
    session = ChatSession(
        endless,
        ChatOptions(model=endless.path, max_length=20_000, temperature=0),
        to_terminal=False,
    )
    monkeypatch.setattr(
        session, "_print", lambda text: text.endswith("b") and signal.raise_signal(signal.SIGINT)
    )
    session.handle_line("Hi")
    said, answer = session.turns
    assert said == {"role": "user", "content": "Hi"}
    assert answer["content"].startswith("ab")
    assert len(answer["content"]) < 100


def test_an_error_ends_a_piped_conversation(chat: Chat, models: Path) -> None:
    status, output, errors = chat(models / "hello", *GREEDY, stdin="Hi\n/dance\nHi\n")
    assert (status, output) == (2, "Hey <s>\n")
    assert errors == "lmforge: /dance: no such command; /help lists them\n"


def test_tools_are_called_and_what_they_return_is_shown(chat: Chat, caller: Path) -> None:
    status, output, errors = chat(
        caller / "model", *GREEDY, "--tools", caller / "own.py:look", stdin="Hi\n"
    )
    # This model calls its tool for ever.
    assert output == "[go()]\ngo: {'error': 'Tool go not found.'}\n" * MAX_ANSWERS
    assert status == 2
    assert errors.strip().endswith(f"still calls tools after {MAX_ANSWERS} answers")


def test_an_environment_with_turns_of_its_own_is_no_tool(chat: Chat, caller: Path) -> None:
    status, _, errors = chat(caller / "model", "--tools", caller / "own.py:Talk", stdin="Hi\n")
    assert status == 2
    assert "an environment with turns of its own; name a function, or a class of tools" in errors


def test_a_model_without_a_chat_template_is_refused_with_what_it_can_do(
    chat: Chat, models: Path
) -> None:
    status, _, errors = chat(models / "plain", stdin="Hi\n")
    assert status == 2
    assert f"lmforge generate {models}/plain" in errors
    assert errors.count("\n") == 1


class Terminal:
    """`lmforge chat` in a terminal: types lines and reads what appears."""

    def __init__(self, *words: object) -> None:
        self._end, theirs = pty.openpty()
        line = [sys.executable, "-m", "lmforge", "chat", *map(str, words)]
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> None:
        """Read on until `text` appears after what was waited for before."""
        while text not in self._seen:
            ready, _, _ = select.select([self._end], [], [], 60)
            assert ready, f"{text!r} did not come: {self._seen[-500:]!r}"
            self._seen += os.read(self._end, 65536).decode(errors="replace")
        self._seen = self._seen.partition(text)[2]

    def interrupt_at_prompt(self) -> None:
        """Press Ctrl-C once the process waits for a line: Python handles a signal that comes just
        before late.
        """
        self.wait_for("> ")
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        self.process.send_signal(signal.SIGINT)


def test_ctrl_c_stops_the_answer_and_not_the_conversation(models: Path) -> None:
    terminal = Terminal(models / "endless", *GREEDY, "--max_length", 20_000)
    terminal.wait_for("> ")
    terminal.type("Hi\n")
    terminal.wait_for("ababab")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped)")
    terminal.wait_for("> ")
    terminal.type("/dance\n")
    terminal.wait_for("no such command")
    terminal.interrupt_at_prompt()
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=60) == 0
