"""What is scored with a template is what TRL's copy of it for training tags, for each template that
TRL carries both of.
"""

import importlib.util
import json
import re
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from lmforge.core.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.layout import encode_layouts
from lmforge.text.chat.messages import message_forms, validate_messages
from lmforge.text.chat.template_probe import TemplateProbe
from lmforge.text.chat.templates import ChatTemplate, build_layouts, one_layout

[PACKAGE] = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr, misc]
SOURCES = {
    each.stem: each.read_text()
    for each in sorted((Path(PACKAGE) / "chat_templates").glob("*.jinja"))
}
SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object"},
        },
    }
]
TOOLS[0]["function"]["parameters"]["properties"] = {
    "city": {"type": "string", "description": "Where."}
}
Q, A = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00000", "content": "Rain."}


def called(*cities: str, **fields: str) -> dict[str, Any]:
    functions = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": each}
        for at, each in enumerate(functions)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


CONVERSATIONS = {
    "a turn": [Q, A],
    "two turns": [Q, A, Q, A],
    "a call": [Q, called("Rome")],
    "a call, its result and an answer": [Q, called("Rome"), RESULT, A],
    "a thought with a call": [Q, called("Rome", reasoning_content="Where, then?")],
    "two calls": [Q, called("Rome", "Oslo")],
}
# Why a row differs. In every scored part the copy tags what is scored here, and:
#   s  the white space after the end of the turn, which a model need not write
#   h  before it the end of what the template prompts with, which a model is given
#   c  after it the token that only closes the text
#   r  but the token after calls that asks for their result, with which the template ends the turn
#   g  but the header of an answer to a result, for which the template does not prompt
REASONS = "shcrg"
# Or why it is refused: the template cannot be trained on thus.
REFUSALS = {
    "P": "its prompt for message 2 differs from what precedes it",
    "F": "the first 2 messages change when more follow",
    "E": "never scores the end of turn",
    "T": "leaves out the tool calls of message 2",
    "R": "leaves out the reasoning of message 2",
    "A": "refuses the conversation",
}
# One of each conversation; "=" is equal.
ROWS = {
    "cohere": "= = T A R T",
    "cohere2": "= = T A R T",
    "deepseek_r1_distill": "P P P P P P",
    "deepseekv3": "P P P P P P",
    "diffusion_gemma": "s s r srg r r",
    "gemma": "s s T A R T",
    "gemma3": "s s T A R T",
    "glm4moe": "E E E E E E",
    "gptoss": "h h h h h T",
    "idefics3": "s s T T R T",
    "lfm2": "s s T T R T",
    "lfm2_2_5": "= = = = = =",
    "lfm2_2_5_v2": "= = = = = =",
    "lfm2_2_5_vl": "= = = = = =",
    "lfm2_v2": "s s s s R s",
    "llama3": "= = T T R T",
    "llava_next": "= = T A R T",
    "muse_glimmer": "h h h h h h",
    "nemotron_3_5_lightning": "P P P P sh P",
    "nemotron_3_nano": "P P P P sh P",
    "nemotron_3_super": "P P P P sh P",
    "nemotron_3_ultra": "P P P P sh P",
    "phi3": "sc sc T T R T",
    "phi3_5": "sc sc T T R T",
    "qwen2_5": "sh sh sh sh R sh",
    "qwen2_5_vl": "s s T T R T",
    "qwen3": "s F s F s s",
    "qwen3_5_nothink": "sh P sh sh P sh",
    "qwen3_5_think": "sh P sh sh sh sh",
    "qwen3_6": "sh P sh sh sh sh",
    "qwen3_8": "sh sh sh sh sh sh",
    "qwen3_instruct_2507": "s s s s R s",
    "qwen3_vl": "s s s s R s",
    "smolvlm": "s s T T R T",
}


def folder_for(folder: Path, source: str) -> Path:
    """A tokenizer of bytes, with all that looks like a special token of the template."""
    tokenizer = train_tokenizer([""], 261)._backend
    tokenizer.add_special_tokens(["<s>", "</s>", *sorted(set(SPECIAL.findall(source)))])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": source,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def scored_parts(decode: Any, ids: list[int], mask: list[bool]) -> list[str]:
    groups = groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1]))
    return [decode([id for id, _ in group]) for scored, group in groups if scored]


def tagged_parts(
    theirs: PreTrainedTokenizerFast, training: str, messages: list[Any], tools: Any
) -> list[str]:
    """What transformers says is the assistant's, of messages in the first form in which it is all
    there.
    """
    for form in message_forms(messages):
        try:
            encoded = theirs.apply_chat_template(
                validate_messages(messages, form),
                tools=tools,
                chat_template=training,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except (jinja2.TemplateError, TypeError):
            continue
        parts = scored_parts(theirs.decode, encoded["input_ids"], encoded["assistant_masks"])
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        if len(parts) == len(answers) and all(map(str.__contains__, parts, answers)):
            return parts
    return []


def compare(folder: Path, training: str) -> str:
    """A row of the table."""
    tokenizer, theirs = Tokenizer.open(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.from_tokenizer(tokenizer)
    decode = partial(tokenizer.decode, include_special_tokens=True)
    row = []
    for name, messages in CONVERSATIONS.items():
        tools = TOOLS if "call" in name else None
        try:
            [built] = build_layouts([template.chat_example(messages, tools=tools)])
        except UserError as problem:
            built = problem
        if isinstance(built, UserError):
            found = [letter for letter, words in REFUSALS.items() if words in str(built)]
            row.append("".join(found) or str(built))
            continue
        [example] = encode_layouts(tokenizer, [one_layout(built)])
        ours = scored_parts(decode, example.tokens.tolist(), example.loss_mask.tolist())
        row.append(why(template, ours, tagged_parts(theirs, training, messages, tools)))
    return " ".join(row)


def why(template: ChatTemplate, ours: list[str], theirs: list[str]) -> str:
    header, reasons = template.render_prompt([Q]), set()
    if len(ours) != len(theirs):
        return f"{ours} against {theirs}"
    for mine, other in zip(ours, theirs, strict=True):
        if mine.endswith("<|tool_response>") and not other.endswith("<|tool_response>"):
            mine, reasons = mine.removesuffix("<|tool_response>"), reasons | {"r"}
        if mine.startswith("<|turn>model\n") and other.startswith(A["content"]):
            mine, reasons = mine.removeprefix("<|turn>model\n"), reasons | {"g"}
        before, found, after = other.partition(mine)
        if not found or not header.endswith(before):
            return f"{mine!r} against {other!r}"
        reasons |= {"h"} if before else set()
        reasons |= {"s"} if after[:1].isspace() else set()
        reasons |= {"c"} if after.strip() == "</s>" else set()
        if after.strip() not in ("", "</s>"):
            return f"{mine!r} against {other!r}"
    return "".join(each for each in REASONS if each in reasons) or "="


def row(folder: Path, name: str) -> str:
    return compare(
        folder_for(folder, SOURCES[name]), SOURCES.get(f"{name}_training", SOURCES[name])
    )


def test_the_table_has_a_row_for_each_template_that_has_a_copy_for_training_or_tags_of_its_own() -> (
    None
):
    tagged = (
        name for name, source in SOURCES.items() if re.search(r"\{%-?\s*generation\b", source)
    )
    assert {name.removesuffix("_training") for name in tagged} == ROWS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_what_is_scored_is_what_the_copy_for_training_tags_or_it_is_known_why_not(
    tmp_path: Path, name: str
) -> None:
    assert row(tmp_path / "tokenizer", name) == ROWS[name]


@pytest.mark.parametrize(
    "name", ["cohere2", "diffusion_gemma", "gptoss", "lfm2_v2", "muse_glimmer"]
)
def test_the_table_shows_answers_that_are_cut_at_their_first_special_token(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(self: TemplateProbe, until: str, start: int, *_: Any) -> re.Match[str] | None:
        return self.specials.search(until, start)

    monkeypatch.setattr(TemplateProbe, "find_end", first)
    assert row(tmp_path / "tokenizer", name) != ROWS[name]
