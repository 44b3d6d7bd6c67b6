"""Kinds of files besides text, JSON lines and parquet: tables, HTML pages, tar files, and suffixes from the user."""

import csv
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
import zstandard

from lmforge.core.errors import UserError
from lmforge.text.sources.html_text import extract_text
from lmforge.text.sources.text_sources import TextSource, open_text_source

HARD = ["plain", 'with "quotes", commas\tand tabs', "two\nlines", "", "héllo ☃", "\r\n", " blanks "]


def texts(source: TextSource) -> list[str]:
    return [text for unit in source.units() for text in unit.read()]


def refusal(path: Path, text_field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        texts(open_text_source(str(path), text_field))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dialect"), [("a.csv", "excel"), ("A.TSV", "excel-tab"), ("a.csv.gz", "excel")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_row_of_a_table_is_a_document(tmp_path: Path, name: str, dialect: str, encoding: str) -> None:
    written = io.StringIO(newline="")
    rows = csv.writer(written, dialect)
    rows.writerow(["id", "text"])
    rows.writerows(enumerate(HARD))
    raw = written.getvalue().encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert texts(open_text_source(str(tmp_path / name))) == HARD
    assert texts(open_text_source(str(tmp_path), "id")) == [str(number) for number in range(len(HARD))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,x\n", ", row 1: no field 'text': there are body, id; `lmforge prepare --text_field` names another"),
        (b"id,text\n1,x\n2\n", ", row 2: 1 fields, but the header names 2"),
        (b'id,text\n1,"x"y\n', ", row 1: not a table: "),
        (b'id,text\n1,"never closed\n2,x\n', ", row 1: not a table: "),
        (b"id,text\n1,\xff\n", ": not UTF-8"),
    ],
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    result = refusal(tmp_path / "a.csv")
    assert result.startswith(f"{tmp_path / 'a.csv'}, ")
    assert message in result.replace("after row 0", "").replace(", :", ":")


# --- HTML ------------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html><head><title>Tea &amp; time</title><style>p { color: red }</style>
<script type="module">if (a < b) { document.write("<p>not text</p>") }</script></head>
<body><!-- a comment --><h1>The   first
heading</h1><p>One <b>bold</b>, one&nbsp;<i>not</i>.<br/>A new line.</p>
<ul><li>a</li><li>b</li></ul><pre>  kept
    as it is</pre><noscript>Enable scripts</noscript><p>2 &lt; 3 &#8364;</body></html>
"""
TEXT = "Tea & time\n\nThe first heading\n\nOne bold, one not.\nA new line.\n\na\nb\n\n  kept\n    as it is\n\n2 < 3 €"


def test_the_text_of_a_page_has_no_markup_no_scripts_and_no_styles() -> None:
    assert extract_text(PAGE) == TEXT


def test_pages_are_read_as_their_text_plain_and_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.htm.gz").write_bytes(gzip.compress(PAGE.encode()))
    (tmp_path / "c.xhtml").write_text("<html><script src='x'/><p>seen</p></html>")
    (tmp_path / "d.md").write_text("<p>Markdown stays as it is.</p>")
    first, second, third, fourth = texts(open_text_source(str(tmp_path)))
    assert first == second == extract_text(PAGE)
    assert third == "seen"
    assert fourth == "<p>Markdown stays as it is.</p>"


# --- tar and WebDataset ----------------------------------------------------------------------------------------------


def pack(path: Path, members: list[tuple[str, bytes]]) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    raw = buffer.getvalue()
    packers = {".gz": gzip.compress, ".zst": zstandard.compress, ".tar": bytes}
    path.write_bytes(packers[path.suffix](raw))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.zst"])
def test_a_text_of_a_tar_file_is_a_document_and_so_is_the_field_of_a_json(tmp_path: Path, name: str) -> None:
    members = [
        ("x/0001.txt", "first ☃".encode()),
        ("x/0001.jpg", b"\xff\xd8"),
        ("x/0001.json", b'{"caption": "of the first"}'),  # beside a text: what else is known of it
        ("x/0002.json", json.dumps({"text": "second"}).encode()),
        ("README", b"not read"),
        ("y/0002.txt", b""),
    ]
    pack(tmp_path / name, members)
    source = open_text_source(str(tmp_path))
    assert texts(source) == ["first ☃", "second", ""]


def test_a_bad_tar_file_is_named_with_the_member(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    pack(path, [("a.jpg", b"x")])
    assert refusal(path) == f"{path}: holds no .txt and no .json: a tar of other files is not read"
    pack(path, [("a.json", b'{"body": "x"}')])
    assert refusal(path).startswith(f"{path}: a.json: no field 'text': there are body")
    pack(path, [("a.json", b'{"text": ')])
    assert refusal(path).startswith(f"{path}: a.json: not valid JSON")
    pack(path, [("a.txt", b"x"), ("b.txt", b"ab\xff")])
    assert refusal(path).startswith(f"{path}: b.txt: not UTF-8 at byte 2")
    pack(path, [("a.txt", b"x" * 5000)])
    path.write_bytes(path.read_bytes()[:2000])
    assert refusal(path).startswith(f"{path}: cannot be read as tar")
    path.write_bytes(b"this is no tar file")
    assert refusal(path).startswith(f"{path}: cannot be read as tar")


# --- suffixes that a user names ----------------------------------------------------------------------------------------


def test_files_of_a_suffix_that_is_named_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("a line")
    (tmp_path / "b.txt").write_text("text")
    assert dict(open_text_source(str(tmp_path)).left_out) == {".log": 1}
    source = open_text_source(str(tmp_path), text_suffixes=(".LOG",))
    assert texts(source) == ["a line", "text"]
    assert source.left_out == ()
    assert texts(open_text_source(str(tmp_path / "a.log"), text_suffixes=(".log",))) == ["a line"]
