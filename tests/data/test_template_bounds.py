"""A hostile chat template costs bounded time and memory, in a process of its own, and is refused in one line."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmforge.data.chat import jinja_sandbox
from lmforge.data.chat.jinja_sandbox import Conversation, ForeignTemplate, JinjaTemplate
from lmforge.data.chat.templates import ChatTemplate
from lmforge.data.tokenizer import train_tokenizer
from lmforge.errors import UserError
from tests.conftest import Refusal

SHORT = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
LONG = SHORT * 3
DOUBLING = "{% set ns = namespace(a=@) %}{% for i in range(99) %}{% set ns.a = # %}{% endfor %}{{ ns.a }}"
LISTS = DOUBLING.replace("@", "[1]").replace("#", "[ns.a, ns.a]")
CALLS = "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(99) }}"
TIME, MEMORY, ANY = "needs more than 1 seconds for a conversation", "needs too much memory", ": "

# Each would take all memory, or years.
HOSTILE = {
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}": TIME,
    CALLS: TIME,
    "{{ messages|length ** 999999999 }}": TIME,
    "{{ '%0999999999d' % 3 }}{{ '%0999999999d' % 3 }}{{ '%0999999999d' % 3 }}": ANY,
    '{{ "{:>2999999999}".format(1) }}': MEMORY,
    "{{ [1] * 9999 * 99999999 }}": MEMORY,
    "{{ range(10)|slice(999999999)|list }}": ANY,
    DOUBLING.replace("@", "'x'").replace("#", "ns.a ~ ns.a"): MEMORY,
    LISTS: ANY,
    LISTS.replace("{{ ns.a }}", "{{ ns.a|tojson }}"): ANY,
    DOUBLING.replace("@", "(1,)").replace("#", "(ns.a,)").replace("99", "99999"): ANY,
    "{{ 'x' * 10000000 }}": "wrote more than 8,388,608 characters",
    "{{ raise_exception('x' * 9999999) }}": r"x… \(9,999,999 characters\)",
    "{{ raise_exception('a\n\nb') }}": "a b$",
}


def texts(template: ForeignTemplate | JinjaTemplate, messages: list[Any], prompt: bool = False) -> str:
    [[text]] = template.render([Conversation(messages, None, [(len(messages), prompt)])])
    return text


def refusal(source: str, messages: list[Any] = SHORT) -> str:
    with pytest.raises(UserError) as caught:
        texts(ForeignTemplate(source, {}, "T"), messages)
    return str(caught.value)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_sandbox, "CPU_SECONDS", 1)


def renderer() -> psutil.Process:
    """The child of this process that renders; one that was never used is started."""
    assert texts(ForeignTemplate("{{ 1 }}", {}, "T"), SHORT) == "1"
    process = jinja_sandbox._renderer(os.getpid())._process
    assert process is not None
    return psutil.Process(process._process.pid)


def close() -> None:
    process = jinja_sandbox._renderer(os.getpid())._process
    if process is not None:
        process.close()


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_refused_in_one_line_and_others_are_rendered_as_before(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if HOSTILE[source] in (TIME, ANY):  # the others are to meet another bound first, on a slow machine too
        monkeypatch.setattr(jinja_sandbox, "CPU_SECONDS", 1)
    began = time.monotonic()
    message = refusal(source)
    assert re.search(HOSTILE[source], message), message
    assert message.startswith("T: ")
    assert "\n" not in message
    assert len(message) < 300
    assert time.monotonic() - began < jinja_sandbox.WALL_SECONDS + 10
    assert texts(ForeignTemplate("{{ messages[0].content }}", {}, "T"), SHORT) == "Well?"


def test_a_template_that_waits_ends_after_the_wall_clocks_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    child = renderer()
    monkeypatch.setattr(jinja_sandbox, "WALL_SECONDS", 0.5)
    child.suspend()
    assert refusal("{{ 2 }}") == "T: needs more than 0.5 seconds for a conversation: correct the template"
    assert not child.is_running()


@pytest.mark.parametrize(("program", "status"), [("kill -SEGV $$", "status -11"), ("exit 3", "status 3")])
def test_a_template_that_crashes_the_interpreter_is_refused(
    program: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close()
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "python"))
        message = refusal("{{ 2 }}")
    assert message == f"T: cannot be rendered: its process died ({status}): correct the template"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert refusal("{{ 2 }}") == "T: no process can be started to render it: No such file or directory"


def test_a_child_that_was_killed_is_replaced_and_leaves_no_zombie() -> None:
    child = renderer()
    child.kill()
    assert refusal("{{ 1 }}") == "T: cannot be rendered: its process died (status -9): correct the template"
    assert renderer().pid != child.pid
    assert not child.is_running()


NESTED = [
    *("{{ " + opening * 3000 + "1" + closing * 3000 + " }}" for opening, closing in ("()", "[]")),
    *("{{ " + part * 3000 + "1 }}" for part in ("not ", "-", "1 + ", "1 and ", "1 if 1 else ")),
    *("{{ a" + part * 3000 + " }}" for part in (".b", "(1)", "[0]")),
    *("{% if 1 %}" * count + "{% endif %}" * count for count in (120, 3000)),
    *("{% for a in b %}" * count + "{% endfor %}" * count for count in (30, 3000)),
    *("{{ " + "{1:" * 3000 + "1" + "}" * 3000 + " }}", "{{ " + "9" * 6000 + " }}", "{{ 0x" + "f" * 99999 + " }}"),
    *("{# " * 3000, "{% raw %}" * 3000, "{% xyz" + "x" * 3000 + " %}", "{{ 'a" * 3000, "{%- " * 3000),
]


def test_nesting_and_size_end_in_one_line_or_work(hurried: None) -> None:
    for source in NESTED:
        message = ""
        try:
            texts(ForeignTemplate(source, {}, "T"), SHORT)
        except UserError as error:
            message = str(error)
        assert "\n" not in message
        assert len(message) < 400
    assert refusal(NESTED[0]) == "T: the chat template is nested too deeply"


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10)|slice(999999999)|list }}",
        "{{ 9**999999999 }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ raise_exception('a\n' * 9999) }}",
    ],
)
def test_a_command_ends_with_one_line_that_names_the_template(refused: Refusal, tmp_path: Path, source: str) -> None:
    train_tokenizer([""], 261).save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(source)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": SHORT}) + "\n")
    line = refused("show", "data", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert "chat_template.jinja: " in line
    assert len(line) < 500


def test_a_generation_tag_that_is_left_is_refused() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(UserError, match="leaves a generation tag without ending it"):
        ChatTemplate(train_tokenizer([""], 261), source)


def test_more_private_use_characters_than_there_are_placeholders_are_refused() -> None:
    template = ChatTemplate.from_tokenizer(train_tokenizer([""], 261))
    every = "".join(map(chr, range(0xF0000, 0x10FFFF))) + "<|end|>"
    with pytest.raises(UserError, match="different private-use characters"):
        template.encode_prompt([{"role": "user", "content": every}])


# --- the child -----------------------------------------------------------------------------------------------------------

PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim }}{{ messages[loop.index0 + 1:]|length }}{% endfor %}"


def test_every_prefix_of_many_conversations_is_what_this_process_renders() -> None:
    here, there = JinjaTemplate(PLAIN, {}, "T"), ForeignTemplate(PLAIN, {}, "T")
    contents = ["é\ud800\n", "", "x" * 5_000, "\x00\U0010fff0\U0001f600", "a" * 70]
    conversations = []
    for count in range(1, 50):
        messages = [{"role": "user", "content": contents[(count + at) % 5]} for at in range(count)]
        conversations.append(Conversation(messages, None, [(at, at % 2 == 0) for at in range(count, 0, -3)]))
    rendered = [list(each) for each in there.render(conversations)]
    assert rendered == [list(each) for each in here.render(conversations)]


def test_a_conversation_that_a_template_refuses_does_not_take_others_with_it(hurried: None) -> None:
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    raising = "{{ raise_exception('no') if messages[0].content == 'raise' }}"
    source = raising + "{% if messages[0].content == 'wait' %}" + endless + "{% endif %}{{ messages[0].content }}"
    contents = ["a", "raise", "b", "wait", "c"]
    conversations = [Conversation([{"role": "user", "content": each}], None, [(1, False)]) for each in contents]
    outcomes = []
    rendered = ForeignTemplate(source, {}, "T").render(conversations)
    for _ in range(3):
        try:
            outcomes += list(next(rendered))
        except UserError as error:
            outcomes.append(str(error))
    assert outcomes == ["a", "T: refuses the conversation: no", "b"]
    with pytest.raises(UserError, match=TIME):
        next(rendered)


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": role, "content": f"{role} " * 200} for role in ("user", "assistant")] * 500
    prefixes = [(count, False) for count in range(len(messages), 0, -1)]
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim }}{% endfor %}"
    [rendered] = ForeignTemplate(source, {}, "T").render([Conversation(messages, None, prefixes)])
    assert len(next(rendered)) > sum(len(message["content"]) for message in messages)
    assert sum(1 for _ in rendered) == len(messages) - 1
    # Of texts that share no beginning all would have to be sent.
    [rendered] = ForeignTemplate(PLAIN, {}, "T").render([Conversation(messages, None, prefixes)])
    with pytest.raises(UserError, match="wrote more than 8,388,608 characters"):
        list(rendered)


def test_messages_that_are_nested_too_deeply_are_refused_and_others_are_rendered_as_before() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    child = renderer()
    message = refusal("{{ 1 }}", [{"role": "user", "content": "Well?", "parts": nested}])
    assert message == "T: the messages of a conversation are nested too deeply: correct the data"
    assert renderer() == child


def test_a_character_is_as_good_as_another_within_the_bounds() -> None:
    long = "\U0001f600" * 6_000_000 + "\ud800"
    assert texts(ForeignTemplate("{{ messages[0].content }}", {}, "T"), [{"role": "user", "content": long}]) == long


def test_what_the_interpreter_says_when_it_ends_is_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    close()
    monkeypatch.setattr(jinja_sandbox, "MEMORY_BYTES", "much")
    message = refusal("{{ 1 }}")
    assert message == (
        "T: cannot be rendered: its process died: ValueError: invalid literal for int() with base 10: 'much' (status 1):"
        " correct the template"
    )


def test_a_template_is_compiled_once_in_one_child_that_imports_little() -> None:
    first, again = (ForeignTemplate("{{ strftime_now('%s %f') }}", {"a": "b"}, "T") for _ in range(2))
    child = renderer()
    assert texts(first, SHORT) == texts(again, SHORT) == texts(first, LONG)  # the time at which it was compiled
    assert renderer() == child
    code = child.cmdline()[-2].replace("main()", "print(*__import__('sys').modules)")
    modules = subprocess.run([sys.executable, "-c", code, ""], capture_output=True, text=True, check=True).stdout.split()
    assert "jinja2.sandbox" in modules
    assert {"torch", "numpy", "pydantic", "tokenizers"}.isdisjoint(modules)


def test_threads_get_their_own_texts() -> None:
    template = ForeignTemplate(PLAIN, {}, "T")

    def render(number: int) -> bool:
        return texts(template, [{"role": "user", "content": f"{number} "}] * 50).startswith(f"<user>{number}49<")

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(render, range(300)))


def _render_in_a_fork(template: ForeignTemplate) -> None:
    assert texts(template, LONG).startswith("<user>Well?5<")
    assert psutil.Process().children()  # and not its parent's


def test_a_forked_process_has_a_child_of_its_own_while_the_parents_is_busy() -> None:
    template = ForeignTemplate(PLAIN, {}, "T")
    child = renderer()
    lock = jinja_sandbox._renderer(os.getpid())._lock
    with lock:  # as another thread holds it
        fork = multiprocessing.get_context("fork").Process(target=_render_in_a_fork, args=(template,))
        fork.start()
        fork.join(60)
        assert fork.exitcode == 0
    assert texts(template, SHORT).startswith("<user>Well?1<")
    assert renderer() == child


PARENT = """
import os, sys, time
from lmforge.data.chat import jinja_sandbox
from lmforge.data.chat.jinja_sandbox import Conversation, ForeignTemplate
list(map(list, ForeignTemplate("{{ 1 }}", {}, "T").render([Conversation([], None, [(0, False)])])))
print(jinja_sandbox._renderer(os.getpid())._process._process.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("ending", [None, signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_its_parent(ending: signal.Signals | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, "0" if ending is None else "600"], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        if ending is not None:
            parent.send_signal(ending)
    assert ended(int(line))


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
