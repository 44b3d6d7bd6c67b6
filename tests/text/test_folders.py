"""Folders of files: which are read, and what is said of the others."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.text.prepare.prepare import PreparationOptions
from lmforge.text.sources.folders import find_splits
from lmforge.text.sources.records import describe_folders, find_record_files
from lmforge.text.sources.text_sources import open_text_source

WORDS = st.sampled_from(
    [
        "train",
        "training",
        "test",
        "eval",
        "dev",
        "val",
        "x",
        "trainer",
        "tests",
        "Train",
        "data",
        "2",
        "00000-of-00001",
    ]
)
SEPARATORS = st.sampled_from(["-", ".", "_", " ", "0", ""])
PARTS = st.lists(st.tuples(WORDS, SEPARATORS), min_size=1, max_size=3).map(
    lambda pairs: "".join(a + b for a, b in pairs)
)
FOLDERS = st.lists(st.one_of(PARTS, st.just("data")), max_size=2)
NAMES = st.tuples(FOLDERS, PARTS.map("{}.jsonl".format)).map(
    lambda parts: "/".join([*parts[0], parts[1]])
)


def write(path: Path, text: str = "a") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)
    return path


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(names=st.sets(NAMES, min_size=1, max_size=5))
def test_splits_are_those_that_datasets_finds_by_the_names(
    names: set[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    root = tmp_path_factory.mktemp("drawn")
    paths = [write(root / name.replace(" /", "/")) for name in sorted(names)]
    try:
        patterns = data_files.get_data_patterns(str(root))
    except ValueError:  # of a name such as data/a-b-00000-of-00001.jsonl, which it refuses
        assert any(re.search("[^A-Za-z0-9_.]", split) for split in find_splits(paths, root))
        return
    resolved = data_files.DataFilesDict.from_patterns(patterns, str(root))
    expected = {str(split): {Path(file) for file in files} for split, files in resolved.items()}
    found = {split: {*members} for split, members in find_splits(paths, root).items()}
    assert (found or {"train": {*paths}}) == expected


def names(files: object) -> list[str]:
    return sorted(Path(str(file)).name for file in files)  # type: ignore[attr-defined]


def test_a_folder_gives_its_training_files_and_names_the_others(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "valid.jsonl", "a.pdf"):
        write(tmp_path / name)
    assert names(find_record_files(tmp_path)) == ["train-0.jsonl", "train-1.jsonl"]
    assert names(find_record_files(tmp_path, "validation")) == ["valid.jsonl"]
    assert (
        describe_folders([tmp_path])
        == f"; {tmp_path} leaves out 3 files (split test 1, split validation 1, .pdf 1)"
    )
    (tmp_path / "valid.jsonl").unlink()
    assert names(find_record_files(tmp_path, "validation")) == ["test-0.jsonl"]


def test_a_folder_without_the_split_is_refused_with_those_it_has(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train_sft-00000-of-00001.jsonl")
    write(tmp_path / "data" / "test_sft-00000-of-00001.jsonl")
    with pytest.raises(
        UserError, match="no file of the split 'train' by its name: there are test_sft, train_sft"
    ):
        find_record_files(tmp_path)
    with pytest.raises(UserError, match="no file of the split 'train' by its name"):
        open_text_source(str(tmp_path))


def test_what_lies_beside_data_is_no_data(tmp_path: Path) -> None:
    for name in (
        "a.jsonl",
        "._a.jsonl",
        ".b.jsonl",
        "a.jsonl.lock",
        "dataset_infos.json",
        "README.md",
        ".cache/c.jsonl",
    ):
        write(tmp_path / name)
    assert names(find_record_files(tmp_path)) == ["a.jsonl"]
    assert describe_folders([tmp_path]) == ""
    assert names(file.name for file in open_text_source(str(tmp_path)).files) == [
        "README.md",
        "a.jsonl",
    ]


def test_the_files_that_a_dataset_card_names_for_splits_are_said_not_to_be_read(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\n---\n\nWrite data_files: as you like.\n"
    )
    assert describe_folders([tmp_path]) == ""
    split = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{split}---\n")
    assert (
        describe_folders([tmp_path]) == f"; {tmp_path} leaves out 1 file (configs of README.md 1)"
    )
    assert dict(open_text_source(str(tmp_path)).left_out) == {"configs of README.md": 1}


def test_files_in_subfolders_are_read_and_said(tmp_path: Path) -> None:
    for name in ("a.jsonl", "old/b.jsonl", "old/older/c.jsonl"):
        write(tmp_path / name)
    assert names(find_record_files(tmp_path)) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert describe_folders([tmp_path]) == f"; {tmp_path} reads old, old/older within it"
    assert describe_folders([tmp_path / "a.jsonl"]) == ""


def test_a_corpus_is_its_training_files_where_the_names_tell_splits(tmp_path: Path) -> None:
    for name in ("train.txt", "valid.txt", "test.txt", "notes.md", "README.md"):
        write(tmp_path / "texts" / name)
    source = open_text_source(str(tmp_path / "texts"))
    assert names(file.name for file in source.files) == ["notes.md", "train.txt"]
    assert dict(source.left_out) == {"split validation": 1, "split test": 1}
    assert (
        names(
            file.name
            for file in open_text_source(str(tmp_path / "texts"), split="validation").files
        )[1]
        == "valid.txt"
    )


def test_names_of_code_and_of_single_documents_tell_no_split(tmp_path: Path) -> None:
    code = ["train.py", "test_it.py", "test/a.py", "requirements/test.txt", "requirements/dev.txt"]
    books = ["a train journey.txt", "test drive.txt", "poems.txt"]
    for folder, members in (("code", code), ("books", books)):
        for name in members:
            write(tmp_path / folder / name)
        source = open_text_source(str(tmp_path / folder))
        assert (len(source.files), source.left_out) == (len(members), ())


def test_token_files_of_other_splits_are_left_out(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    for name in ("fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        (tmp_path / name).write_bytes(bytes([7, 0] * 10))
    source = PreparationOptions().open_source(str(tmp_path), byte_tokenizer)
    assert names(file.name for file in source.files) == ["fineweb_train_000001.bin"]
    assert source.left_out == (("split validation", 1),)
