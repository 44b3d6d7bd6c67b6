"""Hugging Face datasets: saved in a folder, as a folder of files with splits, and by name from a
hub on this machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from lmforge.core.data.shards.folder import TokenFolder
from lmforge.hf.hub import COMPLETE_MARK
from lmforge.text.prepare.prepare import prepare
from lmforge.text.sources.hf_dataset import find_cached_dataset
from tests.conftest import Refusal
from tests.hf import hub_server
from tests.support.preloaded import preloaded
from tests.text.test_prepare import content, some_texts, stored_texts


def all_texts(folder: Path) -> list[str]:
    return sorted(
        text for split in TokenFolder.open(folder).splits for text in stored_texts(folder, split)
    )


def lines(texts: list[str]) -> bytes:
    return b"".join(
        json.dumps({"text": text, "n": number}).encode() + b"\n"
        for number, text in enumerate(texts)
    )


def test_a_saved_dataset_is_read_by_split_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.text.sources.hf_dataset.UNIT_BYTES", 500)
    texts = some_texts(100)
    whole = datasets.Dataset.from_dict({"body": texts, "n": list(range(100))})
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(
        {"train": whole.select(range(60)), "rest": whole.select(range(60, 100))}
    ).save_to_disk(str(tmp_path / "two"))
    options = {"text_field": "body", "tokenizer": "bytes"}
    prepare(str(tmp_path / "one"), tmp_path / "a", **options)
    assert all_texts(tmp_path / "a") == sorted(texts)
    prepare(str(tmp_path / "two"), tmp_path / "b", **options)
    assert all_texts(tmp_path / "b") == sorted(texts[:60])
    prepare(str(tmp_path / "two"), tmp_path / "c", split="rest", **options)
    assert all_texts(tmp_path / "c") == sorted(texts[60:])
    prepare(str(tmp_path / "one"), tmp_path / "d", workers=2, **options)
    assert content(tmp_path / "a") == content(tmp_path / "d")


def test_a_folder_of_files_is_a_dataset_if_a_split_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "in" / "data").mkdir(parents=True)
    (tmp_path / "in" / "README.md").write_text("What this is.")
    (tmp_path / "in" / "data" / "train.jsonl").write_bytes(lines(["one", "two"]))
    (tmp_path / "in" / "data" / "test.jsonl").write_bytes(lines(["three", "four"]))
    options = {"tokenizer": "bytes", "validation_ratio": 0.5}
    prepare(str(tmp_path / "in"), tmp_path / "a", split="test", **options)
    assert all_texts(tmp_path / "a") == ["four", "three"]
    assert prepare(str(tmp_path / "in"), tmp_path / "b", **options).left_out == (("split test", 1),)
    assert all_texts(tmp_path / "b") == ["one", "two"]


def test_a_dataset_without_the_column_or_the_split_is_refused_with_those_it_has(
    tmp_path: Path, refused: Refusal
) -> None:
    datasets.Dataset.from_dict({"body": ["a"], "n": [1]}).save_to_disk(str(tmp_path / "in"))
    datasets.DatasetDict({"rest": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        str(tmp_path / "two")
    )
    message = refused("prepare", tmp_path / "in", tmp_path / "out")
    assert (
        message
        == f"{tmp_path / 'in'}: no column 'text': there are body, n; `lmforge prepare --text_field`"
        " names another"
    )
    assert "the field 'n' is not text but int" in refused(
        "prepare", tmp_path / "in", tmp_path / "out", "--text_field", "n"
    )
    assert f"{tmp_path / 'two'}: no split 'train': there are rest" in refused(
        "prepare", tmp_path / "two", tmp_path / "out"
    )
    (tmp_path / "a.txt").write_text("text")
    assert "split and subset are of a Hugging Face dataset" in refused(
        "prepare", tmp_path / "a.txt", tmp_path / "out", "--split", "train"
    )


# Command lines, one after another in one process: the library takes seconds to import.
SEVERAL = """
import json, sys
from lmforge.cli import run
if __name__ == "__main__":
    print([run(words) for words in json.loads(sys.argv[1])])
"""


@pytest.mark.slow
def test_a_dataset_is_streamed_from_the_hub_by_name(tmp_path: Path) -> None:
    texts, out = some_texts(60), tmp_path / "out"
    lines_of_prepare = [
        ["org/corpus", out, "--tokenizer", "bytes", "--workers", "2"],
        ["org/corpus", tmp_path / "no", "--text_field", "body"],
        ["org/other", tmp_path / "no"],
    ]
    (tmp_path / "several.py").write_text(SEVERAL)
    with hub_server.serving({}) as hub:
        hub.datasets["org/corpus"] = {
            "data/train-00000.jsonl": lines(texts[:30]),
            "data/train-00001.jsonl": lines(texts[30:50]),
            "data/test-00000.jsonl": lines(texts[50:]),
        }
        given = json.dumps([["prepare", *map(str, words)] for words in lines_of_prepare])
        variables = hub_server.variables(hub, tmp_path / "home")
        ended = preloaded().run(
            [given], tmp_path, script=tmp_path / "several.py", variables=variables
        )
    assert ended.stdout.endswith("[0, 2, 2]\n"), ended.stderr
    assert all_texts(out) == sorted(texts[:50])
    column, unknown = (line for line in ended.stderr.splitlines() if line.startswith("lmforge: "))
    assert (
        column == "lmforge: org/corpus: no column 'body': there are n, text; `lmforge prepare"
        " --text_field` names another"
    )
    assert unknown.startswith("lmforge: org/other: cannot be read as a Hugging Face dataset: ")


@pytest.mark.slow
def test_a_downloaded_dataset_is_prepared_where_no_hub_answers(tmp_path: Path) -> None:
    texts = some_texts(40)
    files = {
        "data/train-00000.jsonl": lines(texts[:30]),
        "data/test-00000.jsonl": lines(texts[30:]),
        "load.py": b"raise",
    }
    with hub_server.serving({}) as hub:
        hub.datasets["org/corpus"] = {"README.md": b"# Corpus\n", **files}
        variables = {**os.environ, **hub_server.variables(hub, tmp_path / "home")}

        def command(*words: Any, **more: str) -> subprocess.CompletedProcess[str]:
            line = [sys.executable, "-m", "lmforge", *map(str, words)]
            return subprocess.run(
                line, env={**variables, **more}, capture_output=True, text=True, timeout=300
            )

        streamed = command("prepare", "org/corpus", tmp_path / "streamed", "--tokenizer", "bytes")
        assert streamed.returncode == 0, streamed.stderr
        (tmp_path / "pipeline.toml").write_text(
            '[[stages]]\nverb = "prepare"\narguments = ["org/corpus", "data/corpus"]\n'
        )
        done = command("download", tmp_path / "pipeline.toml")
        assert done.returncode == 0, done.stderr
        assert "org/corpus at 0123456789abcdef0123456789abcdef01234567; 3 files" in done.stdout
        assert hub.sent("load.py") == []
    done = command("prepare", "org/corpus", tmp_path / "offline", "--tokenizer", "bytes")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "offline") == content(tmp_path / "streamed")
    done = command(
        "prepare",
        "org/corpus",
        tmp_path / "test",
        "--tokenizer",
        "bytes",
        "--split",
        "test",
        HF_HUB_OFFLINE="1",
    )
    assert (done.returncode, all_texts(tmp_path / "test")) == (0, sorted(texts[30:])), done.stderr
    for more, reason in (
        ({}, "cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ):
        done = command("prepare", "org/other", tmp_path / "no", **more)
        assert done.returncode == 2
        assert done.stderr.startswith("lmforge: org/other: no such folder, ")
        assert reason in done.stderr
        assert "run `lmforge download org/other --dataset` where there is" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_partly_downloaded_dataset_is_not_taken_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "datasets--org--corpus" / "snapshots" / hub_server.COMMIT
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(lines(["one"]))
    assert find_cached_dataset("org/corpus", hub_server.COMMIT) is None
    (folder / COMPLETE_MARK).touch()
    assert find_cached_dataset("org/corpus", hub_server.COMMIT) == folder
