"""What a chat template does wrong is one line that names it, whatever it raises and however long
that is.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmforge.core.data.tokenizer import train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.jinja_sandbox import Conversation, JinjaTemplate
from lmforge.text.chat.templates import ChatTemplate
from tests.conftest import Refusal

SHORT = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
PLAIN = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content|trim }}{{ messages[loop.index0 +"
    " 1:]|length }}{% endfor %}"
)

FAULTY = {
    "{{ 'x' * 10000000 }}": "wrote more than 8,388,608 characters",
    "{{ raise_exception('x' * 9999999) }}": r"x… \(9,999,999 characters\)",
    "{{ raise_exception('a\n\nb') }}": "a b$",
    "{{ messages[0].content + 1 }}": "can only concatenate str",
    "{{ messages.append(1) }}": "unsafe|not safely",
    "{% for m in messages %}{{ m.content }}": "not Jinja: line 1",
}


def text(template: JinjaTemplate, messages: list[Any]) -> str:
    [rendered] = template.render(Conversation(messages, None, [(len(messages), False)]))
    return rendered


def refusal(source: str) -> str:
    with pytest.raises(UserError) as caught:
        text(JinjaTemplate(source, {}, "T"), SHORT)
    return str(caught.value)


@pytest.mark.parametrize("source", FAULTY)
def test_a_fault_of_a_template_is_one_short_line(source: str) -> None:
    message = refusal(source)
    assert re.search(FAULTY[source], message), message
    assert message.startswith("T: ")
    assert "\n" not in message
    assert len(message) < 300


NESTED = [
    *("{{ " + opening * 3000 + "1" + closing * 3000 + " }}" for opening, closing in ("()", "[]")),
    *("{{ " + part * 3000 + "1 }}" for part in ("not ", "-", "1 + ", "1 and ", "1 if 1 else ")),
    *("{{ a" + part * 3000 + " }}" for part in (".b", "(1)", "[0]")),
    *("{% if 1 %}" * count + "{% endif %}" * count for count in (120, 3000)),
    *("{% for a in b %}" * count + "{% endfor %}" * count for count in (30, 3000)),
    "{{ " + "{1:" * 3000 + "1" + "}" * 3000 + " }}",
    "{{ " + "9" * 6000 + " }}",
    "{{ 0x" + "f" * 99999 + " }}",
    *(
        "{# " * 3000,
        "{% raw %}" * 3000,
        "{% xyz" + "x" * 3000 + " %}",
        "{{ 'a" * 3000,
        "{%- " * 3000,
    ),
]


def test_nesting_and_size_end_in_one_line_or_work() -> None:
    for source in NESTED:
        message = ""
        try:
            text(JinjaTemplate(source, {}, "T"), SHORT)
        except UserError as error:
            message = str(error)
        assert "\n" not in message
        assert len(message) < 400
    assert refusal(NESTED[0]) == "T: the chat template is nested too deeply"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ raise_exception('a\n' * 9999) }}",
    ],
)
def test_a_command_ends_with_one_line_that_names_the_template(
    refused: Refusal, tmp_path: Path, source: str
) -> None:
    train_tokenizer([""], 261).save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(source)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": SHORT}) + "\n")
    line = refused("show", "data", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "tokenizer")
    assert "chat_template.jinja: " in line
    assert len(line) < 500


def test_a_generation_tag_that_is_left_is_refused() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{%"
        " endfor %}"
    )
    with pytest.raises(UserError, match="leaves a generation tag without ending it"):
        ChatTemplate(train_tokenizer([""], 261), source)


def test_more_private_use_characters_than_there_are_placeholders_are_refused() -> None:
    template = ChatTemplate.from_tokenizer(train_tokenizer([""], 261))
    every = "".join(map(chr, range(0xF0000, 0x10FFFF))) + "<|end|>"
    with pytest.raises(UserError, match="different private-use characters"):
        template.encode_prompt([{"role": "user", "content": every}])


def test_threads_get_their_own_texts() -> None:
    template = JinjaTemplate(PLAIN, {}, "T")

    def render(number: int) -> bool:
        return text(template, [{"role": "user", "content": f"{number} "}] * 50).startswith(
            f"<user>{number}49<"
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(render, range(300)))
