"""The command line is frozen: what may be typed is what `command_line.txt` lists, with a reason for
each option added since.
"""

from pathlib import Path

import pytest

from lmforge.cli import TRAINING_NOTES
from lmforge.core.options.load import STAGES
from lmforge.core.options.options import iter_options
from lmforge.core.options.verbs import VERBS

FILE = Path(__file__).parent / "command_line.txt"
ADDED = "# --- added since ---"


def what_may_be_typed() -> set[str]:
    """`VERB --option`, `VERB option` for one that is given by position, of all verbs; tables in
    lists have `[]`.
    """
    lines = {f"lmforge --{name}" for name in ("help", "version", "debug")} | {f"{stage} --dry-run" for stage in STAGES}
    for verb, about in VERBS.items():
        tables = ""
        for path, field in iter_options(about.options, in_tables=True):
            name = ".".join(path)
            if tables and name.startswith(f"{tables}."):
                name = f"{tables}[]{name.removeprefix(tables)}"
            elif field.annotation is not None and "Options" in str(field.annotation):
                tables = name
            extra = field.json_schema_extra
            by_position = isinstance(extra, dict) and "positional" in extra
            lines.add(f"{verb} {name}" if by_position else f"{verb} --{name}")
        known = {".".join(path) for path, _ in iter_options(about.options)}
        shorts = getattr(about.options, "SHORT", {})
        lines |= {f"{verb} --{short}" for short, full in shorts.items() if full in known and not full.startswith("plan.")}
    return lines


def listed() -> list[str]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [line.partition("#")[0].rstrip() for line in lines if line.partition("#")[0].strip()]


def test_what_may_be_typed_is_what_the_list_says() -> None:
    names, typed = listed(), what_may_be_typed()
    assert sorted(set(names)) == sorted(names), "twice in the list"
    assert sorted(typed - set(names)) == [], f"new: add a line and its reason at the end of {FILE.name}, or leave it out"
    assert sorted(set(names) - typed) == [], f"gone: remove its line from {FILE.name}"


def test_what_was_added_to_the_list_has_a_reason() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count(f"\n{ADDED}\n") == 1
    for line in text.partition(f"\n{ADDED}\n")[2].splitlines():
        option, _, reason = line.partition("  # ")
        assert option.strip(), line
        assert len(reason.split()) >= 3, f"{line}: needs a reason"


@pytest.mark.parametrize("word", ["--dry-run", "--resume", "--deterministic"])
def test_the_words_of_training_verbs_are_in_their_help(word: str) -> None:
    assert f"  {word} " in TRAINING_NOTES
