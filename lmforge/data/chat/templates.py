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

from lmforge.data.chat.layout import EncodedConversation, Layout, encode_layouts
from lmforge.data.chat.jinja_sandbox import GENERATION_END, GENERATION_START, JinjaTemplate
from lmforge.data.chat.messages import Message, check_encodable, validate_messages
from lmforge.data.tokenizer import CHAT_SPECIAL_TOKENS, Tokenizer
from lmforge.errors import UserError

LossMaskMode = Literal["assistant", "last", "all"]

# The turns of lmforge's own: a special token that says whose, the words as they are, <|end|>. There is no beginning of
# text, as there is none in lmforge's pretraining. Calls and their answers are plain text in the turns of those who say them.
LMFORGE_TEMPLATE = """\
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
PRIVATE_USE_CHARACTERS = "[\U000f0000-\U0010ffff]"
FIRST_PRIVATE_USE_CODEPOINT = 0xF0000
# What shows how an answer ends.
PROBE_CONVERSATION: list[Message] = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]


@dataclass(frozen=True)
class SpecialToken:
    """A token with a meaning, and whether it takes the blanks beside it along."""

    id: int
    lstrip: bool
    rstrip: bool


class ChatTemplate:
    """A tokenizer's way to chat. `ends`: what ends an answer, and any text; `jinja`: its source, as transformers reads it."""

    def __init__(self, tokenizer: Tokenizer, source: str, location: str = "the chat template"):
        """A Jinja chat template over a tokenizer's special tokens. What only training asks of one is checked by `render`."""
        self._tokenizer = tokenizer
        self._location = location
        self._template = JinjaTemplate(source, _template_variables(tokenizer), location)
        self._special_tokens = _special_tokens_by_text(tokenizer)
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._escaped_pattern = re.compile(f"{self._special_pattern.pattern}|{PRIVATE_USE_CHARACTERS}")
        # After plain words the end of turn comes first; after a call, say, some other token may come before it.
        self._probe_text, _ = self._render_text(PROBE_CONVERSATION, None)
        self._end_of_turn = next(iter(self._special_pattern.findall(self._probe_text, self._probe_answer_start)), None)
        self.stop_ids = frozenset(
            {tokenizer.eos_token_id} | ({self._special_tokens[self._end_of_turn].id} if self._end_of_turn else set())
        )

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The template that came with a tokenizer, else lmforge's own on the special tokens reserved for it, else UserError."""
        found = _find_template_source(tokenizer)
        if found is None:
            names = ", ".join(CHAT_SPECIAL_TOKENS)
            raise UserError(
                "the tokenizer has no chat template: put a chat_template.jinja beside its tokenizer.json, or start from a "
                f"model whose tokenizer has one, or lmforge's tokens {names}"
            )
        return cls(tokenizer, *found)

    @property
    def jinja_source(self) -> str:
        return self._template.source

    def encode(
        self, messages: Sequence[Any], mask: LossMaskMode = "assistant", tools: list[Any] | None = None
    ) -> EncodedConversation:
        """A conversation as ids and scores. UserError where it is none, or the template does not hold what `check` asks."""
        [rendered] = encode_layouts(self._tokenizer, [self.build_layout(messages, mask, tools)])
        return rendered

    def encode_prompt(self, messages: Sequence[Any], tools: list[Any] | None = None) -> list[int]:
        """The ids after which the assistant's words begin: the beginning of what `render` makes of these and an answer."""
        typed = validate_messages(messages)
        if typed[-1]["role"] == "assistant":
            raise UserError("the last message is the assistant's: a prompt ends with another's")
        private = _TextEscaper(self._escaped_pattern)
        text, _ = self._render_text(private.escape(typed), private.escape(tools), add_generation_prompt=True)
        [rendered] = encode_layouts(self._tokenizer, [self._cut_at_specials(text, [], private)])
        return rendered.tokens

    def check_trainable(self, messages: Sequence[Any], tools: list[Any] | None = None) -> None:
        """UserError unless this conversation can be trained on turn by turn.

        What comes before an answer must be what the template asks for an answer with, and stay so when more follows; and
        an answer must end with a special token, scored, or a model learns never to stop.
        """
        self.build_layout(messages, "assistant", tools)

    def check_stop_token(self) -> None:
        """UserError unless plain answers end with a special token: else nothing of a turn tells that it is over."""
        self._turn_end(self._probe_text, self._probe_answer_start, len(self._probe_text))

    @property
    def _probe_answer_start(self) -> int:
        return max(0, self._probe_text.rfind(PROBE_CONVERSATION[-1]["content"]))

    def build_layout(
        self,
        messages: Sequence[Any],
        mask: LossMaskMode = "assistant",
        tools: list[Any] | None = None,
        first_scored_message: int = 0,
    ) -> Layout:
        """A conversation ready for `encode_layouts`, which takes many at once. No answer before message `since` is scored."""
        typed = validate_messages(messages)
        answers = [at for at, message in enumerate(typed) if message["role"] == "assistant" and at >= first_scored_message]
        if not answers and mask != "all":
            raise UserError("no assistant turn: there is nothing to learn from")
        private = _TextEscaper(self._escaped_pattern)
        hidden, hidden_tools = private.escape(typed), private.escape(tools)
        text, tagged = self._render_text(hidden, hidden_tools)
        if mask == "all":
            return self._cut_at_specials(text, [(0, len(text))], private)
        first = answers[-1] if mask == "last" else answers[0]
        return self._cut_at_specials(text, self._answer_spans((text, tagged), hidden, hidden_tools, first), private)

    def _render_text(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and the stretches that it tags as the model's."""
        whole = check_encodable(self._template.render(messages, tools, add_generation_prompt))
        if GENERATION_START not in whole and GENERATION_END not in whole:
            return whole, []
        *pieces, rest = re.split(f"([{GENERATION_START}{GENERATION_END}])", whole)
        text, bounds = "", []
        for piece, _ in zip(pieces[::2], pieces[1::2], strict=True):
            text += piece
            bounds.append(len(text))
        return text + rest, list(zip(bounds[::2], bounds[1::2], strict=True))

    def _answer_spans(
        self, rendered: tuple[str, list[tuple[int, int]]], messages: list[Message], tools: list[Any] | None, first: int
    ) -> list[tuple[int, int]]:
        """Where in the text the model's words of each answer from message `first` on begin, and the end-of-turn token ends."""
        text, tagged = rendered
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if self.jinja_source == LMFORGE_TEMPLATE:
            return [span for at, span in zip(answers, tagged, strict=True) if at >= first]
        spans = []
        for at in answers:
            if at < first:
                continue
            start, stop = self._answer_span(text, messages, tools, at)
            # Tags may begin before an answer is asked for, as with its header, and be several.
            pieces = (
                [(max(a, start), min(b, stop)) for a, b in tagged] if self._template.has_generation_tags else [(start, stop)]
            )
            pieces = [(a, b) for a, b in pieces if a < b]
            *others, (a, b) = pieces or [(start, start)]
            spans += [*others, (a, self._turn_end(text, a, b))]
            for call in messages[at].get("tool_calls", []):
                if call["function"]["name"] not in text[start:stop]:
                    raise UserError(f"{self._location}: leaves out the tool calls of message {at + 1}: it knows no tools")
        return spans

    def _turn_end(self, text: str, start: int, stop: int) -> int:
        """Where in the model's words the token that ends them ends. UserError where there is none, or words come after it."""
        found = list(self._special_pattern.finditer(text, start, stop))
        if not found or text[found[-1].end() : stop].strip():
            raise UserError(
                f"{self._location}: never scores the end of turn: no special token ends the assistant's words, so a model "
                "trained on them would not learn to stop: mend the template"
            )
        # Some end the whole text with a token of its own, after the one that ends the turn.
        return next((match.end() for match in reversed(found) if match[0] == self._end_of_turn), found[-1].end())

    def _answer_span(self, text: str, messages: list[Message], tools: list[Any] | None, message_index: int) -> tuple[int, int]:
        """Where answer `at` stands in the whole, by what the template makes of the conversation before it and up to it."""
        before, _ = self._render_text(messages[:message_index], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise UserError(
                f"{self._location}: asks for message {message_index + 1} with other words than stand before it in the whole conversation "
                f"({_first_difference(before, text)}): a model trained so would be asked what it never saw; "
                "if it only rewrites earlier turns, score the last turn alone"
            )
        until = text if message_index == len(messages) - 1 else self._render_text(messages[: message_index + 1], tools)[0]
        stop = _common_prefix_length(until, text)
        stop = next(
            (match.start() for match in self._special_pattern.finditer(until) if match.start() < stop < match.end()), stop
        )
        # What ends the whole text alone need not be there when more follows.
        if self._special_pattern.sub("", until[stop:]).strip():
            raise UserError(
                f"{self._location}: the first {message_index + 1} messages read otherwise when more follow ({_first_difference(until, text)}): "
                "score the last turn alone, or use a template that keeps what was said"
            )
        return len(before), stop

    def _cut_at_specials(self, text: str, spans: list[tuple[int, int]], escaper: "_TextEscaper") -> Layout:
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
                parts.append([(escaper.unescape(text[a:b]), scores(a)) for a, b in pairwise(cuts)])

        at = 0
        for match in self._special_pattern.finditer(text):
            special = self._special_tokens[match[0]]
            stop = match.start()
            section(at, at + len(text[at:stop].rstrip()) if special.lstrip else stop)
            parts.append((special.id, scores(stop)))
            at = match.end()
            if special.rstrip:
                at += len(text[at:]) - len(text[at:].lstrip())
        section(at, len(text))
        return parts


class _TextEscaper:
    """Hides in texts what a template must not take for its own, and shows it again."""

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern = pattern
        self._placeholders: dict[str, str] = {}

    def escape(self, value: Any) -> Any:
        """All texts of a JSON value, the names of an object's fields too."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._placeholder(match[0]), value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list) else value

    def unescape(self, text: str) -> str:
        if not self._placeholders:
            return text
        back = {place: spelling for spelling, place in self._placeholders.items()}
        return re.sub(PRIVATE_USE_CHARACTERS, lambda match: back.get(match[0], match[0]), text)

    def _placeholder(self, spelling: str) -> str:
        return self._placeholders.setdefault(spelling, chr(FIRST_PRIVATE_USE_CODEPOINT + len(self._placeholders)))


def _common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _first_difference(one: str, other: str) -> str:
    at = _common_prefix_length(one, other)
    start = max(0, at - 20)
    return f"{one[start : at + 20]!r} against {other[start : at + 20]!r}"


# --- what a tokenizer brings -----------------------------------------------------------------------------------------


def _find_template_source(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """A tokenizer's template and the name of the file that holds it."""
    texts = tokenizer.files
    if "chat_template.jinja" in texts:
        return texts["chat_template.jinja"], "chat_template.jinja"
    source = json.loads(texts.get("tokenizer_config.json", "{}")).get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if isinstance(source, str):
        return source, "the chat_template of tokenizer_config.json"
    if all(tokenizer.token_to_id(token) is not None for token in CHAT_SPECIAL_TOKENS):
        return LMFORGE_TEMPLATE, "lmforge's own chat template"
    return None


def _template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name: bos_token, eos_token and so on."""
    found = {"eos_token": tokenizer.id_to_token(tokenizer.eos_token_id)}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for role, token in json.loads(tokenizer.files.get(name, "{}")).items():
            spelling = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(spelling, str):
                found[role] = spelling
    return found


def _special_tokens_by_text(tokenizer: Tokenizer) -> dict[str, SpecialToken]:
    """The special tokens by their spelling."""

    def listed() -> Iterator[tuple[str, SpecialToken]]:
        for id in (tokenizer.eos_token_id, tokenizer.bos_token_id):
            if id is not None:
                yield tokenizer.id_to_token(id), SpecialToken(id, False, False)
        for token in json.loads(tokenizer.files["tokenizer.json"]).get("added_tokens", []):
            if token["special"] or token["id"] in (tokenizer.eos_token_id, tokenizer.bos_token_id):
                yield token["content"], SpecialToken(token["id"], token["lstrip"], token["rstrip"])

    return dict(listed())
