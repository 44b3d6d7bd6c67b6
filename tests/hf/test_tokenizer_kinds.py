"""Unigram and WordPiece vocabularies of a tokenizer.json, end to end: preparation, decoding,
counting, generation and chat.
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmforge.cli import run as command
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.tokenizer import CHAT_SPECIAL_TOKENS, EOS_TOKEN, Tokenizer
from lmforge.core.model.layers import LanguageModel
from lmforge.hf.export import export_folder
from tests.conftest import Command

SPECIALS = ["<unk>", EOS_TOKEN, *CHAT_SPECIAL_TOKENS]
LINES = [
    "the cat sat on a mat and saw dogs",
    "a dog is here; where is the cat?",
    "the tale of two cities <|> | end user",
] * 30


def unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(
        LINES,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
        ),
    )
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        LINES,
        trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIALS, show_progress=False),
    )
    return tokenizer


@pytest.fixture(scope="module", params=[unigram, wordpiece])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("kind")
    request.param().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS_TOKEN, "unk_token": "<unk>"})
    )
    return folder


def test_documents_are_prepared_and_read_back_as_they_were(
    kind: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["the cat sat on a mat", "where is the cat", "two dogs and a tale"]
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    words = [
        "prepare",
        tmp_path / "texts.jsonl",
        tmp_path / "out",
        "--tokenizer",
        kind,
        "--workers",
        1,
    ]
    assert command([str(word) for word in words]) == 0
    folder = TokenFolder.open(tmp_path / "out")
    tokenizer, documents = folder.tokenizer, []
    for split in map(folder.split, folder.splits):
        bounds = [0, *split.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
        documents += [split.read(start, end).tolist() for start, end in pairwise(bounds)]
    assert {document[-1] for document in documents} == {tokenizer.eos_token_id}
    assert sorted(tokenizer.decode(document) for document in documents) == sorted(texts)
    text_bytes = sum(map(len, texts))
    assert sum(folder.manifest.text_bytes.values()) == text_bytes
    assert "bytes per token" in capsys.readouterr().out
    # Each begins with a blank that is not in the text.
    assert int(
        tokenizer.token_byte_lengths()[[id for document in documents for id in document]].sum()
    ) == text_bytes + len(texts)


def test_special_tokens_are_no_text_and_no_text_spells_them(kind: Path) -> None:
    tokenizer = Tokenizer.open(kind)
    special = {tokenizer.token_to_id(token) for token in SPECIALS}
    assert len(special) == len(SPECIALS)
    assert tokenizer.token_byte_lengths()[sorted(filter(None, special))].sum() == 0
    for token in (EOS_TOKEN, "<|user|>", "<|end|>"):
        ids = tokenizer.encode(f"the {token} cat {token}")
        assert not set(ids) & (special - {tokenizer.token_to_id("<unk>")}), [
            tokenizer.id_to_token(id) for id in ids
        ]
    assert tokenizer.decode([tokenizer.eos_token_id, *tokenizer.encode("the cat")]) == "the cat"
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(kind / "tokenizer.json"), eos_token=EOS_TOKEN, unk_token="<unk>"
    )
    for text in (
        "<|user|>the cat<|end|><|assistant|>",
        f"the cat {EOS_TOKEN} dogs <|end|>",
        "where is",
        "",
    ):
        assert (
            tokenizer.encode(text, parse_special_tokens=True)
            == theirs(text, add_special_tokens=False)["input_ids"]
        )


def test_a_model_generates_and_answers_in_it(
    kind: Path, tmp_path: Path, lmforge: Command, scripted: Callable[..., LanguageModel]
) -> None:
    """The model goes on from one token of the answer to the next, and then ends."""
    tokenizer, answer = Tokenizer.open(kind), "dogs where"
    ids = tokenizer.encode(answer)
    assert len(set(ids)) == len(ids), "each token has one successor"
    prompt, ends = tokenizer.token_to_id("<|assistant|>"), tokenizer.token_to_id("<|end|>")
    model = scripted(dict(pairwise([prompt, *ids, ends])), tokenizer.vocab_size)
    export_folder(model, model.config, tmp_path / "model", tokenizer_folder=kind)
    said = lmforge(
        "chat", tmp_path / "model", "--temperature", 0, "--device", "cpu", stdin="the cat\n"
    )
    assert (said.returncode, said.stdout) == (0, f"{answer}\n"), said.stderr
    first = tokenizer.decode(ids[:1])
    words = [first, "--temperature", 0, "--max_tokens", len(ids) - 1, "--device", "cpu"]
    written = lmforge("generate", tmp_path / "model", *words)
    assert (written.returncode, written.stdout) == (0, f"{answer}\n"), written.stderr
