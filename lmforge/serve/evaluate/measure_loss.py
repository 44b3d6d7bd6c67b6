"""The loss of a loaded model on documents given by name.

They are token shards, tokenized examples, or files of text or conversations.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmforge.core.data.dataset import PackedDataset, TokenDataset, join_datasets
from lmforge.core.data.packing import ConcatPacking, TokenizedExample
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.distributed.memory import check_fits
from lmforge.core.errors import UserError
from lmforge.core.losses.logprobs import score_text
from lmforge.core.records.kinds import Kind, kind_of
from lmforge.core.records.runs import is_local
from lmforge.core.steps.perplexity import evaluate_loss, local_batches
from lmforge.serve.decoding.model_loading import LoadedModel
from lmforge.serve.decoding.prompts import check_token_ids
from lmforge.text.chat.conversations import detect_format, read_conversations
from lmforge.text.chat.examples import (
    ExampleFolder,
    ExamplePacking,
    TokenizedExamples,
    example_dataset,
)
from lmforge.text.sources.folders import FileSplit, content_suffix, describe_left_out, find_files
from lmforge.text.sources.records import (
    RECORD_SUFFIXES,
    UnusableRecords,
    describe_folders,
    read_records,
)
from lmforge.text.sources.text_sources import TextSource, open_text_source

ENCODE_BATCH_TEXTS = 256
DEFAULT_SEQUENCE_LENGTH = 1024
# Sequences; batches up to this size are as they were requested, so that results do not depend on
# the data.
MIN_BATCH_LIMIT = 16


def measure_loss(
    loaded: LoadedModel,
    dist_ctx: DistributedContext,
    *,
    data: Path | None,
    split: FileSplit,
    sequences: int | None,
    sequence_length: int | None,
    batch_size: int,
    reading: Mapping[str, bool] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The loss of a model, and what it was measured on. Every rank calls it.

    Returns loss (nats per token), perplexity, bits_per_byte, tokens and bytes, and of several
    sources those of each, such as `loss/NAME`. Raises UserError for data that cannot be used.

    data             token shards, or files of text or conversations; None: what the model was
                     trained on
    split            "validation" or "train" of prepared data, or of a folder of files whose names
                     tell splits
    sequences        how many, evenly spaced over the split; None: all
    sequence_length  in tokens; None: as in training
    batch_size       sequences in one forward pass
    reading          of files of conversations: `split_turns`, `ignore_media` and `skip_invalid`, as
                     in a recipe
    """
    sources = {str(data): data} if data else loaded.training_data
    if not sources:
        raise UserError(
            f"{loaded.path}: does not say what it was trained on; name files or token shards with"
            " --data"
        )
    trained_on = (loaded.recipe or {}).get("data", {})
    length = sequence_length or trained_on.get("sequence_length") or DEFAULT_SEQUENCE_LENGTH
    if loaded.config.max_sequence_length is not None:
        length = min(length, loaded.config.max_sequence_length)
    with dist_ctx.raise_on_all():
        dataset, measured = open_evaluation_dataset(loaded, sources, split, length, reading or {})
    # Sequences beyond the data would be padding.
    sequences_per_rank = -(-dataset.sequences_per_epoch // dist_ctx.world_size)
    batch_size = min(batch_size, max(MIN_BATCH_LIMIT, sequences_per_rank))
    with dist_ctx.raise_on_all():
        # A lower bound: the batch, the residual stream and a block's output.
        bytes_per_token = 64 + 2 * 4 * loaded.config.hidden_size
        what = f"{batch_size:,} sequences of {length:,} tokens"
        way = "give a smaller --batch_size or --sequence_length"
        check_fits(batch_size * length * bytes_per_token, dist_ctx.device, what, way)
    if loaded.tokenizer.vocab_size > loaded.config.vocab_size:
        share = (dist_ctx.rank_info.rank, dist_ctx.world_size)
        with dist_ctx.raise_on_all():
            for batch in local_batches(dataset, share, sequences, batch_size):
                ids = torch.stack([batch.tokens, batch.labels.clamp(min=0)]).unique().tolist()
                check_token_ids(ids, loaded.config.vocab_size, "the data")
    token_bytes = torch.from_numpy(loaded.tokenizer.token_byte_lengths()).to(dist_ctx.device)
    result = evaluate_loss(
        lambda batch: score_text(loaded.model, batch, token_bytes),
        dataset,
        dist_ctx,
        num_sequences=sequences,
        batch_size=batch_size,
        on_progress=on_progress,
    )
    counts = {
        name: int(value) for name, value in result.items() if name.startswith(("tokens", "bytes"))
    }
    return {
        "model": str(loaded.path),
        "data": ", ".join(map(str, sources.values())),
        "split": measured,
        "sequence_length": length,
        **result,
        **counts,
    }


def open_evaluation_dataset(
    loaded: LoadedModel,
    sources: Mapping[str, Path],
    split: FileSplit,
    sequence_length: int,
    reading: Mapping[str, bool],
) -> tuple[PackedDataset, str]:
    """Sequences of the tokens of sources by name, and the name of the split. Raises UserError.

    A token folder gives `split`. Several folders are joined, without those that lack it. Files give
    all of their content (split "all", with what is left out of a folder), tokenized with the
    model's tokenizer; attention stays within a document or conversation.
    """
    if len(sources) == 1:
        data = next(iter(sources.values()))
        folder = _open_prepared(loaded, data)
        if folder is None:
            return _open_files(loaded, data, split, sequence_length, reading)
        return _open_split(folder, split, sequence_length), split
    # Opening raises where a folder is no longer there.
    folders = {
        name: _open_prepared(loaded, data) or TokenFolder.open(data)
        for name, data in sources.items()
    }
    with_split = {name: each for name, each in folders.items() if _has_split(each, split)}
    datasets = {
        name: _open_split(each, split, sequence_length)
        for name, each in (with_split or folders).items()
    }
    return join_datasets(datasets), split


def _open_prepared(loaded: LoadedModel, data: Path) -> ExampleFolder | TokenFolder | None:
    """A folder of tokens or examples by the model's tokenizer; None for files."""
    folder: ExampleFolder | TokenFolder
    kind = kind_of(data)
    if kind == Kind.EXAMPLES:
        folder = ExampleFolder.open(data)
        if folder.manifest["plan"]["kind"] != "conversations":
            raise UserError(
                f"{data}: holds preferences, which have no language-modelling loss; name other data"
                " with --data"
            )
    elif (
        not is_local(data)
        or kind == Kind.TOKENS
        or (kind == Kind.FOLDER and not any(data.iterdir()))
    ):
        folder = TokenFolder.open(data)
    else:
        return None
    if folder.tokenizer.hash != loaded.tokenizer.hash:
        raise UserError(
            f"{data}: prepared with another tokenizer than the model's; prepare it with --tokenizer"
            f" {loaded.path}"
        )
    return folder


def _has_split(folder: ExampleFolder | TokenFolder, split: str) -> bool:
    if isinstance(folder, TokenFolder):
        return split in folder.splits
    return folder.num_examples(split) > 0


def _open_split(
    folder: ExampleFolder | TokenFolder, split: str, sequence_length: int
) -> PackedDataset:
    if isinstance(folder, TokenFolder):
        return TokenDataset(folder, split=split, sequence_length=sequence_length, shuffle=False)
    if not folder.num_examples(split):
        raise UserError(
            f"{folder.path}: no {split} examples; choose the other --split, or name other data with"
            " --data"
        )
    return example_dataset(folder, split, sequence_length=sequence_length, pack=True, shuffle=False)


def _open_files(
    loaded: LoadedModel,
    data: Path,
    split: FileSplit,
    sequence_length: int,
    reading: Mapping[str, bool],
) -> tuple[PackedDataset, str]:
    if split != "validation" and not data.is_dir():
        raise UserError(
            f"--split {split}: {data} is not a token folder, and all of it is measured; leave"
            " --split out"
        )
    packing: ExamplePacking | ConcatPacking
    files = _find_conversations(data, split)
    if files:
        chosen: dict[str, Any] = dict(reading)
        unusable = UnusableRecords(chosen.pop("skip_invalid", False))
        read = (
            read_conversations(file, loaded.tokenizer, unusable=unusable, **chosen)
            for file in files
        )
        packing = _pack_conversations(loaded, data, chain.from_iterable(read), sequence_length)
        notes = f"{unusable}{describe_folders([data], split)}"
    else:
        source = open_text_source(str(data), split=split)
        packing = ConcatPacking(_TokenizedTexts(loaded, source), sequence_length)
        notes = ""
        if source.left_out:
            notes = f"; leaves out {describe_left_out(source.left_out)}"
    if not packing.num_sequences:
        raise UserError(f"{data}: holds nothing that can be scored; name other data with --data")
    dataset = PackedDataset(
        packing,
        name="measured",
        location=str(data),
        plan=[str(data)],
        sequence_length=sequence_length,
        shuffle=False,
    )
    return dataset, f"all{notes}"


def _find_conversations(data: Path, split: FileSplit) -> Sequence[Path]:
    """The files of conversations that `data` is or holds; none if its first record is text."""
    if data.is_dir():
        # A .json in a folder of texts is more often a settings file.
        files = [
            path
            for path in find_files(data, RECORD_SUFFIXES, split).paths
            if content_suffix(path.name) != ".json" or _holds_conversations(path)
        ]
    elif content_suffix(data.name) in RECORD_SUFFIXES:
        files = [data]
    else:
        return []
    readable = UnusableRecords(skip=True)  # what cannot be read is refused, or left out, later
    records = (record for path in files for record in read_records(path, unusable=readable))
    record, first = next(records, ("", {"text": ""}))
    try:
        return files if detect_format(first) != "text" else []
    except UserError:
        raise UserError(
            f"{record}: neither a conversation nor a text: its fields are"
            f" {', '.join(sorted(first))}; rename them as docs/sft-data.md has them, or prepare the"
            " file with `lmforge prepare --text_field`"
        ) from None


def _holds_conversations(path: Path) -> bool:
    with suppress(UserError, StopIteration):
        return detect_format(next(read_records(path))[1]) != "text"
    return False


def _pack_conversations(
    loaded: LoadedModel, data: Path, read: Iterable[TokenizedExample], sequence_length: int
) -> ExamplePacking:
    examples = [each for each in read if each.loss_mask[1:].any()]
    overlong = sum(len(each.tokens) - 1 > sequence_length for each in examples)
    if overlong:
        limit = loaded.config.max_sequence_length
        most = "" if limit is None else f" of at most {limit}, which the model reads"
        raise UserError(
            f"{data}: {overlong} conversations are longer than {sequence_length} tokens; give a"
            f" larger --sequence_length{most}"
        )
    starts = np.cumsum([0, *(len(each.tokens) for each in examples)]).astype(np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in examples)])
    loss_mask = np.concatenate([np.zeros(0, bool), *(each.loss_mask for each in examples)])
    return ExamplePacking(
        TokenizedExamples(tokens, loss_mask, starts, {}, 1, ""), sequence_length, pack=True
    )


class _TokenizedTexts:
    """The tokens of all documents, in memory.

    Each document is after the model's prefix ids and before its end-of-text token.
    """

    def __init__(self, loaded: LoadedModel, source: TextSource) -> None:
        tokenizer = loaded.tokenizer
        documents = [np.zeros(0, np.int32)]
        texts = (text for unit in source.units() for text in unit.read() if text.strip())
        while batch := list(islice(texts, ENCODE_BATCH_TEXTS)):
            pieces_of = [list(tokenizer.split_long_text(text)) for text in batch]
            encoded = iter(tokenizer.encode_batch(list(chain.from_iterable(pieces_of))))
            for pieces in pieces_of:
                ids = [id for _ in pieces for id in next(encoded)]
                documents.append(
                    np.array([*loaded.prefix_ids, *ids, tokenizer.eos_token_id], np.int32)
                )
        self._ids = np.concatenate(documents)
        self._starts = np.cumsum([len(document) for document in documents])[1:-1]
        self.num_tokens = len(self._ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        first, last = np.searchsorted(self._starts, [start + 1, stop])
        return self._starts[first:last]
