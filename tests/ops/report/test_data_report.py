"""`lmforge show data` of shards: the report on documents is correct, and samples are as the model
gets them.
"""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmforge.cli import run
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.options.load import read_config
from lmforge.core.stages.training_data import TokenSources
from lmforge.ops.report.source_report import MAX_SHARDS_READ
from lmforge.ops.verbs.show.show_data import report_data, show_samples
from lmforge.text.prepare.prepare import prepare
from tests.conftest import Refusal
from tests.seeds import fresh_random

Writer = Callable[..., TokenFolder]


def test_documents_are_counted_as_plain_python_counts_them(
    tmp_path: Path, folder_of: Writer
) -> None:
    rng = fresh_random()
    # One shard with several blocks of document ends; lengths at the ends of powers of two among
    # them.
    shards = [[rng.choice([1, 2, 3, 4, 7, 8, 63, 64]) for _ in range(n)] for n in (9000, 1, 40)]
    lengths = sorted(length for shard in shards for length in shard)
    folder_of(tmp_path / "random", shards)
    shown = report_data(tmp_path / "random")
    n, tokens = len(lengths), sum(lengths)
    assert re.search(rf"^ *random +{n:,} +{tokens:,} +100\.00% +100\.00% +unknown$", shown, re.M)
    assert f"documents  of random, in tokens; {n:,} of {n:,} documents in 3 of 3 shards\n" in shown
    median, p99 = (lengths[math.ceil(q * n) - 1] for q in (0.5, 0.99))
    expected = (
        f"min {lengths[0]}, median {median}, mean {statistics.mean(lengths):.1f}, p99 {p99}, max"
        f" {lengths[-1]}"
    )
    assert f"  {expected}\n" in shown
    bars = {
        int(a): (int(b), int(c.replace(",", "")))
        for a, b, c in re.findall(r"^ +(\d+) to (\d+) +([\d,]+)", shown, re.M)
    }
    counted = Counter(1 << (length.bit_length() - 1) for length in lengths)
    assert {a: count for a, (_, count) in bars.items() if count} == counted
    assert all(b == 2 * a - 1 for a, (b, _) in bars.items())


def test_some_of_many_shards_are_read_as_the_report_says(tmp_path: Path, folder_of: Writer) -> None:
    folder_of(tmp_path / "many", [[number + 2, 3] for number in range(2 * MAX_SHARDS_READ)])
    shown = report_data(tmp_path / "many")
    assert (
        f"; {2 * MAX_SHARDS_READ} of {4 * MAX_SHARDS_READ} documents in {MAX_SHARDS_READ} of"
        f" {2 * MAX_SHARDS_READ} " in shown
    )
    # Of the last shard but one: spread over all of them.
    assert f"max {2 * MAX_SHARDS_READ}\n" in shown


@pytest.fixture
def mixture(tmp_path: Path, tiny_tokens: Path) -> Path:
    """A recipe of tiny_tokens and of 40 documents "0 é", "1 é", …"""
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} é"}) + "\n" for n in range(40))
    )
    prepare(
        str(tmp_path / "text.jsonl"),
        tmp_path / "short",
        tokenizer=tiny_tokens / "tokenizer",
        workers=1,
    )
    sources = "".join(
        f'[[data.sources]]\nfolder = "{folder}"\nname = "{name}"\nweight = {weight}\n'
        for folder, name, weight in ((tiny_tokens, "tiny", 3), (tmp_path / "short", "short", 1))
    )
    recipe = tmp_path / "mixed.toml"
    recipe.write_text(
        f"[data]\nsequence_length = 48\n{sources}[train]\nsteps = 200\nglobal_batch_size = 4\n"
    )
    return recipe


def test_a_recipe_is_reported_by_source_in_lines(
    mixture: Path, tmp_path: Path, tiny_tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", "data", str(mixture)]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip("\n") == report_data(mixture)
    splits = {"tiny": TokenFolder.open(tiny_tokens), "short": TokenFolder.open(tmp_path / "short")}
    total = sum(folder.split("train").num_tokens for folder in splits.values())
    for name, weight in (("tiny", 0.75), ("short", 0.25)):
        split = splits[name].split("train")
        starts = [0, *split.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
        documents = [split.read(a, b) for a, b in pairwise(starts)]
        text = "".join(
            splits[name].tokenizer.decode(document[:-1].tolist()) for document in documents
        )
        cells = next(line.split() for line in shown.splitlines() if line.split()[0] == name)
        ratio = f"{len(text.encode()) / split.num_tokens:.2f}"
        share = f"{split.num_tokens / total:.2%}"
        assert cells == [
            name,
            f"{len(documents):,}",
            f"{split.num_tokens:,}",
            share,
            f"{weight:.2%}",
            ratio,
        ]


def test_of_a_run_samples_are_shown(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "data", str(tiny_run)]) == 0
    assert "\nsample 2 (" in capsys.readouterr().out


def plain(text: str) -> str:
    """Without what marks tokens, and what stands for line ends."""
    return re.sub(r"[|\[\]↵]", "", text)


def test_samples_of_a_recipe_are_evenly_spaced_with_a_line_before_each_document(
    mixture: Path,
) -> None:
    shown = show_samples(mixture, None, 5)
    assert shown == show_samples(mixture, None, 5)
    sources = TokenSources.open(read_config(mixture))
    dataset = sources.training(4)
    title, *samples = re.split(r"\n\nsample (?=\d+ \()", shown)
    assert title.startswith(f"recipe {mixture}; 5 samples of 800, evenly spaced, of ")
    assert [int(sample.split()[0]) for sample in samples] == [0, 160, 320, 480, 640]
    for number, sample in zip(range(0, 800, 160), samples, strict=True):
        sequence = dataset.sequence(number)
        head, *parts = re.split(r"\n── (?=document|padding)", sample)
        assert f"({dataset.describe_sample(number)}): " in head
        assert head.endswith(f", {(sequence.labels >= 0).sum()} scored tokens")
        documents = [part for part in parts if part.startswith("document")]
        assert len(documents) == sequence.document_ids.max() + 1
        assert any(part.startswith("padding") for part in parts) == bool(
            (sequence.document_ids < 0).any()
        )
        for at, part in enumerate(documents):
            inside = sequence.document_ids == at
            ids = sequence.tokens[inside].tolist()
            assert part.startswith(f"document {at + 1}: {len(ids)} token")
            text = part.partition(" ──\n")[2]
            assert plain(text).startswith(
                plain(sources.tokenizer.decode(ids, include_special_tokens=True).rstrip("\ufffd"))
            )
            # The first token of a document is predicted from nothing.
            assert text.count("[") >= (len(ids) > 1)
            assert not text.startswith("[")


def test_samples_of_a_folder_are_of_one_epoch_and_padding_is_marked(
    tmp_path: Path, folder_of: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [700, 1, 600]
    folder = folder_of(tmp_path / "three", [lengths])
    shown = show_samples(folder.path, None, 10)
    assert shown.startswith(f"folder {folder.path}; 2 samples of 2, evenly spaced, of ")
    counted = [
        int(count) for count in re.findall(r"^── document \d+: (\d+) tokens? ──$", shown, re.M)
    ]
    # 1,024 tokens and the 276 after them; the last of all is only a label.
    assert sum(counted) == sum(lengths) - 1
    assert sorted(counted) == sorted([700, 1, 1024 - 701, 600 - (1024 - 701) - 1])
    assert f"── padding: {2 * 1024 - sum(lengths) + 1} tokens, not scored ──" in shown
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b[36m── document 1: " in show_samples(folder.path, "0:1")


def test_what_is_not_such_data_is_refused_in_one_line(
    mixture: Path, tmp_path: Path, tiny_run: Path, refused: Refusal
) -> None:
    empty, sft = tmp_path / "empty", tmp_path / "sft.toml"
    empty.mkdir()
    sft.write_text(
        f'[run]\nstage = "sft"\n[model]\nsource = "{tiny_run}"\n[data]\nfiles = ["a.jsonl"]\n'
    )
    (tmp_path / "notes.txt").write_text("hello")
    words = {
        (
            "data",
            mixture,
            "--num_samples",
            "-1",
        ): "--num_samples: expected a number above 0, got -1",
        ("data", mixture, "--num_samples", "10001"): "--num_samples: expected ",
        (
            "data",
            mixture,
            "--num_samples",
            "2",
            "--samples",
            "0:1",
        ): "--num_samples: does not go with --samples; leave one of them out",
        (
            "data",
            empty,
        ): f"{empty}: a folder of no known kind; give a run, a recipe, a token folder or",
        ("data", sft): f"{sft}: is not trained on token shards; --num_samples 5 prints",
        (
            "data",
            tmp_path / "nothing",
            "--num_samples",
            "2",
        ): f"{tmp_path / 'nothing'}: no such file or folder; give a run, a recipe,",
        (
            "data",
            tmp_path / "notes.txt",
            "--num_samples",
            "2",
        ): f"{tmp_path / 'notes.txt'}: --num_samples is for a run, a recipe or",
        (mixture, "--num_samples", "2"): "show: --num_samples is for `lmforge show data OF` alone",
    }
    for typed, said in words.items():
        assert refused("show", *typed).startswith(said), typed


def test_damaged_document_ends_are_named(
    tmp_path: Path, folder_of: Writer, refused: Refusal, impatient: None
) -> None:
    folder_of(tmp_path / "bad", [[5] * 100])
    file = tmp_path / "bad" / "train-00000.documents"
    ends = np.fromfile(file, "<u8")
    ends[3] += 1
    ends.tofile(file)
    assert refused("show", "data", tmp_path / "bad").startswith(f"{file}: ")
