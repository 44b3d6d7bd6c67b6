"""Preparation by several ranks that share a folder: the same bytes as from one process,
restartable, no rank left waiting.
"""

import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lmforge.core.records.manifests import UNFINISHED
from lmforge.text.prepare.dist_context import divide_units
from lmforge.text.prepare.prepare import prepare
from tests.conftest import only_line
from tests.seeds import fresh_random
from tests.support.preloaded import preloaded
from tests.text.test_prepare import content, some_texts, write_lines

SCRIPT = """
import os, signal, sys
from lmforge.cli import exit_process, run
from lmforge.text.prepare import steps
from lmforge.text.sources import text_sources

text_sources.JSONL_UNIT_BYTES = 20_000
write, written = steps.write_part, []

def write_and_die(*arguments, **named):
    write(*arguments, **named)
    written.append(arguments)
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

if "DIE" in os.environ:
    steps.write_part = write_and_die
exit_process(run(sys.argv[1:]))
"""


def prepare_on_ranks(
    tmp_path: Path, ranks: int, *words: Any, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`lmforge prepare` on ranks as torchrun would start them; with DIE each kills itself when it
    has written two parts.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["prepare", *map(str, words), "--workers", "1"]
    return preloaded().run(
        arguments,
        tmp_path,
        script=tmp_path / "script.py",
        ranks=ranks,
        variables=variables,
        timeout=200,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        write_lines(folder / f"{number}.jsonl", some_texts(150 * (number + 1), number))
    (folder / "a.txt").write_text("a document of its own\n" * 30)
    table = pyarrow.table({"text": [*some_texts(100, 9), *some_texts(50, 0)]})
    pyarrow.parquet.write_table(table, folder / "t.parquet", row_group_size=40)
    return folder


def test_two_ranks_write_the_bytes_of_one_process_and_continue_where_they_were_killed(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmforge.text.sources.text_sources.JSONL_UNIT_BYTES", 20_000)
    options: dict[str, Any] = {"vocab_size": 400, "deduplicate": "near", "shard_tokens": 20_000}
    summary = prepare(str(corpus), tmp_path / "one", workers=1, **options)
    assert summary.removed_documents["duplicate"] >= 50
    prepare(str(corpus), tmp_path / "workers", workers=2, **options)
    assert content(tmp_path / "workers") == content(tmp_path / "one")
    out = tmp_path / "ranks"
    words = [
        corpus,
        out,
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    ]
    assert prepare_on_ranks(tmp_path, 2, *words, DIE="1").returncode != 0
    assert len(list((out / UNFINISHED).glob("part-*.npz"))) == 4
    ended = prepare_on_ranks(tmp_path, 2, *words)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ready, vocabulary of 400") == 1
    assert content(out) == content(tmp_path / "one")
    again = prepare_on_ranks(tmp_path, 2, *words)
    assert again.stdout.count("prepared already, nothing to do") == 1


@pytest.mark.slow
def test_a_bad_line_that_one_rank_finds_ends_all_ranks_with_one_line(
    tmp_path: Path, corpus: Path
) -> None:
    with open(corpus / "1.jsonl", "a") as file:
        file.write("{broken\n")
    ended = prepare_on_ranks(tmp_path, 2, corpus, tmp_path / "out", "--tokenizer", "bytes")
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if line.startswith("lmforge: ")]
    assert len(said) == 1
    assert f"{corpus / '1.jsonl'}:301: not valid JSON" in said[0]


def test_a_corpus_without_the_column_is_refused_by_one_rank_for_all(
    tmp_path: Path, corpus: Path
) -> None:
    done = prepare_on_ranks(
        tmp_path, 2, corpus, tmp_path / "out", "--text_field", "body", "--tokenizer", "bytes"
    )
    assert done.returncode == 2, done.stderr
    said = only_line(done.stderr)
    assert "'body': there are text" in said
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_rank_reads_whole_files_and_no_rank_has_more_than_a_share_and_a_file() -> None:
    chance = fresh_random()
    for _ in range(50):
        files = [f"file{chance.randrange(8)}" for _ in range(chance.randrange(1, 40))]
        sizes = [chance.randrange(1000) for _ in files]
        world_size = chance.randrange(1, 6)
        shares = divide_units(files, sizes, world_size)
        assert sorted(number for share in shares for number in share) == list(range(len(files)))
        assert all(share == sorted(share) for share in shares)
        of_file = {
            name: sum(size for file, size in zip(files, sizes, strict=True) if file == name)
            for name in files
        }
        equal = sum(sizes) / world_size
        for name, size in of_file.items():
            readers = [
                rank
                for rank, share in enumerate(shares)
                if any(files[number] == name for number in share)
            ]
            assert len(readers) == 1 or size > equal
        dealt = [size for size in of_file.values() if size <= equal]
        dealt += [size for file, size in zip(files, sizes, strict=True) if of_file[file] > equal]
        loads = [sum(sizes[number] for number in share) for share in shares]
        assert max(loads) <= equal + max(dealt) + len(files)
