import gzip
import json
import os
import pickle
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lmforge.core.errors import UserError
from lmforge.text.sources import text_sources, units
from lmforge.text.sources.text_sources import TextSource, open_text_source
from tests.seeds import fresh_random, fresh_seed


def texts(source: TextSource) -> list[str]:
    """As another process would read them."""
    units = pickle.loads(pickle.dumps(source.units()))
    return [text for unit in units for text in unit.read()]


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


SOME = [{"text": "one\ntwo"}, {"text": "héllo ☃", "id": 3}, {"text": ""}, {"id": 4, "text": None}]
SOME_TEXTS = ["one\ntwo", "héllo ☃", "", ""]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path, raw: path.write_bytes(raw)),
        ("a.ndjson", lambda path, raw: path.write_bytes(raw[:-1])),
        ("a.json", lambda path, raw: path.write_bytes(raw.replace(b"\n", b"\r\n") + b"\n \n")),
        ("a.jsonl.gz", lambda path, raw: path.write_bytes(gzip.compress(raw))),
        (
            "a.json.gz",
            lambda path, raw: path.write_bytes(gzip.compress(raw[:30]) + gzip.compress(raw[30:])),
        ),
        ("a.jsonl.zst", lambda path, raw: path.write_bytes(zstandard.compress(raw))),
        (
            "a.json.zst",
            lambda path, raw: path.write_bytes(
                zstandard.compress(raw[:30]) + zstandard.compress(raw[30:])
            ),
        ),
    ],
)
def test_lines_of_json_are_read_plain_and_compressed(
    tmp_path: Path, name: str, write: object
) -> None:
    write(tmp_path / name, lines(*SOME))  # type: ignore[operator]
    assert texts(open_text_source(str(tmp_path / name))) == SOME_TEXTS
    if name != "a.json":  # among other files, a bare .json is not taken for a corpus
        assert texts(open_text_source(str(tmp_path))) == SOME_TEXTS


def test_another_field_may_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines({"body": "x", "text": "y"}))
    assert texts(open_text_source(str(tmp_path / "a.jsonl"), "body")) == ["x"]


def test_ranges_of_a_large_file_hold_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(fresh_seed())
    expected = ["é" * int(n) for n in generator.integers(0, 40, 60)]
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": text} for text in expected)))
    for size in (1, 2, 7, 13, 100, 5000, 10**9):
        monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", size)
        assert texts(open_text_source(str(tmp_path / "a.jsonl"))) == expected


def test_a_small_corpus_has_many_small_units_and_a_large_one_no_more_than_it_needs(
    tmp_path: Path,
) -> None:
    for size, unit_bytes in (
        (3 << 20, 2 << 20),
        (100 << 20, 2 << 20),
        (8 << 30, 8 << 20),
        (100 << 30, 16 << 20),
    ):
        path = tmp_path / f"{size}.jsonl"
        path.touch()
        os.truncate(path, size)  # without blocks on the disk
        sizes = [unit.size for unit in open_text_source(str(path)).units()]
        assert sum(sizes) == size
        assert max(sizes) == unit_bytes


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b", None, "d", "é"], "n": [1, 2, 3, 4, 5]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    source = open_text_source(str(tmp_path))
    assert len(source.units()) == 3
    assert texts(source) == ["a", "b", "", "d", "é"]


def test_a_folder_is_read_to_any_depth_sorted_and_without_what_is_hidden_or_unknown(
    tmp_path: Path,
) -> None:
    for name in (
        "b/z.txt",
        "a.md",
        "b/c/d.PY",
        ".git/x.txt",
        ".x.txt",
        "picture.png",
        "package.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "zz.jsonl").write_bytes(lines({"text": "line"}))
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"packed"))
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    (tmp_path / "broken.txt").symlink_to("nowhere")
    source = open_text_source(str(tmp_path))
    assert sorted(texts(source)) == sorted(["a.md", "b/c/d.PY", "b/z.txt", "line", "packed"])
    assert [file.name for file in source.files] == [
        "a.md",
        "b/c/d.PY",
        "b/z.txt",
        "z.txt.gz",
        "zz.jsonl",
    ]
    assert dict(source.left_out) == {".png": 1, ".json": 1}


def test_small_files_share_units_and_units_never_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "TEXT_UNIT_BYTES", 100)
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_text("x" * (5 * i))
    source = open_text_source(str(tmp_path))
    units = source.units()
    assert units == open_text_source(str(tmp_path)).units()
    assert sum(unit.size for unit in units) == source.size
    assert 1 < len(units) < 30
    assert [len(text) for text in texts(source)] == [5 * i for i in range(30)]


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", BOM + b"hello", ["hello"]),
        ("a", BOM + b"hello", ["hello"]),
        ("a.txt.gz", gzip.compress(BOM + b"hello", mtime=0), ["hello"]),
        ("a.jsonl", BOM + lines(*SOME), SOME_TEXTS),
        ("a.jsonl", BOM + b"\r\n" + lines(*SOME), SOME_TEXTS),
        ("a.jsonl", BOM, []),
        ("a.jsonl.zst", zstandard.compress(BOM + lines(*SOME)), SOME_TEXTS),
        # Files that were put one after another.
        ("a.jsonl", BOM + lines(*SOME) + BOM + lines(*SOME), SOME_TEXTS * 2),
    ],
)
@pytest.mark.parametrize("unit_bytes", [3, 1 << 20])
def test_a_byte_order_mark_is_no_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    expected: list[str],
    unit_bytes: int,
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", unit_bytes)
    (tmp_path / name).write_bytes(content)
    assert texts(open_text_source(str(tmp_path / name))) == expected


def test_a_file_without_a_suffix_named_by_itself_is_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("hello\r\n")
    assert texts(open_text_source(str(tmp_path / "corpus"))) == ["hello\r\n"]


def test_a_text_of_long_lines_and_blank_ones_is_read_where_no_line_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "MAX_LINE_CHARACTERS", 50)
    text = "\n".join("\n" * (size % 3) + "x" * size for size in range(50))
    (tmp_path / "a.txt").write_text(text)
    assert texts(open_text_source(str(tmp_path / "a.txt"))) == [text]
    for bad in ("\n" + "x" * 51, text + "\n" + "x" * 51, "x" * 51, "x" * 51 + "\n" + text):
        (tmp_path / "a.txt").write_text(bad)
        assert (
            refusal(tmp_path)
            == f"{tmp_path}/a.txt: a line of more than 50 characters: break it, or leave the"
            " document out"
        )


def test_the_fingerprint_follows_the_files_and_not_the_place(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x.txt").write_text("hello")
    (folder / "y.txt").write_text("world")
    first = open_text_source(str(folder)).fingerprint()
    assert open_text_source(str(folder)).fingerprint() == first
    folder.rename(tmp_path / "b")
    folder = tmp_path / "b"
    assert open_text_source(str(folder)).fingerprint() == first
    assert open_text_source(str(folder), "body").fingerprint() != first
    os.utime(folder / "x.txt", ns=(1, 1))
    second = open_text_source(str(folder)).fingerprint()
    (folder / "z.txt").write_text("!")
    assert len({first, second, open_text_source(str(folder)).fingerprint()}) == 3


def test_the_standard_library_is_real_code_and_no_tables() -> None:
    source = open_text_source("stdlib")
    names = {file.name for file in source.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    folders = {folder for name in names for folder in Path(name).parent.parts}
    assert not folders & {"test", "tests", "site-packages", "encodings", "pydoc_data"}
    assert source.size > 5_000_000
    assert all(
        Path(file.path).is_relative_to(sysconfig.get_path("stdlib")) for file in source.files
    )


def test_a_python_file_in_its_declared_encoding_is_decoded_and_one_that_belies_it_left_out(
    tmp_path: Path,
) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    bad.write_bytes(b"x = '\xe9'\n")
    unit = text_sources.PythonUnit((str(bad), str(good)), 0)
    assert list(unit.read()) == ["# coding: latin-1\nx = 'é'\n"]


# --- bad input ------------------------------------------------------------------------------------


def refusal(path: Path, text_field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        texts(open_text_source(str(path), text_field))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in refusal(tmp_path / "nowhere")


def test_an_empty_file_and_a_folder_without_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "empty.txt: empty" in refusal(tmp_path / "empty.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(b"\x89PNG")
    assert "folder: holds no text: looked for files such as .txt" in refusal(tmp_path / "folder")


def test_text_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789" + "é".encode("latin-1") + b"xx")
    assert "a.txt: not UTF-8 at byte 10" in refusal(tmp_path / "a.txt")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "b.jsonl: not UTF-8 at byte 24" in refusal(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b"[1]", "expected an object, got [1]"),
        (
            b'{"body": "a", "title": "b"}',
            "no field 'text': there are body, title; `lmforge prepare --text_field` names another",
        ),
        (b"{}", "no field 'text': there are none"),
        (b'{"text": 5}', "the field 'text' is not text but int"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit_bytes", [9, 1 << 20])
def test_a_bad_line_is_named_with_file_and_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: bytes,
    complaint: str,
    packed: bool,
    unit_bytes: int,
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", unit_bytes)
    raw = lines({"text": "a"}) + b"\n" + lines({"text": "b"}) + line + b"\n"
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    message = refusal(path)
    assert f"{path}:4: " in message
    assert complaint in message


def test_a_parquet_file_without_the_field_names_those_it_has(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    assert "no field 'text': there are body, n" in refusal(tmp_path / "a.parquet")
    assert "the field 'n' is not text but int64" in refusal(tmp_path / "a.parquet", "n")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.xlsx",
            b"PK\x03\x04",
            ".xlsx files are not read; convert its rows to .jsonl or .parquet",
        ),
        ("a.pdf", b"%PDF-1.7\n", ".pdf files are not read; extract its text to a .txt"),
        ("a.docx", b"PK\x03\x04", ".docx files are not read; extract its text to a .txt"),
        (
            "a.zip",
            b"PK\x03\x04",
            ".zip files are not read; unpack it: of packed files .gz and .zst are read",
        ),
        ("a.tar.gz", b"\x1f\x8b", ".tar files are not read; unpack it"),
        ("a.txt.bz2", b"BZh9", ".bz2 files are not read; unpack it"),
        (
            "a.strange",
            b"hello",
            ".strange files are not read; if it is plain text, name its suffix in --text_suffixes",
        ),
        (
            "corpus",
            b"hello\0\1\2",
            (
                "a binary file: if it is plain text, name its suffix in --text_suffixes; if not,"
                " extract its text"
            ),
        ),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: {expected}")


def long_line(size: int) -> bytes:
    return b'{"text": "a"}\n{"text": "' + b"x" * size + b'"}\n{"text": "b"}\n'


@pytest.mark.parametrize(
    "name", [pytest.param("a.jsonl.gz", marks=pytest.mark.slow), "a.jsonl.zst"]
)
def test_a_line_beyond_the_limit_is_refused_without_reading_all_of_it(
    tmp_path: Path, name: str
) -> None:
    """300 MB that take little on the disk."""
    pack = partial(gzip.compress, compresslevel=1) if name.endswith("gz") else zstandard.compress
    (tmp_path / name).write_bytes(pack(long_line(300_000_000)))
    program = (
        "import sys, pyarrow\n"
        "from lmforge.text.sources.text_sources import open_text_source\n"
        "from lmforge.core.errors import UserError\n"
        "import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    for unit in open_text_source(sys.argv[1]).units(): list(unit.read())\n"
        "except UserError as problem:\n"
        "    print(problem)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / name)],
        capture_output=True,
        text=True,
        check=True,
    )
    message, kib = done.stdout.splitlines()
    assert (
        message
        == f"{tmp_path / name}:2: a line of more than 67,108,864 bytes; split the record, or leave"
        " it out"
    )
    assert int(kib) < 200 * 2**10


def test_a_long_line_of_another_range_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(long_line(5 << 20))
    assert [len(text) for text in texts(open_text_source(str(tmp_path / "a.jsonl")))] == [
        1,
        5 << 20,
        1,
    ]


def test_a_row_of_a_table_with_a_line_that_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "MAX_LINE_CHARACTERS", 50)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a", "b", "c", "x" * 51]}), tmp_path / "a.parquet", row_group_size=2
    )
    assert refusal(tmp_path).startswith(
        f"{tmp_path}/a.parquet, row 2 of group 2: a line of more than 50 characters"
    )
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a"}, {"text": "x" * 51}))
    assert refusal(tmp_path).startswith(f"{tmp_path}/a.jsonl:2: a line of more than 50 characters")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is plain text, whatever its name says")
    assert name in refusal(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst"])
def test_a_truncated_compressed_file_is_named_and_not_taken_for_the_end(
    tmp_path: Path, name: str
) -> None:
    chance = fresh_random()
    raw = lines(*({"text": chance.randbytes(50).hex()} for _ in range(2000)))
    packed = gzip.compress(raw) if name.endswith("gz") else zstandard.compress(raw)
    (tmp_path / name).write_bytes(packed[:-100])
    assert f"{name}: cannot be read" in refusal(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_folder_that_may_not_be_read_is_named_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "closed").mkdir(mode=0)
    assert "closed: cannot be read" in refusal(tmp_path)
