"""Documents → shards, once: in parallel, restartable, and the same bytes however often it was stopped.

    1. plan       what is asked, written down; a folder holds one plan
    2. tokenizer  trained on a sample of what will be trained on, or copied
    3. parts      each unit of the source tokenised by whichever process is free, sealed as one part
    4. shards     the documents of each split in the order of a keyed permutation
    5. manifest   written last

A step finds what an earlier run sealed and leaves it. No step depends on which process did what, or how many there were.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from lmforge.atomic_files import atomic_write
from lmforge.data.order import derive_key, permutation
from lmforge.data.prepare.shard_jobs import (
    DocumentIndex,
    PartJob,
    ShardJob,
    UnitReader,
    assemble_shard,
    part_path,
    token_dtype,
    write_part,
)
from lmforge.data.prepare.worker_pool import WorkerPool
from lmforge.data.shards import FORMAT_VERSION, SHARDS_MANIFEST, UNFINISHED, Json, TokenFolder, remove_preparation
from lmforge.data.sources.text_sources import SourceUnit, open_text_source
from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.errors import UserError

TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
TOKENIZER_SAMPLE_CHARACTERS = 16_000_000  # more than the standard library has; training on it stays a matter of seconds
TOKENIZER_SAMPLE_UNITS = 64
MIN_BYTES_PER_WORKER = 2 << 20

ProgressCallback = Callable[[str, int, int, int], None]


@dataclass(frozen=True)
class PreparationSummary:
    """What a preparation came to; tokens, documents and bytes of text by split."""

    folder: Path
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    empty_documents: int
    skipped_files: int
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
) -> PreparationSummary:
    """Turn the corpus that `source` names (see `open_source`) into a folder of token shards.

    tokenizer     a tokenizer.json or a folder holding one; without it one of `vocab_size` ids is trained
    held_out      the fraction of documents set aside, chosen by their content alone, so that copies of a text are on
                  one side and another seed changes nothing; at least one document on each side, and of an only
                  document its tail; 0 sets nothing aside
    shard_tokens  the document that reaches this closes a shard
    workers       processes; by default as many as there are processors and work for them
    progress      called as progress(step, done, total, bytes of the source done); the steps are "tokenizer", "tokens"
                  and "shards"

    Stopped in any way and called again, it continues; done already, it says so in the summary and does nothing.
    UserError for what is wrong with the input, for a folder that holds another plan (unless `overwrite`), for a full disk;
    RunFailed when one of its processes was killed.
    """
    if not 0 <= validation_ratio < 1:
        raise UserError(f"held_out {validation_ratio}: expected a fraction from 0 to below 1")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens {shard_tokens}: expected at least 1")
    if workers is not None and workers < 1:
        raise UserError(f"workers {workers}: expected at least 1")
    corpus = open_text_source(source, text_field)
    given = Tokenizer.open(tokenizer) if tokenizer is not None else None
    plan: Json = {
        "files": corpus.fingerprint(),
        "text_field": text_field,
        "tokenizer": given.hash if given else None,
        "vocab_size": None if given else vocab_size,
        "validation_ratio": validation_ratio,
        "shard_tokens": shard_tokens,
        "seed": seed,
    }
    out = Path(out)
    report = progress or (lambda step, done, total, size: None)
    with _lock_output_folder(out, plan, overwrite) as finished:
        if not finished:
            units = corpus.units()
            tail = validation_ratio if validation_ratio and _is_one_document(source, units) else None
            readings = [UnitReader(unit, tail) for unit in units]
            size = workers or min(_num_available_cpus(), len(units), 1 + corpus.size // MIN_BYTES_PER_WORKER)
            with WorkerPool(size) as crew:
                opened = _write_tokenizer(out, given, vocab_size, _tokenizer_sample(readings, validation_ratio, seed), report)
                _write_parts(out, readings, opened.hash, crew, report)
                documents = DocumentIndex.load(out, len(units))
                members = _split_documents(
                    documents.hashes, documents.text_bytes, validation_ratio, one_document=tail is not None
                )
                splits = _write_shards(out, documents, members, opened, shard_tokens, seed, crew, report)
            manifest = {
                "format": FORMAT_VERSION,
                "source": source,
                "plan": plan,
                "tokenizer": opened.hash,
                "vocab_size": opened.vocab_size,
                "dtype": token_dtype(opened.vocab_size).name,
                "left_out_files": corpus.skipped_files,
                "empty_documents": documents.num_empty,
                "text_bytes": {split: int(documents.text_bytes[members[split]].sum()) for split in members},
                "splits": splits,
            }
            with atomic_write(out / SHARDS_MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        return _summary(out, finished)


def _summary(out: Path, already_done: bool) -> PreparationSummary:
    manifest = TokenFolder.open(out).manifest
    lines = manifest["splits"]
    return PreparationSummary(
        folder=out,
        tokens={split: sum(line["tokens"] for line in lines[split]) for split in lines},
        documents={split: sum(line["documents"] for line in lines[split]) for split in lines},
        text_bytes=manifest["text_bytes"],
        empty_documents=manifest["empty_documents"],
        skipped_files=manifest["left_out_files"],
        vocab_size=manifest["vocab_size"],
        already_done=already_done,
    )


# --- plan ------------------------------------------------------------------------------------------------------------


@contextmanager
def _lock_output_folder(out: Path, plan: Json, overwrite: bool) -> Iterator[bool]:
    """Hold a folder for one plan, and tell whether it is finished already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{out}: cannot be made a folder of shards: {error.strerror}: name another") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{out}: another preparation is writing here: wait for it, or name another folder") from None
        written = out / UNFINISHED / "plan.json"
        finished = _is_preparation(out)
        begun = finished or written.exists()
        if not begun:
            # Killed before its plan was sealed, or while it was taken away, a preparation leaves nothing of worth.
            if _is_interrupted_preparation(out / UNFINISHED):
                remove_preparation(out)
            if os.listdir(out):
                raise UserError(f"{out}: not empty, and no preparation: name another folder")
        if begun and overwrite:
            remove_preparation(out)
            finished = begun = False
        if begun:
            found = TokenFolder.open(out).manifest["plan"] if finished else json.loads(written.read_bytes())
            changed = [name for name in plan if found.get(name) != plan[name]]
            if changed:
                names = ", ".join(changed)
                raise UserError(f"{out}: holds a preparation with other {names}: name another folder, or overwrite it")
        else:
            written.parent.mkdir()
            with atomic_write(written) as file:
                file.write(json.dumps(plan).encode())
        yield finished
    finally:
        os.close(descriptor)


def _is_preparation(out: Path) -> bool:
    """Whether a folder has the manifest of a preparation; a damaged one counts where shards lie beside it."""
    try:
        return "splits" in json.loads((out / SHARDS_MANIFEST).read_bytes())
    except FileNotFoundError:
        return False
    except (ValueError, TypeError):
        return any(out.glob("*-00000.tokens"))


def _is_interrupted_preparation(unfinished: Path) -> bool:
    return unfinished.is_dir() and all(entry.name.startswith(("part-", "plan.json")) for entry in unfinished.iterdir())


def _is_one_document(source: str, units: list[SourceUnit]) -> bool:
    texts = (document for unit in units for document in unit.read() if document.text.strip())
    first = list(islice(texts, 2))
    if not first:
        raise UserError(f"{source}: empty: there is no text in it")
    return len(first) == 1


def _num_available_cpus() -> int:
    return len(os.sched_getaffinity(0))


# --- splits ----------------------------------------------------------------------------------------------------------


def _hash_threshold(validation_ratio: float) -> np.uint64:
    return np.uint64(int(validation_ratio * 2**64))


def _split_documents(
    hashes: np.ndarray, text_bytes: np.ndarray, validation_ratio: float, one_document: bool
) -> dict[str, np.ndarray]:
    """The documents of each split, by the hashes and sizes of all.

    Where the hashes hold out nothing, or more than half of the text though less was asked for, it is the document of the
    lowest hash among those that leave half of it to train on. Of an only document the tail is held out, whatever its size.
    """
    held = hashes < _hash_threshold(validation_ratio)
    too_much = not one_document and validation_ratio < 0.5 and text_bytes[held].sum() > text_bytes.sum() / 2
    if validation_ratio and (not held.any() or too_much):
        _, texts = np.unique(hashes, return_inverse=True)  # copies of a text stay together
        small = np.bincount(texts, weights=text_bytes)[texts] <= text_bytes.sum() / 2
        held = hashes == (hashes[small] if small.any() else hashes).min()
    if held.all():
        held = hashes != hashes.max()
    if not validation_ratio:
        return {TRAIN_SPLIT: np.flatnonzero(~held)}
    if not held.any():
        raise UserError("too few different texts to hold any out: give held_out = 0, or more text")
    return {TRAIN_SPLIT: np.flatnonzero(~held), VALIDATION_SPLIT: np.flatnonzero(held)}


def _tokenizer_sample(readers: list[UnitReader], validation_ratio: float, seed: int) -> Iterator[str]:
    """Texts to learn merges from: from units in an order drawn by the seed, and none whose hash holds them out, unless
    all are."""
    left = TOKENIZER_SAMPLE_CHARACTERS
    share = TOKENIZER_SAMPLE_CHARACTERS // min(TOKENIZER_SAMPLE_UNITS, len(readers))
    for number in permutation(len(readers), derive_key(seed, "sample"))(np.arange(len(readers))):
        of_unit = min(share, left)
        left -= of_unit
        for text, digest in readers[number].hashed_texts():
            if digest >= _hash_threshold(validation_ratio):
                yield text[:of_unit]
                of_unit -= len(text[:of_unit])
            if not of_unit:
                break
        left += of_unit
        if not left:
            break
    if left == TOKENIZER_SAMPLE_CHARACTERS and validation_ratio:
        yield from _tokenizer_sample(readers, 0, seed)


# --- steps -----------------------------------------------------------------------------------------------------------


def _write_tokenizer(
    out: Path, given: Tokenizer | None, vocab_size: int, sample: Iterator[str], report: ProgressCallback
) -> Tokenizer:
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        report("tokenizer", 0, 1, 0)
        (given or train_tokenizer(sample, vocab_size)).save(folder)
        report("tokenizer", 1, 1, 0)
    return Tokenizer.open(folder)


def _write_parts(
    out: Path, readers: list[UnitReader], tokenizer_hash: str, workers: WorkerPool, report: ProgressCallback
) -> None:
    sizes = [reading.unit.size for reading in readers]
    missing = [number for number in range(len(sizes)) if not part_path(out, number, ".npz").exists()]
    done, size = len(sizes) - len(missing), sum(sizes) - sum(sizes[number] for number in missing)
    report("tokens", done, len(sizes), size)
    jobs = [PartJob(out, number, readers[number], tokenizer_hash) for number in missing]
    for index, _ in workers.map_unordered(write_part, jobs):
        done, size = done + 1, size + sizes[missing[index]]
        report("tokens", done, len(sizes), size)


def _write_shards(
    out: Path,
    documents: DocumentIndex,
    documents_of_split: dict[str, np.ndarray],
    tokenizer: Tokenizer,
    shard_tokens: int,
    seed: int,
    workers: WorkerPool,
    report: ProgressCallback,
) -> dict[str, list[Json]]:
    """The manifest's lines of every shard, by split."""
    jobs: list[ShardJob] = []
    splits: list[str] = []
    for split, of_split in documents_of_split.items():
        shuffled = of_split[permutation(len(of_split), derive_key(seed, "documents", split))(np.arange(len(of_split)))]
        for number, chosen in enumerate(documents.split_into_shards(shuffled, shard_tokens)):
            where = documents.part_numbers[chosen], documents.starts[chosen], documents.lengths[chosen]
            dtype = token_dtype(tokenizer.vocab_size)
            jobs.append(ShardJob(out, f"{split}-{number:05d}", *where, dtype, tokenizer.hash))
            splits.append(split)
    lines: dict[int, Json] = {}
    report("shards", 0, len(jobs), 0)
    for index, line in workers.map_unordered(assemble_shard, jobs):
        lines[index] = line
        report("shards", len(lines), len(jobs), 0)
    return {split: [lines[index] for index in range(len(jobs)) if splits[index] == split] for split in documents_of_split}
