import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from lmforge.core.data.tokenizer import CHAT_SPECIAL_TOKENS, EOS_TOKEN, Tokenizer, train_tokenizer
from lmforge.core.errors import UserError
from lmforge.text.chat.layout import SpecialTokens, encode_layouts
from lmforge.text.chat.template_sources import LMFORGE_TEMPLATE
from lmforge.text.chat.templates import ChatTemplate, LossMaskMode, build_layouts, one_layout
from tests.seeds import fresh_random
from tests.support.counted_text import CountedText

SAMPLE = [
    "Once upon a time, there was a user.\nThe assistant said: hello, hello world!\n\n  No, it is"
    " I.\n" * 4
] * 20
WORDS = [
    "hello",
    " world",
    "\n",
    "\n\n",
    "  ",
    "é",
    "日本",
    "!",
    "\t",
    "the user",
    "a time",
    "'s",
    "12",
    "<|end|>",
    "</s>",
    "<s>",
]
# Those that no token of any template here can come out of.
HARMLESS = WORDS[:-3]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
    " }}{% endif %}"
)
HEADERS = """{{ bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|stop|>\n\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"""
# Speakers are plain text here, and the answer begins with the blank that the template writes.
SPEAKERS = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% else %}
{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"""
# And here the end of the whole text is not the end of a turn.
ENDED = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
TAGGED = CHATML.replace(
    "message['content'] + '<|im_end|>' + '\n'}}",
    "'' }}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}",
)
# Tags the words without what ends them.
TAGGED_SHORT = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}{{ m.content"
    " }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>{% endif %}"
)


def byte_level(folder: Path, specials: list[str], template: str) -> Path:
    """As Llama 3's and Qwen's: bytes, no blanks added."""
    tokenizer = train_tokenizer(SAMPLE, 400)._backend
    tokenizer.add_special_tokens(specials)
    return saved(folder, tokenizer, template, specials[0], specials[-1])


def blanks_first(folder: Path, template: str, scheme: str) -> Path:
    """As Llama 2's and Mistral's: a blank is a letter, and one is put before the first word of a
    text, or of every piece.
    """
    letters = sorted(set("".join([*SAMPLE, *WORDS, "[INST/]:"]).replace(" ", "▁")))
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        "he",
        "▁he",
        "▁▁",
        "or",
    ]
    merges = [("h", "e"), ("▁", "he"), ("▁", "▁"), ("o", "r")]
    bpe = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    if scheme == "normalizer":
        bpe.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bpe.add_special_tokens(["<unk>", "<s>", "</s>"])
    return saved(folder, bpe, template, "<s>", "</s>")


def saved(folder: Path, tokenizer: tokenizers.Tokenizer, template: str, bos: str, eos: str) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    own = train_tokenizer(SAMPLE, 400)
    own.save(root / "own")
    (root / "own" / "chat_template.jinja").write_text(ChatTemplate.from_tokenizer(own).jinja_source)
    return {
        "own": root / "own",
        "ChatML": byte_level(root / "chatml", ["<|im_start|>", "<|im_end|>"], CHATML),
        "headers": byte_level(
            root / "headers", ["<|bot|>", "<|start|>", "<|stop|>", "<|eot|>"], HEADERS
        ),
        "speakers": blanks_first(root / "speakers", SPEAKERS, "first"),
        "speakers, old": blanks_first(root / "old", SPEAKERS, "normalizer"),
        "ended": byte_level(
            root / "ended", ["<|x|>", "<|im_start|>", "<|im_end|>", "<|all|>"], ENDED
        ),
        "tagged": byte_level(root / "tagged", ["<|im_start|>", "<|im_end|>"], TAGGED),
    }


class Encoded(NamedTuple):
    tokens: list[int]
    loss_mask: list[bool]


def encode(
    template: ChatTemplate,
    messages: list[Any],
    mask: LossMaskMode = "assistant",
    tools: list[Any] | None = None,
) -> Encoded:
    [built] = build_layouts([template.chat_example(messages, mask, tools)])
    [example] = encode_layouts(template.tokenizer, [one_layout(built)])
    return Encoded(example.tokens.tolist(), example.loss_mask.tolist())


def scored(template: ChatTemplate, messages: list[Any], mask: LossMaskMode = "assistant") -> str:
    """What is scored, with its special tokens spelled out."""
    rendered = encode(template, messages, mask)
    ids = [id for id, score in zip(rendered.tokens, rendered.loss_mask, strict=True) if score]
    return template.tokenizer.decode(ids, include_special_tokens=True)


STYLES = ["own", "ChatML", "headers", "speakers", "speakers, old", "ended"]


def conversation(
    draw: random.Random, words: list[str] = HARMLESS, exchanges: int = 3
) -> list[dict[str, Any]]:
    messages = []
    for _ in range(draw.randint(1, exchanges)):
        for role in ("user", "assistant"):
            # A letter at either end: what a template trims, or a pattern joins, is the subject of
            # other tests.
            messages.append(
                {
                    "role": role,
                    "content": "".join(["I", *draw.choices(words, k=draw.randint(0, 6)), "I"]),
                }
            )
    return messages


@pytest.fixture
def draw() -> random.Random:
    return fresh_random()


@pytest.mark.parametrize("style", STYLES)
def test_a_conversation_has_the_ids_that_transformers_gives_it(
    folders: dict[str, Path], style: str, draw: random.Random
) -> None:
    theirs, tokenizer = (
        AutoTokenizer.from_pretrained(folders[style]),
        Tokenizer.open(folders[style]),
    )
    template = ChatTemplate.from_tokenizer(tokenizer)
    for _ in range(30):
        messages = conversation(draw)
        if style != "speakers" and style != "speakers, old":
            messages.insert(0, {"role": "system", "content": "Be kind. "})
        assert encode(template, messages).tokens == ids(theirs.apply_chat_template(messages)), (
            messages
        )
        expected = ids(theirs.apply_chat_template(messages[:-1], add_generation_prompt=True))
        assert template.encode_prompt(messages[:-1]) == expected, messages


def ids(encoded: Any) -> list[int]:
    return list(encoded["input_ids"])


@pytest.mark.parametrize("style", STYLES)
def test_what_is_scored_is_what_the_model_would_write_and_the_end_of_its_turn(
    folders: dict[str, Path], style: str, draw: random.Random
) -> None:
    tokenizer = Tokenizer.open(folders[style])
    template = ChatTemplate.from_tokenizer(tokenizer)
    for _ in range(30):
        messages = conversation(draw, WORDS)
        every, last = encode(template, messages), encode(template, messages, "last")
        assert every.tokens == last.tokens
        expected = [False] * len(every.tokens)
        for at in range(1, len(messages), 2):
            start = len(template.encode_prompt(messages[:at]))
            assert every.tokens[:start] == template.encode_prompt(messages[:at])
            stop = (
                next(
                    place
                    for place in range(start, len(every.tokens))
                    if every.tokens[place] in template.stop_ids
                )
                + 1
            )
            assert tokenizer.decode(every.tokens[start:stop]).strip() == messages[at]["content"]
            expected[start:stop] = [True] * (stop - start)
        assert every.loss_mask == expected
        assert last.loss_mask == [False] * start + expected[start:]
        assert encode(template, messages, "all").loss_mask == [False] + [True] * (
            len(every.tokens) - 1
        )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text(max_size=20) | st.text(alphabet=" \n<|end>I", max_size=20), min_size=2, max_size=6
    )
)
def test_a_prompt_has_the_same_ids_with_any_answer(
    folders: dict[str, Path], texts: list[str]
) -> None:
    for style in STYLES:
        template = known(folders[style])
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": text}
            for at, text in enumerate(texts)
        ]
        messages = messages[: len(messages) // 2 * 2]
        prompt = template.encode_prompt(messages[:-1])
        rendered = encode(template, messages, "last")
        assert rendered.tokens[: len(prompt)] == prompt
        assert not any(rendered.loss_mask[: len(prompt)])
        assert rendered.loss_mask[len(prompt)]


TEMPLATES: dict[Path, ChatTemplate] = {}


def known(folder: Path) -> ChatTemplate:
    if folder not in TEMPLATES:
        TEMPLATES[folder] = ChatTemplate.from_tokenizer(Tokenizer.open(folder))
    return TEMPLATES[folder]


@pytest.mark.parametrize("style", STYLES)
def test_text_that_spells_a_special_token_never_becomes_one(
    folders: dict[str, Path], style: str, draw: random.Random
) -> None:
    tokenizer = Tokenizer.open(folders[style])
    template = ChatTemplate.from_tokenizer(tokenizer)
    spelled = [tokenizer.id_to_token(id) for id in tokenizer.all_special_ids]
    # Also what stands in for them while the template runs.
    spelled += [chr(0xF0000), chr(0xF0001), "\U0010fff0", "\U0010fff1", "\U0010ffff"]
    for _ in range(20):
        messages = conversation(draw)
        for message in messages:
            message["content"] = "".join(f"I{part}" for part in draw.choices(spelled, k=3)) + "I"
        plain = [{**message, "content": "I"} for message in messages]
        special = [
            id for id in encode(template, messages).tokens if id in tokenizer.all_special_ids
        ]
        assert special == [
            id for id in encode(template, plain).tokens if id in tokenizer.all_special_ids
        ]
        said = tokenizer.decode(encode(template, messages).tokens)
        assert all(message["content"] in said for message in messages)


def test_a_template_that_tags_the_models_words_scores_these(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["tagged"])
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>!\n{% generation %}{{"
        " m.content }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m.content"
        " }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>!\n{%"
        " endif %}"
    )
    template, messages = (
        ChatTemplate(tokenizer, source),
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}],
    )
    rendered = encode(template, messages)
    assert scored(template, messages) == "bc<|im_end|>"
    theirs = AutoTokenizer.from_pretrained(folders["tagged"])
    encoded = theirs.apply_chat_template(
        messages,
        chat_template=source,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert rendered.tokens == encoded["input_ids"]
    assert [int(score) for score in rendered.loss_mask] == encoded["assistant_masks"]


def test_tags_around_others_words_or_the_question_for_an_answer_score_none_of_these(
    folders: dict[str, Path],
) -> None:
    tokenizer = Tokenizer.open(folders["tagged"])
    whole = CHATML.replace("{{'<|im_start|>'", "{% generation %}{{'<|im_start|>'", 1).replace(
        "'\n'}}", "'\n'}}{% endgeneration %}", 1
    )
    # Within the tags white space is scored too, as in transformers.
    for source, blank in ((TAGGED, ""), (whole, "\n")):
        assert scored(ChatTemplate(tokenizer, source), TWICE) == f"hello<|im_end|>{blank}" * 2


def test_a_template_that_cannot_be_trained_on_can_be_asked_with(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["ChatML"])
    thinks = ChatTemplate(tokenizer, CHATML.replace("assistant\n", "assistant\n<think>"))
    assert tokenizer.decode(thinks.encode_prompt(HELLO[:1])).endswith("assistant\n<think>")
    assert thinks.stop_ids == {tokenizer.token_to_id("<|im_end|>")}
    with pytest.raises(UserError, match="its prompt for message 2 differs"):
        encode(thinks, HELLO)


def test_a_call_that_a_template_leaves_out_is_a_mistake_and_no_empty_answer(
    folders: dict[str, Path],
) -> None:
    called = [*HELLO[:1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}]
    with pytest.raises(UserError, match="leaves out the tool calls of message 2"):
        encode(known(folders["ChatML"]), called)


def test_calls_of_tools_and_their_answers_read_as_transformers_reads_them(
    folders: dict[str, Path],
) -> None:
    theirs, template = AutoTokenizer.from_pretrained(folders["own"]), known(folders["own"])
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "description": "a & b's", "parameters": {"type": "object"}},
        }
    ]
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": "é"}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "0"},
        {"role": "assistant", "content": "It is 2."},
    ]
    as_object = [{**messages[0]}, {**messages[1], "content": ""}, *messages[2:]]
    as_object[1]["tool_calls"] = [{"function": {"name": "add", "arguments": {"a": "é"}}}]
    rendered = encode(template, messages, tools=tools)
    assert rendered.tokens == ids(theirs.apply_chat_template(as_object, tools=tools))
    text = theirs.decode(rendered.tokens)
    assert (
        '<|assistant|><tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|end|>'
        in text
    )
    assert "<|user|><tool_response>\n2\n</tool_response><|end|>" in text


def test_the_specials_take_along_the_blanks_that_the_tokenizer_says(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(SAMPLE, 400)._backend
    tokenizer.add_special_tokens(
        [
            tokenizers.AddedToken("<|im_start|>", lstrip=True),
            tokenizers.AddedToken("<|im_end|>", rstrip=True),
        ]
    )
    folder = saved(
        tmp_path / "strips",
        tokenizer,
        CHATML.replace("'<|im_start|>", "'  <|im_start|>"),
        EOS_TOKEN,
        "<|im_end|>",
    )
    messages = [{"role": "user", "content": "hello "}, {"role": "assistant", "content": "world  "}]
    theirs = AutoTokenizer.from_pretrained(folder)
    assert encode(known(folder), messages).tokens == ids(theirs.apply_chat_template(messages))


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_specials_that_take_along_blanks_are_cut_in_steps_that_grow_with_the_text(
    side: str,
) -> None:
    tokenizer = train_tokenizer([""], 261)._backend
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|im_end|>", **{side: True})])
    specials, steps = SpecialTokens(Tokenizer(tokenizer.to_str(), {})), []
    for turns in (10, 40):
        CountedText.steps = 0
        assert len(specials.cut(CountedText("hello  <|im_end|>  " * turns), [])) >= 2 * turns
        steps.append(CountedText.steps / turns)
    assert steps[1] < 2 * steps[0]


# --- where an answer ends -------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TWICE = [*HELLO, *HELLO]
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "it"}},
}
CALLS = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
ANSWERED = [
    HELLO[0],
    CALLS,
    {"role": "tool", "tool_call_id": "call00000", "content": "seen"},
    HELLO[1],
]

# Turns of others, and what prompts for an answer; @ stands for the answer, # for what comes after
# all.
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}<|user|>{{ m.content"
    " }}<|eot|>{% else %}<|bot|>@{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{%"
    " else %}#{% endif %}"
)
FRAMED = TURNS.replace("@", "<|resp|>{{ m.content }}<|/resp|><|eot|>\n")
CITED = TURNS.replace("@", "{{ m.content }}<|cite|>none<|eot|>")
# An empty thought is prompted with, in the manner of Command A.
PROMPTED = FRAMED.replace("<|bot|>", "<|bot|><|think|><|/think|>")
# What it thinks, calls and says is in parts of their own, in the manner of Command R7B.
PARTED = TURNS.replace(
    "@",
    "{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|/think|>{% endif %}{% for call"
    " in m.tool_calls or [] %}<|act|>[{{ call.function | tojson }}]<|/act|>{% endfor %}{% if"
    " m.content %}<|resp|>{{ m.content }}<|/resp|>{% endif %}<|eot|>",
)
# A thought ends as an answer does.
CALLING = TURNS.replace(
    "@",
    "{% if m.reasoning_content %}{{ m.reasoning_content }}<|eot|>{% endif %}{% for call in"
    " m.tool_calls or [] %}{{ call.function | tojson }}<|call|>{% else %}{{ m.content }}<|eot|>{%"
    " endfor %}",
)
# Of messages within an answer the last ends otherwise than those before it, in the manner of
# gpt-oss.
HARMONY = (
    "<|start|>system<|message|>Be kind.<|end|>{% for m in messages %}{% if m.role != 'assistant'"
    " %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% else %}{% if m.reasoning_content"
    " and loop.last or m.tool_calls %}<|start|>bot<|channel|>analysis<|message|>{{"
    " m.reasoning_content }}<|end|>{% endif %}{% for call in m.tool_calls or [] %}<|start|>bot"
    " to={{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}<|call|>{% else"
    " %}<|start|>bot<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else"
    " '<|end|>' }}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>bot{%"
    " endif %}"
)
LOOK = '{"name": "look", "arguments": {"at": "it"}}'
FINAL = "<|channel|>final<|message|>hello"
# Each with its answers: to two questions, and a thought with a call before one; and the tokens at
# which a model stops.
ENDINGS = {
    "a mark before the end": (FRAMED, "<|resp|>hello<|/resp|><|eot|>", None, {"<|eot|>"}),
    "a mark and words before the end": (CITED, "hello<|cite|>none<|eot|>", None, {"<|eot|>"}),
    "an empty thought in the prompt": (
        PROMPTED,
        "<|resp|>hello<|/resp|><|eot|>",
        None,
        {"<|eot|>"},
    ),
    "parts of their own": (
        PARTED,
        "<|resp|>hello<|/resp|><|eot|>",
        f"<|think|>hm<|/think|><|act|>[{LOOK}]<|/act|><|eot|>",
        {"<|eot|>"},
    ),
    "a thought that ends as answers do": (
        CALLING,
        "hello<|eot|>",
        f"hm<|eot|>{LOOK}<|call|>",
        {"<|eot|>", "<|call|>"},
    ),
    "texts that a token closes": (
        FRAMED.replace("#", "<|bos|>"),
        "<|resp|>hello<|/resp|><|eot|>",
        None,
        {"<|eot|>"},
    ),
    "texts that their end closes": (
        CALLING.replace("#", "{{ eos_token }}\n"),
        "hello<|eot|>",
        f"hm<|eot|>{LOOK}<|call|>",
        {"<|eot|>", "<|call|>"},
    ),
    "answers that end as texts do": (
        TURNS.replace("@", "{{ m.content + eos_token }}").replace("#", "{{ eos_token }}"),
        "hello<|eos|>",
        None,
        set(),
    ),
    "several messages": (
        HARMONY,
        f"{FINAL}<|end|>",
        (
            '<|channel|>analysis<|message|>hm<|end|><|start|>bot to=look<|message|>{"at":'
            ' "it"}<|call|>'
        ),
        {"<|return|>", "<|call|>"},
    ),
}
WHOLE_CALLS = "{% for call in m.tool_calls or [] %}"
ENDINGS |= {
    "several messages, without tools": (
        HARMONY.replace(
            WHOLE_CALLS,
            "{% if m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}" + WHOLE_CALLS,
        ),
        f"{FINAL}<|end|>",
        None,
        {"<|return|>"},
    ),
    "several messages, thoughts without calls": (
        HARMONY.replace("loop.last or m.tool_calls", "loop.last and not m.tool_calls"),
        f"{FINAL}<|end|>",
        None,
        {"<|return|>", "<|call|>"},
    ),
}
SPELLED = re.compile(r"<\|[/a-z]+\|>")


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    root = tmp_path_factory.mktemp("endings")
    return {
        name: known(
            byte_level(
                root / str(at),
                ["<|bos|>", *sorted(set(SPELLED.findall(each[0])) - {"<|bos|>"}), "<|eos|>"],
                each[0].replace("#", ""),
            )
        )
        for at, (name, each) in enumerate(ENDINGS.items())
    }


@pytest.mark.parametrize("name", ENDINGS)
def test_an_answer_is_scored_to_the_token_at_which_chats_servers_and_rollouts_stop(
    endings: dict[str, ChatTemplate], name: str
) -> None:
    template, (_, answer, call, stops) = endings[name], ENDINGS[name]
    last = answer.replace("<|end|>", "<|return|>") if "<|return|>" in stops else answer
    assert scored(template, HELLO) == last
    assert scored(template, TWICE) == answer + last
    assert scored(template, TWICE, "last") == last
    if call:
        assert scored(template, ANSWERED[:2]) == call
        assert scored(template, ANSWERED) == call + last
    ids = {template.tokenizer.token_to_id(token) for token in ("<|eos|>", *stops)}
    assert template.stop_ids == ids
    template.check_stop_token()


@pytest.mark.parametrize("name", ENDINGS)
def test_what_was_sampled_ends_where_what_is_scored_does(
    endings: dict[str, ChatTemplate], name: str
) -> None:
    template, (_, answer, call, _) = endings[name], ENDINGS[name]
    for messages, expected in ((TWICE[:3], answer), (ANSWERED[:3], call)):
        if expected is None:
            continue
        if expected.endswith("<|end|>"):  # a model would have ended it otherwise
            with pytest.raises(
                UserError,
                match=r"ends message 2 with <\|return\|>, and with <\|end\|> if more follow",
            ):
                template.layout_sampled(messages)
            continue
        [example] = encode_layouts(template.tokenizer, [template.layout_sampled(messages)])
        ids = example.tokens[example.loss_mask].tolist()
        assert template.tokenizer.decode(ids, include_special_tokens=True) == expected


def test_pieces_outside_of_tags_are_not_scored_and_an_end_outside_of_them_is_refused(
    folders: dict[str, Path],
) -> None:
    tokenizer = Tokenizer.open(folders["tagged"])
    thinks = TAGGED.replace(
        "{% generation %}", "{{ message.reasoning_content or '' }}{% generation %}"
    )
    assert (
        scored(ChatTemplate(tokenizer, thinks), [HELLO[0], HELLO[1] | {"reasoning_content": "hm"}])
        == "hello<|im_end|>"
    )
    # What ends the answer comes after a token that is tagged.
    short = TAGGED.replace("{% endgeneration %}", "{% endgeneration %}<|im_start|><|im_end|>")
    with pytest.raises(UserError, match="never scores the end of turn"):
        scored(ChatTemplate(tokenizer, short), HELLO)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "messages", "complaint"),
    [
        (CHATML.replace("+ '<|im_end|>'", ""), HELLO, "never scores the end of turn"),
        (SPEAKERS.replace(" + eos_token", ""), HELLO, "never scores the end of turn"),
        (
            SPEAKERS.replace(" + eos_token", " + (eos_token if loop.last else '')"),
            TWICE,
            "never scores the end of turn",
        ),
        (
            CHATML.replace(
                "message['content']",
                "(message['content'] if loop.last or message.role == 'user' else '...')",
            ),
            TWICE,
            "change when more follow",
        ),
        (
            CHATML.replace("assistant\n", "assistant\n<think>"),
            HELLO,
            "its prompt for message 2 differs",
        ),
        (TAGGED_SHORT, HELLO, "never scores the end of turn"),
        ("{{ raise_exception('no system') }}", HELLO, "refuses the conversation: no system"),
        ("{% for m in messages %}", HELLO, "not Jinja: line 1"),
        ("{% for a in range(99999) %}{{ 'a'.ljust(10000) }}{% endfor %}", HELLO, "wrote more than"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "unsafe"),
        ("{{ messages.append(1) }}", HELLO, "unsafe|not safely"),
    ],
)
def test_a_template_that_teaches_what_is_not_asked_or_never_ends_is_refused(
    folders: dict[str, Path], source: str, messages: list[dict[str, Any]], complaint: str
) -> None:
    tokenizer = Tokenizer.open(folders["ChatML"])
    with pytest.raises(UserError, match=complaint):
        encode(ChatTemplate(tokenizer, source), messages)


def test_the_last_turn_can_be_scored_where_a_template_rewrites_those_before(
    folders: dict[str, Path],
) -> None:
    source = CHATML.replace(
        "message['content']",
        "(message['content'] if loop.last or message.role == 'user' else '...')",
    )
    template = ChatTemplate(Tokenizer.open(folders["ChatML"]), source)
    with pytest.raises(UserError, match="score the last turn alone"):
        encode(template, TWICE)
    assert sum(encode(template, TWICE, "last").loss_mask) > 1


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "expected a list of messages"),
        ("hello", "expected a list of messages"),
        ([{"role": "user", "content": "hi"}], "no assistant turn"),
        (
            [*HELLO, {"role": "bot", "content": "hi"}],
            "message 3: role 'bot': expected one of system",
        ),
        ([*HELLO, "hi"], "message 3: expected an object with role and content"),
        ([{"role": "user"}, *HELLO], "message 1: the content is null"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "a"}]}, *HELLO],
            "message 1: the content is not text but list",
        ),
        ([{"role": "user", "content": "\ud800"}, *HELLO], "half of a surrogate pair"),
        (
            [*HELLO, {"role": "assistant", "tool_calls": ["f"]}],
            "message 3: a tool call is an object",
        ),
        (
            [*HELLO, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "the arguments of the call of f",
        ),
    ],
)
def test_messages_that_are_none_are_refused_with_their_number(
    messages: Any, complaint: str
) -> None:
    template = ChatTemplate.from_tokenizer(train_tokenizer([""], 261))
    with pytest.raises(UserError, match=complaint):
        encode(template, messages)


def test_a_prompt_does_not_end_with_an_answer_and_a_tokenizer_needs_a_way_to_chat(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(UserError, match="the last message is the assistant's"):
        known(folders["own"]).encode_prompt(HELLO)
    bare = Tokenizer.open(folders["speakers"]).files
    config = json.loads(bare["tokenizer_config.json"])
    del config["chat_template"]
    with pytest.raises(UserError, match=r"no chat template; put a chat_template\.jinja beside"):
        ChatTemplate.from_tokenizer(
            Tokenizer(bare["tokenizer.json"], {"tokenizer_config.json": json.dumps(config)})
        )


def test_an_answer_ends_with_the_end_of_turn_or_of_text(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.open(folders["own"])
    assert ChatTemplate(tokenizer, LMFORGE_TEMPLATE).stop_ids == {
        tokenizer.token_to_id(CHAT_SPECIAL_TOKENS[-1]),
        tokenizer.eos_token_id,
    }
    assert known(folders["ended"]).stop_ids == {
        Tokenizer.open(folders["ended"]).token_to_id(token) for token in ("<|im_end|>", "<|all|>")
    }


def test_a_named_template_of_several_is_the_default(folders: dict[str, Path]) -> None:
    texts = dict(Tokenizer.open(folders["ChatML"]).files)
    config = json.loads(texts["tokenizer_config.json"])
    config["chat_template"] = [
        {"name": "tool_use", "template": "{{"},
        {"name": "default", "template": CHATML},
    ]
    texts["tokenizer_config.json"] = json.dumps(config)
    assert (
        ChatTemplate.from_tokenizer(Tokenizer(texts.pop("tokenizer.json"), texts)).jinja_source
        == CHATML
    )


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ([{"name": [], "template": CHATML}], "chat_template[0].name: expected text, got []"),
        ([{"name": "default", "template": 5}], "chat_template[0].template: expected text, got 5"),
        ([{"name": "default"}], "chat_template[0].template: missing"),
        ([5], "chat_template[0]: "),
    ],
)
def test_named_templates_that_are_none_are_refused_by_field(
    templates: Any, message: str, folders: dict[str, Path]
) -> None:
    texts = dict(Tokenizer.open(folders["ChatML"]).files)
    texts["tokenizer_config.json"] = json.dumps(
        {**json.loads(texts["tokenizer_config.json"]), "chat_template": templates}
    )
    tokenizer = Tokenizer(texts.pop("tokenizer.json"), texts)
    with pytest.raises(UserError, match=re.escape(f"tokenizer_config.json: {message}")):
        ChatTemplate.from_tokenizer(tokenizer)
