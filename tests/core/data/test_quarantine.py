"""Damaged folders are verified as a user does, and the printed entries are pasted into a recipe
that trains on the rest.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmforge.cli import run
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARD_SUFFIXES
from lmforge.core.data.shards.quarantine import QuarantinedSpans, format_entries
from lmforge.core.records.manifests import BLOCK_BYTES, ShardEntry
from tests.conftest import Command, Refusal
from tests.core.data.test_shards import flip_bit, swap
from tests.seeds import fresh_random

Writer = Callable[..., TokenFolder]

pytestmark = pytest.mark.usefixtures("impatient")
BLOCK_TOKENS = BLOCK_BYTES // 2


@pytest.fixture
def path(tmp_path: Path, folder_of: Writer) -> Path:
    """Six shards of three blocks and a bit."""
    folder_of(tmp_path / "folder", [[40_000, 60_000, 300]] * 6)
    return tmp_path / "folder"


def verified(path: Path, capsys: pytest.CaptureFixture[str], status: int) -> list[str]:
    capsys.readouterr()
    assert run(["prepare", "--verify", str(path)]) == status
    return capsys.readouterr().out.splitlines()


def test_an_intact_folder_is_verified(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(path, capsys, 0) == [f"{path}: 6 shards, every block as it was written, in 0s"]


@pytest.mark.parametrize("suffix", SHARD_SUFFIXES)
def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(
    path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = path / f"train-00001{suffix}"
    file.unlink()
    os.mkfifo(file)
    shard, *_ = verified(path, capsys, 1)
    assert shard.startswith("train-00001: "), shard
    assert str(file) in shard or f"{suffix} is truncated: 0 bytes of " in shard


def test_every_kind_of_damage_is_named_with_its_shard_and_quarantined_no_more_than_needed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = TokenDataset(TokenFolder.open(path), sequence_length=64, shuffle=False)
    expected = before.sequences(0, before.sequences_per_epoch)
    flip_bit(path / "train-00000.tokens", BLOCK_BYTES + 5)
    flip_bit(path / "train-00000.tokens", 3 * BLOCK_BYTES + 5)
    os.truncate(path / "train-00001.tokens", 2 * BLOCK_BYTES + 1000)
    (path / "train-00002.documents").unlink()
    swap(path / "train-00003.tokens", path / "train-00004.tokens")
    flip_bit(path / "train-00005.checksums", 0)
    *shards, summary, quarantine = verified(path, capsys, 1)
    assert shards == [
        "train-00000: 2 of 4 blocks of .tokens do not match: 1, 3",
        (
            "train-00001: .tokens is truncated: 132072 bytes of 200600; 2 of 4 blocks of .tokens do"
            " not match: 2-3"
        ),
        "train-00002: .documents is missing",
        "train-00003: 4 of 4 blocks of .tokens do not match: 0-3",
        "train-00004: 4 of 4 blocks of .tokens do not match: 0-3",
        (
            "train-00005: 1 of 1 blocks of .checksums do not match: 0; 4 of 4 blocks of .tokens do"
            " not match: 0-3"
        ),
    ]
    assert (
        summary
        == f"{path}: 6 of 6 shards are damaged: restore them, or train without, with this under"
        " [data]"
    )
    listed = (
        "train-00000:1 train-00000:3 train-00001:2-3 train-00002 train-00003:0-3 train-00004:0-3"
        " train-00005:0-3"
    )
    assert quarantine == f"quarantine = {json.dumps(listed.split())}"

    folder = TokenFolder.open(path, quarantine=listed.split())
    assert (folder.split("train").quarantined.num_tokens, folder.split("train").num_tokens) == (
        470_728,
        601_800,
    )
    dataset = TokenDataset(folder, sequence_length=64, shuffle=False)
    intact = [
        range(BLOCK_TOKENS),
        range(2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS),
        range(100_300, 100_300 + 2 * BLOCK_TOKENS),
    ]
    for n, (sequence, whole) in enumerate(
        zip(dataset.sequences(0, len(expected)), expected, strict=True)
    ):
        if any(64 * n in part and 64 * n + 64 in part for part in intact):
            assert np.array_equal(sequence.labels, whole.labels)
            assert np.array_equal(sequence.tokens, whole.tokens)
        elif not any(64 * n in part or 64 * n + 64 in part for part in intact):
            assert (sequence.document_ids == -1).all()
            assert (sequence.labels == -100).all()


def test_a_swapped_shard_and_damaged_documents_are_quarantined(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in SHARD_SUFFIXES:
        swap(path / f"train-00000{suffix}", path / f"train-00001{suffix}")
    flip_bit(path / "train-00002.documents", 9)
    *shards, _, quarantine = verified(path, capsys, 1)
    assert shards[0].startswith(
        f"train-00000: {path}/train-00000.json: is not the one written for {path}: changed or"
        " swapped"
    )
    assert shards[1].startswith("train-00001: ")
    assert shards[2:] == ["train-00002: 1 of 1 blocks of .documents do not match: 0"]
    assert quarantine == 'quarantine = ["train-00000", "train-00001", "train-00002:0-3"]'


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("train-00009", "there is no shard of this name"),
        ("train-00001:4", "the shard has blocks 0 to 3"),
        ("train-00001:3-2", "the shard has blocks 0 to 3"),
        ("train 1", "expected SHARD, SHARD:BLOCK or SHARD:FIRST-LAST"),
    ],
)
def test_an_invalid_entry_of_a_quarantine_is_refused(
    path: Path, refused: Refusal, entry: str, problem: str
) -> None:
    words = [
        "pretrain",
        "--data.folder",
        path,
        "--data.quarantine",
        entry,
        "--run.folder",
        path,
        "--run.name",
        "a",
    ]
    assert refused(*words) == f'{path}: quarantine: "{entry}": {problem}'


def test_a_run_that_met_a_damaged_shard_continues_without_it_and_says_so(
    tmp_path: Path, tiny_tokens: Path, tiny_options: list[str], lmforge: Command
) -> None:
    """And is refused on other data as always."""
    folder = shutil.copytree(tiny_tokens, tmp_path / "tokens")
    options = [*tiny_options, "--data.folder", folder, "--run.folder", tmp_path, "--run.name", "a"]
    assert lmforge("pretrain", *options, "--train.steps", 2).returncode == 0
    flip_bit(folder / "train-00000.tokens", 50)
    ended = lmforge("pretrain", *options)
    assert ended.returncode == 1
    assert "train-00000.tokens: the block at byte 0 does not match its checksum" in ended.stderr
    quarantine = lmforge("prepare", "--verify", folder).stdout.splitlines()[-1]
    assert quarantine == 'quarantine = ["train-00000:0"]'
    done = lmforge("pretrain", *options, "--data.quarantine", "train-00000:0")
    assert done.returncode == 0, done.stderr
    assert "continuing" in done.stdout
    assert "data.quarantine [] → ['train-00000:0']" in done.stdout
    assert re.search(
        r"[0-9,]+ tokens, 32,768 of them in quarantine: sequences with any", done.stdout
    )
    assert lmforge("show", "data", tmp_path / "a", "--samples", "0:1").returncode == 0


def test_spans_in_quarantine_are_those_of_the_listed_blocks() -> None:
    generator = fresh_random(0)
    shards = [
        ShardEntry(f"s-{i}", generator.randrange(1, 5) * 16_384 - generator.randrange(9000), 1, "")
        for i in range(5)
    ]
    blocks = {}
    for shard in shards:
        firsts = [
            first
            for first in (0, 1, 3)
            if first * 16_384 < shard.tokens and generator.random() < 0.4
        ]
        blocks[shard.name] = [
            (first, min(first + generator.randrange(1, 3), 4)) for first in firsts
        ]
    is_quarantined = np.concatenate(
        [
            [
                any(a <= token // 16_384 < b for a, b in blocks[shard.name])
                for token in range(shard.tokens)
            ]
            for shard in shards
        ]
    )
    spans = QuarantinedSpans(blocks, shards, 4)
    assert spans.num_tokens == is_quarantined.sum()
    edges = np.flatnonzero(np.diff(is_quarantined)) + 1
    for edge in [*edges.tolist(), 1, len(is_quarantined) - 1]:
        for start, stop in (
            (edge - 1, edge),
            (edge, edge + 1),
            (edge - 1, edge + 1),
            (max(0, edge - 30_000), edge),
        ):
            assert spans.overlap(start, stop) == is_quarantined[start:stop].any(), (start, stop)


def test_blocks_are_listed_as_ranges() -> None:
    assert format_entries("s", [0, 2, 3, 4, 9]) == ["s:0", "s:2-4", "s:9"]
