import gc
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmforge.core.data.batch import Batch
from lmforge.core.data.dataset import TokenDataset
from lmforge.core.data.labels import IGNORE_INDEX
from lmforge.core.data.loader import READ_AHEAD_STEPS, BatchLoader
from lmforge.core.data.packing import PADDING_DOCUMENT_ID, PackedSequences
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from tests.seeds import fresh_seed

Writer = Callable[..., TokenFolder]
FIELDS = ("tokens", "labels", "positions", "document_ids")


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


@pytest.fixture
def dataset(tmp_path: Path, folder_of: Writer) -> TokenDataset:
    return TokenDataset(
        folder_of(tmp_path / "folder", [[50, 3, 200, 2], [90, 400]]),
        sequence_length=8,
        seed=fresh_seed(60),
    )


def global_batch(dataset: TokenDataset, step: int, batch_size: int) -> Batch:
    return Batch.from_sequences(dataset.sequences(step * batch_size, (step + 1) * batch_size))


@pytest.mark.parametrize("ranks", range(1, 17))
def test_the_global_batch_is_the_same_for_any_number_of_ranks(
    dataset: TokenDataset, ranks: int
) -> None:
    batch_size = 2 * ranks
    steps = (0, 1, 7)
    parts: dict[int, list[Batch]] = {step: [] for step in steps}
    for rank in range(ranks):
        with BatchLoader(
            dataset,
            global_batch_size=batch_size,
            micro_batch_size=1,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
        ) as loader:
            for step in steps:
                parts[step] += loader.batches(step)
    for step in steps:
        assert same(Batch.cat(parts[step]), global_batch(dataset, step, batch_size))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 6, 12])
def test_the_split_into_micro_batches_changes_nothing(
    dataset: TokenDataset, micro_batch_size: int
) -> None:
    with BatchLoader(dataset, global_batch_size=12, micro_batch_size=micro_batch_size) as loader:
        for step in range(4):
            batches = loader.batches(step)
            assert [batch.batch_size for batch in batches] == [micro_batch_size] * (
                12 // micro_batch_size
            )
            assert same(Batch.cat(batches), global_batch(dataset, step, 12))


def test_resuming_at_any_step_on_any_ranks_gives_what_would_have_come(
    dataset: TokenDataset,
) -> None:
    """Before the first step, inside an epoch, at an exact epoch end, in a later epoch, and twice
    over.
    """
    batch_size = 6
    at_epoch_end = dataset.sequences_per_epoch  # B · this is a multiple of the epoch
    for step in (0, 1, fresh_seed() % 500, at_epoch_end, at_epoch_end - 1, 5 * at_epoch_end + 3):
        for _ in range(2):
            for ranks in (1, 2, 3):
                got = []
                for rank in range(ranks):
                    with BatchLoader(
                        dataset,
                        global_batch_size=batch_size,
                        micro_batch_size=1,
                        data_parallel_rank=rank,
                        data_parallel_size=ranks,
                    ) as loader:
                        got += loader.batches(step)
                assert same(Batch.cat(got), global_batch(dataset, step, batch_size)), (step, ranks)


def test_steps_may_be_requested_out_of_order(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, global_batch_size=4, micro_batch_size=4) as loader:
        for step in (3, 4, 4, 0, 9, 10, 2):
            assert same(loader.batches(step)[0], global_batch(dataset, step, 4))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_a_batch_that_ranks_do_not_divide_is_shared_out_and_padded_to_equal_micro_batches(
    dataset: TokenDataset, ranks: int, micro_batch_size: int
) -> None:
    parts, shapes = [], set()
    for rank in range(ranks):
        with BatchLoader(
            dataset,
            global_batch_size=8,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            rng_seed=7,
        ) as loader:
            batches = loader.batches(5)
        shapes.add(tuple(batch.batch_size for batch in batches))
        part = Batch.cat(batches)
        is_padding = (part.document_ids == PADDING_DOCUMENT_ID).all(1)
        num_sequences = int((~is_padding).sum())
        assert num_sequences in (8 // ranks, 8 // ranks + 1)
        assert not is_padding[:num_sequences].any()
        assert (part.labels[num_sequences:] == IGNORE_INDEX).all()
        parts.append(part[:num_sequences])
    assert len(shapes) == 1
    assert set(*shapes) == {micro_batch_size}
    with BatchLoader(dataset, global_batch_size=8, micro_batch_size=8, rng_seed=7) as loader:
        assert same(Batch.cat(parts), loader.batches(5)[0])


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (
            {"global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 4},
            "2 sequences for 4 ranks",
        ),
        ({"global_batch_size": 0, "micro_batch_size": 1, "data_parallel_size": 1}, "0 sequences"),
        (
            {"global_batch_size": 8, "micro_batch_size": 0, "data_parallel_size": 1},
            "micro-batches of 0",
        ),
        (
            {
                "global_batch_size": 8,
                "micro_batch_size": 8,
                "data_parallel_size": 1,
                "data_parallel_rank": 1,
            },
            "rank 1 of 1",
        ),
    ],
)
def test_sizes_that_leave_a_rank_without_a_sequence_are_refused(
    dataset: TokenDataset, sizes: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        BatchLoader(dataset, **sizes)


@pytest.mark.usefixtures("impatient")
def test_what_goes_wrong_in_the_thread_is_raised_where_the_batch_is_requested(
    tmp_path: Path, folder_of: Writer
) -> None:
    folder = folder_of(tmp_path / "a", [[400]])
    dataset = TokenDataset(folder, sequence_length=8, seed=0)
    with BatchLoader(dataset, global_batch_size=2, micro_batch_size=2) as loader:
        (tmp_path / "a" / "train-00000.tokens").unlink()
        with pytest.raises(UserError, match=r"sample 0: .*train-00000\.tokens.*No such file"):
            loader.batches(0)


def test_later_steps_are_read_while_one_is_used(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sequences = queue.Queue[int](), dataset.sequences

    def recorded(start: int, stop: int, **options: Any) -> PackedSequences:
        read.put(start // 4)
        return sequences(start, stop, **options)

    monkeypatch.setattr(dataset, "sequences", recorded)
    with BatchLoader(dataset, global_batch_size=4, micro_batch_size=4) as loader:
        for step in (7, 8):
            loader.batches(step)
        assert [read.get(timeout=60) for _ in range(2 + READ_AHEAD_STEPS)] == list(
            range(7, 9 + READ_AHEAD_STEPS)
        )
    assert read.empty()


def test_closing_ends_the_thread(dataset: TokenDataset) -> None:
    loader = BatchLoader(dataset, global_batch_size=2, micro_batch_size=2)
    loader.batches(0)
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    loader.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_thousands_of_steps_open_no_more_files(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, global_batch_size=2, micro_batch_size=1) as loader:
        for step in range(100):  # until every shard has been met
            loader.batches(step)
        gc.collect()  # what other tests have left open
        before = len(os.listdir("/proc/self/fd"))
        for step in range(100, 2000):
            loader.batches(step)
        assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_is_counted_and_a_stall_is_said(
    dataset: TokenDataset, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real stall: the tokens are behind a lock that someone else holds."""
    monkeypatch.setattr("lmforge.core.data.loader.SLOW_BATCH_WARNING_SECONDS", 0.1)
    lock, read = threading.Lock(), dataset.packing.split.read

    def locked_read(start: int, stop: int) -> Any:
        with lock:
            return read(start, stop)

    monkeypatch.setattr(dataset.packing.split, "read", locked_read)
    with BatchLoader(dataset, global_batch_size=2, micro_batch_size=1) as loader:
        lock.acquire()
        threading.Timer(0.5, lock.release).start()
        began = time.perf_counter()
        loader.batches(3)
        waited = time.perf_counter() - began
        assert 0.3 < loader.data_wait_seconds <= waited
    assert "batch 3: no data for" in caplog.text
    assert "folder: train" in caplog.text


def test_a_batch_can_be_sliced_joined_and_moved(dataset: TokenDataset) -> None:
    batch = global_batch(dataset, 0, 6)
    assert (batch.batch_size, batch.sequence_length) == (6, 8)
    assert same(Batch.cat([batch[:2], batch[2:5], batch[5:]]), batch)
    assert same(batch.to("cpu", non_blocking=True), batch)
    dtypes = [getattr(batch, name).dtype for name in FIELDS]
    assert dtypes == [torch.int64, torch.int64, torch.int64, torch.int32]


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu_as_they_are_on_the_cpu(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, global_batch_size=4, micro_batch_size=2, device="cuda") as loader:
        for step in range(5):
            batches = loader.batches(step)
            assert all(batch.tokens.is_cuda for batch in batches)
            assert same(Batch.cat(batches).to("cpu"), global_batch(dataset, step, 4))


def test_keys_are_of_samples_and_columns_whoever_reads_them(dataset: TokenDataset) -> None:
    """The same for any ranks and micro-batches; others for every token, sample, epoch and seed."""
    batch_size, seed = 12, fresh_seed(60)

    def keys(step: int, ranks: int, micro_batch_size: int, seed: int = seed) -> torch.Tensor:
        parts = []
        for rank in range(ranks):
            options = {
                "data_parallel_rank": rank,
                "data_parallel_size": ranks,
                "micro_batch_size": micro_batch_size,
                "rng_seed": seed,
            }
            with BatchLoader(dataset, global_batch_size=batch_size, **options) as loader:  # type: ignore[arg-type]
                parts += loader.batches(step)
        joined = Batch.cat(parts).rng_keys
        assert joined is not None
        return joined

    expected = keys(2, 1, 12)
    assert expected.shape == (batch_size, dataset.sequence_length)
    for ranks, micro_batch_size in ((1, 1), (2, 3), (3, 4), (4, 1)):
        assert torch.equal(keys(2, ranks, micro_batch_size), expected)
    # The steps of an epoch and more: the same sequences come again, their keys do not.
    steps = range(2 * -(-dataset.sequences_per_epoch // batch_size))
    every = torch.cat([keys(step, 1, 12) for step in steps] + [keys(0, 1, 12, seed + 1)])
    assert len(every.unique()) == every.numel()


def test_without_a_seed_for_it_there_are_no_keys(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, global_batch_size=2, micro_batch_size=1) as loader:
        assert all(batch.rng_keys is None for batch in loader.batches(0))
