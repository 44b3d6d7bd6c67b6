"""SentencePiece models as tokenizers: trained by the real library, and compared with it id by id."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from lmforge.cli import run as command
from lmforge.core.data.sentencepiece_model import convert_sentencepiece
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import StreamDecoder, Tokenizer
from lmforge.core.errors import UserError
from tests.conftest import Refusal
from tests.text import write_documents

Trained = Callable[..., Path]
# Without combining marks: of a letter that is normalized, the library drops those that cannot be composed.
CHARACTERS = st.characters(exclude_categories=["Cs", "Cf", "Mn", "Mc", "Me"])
TEXTS = st.text(CHARACTERS, max_size=60) | st.text(alphabet=" \t\r\n(.:_<>sae1é日☃Ａﬁ\u00a0\u3000", max_size=60)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained(type, **options)`: a model file of 400 pieces."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    write_documents(folder / "text")
    lines = [
        line for file in sorted((folder / "text").iterdir())[:60] for line in file.read_text().splitlines() if line.strip()
    ]
    files: dict[str, Path] = {}

    def train(model_type: str, **options: object) -> Path:
        key = json.dumps([model_type, options])
        if key not in files:
            model = io.BytesIO()
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type=model_type,
                **{"vocab_size": 400, "num_threads": 1, "minloglevel": 3, "hard_vocab_limit": False, **options},
            )
            files[key] = folder / f"{len(files)}.model"
            files[key].write_bytes(model.getvalue())
        return files[key]

    return train


SETTINGS = [
    {
        "byte_fallback": byte_fallback,
        "normalization_rule_name": rule,
        "add_dummy_prefix": prefix,
        "remove_extra_whitespaces": runs,
    }
    for byte_fallback, (rule, prefix, runs) in product(
        (False, True), (("nmt_nfkc", True, True), ("identity", True, False), ("nmt_nfkc_cf", False, True))
    )
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: "-".join(str(value) for value in options.values()))
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_ids_and_texts_are_those_of_sentencepiece(trained: Trained, model_type: str, options: dict[str, object]) -> None:
    """Unknown characters, bytes, blanks before, between and after words, and normalization."""
    file = trained(model_type, **options)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(file)), Tokenizer.open(file)
    assert (ours.vocab_size, ours.eos_token_id, ours.bos_token_id) == (theirs.vocab_size(), theirs.eos_id(), theirs.bos_id())

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def compare(text: str) -> None:
        ids = theirs.encode(text)
        # Two orders of the same pieces have one score in a unigram model.
        assert ours.encode(text) == ids or (model_type == "unigram" and sorted(ours.encode(text)) == sorted(ids))
        if theirs.unk_id() not in ids and "▁" not in text:
            assert ours.decode(ids) == theirs.decode(ids)
            decoder = StreamDecoder(ours)
            assert "".join(map(decoder.feed, ids)) + decoder.finish() == ours.decode(ids)

    compare()
    for text in ("", " ", "   x  y ", "\n\ta", "▁a ▁▁b", "naïve ﬁve Ａ①", "e\u0301 A\u0300", "a\r\n\r\nb", "🏳️‍🌈 Привет ☃☃"):
        assert ours.encode(text) == theirs.encode(text), text


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_bytes_of_the_ids_are_those_of_the_text_and_special_tokens_have_none(trained: Trained, model_type: str) -> None:
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    ours = Tokenizer.open(trained(model_type, **options))
    text = "the word ☃ and  日本, so be it"
    ids = ours.encode(text)
    # One byte more than the text: the blank that is put before it.
    assert int(ours.token_byte_lengths()[ids].sum()) == len(text.encode()) + 1
    assert ours.decode(ids) == text
    assert ours.token_byte_lengths()[[0, 1, 2]].tolist() == [0, 0, 0]
    assert ours.decode([1, *ids, 2]) == text


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_text_that_spells_a_special_token_or_a_byte_is_text(trained: Trained, model_type: str) -> None:
    file = trained(model_type, byte_fallback=True, required_chars="<>/0x41")
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(file)), Tokenizer.open(file)
    for text in ("</s>", "a<s> b", "<unk>", "<0x41>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_user_defined_symbols_are_not_split(trained: Trained) -> None:
    for file in (
        trained("unigram", user_defined_symbols=["<sep>", "::"]),
        trained("bpe", user_defined_symbols=["<sep>", "::"], add_dummy_prefix=False, remove_extra_whitespaces=False),
    ):
        theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(file)), Tokenizer.open(file)
        for text in ("a<sep>b <sep> c::d", ":::e", "<sep><sep>"):
            assert ours.encode(text) == theirs.encode(text), text
            assert {theirs.piece_to_id("<sep>"), theirs.piece_to_id("::")} & set(ours.encode(text))


def test_a_folder_of_shards_is_prepared_with_it_and_keeps_it_as_tokenizer_json(trained: Trained, tmp_path: Path) -> None:
    file = trained("unigram")
    write_documents(tmp_path / "text")
    words = ["prepare", tmp_path / "text", tmp_path / "shards", "--tokenizer", file, "--workers", 1]
    assert command([str(word) for word in words]) == 0
    folder = TokenFolder.open(tmp_path / "shards")
    assert folder.tokenizer.hash == Tokenizer.open(file).hash == Tokenizer.open(tmp_path / "shards" / "tokenizer").hash
    split = folder.split("validation")
    ends = [*split.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
    first = split.read(0, ends[0]).tolist()
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    texts = {tuple(theirs.encode(path.read_text())) for path in (tmp_path / "text").iterdir()}
    assert tuple(first[:-1]) in texts
    assert first[-1] == theirs.eos_id()


def changed(file: Path, folder: Path, change: Callable[[ModelProto], None]) -> Path:
    """The model with something else in it."""
    proto = ModelProto()
    proto.ParseFromString(file.read_bytes())
    change(proto)
    (folder / "changed.model").write_bytes(proto.SerializeToString())
    return folder / "changed.model"


def refusals(trained: Trained, folder: Path) -> Iterator[tuple[Path, str]]:
    yield folder / "gone.model", "no such tokenizer; name a SentencePiece model"
    (folder / "broken.model").write_bytes(b"\x0a\xff\x01 no model")
    yield folder / "broken.model", "not a SentencePiece model, or damaged"
    (folder / "empty.model").write_bytes(b"")
    yield folder / "empty.model", "not a SentencePiece model, or damaged"
    yield trained("char"), "of neither unigram nor BPE type"
    yield trained("unigram", treat_whitespace_as_suffix=True), "has blanks after words"
    yield trained("unigram", eos_id=-1), "no piece of it ends a text"
    yield trained("bpe", user_defined_symbols=["::"]), "converted, it would encode"

    def retire(proto: ModelProto) -> None:
        proto.pieces[50].type = 5

    yield changed(trained("bpe"), folder, retire), "has pieces that are out of use"


def test_what_cannot_give_the_same_ids_is_refused_in_one_line(trained: Trained, tmp_path: Path) -> None:
    for file, said in refusals(trained, tmp_path):
        with pytest.raises(UserError, match=f"^{file}: .*{said}"):
            Tokenizer.open(file)


def test_preparing_with_a_broken_model_writes_nothing(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "broken.model").write_bytes(b"no model")
    (tmp_path / "a.txt").write_text("text")
    said = refused("prepare", tmp_path / "a.txt", tmp_path / "out", "--tokenizer", tmp_path / "broken.model")
    assert said.startswith(f"{tmp_path / 'broken.model'}: not a SentencePiece model")
    assert not (tmp_path / "out").exists()


def test_without_the_package_the_message_says_how_to_install_it(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    file = trained("unigram")
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(UserError, match=r"needs sentencepiece\S*, which is not installed; .*\[sentencepiece\]"):
        convert_sentencepiece(file)
