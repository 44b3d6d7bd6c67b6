"""Conversations extracted from Python's standard library, for fine-tuning on code without a network.

A request is made of a function's signature and docstring; the function answers it. The split is decided by package, so that no
validation function has a neighbour in training. Nothing here tokenizes or runs the code.
"""

import ast
import inspect
import json
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from lmforge.atomic_files import atomic_write
from lmforge.data.sources.text_sources import open_text_source
from lmforge.errors import UserError

TRAIN_FILE, VALIDATION_FILE = "train.jsonl", "validation.jsonl"
MAX_SOURCE_CHARACTERS = 2000
MAX_DOCSTRING_CHARACTERS = 1000
MIN_DOCSTRING_WORDS = 4
VALIDATION_RATIO = 0.1


@dataclass(frozen=True)
class LibraryFunction:
    """A function of the library: `source` has no docstring and no indentation, `documentation` is the docstring alone."""

    module: str
    name: str
    class_name: str  # the class of a method, or ""
    signature: str
    parameters: tuple[str, ...]
    docstring: str
    source: str
    body_dump: str  # equal for functions with the same body, whatever their names and formatting

    @property
    def in_validation(self) -> bool:
        """By a hash of the package's name: the same for all its modules, and in every version of Python."""
        package = self.module.partition(".")[0]
        return xxhash.xxh3_64_intdigest(package.encode()) / 2**64 < VALIDATION_RATIO


def write_function_conversations(out: Path) -> dict[str, int]:
    """Write `out`/train.jsonl and `out`/validation.jsonl; returns how many functions each has, {"train": …, "validation": …}.

    A line is {"messages": [user, assistant], "checks": [statement, …], "module": …, "name": …}. The checks are statements that
    succeed after any valid answer was run; they do not call the function, since most functions of a library need the rest of
    it. Raises UserError if `out` holds such files already.
    """
    for name in (TRAIN_FILE, VALIDATION_FILE):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "validation": 0}
    # The training file is renamed last: where it exists, both do.
    with atomic_write(out / TRAIN_FILE) as train, atomic_write(out / VALIDATION_FILE) as validation:
        for function in library_functions():
            file, split = (validation, "validation") if function.in_validation else (train, "train")
            file.write((json.dumps(function_conversation(function), ensure_ascii=False) + "\n").encode())
            counts[split] += 1
    return counts


def function_conversation(function: LibraryFunction) -> dict[str, Any]:
    """A function as a line of JSON: see `write_function_conversations`."""
    what = f"the function `{function.name}`"
    if function.class_name:
        what = f"the method `{function.name}` of a class `{function.class_name}`"
    request = f"Write {what} in Python.\n\n```python\n{function.signature}\n```\n\n{function.docstring}"
    answer = f"```python\n{function.source}\n```"
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "checks": signature_checks(function), "module": function.module, "name": function.name}


def signature_checks(function: LibraryFunction) -> list[str]:
    """Statements for a reward function: the name is that of a function, and its parameters are the requested ones."""
    return [
        f"assert callable({function.name})",
        f"import inspect; assert list(inspect.signature({function.name}).parameters) == {list(function.parameters)!r}",
    ]


def library_functions() -> Iterator[LibraryFunction]:
    """The functions and methods of the standard library that are documented, short and self-contained, each once.

    In the order of their files. Of functions with the same body only the first is given, so none is in both splits.
    """
    seen: set[str] = set()
    for file in open_text_source("stdlib").files:
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old strings
            functions = list(_functions_in_file(Path(file.path), module))
        for function in functions:
            if function.body_dump not in seen:
                seen.add(function.body_dump)
                yield function


def _functions_in_file(path: Path, module: str) -> Iterator[LibraryFunction]:
    try:
        with tokenize.open(path) as file:
            text = file.read()
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return  # one of Python's own tests
    lines = text.splitlines()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield from _extract_function(statement, lines, module, "")
        elif isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from _extract_function(inner, lines, module, statement.name)


def _extract_function(node: ast.FunctionDef, lines: list[str], module: str, class_name: str) -> Iterator[LibraryFunction]:
    """The function, if it is suitable for training."""
    documentation = ast.get_docstring(node)
    # A decorator or a default may need names of its module, which a sandbox does not have.
    if documentation is None or len(node.body) < 2 or node.decorator_list or not _has_literal_defaults(node):
        return
    first, docstring = node.body[1], node.body[0]
    assert docstring.end_lineno is not None
    if docstring.lineno == node.lineno or first.lineno <= docstring.end_lineno:
        return  # on one line: the parts cannot be separated by lines
    documentation = inspect.cleandoc(documentation)
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.lineno - 1])).strip()
    rest = "\n".join(lines[docstring.end_lineno : node.end_lineno]).lstrip("\n")
    source = textwrap.dedent("\n".join([*lines[node.lineno - 1 : docstring.lineno - 1], rest]))
    if not (
        len(documentation.split()) >= MIN_DOCSTRING_WORDS
        and len(documentation) <= MAX_DOCSTRING_CHARACTERS
        and len(source) <= MAX_SOURCE_CHARACTERS
        and not all(isinstance(statement, ast.Raise | ast.Pass) for statement in node.body[1:])  # abstract
        and not any(mark in rest for mark in ('"""', "'''", "\\\n"))  # multi-line strings, which dedenting would change
        and _compiles(source)
    ):
        return
    taken = node.args
    parameters = [argument.arg for argument in (*taken.posonlyargs, *taken.args)]
    parameters += [taken.vararg.arg] if taken.vararg else []
    parameters += [argument.arg for argument in taken.kwonlyargs]
    parameters += [taken.kwarg.arg] if taken.kwarg else []
    body = "\n".join(ast.dump(statement) for statement in node.body[1:])
    yield LibraryFunction(module, node.name, class_name, header, tuple(parameters), documentation, source, body)


def _has_literal_defaults(node: ast.FunctionDef) -> bool:
    """Whether defaults and annotations are literals, without names of the module."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    annotations = [argument.annotation for argument in arguments if argument and argument.annotation]
    defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
    outside = [*annotations, *defaults, *([node.returns] if node.returns else [])]
    return not any(isinstance(part, ast.Name) for expression in outside for part in ast.walk(expression))


def _compiles(source: str) -> bool:
    """Whether it is valid Python without its indentation and its module."""
    try:
        compile(source, "<function>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
