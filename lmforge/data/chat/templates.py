"""Conversations as layouts (texts, special tokens and what is scored of them) by a tokenizer's chat template or lmforge's.

A template's text is cut at the special tokens that the template wrote, and the text between them is encoded as plain text: a
message that spells a special token does not become one. A prompt and its answer never share a token. Files of conversations
are read in `conversations.py`.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Self

from typing_extensions import TypedDict

from lmforge.data.chat.jinja_sandbox import (
    GENERATION_END,
    GENERATION_START,
    Conversation,
    ForeignTemplate,
    JinjaTemplate,
    common_prefix_length,
)
from lmforge.data.chat.layout import Layout, encode_layouts
from lmforge.data.chat.messages import check_encodable, validate_messages
from lmforge.data.tokenizer import CHAT_SPECIAL_TOKENS, Tokenizer
from lmforge.errors import UserError
from lmforge.untrusted import check_content

LossMaskMode = Literal["assistant", "last", "all"]
Span = tuple[int, int]

# lmforge's own template. A turn is a special token for its role, the content as it is, and <|end|>. There is no beginning-of-
# text token, as there is none in lmforge's pretraining. Tool calls and their results are plain text within turns.
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

PROBE_CONVERSATION: list[Any] = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")

# While a template runs, each spelling of a special token in a message is replaced by a private-use character, and so is each
# private-use character. This distinguishes them from the special tokens that the template writes.
PRIVATE_USE_CHARACTERS = "[\U000f0000-\U0010ffff]"
FIRST_PRIVATE_USE_CODEPOINT = 0xF0000
MAX_PLACEHOLDERS = ord(GENERATION_START) - FIRST_PRIVATE_USE_CODEPOINT - 1


class SpecialToken(NamedTuple):
    """A special token, and whether it absorbs the blanks on its left and right."""

    id: int
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class ChatExample:
    """A valid conversation, its special tokens escaped. `scored`: the numbers of its answers that are; None if all of it is."""

    conversation: Conversation
    scored: list[int] | None
    escaper: "_TextEscaper"


class ChatTemplate:
    """A chat template over a tokenizer's special tokens. `stop_ids` are the tokens that end an answer or any text."""

    def __init__(self, tokenizer: Tokenizer, source: str, location: str = "the chat template"):
        """`source` is Jinja; `location` names it in messages. `build_layouts` checks what only training needs.

        Raises UserError where a template cannot be compiled, or needs too much time or memory.
        """
        self.tokenizer, self.jinja_source = tokenizer, source
        self._location = location
        variables = _template_variables(tokenizer)
        self._template = (JinjaTemplate if source == LMFORGE_TEMPLATE else ForeignTemplate)(source, variables, location)
        self._has_generation_tags = GENERATION_TAG.search(source) is not None
        self._special_tokens = _special_tokens_by_text(tokenizer)
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._escaped_pattern = re.compile(f"{self._special_pattern.pattern}|{PRIVATE_USE_CHARACTERS}")
        # After plain text the end-of-turn token comes first; after a tool call another one may come before it.
        self._probe_text = self._render(PROBE_CONVERSATION, None, add_generation_prompt=False)
        self._probe_answer = max(0, self._probe_text.rfind(PROBE_CONVERSATION[-1]["content"]))
        ends = self._special_pattern.findall(self._probe_text, self._probe_answer)
        self._end_of_turn = ends[0] if ends else None
        self.stop_ids = frozenset([tokenizer.eos_token_id, *(self._special_tokens[end].id for end in ends[:1])])

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The template that came with a tokenizer, else lmforge's own if its tokens exist. Raises UserError otherwise."""
        return cls(tokenizer, *_find_template_source(tokenizer))

    def encode_prompt(
        self,
        messages: Sequence[Any],
        tools: list[Any] | None = None,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids after which the assistant's answer begins. They are also the first ids of these messages with an answer.

        With `continue_final_message` the last message is the beginning of the answer. `variables` are given to the template.
        """
        escaper = _TextEscaper(self._escaped_pattern)
        text = self._prompt_text(messages, tools, continue_final_message, variables, escaper)
        [example] = encode_layouts(self.tokenizer, [self._cut_at_specials(text, [], escaper)])
        return example.tokens.tolist()

    def render_prompt(self, messages: Sequence[Any], *, continue_final_message: bool = False) -> str:
        """The text of `encode_prompt`, in which messages that spell special tokens cannot be told from the template's."""
        escaper = _TextEscaper(self._escaped_pattern)
        return escaper.unescape(self._prompt_text(messages, None, continue_final_message, None, escaper))

    def _prompt_text(
        self,
        messages: Sequence[Any],
        tools: list[Any] | None,
        continues: bool,
        variables: Mapping[str, Any] | None,
        escaper: "_TextEscaper",
    ) -> str:
        typed = validate_messages(messages)
        if (typed[-1]["role"] == "assistant") != continues:
            reason = "the last message is the assistant's: a prompt ends with another role's"
            raise UserError("the last message is not the assistant's, so it is not continued" if continues else reason)
        if continues and not typed[-1]["content"].strip():
            raise UserError("the last message is empty, so there is nothing to continue; leave it out")
        escaped = escaper.escape(typed)
        text = self._render(escaped, escaper.escape(tools), not continues, escaper.escape(variables))
        if not continues:
            return text
        # As transformers does: some templates trim what they are given.
        content = escaped[-1]["content"].lstrip()
        at = text.rfind(content.rstrip())
        if at < 0:
            raise UserError(f"{self._location}: changes the last message, so it cannot be continued")
        return text[: at + len(content if text.startswith(content, at) else content.rstrip())]

    def check_stop_token(self) -> None:
        """Raises UserError unless a plain answer ends with a special token: otherwise generation could not detect its end."""
        self._turn_end(self._probe_text, self._probe_answer, len(self._probe_text))

    def chat_example(
        self,
        messages: Sequence[Any],
        mask: LossMaskMode = "assistant",
        tools: list[Any] | None = None,
        first_scored: int = 0,
    ) -> ChatExample:
        """A conversation for `build_layouts`. No answer before `first_scored` is scored. Raises UserError if it is none."""
        typed = validate_messages(messages)
        answers = [at for at, message in enumerate(typed) if message["role"] == "assistant" and at >= first_scored]
        if not answers and mask != "all":
            raise UserError("no assistant turn: there is nothing to learn from")
        answers = answers[-1:] if mask == "last" else answers
        prefixes = [(len(typed), False)]
        if mask != "all" and self.jinja_source != LMFORGE_TEMPLATE:
            for at in answers:  # what comes before an answer, and what there is with it
                prefixes += [(at, True), (at + 1, False)]
        escaper = _TextEscaper(self._escaped_pattern)
        conversation = Conversation(escaper.escape(typed), escaper.escape(tools), prefixes)
        return ChatExample(conversation, None if mask == "all" else answers, escaper)

    def build_layouts(self, examples: Sequence[ChatExample]) -> Iterator[Layout]:
        """Conversations for `encode_layouts`, which takes many at once as this does.

        Raises UserError unless each can be trained on: what comes before a scored answer must be what the template prompts
        with, and stay the same when more turns follow; and an answer must end with a special token, or a model never learns
        to stop.
        """
        all_texts = self._template.render(example.conversation for example in examples)
        for example, texts in zip(examples, all_texts, strict=True):
            text, tagged = self._untagged(next(texts))
            if example.scored is None:
                spans = [(0, len(text))]
            elif self.jinja_source == LMFORGE_TEMPLATE:
                spans = tagged[-len(example.scored) :]
            else:
                prefixes = (self._untagged(prefix)[0] for prefix in texts)
                spans = self._answer_spans(text, tagged, example.conversation.messages, example.scored, prefixes)
            yield self._cut_at_specials(text, spans, example.escaper)

    def _render(
        self,
        messages: Sequence[Any],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        prefixes = [(len(messages), add_generation_prompt)]
        [[rendered]] = self._template.render([Conversation(messages, tools, prefixes, variables)])
        return self._untagged(rendered)[0]

    def _untagged(self, rendered: str) -> tuple[str, list[Span]]:
        """The text without generation tags, and the spans of it that they surrounded."""
        pieces = re.split(f"[{GENERATION_START}{GENERATION_END}]", check_encodable(rendered))
        if len(pieces) % 2 == 0:
            raise UserError(f"{self._location}: leaves a generation tag without ending it")
        *bounds, _ = accumulate(map(len, pieces))
        return "".join(pieces), list(zip(bounds[::2], bounds[1::2], strict=True))

    def _answer_spans(
        self, text: str, tagged: list[Span], messages: Sequence[Any], answers: list[int], prefixes: Iterator[str]
    ) -> list[Span]:
        """What is scored in the text: of each of the `answers` the content and the end-of-turn token. `prefixes` has the texts
        of the messages before an answer, with the prompt for it, and of those up to it."""
        spans = []
        for at in answers:
            start, stop = self._answer_span(text, at, next(prefixes), next(prefixes))
            # Tags may begin before the answer, with its header, and there may be several.
            pieces = tagged if self._has_generation_tags else [(start, stop)]
            pieces = [(max(a, start), min(b, stop)) for a, b in pieces if max(a, start) < min(b, stop)]
            *others, (a, b) = pieces or [(start, start)]
            spans += [*others, (a, self._turn_end(text, a, b))]
            for call in messages[at].get("tool_calls", []):
                if call["function"]["name"] not in text[start:stop]:
                    raise UserError(f"{self._location}: leaves out the tool calls of message {at + 1}; it knows no tools")
        return spans

    def _turn_end(self, text: str, start: int, stop: int) -> int:
        """Where in an answer its end-of-turn token ends. Raises UserError if there is none, or text comes after it."""
        specials = list(self._special_pattern.finditer(text, start, stop))
        if not specials or text[specials[-1].end() : stop].strip():
            raise UserError(
                f"{self._location}: never scores the end of turn: no special token ends the assistant's answer, so a model "
                "trained on it would not learn to stop: correct the template"
            )
        # Some templates end the text with another token after the one that ends the turn.
        return next((match.end() for match in reversed(specials) if match[0] == self._end_of_turn), specials[-1].end())

    def _answer_span(self, text: str, index: int, before: str, until: str) -> Span:
        """Where message `index`, an answer, is in the text of the whole conversation."""
        if not text.startswith(before):
            raise UserError(
                f"{self._location}: its prompt for message {index + 1} differs from what precedes it in the whole conversation "
                f"({_first_difference(before, text)}): a model would be prompted with text it was not trained on; "
                "if it only rewrites earlier turns, score the last turn alone"
            )
        stop = common_prefix_length(until, text)
        stop = next(
            (match.start() for match in self._special_pattern.finditer(until) if match.start() < stop < match.end()), stop
        )
        # A special token that ends the whole text may be missing when more messages follow.
        if self._special_pattern.sub("", until[stop:]).strip():
            raise UserError(
                f"{self._location}: the first {index + 1} messages change when more follow ({_first_difference(until, text)}): "
                "score the last turn alone, or use a template that keeps earlier turns"
            )
        return len(before), stop

    def _cut_at_specials(self, text: str, spans: list[Span], escaper: "_TextEscaper") -> Layout:
        """The text cut at special tokens, and the texts between them at the bounds of the scored spans."""
        parts: Layout = []
        # Binary search, because conversations of hundreds of turns have as many spans as parts.
        bounds = sorted({bound for span in spans for bound in span})
        starts = sorted(start for start, _ in spans)
        furthest = list(accumulate((stop for _, stop in sorted(spans)), max))

        def scores(offset: int) -> bool:
            begun = bisect_right(starts, offset)
            return begun > 0 and offset < furthest[begun - 1]

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
    """Replaces special tokens in messages by placeholders, so that only the template writes any, and restores them."""

    def __init__(self, pattern: re.Pattern[str]):
        self._pattern = pattern
        self._placeholders: dict[str, str] = {}

    def escape(self, value: Any) -> Any:
        """A JSON value with all its strings escaped, the names of fields too."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: self._placeholder(match[0]), value)
        if isinstance(value, dict):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list) else value

    def unescape(self, text: str) -> str:
        if not self._placeholders:
            return text
        spellings = {placeholder: spelling for spelling, placeholder in self._placeholders.items()}
        return re.sub(PRIVATE_USE_CHARACTERS, lambda match: spellings.get(match[0], match[0]), text)

    def _placeholder(self, spelling: str) -> str:
        if len(self._placeholders) >= MAX_PLACEHOLDERS:
            raise UserError(f"the messages have more than {MAX_PLACEHOLDERS:,} different private-use characters")
        return self._placeholders.setdefault(spelling, chr(FIRST_PRIVATE_USE_CODEPOINT + len(self._placeholders)))


def _first_difference(one: str, other: str) -> str:
    at = common_prefix_length(one, other)
    start = max(0, at - 20)
    return f"{one[start : at + 20]!r} against {other[start : at + 20]!r}"


# --- what comes with a tokenizer -----------------------------------------------------------------------------------------


class _NamedTemplate(TypedDict):
    """One of several templates in tokenizer_config.json."""

    name: str
    template: str


def _find_template_source(tokenizer: Tokenizer) -> tuple[str, str]:
    """A tokenizer's template, and the file that holds it."""
    if "chat_template.jinja" in tokenizer.files:
        return tokenizer.files["chat_template.jinja"], "chat_template.jinja"
    source = tokenizer.configs["tokenizer_config.json"].get("chat_template")
    if isinstance(source, list):
        checked = check_content({"chat_template": source}, dict[str, list[_NamedTemplate]], "tokenizer_config.json")
        source = {entry["name"]: entry["template"] for entry in checked["chat_template"]}.get("default")
    if isinstance(source, str):
        return source, "the chat_template of tokenizer_config.json"
    if all(tokenizer.token_to_id(token) is not None for token in CHAT_SPECIAL_TOKENS):
        return LMFORGE_TEMPLATE, "lmforge's own chat template"
    raise UserError(
        "the tokenizer has no chat template; put a chat_template.jinja beside its tokenizer.json, or start from a "
        f"model whose tokenizer has one, or lmforge's tokens {', '.join(CHAT_SPECIAL_TOKENS)}"
    )


def _template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name: bos_token, eos_token and so on."""
    variables = {"eos_token": tokenizer.id_to_token(tokenizer.eos_token_id)}
    for role, token in tokenizer.roles.items():
        spelling = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(spelling, str):
            variables[role] = spelling
    return variables


def _special_tokens_by_text(tokenizer: Tokenizer) -> dict[str, SpecialToken]:
    """The special tokens by their spelling."""
    tokens = {tokenizer.id_to_token(id): SpecialToken(id, False, False) for id in tokenizer.named_ids}
    for token in tokenizer.added_tokens:
        if token["special"] or token["id"] in tokenizer.named_ids:
            tokens[token["content"]] = SpecialToken(token["id"], token["lstrip"], token["rstrip"])
    return tokens
