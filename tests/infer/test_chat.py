"""`lmforge chat`: over pipes, and in a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmforge.config.verbs import ChatOptions
from lmforge.data.chat.templates import ChatTemplate
from lmforge.errors import UserError
from lmforge.generate.model_loading import load_model
from lmforge.verbs.chat import ChatSession
from tests.conftest import Command

GREEDY = ("--temperature", 0)


def test_each_line_is_answered(lmforge: Command, models: Path) -> None:
    done = lmforge("chat", models / "hello", *GREEDY, stdin="Hi\n\n  \nHow are you?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hey <s>\nHey <s>\n", "")


def test_an_answer_is_cut_at_max_tokens_and_repeats_with_its_seed(lmforge: Command, models: Path) -> None:
    asked = ("chat", models / "noise", "--max_tokens", 9)
    first = lmforge(*asked, "--seed", 3, stdin="Hi\n/retry\n").stdout
    assert first.count("\n") >= 2
    assert lmforge(*asked, "--seed", 3, stdin="Hi\n/retry\n").stdout == first
    assert lmforge(*asked, "--seed", 4, stdin="Hi\n/retry\n").stdout != first


def test_commands_change_the_conversation(lmforge: Command, models: Path, tmp_path: Path) -> None:
    lines = [
        "/system Be brief",
        "one",
        "two",
        "/undo",
        "/retry",
        f"/save {tmp_path}/a.jsonl",
        "/reset",
        "/temperature 0.5",
        "/system",
        "three",
        f"/save {tmp_path}/b.jsonl",
        "/exit",
        "never said",
    ]
    done = lmforge("chat", models / "hello", *GREEDY, stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Hey <s>\n" * 4
    answer = {"role": "assistant", "content": "Hey <s>"}
    saved = [json.loads((tmp_path / f"{name}.jsonl").read_text()) for name in "ab"]
    assert saved[0] == {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "one"}, answer],
    }
    assert saved[1] == {"messages": [{"role": "user", "content": "three"}, answer]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/dance", "/dance: no such command; /help lists them"),
        ("/temperature hot", "/temperature hot: expected a number of at least 0"),
        ("/temperature", "/temperature: expected a number of at least 0"),
        ("/undo", "nothing has been said yet"),
        ("/save", "/save: needs the name of a file"),
        ("/save /", "/: "),
        ("x" * 80, "tokens, and there is room for 60, an answer included; /undo or /reset makes room"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(models: Path, line: str, complaint: str) -> None:
    opened = load_model(models / "hello", torch.device("cpu"), torch.float32)
    options = ChatOptions(model=models / "hello", max_length=60)
    talk = ChatSession(opened, ChatTemplate.from_tokenizer(opened.tokenizer), options, to_terminal=False)
    for _ in range(2):  # it leaves the conversation as it was
        with pytest.raises(UserError) as told:
            talk.handle_line(line)
        assert complaint in str(told.value)
        assert "\n" not in str(told.value)


def test_a_retry_that_fails_leaves_the_answer_there_was(models: Path, tmp_path: Path) -> None:
    opened = load_model(models / "hello", torch.device("cpu"), torch.float32)
    options = ChatOptions(model=models / "hello", max_length=60, temperature=0)
    talk = ChatSession(opened, ChatTemplate.from_tokenizer(opened.tokenizer), options, to_terminal=False)
    talk.handle_line("Hi")
    talk.handle_line(f"/system {'x' * 80}")
    with pytest.raises(UserError, match="there is room for 60"):
        talk.handle_line("/retry")
    talk.handle_line("/system")
    talk.handle_line(f"/save {tmp_path}/said.jsonl")
    assert json.loads((tmp_path / "said.jsonl").read_text())["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hey <s>"},
    ]


def test_what_cannot_be_done_ends_a_piped_conversation(lmforge: Command, models: Path) -> None:
    done = lmforge("chat", models / "hello", *GREEDY, stdin="Hi\n/dance\nHi\n")
    assert (done.returncode, done.stdout) == (2, "Hey <s>\n")
    assert done.stderr == "lmforge: /dance: no such command; /help lists them\n"


def test_a_model_that_cannot_chat_is_told_with_what_it_can(lmforge: Command, models: Path) -> None:
    done = lmforge("chat", models / "plain", stdin="Hi\n")
    assert done.returncode == 2
    assert f"lmforge generate {models}/plain" in done.stderr
    assert done.stderr.count("\n") == 1


class Terminal:
    """`lmforge chat` in a terminal, as someone who types sees it."""

    def __init__(self, *words: object) -> None:
        self._end, theirs = pty.openpty()
        line = [sys.executable, "-m", "lmforge", "chat", *map(str, words)]
        self.process = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
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

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C until `text` appears: Python hears it late where it comes just before a line is waited for."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            while select.select([self._end], [], [], 1)[0]:
                self._seen += os.read(self._end, 65536).decode(errors="replace")
                if text in self._seen:
                    return
        pytest.fail(f"{text!r} did not come: {self._seen[-500:]!r}")


def test_ctrl_c_stops_the_answer_and_not_the_conversation(models: Path, tmp_path: Path) -> None:
    terminal = Terminal(models / "endless", *GREEDY, "--max_length", 20_000)
    terminal.wait_for("> ")
    terminal.type("Hi\n")
    terminal.wait_for("ababab")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped)")
    terminal.wait_for("> ")
    terminal.type("/dance\n")
    terminal.wait_for("no such command")
    terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path}/talk.jsonl\n")
    terminal.wait_for("> ")
    terminal.interrupt_until("Ctrl-D leaves")
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(timeout=60) == 0
    [said, answer] = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert said["content"] == "Hi"
    assert set(answer["content"]) == {"a", "b"}
