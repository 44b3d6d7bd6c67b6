"""Conversations from Python's standard library, for fine-tuning on code without a network.

A request is made of a function's signature and docstring; the function answers it. The split is by
package, so that no training function is from the same package as a validation function. The code is
neither tokenized nor run here.
"""

import ast
import inspect
import json
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from lmforge.core.files.atomic_files import atomic_write, check_output
from lmforge.text.sources.text_sources import open_text_source

TRAIN_FILE = "train.jsonl"
VALIDATION_FILE = "validation.jsonl"
MAX_SOURCE_CHARACTERS = 2000
MAX_DOCSTRING_CHARACTERS = 1000
MIN_DOCSTRING_WORDS = 4
VALIDATION_RATIO = 0.1


def write_function_conversations(out: Path) -> dict[str, int]:
    """Write `out`/train.jsonl and `out`/validation.jsonl.

    Returns the number of functions in each, {"train": …, "validation": …}.

    A line is {"messages": [user, assistant], "checks": [statement, …], "module": …, "name": …}. The
    checks are statements that succeed after any valid answer was run; they do not call the
    function, since most functions of a library need the rest of it. Raises UserError if `out` holds
    such files already.
    """
    for name in (TRAIN_FILE, VALIDATION_FILE):
        check_output(out / name, other="folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "validation": 0}
    # The training file is renamed last: where it exists, both do.
    with atomic_write(out / TRAIN_FILE) as train, atomic_write(out / VALIDATION_FILE) as validation:
        for conversation in _function_conversations():
            # By a hash of the package's name: the same for all its modules, and in every version of
            # Python.
            package = conversation["module"].partition(".")[0].encode()
            is_validation = xxhash.xxh3_64_intdigest(package) / 2**64 < VALIDATION_RATIO
            file = validation if is_validation else train
            file.write((json.dumps(conversation, ensure_ascii=False) + "\n").encode())
            counts["validation" if is_validation else "train"] += 1
    return counts


def _function_conversations() -> Iterator[dict[str, Any]]:
    """Conversations about functions and methods of the standard library, each once.

    The functions are documented, short and self-contained, in the order of their files. Only the
    first of several with the same body is given, so none is in both splits.
    """
    seen: set[str] = set()
    for file in open_text_source("stdlib").files:
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in old strings
            conversations = list(_conversations_of_file(Path(file.path), module))
        for body, conversation in conversations:
            if body not in seen:
                seen.add(body)
                yield conversation


def _conversations_of_file(path: Path, module: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(body, conversation) of each suitable function.

    Bodies are equal where only names and formatting differ.
    """
    try:
        with tokenize.open(path) as file:
            text = file.read()
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return  # one of Python's own tests
    lines = text.splitlines()
    for statement in tree.body:
        owner = statement if isinstance(statement, ast.ClassDef) else None
        for node in owner.body if owner else [statement]:
            if not isinstance(node, ast.FunctionDef):
                continue
            parts = _split_function(node, lines)
            if parts is None:
                continue
            body = "\n".join(ast.dump(statement) for statement in node.body[1:])
            what = f"function `{node.name}`"
            if owner:
                what = f"method `{node.name}` of a class `{owner.name}`"
            yield body, _function_conversation(node, what, module, *parts)


def _function_conversation(
    node: ast.FunctionDef, what: str, module: str, signature: str, docstring: str, source: str
) -> dict[str, Any]:
    request = f"Write the {what} in Python.\n\n```python\n{signature}\n```\n\n{docstring}"
    answer = f"```python\n{source}\n```"
    parameters = [each.arg for each in ast.iter_child_nodes(node.args) if isinstance(each, ast.arg)]
    return {
        "messages": [
            {"role": "user", "content": request},
            {"role": "assistant", "content": answer},
        ],
        "checks": [
            f"assert callable({node.name})",
            (
                f"import inspect; assert list(inspect.signature({node.name}).parameters) =="
                f" {parameters!r}"
            ),
        ],
        "module": module,
        "name": node.name,
    }


def _split_function(node: ast.FunctionDef, lines: list[str]) -> tuple[str, str, str] | None:
    """Signature, docstring, and source of a function; None if it is unsuitable.

    The source is without docstring and indentation.
    """
    documentation = ast.get_docstring(node)
    if documentation is None or len(node.body) < 2:
        return None
    # A decorator, default or annotation may need names of its module, which a sandbox does not
    # have.
    parts = [*ast.walk(node.args)]
    if node.returns:
        parts += ast.walk(node.returns)
    if node.decorator_list or any(isinstance(part, ast.Name) for part in parts):
        return None
    first = node.body[1]
    docstring = node.body[0]
    assert docstring.end_lineno is not None
    if docstring.lineno == node.lineno or first.lineno <= docstring.end_lineno:
        return None  # on one line: the parts cannot be separated by lines
    documentation = inspect.cleandoc(documentation)
    header = "\n".join(lines[node.lineno - 1 : docstring.lineno - 1])
    rest = "\n".join(lines[docstring.end_lineno : node.end_lineno]).lstrip("\n")
    source = textwrap.dedent(f"{header}\n{rest}")
    if (
        len(documentation.split()) < MIN_DOCSTRING_WORDS
        or len(documentation) > MAX_DOCSTRING_CHARACTERS
        or len(source) > MAX_SOURCE_CHARACTERS
        # Abstract.
        or all(isinstance(statement, ast.Raise | ast.Pass) for statement in node.body[1:])
        or any(
            mark in rest for mark in ('"""', "'''", "\\\n")
        )  # multi-line strings, which dedenting would change
        or not _compiles(source)
    ):
        return None
    return textwrap.dedent(header).strip(), documentation, source


def _compiles(source: str) -> bool:
    """Return True for valid Python without its indentation and its module."""
    try:
        compile(source, "<function>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
