"""What a chat template wrote, without tags; and, as a small conversation shows, what ends its answers and comes before them."""

import re
from itertools import accumulate
from typing import Any, NamedTuple

from lmforge.data.chat.jinja_sandbox import GENERATION_END, GENERATION_START, Conversation, ForeignTemplate, JinjaTemplate
from lmforge.data.chat.layout import Span
from lmforge.data.chat.messages import MessageForm, check_encodable, validate_messages
from lmforge.errors import UserError

QUESTION, ANSWER = "Well?", "Yes."
PROBE_CONVERSATION: list[Any] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
PROBE_TOOLS = [{"type": "function", "function": {"name": "ask", "description": "Ask.", "parameters": {"type": "object"}}}]


class TemplateProbe(NamedTuple):
    """The text of the small conversation, where its answer begins, what is before an answer, and the tokens that end one."""

    text: str
    answer: int
    header: str
    ends: list[str]


def without_tags(rendered: str, location: str) -> tuple[str, list[Span]]:
    """The text that a template wrote, without generation tags, and the spans of it that they surrounded. Raises UserError."""
    pieces = re.split(f"[{GENERATION_START}{GENERATION_END}]", check_encodable(rendered))
    if len(pieces) % 2 == 0:
        raise UserError(f"{location}: leaves a generation tag without ending it")
    *bounds, _ = accumulate(map(len, pieces))
    return "".join(pieces), list(zip(bounds[::2], bounds[1::2], strict=True))


def probe_template(
    template: ForeignTemplate | JinjaTemplate, specials: re.Pattern[str], location: str, tools: list[Any] | None
) -> TemplateProbe:
    """Render the small conversation. `specials` matches a special token. Raises UserError where the template does."""
    problems = []
    for form in (MessageForm("text"), MessageForm("parts")):
        messages, texts = validate_messages(PROBE_CONVERSATION * 2, form), [""][:0]
        [rendered] = template.render([Conversation(messages, tools, [(2, False), (1, True), (1, False), (4, False)])])
        try:
            texts.extend(without_tags(text, location)[0] for text in rendered)
        except UserError as problem:
            problems.append(problem)
        if texts and ANSWER in texts[0]:
            break
    if not texts:
        raise problems[0]
    text, prompt, turn, twice = [*texts, "", "", ""][:4]
    answer, header = max(0, text.rfind(ANSWER)), prompt.removeprefix(turn) if prompt.startswith(turn) else ""
    # After plain text the end-of-turn token comes first; after a tool call another one may come before it. Some templates end
    # earlier turns with another token than the last.
    begins = specials.findall(text[: max(0, text.find(QUESTION))])
    earlier = specials.findall(twice, max(0, twice.rfind(ANSWER, 0, max(0, twice.rfind(ANSWER)))))[:1]
    return TemplateProbe(
        text, answer, header, [*specials.findall(text, answer)[:1], *(end for end in earlier if end not in begins)]
    )
