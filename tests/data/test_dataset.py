"""Rows against an oracle written apart from the code it judges: every token in a Python loop, every order in integers."""

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.data.dataset import TokenDataset
from lmforge.data.packing import PackedSequence
from lmforge.data.shards import TokenFolder
from lmforge.errors import UserError
from tests.seeds import fresh_seed

Writer = Callable[..., TokenFolder]
FIELDS = ("tokens", "labels", "positions", "document_ids")
MASK = 2**64 - 1

shards_of_documents = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=8), min_size=1, max_size=4)


# --- the oracle ------------------------------------------------------------------------------------------------------


def whole_corpus(path: Path, split: str = "train") -> tuple[list[int], list[int]]:
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


def slow_row(tokens: list[int], owners: list[int], index: int, length: int) -> dict[str, list[int]]:
    row: dict[str, list[int]] = {name: [] for name in FIELDS}
    seen: list[int] = []
    position = 0
    for i in range(index * length, index * length + length):
        if i >= len(tokens) - 1:
            for name, value in zip(FIELDS, (0, -100, 0, -1), strict=True):
                row[name].append(value)
            continue
        if owners[i] not in seen:
            seen.append(owners[i])
            position = 0
        row["tokens"].append(tokens[i])
        row["labels"].append(tokens[i + 1] if owners[i + 1] == owners[i] else -100)
        row["positions"].append(position)
        row["document_ids"].append(len(seen) - 1)
        position += 1
    return row


def slow_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow_index(sample: int, rows: int, seed: int, split: str = "train") -> int:
    """Row of a sample in a corpus small enough for a table."""
    epoch, offset = sample // rows, sample % rows
    key = xxhash.xxh3_64_intdigest(json.dumps([seed, "source", split, epoch]).encode())
    return sorted(range(rows), key=lambda i: slow_mix(slow_mix(key) + i & MASK))[offset]


def as_lists(row: PackedSequence) -> dict[str, list[int]]:
    return {name: getattr(row, name).tolist() for name in FIELDS}


# --- claims ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards=shards_of_documents, length=st.integers(1, 70), seed=st.integers(0, 2**63), sample=st.integers(0, 10_000))
def test_any_sample_equals_the_slow_oracle(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]], length: int, seed: int, sample: int
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "folder"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = TokenDataset(folder_of(path, shards, seed=sample), sequence_length=length, seed=seed)
    tokens, owners = whole_corpus(path)
    rows = -(-(len(tokens) - 1) // length)
    assert stream.sequences_per_epoch == rows
    for n, row in zip(range(sample, sample + 5), stream.sequences(sample, sample + 5), strict=True):
        assert as_lists(row) == slow_row(tokens, owners, slow_index(n, rows, seed), length)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards=shards_of_documents, length=st.integers(1, 40), epoch=st.integers(0, 5))
def test_an_epoch_scores_every_transition_within_a_document_exactly_once(
    tmp_path: Path, folder_of: Writer, shards: list[list[int]], length: int, epoch: int
) -> None:
    path = Path(tempfile.mkdtemp(dir=tmp_path)) / "folder"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = TokenDataset(folder_of(path, shards, seed=epoch), sequence_length=length, seed=3)
    tokens, owners = whole_corpus(path)
    pairs = zip(tokens, tokens[1:], owners, owners[1:], strict=False)
    expected = Counter((a, b) for a, b, mine, its in pairs if mine == its)
    first = epoch * stream.sequences_per_epoch
    rows = stream.sequences(first, first + stream.sequences_per_epoch)
    scored = [(row.tokens[i], row.labels[i]) for row in rows for i in np.flatnonzero(row.labels != -100)]
    assert Counter((int(a), int(b)) for a, b in scored) == expected
    # Inputs: all tokens but the very last, which nothing follows.
    inputs = Counter(int(token) for row in rows for token in row.tokens[row.document_ids >= 0])
    assert inputs == Counter(tokens[:-1])


def test_rows_are_the_same_however_they_are_asked_for(tmp_path: Path, folder_of: Writer) -> None:
    stream = TokenDataset(folder_of(tmp_path / "a", [[30, 2, 50], [40]]), sequence_length=7, seed=5)
    together = [as_lists(row) for row in stream.sequences(0, 60)]
    backwards = [as_lists(stream.sequence(n)) for n in reversed(range(60))]
    assert together == backwards[::-1]


def test_every_epoch_has_its_own_order(tmp_path: Path, folder_of: Writer) -> None:
    stream = TokenDataset(folder_of(tmp_path / "a", [[500]]), sequence_length=5, seed=5)
    n = stream.sequences_per_epoch
    orders = [tuple(stream.indices(epoch * n, epoch * n + n).tolist()) for epoch in range(4)]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(n)) for order in orders)


def test_an_unshuffled_stream_is_the_corpus_in_order_and_then_padding(tmp_path: Path, folder_of: Writer) -> None:
    folder = folder_of(tmp_path / "a", [[9, 14], [11]], split="validation")
    stream = TokenDataset(folder, split="validation", sequence_length=8, shuffle=False)
    tokens, owners = whole_corpus(tmp_path / "a", "validation")
    rows = stream.sequences(0, stream.sequences_per_epoch + 2)
    assert [as_lists(row) for row in rows] == [slow_row(tokens, owners, i, 8) for i in range(len(rows))]
    assert all((row.document_ids == -1).all() and (row.labels == -100).all() for row in rows[-2:])


@pytest.mark.parametrize(
    "shards",
    [[[2]], [[8]], [[9]], [[10]], [[16, 16]], [[17]], [[2] * 30], [[8] * 9], [[3], [3], [3]]],
    ids=["one pair", "a row", "a row and one", "ten", "two rows", "17", "pairs", "all of a length", "tiny shards"],
)
def test_edge_lengths_equal_the_oracle(tmp_path: Path, folder_of: Writer, shards: list[list[int]]) -> None:
    stream = TokenDataset(folder_of(tmp_path / "a", shards), sequence_length=8, shuffle=False)
    tokens, owners = whole_corpus(tmp_path / "a")
    rows = stream.sequences(0, stream.sequences_per_epoch)
    assert [as_lists(row) for row in rows] == [slow_row(tokens, owners, i, 8) for i in range(len(rows))]


def test_a_document_of_ten_million_tokens_is_read_like_any_other(tmp_path: Path, folder_of: Writer) -> None:
    stream = TokenDataset(folder_of(tmp_path / "a", [[40, 10_000_000, 40]]), sequence_length=4096, shuffle=False)
    middle = stream.sequence(1000)
    assert (middle.document_ids == 0).all()
    assert middle.positions.tolist() == list(range(4096))
    last = stream.sequence(stream.sequences_per_epoch - 1)
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


def test_the_plan_hash_changes_with_whatever_changes_the_rows(tmp_path: Path, folder_of: Writer) -> None:
    one, same, other = (folder_of(tmp_path / name, [[30, 20]], seed=s) for name, s in (("a", 1), ("b", 1), ("c", 2)))
    plain = TokenDataset(one, sequence_length=8, seed=0).plan_hash
    assert TokenDataset(same, sequence_length=8, seed=0).plan_hash == plain
    others = [
        TokenDataset(other, sequence_length=8, seed=0),
        TokenDataset(one, sequence_length=9, seed=0),
        TokenDataset(one, sequence_length=8, seed=1),
        TokenDataset(one, sequence_length=8, seed=0, shuffle=False),
    ]
    assert len({plain, *(stream.plan_hash for stream in others)}) == 5


def test_a_split_shorter_than_a_row_says_so(tmp_path: Path, folder_of: Writer) -> None:
    with pytest.warns(UserWarning, match="less than one sequence of 64"):
        stream = TokenDataset(folder_of(tmp_path / "a", [[20]]), sequence_length=64)
    assert stream.sequences_per_epoch == 1
    assert (stream.sequence(0).labels != -100).sum() == 19


def test_an_unknown_split_is_named_with_those_there_are(tmp_path: Path, folder_of: Writer) -> None:
    with pytest.raises(UserError, match="no split 'validation': it has train"):
        TokenDataset(folder_of(tmp_path / "a", [[20]]), split="validation", sequence_length=8)


@pytest.mark.usefixtures("impatient")
def test_a_corrupt_block_is_named_with_shard_offset_and_sample(tmp_path: Path, folder_of: Writer) -> None:
    folder = folder_of(tmp_path / "a", [[70_000], [70_000]])
    flip_bit(tmp_path / "a" / "train-00001.tokens", 100_000)
    stream = TokenDataset(folder, sequence_length=1000, seed=1)
    in_that_block = range(103, 134)  # rows of tokens 102,768 to 135,535
    n = next(n for n, index in enumerate(stream.indices(0, stream.sequences_per_epoch)) if index in in_that_block)
    with pytest.raises(UserError, match=rf"sample {n}: .*train-00001\.tokens: the block at byte 65536 does not match"):
        stream.sequence(n)


def flip_bit(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
