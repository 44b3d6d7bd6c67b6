"""Examples as they are kept and read: conversations or pairs as tokens, in a folder of their own, and rows made of them.

An example is one sequence of tokens, or several that belong together, such as both sides of a pair; of each token it is
known whether it is to be learnt. A folder is written once for each set of files and options, and is checked when it is
opened. What the tokens stand for is not known here.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
import xxhash

from lmforge.atomic_files import DISK_FULL_ERRNOS, atomic_write, fsync_folder
from lmforge.data.best_fit import best_fit
from lmforge.data.chat.conversations import TokenizedExample
from lmforge.data.packing import IGNORE_INDEX, PADDING_DOCUMENT_ID, PackedSequence
from lmforge.data.sources.records import find_record_files
from lmforge.data.chat.spill_buffer import ExampleGroup, SpillBuffer
from lmforge.data.dataset import PackedDataset
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError

EXAMPLES_MANIFEST = "examples.json"
SPLITS = ("train", "validation")
# Raised whenever the same files and options would give other rows.
EXAMPLES_VERSION = 1
READ_BLOCK_BYTES = 16 << 20


def hash_files(files: Sequence[Path]) -> str:
    """A hash of what the files, or all of a folder's, hold, whatever they are called. UserError where one cannot be read."""
    digest = xxhash.xxh3_128()
    for path in (file for each in files for file in find_record_files(each)):
        try:
            with open(path, "rb") as file:
                while block := file.read(READ_BLOCK_BYTES):
                    digest.update(block)
        except OSError as problem:
            raise UserError(f"{path}: cannot be read: {problem.strerror}") from None
        digest.update(b"\0file")
    return digest.hexdigest()


def write_examples(
    folder: Path,
    read_split: Callable[[str], Iterable[ExampleGroup]],
    tokenizer: Tokenizer,
    *,
    plan: dict[str, Any],
    sequence_length: int,
    limit_description: str,
    overlong: str,
    validation_ratio: float | None,
) -> None:
    """Write the examples that `read(split)` gives into `folder`, whole or not at all; one that is there stays as it is.

    Examples that take more than `length` places (`bound` in words) are dropped or cut at their end (`overlong`), and so are
    those of which nothing is left to learn; both are counted. With `validation_ratio` that share of the examples (one at least)
    is held out, those of least hash. Memory holds a few numbers of each. UserError where nothing is left, or there is no room.
    """
    if (folder / EXAMPLES_MANIFEST).exists():
        return
    beside = folder.with_name(f".{folder.name}.{uuid4().hex}")
    beside.mkdir(parents=True)
    try:
        counts = {"overlong": 0, "truncated": 0, "nothing_to_learn": 0}
        with SpillBuffer(beside) as spool:
            ends = [
                _add_all(spool, _drop_or_truncate(read_split(split), sequence_length, overlong, counts)) for split in SPLITS
            ]
            held = (
                np.arange(ends[-1]) >= ends[0]
                if validation_ratio is None
                else select_validation(spool.hashes, validation_ratio)
            )
            sides = {"train": ~held, "validation": held}
            for split, chosen in sides.items():
                if not chosen.any() and (split == "train" or validation_ratio is None):
                    raise UserError(
                        f"no example is left of the {split.replace('_', '-')} files: {counts['overlong']} are longer than"
                        f" {limit_description}, of {counts['nothing_to_learn']} nothing is to be learnt"
                    )
            tokenizer.save(beside / "tokenizer")
            described = {split: spool.write(beside, split, chosen) for split, chosen in sides.items()}
        manifest = {"plan": plan, "length": sequence_length, "counts": counts, "splits": described}
        with atomic_write(beside / EXAMPLES_MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / EXAMPLES_MANIFEST).exists():  # else another process was quicker
                raise
        fsync_folder(folder.parent)
    except OSError as problem:
        if problem.errno not in DISK_FULL_ERRNOS:
            raise
        raise UserError(f"{folder.parent}: no room to write examples ({problem.strerror}): free some and run again") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _drop_or_truncate(
    items: Iterable[ExampleGroup], sequence_length: int, overlong: str, counts: dict[str, int]
) -> Iterator[ExampleGroup]:
    for item in items:
        if item.packed_length > sequence_length:
            if overlong == "drop" or len(item.sequences) > 1:
                counts["overlong"] += 1
                continue
            counts["truncated"] += 1
            (whole,) = item.sequences
            item = ExampleGroup(
                (TokenizedExample(whole.tokens[: sequence_length + 1], whole.loss_mask[: sequence_length + 1]),), item.scalars
            )
        if all(sequence.loss_mask[1:].any() for sequence in item.sequences):
            yield item
        else:
            counts["nothing_to_learn"] += 1


def _add_all(buffer: SpillBuffer, items: Iterable[ExampleGroup]) -> int:
    """How many there are once these are added."""
    for item in items:
        buffer.add(item)
    return len(buffer)


def select_validation(hashes: np.ndarray, ratio: float) -> np.ndarray:
    """Which examples are held out, bool, by their hashes, uint64: that share of them, those of least hash; one at least."""
    if not ratio or not len(hashes):
        return np.zeros(len(hashes), bool)
    least = np.sort(hashes)[: max(1, round(ratio * len(hashes)))]
    # Of examples that are there several times all, or what is held out would be trained on; and never all there are.
    return np.isin(hashes, least) & (hashes != hashes.max())


@dataclass(frozen=True)
class TokenizedExamples:
    """The examples of one split, as arrays that lie in files."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    scalars: dict[str, np.ndarray]
    sequences_per_example: int
    digest: str

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.sequences_per_example

    @cached_property
    def packed_lengths(self) -> np.ndarray:
        """Places that each takes in a row, int64 [examples]."""
        return (np.diff(self.starts) - 1).reshape(-1, self.sequences_per_example).sum(1)

    def sequences(self, example: int) -> Iterator[TokenizedExample]:
        for number in range(example * self.sequences_per_example, (example + 1) * self.sequences_per_example):
            span = slice(int(self.starts[number]), int(self.starts[number + 1]))
            yield TokenizedExample(self.tokens[span], self.loss_mask[span])


class ExampleFolder:
    """A folder of examples that was written whole."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises UserError where there is none."""
        try:
            return cls(path, json.loads((path / EXAMPLES_MANIFEST).read_text("utf-8")))
        except (OSError, ValueError):
            raise UserError(f"{path}: not a folder of examples; delete it, and it is made anew") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """What the examples were made tokens by."""
        return Tokenizer.open(self.path / "tokenizer")

    def split(self, name: str) -> TokenizedExamples:
        """The examples of a split. Raises UserError where a file does not hold what was written."""
        described = self.manifest["splits"][name]
        arrays = {}
        for kind, digest in described["xxh3"].items():
            file = self.path / f"{name}-{kind}.npy"
            try:
                arrays[kind] = np.load(file, mmap_mode="r" if described["examples"] else None, allow_pickle=False)
            except (OSError, ValueError) as problem:
                raise UserError(f"{file}: cannot be read ({problem}); delete {self.path}, and it is made anew") from None
            if xxhash.xxh3_64_hexdigest(arrays[kind].view(np.uint8).data) != digest:
                raise UserError(f"{file}: does not hold what was written; delete {self.path}, and it is made anew")
        labels = {kind.removeprefix("label-"): array for kind, array in arrays.items() if kind.startswith("label-")}
        digest = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
        return TokenizedExamples(arrays["tokens"], arrays["scored"], arrays["starts"], labels, described["group"], digest)


class ExamplePacking:
    """Rows of `length` that hold one example each (`fit` false) or as many as fit, which do not see each other.

    The documents of a row are its sequences, in the order of its examples: of pairs 2i is the first side and 2i + 1 the
    second. Labels come as extras, each number over all tokens of its example. With `mismatched` each example, of one
    sequence, is followed by one of its prompt with the answer of the row's next example, as KTO wants them.
    """

    def __init__(self, examples: TokenizedExamples, sequence_length: int, pack: bool, with_mismatched: bool = False) -> None:
        self._examples = examples
        self._sequence_length = sequence_length
        self._with_mismatched = with_mismatched
        if pack:
            sizes = examples.packed_lengths
            # Over a row, prompts with their own answers and with each other's take the same number of tokens.
            self._packing_order, self._starts = best_fit(2 * sizes if with_mismatched else sizes, sequence_length)
        else:
            self._packing_order, self._starts = np.arange(len(examples)), np.arange(len(examples) + 1)

    @property
    def num_sequences(self) -> int:
        return len(self._starts) - 1

    @property
    def num_single_example_sequences(self) -> int:
        """Rows of one example."""
        return int((np.diff(self._starts) == 1).sum())

    def example_indices(self, index: int) -> np.ndarray:
        """The numbers of the examples in row `index`, int64; none beyond the last row."""
        return (
            self._packing_order[self._starts[index] : self._starts[index + 1]]
            if index < self.num_sequences
            else self._packing_order[:0]
        )

    def sequence(self, index: int) -> PackedSequence:
        row = PackedSequence.all_padding(self._sequence_length, extras=sorted(self._examples.scalars))
        at, document = 0, 0
        members = self.example_indices(index).tolist()
        for number, example in enumerate(members):
            sequences = list(self._examples.sequences(example))
            if self._with_mismatched and len(members) > 1:
                (other,) = self._examples.sequences(members[(number + 1) % len(members)])
                sequences.append(_with_completion_of(sequences[0], other))
            elif self._with_mismatched:
                sequences.append(TokenizedExample(sequences[0].tokens[:1], sequences[0].loss_mask[:1]))
            for sequence in sequences:
                end = at + len(sequence.tokens) - 1
                row.tokens[at:end] = sequence.tokens[:-1]
                row.labels[at:end] = np.where(sequence.loss_mask[1:], sequence.tokens[1:], IGNORE_INDEX)
                row.positions[at:end] = np.arange(end - at)
                row.document_ids[at:end] = document
                for name, values in self._examples.scalars.items():
                    row.extras[name][at:end] = values[example]
                at, document = end, document + 1
        assert document or (row.document_ids == PADDING_DOCUMENT_ID).all()
        return row


def _with_completion_of(prompt_example: TokenizedExample, completion_example: TokenizedExample) -> TokenizedExample:
    """The prompt of one with the answer of the other; an answer begins with the first token that is scored."""
    first, second = int(prompt_example.loss_mask.argmax()), int(completion_example.loss_mask.argmax())
    tokens = np.concatenate([prompt_example.tokens[:first], completion_example.tokens[second:]])
    return TokenizedExample(tokens, np.concatenate([prompt_example.loss_mask[:first], completion_example.loss_mask[second:]]))


def example_dataset(
    folder: ExampleFolder, split: str, *, sequence_length: int, pack: bool, seed: int = 0, shuffle: bool = True
) -> PackedDataset:
    """The rows of a split of a folder. UserError where it cannot be read."""
    examples = folder.split(split)
    return PackedDataset(
        ExamplePacking(examples, sequence_length, pack, with_mismatched="label" in examples.scalars),
        name=split,
        location=f"{folder.path}: {split}",
        plan=["examples", EXAMPLES_VERSION, split, examples.digest, sequence_length, pack],
        sequence_length=sequence_length,
        seed=seed,
        shuffle=shuffle,
    )
