"""Examples on the disk, conversations or pairs as tokens, and packed sequences made of them.

An example is one sequence of tokens, or several that belong together, such as both of a pair, with
a loss mask. A folder is written once for each set of files and options, and verified when it is
opened. What the tokens mean is not known here.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import xxhash

from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.packing import PackedSequence, Packing, TokenizedExample, best_fit
from lmforge.core.data.tokenizer import MAX_VOCAB_SIZE, Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_folder, atomic_write_json
from lmforge.core.files.checksums import hash_json
from lmforge.core.files.untrusted import MAX_MANIFEST_BYTES, open_file, read_json
from lmforge.core.records.manifests import EXAMPLES_MANIFEST, ExampleManifest, ExampleSplit
from lmforge.text.chat.spill_buffer import ExampleGroup, SpillBuffer
from lmforge.text.sources.folders import FileSplit
from lmforge.text.sources.records import UNUSABLE, UnusableRecords, find_record_files

SPLITS: tuple[FileSplit, ...] = ("train", "validation")
# Incremented whenever the same files and options would give other sequences.
EXAMPLES_VERSION = 5


def hash_files(files: Sequence[Path], split: FileSplit = "train") -> str:
    """A hash of the contents of files, or of a split of folders, whatever their names.

    Raises OSError.
    """
    digest = xxhash.xxh3_128()
    for path in (file for each in files for file in find_record_files(each, split)):
        with open_file(path) as file:
            hashlib.file_digest(file, lambda: digest)  # type: ignore[arg-type]
        digest.update(b"\0file")
    return digest.hexdigest()


def write_examples(
    folder: Path,
    read_split: Callable[[FileSplit], Iterable[ExampleGroup]],
    tokenizer: Tokenizer,
    *,
    plan: dict[str, Any],
    sequence_length: int,
    limit_description: str,
    overlong: str,
    validation_ratio: float | None,
    unusable: UnusableRecords | None = None,
) -> None:
    """Write the examples that `read_split(split)` gives into `folder`, atomically.

    An existing folder stays as it is.

    Examples longer than `sequence_length` (in words: `limit_description`) are dropped or truncated
    (`overlong`); those without a scored token are dropped; both are counted. `unusable` has the
    records that were left out, known once all are read; they are counted and listed. With
    `validation_ratio` that fraction of the examples (at least one) is for validation, those with
    the smallest hashes. Memory holds a few numbers for each. Raises UserError if no example is
    left, or the disk is full.
    """
    if (folder / EXAMPLES_MANIFEST).exists():
        return
    counts = {"overlong": 0, "truncated": 0, "nothing_to_learn": 0}
    with atomic_folder(folder, replace=False) as partial:
        with SpillBuffer(partial) as buffer:
            for split in SPLITS:
                num_train = len(buffer)
                groups = read_split(split)
                for group in _drop_or_truncate(groups, sequence_length, overlong, counts):
                    buffer.add(group)
            if validation_ratio is None:
                validation = np.arange(len(buffer)) >= num_train
            else:
                validation = select_validation(buffer.hashes, validation_ratio)
            splits = {}
            for split, selected in zip(SPLITS, (~validation, validation), strict=True):
                if not selected.any() and (split == "train" or validation_ratio is None):
                    raise UserError(
                        f"no example is left of the {split} files: {counts['overlong']} are longer"
                        f" than {limit_description}, {counts['nothing_to_learn']} have nothing to"
                        f" learn{unusable or ''}"
                    )
                splits[split] = buffer.write(partial, split, selected)
            tokenizer.save(partial / "tokenizer")
        if unusable and unusable.problems:
            counts["unusable"] = len(unusable.problems)
            lines = "".join(f"{problem}\n" for problem in unusable.problems)
            (partial / UNUSABLE).write_text(lines, encoding="utf-8")
        if unusable and unusable.with_special_text:
            counts["special_text"] = unusable.with_special_text
        manifest = {
            "plan": plan,
            "sequence_length": sequence_length,
            "vocab_size": tokenizer.vocab_size,
            "counts": counts,
            "splits": splits,
        }
        atomic_write_json(partial / EXAMPLES_MANIFEST, manifest)


def _drop_or_truncate(
    groups: Iterable[ExampleGroup], sequence_length: int, overlong: str, counts: dict[str, int]
) -> Iterator[ExampleGroup]:
    for group in groups:
        if group.packed_length > sequence_length:
            if overlong == "drop" or len(group.sequences) > 1:
                counts["overlong"] += 1
                continue
            counts["truncated"] += 1
            [full] = group.sequences
            size = sequence_length + 1
            cut = replace(full, tokens=full.tokens[:size], loss_mask=full.loss_mask[:size])
            group = replace(group, sequences=(cut,))
        if all(sequence.loss_mask[1:].any() for sequence in group.sequences):
            yield group
        else:
            counts["nothing_to_learn"] += 1


def select_validation(hashes: np.ndarray, ratio: float) -> np.ndarray:
    """A mask of the examples that are for validation, bool [n], by their hashes, uint64 [n].

    They are this fraction, at least one, with the smallest hashes.
    """
    if not ratio or not len(hashes):
        return np.zeros(len(hashes), bool)
    least = np.sort(hashes)[: max(1, round(ratio * len(hashes)))]
    # Copies of an example are in the same split, or validation examples would be trained on.
    # Validation never gets all examples.
    return np.isin(hashes, least) & (hashes != hashes.max())


@dataclass(frozen=True)
class TokenizedExamples:
    """The examples of one split, as memory-mapped arrays: `group` sequences an example."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    starts: np.ndarray
    scalars: dict[str, np.ndarray]
    group: int
    digest: str

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.group

    def sequences(self, example: int) -> Iterator[TokenizedExample]:
        first = example * self.group
        for start, end in pairwise(self.starts[first : first + self.group + 1].tolist()):
            yield TokenizedExample(self.tokens[start:end], self.loss_mask[start:end])


@dataclass(frozen=True)
class ExampleFolder:
    """A complete folder of examples."""

    path: Path
    manifest: ExampleManifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder. Raises UserError if it is not one of examples."""
        hint = "delete the folder, and it is created again"
        try:
            manifest = read_json(
                path / EXAMPLES_MANIFEST, ExampleManifest, max_bytes=MAX_MANIFEST_BYTES, hint=hint
            )
        except OSError:
            raise UserError(f"{path}: not a folder of examples; {hint}") from None
        if set(manifest["splits"]) != set(SPLITS):
            raise UserError(f"{path / EXAMPLES_MANIFEST}: not of a folder of examples; {hint}")
        return cls(path, manifest)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the examples were encoded with.

        Raises UserError if the one in the folder is another.
        """
        tokenizer = Tokenizer.open(self.path / "tokenizer")
        if tokenizer.hash != self.manifest["plan"]["tokenizer"]:
            raise UserError(
                f"{self.path / 'tokenizer'}: did not encode these examples; delete {self.path}, and"
                " it is created again"
            )
        return tokenizer

    def num_examples(self, split: str) -> int:
        return self.manifest["splits"][split]["examples"]

    def split(self, name: str) -> TokenizedExamples:
        """The examples of a split.

        Raises UserError if a file does not match its checksum or its manifest.
        """
        described = self.manifest["splits"][name]
        hint = f"delete {self.path}, and it is created again"
        mmap_mode: Literal["r"] | None = "r" if described["examples"] else None
        arrays = {}
        for array_name, digest in described["xxh3"].items():
            file = self.path / f"{name}-{array_name}.npy"
            try:
                array = np.load(file, mmap_mode=mmap_mode, allow_pickle=False)
                matches = xxhash.xxh3_64_hexdigest(array.view(np.uint8).data) == digest
            except (OSError, ValueError) as problem:
                raise UserError(f"{file}: cannot be read ({problem}); {hint}") from None
            if not matches:
                raise UserError(f"{file}: does not match its checksum; {hint}")
            arrays[array_name] = array
        if not _are_examples(arrays, described, self.manifest.get("vocab_size", MAX_VOCAB_SIZE)):
            raise UserError(
                f"{self.path}: its {name} arrays are not what its manifest says; {hint}"
            )
        scalars = {
            name.removeprefix("label-"): array
            for name, array in arrays.items()
            if name.startswith("label-")
        }
        digest = hash_json(described, sort_keys=True)
        return TokenizedExamples(
            arrays["tokens"],
            arrays["scored"],
            arrays["starts"],
            scalars,
            described["group"],
            digest,
        )


def _are_examples(arrays: dict[str, np.ndarray], described: ExampleSplit, vocab_size: int) -> bool:
    """Return True for arrays with the dtypes and lengths of a split, and ids of the vocabulary."""
    if not {"tokens", "scored", "starts"} <= arrays.keys() or any(
        array.ndim != 1 for array in arrays.values()
    ):
        return False
    tokens = arrays["tokens"]
    scored = arrays["scored"]
    starts = arrays["starts"]
    return bool(
        (tokens.dtype, scored.dtype, starts.dtype) == (np.int32, np.bool_, np.int64)
        and len(scored) == len(tokens) == starts[-1]
        and len(starts) == 1 + described["examples"] * described["group"]
        and starts[0] == 0
        and (np.diff(starts) > 0).all()
        and all(
            len(array) == described["examples"]
            for name, array in arrays.items()
            if name.startswith("label-")
        )
        and (not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocab_size)
    )


class ExamplePacking(Packing):
    """Packed sequences of one example each, or with `pack` of as many as fit.

    Examples do not see each other.
    The documents of a packed sequence are those of its examples, in their order: of pairs, document
    2i is the first and 2i + 1 the second. Scalars become extras, with the same value at all tokens
    of an example. With `with_mismatched` each example, of one document, is followed by its prompt
    with the completion of the next example in the sequence, as KTO needs it.
    """

    def __init__(
        self,
        examples: TokenizedExamples,
        sequence_length: int,
        pack: bool,
        with_mismatched: bool = False,
    ) -> None:
        self._examples = examples
        self._with_mismatched = with_mismatched
        if pack:
            # The last token of each sequence is only a label.
            sizes = (np.diff(examples.starts) - 1).reshape(-1, examples.group).sum(1)
            if with_mismatched:
                # In a sequence, prompts with their own completions and with the others'
                # completions take the same number of tokens.
                sizes = 2 * sizes
            self._order, self._starts = best_fit(sizes, sequence_length)
        else:
            self._order = np.arange(len(examples))
            self._starts = np.arange(len(examples) + 1)

    @property
    def num_sequences(self) -> int:
        return len(self._starts) - 1

    @property
    def num_single_example_sequences(self) -> int:
        """The number of packed sequences that hold one example."""
        return int((np.diff(self._starts) == 1).sum())

    def example_indices(self, index: int) -> np.ndarray:
        """The examples in sequence `index`, int64; none at or beyond `num_sequences`."""
        if index >= self.num_sequences:
            return self._order[:0]
        return self._order[self._starts[index] : self._starts[index + 1]]

    @property
    def extras(self) -> list[str]:
        return sorted(self._examples.scalars)

    def read(self, index: int, out: PackedSequence) -> None:
        out.pad()
        at = 0
        document = 0
        members = self.example_indices(index).tolist()
        for number, example in enumerate(members):
            sequences = list(self._examples.sequences(example))
            if self._with_mismatched and len(members) > 1:
                [other] = self._examples.sequences(members[(number + 1) % len(members)])
                sequences.append(_with_completion_of(sequences[0], other))
            elif self._with_mismatched:
                first = sequences[0]
                sequences.append(TokenizedExample(first.tokens[:1], first.loss_mask[:1]))
            for sequence in sequences:
                end = at + len(sequence.tokens) - 1
                out.tokens[at:end] = sequence.tokens[:-1]
                out.labels[at:end] = np.where(
                    sequence.loss_mask[1:], sequence.tokens[1:], IGNORE_INDEX
                )
                out.positions[at:end] = np.arange(end - at)
                out.document_ids[at:end] = document
                for name, values in self._examples.scalars.items():
                    out.extras[name][at:end] = values[example]
                at = end
                document += 1


def _with_completion_of(one: TokenizedExample, other: TokenizedExample) -> TokenizedExample:
    """The prompt of one with the completion of the other.

    A completion begins with the first scored token.
    """
    prompt = slice(int(one.loss_mask.argmax()))
    completion = slice(int(other.loss_mask.argmax()), None)
    tokens = np.concatenate([one.tokens[prompt], other.tokens[completion]])
    loss_mask = np.concatenate([one.loss_mask[prompt], other.loss_mask[completion]])
    return TokenizedExample(tokens, loss_mask)


def example_dataset(
    folder: ExampleFolder,
    split: str,
    *,
    sequence_length: int,
    pack: bool,
    seed: int = 0,
    shuffle: bool = True,
) -> PackedDataset:
    """The packed sequences of a split of a folder. Raises UserError if it cannot be read."""
    examples = folder.split(split)
    with_mismatched = "kto_labels" in examples.scalars
    return PackedDataset(
        ExamplePacking(examples, sequence_length, pack, with_mismatched),
        name=examples.digest,
        location=f"{folder.path}: {split}",
        plan=["examples", EXAMPLES_VERSION, split, examples.digest, sequence_length, pack],
        sequence_length=sequence_length,
        seed=seed,
        shuffle=shuffle,
    )
