"""Written bytes are hashed and read bytes are verified block by block, for pieces of any size."""

import random
from pathlib import Path

import pytest

from lmforge.core.checkpoint.storage import (
    BLOCK_BYTES,
    HashingFileSystem,
    VerifyingFileSystem,
    digest_file,
)
from lmforge.core.records.manifests import CorruptCheckpoint
from tests.seeds import fresh_random


@pytest.fixture
def chance() -> random.Random:
    return fresh_random()


def written(path: Path, content: bytes, chance: random.Random) -> HashingFileSystem:
    """`content` in a file, in pieces of random sizes."""
    files = HashingFileSystem()
    with files.create_stream(path, "wb") as file:
        at = 0
        while at < len(content):
            piece = content[
                at : at
                + chance.choice(
                    (1, 1000, BLOCK_BYTES, 3 * BLOCK_BYTES, chance.randrange(1, 2 * BLOCK_BYTES))
                )
            ]
            file.write(piece)
            at += len(piece)
            assert file.tell() == at
    return files


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_blocks_hashed_while_writing_are_those_of_the_file(
    tmp_path: Path, chance: random.Random, size: int
) -> None:
    path, content = tmp_path / "a", chance.randbytes(size)
    files = written(path, content, chance)
    assert path.read_bytes() == content
    assert files.files == {"a": digest_file(path)}
    assert len(digest_file(path)["xxh3"]) == -(-size // BLOCK_BYTES)


def test_any_part_is_read_as_it_was_written_and_none_that_a_flipped_bit_is_near(
    tmp_path: Path, chance: random.Random
) -> None:
    path, content = tmp_path / "a", bytearray(chance.randbytes(3 * BLOCK_BYTES + 77))
    system = VerifyingFileSystem(written(path, bytes(content), chance).files)

    def part(begin: int, end: int) -> bytes:
        with system.create_stream(path, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    parts = [sorted(chance.randrange(len(content) + 1) for _ in range(2)) for _ in range(20)]
    for begin, end in parts:
        assert part(begin, end) == content[begin:end]
    flipped = chance.randrange(len(content))
    spoiled = bytearray(content)
    spoiled[flipped] ^= 1 << chance.randrange(8)
    path.write_bytes(spoiled)
    block = flipped // BLOCK_BYTES
    with pytest.raises(
        CorruptCheckpoint,
        match=(
            r"a does not hold what was written \(the block at byte \d+ does not match its"
            r" checksum\)"
        ),
    ):
        part(flipped, flipped + 1)
    for begin, end in parts:
        if begin < end and (end <= block * BLOCK_BYTES or begin >= (block + 1) * BLOCK_BYTES):
            assert part(begin, end) == content[begin:end]
        elif begin < end:
            with pytest.raises(CorruptCheckpoint):
                part(begin, end)


def test_a_file_that_is_short_missing_or_unknown_is_not_read(
    tmp_path: Path, chance: random.Random
) -> None:
    path = tmp_path / "a"
    files = written(path, chance.randbytes(1000), chance).files
    path.write_bytes(path.read_bytes()[:-1])
    with (
        pytest.raises(
            CorruptCheckpoint,
            match=r"a does not hold what was written \(ends at byte 999 of 1000\)",
        ),
        VerifyingFileSystem(files).create_stream(path, "rb") as file,
    ):
        file.read()
    path.unlink()
    with (
        pytest.raises(CorruptCheckpoint, match="a is missing"),
        VerifyingFileSystem(files).create_stream(path, "rb"),
    ):
        pass
    with (
        pytest.raises(CorruptCheckpoint, match="a is not in its manifest"),
        VerifyingFileSystem({}).create_stream(path, "rb"),
    ):
        pass
