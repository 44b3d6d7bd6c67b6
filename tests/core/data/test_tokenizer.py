import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from lmforge.core.data.tokenizer import (
    CHAT_SPECIAL_TOKENS,
    EOS_TOKEN,
    MIN_VOCAB_SIZE,
    UNKNOWN_TOKEN,
    StreamDecoder,
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    train_tokenizer,
)
from lmforge.core.errors import UserError

SAMPLE = [
    "def f(x):\n    return x + 1\n\n\n# the end of it, isn't it?\n",
    "Ça va? 日本語 ☃️ 🏳️‍🌈 \t\r\n" * 3,
] * 20
TEXTS = st.text(max_size=200) | st.text(alphabet=" \t\n\r\x0b\x0c.(_a1é日", max_size=80)


def write(folder: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(specials: list[str]) -> tokenizers.Tokenizer:
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return bpe


def sentencepiece(characters: str = "▁abcdehlortwéT") -> tokenizers.Tokenizer:
    """As Llama 2's: blanks as ▁, what is not in the vocabulary as its bytes, a post-processor that
    adds <s> and </s>.
    """
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *characters,
        "▁h",
        "el",
        "▁hel",
        "lo",
    ]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o")]
    bpe = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bpe.add_special_tokens(["<unk>", "<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> <s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return bpe


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(SAMPLE, 500)


# --- our own --------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_any_text_comes_back_and_its_bytes_are_counted(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert trained.encode_batch([text, "x", text])[2] == ids
    assert int(trained.token_byte_lengths()[ids].sum()) == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS, max_size=12).map("\n".join), st.integers(1, 20))
def test_pieces_of_a_long_text_have_together_the_ids_of_the_text(
    trained: Tokenizer, text: str, length: int
) -> None:
    pieces = list(trained.split_long_text(text, length))
    assert "".join(pieces) == text
    assert [id for piece in pieces for id in trained.encode(piece)] == trained.encode(text)


def test_a_text_of_lines_is_cut_where_its_tokenizer_allows_it(
    trained: Tokenizer, tmp_path: Path
) -> None:
    text = "He said: the word\nrather low,\n\n    or so it\nseemed.\n" * 40
    assert 20 < len(list(trained.split_long_text(text, 50))) < len(text) / 50
    # A token that stands for the blank before every text would be there once a piece.
    prefixed = Tokenizer.open(write(tmp_path, sentencepiece(), eos_token="</s>"))
    assert list(prefixed.split_long_text(text, 50)) == [text]


def test_a_text_of_paragraphs_between_blank_lines_is_cut_too(trained: Tokenizer) -> None:
    text = "He said: the word, rather low.\n\n" * 100 + "Or so it seemed:\r\n\r\n  \n" * 100
    pieces = list(trained.split_long_text(text, 50))
    assert len(pieces) > 40
    assert [id for piece in pieces for id in trained.encode(piece)] == trained.encode(text)


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_text_decoded_id_by_id_is_the_same_in_complete_characters(
    trained: Tokenizer, text: str
) -> None:
    decoder = StreamDecoder(trained)
    pieces = [decoder.feed(id) for id in trained.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + decoder.finish() == text


def test_a_character_cut_short_is_kept_back_and_then_marked(
    trained: Tokenizer, byte_tokenizer: Tokenizer
) -> None:
    decoder = StreamDecoder(byte_tokenizer)
    assert [decoder.feed(id) for id in byte_tokenizer.encode("☃")[:2]] == ["", ""]
    assert decoder.finish() == "\ufffd"


def test_the_same_text_trains_the_same_tokenizer(trained: Tokenizer) -> None:
    assert train_tokenizer(SAMPLE, 500).hash == trained.hash


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_a_token_of_the_byte_tokenizer_is_a_byte(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_bytes(id) for id in ids] == [bytes([byte]) for byte in text.encode()]
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_a_token_of_the_character_tokenizer_is_a_character(text: str) -> None:
    tokenizer = character_tokenizer(text + "▁")
    ids = tokenizer.encode(text)
    assert [tokenizer.id_to_bytes(id) for id in ids] == [character.encode() for character in text]
    assert tokenizer.decode(ids) == text
    assert (
        tokenizer.decode(tokenizer.encode("▁"))
        == "▁"
        == tokenizer.id_to_bytes(tokenizer.encode("▁")[0]).decode()
    )
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.feed, ids)) == text


def test_characters_are_in_order_after_the_special_tokens_and_others_are_one_token() -> None:
    tokenizer = character_tokenizer("banana\n")
    assert tokenizer.encode("\nabn") == [6, 7, 8, 9]
    assert [tokenizer.id_to_token(id) for id in range(6)] == [
        EOS_TOKEN,
        *CHAT_SPECIAL_TOKENS,
        UNKNOWN_TOKEN,
    ]
    assert tokenizer.encode("ax☃") == [7, 5, 5]
    assert tokenizer.decode([7, 5, 8]) == "ab"
    assert tokenizer.vocab_size == 10


def test_transformers_reads_the_built_in_tokenizers_as_they_are_saved(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "Hallo, Welt\n  ▁ üa"
    for number, ours in enumerate([byte_tokenizer(), character_tokenizer(text)]):
        ours.save(tmp_path / str(number))
        theirs = AutoTokenizer.from_pretrained(tmp_path / str(number))
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
        assert theirs.eos_token == EOS_TOKEN


def test_specials_come_first_and_stand_for_no_text(trained: Tokenizer) -> None:
    assert [trained.token_to_id(token) for token in (EOS_TOKEN, *CHAT_SPECIAL_TOKENS)] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert trained.eos_token_id == 0
    assert trained.bos_token_id is None
    assert trained.token_byte_lengths()[:5].tolist() == [0] * 5
    assert trained.token_byte_lengths().shape == (trained.vocab_size,)
    assert trained.token_byte_lengths().dtype == np.int32


def test_text_that_spells_a_special_token_is_text(trained: Tokenizer) -> None:
    text = f"{EOS_TOKEN}{CHAT_SPECIAL_TOKENS[0]} and <|end|>"
    ids = trained.encode(text)
    assert not set(ids) & {0, 1, 2, 3, 4}
    assert trained.decode(ids) == text
    assert trained.decode([0, *ids, 0]) == text
    assert trained.decode([0, *ids], include_special_tokens=True) == EOS_TOKEN + text


def test_indentation_after_a_line_is_one_token(trained: Tokenizer) -> None:
    deep = train_tokenizer(["x = f(1):\n        y = 2\n" * 200], 330)
    assert len(deep.encode("):\n        ")) == 1


def test_long_runs_of_blanks_take_no_longer_than_other_text(trained: Tokenizer) -> None:
    """Quadratic matching would not end within the test's limit."""
    for blank in (" ", "\t", "\n", "\x0b", "\r", " \n"):
        assert trained.decode(trained.encode(blank * 100_000)) == blank * 100_000


@pytest.mark.parametrize("vocab_size", [-1, 0, MIN_VOCAB_SIZE - 1])
def test_a_vocabulary_too_small_for_the_bytes_is_refused(vocab_size: int) -> None:
    with pytest.raises(
        UserError, match=f"vocab_size {vocab_size}: the bytes and the special tokens alone are 261"
    ):
        train_tokenizer(SAMPLE, vocab_size)


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    assert train_tokenizer(["ab"], 5000).vocab_size == 262


def test_transformers_opens_what_was_saved_and_agrees(trained: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLE[:2]:
        assert theirs(text)["input_ids"] == trained.encode(text)
        assert theirs.decode(trained.encode(text)) == text
    assert theirs.eos_token_id == trained.eos_token_id


def test_saving_and_opening_keeps_everything(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    Tokenizer.open(tmp_path / "a").save(tmp_path / "b")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in names
    )
    assert Tokenizer.open(tmp_path / "b" / "tokenizer.json").hash == trained.hash


def test_a_decoder_that_is_written_as_a_list_of_its_values_is_the_one_with_names(
    trained: Tokenizer,
) -> None:
    file = json.loads(trained.files["tokenizer.json"])
    with_names, as_list = (
        Tokenizer(json.dumps({**file, "decoder": decoder}), {})
        for decoder in ({"type": "BPEDecoder", "suffix": "n"}, ["n"])
    )
    ids = trained.encode(SAMPLE[0])
    assert as_list.decode(ids) == with_names.decode(ids)
    assert as_list.drops_leading_space == with_names.drops_leading_space
    assert [as_list.id_to_bytes(id) for id in ids] == [with_names.id_to_bytes(id) for id in ids]


def test_a_folder_may_have_the_name_of_a_sentencepiece_file(
    trained: Tokenizer, tmp_path: Path
) -> None:
    trained.save(tmp_path / "small.model")
    assert Tokenizer.open(tmp_path / "small.model").hash == trained.hash


# --- others' --------------------------------------------------------------------------------------


def test_a_post_processor_adds_nothing(tmp_path: Path) -> None:
    bpe = byte_level(["<bos>", "<eos>"])
    plain = bpe.encode("hello there").ids
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair=None, special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    assert bpe.encode("hello there").ids == [0, *plain, 1]
    tokenizer = Tokenizer.open(write(tmp_path, bpe, eos_token="<eos>", bos_token="<bos>"))
    assert tokenizer.encode("hello there") == plain
    assert tokenizer.encode_batch(["hello there"]) == [plain]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_an_end_of_text_not_marked_special_is_still_spelled_out_in_text(tmp_path: Path) -> None:
    data = json.loads(byte_level(["<eos>", "<other>"]).to_str())
    for token in data["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = Tokenizer.open(tmp_path)
    ids = tokenizer.encode("a<eos>")
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode([*ids, 0]) == "a<eos>"


def test_truncation_and_padding_someone_left_on_are_off(tmp_path: Path) -> None:
    bpe = byte_level(["<eos>"])
    expected = bpe.encode("hello there " * 50).ids
    bpe.enable_truncation(8)
    bpe.enable_padding(length=64)
    tokenizer = Tokenizer.open(write(tmp_path, bpe, eos_token="<eos>"))
    assert tokenizer.encode("hello there " * 50) == expected
    assert len(tokenizer.encode_batch(["a", "hello"])[0]) == 1


def test_a_sentencepiece_vocabulary_counts_blanks_and_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, sentencepiece(), eos_token="</s>", bos_token="<s>"))
    text = "hello world ☃ </s>"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text
    # One byte more than the text: the blank this kind puts before it.
    assert int(tokenizer.token_byte_lengths()[ids].sum()) == len(text.encode()) + 1
    assert tokenizer.token_byte_lengths()[[0, 1, 2]].tolist() == [0, 0, 0]
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed(id) for id in ids) + decoder.finish() == text


@pytest.mark.parametrize("prepend_scheme", ["always", "first", "never"])
def test_a_unigram_vocabulary_with_metaspace_decodes_as_it_comes(
    tmp_path: Path, prepend_scheme: str
) -> None:
    unigram = tokenizers.Tokenizer(
        models.Unigram(
            [("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "▁helowrd"), ("▁hello", -1.0)],
            unk_id=0,
        )
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    unigram.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    unigram.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer.open(write(tmp_path, unigram))
    assert tokenizer.eos_token_id == 1
    for text in ("hello world", " hello  world ", "world"):
        ids = tokenizer.encode(text)
        decoder = StreamDecoder(tokenizer)
        assert "".join(decoder.feed(id) for id in ids) + decoder.finish() == tokenizer.decode(ids)


def test_a_wordpiece_vocabulary_decodes_as_it_comes(tmp_path: Path) -> None:
    vocabulary = {
        token: i for i, token in enumerate(["[UNK]", "[SEP]", "hel", "##lo", "world", "##s"])
    }
    wordpiece = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.decoder = decoders.WordPiece(cleanup=False)
    wordpiece.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = Tokenizer.open(write(tmp_path, wordpiece, eos_token="[SEP]"))
    ids = tokenizer.encode("hello worlds")
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed(id) for id in ids) == tokenizer.decode(ids) == "hello worlds"


def test_a_vocabulary_of_words_without_a_decoder_decodes_as_it_comes(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(
        models.WordLevel({"<eos>": 0, "[UNK]": 1, "hello": 2, "world": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>", "[UNK]"])
    tokenizer = Tokenizer.open(write(tmp_path, words, eos_token="<eos>"))
    ids = tokenizer.encode("hello world hello")
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.feed(id) for id in ids) == tokenizer.decode(ids) == "hello world hello"


def test_the_end_of_text_is_found_wherever_it_is_written(tmp_path: Path) -> None:
    two = byte_level(["<a>", "<b>"])
    assert Tokenizer.open(write(tmp_path / "1", two, eos_token="<b>")).eos_token_id == 1
    assert (
        Tokenizer.open(
            write(tmp_path / "2", two, eos_token={"content": "<b>", "special": True})
        ).eos_token_id
        == 1
    )
    write(tmp_path / "3", two)
    (tmp_path / "3" / "special_tokens_map.json").write_text('{"eos_token": {"content": "<a>"}}')
    assert Tokenizer.open(tmp_path / "3" / "tokenizer.json").eos_token_id == 0
    assert (
        Tokenizer.open(write(tmp_path / "4", byte_level(["<s>", "</s>", "<pad>"]))).eos_token_id
        == 1
    )


def test_a_tokenizer_that_does_not_say_how_a_document_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'cannot tell which token ends a document: .* says "eos_token"'
    ):
        Tokenizer.open(write(tmp_path, byte_level(["<a>", "<b>"])))


def test_an_end_of_text_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no token \"<z>\", which tokenizer_config\.json says is its eos_token"
    ):
        Tokenizer.open(write(tmp_path, byte_level(["<a>"]), eos_token="<z>"))


def test_the_hash_ignores_spacing_and_sees_the_separator(tmp_path: Path) -> None:
    two = byte_level(["<a>", "<b>"])
    first = Tokenizer.open(write(tmp_path / "1", two, eos_token="<a>"))
    (tmp_path / "1" / "tokenizer.json").write_text(json.dumps(json.loads(two.to_str()), indent=7))
    assert Tokenizer.open(tmp_path / "1").hash == first.hash
    assert Tokenizer.open(write(tmp_path / "2", two, eos_token="<b>")).hash != first.hash


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 3}', "not json"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json: .*not a tokenizer\.json this can open"):
        Tokenizer.open(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no such tokenizer; name a tokenizer\.json or a folder that holds one"
    ):
        Tokenizer.open(tmp_path / "none")


def changed(folder: Path, trained: Tokenizer, **parts: Any) -> Path:
    """A folder with the trained tokenizer, and other parts in its tokenizer.json."""
    trained.save(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return folder


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "retry",
        ),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "unk_id"),
    ],
)
def test_what_the_library_cannot_encode_is_named_with_the_file(
    parts: dict[str, Any], message: str, trained: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.open(changed(tmp_path, trained, **parts))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(
            UserError, match=f"{tmp_path}/tokenizer.json: cannot encode a text: .*{message}"
        ):
            encode("a" * 60 + "b")


LETTERS = {"a": 0, "b": 1, "é": 2, "ab": 3, "xb": 4, "axb": 5}


@pytest.mark.parametrize(
    ("prefix", "merges", "message"),
    [
        (
            "x",
            [["a", "xb"], ["a", "é"]],
            (
                "model.merges[1]: expected a second token that begins with the"
                " continuing_subword_prefix"
            ),
        ),
        ("x", ["a é"], 'continuing_subword_prefix "x", got "a é"'),
        ("xxxxxx", [["a", "b"]], "model.merges[0]: expected"),
        ("éé", [["a", "b"]], "model.merges[0]: expected"),
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_a_prefix_over_which_the_library_would_end_the_process_is_refused(
    twice: bool, prefix: str, merges: list[Any], message: str, trained: Tokenizer, tmp_path: Path
) -> None:
    model = {"type": "BPE", "vocab": LETTERS, "merges": merges, "continuing_subword_prefix": prefix}
    path = changed(tmp_path, trained, model=model) / "tokenizer.json"
    if twice:  # of a key that is there twice, the library kept the first where the second is null
        path.write_text(
            path.read_text().replace(
                '"continuing_subword_prefix"',
                '"continuing_subword_prefix": null, "continuing_subword_prefix"',
            )
        )
    with pytest.raises(UserError) as caught:
        Tokenizer.open(tmp_path)
    assert str(caught.value).startswith(f"{path}: model.merges[")
    assert message in str(caught.value)


def test_the_library_reads_the_json_that_was_checked(trained: Tokenizer, tmp_path: Path) -> None:
    path = changed(tmp_path, trained) / "tokenizer.json"
    prefix = '"continuing_subword_prefix"'
    assert f"{prefix}: null" in path.read_text()
    path.write_text(path.read_text().replace(f"{prefix}: null", f'{prefix}: "x", {prefix}: null'))
    assert Tokenizer.open(tmp_path).encode("def f(x):") == trained.encode("def f(x):")


def test_merges_whose_tokens_begin_with_the_prefix_are_read(
    trained: Tokenizer, tmp_path: Path
) -> None:
    model = {
        "type": "BPE",
        "vocab": LETTERS,
        "merges": [["a", "xb"]],
        "continuing_subword_prefix": "x",
    }
    end = {**json.loads(trained.files["tokenizer.json"])["added_tokens"][0], "id": len(LETTERS)}
    tokenizer = Tokenizer.open(
        changed(tmp_path, trained, model=model, pre_tokenizer=None, added_tokens=[end])
    )
    assert tokenizer.encode("ab") == [3]


@pytest.mark.parametrize("id", [10**9, 3, 7])
def test_an_added_token_with_another_id_than_the_library_gives_it_is_refused(
    id: int, trained: Tokenizer, tmp_path: Path
) -> None:
    known = json.loads(trained.files["tokenizer.json"])["added_tokens"]
    added = [*known, {**known[0], "content": "<|more|>", "id": id}]
    path = changed(tmp_path, trained, added_tokens=added) / "tokenizer.json"
    with pytest.raises(
        UserError,
        match=(
            rf"json: added_tokens\[{len(known)}\].id: {id}, but the library gives \"<\|more\|>\""
            r" the id"
        ),
    ):
        Tokenizer.open(path)


def test_a_file_over_which_the_library_panics_is_named(trained: Tokenizer, tmp_path: Path) -> None:
    folder = changed(tmp_path, trained, model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]})
    with pytest.raises(UserError, match=r"not a tokenizer\.json this can open"):
        Tokenizer.open(folder)


@pytest.mark.parametrize(
    ("part", "step", "message"),
    [
        (
            "decoder",
            {"type": "Strip", "content": " ", "start": 0, "stop": 2},
            "decoder: Strip: expected 0 as its stop, got 2",
        ),
        ("normalizer", {"type": "Prepend", "prepend": ""}, "normalizer: Prepend: prepends nothing"),
        ("normalizer", [""], "normalizer: Prepend: prepends nothing"),  # its values alone
        (
            "normalizer",
            {"type": "Replace", "pattern": {"String": ""}, "content": "-"},
            'Replace: its pattern "" matches',
        ),
        (
            "normalizer",
            {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "-"},
            'Replace: its pattern "x*" matches',
        ),
        (
            "normalizer",
            {"type": "Precompiled", "precompiled_charsmap": "BAAAAAD/AAA="},
            "precompiled_charsmap is damaged",
        ),
        ("normalizer", {"type": "Precompiled"}, "precompiled_charsmap is damaged"),
    ],
)
def test_a_step_over_which_the_library_would_panic_is_refused_in_one_line(
    part: str,
    step: dict[str, Any],
    message: str,
    trained: Tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = (
        changed(tmp_path, trained, **{part: {"type": "Sequence", f"{part}s": [step]}})
        / "tokenizer.json"
    )
    with pytest.raises(UserError, match=f"{path}: .*{re.escape(message)}"):
        Tokenizer.open(path).decode(Tokenizer.open(path).encode("  a"))
    assert capfd.readouterr().err == ""


def test_what_the_library_cannot_decode_is_named_with_the_file(
    trained: Tokenizer, tmp_path: Path
) -> None:
    byte_level = json.loads(trained.files["tokenizer.json"])["decoder"]
    steps = [byte_level, {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}]
    tokenizer = Tokenizer.open(
        changed(tmp_path, trained, decoder={"type": "Sequence", "decoders": steps})
    )
    with pytest.raises(UserError, match=f"{tmp_path}/tokenizer.json: cannot decode ids: "):
        tokenizer.decode(trained.encode("a" * 60 + "b"))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("field", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_that_are_no_list_are_refused_by_field(
    tmp_path: Path, field: str, file: str
) -> None:
    train_tokenizer(["to be or not"], 270).save(tmp_path)
    (tmp_path / file).write_text(json.dumps({field: 5}))
    with pytest.raises(UserError, match=f"{field}: expected a list, got 5"):
        Tokenizer.open(tmp_path)
