"""The reference of options has every option with its default and its help, and the navigation has
every page.
"""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmforge.core.options.options import Options
from lmforge.core.options.verbs import VERBS
from lmforge.ops.options.running import PipelineOptions
from website.api_pages import api_pages
from website.links import PAGES
from website.options_page import STAGES, run_page, verbs_page
from website.results_page import newest_results, results

ROOT = Path(__file__).parents[2]
ENTRY = re.compile(
    r'<h3 class="option" id="([^"]*)"><code>([^<]*)</code></h3>\n<p'
    r' class="facts">(.*)</p>\n<p>(.*)</p>'
)


def options(tree: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every option below a class, as the page names it: those of sections, and the keys of lists of
    tables.
    """
    for name, field in tree.model_fields.items():
        item = next(
            (each for each in getattr(field.annotation, "__args__", ()) if isinstance(each, type)),
            None,
        )
        inner: Any = field.annotation if isinstance(field.annotation, type) else item
        holds_options = isinstance(inner, type) and issubclass(inner, BaseModel)
        if inner is not field.annotation or not holds_options:
            yield prefix + name, field
        if holds_options:
            yield from options(inner, f"{prefix}{name}.")


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<.*?>", "", text)).replace("`", "")


def default_of(field: FieldInfo) -> str | None:
    """What the page has to say of the default; None where the description says it in words."""
    if field.is_required():
        return "required"
    if "(default: " in (field.description or ""):
        return None
    value = "none" if field.default in (None, ()) else field.default
    return f"default {value if isinstance(value, str | Path) else json.dumps(value)}"


def lacking(page: str, names: dict[str, FieldInfo], verb: str | None = None) -> list[str]:
    """The options that the page lacks, or has with another default or help."""
    entries = [
        (name.strip("[]").removeprefix("--"), anchor, plain(facts), plain(text))
        for anchor, name, facts, text in ENTRY.findall(page)
    ]
    wrong = []
    for name, field in names.items():
        result = [
            each
            for each in entries
            if each[0] == name and (verb is None or each[1].startswith(f"{verb}."))
        ]
        description, default = (field.description or "").replace("`", ""), default_of(field)
        said = [
            f"{text} ({facts})" if default is None else facts
            for _, _, facts, text in result
            if text in description
        ]
        words = re.sub(r"\W+", " ", description.partition("(default: ")[2])
        right = [
            each
            for each in said
            if (words.strip() in re.sub(r"\W+", " ", each) if default is None else default in each)
        ]
        wrong += [] if right else [name]
    return wrong


@pytest.mark.parametrize("verb", STAGES)
def test_every_option_of_a_run_is_on_the_page_with_its_default_and_help(verb: str) -> None:
    names = dict(options(STAGES[verb]))
    assert len(names) > 100
    assert lacking(run_page(), names) == []


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in STAGES])
def test_every_option_of_a_verb_is_on_the_page_with_its_default_and_help(verb: str) -> None:
    assert f"\n## {verb} {{ #{verb} }}\n" in verbs_page()
    assert lacking(verbs_page(), dict(options(VERBS[verb].options)), verb) == []


def test_the_keys_of_a_pipeline_are_on_the_page() -> None:
    assert lacking(verbs_page(), dict(options(PipelineOptions)), "pipeline") == []


def test_an_option_that_is_changed_is_missed() -> None:
    class Other(Options):
        steps: int = 7

    assert lacking(run_page(), {"train.steps": Other.model_fields["steps"]}) == ["train.steps"]


def test_every_page_stands_in_the_navigation_once_and_every_entry_is_a_page() -> None:
    entries = re.findall(
        r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M
    )
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {page for path, page in PAGES.items() if path.endswith(".md") or path == "LICENSE"}
    # The log of experiments is linked to by the pages that quote it.
    expected = (written | made | {"reference/options.md", "reference/verbs.md"}) - {"log.md"}
    assert sorted(entries) == sorted(expected)


def test_every_package_that_others_use_has_a_page() -> None:
    packages = {path.parent.name for path in (ROOT / "lmforge").glob("*/__init__.py")}
    assert {f"reference/api/{name}.md" for name in packages} <= api_pages().keys()
    assert "::: lmforge.post.objectives.policy\n" in api_pages()["reference/api/post.objectives.md"]


def test_the_newest_result_of_each_benchmark_is_shown() -> None:
    every = list((ROOT / "benchmarks" / "results").glob("*.md"))
    stamped = [path for path in every if not path.name.startswith("gpu-")]
    assert all(path.name in results() for path in every if path not in stamped)
    named = {re.match(r"[a-z_]+", path.name)[0] for path in stamped}  # type: ignore[index]
    assert newest_results().keys() == named
    for name, path in newest_results().items():
        assert path == max(
            (each for each in stamped if each.name.startswith(f"{name}-")),
            key=lambda each: each.name[-18:],
        )
        assert path.name in results()
