"""The steps of a preparation, from a source with a written plan to shards.

`prepare.py` begins and ends a preparation.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np

from lmforge.core.data.order import derive_key, permutation
from lmforge.core.data.shards.format import TRAIN_SPLIT, VALIDATION_SPLIT, hash_tokenizer_files
from lmforge.core.data.tokenizer import Tokenizer, character_tokenizer, train_tokenizer
from lmforge.core.distributed.rank_info import threads_per_rank
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_text
from lmforge.core.records.manifests import (
    FORMAT_VERSION,
    UNFINISHED,
    ShardEntry,
    TokenFolderManifest,
)
from lmforge.text.prepare.decontaminate import EvaluationNgrams
from lmforge.text.prepare.dist_context import DistContext, divide_units
from lmforge.text.prepare.hook import DocumentHook
from lmforge.text.prepare.output_folder import EVALUATION_NGRAMS
from lmforge.text.prepare.shard_jobs import (
    DocumentIndex,
    PartSettings,
    ShardJob,
    UnitReader,
    assemble_shard,
    part_path,
    token_dtype,
    validation_threshold,
    write_part,
)
from lmforge.text.prepare.tokenizer_sample import find_characters, sample_texts
from lmforge.text.prepare.worker_pool import WorkerPool
from lmforge.text.sources.hf_dataset import DatasetSource
from lmforge.text.sources.records import UNUSABLE, ReadProgress
from lmforge.text.sources.text_sources import TextSource
from lmforge.text.sources.token_files import TokenSource

MIN_BYTES_PER_WORKER = 2 << 20
CHARACTERS = "characters"  # a tokenizer that is built in, of the documents' characters

# Each has `units()`, all units of work in a fixed order.
Source = TextSource | TokenSource | DatasetSource
ProgressCallback = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True)
class PreparationPlan:
    """Everything that the bytes of a preparation depend on.

    `tokenizer` is the hash of a given one or "characters", or one of `vocab_size` is trained.
    `hook` and `decontaminate` are hashes of a file and of texts; `files` covers what is read of the
    source.
    """

    files: str
    text_field: str
    tokenizer: str | None
    vocab_size: int | None
    validation_ratio: float
    shard_tokens: int
    seed: int
    hook: str | None = None
    deduplicate: Literal["exact", "near"] | None = None
    decontaminate: str | None = None
    # None stands for False, as in folders that were prepared before there were these.
    parse_special_tokens: Literal[True] | None = None
    skip_invalid: Literal[True] | None = None


class _UnitProgress:
    """Bytes of units that have been read.

    They are all bytes of finished units, and for the others what their jobs report.
    """

    def __init__(self, sizes: list[int], update: Callable[[int, int, int, int], None]) -> None:
        self._sizes = sizes
        self._update = update
        self._finished = [False] * len(sizes)
        self._read = [0] * len(sizes)
        self._show()

    def report(self, unit: int, read: int) -> None:
        if not self._finished[unit]:  # a report may arrive late
            self._read[unit] = min(read, self._sizes[unit])
            self._show()

    def finish(self, unit: int) -> None:
        self._read[unit] = self._sizes[unit]
        self._finished[unit] = True
        self._show()

    def _show(self) -> None:
        self._update(sum(self._finished), len(self._finished), sum(self._read), sum(self._sizes))


@dataclass(frozen=True)
class Selection:
    """The documents of all parts and of each split, and the number that were removed by reason."""

    index: DocumentIndex
    members: dict[str, np.ndarray]
    removed: dict[str, int]


@dataclass(frozen=True)
class Preparation:
    """A preparation of `corpus` in the folder `out`.

    The tokenizer is `given`, or made from the documents.
    """

    out: Path
    corpus: Source
    given: Tokenizer | None
    hook: DocumentHook | None
    ngrams: EvaluationNgrams | None
    plan: PreparationPlan
    progress: ProgressCallback
    dist_ctx: DistContext

    def write(self, workers: int | None) -> TokenFolderManifest | None:
        """Write tokenizer, parts and shards, and return the manifest to write.

        Returns None on ranks other than 0.
        """
        corpus = self.corpus
        plan = self.plan
        dist_ctx = self.dist_ctx
        info = self.dist_ctx.rank_info
        with dist_ctx.raise_on_all():
            readers = [
                UnitReader(unit, self.hook, skip_invalid=bool(plan.skip_invalid))
                for unit in corpus.units()
            ]
        has_one = dist_ctx.decide_on_rank0(lambda: _is_one_document(corpus.spec, readers))
        one_document = has_one and bool(plan.validation_ratio)
        if one_document:
            readers = [replace(reader, tail_fraction=plan.validation_ratio) for reader in readers]
        num_workers = min(
            threads_per_rank(info.local_world_size),
            len(readers),
            1 + corpus.size // MIN_BYTES_PER_WORKER,
        )
        with WorkerPool(workers or num_workers) as pool:
            tokenizer = self._write_tokenizer(readers, pool)
            self._write_parts(readers, tokenizer.hash, pool)
            with dist_ctx.raise_on_all():
                selection = self._select(len(readers), one_document) if info.is_rank0 else None
            splits = self._write_shards(selection, tokenizer, pool)
        if selection is None:
            return None
        index = selection.index
        members = selection.members
        if index.unusable:
            atomic_write_text(self.out / UNUSABLE, index.unusable)
        return TokenFolderManifest(
            format=FORMAT_VERSION,
            source=corpus.spec,
            plan=asdict(plan),
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
            skipped_files=sum(count for _, count in corpus.left_out),
            empty_documents=index.removed["empty"],
            text_bytes={
                split: int(index.text_bytes[documents].sum())
                for split, documents in members.items()
            },
            splits=splits,
            tokenizer_files=hash_tokenizer_files(tokenizer),
            removed_documents=selection.removed,
            special_text_documents=index.special_text,
        )

    def _write_tokenizer(self, readers: list[UnitReader], pool: WorkerPool) -> Tokenizer:
        folder = self.out / "tokenizer"
        size = sum(reader.unit.size for reader in readers)
        if not self.dist_ctx.decide_on_rank0(lambda: (folder / "tokenizer.json").exists()):
            self.progress("tokenizer", 0, 1, 0, size)
            tokenizer = self.given or self._learn_tokenizer(readers, pool)

            def save() -> None:
                assert tokenizer is not None, "rank 0 has it"
                tokenizer.save(folder)

            self.dist_ctx.decide_on_rank0(save)
            self.progress("tokenizer", 1, 1, size, size)
        with self.dist_ctx.raise_on_all():
            return Tokenizer.open(folder)

    def _learn_tokenizer(self, readers: list[UnitReader], pool: WorkerPool) -> Tokenizer | None:
        """The tokenizer made from the documents, on rank 0."""
        plan = self.plan
        dist_ctx = self.dist_ctx
        mine = [readers[number] for number in self._my_units(readers, range(len(readers)))]
        sizes = [reader.unit.size for reader in mine]

        def show_bytes(done: int, total: int, *read: int) -> None:
            self.progress("tokenizer", 0, 1, *read)

        read = _UnitProgress(sizes, show_bytes)
        if plan.tokenizer == CHARACTERS:
            characters = find_characters(mine, pool, dist_ctx, on_progress=read.report)
            return character_tokenizer(characters)
        assert plan.vocab_size is not None
        texts = sample_texts(
            mine,
            pool,
            dist_ctx,
            source_bytes=self.corpus.size,
            ratio=plan.validation_ratio,
            seed=plan.seed,
            on_progress=read.report,
        )
        with dist_ctx.raise_on_all():
            return train_tokenizer(texts, plan.vocab_size) if dist_ctx.rank_info.is_rank0 else None

    def _my_units(self, readers: Sequence[UnitReader], numbers: Iterable[int]) -> list[int]:
        """The units among these that this rank reads."""
        numbers = list(numbers)
        info = self.dist_ctx.rank_info
        units = [readers[number].unit for number in numbers]
        files = [unit.file for unit in units]
        sizes = [unit.size for unit in units]
        by_rank = divide_units(files, sizes, info.world_size)
        return [numbers[index] for index in by_rank[info.rank]]

    def _write_parts(
        self, readers: list[UnitReader], tokenizer_hash: str, pool: WorkerPool
    ) -> None:
        unfinished = self.out / UNFINISHED
        ngrams = self.ngrams
        if ngrams is not None:
            self.dist_ctx.decide_on_rank0(lambda: ngrams.save(unfinished / EVALUATION_NGRAMS))
        # The folder is listed, since some network file systems cache for a while that a file does
        # not exist.
        finished = self.dist_ctx.decide_on_rank0(
            lambda: {path.stem for path in unfinished.glob("part-*.npz")}
        )
        todo = [
            number
            for number in range(len(readers))
            if part_path(self.out, number, ".npz").stem not in finished
        ]
        mine = [(number, readers[number]) for number in self._my_units(readers, todo)]
        sizes = [reader.unit.size for _, reader in mine]
        done = _UnitProgress(sizes, partial(self.progress, "tokens"))
        plan = self.plan
        parse = bool(plan.parse_special_tokens)
        settings = PartSettings(
            self.out, tokenizer_hash, plan.deduplicate == "near", plan.decontaminate, parse
        )
        write = partial(write_part, settings=settings)
        with self.dist_ctx.raise_on_all():
            for index, _ in pool.map_unordered(write, mine, done.report):
                done.finish(index)

    def _select(self, num_parts: int, one_document: bool) -> Selection:
        """The documents that are kept, and those of them in each split."""
        index = DocumentIndex.load(self.out, num_parts)
        removed = {reason: count for reason, count in index.removed.items() if reason != "empty"}
        kept = np.arange(len(index.hashes))
        if self.plan.deduplicate and len(kept):
            kept = np.flatnonzero(~index.mark_duplicates(self.out, self.plan.deduplicate))
        if not len(kept):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in removed.items() if count)
            raise UserError(f"{self.corpus.spec}: no document is left ({reasons})")
        removed["duplicate"] = len(index.hashes) - len(kept)
        splits = split_documents(
            index.hashes[kept], index.text_bytes[kept], self.plan.validation_ratio, one_document
        )
        members = {split: kept[documents] for split, documents in splits.items()}
        removed = {reason: count for reason, count in removed.items() if count}
        return Selection(index, members, removed)

    def _write_shards(
        self, selection: Selection | None, tokenizer: Tokenizer, pool: WorkerPool
    ) -> dict[str, list[ShardEntry]]:
        """Write the documents of each split.

        Returns on rank 0 the shards' entries in the manifest by split.
        """
        dist_ctx = self.dist_ctx
        size = dist_ctx.rank_info.world_size
        jobs = [] if selection is None else self._shard_jobs(selection)
        mine = dist_ctx.scatter([jobs[rank::size] for rank in range(size)])
        dtype = token_dtype(tokenizer.vocab_size)
        assemble = partial(assemble_shard, out=self.out, dtype=dtype, tokenizer_hash=tokenizer.hash)
        written: list[tuple[str, int, ShardEntry]] = []
        self.progress("shards", 0, len(mine), 0, 0)
        with dist_ctx.raise_on_all():
            for job, entry in pool.map_unordered(assemble, mine):
                written.append((mine[job].split, mine[job].number, entry))
                self.progress("shards", len(written), len(mine), 0, 0)
        gathered = chain.from_iterable(dist_ctx.gather(written) or ())
        if selection is None:
            return {}
        # By number within each split; the splits keep the order that they have in the selection.
        splits: dict[str, list[ShardEntry]] = {split: [] for split in selection.members}
        for split, _, entry in sorted(gathered, key=lambda each: each[1]):
            splits[split].append(entry)
        return splits

    def _shard_jobs(self, selection: Selection) -> list[ShardJob]:
        """The shards of each split, with their documents in the order of a keyed permutation."""
        index = selection.index
        jobs = []
        for split, documents in selection.members.items():
            permute = permutation(len(documents), derive_key(self.plan.seed, "documents", split))
            ordered = documents[permute(np.arange(len(documents)))]
            shards = index.split_into_shards(ordered, self.plan.shard_tokens)
            for number, chosen in enumerate(shards):
                slices = index.part_numbers[chosen], index.starts[chosen], index.lengths[chosen]
                jobs.append(ShardJob(split, number, *slices))
        return jobs


def _is_one_document(source: str, readers: Sequence[UnitReader]) -> bool:
    progress = ReadProgress()
    documents = chain.from_iterable(reader.documents(progress) for reader in readers)
    first = list(islice(documents, 2))
    if not first:
        reason = "empty: there is no text in it"
        if readers and readers[0].hook:
            reason = "no document is left: the hook leaves out all"
        raise UserError(f"{source}: {reason}{progress.unusable}")
    return len(first) == 1


def split_documents(
    hashes: np.ndarray, sizes: np.ndarray, ratio: float, one_document: bool
) -> dict[str, np.ndarray]:
    """The documents of each split, by the hashes and sizes of all.

    Documents with hashes below a threshold are for validation. If there are none, or they are more
    than half of the text though less was requested, it is the document with the smallest hash among
    those that leave half of the text to train on. The tail of a single document is for validation,
    whatever its size. (Examples are fewer, and are chosen by rank: `select_validation`.)
    """
    validation = hashes < np.uint64(validation_threshold(ratio))
    too_much = not one_document and ratio < 0.5 and sizes[validation].sum() > sizes.sum() / 2
    if ratio and (not validation.any() or too_much):
        _, texts = np.unique(hashes, return_inverse=True)  # copies of a text stay together
        small = np.bincount(texts, weights=sizes)[texts] <= sizes.sum() / 2
        candidates = hashes[small] if small.any() else hashes
        validation = hashes == candidates.min()
    if validation.all():
        validation = hashes != hashes.max()
    train = np.flatnonzero(~validation)
    if not ratio:
        return {TRAIN_SPLIT: train}
    if not validation.any():
        raise UserError("too few different texts to set any aside for validation; give more text")
    return {TRAIN_SPLIT: train, VALIDATION_SPLIT: np.flatnonzero(validation)}
