"""What a loss is measured on: token shards, tokenized examples of fine-tuning, or files of text or conversations."""

from itertools import islice
from pathlib import Path

import numpy as np

from lmforge.data.chat.conversations import detect_format, read_conversations
from lmforge.data.chat.examples import EXAMPLES_MANIFEST, ExampleFolder, ExamplePacking, TokenizedExamples, example_dataset
from lmforge.data.dataset import PackedDataset, TokenDataset
from lmforge.data.packing import ConcatPacking
from lmforge.data.shards import SHARDS_MANIFEST, TokenFolder
from lmforge.data.sources.records import JSON_SUFFIXES, content_suffix, read_records
from lmforge.data.sources.text_sources import open_text_source
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.generate.model_loading import LoadedModel

ENCODE_BATCH_TEXTS = 256


def open_evaluation_dataset(loaded: LoadedModel, data: Path, split: str, sequence_length: int) -> tuple[PackedDataset, str]:
    """Sequences of `sequence_length` tokens of `data`, and the name of the split. Raises UserError.

    A prepared folder gives `split`. Files give all of their content (split "all"), tokenized with the model's tokenizer;
    attention stays within a document or conversation.
    """
    if (data / EXAMPLES_MANIFEST).exists():
        folder = ExampleFolder.open(data)
        if folder.manifest["plan"]["kind"] != "conversations":
            raise UserError(f"{data}: holds preferences, which have no language-modelling loss; name other data with --data")
        _check_tokenizer(folder.tokenizer, loaded, data)
        if not folder.manifest["splits"][split]["examples"]:
            raise UserError(f"{data}: no {split} examples; choose the other --split, or name other data with --data")
        return example_dataset(folder, split, sequence_length=sequence_length, pack=True, shuffle=False), split
    if (data / SHARDS_MANIFEST).exists() or (data.is_dir() and not any(data.iterdir())):
        tokens = TokenFolder.open(data)
        _check_tokenizer(tokens.tokenizer, loaded, data)
        return TokenDataset(tokens, split=split, sequence_length=sequence_length, shuffle=False), split
    if split != "validation":
        raise UserError(f"--split {split}: {data} is not a prepared folder, and all of it is measured; leave --split out")
    packing: ExamplePacking | ConcatPacking
    if _has_conversations(data):
        packing = _pack_conversations(loaded, data, sequence_length)
    else:
        packing = ConcatPacking(_TokenizedTexts(loaded, data), sequence_length)
    if not packing.num_sequences:
        raise UserError(f"{data}: holds nothing that can be scored; name other data with --data")
    dataset = PackedDataset(
        packing, name="measured", location=str(data), plan=[str(data)], sequence_length=sequence_length, shuffle=False
    )
    return dataset, "all"


def _check_tokenizer(data_tokenizer: Tokenizer, loaded: LoadedModel, data: Path) -> None:
    if data_tokenizer.hash != loaded.tokenizer.hash:
        raise UserError(f"{data}: prepared with another tokenizer than the model's; prepare it with --tokenizer {loaded.path}")


def _has_conversations(data: Path) -> bool:
    """Whether `data` is a file of conversations, by its first record."""
    if data.is_dir() or content_suffix(data.name) not in {*JSON_SUFFIXES, ".parquet"}:
        return False
    record, first = next(iter(read_records(data)), ("", {"text": ""}))
    try:
        return detect_format(first) != "text"
    except UserError:
        raise UserError(
            f"{record}: neither a conversation nor a text: its fields are {', '.join(sorted(first))}; rename them as"
            " docs/sft-data.md has them, or prepare the file with `lmforge prepare --text_field`"
        ) from None


def _pack_conversations(loaded: LoadedModel, data: Path, sequence_length: int) -> ExamplePacking:
    examples = [each for each in read_conversations(data, loaded.tokenizer) if each.loss_mask[1:].any()]
    if overlong := sum(len(each.tokens) - 1 > sequence_length for each in examples):
        limit = loaded.config.max_sequence_length
        most = "" if limit is None else f" of at most {limit}, which the model reads"
        raise UserError(
            f"{data}: {overlong} conversations are longer than {sequence_length} tokens; give a larger --sequence_length{most}"
        )
    starts = np.cumsum([0, *(len(each.tokens) for each in examples)]).astype(np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in examples)])
    loss_mask = np.concatenate([np.zeros(0, bool), *(each.loss_mask for each in examples)])
    return ExamplePacking(TokenizedExamples(tokens, loss_mask, starts, {}, 1, ""), sequence_length, pack=True)


class _TokenizedTexts:
    """The tokens of all documents in memory, each after the model's prefix ids and before its end-of-text token."""

    def __init__(self, loaded: LoadedModel, data: Path) -> None:
        tokenizer, documents = loaded.tokenizer, [np.zeros(0, np.int32)]
        texts = (text for unit in open_text_source(str(data)).units() for text in unit.read() if text.strip())
        while batch := [list(tokenizer.split_long_text(text)) for text in islice(texts, ENCODE_BATCH_TEXTS)]:
            encoded = iter(tokenizer.encode_batch([piece for pieces in batch for piece in pieces]))
            for pieces in batch:
                ids = [id for _ in pieces for id in next(encoded)]
                documents.append(np.array([*loaded.prefix_ids, *ids, tokenizer.eos_token_id], np.int32))
        self._ids = np.concatenate(documents)
        self._starts = np.cumsum([len(document) for document in documents])[1:-1]
        self.num_tokens = len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start + 1, stop])
        return self._starts[first:last]
