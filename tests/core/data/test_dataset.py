"""Sequences against an independent oracle: every token in a Python loop, every order in
integers.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.packing import PackedSequence
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from tests.core.data.test_shards import flip_bit
from tests.seeds import fresh_seed

Writer = Callable[..., TokenFolder]
FIELDS = ("tokens", "labels", "positions", "document_ids")
MASK = 2**64 - 1

shards_of_documents = st.lists(
    st.lists(st.integers(2, 60), min_size=1, max_size=8), min_size=1, max_size=4
)


# --- the oracle -----------------------------------------------------------------------------------


def read_corpus(path: Path, split: str = "train") -> tuple[list[int], list[int]]:
    """Every token, and the number of the document each belongs to, from the raw files."""
    tokens: list[int] = []
    owners: list[int] = []
    document = 0
    for file in sorted(path.glob(f"{split}-*.tokens")):
        of_shard = np.fromfile(file, "<u2").tolist()
        ends = set(np.fromfile(file.with_suffix(".documents"), "<u8").tolist())
        for i, token in enumerate(of_shard):
            tokens.append(token)
            owners.append(document)
            document += i + 1 in ends
    return tokens, owners


def corpus_digest(path: Path) -> str:
    """A hash of the manifests of the shards, in order: what keys the order of the sequences."""
    shards = json.loads((path / "manifest.json").read_text())["splits"]["train"]
    return xxhash.xxh3_128_hexdigest(json.dumps([shard["xxh3"] for shard in shards]).encode())


def slow_sequence(
    tokens: list[int], owners: list[int], index: int, length: int
) -> dict[str, list[int]]:
    sequence: dict[str, list[int]] = {name: [] for name in FIELDS}
    seen: list[int] = []
    position = 0
    for i in range(index * length, index * length + length):
        if i >= len(tokens) - 1:
            for name, value in zip(FIELDS, (0, -100, 0, -1), strict=True):
                sequence[name].append(value)
            continue
        if owners[i] not in seen:
            seen.append(owners[i])
            position = 0
        sequence["tokens"].append(tokens[i])
        sequence["labels"].append(tokens[i + 1] if owners[i + 1] == owners[i] else -100)
        sequence["positions"].append(position)
        sequence["document_ids"].append(len(seen) - 1)
        position += 1
    return sequence


def slow_splitmix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow_index(sample: int, num_sequences: int, seed: int, digest: str) -> int:
    """The index of a sample's sequence in a corpus small enough for a table."""
    epoch, offset = sample // num_sequences, sample % num_sequences
    key = xxhash.xxh3_64_intdigest(json.dumps([seed, "source", digest, epoch]).encode())
    return sorted(
        range(num_sequences), key=lambda i: slow_splitmix64(slow_splitmix64(key) + i & MASK)
    )[offset]


def as_lists(sequence: PackedSequence) -> dict[str, list[int]]:
    return {name: getattr(sequence, name).tolist() for name in FIELDS}


# --- claims ---------------------------------------------------------------------------------------


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shards=shards_of_documents,
    length=st.integers(1, 70),
    seed=st.integers(0, 2**63),
    sample=st.integers(0, 10_000),
)
def test_any_sample_equals_the_slow_oracle(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]], length: int, seed: int, sample: int
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "folder"
    dataset = TokenDataset(folder_of(path, shards, seed=sample), sequence_length=length, seed=seed)
    tokens, owners = read_corpus(path)
    num_sequences = -(-(len(tokens) - 1) // length)
    assert dataset.sequences_per_epoch == num_sequences
    for n, sequence in zip(
        range(sample, sample + 5), dataset.sequences(sample, sample + 5), strict=True
    ):
        assert as_lists(sequence) == slow_sequence(
            tokens, owners, slow_index(n, num_sequences, seed, corpus_digest(path)), length
        )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(shards=shards_of_documents, length=st.integers(1, 40), epoch=st.integers(0, 5))
def test_an_epoch_scores_every_transition_within_a_document_exactly_once(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]], length: int, epoch: int
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "folder"
    dataset = TokenDataset(folder_of(path, shards, seed=epoch), sequence_length=length, seed=3)
    tokens, owners = read_corpus(path)
    pairs = zip(tokens, tokens[1:], owners, owners[1:], strict=False)
    expected = Counter((a, b) for a, b, mine, its in pairs if mine == its)
    first = epoch * dataset.sequences_per_epoch
    sequences = dataset.sequences(first, first + dataset.sequences_per_epoch)
    scored = [
        (sequence.tokens[i], sequence.labels[i])
        for sequence in sequences
        for i in np.flatnonzero(sequence.labels != -100)
    ]
    assert Counter((int(a), int(b)) for a, b in scored) == expected
    # Inputs: all tokens but the very last, which nothing follows.
    inputs = Counter(
        int(token)
        for sequence in sequences
        for token in sequence.tokens[sequence.document_ids >= 0]
    )
    assert inputs == Counter(tokens[:-1])


def test_sequences_are_the_same_however_they_are_asked_for(
    tmp_path: Path, folder_of: Writer
) -> None:
    dataset = TokenDataset(
        folder_of(tmp_path / "a", [[30, 2, 50], [40]]), sequence_length=7, seed=5
    )
    together = [as_lists(sequence) for sequence in dataset.sequences(0, 60)]
    backwards = [as_lists(dataset.sequence(n)) for n in reversed(range(60))]
    assert together == backwards[::-1]


def test_every_epoch_has_its_own_order(tmp_path: Path, folder_of: Writer) -> None:
    dataset = TokenDataset(folder_of(tmp_path / "a", [[500]]), sequence_length=5, seed=5)
    n = dataset.sequences_per_epoch
    orders = [tuple(dataset.indices(epoch * n, epoch * n + n).tolist()) for epoch in range(4)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(n)) for order in orders)


def test_an_unshuffled_dataset_is_the_corpus_in_order_and_then_padding(
    tmp_path: Path, folder_of: Writer
) -> None:
    folder = folder_of(tmp_path / "a", [[9, 14], [11]], split="validation")
    dataset = TokenDataset(folder, split="validation", sequence_length=8, shuffle=False)
    tokens, owners = read_corpus(tmp_path / "a", "validation")
    sequences = dataset.sequences(0, dataset.sequences_per_epoch + 2)
    assert [as_lists(sequence) for sequence in sequences] == [
        slow_sequence(tokens, owners, i, 8) for i in range(len(sequences))
    ]
    assert all(
        (sequence.document_ids == -1).all() and (sequence.labels == -100).all()
        for sequence in sequences[-2:]
    )


@pytest.mark.parametrize(
    "shards",
    [[[2]], [[8]], [[9]], [[10]], [[16, 16]], [[17]], [[2] * 30], [[8] * 9], [[3], [3], [3]]],
    ids=[
        "one pair",
        "full",
        "full and one",
        "ten",
        "two sequences",
        "17",
        "pairs",
        "all of a length",
        "tiny shards",
    ],
)
def test_edge_lengths_equal_the_oracle(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]]
) -> None:
    dataset = TokenDataset(folder_of(tmp_path / "a", shards), sequence_length=8, shuffle=False)
    tokens, owners = read_corpus(tmp_path / "a")
    sequences = dataset.sequences(0, dataset.sequences_per_epoch)
    assert [as_lists(sequence) for sequence in sequences] == [
        slow_sequence(tokens, owners, i, 8) for i in range(len(sequences))
    ]


def test_a_document_of_ten_million_tokens_is_read_like_any_other(
    tmp_path: Path, folder_of: Writer
) -> None:
    dataset = TokenDataset(
        folder_of(tmp_path / "a", [[40, 10_000_000, 40]]), sequence_length=4096, shuffle=False
    )
    middle = dataset.sequence(1000)
    assert (middle.document_ids == 0).all()
    assert middle.positions.tolist() == list(range(4096))
    last = dataset.sequence(dataset.sequences_per_epoch - 1)
    assert last.document_ids.max() == 1
    raw = np.fromfile(tmp_path / "a" / "train-00000.tokens", "<u2")
    assert np.array_equal(middle.tokens, raw[1000 * 4096 : 1001 * 4096])


def test_documents_beyond_one_block_of_offsets_are_found(tmp_path: Path, folder_of: Writer) -> None:
    """A block of the .documents file holds 8,192 offsets."""
    generator = np.random.default_rng(fresh_seed())
    lengths = generator.integers(2, 9, 30_000).tolist()
    split = folder_of(tmp_path / "a", [lengths]).split("train")
    ends = np.cumsum(lengths)
    for _ in range(200):
        start, stop = sorted(generator.choice(split.num_tokens, 2, replace=False).tolist())
        expected = ends[(ends > start) & (ends < stop)]
        assert np.array_equal(split.document_starts(start, stop), expected)


def test_the_plan_hash_changes_with_whatever_changes_the_sequences(
    tmp_path: Path, folder_of: Writer
) -> None:
    one, same, other = (
        folder_of(tmp_path / name, [[30, 20]], seed=s) for name, s in (("a", 1), ("b", 1), ("c", 2))
    )
    plain = TokenDataset(one, sequence_length=8, seed=0).plan_hash
    assert TokenDataset(same, sequence_length=8, seed=0).plan_hash == plain
    others = [
        TokenDataset(other, sequence_length=8, seed=0),
        TokenDataset(one, sequence_length=9, seed=0),
        TokenDataset(one, sequence_length=8, seed=1),
        TokenDataset(one, sequence_length=8, seed=0, shuffle=False),
    ]
    assert len({plain, *(dataset.plan_hash for dataset in others)}) == 5


def test_a_split_shorter_than_a_sequence_is_one_sequence(tmp_path: Path, folder_of: Writer) -> None:
    dataset = TokenDataset(folder_of(tmp_path / "a", [[20]]), sequence_length=64)
    assert dataset.sequences_per_epoch == 1
    assert (dataset.sequence(0).labels != -100).sum() == 19


def test_an_unknown_split_is_named_with_those_there_are(tmp_path: Path, folder_of: Writer) -> None:
    with pytest.raises(UserError, match="no split 'validation': it has train"):
        TokenDataset(folder_of(tmp_path / "a", [[20]]), split="validation", sequence_length=8)


@pytest.mark.usefixtures("impatient")
def test_a_corrupt_block_is_named_with_shard_offset_and_sample(
    tmp_path: Path, folder_of: Writer
) -> None:
    folder = folder_of(tmp_path / "a", [[70_000], [70_000]])
    flip_bit(tmp_path / "a" / "train-00001.tokens", 100_000)
    dataset = TokenDataset(folder, sequence_length=1000, seed=1)
    in_that_block = range(103, 134)  # sequences of tokens 102,768 to 135,535
    n = next(
        n
        for n, index in enumerate(dataset.indices(0, dataset.sequences_per_epoch))
        if index in in_that_block
    )
    with pytest.raises(
        UserError,
        match=rf"sample {n}: .*train-00001\.tokens: the block at byte 65536 does not match",
    ):
        dataset.sequence(n)
