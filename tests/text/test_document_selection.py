"""Documents that are removed or changed: by a hook, as duplicates, and with evaluation texts.

Also built-in tokenizers.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from lmforge.cli import run
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.errors import UserError
from lmforge.text.prepare.deduplicate import exact_duplicates, near_duplicate_keys, near_duplicates
from lmforge.text.prepare.prepare import prepare
from lmforge.text.sources import text_sources
from tests.conftest import Refusal
from tests.seeds import fresh_random
from tests.text.test_prepare import content, some_texts, stored_texts


def all_texts(folder: Path) -> list[str]:
    return sorted(
        text for split in TokenFolder.open(folder).splits for text in stored_texts(folder, split)
    )


def write_records(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path: Path, texts: list[str]) -> Path:
    return write_records(path, [{"text": text} for text in texts])


# --- hook -----------------------------------------------------------------------------------------

HOOK = """
import neighbour

def clean(document):
    if document["score"] < neighbour.LEAST:
        return None
    return {**document, "text": document["text"].upper()}

def fails(document):
    raise KeyError("no such thing")

def returns_text(document):
    return document["text"]

def by_path(document):
    return document if document["path"].endswith("a.txt") else None
"""


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("LEAST = 3\n")
    (tmp_path / "hook.py").write_text(HOOK)
    return tmp_path / "hook.py"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hook_gets_every_field_and_changes_documents_or_leaves_them_out(
    tmp_path: Path, hook: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 500)
    records = [{"text": f"document {number}", "score": number % 7} for number in range(60)]
    source = write_records(tmp_path / "in.jsonl", records)
    summary = prepare(
        str(source),
        tmp_path / "out",
        hook=f"{hook}:clean",
        tokenizer="characters",
        workers=workers,
        validation_ratio=0.1,
    )
    kept = [f"DOCUMENT {number}" for number in range(60) if number % 7 >= 3]
    assert all_texts(tmp_path / "out") == sorted(kept)
    assert summary.removed_documents == {"hook": 60 - len(kept)}
    # The tokenizer has the characters of what the hook returned.
    assert TokenFolder.open(tmp_path / "out").tokenizer.token_to_id("d") is None


def test_a_hook_is_given_the_path_of_a_text_file(tmp_path: Path, hook: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "in" / name).write_text(f"the text of {name}, and more of it")
    prepare(str(tmp_path / "in"), tmp_path / "out", hook=f"{hook}:by_path", tokenizer="bytes")
    assert "".join(all_texts(tmp_path / "out")[::-1]).count("a.txt") == 1


def test_a_hook_that_fails_is_named_with_document_and_file(
    tmp_path: Path, hook: Path, refused: Refusal
) -> None:
    source, out = (
        write_records(tmp_path / "in.jsonl", [{"text": "a", "score": 5}, {"text": "b"}]),
        tmp_path / "out",
    )
    message = refused("prepare", source, out, "--hook", f"{hook}:clean")
    assert message == f"{source}:2: hook hook.py:clean raised KeyError: 'score'"
    message = refused("prepare", source, out, "--hook", f"{hook}:returns_text")
    assert (
        message
        == f"{source}:1: hook hook.py:returns_text returned str: expected the document, with text"
        " in 'text', or None"
    )
    message = refused("prepare", source, out, "--hook", f"{hook}:nothing")
    assert (
        message
        == f"hook {hook}: no function 'nothing': there are by_path, clean, fails, returns_text"
    )
    assert "no such file; name a function as FILE.py:FUNCTION" in refused(
        "prepare", source, out, "--hook", "nowhere.py:f"
    )
    (tmp_path / "bad.py").write_text("1 / 0")
    assert "cannot be imported: ZeroDivisionError" in refused(
        "prepare", source, out, "--hook", f"{tmp_path}/bad.py:f"
    )


def test_a_changed_hook_is_another_preparation(tmp_path: Path, hook: Path) -> None:
    source = write_records(
        tmp_path / "in.jsonl", [{"text": f"document {number}", "score": 5} for number in range(9)]
    )
    options = {"hook": f"{hook}:clean", "tokenizer": "bytes"}
    prepare(str(source), tmp_path / "out", **options)
    assert prepare(str(source), tmp_path / "out", **options).already_done
    hook.write_text(HOOK.replace("upper", "lower"))
    with pytest.raises(
        UserError,
        match="holds a preparation with other hook; name another folder, or add --overwrite",
    ):
        prepare(str(source), tmp_path / "out", **options)


def test_a_hook_that_drops_all_documents_is_reported(
    tmp_path: Path, hook: Path, refused: Refusal
) -> None:
    source = write_records(tmp_path / "in.jsonl", [{"text": "a", "score": 0}])
    said = refused("prepare", source, tmp_path / "out", "--hook", f"{hook}:clean")
    assert said == f"{source}: no document is left: the hook leaves out all"


def test_a_hook_that_exits_ends_the_preparation_as_any_exception_does(
    tmp_path: Path, refused: Refusal
) -> None:
    source, out = (
        write_records(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b"}]),
        tmp_path / "out",
    )
    (tmp_path / "early.py").write_text("import sys\nsys.exit(0)\n")
    assert "early.py: cannot be imported: SystemExit: 0" in refused(
        "prepare", source, out, "--hook", f"{tmp_path}/early.py:f"
    )
    (tmp_path / "late.py").write_text("import sys\ndef f(document):\n    sys.exit(3)\n")
    assert "hook late.py:f raised SystemExit: 3" in refused(
        "prepare", source, out, "--hook", f"{tmp_path}/late.py:f"
    )


# --- copies ---------------------------------------------------------------------------------------


def test_the_first_of_equal_documents_is_kept() -> None:
    chance = fresh_random()
    hashes = np.array([chance.randrange(20) for _ in range(200)], np.uint64)
    sizes = np.array([chance.randrange(2) for _ in range(200)])
    seen: set[tuple[int, int]] = set()
    expected = []
    for key in zip(hashes.tolist(), sizes.tolist(), strict=True):
        expected.append(key in seen)
        seen.add(key)
    assert exact_duplicates(hashes, sizes).tolist() == expected


def near_groups(texts: list[str]) -> list[bool]:
    keys = np.array([near_duplicate_keys(text, number) for number, text in enumerate(texts)])
    return near_duplicates(len(texts), lambda band: keys[:, band]).tolist()


def test_what_is_near_to_something_that_is_near_is_one_group_and_its_first_is_kept() -> None:
    chance = fresh_random()
    keys = np.arange(14 * 300, dtype=np.uint64).reshape(14, 300)
    edges = [
        (chance.randrange(300), chance.randrange(300), chance.randrange(14)) for _ in range(200)
    ]
    groups = [{number} for number in range(300)]
    for band in range(14):
        for a, b in [(a, b) for a, b, of in edges if of == band]:
            same = np.isin(keys[band], [keys[band, a], keys[band, b]])
            keys[band, same] = keys[band, a]
        for key in np.unique(keys[band]):
            first, *others = np.flatnonzero(keys[band] == key).tolist()
            for other in others:
                joined = groups[first] | groups[other]
                for member in joined:
                    groups[member] = joined
    expected = [number != min(group) for number, group in enumerate(groups)]
    assert near_duplicates(300, lambda band: keys[band]).tolist() == expected


def words(chance: random.Random, count: int) -> list[str]:
    return [f"word{chance.randrange(10**6)}" for _ in range(count)]


def test_documents_are_found_as_near_as_often_as_the_formula_says() -> None:
    """Of runs of five words a fraction s is shared.

    120 pairs at a time: within four standard deviations.
    """
    chance, pairs = fresh_random(), 120
    for changed, rest in ((60, 540), (300, 300)):
        result = 0
        for _ in range(pairs):
            common = words(chance, rest)
            first, second = (" ".join([*words(chance, changed), *common]) for _ in range(2))
            result += near_groups([first, second])[1]
        shared = (rest - 4) / (rest - 4 + 2 * changed)
        probability = 1 - (1 - shared**8) ** 14
        assert (
            abs(result - pairs * probability)
            < 4 * (pairs * probability * (1 - probability)) ** 0.5 + 2
        )


def test_case_and_punctuation_are_ignored_and_short_texts_are_compared_completely() -> None:
    chance = fresh_random()
    text = " ".join(words(chance, 40))
    texts = [
        text,
        text.upper() + "!",
        "a b",
        "A, b.",
        "a c",
        "",
        "...",
        "☃",
        " ".join(words(chance, 40)),
    ]
    assert near_groups(texts) == [False, True, False, True, False, False, False, False, False]


@pytest.mark.parametrize(("how", "left"), [("exact", 3), ("near", 2)])
def test_the_first_copy_is_kept_whatever_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, left: int
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 700)
    long = " ".join(words(random.Random(1), 60))
    texts = [long, "other text", long + " end", *[long, "other text"] * 5]
    source = write_texts(tmp_path / "in.jsonl", texts)
    options = {"deduplicate": how, "tokenizer": "bytes", "validation_ratio": 0.4}
    summary = prepare(str(source), tmp_path / "one", workers=1, **options)
    assert all_texts(tmp_path / "one") == sorted([long, "other text", long + " end"][:left])
    assert summary.removed_documents == {"duplicate": len(texts) - left}
    prepare(str(source), tmp_path / "two", workers=2, **options)
    assert content(tmp_path / "one") == content(tmp_path / "two")


# --- evaluation texts -----------------------------------------------------------------------------


def test_documents_with_a_text_of_an_evaluation_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = fresh_random()
    question, short, answer = words(chance, 20), words(chance, 8), words(chance, 13)
    tasks = write_records(
        tmp_path / "task.jsonl",
        [
            {"question": " ".join(question) + "?", "answer": "yes"},
            {"prompt": " ".join(short), "answers": ["no", " ".join(answer)]},
        ],
    )
    clean = [" ".join(words(chance, 100)) for _ in range(20)]
    # One word fewer than it takes.
    clean += [" ".join([*words(chance, 5), *question[:12], *words(chance, 5)])]
    clean += [" ".join([*words(chance, 5), *short[:7], *words(chance, 5)]), "yes no"]
    dirty = [" ".join([*words(chance, 30), *question[4:17], *words(chance, 3)]).upper()]
    dirty += [", ".join([*short, *words(chance, 9)]), "\n".join(answer)]
    source = write_texts(tmp_path / "in.jsonl", [*clean[:10], *dirty, *clean[10:]])
    command = [
        "prepare",
        str(source),
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--decontaminate",
        str(tasks),
    ]
    assert run(command) == 0
    assert "left out  3 documents: with a text of the evaluation\n" in capsys.readouterr().out
    assert all_texts(tmp_path / "out") == sorted(clean)


def test_a_file_that_is_no_task_is_refused(tmp_path: Path, refused: Refusal) -> None:
    source = write_texts(tmp_path / "in.jsonl", ["a"])
    assert 'expected either a "question" or a "prompt"' in refused(
        "prepare", source, tmp_path / "out", "--decontaminate", source
    )


# --- built-in tokenizers --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_vocabulary_of_characters_has_those_of_all_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(text_sources, "JSONL_UNIT_BYTES", 300)
    texts = [*some_texts(30), "one ☃", "and ▁ é"]
    source = write_texts(tmp_path / "in.jsonl", texts)
    summary = prepare(str(source), tmp_path / "out", tokenizer="characters", workers=workers)
    assert summary.vocab_size == 6 + len(set("".join(texts)))
    assert all_texts(tmp_path / "out") == sorted(texts)
    assert prepare(str(source), tmp_path / "out", tokenizer="characters").already_done
    with pytest.raises(UserError, match="other tokenizer"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes")


def test_bytes_are_tokens(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in.jsonl", ["héllo ☃", "plain"])
    summary = prepare(str(source), tmp_path / "out", tokenizer="bytes", validation_ratio=0.5)
    assert summary.vocab_size == 261
    assert sum(summary.tokens.values()) == sum(summary.text_bytes.values()) + 2
