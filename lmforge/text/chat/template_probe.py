"""Probes of a chat template by small conversations: what comes before its answers and ends them.

`without_tags` is here too: the text that a template wrote, without generation tags.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from lmforge.core.errors import UserError
from lmforge.text.chat.jinja_sandbox import (
    GENERATION_END,
    GENERATION_START,
    Conversation,
    JinjaTemplate,
    common_prefix_length,
)
from lmforge.text.chat.layout import Span
from lmforge.text.chat.messages import check_encodable, message_forms, validate_messages

QUESTION = "Well?"
ANSWER = "Yes."
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": "ask", "description": "Ask.", "parameters": {"type": "object"}},
    }
]
_USER: Any = {"role": "user", "content": QUESTION}
_CALL: Any = {"id": "call00000", "function": {"name": "ask", "arguments": {"of": ANSWER}}}
_CALLS: Any = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [_CALL],
}
_PLAIN = [_USER, {"role": "assistant", "content": ANSWER}, _USER]
_THINKING = [_USER, {"role": "assistant", "content": ANSWER, "reasoning_content": "Hm."}, _USER]
_CALLING = [_USER, _CALLS, {"role": "tool", "tool_call_id": _CALL["id"], "content": "So."}]
# The question with its answer; the prompt for the answer; the question without a prompt; all three
# messages.
_PREFIXES = [(2, False), (1, True), (1, False), (3, False)]


class AnswerEnd(NamedTuple):
    """The end of an answer.

    token: the special token that ends it, empty without one. replacement: another token that
    replaces it where more messages follow. closing: the text after the last answer, which may have
    more tokens.
    """

    token: str = ""
    replacement: str = ""
    closing: str = ""


class TemplateProbe(NamedTuple):
    """The result of a probe.

    header: the text before an answer. plain, calling: the end of answers without and with calls.
    stops: the tokens that a model stops at.
    """

    specials: re.Pattern[str]
    header: str
    plain: AnswerEnd
    calling: AnswerEnd
    stops: frozenset[str] = frozenset()

    @property
    def ends(self) -> set[str]:
        """The tokens that end an answer, be it the last or not."""
        return {*self.plain[:2], *self.calling[:2]}

    def find_end(self, until: str, start: int, text: str, has_calls: bool) -> re.Match[str] | None:
        """The token in `text` that ends the answer which begins at `start`; None if none does.

        `until` ends with the answer. It is the last special token of the answer that both have, or
        the one of `text` that replaces it. In `until` only white space and what closes the text
        comes after it.
        """
        found, kept, there = _compare(self.specials, until, start, text)
        closing = (self.calling if has_calls else self.plain).closing
        if until.endswith(closing):  # in other answers its tokens may be all that ends them
            stop = len(until) - len(closing)
            answer = [each for each in found if each.end() <= stop]
            if answer and answer[-1].end() == stop:
                found = answer
        last = here = next(reversed(found[:kept]), None)
        if there and there[0] in self.ends and kept < len(found):
            last = found[kept]
            here = there
        return here if last and _is_last(self.specials, until, last) else None


def _compare(
    specials: re.Pattern[str], until: str, start: int, text: str
) -> tuple[list[re.Match[str]], int, re.Match[str] | None]:
    """The special tokens of `until` from `start` on, compared with those of `text`.

    Returns with them the number that `text` has too, and what it has for the next of them.
    """
    found = list(specials.finditer(until, start))
    same = common_prefix_length(until, text)
    kept = sum(each.end() <= same for each in found)
    there = None
    if kept < len(found) and found[kept].start() <= same:
        there = specials.match(text, found[kept].start())
    return found, kept, there


def _is_last(specials: re.Pattern[str], text: str, token: re.Match[str]) -> bool:
    """Return True where only white space and special tokens come after a token."""
    return not specials.sub("", text[token.end() :]).strip()


def without_tags(rendered: str, location: str) -> tuple[str, list[Span]]:
    """The text that a template wrote, without generation tags, and the spans that they surrounded.

    Raises UserError.
    """
    pieces = re.split(f"[{GENERATION_START}{GENERATION_END}]", check_encodable(rendered))
    if len(pieces) % 2 == 0:
        raise UserError(f"{location}: leaves a generation tag without ending it")
    *bounds, _ = accumulate(map(len, pieces))
    return "".join(pieces), list(zip(bounds[::2], bounds[1::2], strict=True))


def probe_template(
    template: JinjaTemplate, specials: re.Pattern[str], location: str, tools: list[Any] | None
) -> TemplateProbe:
    """Render the small conversations.

    `specials` matches a special token. Raises UserError where the template does for one without
    calls and thoughts, to which `tools` are given.
    """
    text, prompt, turn, followed = _render(template, location, _PLAIN, tools)
    begins = specials.findall(text[: max(0, text.find(QUESTION))])
    ends_others = specials.findall(turn, max(0, turn.rfind(QUESTION)))

    def answer_end(text: str, followed: str) -> AnswerEnd:
        rest = text[text.rfind(ANSWER) :]
        more = followed[followed.rfind(ANSWER) :]
        found, kept, there = _compare(specials, rest, 0, more)
        if not found or rest[found[-1].end() :].strip():
            return AnswerEnd()
        is_ended = kept > 0 and _is_last(specials, rest, found[kept - 1])
        replacement = ""
        end = found[kept - 1 if is_ended else -1]
        # What ends other messages may end this one; what begins them ends none.
        if there and (there[0] in ends_others or not (is_ended or there[0] in begins)):
            replacement = there[0]
            end = found[kept]
        return AnswerEnd(end[0], replacement, rest[end.end() :])

    header = prompt.removeprefix(turn) if prompt.startswith(turn) else ""
    plain = answer_end(text, followed or text)
    probe = TemplateProbe(specials, header, plain, plain)
    within: set[str] = set()
    for messages, given in ((_THINKING, tools), (_CALLING, PROBE_TOOLS)):
        has_calls = messages is _CALLING
        with suppress(UserError):  # it need not know thoughts, or calls
            text, prompt, _, followed = _render(template, location, messages, given)
            if has_calls and ANSWER in text:
                probe = probe._replace(calling=answer_end(text, followed or text))
            end = None
            if text.startswith(prompt):
                end = probe.find_end(text, len(prompt), text, has_calls)
            if end is not None:
                within.update(specials.findall(text, len(prompt), end.start()))
    # A token that replaces an end may also end a thought within an answer, as in gpt-oss, and then
    # it is no stop.
    replacements = {plain.replacement, probe.calling.replacement} - within
    stops = {plain.token, probe.calling.token, *replacements} - {""}
    return probe._replace(stops=frozenset(stops))


def _render(
    template: JinjaTemplate, location: str, messages: Sequence[Any], tools: list[Any] | None
) -> list[str]:
    """The texts of the prefixes, in the first form in which the answer is shown.

    They are empty from where one cannot be rendered.
    """
    problems: list[UserError] = []
    texts: list[str] = []
    for form in message_forms(messages):
        texts = []
        conversation = Conversation(validate_messages(messages, form), tools, _PREFIXES)
        try:
            for text in template.render(conversation):
                texts.append(without_tags(text, location)[0])
        except UserError as problem:
            problems.append(problem)
        if texts and ANSWER in texts[0]:
            break
    if not texts:
        raise problems[0]
    return [*texts, "", "", ""][: len(_PREFIXES)]
