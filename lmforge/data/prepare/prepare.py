"""Documents → shards, once: in parallel, restartable, and with the same bytes however often it was stopped.

    1. plan       what is requested, written down; a folder holds one plan
    2. tokenizer  trained on a sample of the training documents, or copied
    3. parts      each unit of the source tokenized by whichever process is free, written atomically as one part
    4. shards     the documents of each split in the order of a keyed permutation
    5. manifest   written last

A step leaves what an earlier run finished. No result depends on which process did what, or on how many there were.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.atomic_files import PARTIAL_SUFFIX, atomic_write_json
from lmforge.cluster.launch import check_num_processes
from lmforge.data.order import derive_key, permutation
from lmforge.data.prepare.shard_jobs import (
    DocumentIndex,
    ShardJob,
    UnitReader,
    assemble_shard,
    part_path,
    token_dtype,
    validation_threshold,
    write_part,
)
from lmforge.data.prepare.tokenizer_sample import sample_texts
from lmforge.data.prepare.worker_pool import WorkerPool
from lmforge.data.shards import (
    FORMAT_VERSION,
    RESTORE_HINT,
    SHARDS_MANIFEST,
    UNFINISHED,
    ShardEntry,
    TokenFolder,
    TokenFolderManifest,
    hash_tokenizer_files,
    read_token_folder_manifest,
)
from lmforge.data.sources.text_sources import SourceUnit, TextSource, open_text_source
from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.errors import UserError
from lmforge.locks import try_lock
from lmforge.untrusted import read_json

TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
MIN_BYTES_PER_WORKER = 2 << 20

ProgressCallback = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True)
class PreparationPlan:
    """What the bytes of a preparation depend on. `tokenizer` is the hash of a given one, or `vocab_size` is trained."""

    files: str
    text_field: str
    tokenizer: str | None
    vocab_size: int | None
    validation_ratio: float
    shard_tokens: int
    seed: int


@dataclass(frozen=True)
class PreparationSummary:
    """The result of a preparation; tokens, documents and bytes of text by split, files that were left out by suffix."""

    folder: Path
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    empty_documents: int
    skipped_kinds: dict[str, int]
    vocab_size: int
    already_done: bool


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    text_field: str = "text",
    validation_ratio: float = 0.02,
    shard_tokens: int = 100_000_000,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
    warn: Callable[[str], None] | None = None,
) -> PreparationSummary:
    """Turn the corpus that `source` names (see `open_text_source`) into a folder of token shards.

    tokenizer         a tokenizer.json or a folder with one; by default one of `vocab_size` ids is trained
    validation_ratio  the fraction of documents for validation, from 0 to below 1. Documents are chosen by their content
                      alone, so copies of a text are on one side and another seed changes nothing. Each side has at least
                      one document; of a single document the tail is for validation; 0 sets nothing aside
    shard_tokens      a shard is complete with the document that reaches this, at least 1
    workers           processes, at least 1; by default as many as there are processors and work for them
    progress          called as progress(step, done, total, bytes of the source done, of how many); the steps are "tokenizer",
                      "tokens" and "shards"; bytes are those on the disk, and 0 of 0 where none are read
    warn              called with a line about the source that its user should know

    Called again after it was stopped in any way, it continues; called again when done, it does nothing but say so.
    Raises UserError for invalid input, for a folder that holds another plan (unless `overwrite`), and for a full disk;
    RunFailed when one of its processes was killed. Bounds of its options are checked by `PrepareOptions`.
    """
    corpus = open_text_source(source, text_field)
    if warn is not None and corpus.num_markup_files:
        count = corpus.num_markup_files
        files = "1 file of HTML, whose markup is" if count == 1 else f"{count:,} files of HTML, whose markup is"
        warn(f"{source}: {files} tokenized as it is; extract the text first if the model is not to learn markup")
    given = Tokenizer.open(tokenizer) if tokenizer is not None else None
    plan = PreparationPlan(
        corpus.fingerprint(),
        text_field,
        given.hash if given else None,
        None if given else vocab_size,
        validation_ratio,
        shard_tokens,
        seed,
    )
    check_num_processes(workers or 1)
    out = Path(out)
    with _lock_output_folder(out, asdict(plan), overwrite) as finished:
        if not finished:
            preparation = _Preparation(out, corpus, given, plan, progress or (lambda *step: None))
            atomic_write_json(out / SHARDS_MANIFEST, asdict(preparation.write(workers)))
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        return _summary(out, finished, corpus)


def _summary(out: Path, already_done: bool, corpus: TextSource) -> PreparationSummary:
    manifest = TokenFolder.open(out).manifest
    return PreparationSummary(
        folder=out,
        tokens={split: sum(entry.tokens for entry in entries) for split, entries in manifest.splits.items()},
        documents={split: sum(entry.documents for entry in entries) for split, entries in manifest.splits.items()},
        text_bytes={split: manifest.text_bytes.get(split, 0) for split in manifest.splits},
        empty_documents=manifest.empty_documents,
        skipped_kinds=dict(corpus.skipped_kinds),
        vocab_size=manifest.vocab_size,
        already_done=already_done,
    )


# --- plan ------------------------------------------------------------------------------------------------------------


@contextmanager
def _lock_output_folder(out: Path, plan: dict[str, Any], overwrite: bool) -> Iterator[bool]:
    """Hold a folder for one plan. Yields whether it is finished already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{out}: cannot be made a folder of shards: {error.strerror}: name another") from None
    held = None
    try:
        held = try_lock(descriptor, out.with_name(f".{out.name}.held"))
        if held is False:
            raise UserError(f"{out}: another preparation is writing here: wait for it, or name another folder")
        yield _open_plan(out, plan, overwrite)
    finally:
        if held:
            held.release()
        os.close(descriptor)


def _open_plan(out: Path, plan: dict[str, Any], overwrite: bool) -> bool:
    """Make a folder hold this plan, and return whether it is finished. Raises UserError if it holds anything else."""
    path = out / UNFINISHED / "plan.json"
    finished = _is_preparation(out)
    begun = finished or (path.is_file() and _has_results(out))
    if begun and overwrite:
        _remove_preparation(out)
        finished = begun = False
    elif not begun:
        # Ended before it wrote more than its plan, or while it was removed, a preparation leaves nothing that could be used.
        if _is_interrupted_preparation(out / UNFINISHED):
            _remove_preparation(out)
        if os.listdir(out):
            raise UserError(f"{out}: not empty, and no preparation: name another folder")
    if begun:
        written = TokenFolder.open(out).manifest.plan if finished else read_json(path, dict[str, Any], hint=RESTORE_HINT)
        changed = [name for name in plan if written.get(name) != plan[name]]
        if changed:
            names = ", ".join(changed)
            raise UserError(f"{out}: holds a preparation with other {names}: name another folder, or add --overwrite")
        _remove_partial_files(out)
    else:
        path.parent.mkdir()
        atomic_write_json(path, plan)
    return finished


def _is_preparation(out: Path) -> bool:
    """Whether a folder has the manifest of a preparation; a damaged one counts if there are shards beside it."""
    try:
        read_token_folder_manifest(out)
    except FileNotFoundError:
        return False
    except UserError:
        return any(out.glob("*-00000.tokens"))
    return True


def _has_results(out: Path) -> bool:
    """Whether a folder holds anything but the plan of a preparation, such as a tokenizer or parts."""
    return any(each.name not in (UNFINISHED, "plan.json") for each in (*out.iterdir(), *(out / UNFINISHED).iterdir()))


def _is_interrupted_preparation(unfinished: Path) -> bool:
    expected = ("part-", "plan.json", ".part-", ".plan.json")
    return unfinished.is_dir() and all(entry.name.startswith(expected) and entry.is_file() for entry in unfinished.iterdir())


def _remove_preparation(folder: Path) -> None:
    """Delete what a preparation wrote, the manifest first, and nothing else."""
    # Interrupted, this leaves an unfinished preparation, which the next one removes.
    (folder / UNFINISHED).mkdir(exist_ok=True)
    (folder / SHARDS_MANIFEST).unlink(missing_ok=True)
    for suffix in (".tokens", ".documents", ".json"):
        for file in folder.glob(f"*-[0-9][0-9][0-9][0-9][0-9]{suffix}"):
            file.unlink()
    _remove_partial_files(folder)
    for name in ("tokenizer", UNFINISHED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _remove_partial_files(folder: Path) -> None:
    """Delete what atomic writes left that were cut off: nobody else writes to a folder that is locked."""
    for pattern in (f".*{PARTIAL_SUFFIX}", f"{UNFINISHED}/.*{PARTIAL_SUFFIX}"):
        for file in folder.glob(pattern):
            file.unlink()


def _is_one_document(source: str, units: list[SourceUnit]) -> bool:
    texts = (text for unit in units for text in unit.read() if text.strip())
    first = list(islice(texts, 2))
    if not first:
        raise UserError(f"{source}: empty: there is no text in it")
    return len(first) == 1


# --- splits ----------------------------------------------------------------------------------------------------------


def _split_documents(hashes: np.ndarray, sizes: np.ndarray, ratio: float, one_document: bool) -> dict[str, np.ndarray]:
    """The documents of each split, by the hashes and sizes of all.

    Documents with hashes below a threshold are for validation. If there are none, or they are more than half of the text though
    less was requested, it is the document of the least hash among those that leave half of the text to train on. Of a single
    document the tail is for validation, whatever its size. (Examples are fewer, and are chosen by rank: `select_validation`.)
    """
    validation = hashes < np.uint64(validation_threshold(ratio))
    too_much = not one_document and ratio < 0.5 and sizes[validation].sum() > sizes.sum() / 2
    if ratio and (not validation.any() or too_much):
        _, texts = np.unique(hashes, return_inverse=True)  # copies of a text stay together
        small = np.bincount(texts, weights=sizes)[texts] <= sizes.sum() / 2
        validation = hashes == (hashes[small] if small.any() else hashes).min()
    if validation.all():
        validation = hashes != hashes.max()
    if not ratio:
        return {TRAIN_SPLIT: np.flatnonzero(~validation)}
    if not validation.any():
        raise UserError("too few different texts to set any aside for validation: give more text")
    return {TRAIN_SPLIT: np.flatnonzero(~validation), VALIDATION_SPLIT: np.flatnonzero(validation)}


# --- steps -----------------------------------------------------------------------------------------------------------


class _UnitProgress:
    """Bytes of units that have been read: of finished ones all, of the others what their jobs report."""

    def __init__(self, sizes: list[int], finished: list[bool], update: Callable[[int, int, int, int], None]) -> None:
        self._sizes, self._finished, self._update = sizes, finished, update
        self._read = [size if done else 0 for size, done in zip(sizes, finished, strict=True)]
        self._show()

    def report(self, unit: int, read: int) -> None:
        if not self._finished[unit]:  # a report may come late
            self._read[unit] = min(read, self._sizes[unit])
            self._show()

    def finish(self, unit: int) -> None:
        self._read[unit], self._finished[unit] = self._sizes[unit], True
        self._show()

    def _show(self) -> None:
        self._update(sum(self._finished), len(self._finished), sum(self._read), sum(self._sizes))


@dataclass(frozen=True)
class _Preparation:
    """A preparation of `corpus` in the folder `out`, with the tokenizer `given` or one that is trained."""

    out: Path
    corpus: TextSource
    given: Tokenizer | None
    plan: PreparationPlan
    progress: ProgressCallback

    def write(self, workers: int | None) -> TokenFolderManifest:
        """Write tokenizer, parts and shards, and return the manifest to write."""
        corpus, ratio = self.corpus, self.plan.validation_ratio
        units = corpus.units()
        one_document = bool(ratio) and _is_one_document(corpus.spec, units)
        readers = [UnitReader(unit, ratio if one_document else None) for unit in units]
        num_cpus = len(os.sched_getaffinity(0))
        with WorkerPool(workers or min(num_cpus, len(units), 1 + corpus.size // MIN_BYTES_PER_WORKER)) as pool:
            tokenizer = self._write_tokenizer(readers, pool)
            self._write_parts(readers, tokenizer.hash, pool)
            index = DocumentIndex.load(self.out, len(units))
            members = _split_documents(index.hashes, index.text_bytes, ratio, one_document)
            splits = self._write_shards(index, members, tokenizer, pool)
        return TokenFolderManifest(
            format=FORMAT_VERSION,
            source=corpus.spec,
            plan=asdict(self.plan),
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            dtype="uint16" if token_dtype(tokenizer.vocab_size).itemsize == 2 else "uint32",
            skipped_files=corpus.skipped_files,
            empty_documents=index.num_empty,
            text_bytes={split: int(index.text_bytes[documents].sum()) for split, documents in members.items()},
            splits=splits,
            tokenizer_files=hash_tokenizer_files(tokenizer),
        )

    def _write_tokenizer(self, readers: list[UnitReader], pool: WorkerPool) -> Tokenizer:
        folder, plan, size = self.out / "tokenizer", self.plan, sum(reader.unit.size for reader in readers)
        if not (folder / "tokenizer.json").exists():
            self.progress("tokenizer", 0, 1, 0, size)
            tokenizer = self.given
            if tokenizer is None:
                assert plan.vocab_size is not None
                read = _UnitProgress(
                    [reader.unit.size for reader in readers],
                    [False] * len(readers),
                    lambda done, total, *read: self.progress("tokenizer", 0, 1, *read),
                )
                texts = sample_texts(
                    readers,
                    pool,
                    source_bytes=self.corpus.size,
                    ratio=plan.validation_ratio,
                    seed=plan.seed,
                    on_progress=read.report,
                )
                tokenizer = train_tokenizer(texts, plan.vocab_size)
            tokenizer.save(folder)
            self.progress("tokenizer", 1, 1, size, size)
        return Tokenizer.open(folder)

    def _write_parts(self, readers: list[UnitReader], tokenizer_hash: str, pool: WorkerPool) -> None:
        finished = [part_path(self.out, number, ".npz").exists() for number in range(len(readers))]
        jobs = [job for job in enumerate(readers) if not finished[job[0]]]
        done = _UnitProgress([reader.unit.size for reader in readers], finished, partial(self.progress, "tokens"))
        write = partial(write_part, out=self.out, tokenizer_hash=tokenizer_hash)
        for index, _ in pool.map_unordered(write, jobs, lambda index, read: done.report(jobs[index][0], read)):
            done.finish(jobs[index][0])

    def _write_shards(
        self, index: DocumentIndex, members: dict[str, np.ndarray], tokenizer: Tokenizer, pool: WorkerPool
    ) -> dict[str, list[ShardEntry]]:
        """Write the documents of each split (`members`), and return the shards' entries in the manifest by split."""
        jobs: list[ShardJob] = []
        for split, documents in members.items():
            order = permutation(len(documents), derive_key(self.plan.seed, "documents", split))(np.arange(len(documents)))
            for number, chosen in enumerate(index.split_into_shards(documents[order], self.plan.shard_tokens)):
                places = index.part_numbers[chosen], index.starts[chosen], index.lengths[chosen]
                jobs.append(ShardJob(split, number, *places))
        dtype = token_dtype(tokenizer.vocab_size)
        assemble = partial(assemble_shard, out=self.out, dtype=dtype, tokenizer_hash=tokenizer.hash)
        entries: dict[int, ShardEntry] = {}
        self.progress("shards", 0, len(jobs), 0, 0)
        for job, entry in pool.map_unordered(assemble, jobs):
            entries[job] = entry
            self.progress("shards", len(entries), len(jobs), 0, 0)
        return {split: [entries[job] for job in sorted(entries) if jobs[job].split == split] for split in members}
