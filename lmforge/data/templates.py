"""Conversations to token ids and what is scored of them, both at once, by a tokenizer's own template or lmforge's.

A template's text is cut at the special tokens that the template wrote, and what stands between is encoded as plain text:
nobody becomes another by spelling a special token. The words of a prompt and of its answer are never one token. Reading
files of conversations is conversations.py's.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Self

from lmforge.data.jinja import CLOSES, OPENS, JinjaTemplate
from lmforge.data.layout import Layout, Rendered, encode_layouts
from lmforge.data.messages import Message, typed_messages, well_formed
from lmforge.data.tokenizer import CHAT_SPECIALS, Tokenizer
from lmforge.errors import Mistake

Mask = Literal["assistant", "last", "all"]

# The turns of lmforge's own: a special token that says whose, the words as they are, <|end|>. There is no beginning of
# text, as there is none in lmforge's pretraining. Calls and their answers are plain text in the turns of those who say them.
OWN = """\
{%- if tools %}
    {{- '<|system|><tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}{% generation %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}{{ '<tool_call>\\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}
        {%- endfor %}{{ '<|end|>' }}{% endgeneration %}
    {%- elif message.role == 'user' %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' }}
    {%- else %}
        {{- '<|system|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# What text may hold and must not be taken for the template's: its place is kept, while the template runs, by a character
# for private use, which for that reason are themselves kept places for.
PRIVATE = "[\U000f0000-\U0010ffff]"
FIRST_PRIVATE = 0xF0000
# What shows how an answer ends.
PROBE: list[Message] = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]


@dataclass(frozen=True)
class Special:
    """A token with a meaning, and whether it takes the blanks beside it along."""

    id: int
    lstrip: bool
    rstrip: bool


class ChatTemplate:
    """A tokenizer's way to chat. `ends`: what ends an answer, and any text; `jinja`: its source, as transformers reads it."""

    def __init__(self, tokenizer: Tokenizer, source: str, where: str = "the chat template"):
        """A Jinja chat template over a tokenizer's special tokens. What only training asks of one is checked by `render`."""
        self._tokenizer = tokenizer
        self._where = where
        self._template = JinjaTemplate(source, _variables(tokenizer), where)
        self._specials = _specials(tokenizer)
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self._foreign = re.compile(f"{self._special.pattern}|{PRIVATE}")
        # After plain words the end of turn comes first; after a call, say, some other token may come before it.
        self._probe, _ = self._text(PROBE, None)
        self._end = next(iter(self._special.findall(self._probe, self._answer_of_probe)), None)
        self.ends = frozenset({tokenizer.separator_id} | ({self._specials[self._end].id} if self._end else set()))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The template that came with a tokenizer, else lmforge's own on the special tokens reserved for it, else Mistake."""
        found = _own_source(tokenizer)
        if found is None:
            names = ", ".join(CHAT_SPECIALS)
            raise Mistake(
                "the tokenizer has no chat template: put a chat_template.jinja beside its tokenizer.json, or start from a "
                f"model whose tokenizer has one, or lmforge's tokens {names}"
            )
        return cls(tokenizer, *found)

    @property
    def jinja(self) -> str:
        return self._template.source

    def render(self, messages: Sequence[Any], mask: Mask = "assistant", tools: list[Any] | None = None) -> Rendered:
        """A conversation as ids and scores. Mistake where it is none, or the template does not hold what `check` asks."""
        [rendered] = encode_layouts(self._tokenizer, [self.lay_out(messages, mask, tools)])
        return rendered

    def prompt(self, messages: Sequence[Any], tools: list[Any] | None = None) -> list[int]:
        """The ids after which the assistant's words begin: the beginning of what `render` makes of these and an answer."""
        typed = typed_messages(messages)
        if typed[-1]["role"] == "assistant":
            raise Mistake("the last message is the assistant's: a prompt ends with another's")
        private = _Private(self._foreign)
        text, _ = self._text(private.hide(typed), private.hide(tools), ask=True)
        [rendered] = encode_layouts(self._tokenizer, [self._parts(text, [], private)])
        return rendered.tokens

    def check(self, messages: Sequence[Any], tools: list[Any] | None = None) -> None:
        """Mistake unless this conversation can be trained on turn by turn.

        What comes before an answer must be what the template asks for an answer with, and stay so when more follows; and
        an answer must end with a special token, scored, or a model learns never to stop.
        """
        self.lay_out(messages, "assistant", tools)

    def check_ends(self) -> None:
        """Mistake unless plain answers end with a special token: else nothing of a turn tells that it is over."""
        self._turn_end(self._probe, self._answer_of_probe, len(self._probe))

    @property
    def _answer_of_probe(self) -> int:
        return max(0, self._probe.rfind(PROBE[-1]["content"]))

    def lay_out(
        self, messages: Sequence[Any], mask: Mask = "assistant", tools: list[Any] | None = None, since: int = 0
    ) -> Layout:
        """A conversation ready for `encode_layouts`, which takes many at once. No answer before message `since` is scored."""
        typed = typed_messages(messages)
        answers = [at for at, message in enumerate(typed) if message["role"] == "assistant" and at >= since]
        if not answers and mask != "all":
            raise Mistake("no assistant turn: there is nothing to learn from")
        private = _Private(self._foreign)
        hidden, hidden_tools = private.hide(typed), private.hide(tools)
        text, tagged = self._text(hidden, hidden_tools)
        if mask == "all":
            return self._parts(text, [(0, len(text))], private)
        first = answers[-1] if mask == "last" else answers[0]
        return self._parts(text, self._answers((text, tagged), hidden, hidden_tools, first), private)

    def _text(self, messages: list[Message], tools: list[Any] | None, ask: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and the stretches that it tags as the model's."""
        whole = well_formed(self._template.render(messages, tools, ask))
        if OPENS not in whole and CLOSES not in whole:
            return whole, []
        *pieces, rest = re.split(f"([{OPENS}{CLOSES}])", whole)
        text, bounds = "", []
        for piece, _ in zip(pieces[::2], pieces[1::2], strict=True):
            text += piece
            bounds.append(len(text))
        return text + rest, list(zip(bounds[::2], bounds[1::2], strict=True))

    def _answers(
        self, whole: tuple[str, list[tuple[int, int]]], messages: list[Message], tools: list[Any] | None, first: int
    ) -> list[tuple[int, int]]:
        """Where in the text the model's words of each answer from message `first` on begin, and the end-of-turn token ends."""
        text, tagged = whole
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if self.jinja == OWN:
            return [span for at, span in zip(answers, tagged, strict=True) if at >= first]
        spans = []
        for at in answers:
            if at < first:
                continue
            start, stop = self._between(text, messages, tools, at)
            # Tags may begin before an answer is asked for, as with its header, and be several.
            pieces = [(max(a, start), min(b, stop)) for a, b in tagged] if self._template.tagged else [(start, stop)]
            pieces = [(a, b) for a, b in pieces if a < b]
            *others, (a, b) = pieces or [(start, start)]
            spans += [*others, (a, self._turn_end(text, a, b))]
            for call in messages[at].get("tool_calls", []):
                if call["function"]["name"] not in text[start:stop]:
                    raise Mistake(f"{self._where}: leaves out the tool calls of message {at + 1}: it knows no tools")
        return spans

    def _turn_end(self, text: str, start: int, stop: int) -> int:
        """Where in the model's words the token that ends them ends. Mistake where there is none, or words come after it."""
        found = list(self._special.finditer(text, start, stop))
        if not found or text[found[-1].end() : stop].strip():
            raise Mistake(
                f"{self._where}: never scores the end of turn: no special token ends the assistant's words, so a model "
                "trained on them would not learn to stop: mend the template"
            )
        # Some end the whole text with a token of its own, after the one that ends the turn.
        return next((match.end() for match in reversed(found) if match[0] == self._end), found[-1].end())

    def _between(self, text: str, messages: list[Message], tools: list[Any] | None, at: int) -> tuple[int, int]:
        """Where answer `at` stands in the whole, by what the template makes of the conversation before it and up to it."""
        before, _ = self._text(messages[:at], tools, ask=True)
        if not text.startswith(before):
            raise Mistake(
                f"{self._where}: asks for message {at + 1} with other words than stand before it in the whole conversation "
                f"({_difference(before, text)}): a model trained so would be asked what it never saw; "
                "if it only rewrites earlier turns, score the last turn alone"
            )
        until = text if at == len(messages) - 1 else self._text(messages[: at + 1], tools)[0]
        stop = _agree(until, text)
        stop = next((match.start() for match in self._special.finditer(until) if match.start() < stop < match.end()), stop)
        # What ends the whole text alone need not be there when more follows.
        if self._special.sub("", until[stop:]).strip():
            raise Mistake(
                f"{self._where}: the first {at + 1} messages read otherwise when more follow ({_difference(until, text)}): "
                "score the last turn alone, or use a template that keeps what was said"
            )
        return len(before), stop

    def _parts(self, text: str, spans: list[tuple[int, int]], private: "_Private") -> Layout:
        """The text cut at special tokens, and these at the ends of what is scored."""
        parts: Layout = []
        # Searched by halves: conversations of hundreds of turns have as many spans as they have parts.
        bounds = sorted({bound for span in spans for bound in span})
        starts = sorted(start for start, _ in spans)
        furthest = list(accumulate((stop for _, stop in sorted(spans)), max))

        def scores(place: int) -> bool:
            begun = bisect_right(starts, place)
            return begun > 0 and place < furthest[begun - 1]

        def section(start: int, stop: int) -> None:
            cuts = [start, *bounds[bisect_right(bounds, start) : bisect_left(bounds, stop)], stop]
            if start < stop:
                parts.append([(private.show(text[a:b]), scores(a)) for a, b in pairwise(cuts)])

        at = 0
        for match in self._special.finditer(text):
            special = self._specials[match[0]]
            stop = match.start()
            section(at, at + len(text[at:stop].rstrip()) if special.lstrip else stop)
            parts.append((special.id, scores(stop)))
            at = match.end()
            if special.rstrip:
                at += len(text[at:]) - len(text[at:].lstrip())
        section(at, len(text))
        return parts


class _Private:
    """Hides in texts what a template must not take for its own, and shows it again."""

    def __init__(self, foreign: re.Pattern[str]):
        self._foreign = foreign
        self._hidden: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """All texts of a JSON value, the names of an object's fields too."""
        if isinstance(value, str):
            return self._foreign.sub(lambda match: self._place(match[0]), value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def show(self, text: str) -> str:
        if not self._hidden:
            return text
        back = {place: spelling for spelling, place in self._hidden.items()}
        return re.sub(PRIVATE, lambda match: back.get(match[0], match[0]), text)

    def _place(self, spelling: str) -> str:
        return self._hidden.setdefault(spelling, chr(FIRST_PRIVATE + len(self._hidden)))


def _agree(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _difference(one: str, other: str) -> str:
    at = _agree(one, other)
    start = max(0, at - 20)
    return f"{one[start : at + 20]!r} against {other[start : at + 20]!r}"


# --- what a tokenizer brings -----------------------------------------------------------------------------------------


def _own_source(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A tokenizer's template and the name of the file that holds it."""
    texts = tokenizer.texts
    if "chat_template.jinja" in texts:
        return texts["chat_template.jinja"], "chat_template.jinja"
    source = json.loads(texts.get("tokenizer_config.json", "{}")).get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if isinstance(source, str):
        return source, "the chat_template of tokenizer_config.json"
    if all(tokenizer.id_of(token) is not None for token in CHAT_SPECIALS):
        return OWN, "lmforge's own chat template"
    return None


def _variables(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name: bos_token, eos_token and so on."""
    found = {"eos_token": tokenizer.token_of(tokenizer.separator_id)}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, token in json.loads(tokenizer.texts.get(name, "{}")).items():
            spelling = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(spelling, str):
                found[role] = spelling
    return found


def _specials(tokenizer: Tokenizer) -> dict[str, Special]:
    """The special tokens by their spelling."""

    def listed() -> Iterator[tuple[str, Special]]:
        for id in (tokenizer.separator_id, tokenizer.bos_id):
            if id is not None:
                yield tokenizer.token_of(id), Special(id, False, False)
        for token in json.loads(tokenizer.texts["tokenizer.json"]).get("added_tokens", []):
            if token["special"] or token["id"] in (tokenizer.separator_id, tokenizer.bos_id):
                yield token["content"], Special(token["id"], token["lstrip"], token["rstrip"])

    return dict(listed())
