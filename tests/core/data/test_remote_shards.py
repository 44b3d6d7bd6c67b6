"""Token shards at an address: through real servers on loopback, one for S3 and one that fails as a
test requests.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.packing import PackedSequence
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from lmforge.core.options.load import read_config
from lmforge.core.records.runs import parse_location
from lmforge.core.stages.training_data import TokenSources, find_missing_folders
from tests.conftest import Command, Refusal
from tests.core.data.file_server import FaultyServer, file_server
from tests.core.data.test_shards import flip_bit
from tests.core.files.test_own_folders import NOBODY, as_root
from tests.seeds import fresh_random
from tests.support.object_store import object_store
from tests.support.preloaded import preloaded

Writer = Callable[..., TokenFolder]
PIECE_BYTES = 2 * 65_536
SLOW = pytest.mark.slow

READ_ALL = """
import sys
import lmforge.core.data.shards.remote_storage as storage
from pathlib import Path
from lmforge.core.data.dataset import TokenDataset
from lmforge.text.prepare.pack import pack_folder
from lmforge.text.prepare.dist_context import SingleProcessContext
from lmforge.core.data.shards.folder import TokenFolder
storage.PIECE_BYTES = int(sys.argv[3])
folder = TokenFolder.open(sys.argv[1], cache_folder=Path(sys.argv[2]))
dataset = TokenDataset(folder, sequence_length=500)
print(sum(int(sequence.tokens.sum()) for sequence in dataset.sequences(0, dataset.sequences_per_epoch)))
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lmforge.core.data.shards.remote_storage.REMOTE_RETRY_DELAYS_SECONDS",
        (0.01, 0.02, 0.05, 0.1),
    )
    monkeypatch.setattr("lmforge.core.data.shards.remote_storage.PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def path(tmp_path: Path, folder_of: Writer) -> Path:
    """Three shards of two pieces and a bit."""
    folder_of(tmp_path / "served" / "folder", [[100_000, 40_000, 300]] * 3)
    return tmp_path / "served" / "folder"


@pytest.fixture
def server(path: Path) -> Iterator[FaultyServer]:
    with file_server(path.parent) as server:
        yield server


def opened(server: FaultyServer, cache: Path, **options: int) -> TokenDataset:
    folder = TokenFolder.open(f"{server.address}/folder", cache_folder=cache, **options)  # type: ignore[arg-type]
    return TokenDataset(folder, sequence_length=500)


def local(path: Path) -> TokenDataset:
    return TokenDataset(TokenFolder.open(path), sequence_length=500)


def same(a: Iterable[PackedSequence], b: Iterable[PackedSequence]) -> bool:
    names = "tokens", "labels", "positions", "document_ids"
    return all(
        np.array_equal(getattr(x, name), getattr(y, name))
        for x, y in zip(a, b, strict=True)
        for name in names
    )


def bytes_of(folder: Path) -> int:
    return sum(
        file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".bytes"
    )


@pytest.mark.parametrize(
    "address",
    ["memory://bucket/tokens", pytest.param("s3://bucket/tokens", marks=SLOW), "{}/folder"],
)
def test_samples_of_any_address_are_those_of_the_local_folder(
    path: Path, tmp_path: Path, server: FaultyServer, address: str
) -> None:
    expected, address = local(path), address.format(server.address)
    with object_store(tmp_path) if address.startswith("s3") else nullcontext():
        if not address.startswith("http"):
            target = parse_location(address)
            target.parent.mkdir()
            for file in [file for file in path.rglob("*") if file.is_file()]:
                (target / str(file.relative_to(path))).write_bytes(file.read_bytes())
        folder = TokenFolder.open(address, cache_folder=tmp_path / "cache")
        assert folder.tokenizer.hash == TokenFolder.open(path).tokenizer.hash
        dataset = TokenDataset(folder, sequence_length=500)
        assert dataset.plan_hash == expected.plan_hash
        with BatchLoader(dataset, global_batch_size=8, micro_batch_size=8) as loader:
            for step in (0, 1, 100):
                batch = Batch.from_sequences(expected.sequences(8 * step, 8 * step + 8))
                assert (loader.batches(step)[0].labels == batch.labels).all()


def test_a_file_address_is_a_folder_of_this_machine_that_may_be_missing(
    path: Path, tmp_path: Path
) -> None:
    expected, recipe = [f"file://{tmp_path}/none"], tmp_path / "r.toml"
    recipe.write_text(
        f'[[data.sources]]\nfolder = "file://{path}"\n[[data.sources]]\nfolder = "{expected[0]}"\n'
    )
    assert find_missing_folders(read_config(recipe)) == expected
    recipe.write_text(f'[data]\nfolder = "file://{path}"\nsequence_length = 500\n')
    dataset = TokenSources.open(read_config(recipe)).training(8)
    assert same((dataset.sequence(number) for number in range(8)), local(path).sequences(0, 8))


def test_a_server_that_fails_at_times_changes_no_sample(
    path: Path, tmp_path: Path, server: FaultyServer
) -> None:
    expected, generator = local(path), fresh_random(0)
    dataset = opened(server, tmp_path / "cache")
    kinds = ["error", "truncated", "cut", "short"]
    for _ in range(5):  # up to four in a row, which are forgiven
        server.faults += [*generator.choices(kinds, k=generator.randrange(1, 5)), "none"]
    server.faults += [*kinds, "none"]
    count = expected.sequences_per_epoch
    assert same(dataset.sequences(0, count), expected.sequences(0, count))
    assert not server.faults


def test_a_manifest_and_a_tokenizer_that_fail_at_first_are_read(
    tmp_path: Path, server: FaultyServer
) -> None:
    server.faults = ["error", "cut", "none", "truncated", "error", "none"]
    folder = TokenFolder.open(f"{server.address}/folder", cache_folder=tmp_path / "cache")
    assert folder.tokenizer.vocab_size == 261


def test_a_server_that_continues_failing_is_named_with_address_and_shard(
    tmp_path: Path, server: FaultyServer
) -> None:
    dataset = opened(server, tmp_path / "cache")
    server.faults = ["error"] * 1000
    with pytest.raises(
        UserError, match=rf"sample 0: {server.address}/folder/train-0000\d\.\w+: .*500"
    ) as problem:
        dataset.sequence(0)
    assert "\n" not in str(problem.value)


def test_missing_and_truncated_shards_of_an_address_are_named_on_opening(
    path: Path, tmp_path: Path, server: FaultyServer
) -> None:
    os.truncate(path / "train-00001.tokens", 1000)
    with pytest.raises(
        UserError,
        match=rf"{server.address}/folder/train-00001\.tokens: truncated: 1000 bytes of 280600",
    ):
        opened(server, tmp_path / "cache")
    (path / "train-00001.tokens").unlink()
    with pytest.raises(UserError, match=rf"{server.address}/folder/train-00001\.tokens: missing"):
        opened(server, tmp_path / "cache")


def test_an_address_that_is_no_token_folder_or_cannot_be_reached_is_refused(
    tmp_path: Path, server: FaultyServer, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "--data.stage_to",
        tmp_path,
        "--run.folder",
        tmp_path,
        "--run.name",
        "a",
    ]
    address = f"{server.address}/nowhere"
    assert refused("pretrain", "--data.folder", address, *options).startswith(
        f"{address}: no token folder (manifest.json is"
    )
    message = refused("pretrain", "--data.folder", "http://127.0.0.1:9/tokens", *options)
    assert message.startswith("http://127.0.0.1:9/tokens/manifest.json: ")
    assert refused("pretrain", "--data.folder", "nothing://x/y", *options).startswith(
        "nothing://x/y: "
    )
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    (tmp_path / "shards").write_text("")
    message = refused("pretrain", "--data.folder", f"{server.address}/folder", *options)
    assert message == f"{tmp_path}/shards: cannot keep pieces of shards (File exists); name another"


def test_the_cache_never_exceeds_its_bound_and_keeps_what_was_used_last(
    path: Path, tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.core.data.shards.piece_cache.TOUCH_SECONDS", 0.0)
    bound, cache, thesis = (
        4 * PIECE_BYTES,
        tmp_path / "cache",
        tmp_path / "cache" / "chapters" / "1.tex",
    )
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    os.utime(thesis, (0, 0))
    dataset, expected = opened(server, cache, cache_bytes=bound), local(path)
    for n in range(150):
        assert same([dataset.sequence(n)], [expected.sequence(n)])
        assert bytes_of(cache) <= bound
    assert bytes_of(cache) > 2 * PIECE_BYTES
    before = server.requests.total()
    dataset.sequence(149)
    assert server.requests.total() == before
    assert thesis.exists(), "the cache has deleted what is no piece"


@as_root
def test_a_cache_of_another_user_is_refused(tmp_path: Path, server: FaultyServer) -> None:
    """Its files have fixed names, and may be links."""
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", NOBODY, NOBODY)
    with pytest.raises(
        UserError, match=r"cache: a folder of another user; name another data\.stage_to"
    ):
        opened(server, tmp_path / "cache")


def test_ranks_of_a_host_share_a_cache_and_download_each_piece_once(
    path: Path, tmp_path: Path, server: FaultyServer
) -> None:
    (tmp_path / "read_all.py").write_text(READ_ALL)
    given = f"{server.address}/folder", tmp_path / "cache", PIECE_BYTES
    ranks = [preloaded().start(given, tmp_path, script=tmp_path / "read_all.py") for _ in range(2)]
    expected = local(path)
    total = sum(
        int(sequence.tokens.sum())
        for sequence in expected.sequences(0, expected.sequences_per_epoch)
    )
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0], ranks[0].errors.read_text()
    assert [int(rank.out.read_text()) for rank in ranks] == [total] * 2
    requests = {
        key: count
        for key, count in server.requests.items()
        if not key[0].endswith("/manifest.json")
    }
    assert len([key for key in requests if ".tokens" in key[0]]) == 9
    assert set(requests.values()) == {1}
    assert not list((tmp_path / "cache").glob("*/.*")), "locks and partial files"


def test_a_step_within_windows_downloads_from_few_places(
    path: Path, tmp_path: Path, server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 sequences of 100 tokens: a chunk is a tenth of a piece, and each step of a window reads
    the same two chunks.
    """
    monkeypatch.setattr("lmforge.core.data.dataset.CHUNK_TOKENS", 6400)
    folder = TokenFolder.open(f"{server.address}/folder", cache_folder=tmp_path / "cache")
    downloads = {}
    for window in (None, 2):
        dataset = TokenDataset(folder, sequence_length=100, window=window)
        touched = {int(index) * 100 // (PIECE_BYTES // 2) for index in dataset.indices(0, 128)}
        server.requests.clear()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        (tmp_path / "cache").mkdir()
        dataset.sequences(0, 128)
        downloads[window] = len([key for key in server.requests if ".tokens" in key[0]])
        # Pieces of shards, which do not begin at whole pieces of the split.
        assert downloads[window] >= len(touched) - 3
    assert downloads[None] == 9
    assert downloads[2] <= 4


def test_a_damaged_piece_in_the_cache_is_downloaded_again_alone(
    path: Path, tmp_path: Path, server: FaultyServer
) -> None:
    expected = local(path)
    opened(server, tmp_path / "cache").sequences(0, expected.sequences_per_epoch)
    (token_piece,) = (tmp_path / "cache").rglob("train-00001.tokens.1")
    (manifest,) = (tmp_path / "cache").rglob("train-00002.json.0")
    flip_bit(token_piece, 70_000)
    os.truncate(manifest, 10)
    server.requests.clear()
    dataset = opened(server, tmp_path / "cache")
    assert same(dataset.sequences(0, 500), expected.sequences(0, 500))
    again = sorted(path for path, _ in server.requests if not path.endswith("/manifest.json"))
    assert again == ["/folder/train-00001.tokens", "/folder/train-00002.json"]


def test_a_stall_is_reported_with_the_shard_and_the_request_is_repeated(
    path: Path,
    tmp_path: Path,
    server: FaultyServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmforge.core.data.loader.SLOW_BATCH_WARNING_SECONDS", 0.3)
    dataset, expected = opened(server, tmp_path / "cache"), local(path)
    monkeypatch.setattr("lmforge.core.data.shards.remote_storage.REQUEST_TIMEOUT_SECONDS", 1.0)
    server.faults, server.stall_seconds = ["stall"], 4.0
    with BatchLoader(dataset, global_batch_size=4, micro_batch_size=4) as loader:
        batch = loader.batches(0)[0]
    assert (batch.labels == Batch.from_sequences(expected.sequences(0, 4)).labels).all()
    assert f"batch 0: no data for 0 s from {server.address}/folder/train-0000" in caplog.text


def test_a_remote_folder_is_verified_and_its_damaged_blocks_named(
    path: Path, server: FaultyServer, lmforge: Command, tmp_path: Path
) -> None:
    flip_bit(path / "train-00001.tokens", 70_000)
    done = lmforge("prepare", "--verify", f"{server.address}/folder", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    *_, shard, _, quarantine = done.stdout.splitlines()
    assert shard == "train-00001: 1 of 5 blocks of .tokens do not match: 1"
    assert quarantine == 'quarantine = ["train-00001:1"]'


def test_a_run_trains_from_a_store_as_from_a_folder(
    tmp_path: Path, tiny_tokens: Path, tiny_run: Path, tiny_options: list[str], lmforge: Command
) -> None:
    served = shutil.copytree(tiny_tokens, tmp_path / "served" / "tokens")
    with file_server(served.parent) as server:
        options = [
            "--data.folder",
            f"{server.address}/tokens",
            "--data.stage_to",
            tmp_path / "cache",
        ]
        words = [*tiny_options, *options, "--run.folder", tmp_path / "runs", "--run.name", "a"]
        assert "tokens, so" in lmforge("pretrain", *words, "--dry-run").stdout
        done = lmforge("pretrain", *words, ranks=2)
        assert done.returncode == 0, done.stderr
        assert lmforge("evaluate", tmp_path / "runs" / "a", "--sequences", 2).returncode == 0
    assert list((tmp_path / "cache").rglob("train-00000.tokens.0"))

    def losses(run: Path) -> list[float]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [record["loss"] for record in records if "loss" in record]

    assert losses(tmp_path / "runs" / "a") == pytest.approx(losses(tiny_run), abs=1e-4)
