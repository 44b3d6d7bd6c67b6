"""What a loss is measured on: token shards, the examples that a run was tuned on, or files of text or conversations."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lmforge.data.chat.conversations import detect_format, read_conversations
from lmforge.data.chat.examples import EXAMPLES_MANIFEST as EXAMPLES
from lmforge.data.chat.examples import ExampleFolder, ExamplePacking, TokenizedExamples, example_dataset
from lmforge.data.dataset import PackedDataset, TokenDataset
from lmforge.data.packing import ConcatPacking, TokenizedExample
from lmforge.data.shards import SHARDS_MANIFEST as SHARDS
from lmforge.data.shards import TokenFolder
from lmforge.data.sources.records import JSON_SUFFIXES, content_suffix, read_records
from lmforge.data.sources.text_sources import open_text_source
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.generate.model_loading import LoadedModel

ENCODE_BATCH_TEXTS = 256


def open_evaluation_dataset(loaded: LoadedModel, data: Path, split: str, sequence_length: int) -> tuple[PackedDataset, str]:
    """Rows of `length` tokens of what `data` names, and which part of it that is. Raises UserError.

    Of prepared folders that is `split`; of files it is all of them, made tokens by the model's tokenizer, each document or
    conversation by itself.
    """
    if (data / EXAMPLES).exists():
        folder = ExampleFolder.open(data)
        if folder.manifest["plan"]["kind"] != "conversations":
            raise UserError(
                f"{data}: holds pairs or judged answers, which have no loss of their own; name other data with --data"
            )
        _check_tokenizer(folder.tokenizer, loaded, data)
        if not folder.manifest["splits"][split]["examples"]:
            raise UserError(f"{data}: has no {split} examples; choose the other split, or name other data with --data")
        return example_dataset(folder, split, sequence_length=sequence_length, pack=True, shuffle=False), split
    if (data / SHARDS).exists() or (data.is_dir() and not any(data.iterdir())):
        tokens = TokenFolder.open(data)
        _check_tokenizer(tokens.tokenizer, loaded, data)
        return TokenDataset(tokens, split=split, sequence_length=sequence_length, shuffle=False), split
    if split != "validation":
        raise UserError(f"--split {split}: {data} is not prepared, and all of it is measured; leave it out")
    packing = (
        _pack_conversations(loaded, data, sequence_length)
        if _has_conversations(data)
        else _pack_texts(loaded, data, sequence_length)
    )
    if not packing.num_sequences:
        raise UserError(f"{data}: holds nothing that can be scored; name other data with --data")
    return PackedDataset(
        packing, name="measured", location=str(data), plan=[str(data)], sequence_length=sequence_length, shuffle=False
    ), "all"


def _check_tokenizer(data_tokenizer: Tokenizer, loaded: LoadedModel, data: Path) -> None:
    if data_tokenizer.hash != loaded.tokenizer.hash:
        raise UserError(f"{data}: prepared with another tokenizer than the model's; prepare it with --tokenizer {loaded.path}")


def _has_conversations(data: Path) -> bool:
    """Whether records are more than a text each, by the first one."""
    if data.is_dir() or content_suffix(data.name) not in {*JSON_SUFFIXES, ".parquet"}:
        return False
    place, first = next(iter(read_records(data)), ("", {"text": ""}))
    try:
        return detect_format(first) != "text"
    except UserError:
        raise UserError(
            f"{place}: neither a conversation nor a text: its fields are {', '.join(sorted(first))}; rename them as"
            " docs/sft-data.md has them, or prepare the file with `lmforge prepare --text_field`"
        ) from None


def _pack_conversations(loaded: LoadedModel, data: Path, sequence_length: int) -> ExamplePacking:
    sequences = [each for each in read_conversations(data, loaded.tokenizer) if each.loss_mask[1:].any()]
    whole = [each for each in sequences if len(each.tokens) - 1 <= sequence_length]
    if longer := len(sequences) - len(whole):
        limit = loaded.config.max_sequence_length
        most = "" if limit is None else f" of at most the {limit} that the model reads"
        raise UserError(
            f"{data}: {longer} conversations are longer than {sequence_length} tokens; give a larger --length{most}"
        )
    return ExamplePacking(_as_examples(whole), sequence_length, pack=True)


def _as_examples(sequences: list[TokenizedExample]) -> TokenizedExamples:
    starts = np.concatenate(([0], np.cumsum([len(each.tokens) for each in sequences]))).astype(np.int64)
    nothing = TokenizedExample(np.zeros(0, np.int32), np.zeros(0, bool))
    tokens, scored = (np.concatenate([getattr(each, name) for each in (nothing, *sequences)]) for name in ("tokens", "scored"))
    return TokenizedExamples(tokens, scored, starts, {}, 1, "")


class _TokenizedTexts:
    """Documents one after another as tokens in memory, each begun and ended as the model has texts begin and end."""

    def __init__(self, texts: Iterable[str], loaded: LoadedModel) -> None:
        tokenizer, documents, lengths = loaded.tokenizer, [np.zeros(0, np.int32)], []
        remaining = iter(texts)
        while some := [list(tokenizer.split_long_text(text)) for text in islice(remaining, ENCODE_BATCH_TEXTS)]:
            ids = iter(tokenizer.encode_batch([piece for pieces in some for piece in pieces]))
            for pieces in some:
                of_text = [id for _ in pieces for id in next(ids)]
                documents.append(np.array([*loaded.prefix_ids, *of_text, tokenizer.eos_token_id], np.int32))
                lengths.append(len(documents[-1]))
        self._ids = np.concatenate(documents)
        self._starts = np.cumsum([0, *lengths])[1:-1]
        self.num_tokens = len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start + 1, stop])
        return self._starts[first:last]


def _pack_texts(loaded: LoadedModel, data: Path, sequence_length: int) -> ConcatPacking:
    def texts() -> Iterator[str]:
        for unit in open_text_source(str(data)).units():
            yield from (text for text in unit.read() if text.strip())

    return ConcatPacking(_TokenizedTexts(texts(), loaded), sequence_length)
