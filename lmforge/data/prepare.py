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
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from lmforge.data.crew import Crew
from lmforge.data.documents import Unit, open_source
from lmforge.data.order import key, permutation
from lmforge.data.sealing import sealing
from lmforge.data.shards import (
    FORMAT,
    MANIFEST,
    UNFINISHED,
    Json,
    TokenFolder,
    open_shard_line,
    remove_preparation,
    write_shard,
)
from lmforge.data.tokenizer import Tokenizer, train_tokenizer
from lmforge.errors import Mistake

TRAIN, HELD_OUT = "train", "held_out"
SAMPLE_BYTES = 32 << 20  # seconds of work, and more text hardly changes a BPE's merges
SAMPLED_UNITS = 64
ENCODED_AT_ONCE = 1 << 20
BYTES_WORTH_A_PROCESS = 2 << 20

Progress = Callable[[str, int, int, int], None]


@dataclass(frozen=True)
class Summary:
    """What a preparation came to; tokens, documents and bytes of text by split."""

    folder: Path
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    empty_documents: int
    vocab_size: int
    already_done: bool


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 4096,
    text_field: str = "text",
    held_out: float = 0.02,
    shard_tokens: int = 100_000_000,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Turn the corpus that `source` names (see `open_source`) into a folder of token shards.

    tokenizer     a tokenizer.json or a folder holding one; without it one of `vocab_size` ids is trained
    held_out      the fraction of documents set aside, chosen by their content alone, so that copies of a text are on one
                  side and another seed changes nothing; at least one document on each side, and of an only document
                  its tail; 0 sets nothing aside
    shard_tokens  the document that reaches this closes a shard
    workers       processes; by default as many as there are processors and work for them
    progress      called as progress(step, done, total, bytes of the source done), step "tokenizer", "tokens" or "shards"

    Stopped in any way and called again, it continues; done already, it says so in the summary and does nothing.
    Mistake for anything wrong with the input, for a folder that holds another plan (unless `overwrite`), for a full disk.
    """
    if not 0 <= held_out < 1:
        raise Mistake(f"held_out {held_out}: expected a fraction from 0 to below 1")
    if shard_tokens < 1:
        raise Mistake(f"shard_tokens {shard_tokens}: expected at least 1")
    if workers is not None and workers < 1:
        raise Mistake(f"workers {workers}: expected at least 1")
    corpus = open_source(source, text_field)
    given = Tokenizer.open(tokenizer) if tokenizer is not None else None
    plan: Json = {
        "files": corpus.fingerprint(),
        "text_field": text_field,
        "tokenizer": given.hash if given else None,
        "vocab_size": None if given else vocab_size,
        "held_out": held_out,
        "shard_tokens": shard_tokens,
        "seed": seed,
    }
    out = Path(out)
    with _claimed(out, plan, overwrite) as finished:
        if not finished:
            units = corpus.units()
            work = _Work(out, units, held_out, _is_only_document(source, units), seed, progress or _silent)
            size = workers or min(_processors(), len(units), 1 + corpus.size // BYTES_WORTH_A_PROCESS)
            with Crew(size) as crew:
                opened = work.seal_tokenizer(given, vocab_size)
                work.seal_parts(crew)
                documents = Documents.load(out, len(units))
                splits = work.seal_shards(crew, documents, opened, shard_tokens)
            manifest = {
                "format": FORMAT,
                "source": source,
                "plan": plan,
                "tokenizer": opened.hash,
                "vocab_size": opened.vocab_size,
                "dtype": stored_dtype(opened).name,
                "empty_documents": documents.empty,
                **splits,
            }
            with sealing(out / MANIFEST) as file:
                file.write(json.dumps(manifest, indent=1).encode())
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)
        return _summary(out, finished)


def _summary(out: Path, already_done: bool) -> Summary:
    manifest = TokenFolder.open(out).manifest
    lines = manifest["splits"]
    return Summary(
        folder=out,
        tokens={split: sum(line["tokens"] for line in lines[split]) for split in lines},
        documents={split: sum(line["documents"] for line in lines[split]) for split in lines},
        text_bytes=manifest["text_bytes"],
        empty_documents=manifest["empty_documents"],
        vocab_size=manifest["vocab_size"],
        already_done=already_done,
    )


def _silent(step: str, done: int, total: int, size: int) -> None:
    pass


def _processors() -> int:
    return len(os.sched_getaffinity(0))


# --- plan ------------------------------------------------------------------------------------------------------------


@contextmanager
def _claimed(out: Path, plan: Json, overwrite: bool) -> Iterator[bool]:
    """Hold a folder for one plan, and tell whether it is finished already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise Mistake(f"{out}: cannot be made a folder of shards: {error.strerror}: name another") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"{out}: another preparation is writing here: wait for it, or name another folder") from None
        written = out / UNFINISHED / "plan.json"
        finished = (out / MANIFEST).exists()
        begun = finished or written.exists()
        # A run killed before its first file was sealed leaves the empty folder and nothing else.
        if not begun and any(name != UNFINISHED for name in os.listdir(out)):
            raise Mistake(f"{out}: not empty, and no preparation: name another folder")
        if begun and overwrite:
            remove_preparation(out)
            finished = begun = False
        if begun:
            found = TokenFolder.open(out).manifest["plan"] if finished else json.loads(written.read_bytes())
            changed = [name for name in plan if found.get(name) != plan[name]]
            if changed:
                raise Mistake(
                    f"{out}: holds a preparation with other {', '.join(changed)}: name another folder, or overwrite it"
                )
        else:
            written.parent.mkdir(exist_ok=True)
            with sealing(written) as file:
                file.write(json.dumps(plan).encode())
        yield finished
    finally:
        os.close(descriptor)


def _is_only_document(source: str, units: list[Unit]) -> bool:
    texts = (document for unit in units for document in unit.read() if document.text.strip())
    first = list(islice(texts, 2))
    if not first:
        raise Mistake(f"{source}: empty: there is no text in it")
    return len(first) == 1


def _threshold(held_out: float) -> np.uint64:
    return np.uint64(int(held_out * 2**64))


def _is_held_out(hashes: np.ndarray, held_out: float) -> np.ndarray:
    """Which documents are set aside, by the hashes of all."""
    held = hashes < _threshold(held_out)
    if held_out and not held.any():
        held = hashes == hashes.min()
    if held.all():
        held = hashes != hashes.max()
    if held_out and not held.any():
        raise Mistake("every document is the same text, so none can be held out: give held_out = 0, or other text")
    return held


# --- work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """The steps between plan and manifest."""

    out: Path
    units: list[Unit]
    held_out: float
    only_document: bool
    seed: int
    report: Progress

    def _reading(self, unit: Unit) -> Reading:
        return Reading(unit, self.held_out if self.only_document and self.held_out else None)

    def seal_tokenizer(self, given: Tokenizer | None, vocab_size: int) -> Tokenizer:
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer.json").exists():
            self.report("tokenizer", 0, 1, 0)
            (given or train_tokenizer(self._sample(), vocab_size)).save(folder)
            self.report("tokenizer", 1, 1, 0)
        return Tokenizer.open(folder)

    def _sample(self) -> Iterator[str]:
        """Texts to learn merges from: from units drawn by the seed, and none that will be held out."""
        left = SAMPLE_BYTES
        share = SAMPLE_BYTES // min(SAMPLED_UNITS, len(self.units))
        for number in permutation(len(self.units), key(self.seed, "sample"))(np.arange(len(self.units))):
            of_unit = share
            for text, digest in self._reading(self.units[number]).texts():
                if digest >= _threshold(self.held_out):
                    text = text[: min(of_unit, left)]
                    yield text
                    of_unit -= len(text)
                    left -= len(text)
                if not of_unit or not left:
                    break

    def seal_parts(self, crew: Crew) -> None:
        sizes = [unit.size for unit in self.units]
        missing = [number for number in range(len(sizes)) if not part_path(self.out, number, ".npz").exists()]
        done, size = len(sizes) - len(missing), sum(sizes) - sum(sizes[number] for number in missing)
        self.report("tokens", done, len(sizes), size)
        jobs = [(self.out, number, self._reading(self.units[number])) for number in missing]
        for index, _ in crew.each(seal_part, jobs):
            done, size = done + 1, size + sizes[missing[index]]
            self.report("tokens", done, len(sizes), size)

    def seal_shards(self, crew: Crew, documents: "Documents", tokenizer: Tokenizer, shard_tokens: int) -> Json:
        held = _is_held_out(documents.hashes, self.held_out)
        members = {TRAIN: np.flatnonzero(~held), HELD_OUT: np.flatnonzero(held)}
        splits: dict[str, list[Json]] = {split: [] for split in members if len(members[split])}
        jobs = []
        for split in splits:
            of_split = members[split]
            order = permutation(len(of_split), key(self.seed, "documents", split))(np.arange(len(of_split)))
            for number, chosen in enumerate(shards_of(of_split[order], documents.lengths, shard_tokens)):
                pieces = documents.starts[chosen], documents.lengths[chosen], documents.parts[chosen]
                jobs.append((self.out, f"{split}-{number:05d}", pieces, stored_dtype(tokenizer), tokenizer.hash))
        lines: dict[int, Json] = {}
        self.report("shards", 0, len(jobs), 0)
        for index, line in crew.each(seal_shard, jobs):
            lines[index] = line
            self.report("shards", len(lines), len(jobs), 0)
        for index in range(len(jobs)):
            splits[lines[index]["name"].rsplit("-", 1)[0]].append(lines[index])
        text_bytes = {split: int(documents.text_bytes[members[split]].sum()) for split in splits}
        return {"text_bytes": text_bytes, "splits": splits}
