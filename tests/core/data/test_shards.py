"""Real disk faults: they are detected, retried where useful, and named."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import (
    RESTORE_HINT,
    SHARD_SUFFIXES,
    SHARDS_MANIFEST,
    hash_tokenizer_files,
    write_shard,
)
from lmforge.core.data.shards.storage import MAX_OPEN_FILES
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.records.manifests import BLOCK_BYTES, UNFINISHED
from tests.conftest import Refusal

Writer = Callable[..., TokenFolder]

pytestmark = pytest.mark.usefixtures("impatient")


def flip_bit(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def swap(a: Path, b: Path) -> None:
    beside = a.with_suffix(".swap")
    a.rename(beside)
    b.rename(a)
    beside.rename(b)


@pytest.fixture
def path(tmp_path: Path, folder_of: Writer) -> Path:
    """Two shards of the same size, several blocks each."""
    folder_of(tmp_path / "folder", [[100_000, 200], [150, 100_050]])
    return tmp_path / "folder"


def test_shards_read_back_what_was_written_across_their_edges(path: Path) -> None:
    split = TokenFolder.open(path).split("train")
    raw = np.concatenate([np.fromfile(path / f"train-0000{i}.tokens", "<u2") for i in (0, 1)])
    assert split.num_tokens == len(raw) == 200_400
    assert split.num_documents == 4
    for start, stop in (
        (0, 1),
        (0, 200_400),
        (100_190, 100_210),
        (32_767, 32_769),
        (200_399, 200_400),
    ):
        assert np.array_equal(split.read(start, stop), raw[start:stop])
    assert split.document_starts(0, 200_400).tolist() == [100_000, 100_200, 100_350]
    assert split.document_starts(100_000, 100_200).tolist() == []
    assert split.document_starts(99_999, 100_201).tolist() == [100_000, 100_200]


@pytest.mark.parametrize("span", [(0, 0), (-1, 4), (4, 200_401), (9, 8)])
def test_a_span_outside_the_split_is_refused(path: Path, span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="of 200400"):
        TokenFolder.open(path).split("train").read(*span)


def test_a_flipped_bit_is_found_where_it_is_and_only_there(path: Path) -> None:
    flip_bit(path / "train-00000.tokens", BLOCK_BYTES + 77)
    split = TokenFolder.open(path).split("train")
    split.read(0, BLOCK_BYTES // 2)
    with pytest.raises(
        UserError, match=r"train-00000\.tokens: the block at byte 65536 does not match its checksum"
    ):
        split.read(BLOCK_BYTES // 2 - 1, BLOCK_BYTES // 2 + 1)


def test_a_flipped_bit_in_the_document_offsets_is_found(path: Path) -> None:
    flip_bit(path / "train-00001.documents", 3)
    with pytest.raises(
        UserError, match=r"train-00001\.documents: the block at byte 0 does not match"
    ):
        TokenFolder.open(path).split("train").document_starts(100_300, 100_400)


def test_a_flipped_bit_in_the_checksums_is_found(path: Path) -> None:
    flip_bit(path / "train-00001.checksums", 9)
    with pytest.raises(
        UserError, match=r"train-00001\.checksums: the block at byte 0 does not match"
    ):
        TokenFolder.open(path).split("train").read(100_300, 100_400)


def test_tokens_swapped_with_their_checksums_are_found(path: Path) -> None:
    for suffix in (".tokens", ".checksums"):
        swap(path / f"train-00000{suffix}", path / f"train-00001{suffix}")
    with pytest.raises(
        UserError, match=r"train-00000\.checksums: the block at byte 0 does not match"
    ):
        TokenFolder.open(path).split("train").read(0, 10)


@pytest.mark.parametrize("suffix", [".tokens", ".documents", ".checksums"])
def test_a_truncated_shard_is_named_on_opening(path: Path, suffix: str) -> None:
    file = path / f"train-00001{suffix}"
    os.truncate(file, file.stat().st_size - 2)
    with pytest.raises(UserError, match=rf"train-00001\{suffix}: truncated: \d+ bytes of \d+"):
        TokenFolder.open(path)


def test_a_shard_truncated_while_open_is_named_with_the_place(path: Path) -> None:
    split = TokenFolder.open(path).split("train")
    split.read(0, 10)
    os.truncate(path / "train-00000.tokens", 70_000)
    with pytest.raises(UserError, match=r"train-00000\.tokens: ends at byte 70000 of 200400"):
        split.read(90_000, 90_100)


@pytest.mark.parametrize("suffix", [".tokens", ".documents", ".checksums"])
def test_a_missing_shard_is_named_on_opening(path: Path, suffix: str) -> None:
    (path / f"train-00000{suffix}").unlink()
    with pytest.raises(UserError, match=rf"train-00000\{suffix}: missing"):
        TokenFolder.open(path)


def test_a_missing_shard_manifest_is_named(path: Path) -> None:
    (path / "train-00000.json").unlink()
    with pytest.raises(UserError, match=r"train-00000\.json: missing: restore it"):
        TokenFolder.open(path).split("train").read(0, 10)


def test_two_swapped_token_files_of_one_size_are_found(path: Path) -> None:
    swap(path / "train-00000.tokens", path / "train-00001.tokens")
    with pytest.raises(UserError, match=r"train-00000\.tokens: the block at byte 0 does not match"):
        TokenFolder.open(path).split("train").read(0, 10)


def test_two_swapped_shards_are_found(path: Path) -> None:
    for suffix in SHARD_SUFFIXES:
        swap(path / f"train-00000{suffix}", path / f"train-00001{suffix}")
    with pytest.raises(
        UserError, match=r"train-00000\.json: is not the one written for .*: changed or swapped"
    ):
        TokenFolder.open(path).split("train").read(0, 10)


def test_an_input_error_that_passes_is_survived(path: Path) -> None:
    """The descriptor is made unreadable under the reader, as a stale network handle is; a new one
    is opened.
    """
    folder = TokenFolder.open(path)
    split = folder.split("train")
    expected = split.read(0, 1000).copy()
    file = folder.storage._open(str(path / "train-00000.tokens"))  # type: ignore[attr-defined]
    write_only = os.open(os.devnull, os.O_WRONLY)
    os.dup2(write_only, file.fileno())
    os.close(write_only)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(file.fileno(), 1, 0)
    assert np.array_equal(split.read(0, 1000), expected)


def test_a_file_that_comes_back_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmforge.core.data.shards.storage.RETRY_DELAYS_SECONDS", (0.2, 0.5, 2.0))
    split = TokenFolder.open(path).split("train")
    away = path / "away"
    (path / "train-00000.tokens").rename(away)
    threading.Timer(0.1, away.rename, [path / "train-00000.tokens"]).start()
    assert len(split.read(0, 1000)) == 1000


def test_a_directory_in_place_of_a_shard_is_an_error_named_after_all_retries(path: Path) -> None:
    split = TokenFolder.open(path).split("train")
    (path / "train-00000.tokens").unlink()
    (path / "train-00000.tokens").mkdir()
    with pytest.raises(UserError, match=r"train-00000\.tokens: .*Is a directory"):
        split.read(0, 10)


def test_an_unfinished_folder_says_how_to_finish_it(path: Path) -> None:
    (path / SHARDS_MANIFEST).unlink()
    (path / UNFINISHED).mkdir()
    with pytest.raises(UserError, match="unfinished; run prepare again"):
        TokenFolder.open(path)


def test_a_folder_that_is_no_token_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no token folder \(manifest.json is missing\)"):
        TokenFolder.open(tmp_path)
    with pytest.raises(UserError, match="no token folder"):
        TokenFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", '{"format"', "\xff\xfe", "{}"])
def test_a_broken_manifest_says_so(path: Path, text: str) -> None:
    (path / SHARDS_MANIFEST).write_text(text, "latin-1")
    with pytest.raises(
        UserError, match=r"manifest\.json: .*; restore it, or prepare again with overwrite"
    ):
        TokenFolder.open(path)


def test_a_folder_of_a_later_format_says_so(path: Path) -> None:
    manifest = json.loads((path / SHARDS_MANIFEST).read_text())
    (path / SHARDS_MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="format 99, but this lmforge reads format 2"):
        TokenFolder.open(path)


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(path: Path) -> None:
    file = path / "tokenizer" / "tokenizer.json"
    data = json.loads(file.read_text())
    data["added_tokens"][4]["content"] = "<|other|>"
    data["model"]["vocab"] = {
        ("<|other|>" if k == "<|end|>" else k): v for k, v in data["model"]["vocab"].items()
    }
    file.write_text(json.dumps(data))
    with pytest.raises(UserError, match="its tokenizer is not the one that made its tokens"):
        _ = TokenFolder.open(path).tokenizer


# --- content of manifests -------------------------------------------------------------------------

# Of each kind of JSON one, and numbers at and beyond every limit.
STRANGE = [
    None,
    True,
    "x",
    "",
    -1,
    0,
    1.5,
    2**63,
    -(2**63),
    10**30,
    1e308,
    [],
    {},
    [None],
    ["x"],
    [-1],
    [2**64],
    {"x": None},
]
# Fields that say what was, and decide nothing: any value of their type is as good.
INFORMATIVE = {
    "source",
    "plan",
    "skipped_files",
    "empty_documents",
    "text_bytes",
    "tokenizer_files",
    "removed_documents",
}
# Of concat packing: tests/core/data/test_best_fit.py has the other.
INFORMATIVE |= {"special_text_documents", "best_fit"}
# Folders of earlier versions lack them.
OPTIONAL = {"tokenizer_files", "removed_documents", "special_text_documents", "best_fit"}


def use_everything(path: Path) -> None:
    """What `prepare`, `pretrain`, `evaluate` and `show` read of a folder."""
    folder = TokenFolder.open(path)
    assert folder.tokenizer.vocab_size == 261
    for name in folder.splits:
        split = folder.split(name)
        split.read(0, split.num_tokens)
        split.document_starts(0, split.num_tokens)
    dataset = TokenDataset(folder, sequence_length=50)
    dataset.sequences(0, 3)


def write_manifests(
    path: Path, of_folder: dict[str, Any], of_shard: dict[str, Any], *, with_checksum: bool = True
) -> None:
    """As someone would who knows the checksum of the shard's manifest."""
    text = json.dumps(of_shard)
    (path / "train-00000.json").write_text(text)
    # The walk has put something else there.
    with contextlib.suppress(TypeError, KeyError, IndexError):
        if with_checksum:
            of_folder["splits"]["train"][0]["xxh3"] = xxhash.xxh3_128_hexdigest(text.encode())
    (path / SHARDS_MANIFEST).write_text(json.dumps(of_folder))


@pytest.mark.parametrize("manifest", ["folder", "entry", "shard"])
def test_any_field_of_a_manifest_with_any_value_is_refused_in_one_line_or_read(
    path: Path, manifest: str
) -> None:
    folder = json.loads((path / SHARDS_MANIFEST).read_text())
    shard = json.loads((path / "train-00000.json").read_text())
    write_manifests(path, folder, shard)
    use_everything(path)
    table = {"folder": folder, "entry": folder["splits"]["train"][0], "shard": shard}[manifest]
    read = set()
    for name, before in list(table.items()):
        # And the right type, but one less, one more, or another order.
        near = [before - 1, before + 1] if isinstance(before, int) else []
        near += (
            [before[1:], before + before[:1], before[::-1]]
            if isinstance(before, list | str)
            else []
        )
        checked = manifest != "entry" or name != "xxh3"
        for value in [*STRANGE, *(each for each in near if each != before)]:
            table[name] = value
            write_manifests(path, folder, shard, with_checksum=checked)
            try:
                use_everything(path)
                read.add(name)
            except UserError as problem:
                message = str(problem)
                assert message.startswith(str(path)), (name, value)
                assert "\n" not in message, (name, value)
                assert len(message) < len(str(path)) + 300, (name, value)
        del table[name]
        write_manifests(path, folder, shard, with_checksum=checked)
        with (
            contextlib.nullcontext()
            if name in OPTIONAL
            else pytest.raises(UserError, match=f"{name}: missing")
        ):
            use_everything(path)
        table[name] = before
    assert read <= INFORMATIVE, "fields that decide something are refused"


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_ids_beyond_the_vocabulary_are_named_with_their_place_by_whoever_reads_them(
    tmp_path: Path, folder_of: Writer, byte_tokenizer: Tokenizer, dtype: str
) -> None:
    folder_of(tmp_path / "bad", [[50, 50], [40]])
    tokens = np.full(100, 7, dtype)
    tokens[[70, 80]] = 261, np.iinfo(dtype).max
    entry = write_shard(
        tmp_path / "bad", "train-00000", tokens, np.array([50, 50]), byte_tokenizer.hash
    )
    manifest = json.loads((tmp_path / "bad" / SHARDS_MANIFEST).read_text())
    manifest["splits"]["train"] = [asdict(entry)]
    (tmp_path / "bad" / SHARDS_MANIFEST).write_text(
        json.dumps(manifest | {"dtype": f"uint{8 * tokens.itemsize}"})
    )
    split = TokenFolder.open(tmp_path / "bad").split("train")
    assert split.read(0, 70).max() == 7
    place = (
        rf"train-00000\.tokens: token {{}} is {{}}, beyond the vocabulary of 261: {RESTORE_HINT}"
    )
    with pytest.raises(UserError, match=place.format(70, 261)):
        split.read(60, 80)
    with pytest.raises(UserError, match=place.format(80, f"{np.iinfo(dtype).max:,}")):
        split.read(0, 100)
    with pytest.raises(UserError, match=r"sample 0: .*beyond the vocabulary"):
        TokenDataset(
            TokenFolder.open(tmp_path / "bad"), sequence_length=100, shuffle=False
        ).sequence(0)


def test_documents_that_overlap_are_named(
    tmp_path: Path, folder_of: Writer, byte_tokenizer: Tokenizer
) -> None:
    folder_of(tmp_path / "bad", [[50, 50]])
    entry = write_shard(
        tmp_path / "bad",
        "train-00000",
        np.full(100, 7, "<u2"),
        np.array([80, -20, 40]),
        byte_tokenizer.hash,
    )
    manifest = json.loads((tmp_path / "bad" / SHARDS_MANIFEST).read_text())
    manifest["splits"]["train"] = [asdict(entry)]
    (tmp_path / "bad" / SHARDS_MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"train-00000\.documents: its documents do not follow each other"
    ):
        TokenFolder.open(tmp_path / "bad").split("train").document_starts(0, 100)


@pytest.mark.parametrize("change", ["deleted", "damaged", "emptied", "a folder"])
def test_a_file_beside_the_tokenizer_that_is_gone_or_another_is_named(
    tmp_path: Path, folder_of: Writer, byte_tokenizer: Tokenizer, refused: Refusal, change: str
) -> None:
    folder_of(tmp_path / "tokens", [[50, 50]])
    path = tmp_path / "tokens"
    manifest = json.loads((path / SHARDS_MANIFEST).read_text())
    (path / SHARDS_MANIFEST).write_text(
        json.dumps(manifest | {"tokenizer_files": hash_tokenizer_files(byte_tokenizer)})
    )
    use_everything(path)
    file = path / "tokenizer" / "tokenizer_config.json"
    text = file.read_text()
    file.unlink()
    if change == "a folder":
        file.mkdir()
    elif change != "deleted":
        file.write_text({"damaged": text.replace("false", "true"), "emptied": ""}[change])
    what = {
        "damaged": "changed since the tokens were made",
        "emptied": "not valid JSON: EOF while parsing a value at line 1",
    }
    message = refused("show", path)
    assert message.startswith(f"{file}: {what.get(change, 'missing')}")
    assert message.endswith(RESTORE_HINT)


def test_more_shards_than_may_be_open_are_read_with_few_files_open(
    tmp_path: Path, folder_of: Writer
) -> None:
    count = MAX_OPEN_FILES // 2 + 40
    split = folder_of(tmp_path / "many", [[3]] * count).split("train")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for i in range(count):
            assert split.read(3 * i, 3 * i + 3)[2] == 0
            assert (
                split.document_starts(0, split.num_tokens).tolist() == list(range(3, 3 * count, 3))
                if i == 0
                else True
            )
        # The second time only tokens are read again: manifests are known, and blocks were verified.
        for manifest in (tmp_path / "many").glob("train-*.json"):
            manifest.unlink()
    assert len(os.listdir("/proc/self/fd")) <= before + MAX_OPEN_FILES


def test_several_threads_read_while_shards_are_closed_and_opened(
    tmp_path: Path, folder_of: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.core.data.shards.storage.MAX_OPEN_FILES", 4)
    split = folder_of(tmp_path / "many", [[50]] * 12).split("train")
    raw = np.concatenate(
        [np.fromfile(tmp_path / "many" / f"train-{i:05d}.tokens", "<u2") for i in range(12)]
    )
    wrong: list[int] = []

    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for start in generator.integers(0, 590, 400).tolist():
            if not np.array_equal(split.read(start, start + 10), raw[start : start + 10]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_moved_folder_is_the_same_folder(path: Path, tmp_path: Path) -> None:
    before = TokenFolder.open(path).split("train").digest
    shutil.move(path, tmp_path / "moved")
    assert TokenFolder.open(tmp_path / "moved").split("train").digest == before
