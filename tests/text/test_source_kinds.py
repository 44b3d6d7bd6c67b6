"""Kinds of files besides text, JSON lines and parquet: tables, HTML pages, and suffixes from the
user.
"""

import csv
import gzip
import io
from pathlib import Path

import pytest

from lmforge.core.errors import UserError
from lmforge.text.sources import text_sources
from lmforge.text.sources.text_sources import TextSource, open_text_source
from lmforge.text.sources.units import extract_text

HARD = ["plain", 'with "quotes", commas\tand tabs', "two\nlines", "", "héllo ☃", "\r\n", " blanks "]


def texts(source: TextSource) -> list[str]:
    return [text for unit in source.units() for text in unit.read()]


def refusal(path: Path, text_field: str = "text") -> str:
    with pytest.raises(UserError) as caught:
        texts(open_text_source(str(path), text_field))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dialect"), [("a.csv", "excel"), ("A.TSV", "excel-tab"), ("a.csv.gz", "excel")]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_row_of_a_table_is_a_document(
    tmp_path: Path, name: str, dialect: str, encoding: str
) -> None:
    written = io.StringIO(newline="")
    rows = csv.writer(written, dialect)
    rows.writerow(["id", "text"])
    rows.writerows(enumerate(HARD))
    raw = written.getvalue().encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert texts(open_text_source(str(tmp_path / name))) == HARD
    assert texts(open_text_source(str(tmp_path), "id")) == [
        str(number) for number in range(len(HARD))
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"id,body\n1,x\n",
            (
                ", row 1: no field 'text': there are body, id; `lmforge prepare --text_field` names"
                " another"
            ),
        ),
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


# --- HTML -----------------------------------------------------------------------------------------

PARAGRAPHS = [
    f"Paragraph {number} is long enough to be the text of a page, not its navigation."
    for number in range(5)
]
PAGE = f"""<!DOCTYPE html>
<html><head><title>Tea &amp; time</title><style>p {{ color: red }}</style>
<script type="module">if (a < b) {{ document.write("<p>not text</p>") }}</script></head>
<body><!-- a comment --><nav><a href="/">Home</a> <a href="/blog">Blog</a></nav>
<article><h1>The   first
heading</h1><p>One <b>bold</b>, one&nbsp;<i>not</i>.<br/>A new line.</p>{"".join(f"<p>{each}</p>" for each in PARAGRAPHS)}
<pre>  kept
    as it is</pre><p>2 &lt; 3 &#8364;</p></article><footer>All rights reserved</footer></body></html>
"""
TEXT = "\n".join(
    [
        "The first heading",
        "One bold, one\xa0not.",
        "A new line.",
        *PARAGRAPHS,
        "  kept",
        "    as it is",
        "2 < 3 €",
    ]
)


def test_the_text_of_a_page_has_no_markup_no_navigation_no_scripts_and_no_styles() -> None:
    assert extract_text(PAGE) == TEXT


def test_a_page_without_main_text_gives_what_is_visible_and_an_empty_one_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert extract_text("<html><body><nav><a href='/'>Home</a></nav></body></html>") == "Home"
    assert [extract_text(page) for page in ("", "<html><script>let a = 1</script></html>")] == [
        "",
        "",
    ]
    assert capfd.readouterr().err == ""


def test_pages_are_read_as_their_text_plain_and_compressed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.htm.gz").write_bytes(gzip.compress(PAGE.encode()))
    (tmp_path / "c.xhtml").write_text("<html><script src='x'/><p>seen</p></html>")
    (tmp_path / "d.md").write_text("<p>Markdown stays as it is.</p>")
    assert texts(open_text_source(str(tmp_path))) == [
        TEXT,
        TEXT,
        "seen",
        "<p>Markdown stays as it is.</p>",
    ]


def test_without_the_package_a_page_is_refused_with_the_extra_and_other_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "find_spec", lambda name: None)
    (tmp_path / "a.md").write_text("a text")
    assert texts(open_text_source(str(tmp_path))) == ["a text"]
    (tmp_path / "b.html").write_text(PAGE)
    said = refusal(tmp_path)
    assert said.startswith(f"{tmp_path / 'b.html'}: a page of HTML needs the package trafilatura; ")
    assert "[html]" in said


def test_another_version_of_the_package_makes_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    before = open_text_source(str(tmp_path)).fingerprint()
    monkeypatch.setattr(text_sources, "version", lambda name: "0.0")
    assert open_text_source(str(tmp_path)).fingerprint() != before


# --- suffixes that a user names -------------------------------------------------------------------


def test_files_of_a_suffix_that_is_named_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("a line")
    (tmp_path / "b.txt").write_text("text")
    assert dict(open_text_source(str(tmp_path)).left_out) == {".log": 1}
    source = open_text_source(str(tmp_path), text_suffixes=(".LOG",))
    assert texts(source) == ["a line", "text"]
    assert source.left_out == ()
    assert texts(open_text_source(str(tmp_path / "a.log"), text_suffixes=(".log",))) == ["a line"]
