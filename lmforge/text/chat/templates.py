"""Conversations as layouts by a tokenizer's chat template or lmforge's.

A layout has texts, special tokens and what is scored of them. A template's text is cut at the
special tokens that the template wrote, and the text between them is encoded as plain text: a
message that spells a special token does not become one. A prompt and its answer never share a
token. All that a conversation says must be in its text. Files of conversations are read in
`conversations.py`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any, Literal, Self

from lmforge.core.data.tokenizer import ADDITIONAL_TEMPLATES, Tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.jinja_sandbox import (
    REFUSES,
    Conversation,
    JinjaTemplate,
    common_prefix_length,
    first_difference,
)
from lmforge.text.chat.layout import Layout, Span, SpecialTokens, encode_layouts
from lmforge.text.chat.messages import MessageForm, message_forms, training_flag, validate_messages
from lmforge.text.chat.pieces import (
    MARK,
    PLACEMENTS,
    PRIVATE_USE_CHARACTERS,
    MarkedConversation,
    Piece,
    TextEscaper,
    find_pieces,
    is_written_as_python,
)
from lmforge.text.chat.template_probe import PROBE_TOOLS, probe_template, without_tags
from lmforge.text.chat.template_sources import (
    DEFAULT_TEMPLATE,
    LMFORGE_TEMPLATE,
    TOOL_TEMPLATE,
    find_template_sources,
    template_variables,
)

FoundPiece = tuple[Piece, list[int]]
LossMaskMode = Literal["assistant", "last", "all"]

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
DIFFERENT_PROMPT = (
    "its prompt for message %s differs from what precedes it in the whole conversation"
)
REWRITTEN_HINT = (
    'score the last turn alone (data.mask = "last"), or train each turn as an example of its own'
    " (data.split_turns)"
)


@dataclass(frozen=True)
class ChatExample:
    """A valid conversation, to be rendered by `template`.

    `scored`: the numbers of its answers that are; None if all of it is.

    With `split_turns` it becomes an example for each scored answer where the template rewrites
    earlier turns. A prompt ends before an answer, or with `continues` in it; of answers in it the
    template may leave out what it likes, and the names of turns if it `is_request` of a client.
    `variables` are given to the template.
    """

    template: "ChatTemplate"
    messages: Sequence[Any]
    tools: list[Any] | None
    scored: list[int] | None
    split_turns: bool = False
    is_prompt: bool = False
    is_request: bool = False
    continues: bool = False
    variables: Mapping[str, Any] | None = None


class _Draft:
    """An example in one of the forms of its messages, escaped, as it is rendered.

    It is rendered without and with marks in its pieces.
    """

    def __init__(self, example: ChatExample, form: MessageForm):
        # Its own template takes what it does not know for a system message.
        form = form._replace(rename_roles=form.rename_roles or example.template.is_own)
        messages = validate_messages(example.messages, form)
        # The last for tools.
        self.example = example
        self.roles = [*(message["role"] for message in messages), ""]
        self.escaper = TextEscaper(example.template.escaped_pattern)
        prefixes = [(len(messages), example.is_prompt and not example.continues)]
        if not example.template.is_own:
            for at in example.scored or ():
                if at:
                    prefixes.append((at, True))  # what comes before an answer
                prefixes.append((at + 1, False))  # and what there is with it
        escape = self.escaper.escape
        self.conversation = Conversation(
            escape(messages), escape(example.tools), prefixes, escape(example.variables)
        )
        self.mark(PLACEMENTS[0])

    def mark(self, placement: float) -> None:
        """Put marks at this place of each piece."""
        said = self.conversation
        marked = MarkedConversation(said.messages, said.tools, said.variables or {}, placement)
        self.pieces = marked.pieces
        self.marked = Conversation(
            marked.messages, marked.tools, said.prefixes[:1], marked.variables
        )

    def layout(self, text: str, spans: list[Span]) -> Layout:
        """The text that was rendered, with its scored spans."""
        layout: Layout = []
        for part in self.example.template.specials.cut(text, spans):
            if isinstance(part, list):
                part = [(self.escaper.unescape(words), scores) for words, scores in part]
            layout.append(part)
        return layout


class ChatTemplate:
    """A template over a tokenizer's special tokens.

    `stop_ids` end an answer or any text; `files` as transformers has them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        location: str = "the chat template",
        probe_tools: list[Any] | None = None,
    ):
        """`source` is Jinja; `location` names it in messages.

        `build_layouts` checks what only training needs. `probe_tools` are given to a template that
        needs tools to be opened.

        Raises UserError where a template cannot be compiled, or refuses the small conversations of
        `probe_template`.
        """
        self.tokenizer = tokenizer
        self.jinja_source = source
        self.files = {"chat_template.jinja": source}
        self._location = location
        self.is_own = source == LMFORGE_TEMPLATE
        self._template = JinjaTemplate(source, template_variables(tokenizer), location)
        self._open_tool_template: Callable[[], ChatTemplate] = lambda: self
        self._has_generation_tags = GENERATION_TAG.search(source) is not None
        self.specials = SpecialTokens(tokenizer)
        self.escaped_pattern = re.compile(
            f"{self.specials.pattern.pattern}|{PRIVATE_USE_CHARACTERS}"
        )
        self._probe = probe_template(self._template, self.specials.pattern, location, probe_tools)
        ids = (self.specials.by_text[stop].id for stop in self._probe.stops)
        self.stop_ids = frozenset([tokenizer.eos_token_id, *ids])

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The template that came with a tokenizer, else lmforge's own if its tokens exist.

        Raises UserError otherwise.

        Where there are several, conversations with tools are rendered by the one for these, as in
        transformers.
        """
        sources, location = find_template_sources(tokenizer)
        template = cls(tokenizer, sources.pop(DEFAULT_TEMPLATE), location)
        named = {
            name: source for name, source in sources.items() if re.fullmatch(r"\w[\w.-]*", name)
        }
        template.files |= {
            f"{ADDITIONAL_TEMPLATES}/{name}.jinja": source for name, source in named.items()
        }
        if TOOL_TEMPLATE in sources:
            template._open_tool_template = partial(
                cls, tokenizer, sources[TOOL_TEMPLATE], f"{location}, {TOOL_TEMPLATE}", PROBE_TOOLS
            )
            with suppress(UserError):  # as long as it is not used
                template.stop_ids |= template._tool_template.stop_ids
        return template

    @cached_property
    def _tool_template(self) -> "ChatTemplate":
        return self._open_tool_template()

    def encode_prompt(
        self,
        messages: Sequence[Any],
        tools: list[Any] | None = None,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        is_request: bool = False,
    ) -> list[int]:
        """The ids after which the assistant's answer begins.

        They are also the first ids of these messages with an answer.

        With `continue_final_message` the last message is the beginning of the answer. `variables`
        are given to the template. Raises UserError where the template leaves out a message or a
        tool, or a name unless it `is_request` of a client.
        """
        template = self._for_tools(tools)
        text, draft = template._prompt_text(
            ChatExample(
                template,
                messages,
                tools,
                [],
                is_prompt=True,
                is_request=is_request,
                continues=continue_final_message,
                variables=variables,
            )
        )
        [example] = encode_layouts(self.tokenizer, [draft.layout(text, [])])
        return example.tokens.tolist()

    def render_prompt(
        self, messages: Sequence[Any], *, continue_final_message: bool = False
    ) -> str:
        """The text of `encode_prompt`.

        In it special tokens that messages spell cannot be told from the template's.
        """
        text, draft = self._prompt_text(
            ChatExample(self, messages, None, [], is_prompt=True, continues=continue_final_message)
        )
        return draft.escaper.unescape(text)

    def layout_sampled(self, messages: Sequence[Any], tools: list[Any] | None = None) -> Layout:
        """A prompt in which answers are scored as they were sampled.

        Each is scored from where it was prompted to what ended its turn.

        Raises UserError where the template prompts for one otherwise, or writes it otherwise now
        that more follow.
        """
        example = replace(self.chat_example(messages, tools=tools), is_prompt=True)
        return one_layout(next(example.template.build([example])))

    def _prompt_text(self, example: ChatExample) -> tuple[str, _Draft]:
        last = validate_messages(example.messages)[-1]
        continues = example.continues
        if not continues and last["role"] == "assistant":
            raise UserError(
                "the last message is the assistant's: a prompt ends with another role's"
            )
        if continues and last["role"] != "assistant":
            raise UserError("the last message is not the assistant's, so it is not continued")
        if continues and not last["content"].strip():
            raise UserError(
                "the last message is empty, so there is nothing to continue; leave it out"
            )
        problems: list[UserError] = []
        for form in message_forms(example.messages):
            draft = _Draft(example, form)
            try:
                rendered = next(self._template.render(draft.conversation))
                text, _ = without_tags(rendered, self._location)
                self._check_pieces(draft, self._find_pieces(draft, text), {})
                break
            except UserError as problem:
                problems.append(problem)
        else:
            raise _of_best_form(problems)
        if not continues:
            return text, draft
        # As transformers does: some templates trim what they are given.
        content = draft.escaper.escape(last["content"]).lstrip()
        at = text.rfind(content.rstrip())
        if at < 0:
            raise UserError(
                f"{self._location}: changes the last message, so it cannot be continued"
            )
        if not text.startswith(content, at):
            content = content.rstrip()
        return text[: at + len(content)], draft

    def check_stop_token(self) -> None:
        """Raise UserError unless a plain answer ends with a special token.

        Otherwise generation could not detect its end.
        """
        if not self._probe.plain.token:
            raise self._endless()

    def _for_tools(self, tools: list[Any] | None) -> "ChatTemplate":
        return self._tool_template if tools else self

    def chat_example(
        self,
        messages: Sequence[Any],
        mask: LossMaskMode = "assistant",
        tools: list[Any] | None = None,
        first_scored: int = 0,
    ) -> ChatExample:
        """A conversation for `build_layouts`.

        No answer before `first_scored` is scored, nor one that says so itself. Raises UserError if
        it is none.
        """
        roles = [message["role"] for message in validate_messages(messages)]
        answers = [
            at for at, role in enumerate(roles) if role == "assistant" and at >= first_scored
        ]
        if not answers and mask != "all":
            raise UserError("no assistant turn: there is nothing to learn from")
        flags = [training_flag(message) for message in messages]
        for number, (role, flag) in enumerate(zip(roles, flags, strict=True), start=1):
            if flag is False and mask == "all":
                raise UserError(
                    f'message {number}: is not to be scored, and data.mask = "all" scores all; use'
                    " another mask"
                )
            if flag and mask != "all" and role != "assistant":
                raise UserError(
                    f"message {number}: is to be scored, and only the assistant's are; remove that"
                    " field"
                )
        scored: list[int] | None = None
        if mask != "all":
            chosen = answers[-1:] if mask == "last" else answers
            scored = [at for at in chosen if flags[at] is not False]
        return ChatExample(self._for_tools(tools), messages, tools, scored)

    def build(self, examples: Sequence[ChatExample]) -> Iterator[list[Layout] | UserError]:
        """`build_layouts` of this template's examples."""
        for example in examples:
            try:
                draft = _Draft(example, next(message_forms(example.messages)))
            except UserError as problem:  # it has too many pieces
                yield problem
                continue
            try:
                yield [self._finish(draft)]
            except UserError as problem:
                yield self._build_otherwise(example, problem)

    def _build_otherwise(
        self, example: ChatExample, problem: UserError
    ) -> list[Layout] | UserError:
        """The layouts of an example in another form than the one with the `problem`.

        They are those of its turns where no form works; or the error if these do not either.
        """
        problems = [problem]
        for form in islice(message_forms(example.messages), 1, None):
            try:
                return [self._finish(_Draft(example, form))]
            except UserError as other:
                problems.append(other)
        if not (example.split_turns and example.scored):
            return _of_best_form(problems)
        turns = [
            replace(example, messages=example.messages[: at + 1], scored=[at], split_turns=False)
            for at in example.scored
        ]
        try:
            return [one_layout(each) for each in self.build(turns)]
        except UserError as of_turn:
            return of_turn

    def _finish(self, draft: _Draft) -> Layout:
        texts = self._template.render(draft.conversation)
        text, tagged = without_tags(next(texts), self._location)
        scored = draft.example.scored
        found = self._find_pieces(draft, text)
        spans = answers = [(0, len(text))] if scored is None else []
        if scored and self.is_own:
            spans = answers = [tagged[draft.roles[:at].count("assistant")] for at in scored]
        elif scored:
            is_tagged = self._has_generation_tags and not draft.example.is_prompt
            prefixes = (without_tags(prefix, self._location)[0] for prefix in texts)
            answers = []
            for at in scored:
                answer, limit = self._answer_span(draft, at, text, found, prefixes)
                # Tags may begin before the answer, with its header, and there may be several.
                if is_tagged:
                    parts = [(max(a, answer[0]), min(b, limit)) for a, b in tagged]
                else:
                    parts = [answer]
                if not any(a < answer[1] <= b for a, b in parts):
                    raise self._endless()
                answers.append(answer)
                spans += [part for part in parts if part[0] < part[1]]
        self._check_pieces(draft, found, dict(zip(scored or (), answers, strict=False)))
        return draft.layout(text, spans)

    def _find_pieces(self, draft: _Draft, text: str) -> list[FoundPiece]:
        """Each piece, and where it is in the text.

        Raises UserError where the template reads these messages as others.
        """
        for placement in PLACEMENTS:
            if placement != PLACEMENTS[0]:
                draft.mark(placement)
            marked = ""
            with suppress(UserError):
                marked = without_tags(next(self._template.render(draft.marked)), self._location)[0]
            if is_written_as_python(draft.marked.messages, marked):
                raise UserError(f"{self._location}: {REFUSES}: it takes lists and objects for text")
            if MARK.sub("", marked) == text:
                return list(zip(draft.pieces, find_pieces(draft.pieces, marked), strict=True))
        # The template looks at the words, and writes others for marked ones.
        bare = [piece._replace(text=MARK.sub("", piece.text), mark="") for piece in draft.pieces]
        return list(zip(bare, find_pieces(bare, text), strict=True))

    def _check_pieces(
        self, draft: _Draft, found: list[FoundPiece], answers: dict[int, Span]
    ) -> None:
        """Raise UserError unless all pieces are in the text.

        Those of the scored `answers` must be in these, others must not.
        """
        example = draft.example
        rewritten = []
        for piece, places in found:
            own = answers.get(piece.message)
            if piece.field == "name" and (places or example.is_request):
                # Of a turn's header, which clients of a server may fill though a template has none.
                continue
            if not places:
                is_answer = draft.roles[piece.message] == "assistant"
                if not is_answer or example.scored is None or own is not None:
                    raise self._refusal(draft, piece, "leaves out the")
                # What the template does to an answer that is not scored, it does when it is asked
                # for another one.
                if not example.is_prompt or piece.field == "tool calls":
                    rewritten.append(piece)
            elif not piece.mark:
                continue
            elif own:
                if not any(own[0] <= place <= own[1] for place in places):
                    raise self._refusal(draft, piece, "writes outside of the answer the")
            elif all(any(a < place < b for a, b in answers.values()) for place in places):
                raise self._refusal(draft, piece, "writes into a scored answer the")
        if rewritten:  # but where it is the last answer, it must be there
            draft.mark(PLACEMENTS[0])
            ends = [(piece.message + 1, False) for piece in rewritten]
            texts = self._template.render(draft.marked._replace(prefixes=ends))
            for piece, text in zip(rewritten, texts, strict=True):
                if find_pieces([piece], without_tags(text, self._location)[0]) == [[]]:
                    raise self._refusal(draft, piece, "leaves out the")

    def _refusal(self, draft: _Draft, piece: Piece, does: str) -> UserError:
        of = ""
        if piece.message >= 0:
            of = f" of message {piece.message + 1} ({draft.roles[piece.message]})"
        advice = "correct the template"
        if piece.field in ("name", "documents") and not draft.example.is_request:
            advice = f'data.fields = ["{piece.field}="] does without it'
        elif piece.field.startswith("tool"):
            advice = "it knows no tools"
        elif does == "leaves out the":
            advice = "correct the template, or the record"
        return UserError(f"{self._location}: {does} {piece.field}{of}; {advice}")

    def _find_end(
        self, draft: _Draft, index: int, until: str, start: int, text: str
    ) -> re.Match[str]:
        """The token in `text` that ends message `index`, an answer that begins at `start`.

        `until` has the text of the messages up to it. Raises UserError if there is none.
        """
        has_calls = bool(draft.conversation.messages[index].get("tool_calls"))
        end = self._probe.find_end(until, start, text, has_calls)
        if end is None:
            raise self._endless()
        return end

    def _endless(self) -> UserError:
        return UserError(
            f"{self._location}: never scores the end of turn: no special token ends the assistant's"
            " answer, so a model trained on it would not learn to stop: correct the template"
        )

    def _answer_span(
        self, draft: _Draft, index: int, text: str, found: list[FoundPiece], prefixes: Iterator[str]
    ) -> tuple[Span, int]:
        """The span of message `index`, an answer, in the text of the whole conversation.

        Returns with it the offset up to which this text also begins the text of the messages up to
        the answer. `prefixes` has the texts of the messages before it, if any, with the prompt for
        it, and of those up to it.
        """
        before = next(prefixes) if index else text[: self._first_answer(text, found)]
        until = next(prefixes)
        sampled = draft.example.is_prompt
        if not text.startswith(before):
            problem = f"{DIFFERENT_PROMPT % (index + 1)} ({first_difference(before, text)})"
            if not sampled:
                problem += (
                    ": a model would be prompted with text it was not trained on; "
                    f"if it only rewrites earlier turns, {REWRITTEN_HINT}"
                )
            raise UserError(f"{self._location}: {problem}")
        specials = self.specials.pattern
        if sampled:  # it stays as it was, whatever the template writes of it now
            end = self._find_end(draft, index, until, len(before), until)
            begin = end.start() if text.startswith(until[: end.start()]) else len(before)
            ends = {end[0], *self._probe.ends}
            now = next((each for each in specials.finditer(text, begin) if each[0] in ends), None)
            if now is None or now[0] != end[0]:
                other = now[0] if now else "nothing"
                raise UserError(
                    f"{self._location}: ends message {index + 1} with {end[0]}, and with {other} if"
                    " more follow"
                )
            return (len(before), now.end()), len(text)
        same = common_prefix_length(until, text)
        for each in specials.finditer(until):
            if each.start() < same < each.end():  # a token is the same as a whole or not at all
                same = each.start()
                break
        # Special tokens that end the whole text may be missing when more messages follow, or be
        # others.
        if specials.sub("", until[same:]).strip():
            raise UserError(
                f"{self._location}: the first {index + 1} messages change when more follow"
                f" ({first_difference(until, text)}): {REWRITTEN_HINT}, or use a template that"
                " keeps earlier turns"
            )
        stop = self._find_end(draft, index, until, len(before), text).end()
        return (len(before), stop), max(stop, same)

    def _first_answer(self, text: str, found: list[FoundPiece]) -> int:
        """The offset at which an answer begins that no message comes before.

        No template is asked to render no message.
        """
        place = 0
        size = 1
        for piece, places in found:
            if piece.message == 0 and places:
                place = places[0]
                size = len(piece.text)
                break
        header = text.rfind(self._probe.header, 0, place)
        if self._probe.header and header >= 0:
            return header + len(self._probe.header)
        return max(0, place - size + 1)


def build_layouts(examples: Sequence[ChatExample]) -> Iterator[list[Layout] | UserError]:
    """The layouts of conversations, for `encode_layouts`, which takes many at once as this does.

    One that is split by turns has several.

    An error for each that cannot be trained on: all that it says must be in the text, and what it
    scores in an answer; what comes before a scored answer must be what the template prompts with,
    and stay the same when more turns follow; and an answer must end with a special token, or a
    model never learns to stop.
    """
    for template, group in groupby(examples, lambda example: example.template):
        yield from template.build(list(group))


def _of_best_form(problems: list[UserError]) -> UserError:
    """The first problem that is not with the form itself."""
    of_others = (problem for problem in problems if f": {REFUSES}: " not in str(problem))
    return next(of_others, problems[0])


def one_layout(built: list[Layout] | UserError) -> Layout:
    """The layout of a conversation that is not split. Raises UserError where there is none."""
    if isinstance(built, UserError):
        raise built
    [layout] = built
    return layout
