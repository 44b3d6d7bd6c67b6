"""The sample for training a tokenizer: a part of the texts that does not depend on their files."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lmforge.text.prepare import tokenizer_sample
from lmforge.text.prepare.dist_context import SingleProcessContext
from lmforge.text.prepare.prepare import prepare
from lmforge.text.prepare.shard_jobs import UnitReader
from lmforge.text.prepare.tokenizer_sample import LeastTexts, sample_texts
from lmforge.text.prepare.worker_pool import WorkerPool
from lmforge.text.sources import text_sources
from lmforge.text.sources.text_sources import open_text_source
from tests.seeds import fresh_random
from tests.text.test_prepare import some_texts


def some_documents() -> list[str]:
    """Short ones, some twice, and one of many pieces."""
    return [*some_texts(300), *some_texts(20), "\n".join(some_texts(900, seed=5))]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_folder(
    folder: Path, texts: list[str], suffix: str = ".txt", pack: Callable[[bytes], bytes] = bytes
) -> None:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:04d}{suffix}").write_bytes(pack(text.encode()))


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=37)


CONTAINERS: dict[str, Callable[[Path, list[str]], object]] = {
    "texts": write_folder,
    "packed texts": lambda path, texts: write_folder(path, texts, ".txt.gz", gzip.compress),
    "a.jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    "reversed.jsonl": lambda path, texts: path.write_bytes(lines(texts[::-1])),
    "a.jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(lines(texts))),
    "a.jsonl.zst": lambda path, texts: path.write_bytes(zstandard.compress(lines(texts))),
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("characters", [30_000, pytest.param(10**9, marks=pytest.mark.slow)])
def test_the_same_texts_give_the_same_tokenizer_whatever_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    """Of a part of them, and of all."""
    monkeypatch.setattr(tokenizer_sample, "SAMPLE_CHARACTERS", characters)
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 10_000)
    monkeypatch.setattr(text_sources, "TEXT_UNIT_BYTES", 10_000)
    trained = {}
    for name, write in CONTAINERS.items():
        write(tmp_path / name, some_documents())
        prepare(str(tmp_path / name), tmp_path / f"tokens of {name}", vocab_size=700, workers=1)
        trained[name] = (
            tmp_path / f"tokens of {name}" / "tokenizer" / "tokenizer.json"
        ).read_bytes()
    assert [name for name in trained if trained[name] != trained["texts"]] == []
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "other seed", vocab_size=700, workers=1, seed=1)
    other = (tmp_path / "other seed" / "tokenizer" / "tokenizer.json").read_bytes()
    assert (other == trained["texts"]) == (characters == 10**9)


def sample(path: Path, workers: int, ratio: float = 0.0) -> list[str]:
    readers = [UnitReader(unit, None) for unit in open_text_source(str(path)).units()]
    with WorkerPool(workers) as pool:
        return sample_texts(
            readers,
            pool,
            SingleProcessContext(),
            source_bytes=2,
            ratio=ratio,
            seed=0,
            on_progress=lambda unit, read: None,
        )


def test_a_sample_is_full_without_what_is_for_validation_and_the_same_from_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 20_000)
    texts = some_texts(2000)
    (tmp_path / "a.jsonl").write_bytes(lines(texts))
    every = sample(tmp_path / "a.jsonl", 2)
    assert sorted(every) == sorted(texts)
    assert every == sample(tmp_path / "a.jsonl", 1)
    trained = sample(tmp_path / "a.jsonl", 1, ratio=0.5)
    assert 800 < len(trained) < 1200
    assert set(trained) < set(texts)
    monkeypatch.setattr(tokenizer_sample, "SAMPLE_CHARACTERS", 5000)
    part = sample(tmp_path / "a.jsonl", 1)
    assert sum(map(len, part)) == 5000
    assert part[:-1] == every[: len(part) - 1]
    assert every[len(part) - 1].startswith(part[-1])


def test_a_guess_that_was_too_low_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the bytes of a source are hardly text, the first pass over it finds too little."""
    monkeypatch.setattr(tokenizer_sample, "SAMPLE_CHARACTERS", 5000)
    records = [{"text": text, "other": "x" * 3000} for text in some_texts(500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    readers = [
        UnitReader(unit, None) for unit in open_text_source(str(tmp_path / "a.jsonl")).units()
    ]
    samples = []
    for source_bytes in (2, 10**9):
        with WorkerPool(1) as pool:
            samples.append(
                sample_texts(
                    readers,
                    pool,
                    SingleProcessContext(),
                    source_bytes=source_bytes,
                    ratio=0,
                    seed=0,
                    on_progress=lambda unit, read: None,
                )
            )
    assert samples[0] == samples[1]


def test_the_least_texts_do_not_depend_on_the_order_in_which_they_come() -> None:
    chance = fresh_random()
    pairs = [(chance.randrange(50), "x" * chance.randrange(1, 9)) for _ in range(200)]
    for limit in (1, 10, 100, 10_000):
        results = []
        for _ in range(5):
            random.Random(chance.random()).shuffle(pairs)
            least = LeastTexts(limit)
            for key, text in pairs:
                least.add(key, text)
            results.append(least.items())
        assert all(each == results[0] for each in results)
        keys = [key for key, _ in results[0]]
        assert keys == sorted(key for key, _ in pairs)[: len(keys)]
        sizes = [len(text) for _, text in results[0]]
        assert len(sizes) == len(pairs) or sum(sizes) >= limit > sum(sizes[:-1])
