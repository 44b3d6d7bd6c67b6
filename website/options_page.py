"""The reference of options, from the config classes: what `lmforge VERB --help all` prints, as
pages.
"""

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.fields import FieldInfo

from lmforge.core.options.help_text import default_text, type_name
from lmforge.core.options.options import OptionPath, Options, iter_options
from lmforge.core.options.stage import PretrainConfig, StageConfig
from lmforge.core.options.verbs import VERBS
from lmforge.lab.options.bench import BenchConfig
from lmforge.ops.options.running import PipelineOptions
from lmforge.post.options.align import AlignConfig
from lmforge.post.options.tuning import DistillConfig, SftConfig

STAGES: dict[str, type[StageConfig]] = {
    "pretrain": PretrainConfig,
    "sft": SftConfig,
    "distill": DistillConfig,
    "align": AlignConfig,
    "bench": BenchConfig,
}
RUN_INTRODUCTION = """\
Every option of `lmforge pretrain`, `sft`, `distill`, `align` and `bench`, with its default. In a recipe, `train.steps` is
`steps` under `[train]`; on the command line it is `--train.steps 100`. An option that not all five verbs have, or for which
they have different defaults, is marked with theirs. `none` unsets an option. This page is made from the classes that read the
options."""
VERBS_INTRODUCTION = """\
Every verb with its options, as `lmforge VERB --help all` prints them. An option whose name is in brackets may also be given by
position. This page is made from the classes that read the options."""
SIGNS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def run_page() -> str:
    """Every option of the stages and `bench`, a heading for each section and each option."""
    trees = {verb: dict(iter_options(tree, in_tables=True)) for verb, tree in STAGES.items()}
    sections = dict.fromkeys(path[0] for tree in trees.values() for path in tree)
    text = [
        "# Options of a run",
        RUN_INTRODUCTION,
        "Sections: " + ", ".join(f"[{name}](#{name})" for name in sections) + ".",
    ]
    for name in sections:
        meanings = dict.fromkeys(
            str(tree.model_fields[name].description) for tree in STAGES.values() if name in tree.model_fields
        )
        text.append(f"## {name} {{ #{name} }}\n\n{'; '.join(meanings)}.")
        for path in dict.fromkeys(path for tree in trees.values() for path in tree if path[0] == name):
            text += _variants(path, {verb: tree[path] for verb, tree in trees.items() if path in tree})
    return "\n\n".join(text) + "\n"


def verbs_page() -> str:
    """Every other verb with its options, and the keys of a pipeline file."""
    text = [
        "# Verbs and their options",
        VERBS_INTRODUCTION,
    ]
    for verb, entry in VERBS.items():
        text.append(f"## {verb} {{ #{verb} }}\n\n`{entry.usage}`: {_code(entry.summary)}.")
        if verb in STAGES:
            text.append(f"Its options are those [of a run](options.md). `lmforge {verb} --help` lists those that most need.")
        else:
            text += _all_of(verb, entry.options)
    text.append("## A pipeline file { #pipeline }\n\nThe keys of a TOML file for `lmforge run`.")
    return "\n\n".join([*text, *_all_of("pipeline", PipelineOptions)]) + "\n"


def _all_of(verb: str, options: type[Options]) -> Iterator[str]:
    for path, field in iter_options(options, in_tables=True):
        yield _entry(f"{verb}.{'.'.join(path)}", _usage(path, field, verb != "pipeline"), field, ())


def _usage(path: OptionPath, field: FieldInfo, dashes: bool) -> str:
    name = f"{'--' if dashes else ''}{'.'.join(path)}"
    positional = isinstance(field.json_schema_extra, dict) and "positional" in field.json_schema_extra
    return f"[{name}]" if positional else name


def _variants(path: OptionPath, fields: dict[str, FieldInfo]) -> Iterator[str]:
    """An entry for each meaning or default that an option has; which verbs it is for, where those
    are not all.
    """
    name = ".".join(path)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for verb, field in fields.items():
        groups.setdefault((type_name(field), *_help_and_default(field)), []).append(verb)
    for number, verbs in enumerate(groups.values()):
        anchor = name if number == 0 else f"{name}-{verbs[0]}"
        yield _entry(anchor, name, fields[verbs[0]], verbs if len(verbs) < len(STAGES) else ())


def _entry(anchor: str, name: str, field: FieldInfo, verbs: Iterable[str]) -> str:
    """An option as a heading, by which search finds it, and what it is."""
    meaning, default = _help_and_default(field)
    facts = [", ".join(f"<code>{html.escape(word)}</code>" for word in type_name(field).strip("[]").split("|"))]
    facts += [bound] if (bound := ", ".join(_bounds(field))) else []
    facts += [f"default <b>{html.escape(default)}</b>" if default != "required" else "<b>required</b>"]
    facts += [f"only <b>{', '.join(verbs)}</b>"] if verbs else []
    return (
        f'<h3 class="option" id="{html.escape(anchor)}"><code>{html.escape(name)}</code></h3>\n'
        f'<p class="facts">{" · ".join(facts)}</p>\n<p>{_code(meaning)}</p>'
    )


def _help_and_default(field: FieldInfo) -> tuple[str, str]:
    """The description, and the default apart from it: that of the class, or what the description
    says in its place.
    """
    text = field.description or ""
    if said := re.fullmatch(r"(.*?) \(default: ([^()]*)\)", text, re.S):
        return said[1], said[2]
    return text, default_text(field).removeprefix(" (default: ").removeprefix(" (").removesuffix(")") or "see below"


def _bounds(field: FieldInfo) -> Iterator[str]:
    for each in field.metadata:
        for name, word in SIGNS.items():
            value: Any = getattr(each, name, None)
            if value is not None:
                yield f"{word} {value:,}" if isinstance(value, int) else f"{word} {value:g}"


def _code(text: str) -> str:
    """Escaped for HTML, with `code` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
