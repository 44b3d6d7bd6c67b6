"""What a loss is measured on: token shards, the examples that a run was tuned on, or files of text or conversations."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lmforge.data.conversations import Example, found_format, read_conversations
from lmforge.data.documents import LINES, open_source, suffix
from lmforge.data.examples import MANIFEST as EXAMPLES
from lmforge.data.examples import ExampleFolder, Examples, Packed, example_rows
from lmforge.data.packing import Concat
from lmforge.data.records import read_records
from lmforge.data.shards import MANIFEST as SHARDS
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Rows, Stream
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake
from lmforge.infer.opening import Opened

READ_AT_ONCE = 256


def measured_rows(opened: Opened, data: Path, split: str, length: int) -> tuple[Rows, str]:
    """Rows of `length` tokens of what `data` names, and which part of it that is. Raises Mistake.

    Of prepared folders that is `split`; of files it is all of them, made tokens by the model's tokenizer, each document or
    conversation by itself.
    """
    if (data / EXAMPLES).exists():
        folder = ExampleFolder.open(data)
        if folder.manifest["plan"]["kind"] != "conversations":
            raise Mistake(
                f"{data}: holds pairs or judged answers, which have no loss of their own; name other data with --data"
            )
        _check_tokenizer(folder.tokenizer, opened, data)
        if not folder.manifest["splits"][split]["examples"]:
            raise Mistake(f"{data}: has no {split} examples; choose the other split, or name other data with --data")
        return example_rows(folder, split, length=length, fit=True, shuffle=False), split
    if (data / SHARDS).exists() or (data.is_dir() and not any(data.iterdir())):
        tokens = TokenFolder.open(data)
        _check_tokenizer(tokens.tokenizer, opened, data)
        return Stream(tokens, split=split, length=length, shuffle=False), split
    if split != "held_out":
        raise Mistake(f"--split {split}: {data} is not prepared, and all of it is measured; leave it out")
    packing = _conversations(opened, data, length) if _holds_conversations(data) else _texts(opened, data, length)
    if not packing.rows:
        raise Mistake(f"{data}: holds nothing that can be scored; name other data with --data")
    return Rows(packing, name="measured", where=str(data), plan=[str(data)], length=length, shuffle=False), "all"


def _check_tokenizer(theirs: Tokenizer, opened: Opened, data: Path) -> None:
    if theirs.hash != opened.tokenizer.hash:
        raise Mistake(f"{data}: prepared with another tokenizer than the model's; prepare it with --tokenizer {opened.origin}")


def _holds_conversations(data: Path) -> bool:
    """Whether records are more than a text each, by the first one."""
    if data.is_dir() or suffix(data.name) not in {*LINES, ".parquet"}:
        return False
    place, first = next(iter(read_records(data)), ("", {"text": ""}))
    try:
        return found_format(first) != "text"
    except Mistake:
        raise Mistake(
            f"{place}: neither a conversation nor a text: its fields are {', '.join(sorted(first))}; rename them as"
            " docs/sft-data.md has them, or prepare the file with `lmforge prepare --text_field`"
        ) from None


def _conversations(opened: Opened, data: Path, length: int) -> Packed:
    sequences = [each for each in read_conversations(data, opened.tokenizer) if each.scored[1:].any()]
    whole = [each for each in sequences if len(each.tokens) - 1 <= length]
    if longer := len(sequences) - len(whole):
        limit = opened.config.longest_row_tokens
        most = "" if limit is None else f" of at most the {limit} that the model reads"
        raise Mistake(f"{data}: {longer} conversations are longer than {length} tokens; give a larger --length{most}")
    return Packed(_as_examples(whole), length, fit=True)


def _as_examples(sequences: list[Example]) -> Examples:
    starts = np.concatenate(([0], np.cumsum([len(each.tokens) for each in sequences]))).astype(np.int64)
    nothing = Example(np.zeros(0, np.int32), np.zeros(0, bool))
    tokens, scored = (np.concatenate([getattr(each, name) for each in (nothing, *sequences)]) for name in ("tokens", "scored"))
    return Examples(tokens, scored, starts, {}, 1, "")


class _Texts:
    """Documents one after another as tokens in memory, each begun and ended as the model has texts begin and end."""

    def __init__(self, texts: Iterable[str], opened: Opened) -> None:
        tokenizer, documents, lengths = opened.tokenizer, [np.zeros(0, np.int32)], []
        remaining = iter(texts)
        while some := [list(tokenizer.pieces(text)) for text in islice(remaining, READ_AT_ONCE)]:
            ids = iter(tokenizer.encode_batch([piece for pieces in some for piece in pieces]))
            for pieces in some:
                of_text = [id for _ in pieces for id in next(ids)]
                documents.append(np.array([*opened.opening, *of_text, tokenizer.separator_id], np.int32))
                lengths.append(len(documents[-1]))
        self._ids = np.concatenate(documents)
        self._starts = np.cumsum([0, *lengths])[1:-1]
        self.tokens = len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start + 1, stop])
        return self._starts[first:last]


def _texts(opened: Opened, data: Path, length: int) -> Concat:
    def texts() -> Iterator[str]:
        for unit in open_source(str(data)).units():
            yield from (document.text for document in unit.read() if document.text.strip())

    return Concat(_Texts(texts(), opened), length)
