"""A corpus of very many shards: how many files are opened, checked and kept open."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import xxhash

from lmforge.core.data.best_fit_index import BEST_FIT_VERSION, manifest_name
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.records.manifests import (
    FORMAT_VERSION,
    BestFitManifest,
    IndexEntry,
    ShardEntry,
    TokenFolderManifest,
)

Writer = Callable[..., TokenFolder]

OPEN_AND_COUNT = """
import json, os, sys, threading
from pathlib import Path
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError

counting, opened, looked_at, stat = True, [], [], os.stat
def in_main(path):  # a file of the folder, and the thread that opens it
    return counting and threading.current_thread() is threading.main_thread() and str(path).startswith(sys.argv[1])
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and in_main(args[0]) else None)
def counted_stat(path, *args, **kwargs):
    if in_main(path):
        looked_at.append(str(path))
    return stat(path, *args, **kwargs)
os.stat = counted_stat
dataset = TokenDataset(TokenFolder.open(Path(sys.argv[1])), sequence_length=4096, packing=sys.argv[2])
counting = False
indices = [len(set(dataset.indices(step * 512, step * 512 + 512).tolist())) for step in (0, 10**6, 7 * 10**6)]
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
try:
    dataset.sequences(0, 1)
except UserError as problem:
    print(json.dumps([opened, looked_at, indices, dataset.packing.split.num_tokens, str(problem)]))
"""


def write_plan(folder: Path, tokenizer: Tokenizer, shards: int, tokens: int) -> None:
    """The manifest of a folder, without a shard in it."""
    entries = [
        ShardEntry(f"train-{number:05d}", tokens, tokens // 1000, f"{number:032x}")
        for number in range(shards)
    ]
    kind = tokenizer.hash, tokenizer.vocab_size, "uint16"
    digest = xxhash.xxh3_128_hexdigest(json.dumps([entry.xxh3 for entry in entries]).encode())
    indices = [
        IndexEntry(entry.name, tokens, tokens // 4096 + 1, tokens // 1000, "0" * 16)
        for entry in entries
    ]
    content = json.dumps(asdict(BestFitManifest(BEST_FIT_VERSION, 4096, digest, indices)))
    (folder / manifest_name(4096)).write_text(content)
    best_fit = {"4096": xxhash.xxh3_128_hexdigest(content.encode())}
    manifest = TokenFolderManifest(
        FORMAT_VERSION,
        "test",
        {},
        *kind,
        0,
        0,
        {},
        {"train": entries},
        best_fit=best_fit,  # type: ignore[arg-type]
    )
    (folder / SHARDS_MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))


@pytest.mark.parametrize("packing", ["concat", "best-fit"])
def test_30000_shards_are_opened_by_reading_a_file_or_two_and_missing_ones_are_found_by_a_thread(
    tmp_path: Path, byte_tokenizer: Tokenizer, packing: str
) -> None:
    write_plan(tmp_path, byte_tokenizer, 30_000, 500_000_000)
    command = [sys.executable, "-c", OPEN_AND_COUNT, str(tmp_path), packing]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    opened, looked_at, indices, tokens, problem = json.loads(ended.stdout)
    expected = [
        str(tmp_path / name)
        for name in (SHARDS_MANIFEST, *([manifest_name(4096)] if packing == "best-fit" else []))
    ]
    assert opened == expected
    assert set(looked_at) <= set(expected)
    assert indices == [512] * 3
    assert tokens == 15 * 10**12
    missing = "train-00000.tokens" if packing == "concat" else "train-00000.best-fit-4096"
    assert problem.startswith(f"sample 0: {tmp_path}/{missing}: missing: ")


def test_each_rank_checks_its_part_of_many_shards_before_it_needs_them(
    tmp_path: Path, folder_of: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    folder_of(path, [[50]] * 6)
    file = path / "train-00005.tokens"
    os.truncate(file, 98)
    with pytest.raises(UserError, match=r"train-00005\.tokens: truncated: 98 bytes of 100"):
        TokenFolder.open(path)
    monkeypatch.setattr("lmforge.core.data.shards.files.MAX_CHECKED_ON_OPENING", 5)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        split = TokenFolder.open(path).split("train")
        for thread in threading.enumerate():
            if thread.name == "shard sizes":
                thread.join()
        if rank == 0:
            assert len(split.read(0, 50)) == 50
        else:
            with pytest.raises(UserError, match=r"train-00005\.tokens: truncated: 98 bytes of 100"):
                split.read(0, 50)
