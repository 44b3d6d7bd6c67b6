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

from lmforge.data.best_fit import best_fit
from lmforge.data.conversations import Example
from lmforge.data.packing import PADDING, UNSCORED, Row
from lmforge.data.records import record_files
from lmforge.data.sealing import NO_ROOM, sealing, sync_folder
from lmforge.data.spool import Item, Spool
from lmforge.data.stream import Rows
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import Mistake

MANIFEST = "examples.json"
SPLITS = ("train", "held_out")
# Raised whenever the same files and options would give other rows.
ALGORITHM = 1
READ_AT_ONCE = 16 << 20


def files_digest(files: Sequence[Path]) -> str:
    """A hash of what the files, or all of a folder's, hold, whatever they are called. Mistake where one cannot be read."""
    digest = xxhash.xxh3_128()
    for path in (file for each in files for file in record_files(each)):
        try:
            with open(path, "rb") as file:
                while block := file.read(READ_AT_ONCE):
                    digest.update(block)
        except OSError as problem:
            raise Mistake(f"{path}: cannot be read: {problem.strerror}") from None
        digest.update(b"\0file")
    return digest.hexdigest()


def write_examples(
    folder: Path,
    read: Callable[[str], Iterable[Item]],
    tokenizer: Tokenizer,
    *,
    plan: dict[str, Any],
    length: int,
    bound: str,
    too_long: str,
    held_out_share: float | None,
) -> None:
    """Write the examples that `read(split)` gives into `folder`, whole or not at all; one that is there stays as it is.

    Examples that take more than `length` places (`bound` in words) are dropped or cut at their end (`too_long`), and so are
    those of which nothing is left to learn; both are counted. With `held_out_share` that share of the examples (one at least)
    is held out, those of least hash. Memory holds a few numbers of each. Mistake where nothing is left, or there is no room.
    """
    if (folder / MANIFEST).exists():
        return
    beside = folder.with_name(f".{folder.name}.{uuid4().hex}")
    beside.mkdir(parents=True)
    try:
        counts = {"too_long": 0, "cut": 0, "nothing_to_learn": 0}
        with Spool(beside) as spool:
            ends = [_spooled(spool, _fitting(read(split), length, too_long, counts)) for split in SPLITS]
            held = np.arange(ends[-1]) >= ends[0] if held_out_share is None else hold_out(spool.hashes, held_out_share)
            sides = {"train": ~held, "held_out": held}
            for split, chosen in sides.items():
                if not chosen.any() and (split == "train" or held_out_share is None):
                    raise Mistake(
                        f"no example is left of the {split.replace('_', '-')} files: {counts['too_long']} are longer than"
                        f" {bound}, of {counts['nothing_to_learn']} nothing is to be learnt"
                    )
            tokenizer.save(beside / "tokenizer")
            described = {split: spool.write(beside, split, chosen) for split, chosen in sides.items()}
        manifest = {"plan": plan, "length": length, "counts": counts, "splits": described}
        with sealing(beside / MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # else another process was quicker
                raise
        sync_folder(folder.parent)
    except OSError as problem:
        if problem.errno not in NO_ROOM:
            raise
        raise Mistake(f"{folder.parent}: no room to write examples ({problem.strerror}): free some and run again") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _fitting(items: Iterable[Item], length: int, too_long: str, counts: dict[str, int]) -> Iterator[Item]:
    for item in items:
        if item.size > length:
            if too_long == "drop" or len(item.sequences) > 1:
                counts["too_long"] += 1
                continue
            counts["cut"] += 1
            (whole,) = item.sequences
            item = Item((Example(whole.tokens[: length + 1], whole.scored[: length + 1]),), item.labels)
        if all(sequence.scored[1:].any() for sequence in item.sequences):
            yield item
        else:
            counts["nothing_to_learn"] += 1


def _spooled(spool: Spool, items: Iterable[Item]) -> int:
    """How many there are once these are added."""
    for item in items:
        spool.add(item)
    return len(spool)


def hold_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which examples are held out, bool, by their hashes, uint64: that share of them, those of least hash; one at least."""
    if not share or not len(hashes):
        return np.zeros(len(hashes), bool)
    least = np.sort(hashes)[: max(1, round(share * len(hashes)))]
    # Of examples that are there several times all, or what is held out would be trained on; and never all there are.
    return np.isin(hashes, least) & (hashes != hashes.max())


@dataclass(frozen=True)
class Examples:
    """The examples of one split, as arrays that lie in files."""

    tokens: np.ndarray
    scored: np.ndarray
    starts: np.ndarray
    labels: dict[str, np.ndarray]
    group: int
    digest: str

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.group

    @cached_property
    def sizes(self) -> np.ndarray:
        """Places that each takes in a row, int64 [examples]."""
        return (np.diff(self.starts) - 1).reshape(-1, self.group).sum(1)

    def sequences(self, example: int) -> Iterator[Example]:
        for number in range(example * self.group, (example + 1) * self.group):
            span = slice(int(self.starts[number]), int(self.starts[number + 1]))
            yield Example(self.tokens[span], self.scored[span])


class ExampleFolder:
    """A folder of examples that was written whole."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises Mistake where there is none."""
        try:
            return cls(path, json.loads((path / MANIFEST).read_text("utf-8")))
        except (OSError, ValueError):
            raise Mistake(f"{path}: not a folder of examples; delete it, and it is made anew") from None

    @property
    def tokenizer(self) -> Tokenizer:
        """What the examples were made tokens by."""
        return Tokenizer.open(self.path / "tokenizer")

    def split(self, name: str) -> Examples:
        """The examples of a split. Raises Mistake where a file does not hold what was written."""
        described = self.manifest["splits"][name]
        arrays = {}
        for kind, digest in described["xxh3"].items():
            file = self.path / f"{name}-{kind}.npy"
            try:
                arrays[kind] = np.load(file, mmap_mode="r" if described["examples"] else None, allow_pickle=False)
            except (OSError, ValueError) as problem:
                raise Mistake(f"{file}: cannot be read ({problem}); delete {self.path}, and it is made anew") from None
            if xxhash.xxh3_64_hexdigest(arrays[kind].view(np.uint8).data) != digest:
                raise Mistake(f"{file}: does not hold what was written; delete {self.path}, and it is made anew")
        labels = {kind.removeprefix("label-"): array for kind, array in arrays.items() if kind.startswith("label-")}
        digest = xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())
        return Examples(arrays["tokens"], arrays["scored"], arrays["starts"], labels, described["group"], digest)


class Packed:
    """Rows of `length` that hold one example each (`fit` false) or as many as fit, which do not see each other.

    The documents of a row are its sequences, in the order of its examples: of pairs 2i is the first side and 2i + 1 the
    second. Labels come as extras, each number over all tokens of its example. With `mismatched` each example, of one
    sequence, is followed by one of its prompt with the answer of the row's next example, as KTO wants them.
    """

    def __init__(self, examples: Examples, length: int, fit: bool, mismatched: bool = False) -> None:
        self._examples = examples
        self._length = length
        self._mismatched = mismatched
        if fit:
            sizes = examples.sizes
            # Over a row, prompts with their own answers and with each other's take the same number of tokens.
            self._members, self._starts = best_fit(2 * sizes if mismatched else sizes, length)
        else:
            self._members, self._starts = np.arange(len(examples)), np.arange(len(examples) + 1)

    @property
    def rows(self) -> int:
        return len(self._starts) - 1

    @property
    def lonely(self) -> int:
        """Rows of one example."""
        return int((np.diff(self._starts) == 1).sum())

    def members(self, index: int) -> np.ndarray:
        """The numbers of the examples in row `index`, int64; none beyond the last row."""
        return self._members[self._starts[index] : self._starts[index + 1]] if index < self.rows else self._members[:0]

    def row(self, index: int) -> Row:
        row = Row.padding(self._length, extras=sorted(self._examples.labels))
        at, document = 0, 0
        members = self.members(index).tolist()
        for number, example in enumerate(members):
            sequences = list(self._examples.sequences(example))
            if self._mismatched and len(members) > 1:
                (other,) = self._examples.sequences(members[(number + 1) % len(members)])
                sequences.append(_answered(sequences[0], other))
            elif self._mismatched:
                sequences.append(Example(sequences[0].tokens[:1], sequences[0].scored[:1]))
            for sequence in sequences:
                end = at + len(sequence.tokens) - 1
                row.tokens[at:end] = sequence.tokens[:-1]
                row.targets[at:end] = np.where(sequence.scored[1:], sequence.tokens[1:], UNSCORED)
                row.positions[at:end] = np.arange(end - at)
                row.documents[at:end] = document
                for name, values in self._examples.labels.items():
                    row.extras[name][at:end] = values[example]
                at, document = end, document + 1
        assert document or (row.documents == PADDING).all()
        return row


def _answered(asked: Example, answered: Example) -> Example:
    """The prompt of one with the answer of the other; an answer begins with the first token that is scored."""
    first, second = int(asked.scored.argmax()), int(answered.scored.argmax())
    tokens = np.concatenate([asked.tokens[:first], answered.tokens[second:]])
    return Example(tokens, np.concatenate([asked.scored[:first], answered.scored[second:]]))


def example_rows(folder: ExampleFolder, split: str, *, length: int, fit: bool, seed: int = 0, shuffle: bool = True) -> Rows:
    """The rows of a split of a folder. Mistake where it cannot be read."""
    examples = folder.split(split)
    return Rows(
        Packed(examples, length, fit, mismatched="label" in examples.labels),
        name=split,
        where=f"{folder.path}: {split}",
        plan=["examples", ALGORITHM, split, examples.digest, length, fit],
        length=length,
        seed=seed,
        shuffle=shuffle,
    )
