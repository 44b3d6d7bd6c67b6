"""The loaders that data.py compares, each in a separate process, in an environment that need not
have lmforge.

    python data_contenders.py write NAME FOLDER             makes the files that a loader reads, of
                                                            FOLDER/tokens.bin
    python data_contenders.py measure NAME FOLDER BATCHES   prints the figures as JSON

A sample is a sequence of SEQUENCE_LENGTH tokens and its labels, as long. All but the floor give
with it document ids and positions, and batches in a shuffled order that goes on from a saved state.
Whatever a library lacks of it is `with_documents`, which runs in its worker. The floor and what is
by hand are a DataLoader over a memory map.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCE_LENGTH, BATCH_SIZE, EOS, SEED = 4096, 64, 0, 0
IGNORED = -100
AHEAD = 4  # batches that are read ahead, the same for all
WARM_UP_BATCHES, MEMORY_BATCHES = 8, 8

Arrays = dict[str, Any]
Opened = tuple[Iterator[Arrays], Callable[[], Any]]  # batches, and the state to save for resuming after them


def with_documents(raw: np.ndarray) -> Arrays:
    """The model inputs made of raw tokens [batch, SEQUENCE_LENGTH + 1], with as few passes over
    them as possible in numpy.
    """
    tokens = raw[:, :-1].astype(np.int64)
    ends = tokens == EOS
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    columns = np.arange(tokens.shape[1])
    labels = raw[:, 1:].astype(np.int64)
    labels[ends] = IGNORED
    return {
        "tokens": tokens,
        "labels": labels,
        "positions": columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1),
        "document_ids": np.cumsum(starts, axis=1, dtype=np.int32),
    }


def raw_sequences(folder: Path) -> np.ndarray:
    """Every sequence of the corpus with the token after it: a view of the file, uint16 [sequences,
    SEQUENCE_LENGTH + 1].
    """
    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
    return np.lib.stride_tricks.sliding_window_view(tokens, SEQUENCE_LENGTH + 1)[::SEQUENCE_LENGTH]


def open_lmforge(folder: Path) -> Opened:
    from lmforge.core.data.dataset import TokenDataset
    from lmforge.core.data.loader import BatchLoader
    from lmforge.core.data.shards.folder import TokenFolder

    dataset = TokenDataset(TokenFolder.open(folder / "shards"), sequence_length=SEQUENCE_LENGTH, seed=SEED)
    loader = BatchLoader(dataset, global_batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE)
    step = 0

    def batches() -> Iterator[Arrays]:
        nonlocal step
        while True:
            (batch,) = loader.batches(step)
            step += 1
            yield batch.tensors

    return batches(), lambda: {"samples_consumed": step * BATCH_SIZE, "plan_hash": dataset.plan_hash}


class _MappedBatches:
    """A dataset whose items are batches, by the numbers of their sequences."""

    def __init__(self, folder: Path, documents: bool) -> None:
        self._folder, self._documents = folder, documents
        self._sequences: np.ndarray | None = None

    def __getitem__(self, numbers: Any) -> Any:
        from torch import from_numpy

        if self._sequences is None:  # in the worker
            self._sequences = raw_sequences(self._folder)
        raw = self._sequences[numbers]
        arrays = with_documents(raw) if self._documents else {"tokens": raw.astype(np.int64)}
        return {name: from_numpy(array) for name, array in arrays.items()}


class _ShuffledBatches:
    """Indices of sequences, a batch at a time, in another order each epoch."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences

    def __iter__(self) -> Iterator[np.ndarray]:
        epoch = 0
        while True:
            order = np.random.default_rng((SEED, epoch)).permutation(self._sequences)
            yield from order[: len(order) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
            epoch += 1


def _open_mapped(folder: Path, documents: bool) -> Opened:
    from torch.utils.data import DataLoader

    sampler: Any = _ShuffledBatches(len(raw_sequences(folder)))
    dataset: Any = _MappedBatches(folder, documents)
    loader = DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=1, prefetch_factor=AHEAD)
    return iter(loader), lambda: {"seed": SEED, "samples": 2**40}  # the state that a sampler needs to resume


def write_streaming(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}) as out:
        for sequence in raw_sequences(folder):
            out.write({"tokens": np.ascontiguousarray(sequence)})


def open_streaming(folder: Path) -> Opened:
    from streaming import StreamingDataLoader, StreamingDataset
    from torch import from_numpy

    def collate(samples: list[Arrays]) -> Arrays:
        arrays = with_documents(np.stack([sample["tokens"] for sample in samples]))
        return {name: from_numpy(array) for name, array in arrays.items()}

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH_SIZE)
    loader = StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=1, prefetch_factor=AHEAD, collate_fn=collate)

    def batches() -> Iterator[Arrays]:
        while True:
            yield from loader

    return batches(), loader.state_dict


def write_grain(folder: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "sequences.array_record"), "group_size:1")
    for sequence in raw_sequences(folder):
        writer.write(sequence.tobytes())
    writer.close()


def _grain_batch(records: list[bytes]) -> Arrays:
    return with_documents(np.frombuffer(b"".join(records), np.uint16).reshape(len(records), -1))


def open_grain(folder: Path) -> Opened:
    import grain
    from absl import flags

    flags.FLAGS(["data"], known_only=True)
    source = grain.sources.ArrayRecordDataSource(str(folder / "sequences.array_record"))
    dataset = grain.MapDataset.source(source).shuffle(seed=SEED).repeat().batch(BATCH_SIZE, batch_fn=_grain_batch)
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=AHEAD)
    iterator = iter(dataset.to_iter_dataset(read).mp_prefetch(options))
    return iterator, iterator.get_state


def write_datasets(folder: Path) -> None:
    from datasets import Dataset, Features, List, Value

    sequences = raw_sequences(folder)
    features = Features({"tokens": List(Value("uint16"), length=SEQUENCE_LENGTH + 1)})

    def rows() -> Iterator[Arrays]:
        for sequence in sequences:
            yield {"tokens": sequence}

    Dataset.from_generator(rows, features=features, cache_dir=str(folder / "cache")).save_to_disk(str(folder / "arrow"))


def open_datasets(folder: Path) -> Opened:
    from datasets import load_from_disk
    from torch import from_numpy
    from torch.utils.data import DataLoader

    dataset = load_from_disk(str(folder / "arrow")).to_iterable_dataset(num_shards=64).with_format("numpy")
    dataset = dataset.shuffle(seed=SEED, buffer_size=1024).batch(BATCH_SIZE, drop_last_batch=True)

    def collate(batch: Any) -> Arrays:
        return {name: from_numpy(array) for name, array in with_documents(np.asarray(batch["tokens"])).items()}

    loader = DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=AHEAD, collate_fn=collate)

    def batches() -> Iterator[Arrays]:
        epoch = 0
        while True:
            dataset.set_epoch(epoch)
            yield from loader
            epoch += 1

    return batches(), dataset.state_dict


FLOOR, BY_HAND = "memory map, raw slices", "memory map, by hand"
OPEN: dict[str, Callable[[Path], Opened]] = {
    "lmforge": open_lmforge,
    FLOOR: lambda folder: _open_mapped(folder, documents=False),
    BY_HAND: lambda folder: _open_mapped(folder, documents=True),
    "MosaicML Streaming": open_streaming,
    "Grain": open_grain,
    "datasets": open_datasets,
}
WRITE = {"MosaicML Streaming": write_streaming, "Grain": write_grain, "datasets": write_datasets}


def _tree() -> list[int]:
    """This process and all its descendants."""
    results = [os.getpid()]
    for pid in results:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                results += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:
            pass  # it has ended
    return results


def _cpu_seconds() -> float:
    """CPU time of the tree so far."""
    ticks = 0
    for pid in _tree()[1:]:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _memory_mb() -> float:
    """Memory of the tree without pages of files, which the system can drop.

    Shared memory is counted once.
    """
    kib = 0
    for pid in _tree():
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        kib += sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return kib / 1000 * 1.024


def _check(batch: Arrays) -> None:
    """Check a batch: labels are the next tokens, positions and documents begin after each end."""
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    expected = with_documents(np.concatenate((arrays["tokens"], arrays["labels"][:, -1:]), axis=1))
    for name in arrays.keys() - {"labels"}:
        np.testing.assert_array_equal(arrays[name], expected[name])
        assert arrays[name].dtype == expected[name].dtype
    if "labels" in arrays:
        np.testing.assert_array_equal(arrays["labels"][:, :-1], expected["labels"][:, :-1])


def measure(name: str, folder: Path, batches: int) -> dict[str, Any]:
    """The figures of one loader; those a thousand samples are of `batches` batches, after some to
    warm up.
    """
    imports = {
        "Grain": "grain",
        "MosaicML Streaming": "streaming",
        "datasets": "datasets",
        "lmforge": "lmforge.core.data.loader",
    }
    for module in ("torch.utils.data" if name != "Grain" else "grain", imports.get(name, "torch")):
        __import__(module)
    before, began = _memory_mb(), time.perf_counter()
    iterator, state = OPEN[name](folder)
    first = next(iterator)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began}
    if name != FLOOR:
        _check(first)
    for _ in range(WARM_UP_BATCHES):
        next(iterator)
    began, main, every = time.perf_counter(), time.thread_time(), _cpu_seconds()
    for _ in range(batches):
        next(iterator)
    thousands = batches * BATCH_SIZE / 1000
    result["main_thread_cpu"] = (time.thread_time() - main) / thousands
    result["all_cpu"] = (_cpu_seconds() - every) / thousands
    result["samples_a_second"] = 1000 * thousands / (time.perf_counter() - began)
    state_bytes = state()
    result["state_bytes"] = len(state_bytes if isinstance(state_bytes, bytes) else json.dumps(state_bytes, default=str))
    most = 0.0
    for _ in range(MEMORY_BATCHES):
        next(iterator)
        most = max(most, _memory_mb())
    return result | {"memory_mb": most - before}


def main() -> None:
    verb, name, folder, *numbers = sys.argv[1:]
    if verb == "write":
        WRITE[name](Path(folder))
        return
    print(json.dumps(measure(name, Path(folder), int(numbers[0]))), flush=True)
    os._exit(0)  # some of them wait long for their workers


if __name__ == "__main__":
    main()
