"""SentencePiece models: refused with the command that writes a tokenizer.json, which is carried out
here.
"""

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from tests.conftest import Refusal
from tests.support.text import write_documents


def write_model(folder: Path) -> Path:
    """A folder as Llama 2 was published: a SentencePiece model of 400 pieces, and the name of its
    class.
    """
    write_documents(folder / "text")
    texts = [file.read_text() for file in sorted((folder / "text").iterdir())[:60]]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        num_threads=1,
        minloglevel=3,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
    )
    path = folder / "it's llama"
    path.mkdir()
    (path / "tokenizer.model").write_bytes(model.getvalue())
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return path


@pytest.mark.slow
def test_the_command_of_the_message_writes_a_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(UserError, match="a SentencePiece model is not read") as refused:
        Tokenizer.open(folder)
    assert str(refused.value).startswith(f"{folder / 'tokenizer.model'}: ")
    python, *words = shlex.split(str(refused.value)[str(refused.value).index("python -c") :])
    assert python == "python"
    subprocess.run([sys.executable, *words], check=True)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = Tokenizer.open(folder)
    assert (ours.vocab_size, ours.eos_token_id) == (theirs.vocab_size(), theirs.eos_id())
    for text in ("the word", "x  y ", "a\n\ta", "a\r\n\r\nb", "naïve 日本 ☃"):
        assert ours.encode(text) == theirs.encode(text), text


def test_a_model_file_of_another_name_is_refused_before_anything_is_written(
    tmp_path: Path, refused: Refusal
) -> None:
    (tmp_path / "small.model").write_bytes(b"pieces")
    (tmp_path / "a.txt").write_text("text")
    said = refused(
        "prepare", tmp_path / "a.txt", tmp_path / "out", "--tokenizer", tmp_path / "small.model"
    )
    assert said.startswith(
        f"{tmp_path / 'small.model'}: a SentencePiece model is not read; name it tokenizer.model,"
        " and write"
    )
    assert not (tmp_path / "out").exists()


def test_a_model_file_that_is_not_there_is_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer.open(tmp_path / "gone.model")
