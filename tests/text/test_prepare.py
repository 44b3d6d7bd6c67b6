"""Preparation as users run it: real processes, killed and interrupted, full disks, invalid
input.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer as Library
from tokenizers import processors
from transformers import AutoTokenizer

from lmforge.cli import run
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST, TRAIN_SPLIT, VALIDATION_SPLIT
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.records.manifests import UNFINISHED
from lmforge.text.prepare.output_folder import lock_folder
from lmforge.text.prepare.prepare import prepare
from lmforge.text.sources import text_sources
from lmforge.text.sources.units import MAX_LINE_CHARACTERS
from tests.conftest import Refusal
from tests.seeds import fresh_random
from tests.support.tools import need

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "they",
]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def some_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    return [
        f"{i}: " + " ".join(generator.choices(WORDS, k=generator.randint(1, 60)))
        for i in range(count)
    ]


def content(folder: Path) -> dict[str, str]:
    """Every file of a folder, by its hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def stored_documents(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document as it lies in the shards."""
    tokens = TokenFolder.open(folder).split(split)
    edges = [0, *tokens.document_starts(0, tokens.num_tokens).tolist(), tokens.num_tokens]
    return [tokens.read(start, stop).tolist() for start, stop in itertools.pairwise(edges)]


def stored_texts(folder: Path, split: str) -> list[str]:
    """Each document as it lies in the shards, checked to end in one separator."""
    tokenizer, results = TokenFolder.open(folder).tokenizer, []
    for ids in stored_documents(folder, split):
        assert ids.count(tokenizer.eos_token_id) == 1
        assert ids[-1] == tokenizer.eos_token_id
        results.append(tokenizer.decode(ids))
    return results


class Preparation:
    """`prepare` in a process of its own, begun as a user would."""

    def __init__(
        self,
        source: Path,
        out: Path,
        before: str = "",
        die_at: tuple[str, int] | None = None,
        die_after: float = 0,
        **options: Any,
    ):
        """`before` is run first; with `die_at` it kills itself -9, `die_after` seconds from when it
        is that far.
        """
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        # The guard is what any script that starts processes needs.
        program = (
            f"import os, resource, signal, sys, threading, time\n{before}\nfrom"
            " lmforge.text.prepare.prepare import prepare\nfrom lmforge.core.errors import"
            f" UserError\ndef die():\n    time.sleep({die_after})\n    os.kill(os.getpid(),"
            " signal.SIGKILL)\ndef progress(step, done, total, read, size):\n    print(step, done,"
            f" total, read, size, flush=True)\n    at = {die_at!r}\n    if at and step == at[0] and"
            " done >= at[1]:\n       "
            f" {'threading.Thread(target=die, daemon=True).start()' if die_after else 'die()'}\nif"
            f" __name__ == '__main__':\n    try:\n        prepare({str(source)!r}, {str(out)!r},"
            f" {arguments}, progress=progress)\n    except UserError as mistake:\n       "
            " sys.exit(f'mistake: {mistake}')\n"
        )
        script = Path(tempfile.mkdtemp(dir=out.parent)) / "prepare.py"
        script.write_text(program)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(words):
                return
        raise AssertionError(f"it ended without saying {words!r}: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors


def no_process_left(group: int) -> bool:
    """Whether every process of a session is gone, within a moment for the kernel to end them."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "corpus.jsonl", some_texts(2000))


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 20_000)


# --- what comes of it -----------------------------------------------------------------------------


def test_every_document_is_stored_once_with_one_separator(tmp_path: Path, corpus: Path) -> None:
    summary = prepare(str(corpus), tmp_path / "out", vocab_size=600, shard_tokens=10_000)
    train, validation = (
        stored_texts(tmp_path / "out", TRAIN_SPLIT),
        stored_texts(tmp_path / "out", VALIDATION_SPLIT),
    )
    assert sorted(train + validation) == sorted(some_texts(2000))
    assert 10 < len(validation) < 90  # 2 % of 2,000, give or take
    assert train[:50] != some_texts(2000)[:50]
    folder = TokenFolder.open(tmp_path / "out")
    assert summary.documents == {TRAIN_SPLIT: len(train), VALIDATION_SPLIT: len(validation)}
    assert summary.tokens == {
        split: folder.split(split).num_tokens for split in (TRAIN_SPLIT, VALIDATION_SPLIT)
    }
    assert summary.text_bytes == {
        TRAIN_SPLIT: sum(map(len, train)),
        VALIDATION_SPLIT: sum(map(len, validation)),
    }
    shards = folder.manifest.splits[TRAIN_SPLIT]
    assert len(shards) > 3
    assert all(10_000 <= shard.tokens < 10_200 for shard in shards[:-1])
    assert folder.dtype == np.uint16
    assert not (tmp_path / "out" / UNFINISHED).exists()


def test_text_bytes_are_what_the_tokens_say(tmp_path: Path) -> None:
    summary = prepare(
        str(write_lines(tmp_path / "a.jsonl", ["é☃", "plain", "日本語 " * 9])),
        tmp_path / "out",
        vocab_size=270,
    )
    folder = TokenFolder.open(tmp_path / "out")
    sizes = folder.tokenizer.token_byte_lengths()
    for split, size in summary.text_bytes.items():
        tokens = folder.split(split)
        assert int(sizes[tokens.read(0, tokens.num_tokens)].sum()) == size


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", some_texts(30))
    prepare(str(source), tmp_path / "small", vocab_size=300)
    data = json.loads((tmp_path / "small" / "tokenizer" / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {f"unused{i}": len(vocabulary) + i for i in range(70_000)}
    large = tmp_path / "large"
    large.mkdir()
    (large / "tokenizer.json").write_text(json.dumps(data))
    prepare(str(source), tmp_path / "out", tokenizer=large)
    assert TokenFolder.open(tmp_path / "out").dtype == np.uint32
    both = (TRAIN_SPLIT, VALIDATION_SPLIT)
    assert [stored_texts(tmp_path / "out", s) for s in both] == [
        stored_texts(tmp_path / "small", s) for s in both
    ]


def test_a_tokenizer_that_adds_its_own_end_gives_one_separator(
    tmp_path: Path, corpus: Path
) -> None:
    prepare(str(corpus), tmp_path / "own", vocab_size=400)
    path = tmp_path / "own" / "tokenizer" / "tokenizer.json"
    library = Library.from_file(str(path))
    library.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", pair=None, special_tokens=[("<|endoftext|>", 0)]
    )
    adds = tmp_path / "adds"
    shutil.copytree(path.parent, adds)
    library.save(str(adds / "tokenizer.json"))
    assert library.encode("the").ids[-1] == 0
    prepare(str(corpus), tmp_path / "out", tokenizer=adds)
    assert stored_texts(tmp_path / "out", TRAIN_SPLIT) == stored_texts(
        tmp_path / "own", TRAIN_SPLIT
    )


def test_text_that_spells_the_separator_ends_no_document(tmp_path: Path) -> None:
    texts = [f"{i} <|endoftext|> more<|endoftext|>" for i in range(40)]
    prepare(str(write_lines(tmp_path / "a.jsonl", texts)), tmp_path / "out", vocab_size=300)
    assert sorted(
        stored_texts(tmp_path / "out", TRAIN_SPLIT)
        + stored_texts(tmp_path / "out", VALIDATION_SPLIT)
    ) == sorted(texts)


def test_parsed_special_tokens_are_those_of_transformers_in_long_texts_too(tmp_path: Path) -> None:
    texts = [f"{i} <|endoftext|> more<|endoftext|>" for i in range(20)] + [
        "<|user|>\na<|end|>\n" * 4000,
        "plain",
    ]
    source, out = write_lines(tmp_path / "a.jsonl", texts), tmp_path / "out"
    summary = prepare(str(source), out, vocab_size=300, validation_ratio=0)
    assert summary.special_text == 21
    trained = out / "tokenizer"
    again = prepare(
        str(source),
        tmp_path / "parsed",
        tokenizer=trained,
        validation_ratio=0,
        parse_special_tokens=True,
    )
    assert again.special_text == 0
    theirs = AutoTokenizer.from_pretrained(trained)
    expected = [theirs(text, add_special_tokens=False).input_ids for text in texts]
    eos = theirs.convert_tokens_to_ids("<|endoftext|>")
    stored = stored_documents(tmp_path / "parsed", TRAIN_SPLIT)
    assert sorted(stored) == sorted([*ids, *([eos] if ids[-1] != eos else [])] for ids in expected)


def test_a_command_says_how_many_documents_spell_special_tokens_and_a_few_are_no_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, words in (
        (1, ""),
        (5, "as text   5 spell special tokens in plain text, which is encoded as text (--parse_sp"),
    ):
        texts = ["about <|endoftext|>"] * count + [str(i) for i in range(200)]
        source, out = write_lines(tmp_path / f"{count}.jsonl", texts), tmp_path / f"out{count}"
        assert run(["prepare", str(source), str(out), "--tokenizer", "bytes"]) == 0
        assert run(["prepare", str(source), str(out), "--tokenizer", "bytes"]) == 0
        assert capsys.readouterr().out.count("as text   ") == (2 if words else 0)
        if words:
            assert run(["prepare", str(source), str(out), "--tokenizer", "bytes"]) == 0
            assert words in capsys.readouterr().out


def unusable_corpus(folder: Path) -> Path:
    """Documents of each kind of file, and one of each that cannot be used."""
    folder.mkdir()
    texts = some_texts(200)
    lines = [json.dumps({"text": text}) for text in texts]
    broken = ["{broken", '{"text": 5}', '{"body": "a"}', '["text"]', json.dumps({"text": "\ud800"})]
    for number, line in enumerate(broken):
        lines.insert(20 * number + 7, line)
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.csv").write_text("text,n\none,1\ntwo\nthree,3\n")
    (folder / "c.txt").write_bytes(b"caf\xe9")
    (folder / "d.txt").write_text("a text\n")
    (folder / "e.txt").write_text("x" * (MAX_LINE_CHARACTERS + 1))
    return folder


@pytest.mark.usefixtures("many_units")
def test_documents_that_cannot_be_used_are_left_out_counted_and_listed_by_their_places_whoever_reads_them(
    tmp_path: Path, refused: Refusal, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = unusable_corpus(tmp_path / "in")
    options = ["--skip_invalid", "--vocab_size", "301", "--deduplicate", "exact"]
    for workers in (1, 2):
        assert (
            run(
                [
                    "prepare",
                    str(folder),
                    str(tmp_path / f"out{workers}"),
                    *options,
                    "--workers",
                    str(workers),
                ]
            )
            == 0
        )
        assert (
            "left out  8 documents: that cannot be used, listed in its left-out.txt"
            in capfd.readouterr().out
        )
    assert content(tmp_path / "out1") == content(tmp_path / "out2")
    assert (
        sum(
            len(stored_texts(tmp_path / "out1", split)) for split in (TRAIN_SPLIT, VALIDATION_SPLIT)
        )
        == 203
    )
    listed = (tmp_path / "out1" / "left-out.txt").read_text().splitlines()
    places = [
        "a.jsonl:8: not",
        "a.jsonl:28: the field 'text'",
        "a.jsonl:48: no field",
        "a.jsonl:68: ",
        "a.jsonl:88: ",
    ]
    places += ["b.csv, row 2: 1 field", "c.txt: not UTF-8", "e.txt: a line of"]
    assert (
        [sum(place in line for line in listed) for place in places]
        == [1] * len(places)
        == [1] * len(listed)
    )
    assert "a.jsonl:8: not valid JSON" in refused(
        "prepare", folder, tmp_path / "refused", *options[1:], "--workers", 1
    )
    whole = [str(folder / "d.txt"), str(tmp_path / "out1"), "--vocab_size", "301"]
    assert run(["prepare", *whole, "--overwrite"]) == 0
    assert not (tmp_path / "out1" / "left-out.txt").exists()


def test_a_corpus_of_which_no_document_can_be_used_is_refused_with_the_first(
    tmp_path: Path, refused: Refusal
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("{broken\n{broken\n")
    said = refused("prepare", source, tmp_path / "out", "--skip_invalid")
    assert (
        f"empty: there is no text in it; 2 left out that cannot be used, such as {source}:1: not"
        " valid JSON" in said
    )


def test_copies_of_a_text_are_on_one_side_and_another_seed_moves_nothing(tmp_path: Path) -> None:
    texts = some_texts(300) * 3
    source = write_lines(tmp_path / "a.jsonl", texts)
    sides = []
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        prepare(str(source), out, vocab_size=300, validation_ratio=0.3, seed=seed)
        train, validation = stored_texts(out, TRAIN_SPLIT), stored_texts(out, VALIDATION_SPLIT)
        assert not set(train) & set(validation)
        assert sorted(train + validation) == sorted(texts)
        sides.append((train, validation))
    assert set(sides[0][1]) == set(sides[1][1])
    assert sides[0][0] != sides[1][0]


@pytest.mark.parametrize("ratio", [1e-9, 0.5, 0.999999])
@pytest.mark.parametrize("count", [2, 3])
def test_few_documents_still_leave_one_on_each_side(
    tmp_path: Path, count: int, ratio: float
) -> None:
    source = write_lines(tmp_path / "a.jsonl", some_texts(count))
    summary = prepare(str(source), tmp_path / "out", vocab_size=300, validation_ratio=ratio)
    assert min(summary.documents.values()) >= 1
    assert sum(summary.documents.values()) == count


@pytest.mark.parametrize("tiny", range(6))
def test_one_large_document_beside_a_tiny_one_is_trained_on(tmp_path: Path, tiny: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "book.txt").write_text(" ".join(some_texts(300)))
    (tmp_path / "in" / "notes.txt").write_text(f"Note {tiny}: read it.")
    summary = prepare(str(tmp_path / "in"), tmp_path / "out", vocab_size=300, workers=1)
    assert summary.text_bytes[TRAIN_SPLIT] > summary.text_bytes[VALIDATION_SPLIT] > 0


def test_merges_are_learnt_even_where_every_hash_holds_its_text_out(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "two.jsonl", some_texts(2))
    assert (
        prepare(
            str(source), tmp_path / "out", vocab_size=280, validation_ratio=0.999, workers=1
        ).vocab_size
        > 261
    )


@pytest.mark.parametrize("left", ["parts without a plan", "a folder half taken away"])
def test_what_a_killed_overwrite_left_is_not_taken_for_another_plans_parts(
    tmp_path: Path, left: str
) -> None:
    first = write_lines(tmp_path / "first.jsonl", some_texts(40, seed=1))
    second = write_lines(tmp_path / "second.jsonl", some_texts(40, seed=2))
    prepare(str(second), tmp_path / "clean", vocab_size=300, workers=1)
    out = tmp_path / "out"
    if left == "parts without a plan":
        assert stopped_after_parts(first, out) == -signal.SIGKILL
        (out / UNFINISHED / "plan.json").unlink()
    else:
        prepare(str(first), out, vocab_size=300, workers=1)
        (out / UNFINISHED).mkdir()
        (out / SHARDS_MANIFEST).unlink()
    prepare(str(second), out, vocab_size=300, workers=1)
    assert content(out) == content(tmp_path / "clean")


def stopped_after_parts(source: Path, out: Path) -> int:
    """Prepare, and die once the documents are tokenised; the process's status."""
    program = (
        "import os, signal, sys; from lmforge.text.prepare import prepare, steps\n"
        "steps.Preparation._write_shards = lambda *parts: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare.prepare(sys.argv[1], sys.argv[2], vocab_size=300, workers=1)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(source), str(out)], timeout=120
    ).returncode


def test_json_nested_without_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    with pytest.raises(UserError, match=r"deep\.jsonl:2: not valid JSON: recursion limit exceeded"):
        prepare(str(tmp_path / "deep.jsonl"), tmp_path / "out", vocab_size=300, workers=1)


def test_an_only_document_has_its_tail_for_validation(tmp_path: Path) -> None:
    prose = Path(argparse.__file__)
    summary = prepare(str(prose), tmp_path / "out", vocab_size=300)
    assert summary.documents == {TRAIN_SPLIT: 1, VALIDATION_SPLIT: 1}
    (head,), (tail,) = (
        stored_texts(tmp_path / "out", TRAIN_SPLIT),
        stored_texts(tmp_path / "out", VALIDATION_SPLIT),
    )
    assert head + tail == prose.read_text()
    assert head.endswith("\n")
    assert 0.02 <= len(tail) / len(head + tail) < 0.021


@pytest.mark.parametrize(
    "text", ["ab", "  a\n\n b  \n\n\n", "x" * 100, "hello world\n", "\n\na longer text\n\n\n\n\n"]
)
@pytest.mark.parametrize("ratio", [0.02, 0.98])
def test_an_only_document_however_short_is_cut_into_text_and_text(
    tmp_path: Path, text: str, ratio: float
) -> None:
    (tmp_path / "a.txt").write_text(text)
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", vocab_size=261, validation_ratio=ratio)
    (head,), (tail,) = (
        stored_texts(tmp_path / "out", TRAIN_SPLIT),
        stored_texts(tmp_path / "out", VALIDATION_SPLIT),
    )
    assert head + tail == text
    assert head.strip()
    assert tail.strip()


def test_no_validation_split_is_made_when_none_is_requested(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    summary = prepare(str(tmp_path / "a.txt"), tmp_path / "out", vocab_size=261, validation_ratio=0)
    assert summary.documents == {TRAIN_SPLIT: 1}
    assert TokenFolder.open(tmp_path / "out").splits == (TRAIN_SPLIT,)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["a b", "", " \n", "c d", ""])
    summary = prepare(str(source), tmp_path / "out", vocab_size=261)
    assert summary.empty_documents == 3
    assert sum(summary.documents.values()) == 2


def test_a_document_longer_than_a_shard_is_not_cut(tmp_path: Path) -> None:
    texts = ["x" * 5000, "y" * 20, "z" * 3000, "w" * 7]
    source = write_lines(tmp_path / "a.jsonl", texts)
    prepare(str(source), tmp_path / "out", vocab_size=261, validation_ratio=0, shard_tokens=100)
    assert sorted(stored_texts(tmp_path / "out", TRAIN_SPLIT)) == sorted(texts)


# --- the same however it came about ---------------------------------------------------------------


@pytest.mark.usefixtures("many_units")
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, corpus: Path) -> None:
    for workers in (1, 2, 3):
        prepare(
            str(corpus),
            tmp_path / f"out{workers}",
            vocab_size=400,
            shard_tokens=9000,
            workers=workers,
        )
    first = content(tmp_path / "out1")
    assert len([name for name in first if name.endswith(".tokens")]) > 4
    assert first == content(tmp_path / "out2") == content(tmp_path / "out3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "thorough"),
    [
        (1, True),
        (2, True),
        (2, False),
    ],
)
def test_killed_anywhere_and_called_again_it_ends_in_the_same_bytes(
    tmp_path: Path, workers: int, thorough: bool
) -> None:
    generator = fresh_random()
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(3000))
    with open(corpus, "a") as file:
        file.write('{broken\n{"text": 1}\n')
    options = {"vocab_size": 300, "shard_tokens": 15_000, "workers": workers, "skip_invalid": True}
    small = "from lmforge.text.sources import text_sources; text_sources.JSONL_UNIT_BYTES = 25_000"
    assert Preparation(corpus, tmp_path / "whole", small, **options).end() == (0, "")
    out = tmp_path / "out"
    # At the first word of a step, or a little later: in the middle of whatever it then does.
    moments = [
        ("tokenizer", 0),
        ("tokenizer", 1),
        ("tokens", 0),
        ("tokens", generator.randint(1, 15)),
    ]
    moments += [("shards", 0), ("shards", 2)]
    if not thorough:  # one of each step
        moments = [generator.choice(moments[at : at + 2]) for at in (0, 2, 4)]
    for moment in moments:
        delay = generator.choice((0, generator.random() * 0.03)) if moment[0] != "shards" else 0
        again = Preparation(corpus, out, small, die_at=moment, die_after=delay, **options)
        assert again.end()[0] == -signal.SIGKILL, moment
        assert no_process_left(again.process.pid)
        with pytest.raises(UserError, match=r"unfinished; run prepare again"):
            TokenFolder.open(out)
    assert Preparation(corpus, out, small, **options).end() == (0, "")
    assert content(out) == content(tmp_path / "whole")
    assert (out / "left-out.txt").read_text().count("\n") == 2


def test_interrupted_it_leaves_no_process_and_keeps_what_was_done(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(6000))
    small = "from lmforge.text.sources import text_sources; text_sources.JSONL_UNIT_BYTES = 20_000"
    out = tmp_path / "out"
    first = Preparation(corpus, out, small, vocab_size=400, workers=2)
    first.wait_for("tokens 3 ")
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does: to every process
    _, errors = first.end()
    assert errors.count("KeyboardInterrupt") == 1, "only the process that was asked may speak"
    assert no_process_left(first.process.pid)
    sealed = {path: path.stat().st_mtime_ns for path in (out / UNFINISHED).glob("*.npz")}
    assert len(sealed) >= 3
    second = Preparation(corpus, out, small, vocab_size=400, workers=2)
    second.wait_for("tokens")
    assert all(
        path.stat().st_mtime_ns == before for path, before in sealed.items() if path.exists()
    )
    assert second.end()[0] == 0


@pytest.mark.slow
def test_terminated_it_leaves_no_process_no_warning_and_continues(tmp_path: Path) -> None:
    """As `kill` and a scheduler do, whose SIGTERM may reach every process.

    Semaphores that were left would be warned of.
    """
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(6000))
    small = "from lmforge.text.sources import text_sources; text_sources.JSONL_UNIT_BYTES = 20_000"
    for number, send in enumerate((os.kill, os.killpg)):
        first = Preparation(corpus, tmp_path / f"out{number}", small, vocab_size=400, workers=2)
        first.wait_for("tokens 3 ")
        send(first.process.pid, signal.SIGTERM)
        assert first.end() == (128 + signal.SIGTERM, "")
        assert no_process_left(first.process.pid)
        assert len(list((tmp_path / f"out{number}" / UNFINISHED).glob("*.npz"))) >= 3
    assert Preparation(corpus, tmp_path / "out0", small, vocab_size=400, workers=2).end() == (0, "")


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("a.jsonl.zst", 1),
        ("a.jsonl.gz", 2),
        pytest.param("a.txt.zst", 1, marks=pytest.mark.slow),
        pytest.param("a.parquet", 1, marks=pytest.mark.slow),
    ],
)
def test_progress_within_a_large_file_is_in_bytes_of_it_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, workers: int
) -> None:
    monkeypatch.setattr("lmforge.text.prepare.worker_pool.REPORT_SECONDS", 0)
    monkeypatch.setattr("lmforge.text.prepare.shard_jobs.ENCODE_BATCH_CHARACTERS", 1 << 16)
    # A text is tokenized in pieces of a megabyte.
    texts = some_texts(20_000 if "txt" in name else 3000)
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / name)
    else:
        raw = raw if "jsonl" in name else "\n".join(texts).encode()
        (tmp_path / name).write_bytes(
            gzip.compress(raw) if name.endswith("gz") else zstandard.compress(raw)
        )
    reports: list[tuple[Any, ...]] = []
    source = tmp_path / name
    if workers > 1:  # of which each is its own process's
        source = tmp_path / "several"
        source.mkdir()
        for number in range(2):
            shutil.copy(tmp_path / name, source / f"{number}{name}")
    prepare(
        str(source),
        tmp_path / "out",
        vocab_size=261,
        workers=workers,
        progress=lambda *step: reports.append(step),
    )
    sizes = {size for step, _, _, _, size in reports if step != "shards"}
    if name != "a.parquet":  # whose row groups say how large they are unpacked
        assert sizes == {
            sum(file.stat().st_size for file in [*source.glob("*"), source] if file.is_file())
        }
    for kind in ("tokenizer", "tokens"):
        read = [read for step, _, _, read, _ in reports if step == kind]
        assert read == sorted(read)
        assert (read[0], read[-1]) == (0, *sizes)
        assert (kind == "tokenizer" and "txt" in name) or len(set(read)) >= 3, "in between too"


def test_the_command_says_how_much_of_a_file_is_done_and_how_long_the_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lmforge.text.verbs.prepare.PRINT_EVERY_SECONDS", 0)
    monkeypatch.setattr("lmforge.text.prepare.worker_pool.REPORT_SECONDS", 0)
    monkeypatch.setattr("lmforge.text.prepare.shard_jobs.ENCODE_BATCH_CHARACTERS", 1 << 16)
    raw = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(6000)).encode()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(raw))
    assert (
        run(
            ["prepare", str(tmp_path / "a.jsonl.zst"), str(tmp_path / "out"), "--vocab_size", "512"]
        )
        == 0
    )
    size = f"{(tmp_path / 'a.jsonl.zst').stat().st_size / 1e6:,.1f}"
    printed = capsys.readouterr().out
    shares = [
        int(share)
        for share in re.findall(
            rf"^tokens: (\d+)%, [\d.]+ of {size} MB, 0:\d\d:\d\d left$", printed, re.M
        )
    ]
    assert len(set(shares)) >= 2
    assert shares == sorted(shares)


@pytest.mark.parametrize(
    ("source", "example"),
    [("books", "data/books"), ("a/b.jsonl.zst", "data/b"), ("functions", "data/functions")],
)
def test_a_source_of_ones_own_is_not_written_to_the_folder_of_the_standard_library(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    example: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["prepare", source]) == 2
    assert (
        capfd.readouterr().err
        == f"lmforge: prepare: name the folder to write after the source, such as {example}\n"
    )
    assert not list(tmp_path.iterdir())


def test_pages_of_html_are_prepared_as_their_text_and_kinds_that_are_not_read_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.html", "b.HTM", "c.txt", "d.xlsx", "e.pdf"):
        (tmp_path / "in" / name).write_text(f"<p>Some text of {name}.</p>\n" * 20)
    assert run(["prepare", str(tmp_path / "in"), str(tmp_path / "out"), "--vocab_size", "512"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "left out  2 files (.xlsx 1, .pdf 1)\n" in printed.out
    stored = [
        *stored_texts(tmp_path / "out", TRAIN_SPLIT),
        *stored_texts(tmp_path / "out", VALIDATION_SPLIT),
    ]
    assert sorted("<p>" in text for text in stored) == [False, False, True]


def blocked_signals(_: int) -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


@pytest.mark.slow
def test_no_worker_process_hears_ctrl_c_and_the_caller_still_does() -> None:
    """In a process of its own: a tracker of resources that is already up hides the case."""
    program = (
        "from lmforge.text.prepare.worker_pool import WorkerPool\nfrom tests.text.test_prepare"
        " import blocked_signals\nif __name__ == '__main__':\n    with WorkerPool(2) as pool:\n    "
        "    print([sorted(blocked) for _, blocked in pool.map_unordered(blocked_signals,"
        " range(6))], blocked_signals(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{[[int(signal.SIGINT), int(signal.SIGTERM)]] * 6} set()"


def test_a_process_killed_from_outside_is_reported_and_no_work_is_lost(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(20_000))
    small = (
        "from lmforge.text.sources import text_sources; text_sources.JSONL_UNIT_BYTES = 20_000\n"
        "import os, signal, threading, multiprocessing\n"
        "def kill():\n"
        "    for child in multiprocessing.active_children():\n"
        "        os.kill(child.pid, signal.SIGKILL)\n"
    )
    out = tmp_path / "out"
    script = (
        small + "from lmforge.text.prepare.prepare import prepare\nfrom lmforge.core.errors import"
        f" RunFailed\nif __name__ == '__main__':\n    try:\n        prepare({str(corpus)!r},"
        f" {str(out)!r}, vocab_size=300, workers=2,\n            progress=lambda step, done,"
        " *rest: kill() if (step, done) == ('tokens', 3) else None)\n    except RunFailed as"
        " failure:\n        raise SystemExit(f'failed: {failure}')\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert (
        "failed: a process of the preparation was killed, most likely for lack of memory"
        in done.stderr
    )
    assert len(list((out / UNFINISHED).glob("*.npz"))) >= 3


# --- one plan a folder ----------------------------------------------------------------------------


def test_done_already_it_does_nothing(tmp_path: Path, corpus: Path) -> None:
    first = prepare(str(corpus), tmp_path / "out", vocab_size=300)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    second = prepare(str(corpus), tmp_path / "out", vocab_size=300, workers=2)
    assert not first.already_done
    assert second.already_done
    assert (second.tokens, second.documents) == (first.tokens, first.documents)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 301}, "vocab_size"),
        ({"seed": 1, "validation_ratio": 0.1}, "validation_ratio, seed"),
        ({"shard_tokens": 5}, "shard_tokens"),
        (
            {"skip_invalid": True, "parse_special_tokens": True},
            "parse_special_tokens, skip_invalid",
        ),
        ({"text_field": "text2"}, "files, text_field"),
        ({"touch": True}, "files"),
    ],
)
def test_another_plan_in_the_folder_is_refused_and_overwritten_only_when_asked(
    tmp_path: Path, finished: bool, change: dict[str, Any], named: str
) -> None:
    records = [{"text": text, "text2": text} for text in some_texts(20)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "out"
    prepare(str(corpus), out, vocab_size=300)
    if not finished:
        plan = json.loads((out / SHARDS_MANIFEST).read_text())["plan"]
        (out / UNFINISHED).mkdir()
        (out / UNFINISHED / "plan.json").write_text(json.dumps(plan))
        (out / SHARDS_MANIFEST).unlink()
    before = content(out)
    if "touch" in change:
        os.utime(corpus)
    options = {
        "vocab_size": 300,
        **{name: value for name, value in change.items() if name != "touch"},
    }
    with pytest.raises(
        UserError,
        match=f"holds a preparation with other {named}; name another folder, or add --overwrite",
    ):
        prepare(str(corpus), out, **options)
    assert content(out) == before
    prepare(str(corpus), out, overwrite=True, **options)
    prepare(str(corpus), tmp_path / "fresh", **options)
    assert content(out) == content(tmp_path / "fresh")


def test_a_preparation_that_ended_before_it_wrote_anything_gives_way_to_another(
    tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("[1]")
    with pytest.raises(UserError, match="expected an object"):
        prepare(str(tmp_path / "bad.jsonl"), tmp_path / "out")
    prepare(str(corpus), tmp_path / "out", vocab_size=300)
    prepare(str(corpus), tmp_path / "fresh", vocab_size=300)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")


def test_a_folder_of_something_else_is_never_touched(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="exists and is not a preparation; name another folder"):
            prepare(str(corpus), tmp_path / "out", overwrite=overwrite)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    prepare(str(corpus), tmp_path / "done", vocab_size=300)
    (tmp_path / "done" / "notes-00001-mine.txt").write_text("mine")
    prepare(str(corpus), tmp_path / "done", vocab_size=301, overwrite=True)
    assert (tmp_path / "done" / "notes-00001-mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [SHARDS_MANIFEST, f"{UNFINISHED}/plan.json", "train-00000.json"])
def test_a_folder_in_the_place_of_a_file_of_a_preparation_is_named(
    tmp_path: Path, corpus: Path, refused: Refusal, name: str
) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / name / "thesis.txt").write_text("years of work")
    for words in ([], ["--overwrite"]):
        message = refused("prepare", corpus, tmp_path / "out", "--vocab_size", 512, *words)
        assert message.startswith(str(tmp_path / "out"))
        assert (tmp_path / "out" / name / "thesis.txt").read_text() == "years of work"


def test_a_name_that_is_too_long_for_a_file_is_refused(
    tmp_path: Path, corpus: Path, refused: Refusal
) -> None:
    assert "(302 characters): File name too long; " in refused(
        "prepare", "a" * 300, tmp_path / "out"
    )
    assert "--out: expected a path of names of at most 255 bytes" in refused(
        "prepare", corpus, tmp_path / ("a" * 300)
    )


def test_two_at_once_in_one_folder_are_refused(tmp_path: Path, corpus: Path) -> None:
    with (
        lock_folder(tmp_path / "out"),
        pytest.raises(UserError, match="another preparation is writing here"),
    ):
        prepare(str(corpus), tmp_path / "out")
    prepare(str(corpus), tmp_path / "out", vocab_size=300)
    assert not list((tmp_path / "out").glob(".lock*"))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"vocab_size": 100}, "vocab_size 100"),
        ({"tokenizer": "nowhere"}, "no such tokenizer"),
        ({"text_field": "body"}, "no field 'body': there are text"),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, corpus: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        prepare(str(corpus), tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("validation_ratio", "1.0", "below 1"),
        ("validation_ratio", "-0.1", "a number above 0"),
        ("shard_tokens", "0", "above 0"),
        ("workers", "0", "above 0"),
    ],
)
def test_an_option_out_of_its_bounds_is_named(
    tmp_path: Path, corpus: Path, refused: Refusal, option: str, value: str, expected: str
) -> None:
    message = refused("prepare", corpus, tmp_path / "out", f"--{option}={value}")
    assert option in message
    assert expected in message


def test_a_corpus_of_blanks_is_empty(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["", "  ", "\n"])
    with pytest.raises(UserError, match=r"a\.jsonl: empty: there is no text in it"):
        prepare(str(source), tmp_path / "out")


def test_texts_that_are_all_the_same_cannot_be_split(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["same"] * 5)
    with pytest.raises(
        UserError, match="too few different texts to set any aside for validation; give more text"
    ):
        prepare(str(source), tmp_path / "out", vocab_size=261)


def test_a_bad_line_found_by_another_process_is_named_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 2000)
    source = write_lines(tmp_path / "a.jsonl", some_texts(500))
    with open(source, "a") as file:
        file.write("{broken\n")
    trained = tmp_path / "t"
    prepare(str(write_lines(tmp_path / "b.jsonl", some_texts(20))), trained, vocab_size=300)
    with pytest.raises(UserError, match=r"a\.jsonl:501: not valid JSON"):
        prepare(str(source), tmp_path / "out", tokenizer=trained / "tokenizer", workers=2)
    assert not (tmp_path / "out" / SHARDS_MANIFEST).exists()


def test_an_out_that_cannot_be_a_folder_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UserError, match=r"corpus\.jsonl: cannot be created as a token folder"):
        prepare(str(corpus), corpus)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_is_named_and_the_rest_can_be_done_later(
    tmp_path: Path, workers: int
) -> None:
    """A limit on the size of a file is met exactly as the end of a disk is: by a write that
    fails.
    """
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(6000))
    small = (
        "from lmforge.text.sources import text_sources; text_sources.JSONL_UNIT_BYTES = 100_000\n"
    )
    options = {"vocab_size": 261, "workers": workers}
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"
    out = tmp_path / "out"
    code, errors = Preparation(corpus, out, small + limit, **options).end()
    assert code == 1
    assert f"mistake: {out}: no space to write train-00000.tokens" in errors
    assert not (out / SHARDS_MANIFEST).exists()
    # With several, the others are ended at once, amid a file or not; the next preparation removes
    # it.
    if workers == 1:
        assert not list(out.rglob("*.partial"))
    assert Preparation(corpus, out, small, **options).end()[0] == 0
    assert not list(out.rglob("*.partial"))
    assert len(stored_texts(out, TRAIN_SPLIT)) + len(stored_texts(out, VALIDATION_SPLIT)) == 6000


def test_a_disk_that_is_really_full_is_named(tmp_path: Path) -> None:
    """A file system of 300 KiB in a mount namespace of its own."""
    corpus = write_lines(tmp_path / "corpus.jsonl", some_texts(6000))
    disk = tmp_path / "disk"
    disk.mkdir()
    program = (
        "from lmforge.text.prepare.prepare import prepare\nfrom lmforge.core.errors import"
        f" UserError\ntry: prepare({str(corpus)!r}, {str(disk / 'out')!r}, vocab_size=261,"
        " workers=1)\nexcept UserError as mistake: raise SystemExit(str(mistake))\nfinally: import"
        f" os; print([f for _, _, fs in os.walk({str(disk)!r}) for f in fs if f =="
        " 'manifest.json'])"
    )
    command = 'mount -t tmpfs -o size=300k tmpfs "$0" && exec "$1" -c "$2"'
    need("the right to mount")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, str(disk), sys.executable, program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"{disk / 'out'}" in done.stderr
    assert "no space to write" in done.stderr
    assert done.stdout.strip() == "[]"


def test_the_tokenizer_is_kept_with_the_shards(tmp_path: Path, corpus: Path) -> None:
    prepare(str(corpus), tmp_path / "out", vocab_size=300)
    assert (
        Tokenizer.open(tmp_path / "out" / "tokenizer").hash
        == TokenFolder.open(tmp_path / "out").manifest.tokenizer
    )
