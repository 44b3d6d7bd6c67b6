"""Tokens of the teacher, its likeliest or drawn ones, stored once: a folder with a manifest of what
they depend on, and files of 64 sequences each: how many tokens each sequence has, their records,
and the checksum of these (`write_chunks`).

Only scored tokens are stored. At 64 ids each takes 516 bytes, 0.4 % of its 32,000 logits in fp32. A
file is verified once, when the first of its sequences is read.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.mixture import MixedDataset
from lmforge.core.data.packing import Extra, PackedSequence, Packing
from lmforge.core.distributed.distributed import DistributedContext
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import read_json
from lmforge.core.records.runs import storage_errors
from lmforge.core.stages.context import RunContext
from lmforge.core.stages.inputs import RunInputs
from lmforge.post.options.tuning import DistillConfig
from lmforge.post.reference import (
    CHECKSUM_BYTES,
    CHUNK_SEQUENCES,
    chunk_checksum,
    chunk_paths,
    write_chunks,
)

MANIFEST = "manifest.json"
# Of the probability, in what is stored: with 0.4 of it a student got worse (docs/log.md).
LEAST_MASS = 0.9
FORMAT = 2
# What 0 may be rounded to; and with less than the other a token weighs nothing, and its id may be
# any (`drawn_tokens`).
MAX_LOGPROB = 1e-3
LEAST_LOGPROB = -600.0
# What a manifest says, and how a message calls it.
DESCRIBED = {
    "format": "a version of lmforge that stores no checksums",
    "tokenizer": "another tokenizer",
    "data": "other data",
    "temperature": "another distill.temperature",
    "top_k": "another distill.top_k",
    "stored": "another distill.stored",
    "teacher": "another teacher",
}


COUNT_DTYPE = np.dtype("<i4")


def record_dtype(k: int) -> np.dtype[Any]:
    """What is stored of a token: k ids, the logarithms of their probabilities, and at the end that
    of all others' together, or the τ of drawn ones (post/objectives/distillation.py).
    """
    return np.dtype([("ids", "<i4", (k,)), ("logprobs", "<f4", (k + 1,))])


def find_problem(records: np.ndarray, vocab_size: int) -> str:
    """What no teacher says, in records of `record_dtype`; empty where there is nothing of the
    kind.
    """
    ids = records["ids"]
    logprobs = records["logprobs"]
    if not (logprobs <= MAX_LOGPROB).all():
        return "a log-probability that is above 0, or no number"
    weighs = logprobs[:, :-1] > LEAST_LOGPROB
    if (weighs & ((ids < 0) | (ids >= vocab_size))).any():
        return f"an id that the tokenizer, of {vocab_size:,} ids, lacks"
    in_order = np.sort(np.where(weighs, ids, -1 - np.arange(ids.shape[1])), 1)
    return "one id twice for a token" if (in_order[:, 1:] == in_order[:, :-1]).any() else ""


def distilled_datasets(inputs: RunInputs) -> dict[str, PackedDataset]:
    """The datasets whose tokens a teacher scores, by the name of their folder."""
    train = inputs.train_dataset
    datasets = {}
    if isinstance(train, PackedDataset):
        datasets["train"] = train
    if isinstance(train, MixedDataset):
        for number, dataset in enumerate(train.phases[0].datasets):
            datasets[f"train-{number}"] = dataset
    if inputs.validation_dataset is not None:
        datasets["validation"] = inputs.validation_dataset
    return datasets


def describe_stored(
    config: DistillConfig, inputs: RunInputs, teacher_digest: str | None
) -> dict[str, Any]:
    """The manifest: everything that the stored tokens depend on."""
    plans = {name: dataset.plan for name, dataset in distilled_datasets(inputs).items()}
    return {
        "format": FORMAT,
        "tokenizer": inputs.tokenizer.hash,
        "data": json.loads(json.dumps(plans)),
        "temperature": config.distill.temperature,
        "top_k": min(config.distill.top_k, inputs.tokenizer.vocab_size),
        "stored": config.distill.stored,
        "teacher": teacher_digest,
    }


def check_stored(config: DistillConfig, inputs: RunInputs, teacher_digest: str | None) -> None:
    """Raise UserError where distill.logprobs is of something else, or lacks what only a teacher
    could add. A new folder is made, so that one that cannot be is refused before the run.
    """
    folder = config.distill.logprobs
    assert folder is not None
    if not (folder / MANIFEST).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"distill.logprobs: {folder}: there is something else; name a new folder"
            )
        if teacher_digest is None:
            raise UserError(
                f"distill.logprobs: {folder}: nothing is stored there; name the teacher,"
                " distill.teacher"
            )
        with storage_errors(folder, "cannot be made a folder", "choose another distill.logprobs"):
            folder.mkdir(parents=True, exist_ok=True)
        return
    stored = read_json(folder / MANIFEST, dict[str, Any])
    for name, value in describe_stored(config, inputs, teacher_digest).items():
        if stored.get(name) != value and not (name == "teacher" and value is None):
            what = DESCRIBED[name]
            raise UserError(
                f"distill.logprobs: {folder}: written for {what}; name another folder, or what it"
                " was written for"
            )
    paths = [
        path
        for name, each in distilled_datasets(inputs).items()
        for path in chunk_paths(folder / name, each)
    ]
    missing = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                read_counts(file, path, stored["top_k"])
        except FileNotFoundError:
            missing += 1
    if missing and teacher_digest is None:
        raise UserError(
            f"distill.logprobs: {folder}: {missing} files are missing; name the teacher,"
            " distill.teacher, again"
        )


def begin_stored(
    config: DistillConfig,
    inputs: RunInputs,
    teacher_digest: str | None,
    dist_ctx: DistributedContext,
) -> None:
    """Make distill.logprobs a folder with this manifest.

    Raises UserError as `check_stored` does, also where another run has begun the folder since that
    was called. Every rank calls it.
    """
    folder = config.distill.logprobs
    assert folder is not None

    def begin() -> None:
        if not (folder / MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write_json(folder / MANIFEST, describe_stored(config, inputs, teacher_digest))

    dist_ctx.run_once_per_folder(begin, folder.parent)
    with dist_ctx.raise_on_all():
        check_stored(config, inputs, teacher_digest)


def read_stored(
    ctx: RunContext, inputs: RunInputs, digest: str | None, score: Callable[[Batch], Any]
) -> None:
    """Give the sequences of all datasets the extras "teacher_ids" and "teacher_logprobs". What is
    missing is computed by `score` (TeacherModel.score_top) and written. Every rank calls it.
    """
    assert isinstance(ctx.config, DistillConfig)
    folder = ctx.config.distill.logprobs
    assert folder is not None
    begin_stored(ctx.config, inputs, digest, ctx.dist_ctx)
    vocab_size = inputs.tokenizer.vocab_size
    k = min(ctx.config.distill.top_k, vocab_size)

    def encode(values: np.ndarray) -> bytes:
        scored = values[..., 0] >= 0
        counts = np.zeros(CHUNK_SEQUENCES, COUNT_DTYPE)
        counts[: len(values)] = scored.sum(1)
        records = np.empty(int(scored.sum()), record_dtype(k))
        records["ids"] = values[scored][:, :k]
        records["logprobs"] = values[scored][:, k:]
        if problem := find_problem(records, vocab_size):
            raise UserError(f"distill.teacher: says {problem}")
        return counts.tobytes() + records.tobytes()

    for name, dataset in distilled_datasets(inputs).items():
        paths = write_chunks(ctx, inputs, dataset, folder / name, score, encode)
        dataset.packing = stored = StoredPacking(dataset.packing, tuple(paths), k, vocab_size)
        mass = 1.0 if ctx.config.distill.stored == "sampled" else stored.mean_mass()
        if mass < LEAST_MASS:  # the console prints on rank 0 only
            ctx.console.warn(
                f"distill.logprobs: {folder / name}: the {k} likeliest tokens hold {mass:.2f} of"
                " the teacher's probability, and a student does not learn the rest; use a larger"
                " distill.top_k, a smaller distill.kd_ratio, or distill.stored = sampled with"
                " distill.beta = 0"
            )


def read_counts(file: BinaryIO, path: Path, k: int) -> np.ndarray:
    """How many tokens each sequence of a file has; their records follow.

    Raises UserError where it has not all of them.
    """
    content = file.read(CHUNK_SEQUENCES * COUNT_DTYPE.itemsize)
    counts = np.frombuffer(content, COUNT_DTYPE, len(content) // COUNT_DTYPE.itemsize)
    size = (
        len(content) + int(counts.sum(dtype=np.int64)) * record_dtype(k).itemsize + CHECKSUM_BYTES
    )
    if len(counts) < CHUNK_SEQUENCES or counts.min() < 0 or size != os.fstat(file.fileno()).st_size:
        raise _damaged(path, "has not as many tokens as it says")
    return counts


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        f"{path}: {problem}; delete it, and name the teacher, distill.teacher, which is asked again"
    )


@dataclass
class StoredPacking(Packing):
    """Sequences with what is stored of their scored tokens, and zeros elsewhere."""

    packing: Packing
    paths: tuple[Path, ...]
    k: int
    vocab_size: int
    verified: set[int] = field(default_factory=set)  # files

    @property
    def num_sequences(self) -> int:
        return self.packing.num_sequences

    @cached_property
    def extras(self) -> list[Extra]:
        return [*self.packing.extras, ("teacher_ids", self.k), ("teacher_logprobs", self.k + 1)]

    def read(self, index: int, out: PackedSequence) -> None:
        self.packing.read(index, out)
        scored = out.labels != IGNORE_INDEX
        records = (
            self._records(index)
            if index < self.num_sequences
            else np.empty(0, record_dtype(self.k))
        )
        if len(records) != scored.sum():
            raise _damaged(self.paths[index // CHUNK_SEQUENCES], "not what was stored of this data")
        for name in ("ids", "logprobs"):
            out.extras[f"teacher_{name}"][:] = 0
            out.extras[f"teacher_{name}"][scored] = records[name]

    def mean_mass(self) -> float:
        """What the stored tokens of the first file weigh on average, of 1."""
        rest = [
            self._records(index)["logprobs"][:, -1]
            for index in range(min(self.num_sequences, CHUNK_SEQUENCES))
        ]
        return float(1 - np.exp(np.concatenate(rest)).mean()) if sum(map(len, rest)) else 1.0

    def _records(self, index: int) -> np.ndarray:
        number, at = divmod(index, CHUNK_SEQUENCES)
        dtype = record_dtype(self.k)
        with open(self.paths[number], "rb") as file:
            if number not in self.verified:
                self._verify(file, self.paths[number])
                self.verified.add(number)
                file.seek(0)
            counts = read_counts(file, self.paths[number], self.k)
            file.seek(int(counts[:at].sum()) * dtype.itemsize, 1)
            return np.frombuffer(file.read(int(counts[at]) * dtype.itemsize), dtype)

    def _verify(self, file: BinaryIO, path: Path) -> None:
        """Raise UserError where a file does not hold what was written, or that is wrong.

        It has one sequence in memory.
        """
        counts = read_counts(file, path, self.k)
        checksum = chunk_checksum(path)
        problem = ""
        checksum.update(counts.tobytes())
        for count in counts.tolist():
            content = file.read(count * record_dtype(self.k).itemsize)
            checksum.update(content)
            problem = problem or find_problem(
                np.frombuffer(content, record_dtype(self.k)), self.vocab_size
            )
        if file.read() != checksum.digest():
            raise _damaged(path, "does not hold what was written (its checksum differs)")
        if problem:
            raise _damaged(path, f"holds {problem}")
