"""Requests and functions: conversations mined from Python's standard library, for fine-tuning on code without a network.

A function with a docstring is its author's answer to what the docstring asks. Which of them a model is trained on is decided
here by module, so that none it is measured on was near it in training. Nothing here tokenises or runs the code.
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
    body_dump: str  # what makes two functions the same, whatever they are called and however they are laid out

    @property
    def in_validation(self) -> bool:
        """The same for a package's modules, and for ever: by a hash of the package's name."""
        package = self.module.partition(".")[0]
        return xxhash.xxh3_64_intdigest(package.encode()) / 2**64 < VALIDATION_RATIO


def write_function_conversations(out: Path) -> dict[str, int]:
    """Write `out`/train.jsonl and `out`/validation.jsonl, and say how many functions each has: {"train": …, "validation": …}.

    A line is {"messages": [user, assistant], "checks": [statement, …], "module": …, "name": …}: a request made of signature
    and docstring, the function that answers it, and statements that hold after any answer to it has run: they call nothing,
    as most functions of a library do nothing without the rest of it. Raises UserError where `out` holds such files already.
    """
    for name in (TRAIN_FILE, VALIDATION_FILE):
        if (out / name).exists():
            raise UserError(f"{out / name}: exists; name another folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "validation": 0}
    # What all runs learn from comes last: where it is, both are.
    with atomic_write(out / TRAIN_FILE) as train, atomic_write(out / VALIDATION_FILE) as held_out:
        for function in library_functions():
            file, split = (held_out, "validation") if function.in_validation else (train, "train")
            file.write((json.dumps(function_conversation(function), ensure_ascii=False) + "\n").encode())
            counts[split] += 1
    return counts


def function_conversation(function: LibraryFunction) -> dict[str, Any]:
    """A function as a line of JSON: see `write_function_pairs`."""
    what = (
        f"the method `{function.name}` of a class `{function.class_name}`"
        if function.class_name
        else f"the function `{function.name}`"
    )
    request = f"Write {what} in Python.\n\n```python\n{function.signature}\n```\n\n{function.docstring}"
    answer = f"```python\n{function.source}\n```"
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "checks": signature_checks(function), "module": function.module, "name": function.name}


def signature_checks(function: LibraryFunction) -> list[str]:
    """Statements for a reward of code: the name is that of a function, and it takes what it was asked to take."""
    return [
        f"assert callable({function.name})",
        f"import inspect; assert list(inspect.signature({function.name}).parameters) == {list(function.parameters)!r}",
    ]


def library_functions() -> Iterator[LibraryFunction]:
    """The functions and methods of the standard library that are documented, short and whole by themselves, each once.

    In the order of their files. Of functions with the same body the first is given, so none is in both splits.
    """
    seen: set[str] = set()
    for file in open_text_source("stdlib").files:
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in old strings are not ours to mend
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
        return  # a test of Python's own
    lines = text.splitlines()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield from _extract_function(statement, lines, module, "")
        elif isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from _extract_function(inner, lines, module, statement.name)


def _extract_function(node: ast.FunctionDef, lines: list[str], module: str, class_name: str) -> Iterator[LibraryFunction]:
    """It, if it is worth learning from."""
    documentation = ast.get_docstring(node)
    # A decorator or a default may name what only its module has, and would not run where the answer is tried.
    if documentation is None or len(node.body) < 2 or node.decorator_list or not _has_literal_defaults(node):
        return
    first, docstring = node.body[1], node.body[0]
    assert docstring.end_lineno is not None
    if docstring.lineno == node.lineno or first.lineno <= docstring.end_lineno:
        return  # on one line, where the parts cannot be told apart by lines
    documentation = inspect.cleandoc(documentation)
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.lineno - 1])).strip()
    rest = "\n".join(lines[docstring.end_lineno : node.end_lineno]).lstrip("\n")
    source = textwrap.dedent("\n".join([*lines[node.lineno - 1 : docstring.lineno - 1], rest]))
    if not (
        len(documentation.split()) >= MIN_DOCSTRING_WORDS
        and len(documentation) <= MAX_DOCSTRING_CHARACTERS
        and len(source) <= MAX_SOURCE_CHARACTERS
        and not all(isinstance(statement, ast.Raise | ast.Pass) for statement in node.body[1:])  # a place for subclasses
        and not any(mark in rest for mark in ('"""', "'''", "\\\n"))  # text over several lines, which indentation is part of
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
    """Whether all that is worked out when the function is defined is literal: no name of its module."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    annotations = [argument.annotation for argument in arguments if argument and argument.annotation]
    defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default]
    outside = [*annotations, *defaults, *([node.returns] if node.returns else [])]
    return not any(isinstance(part, ast.Name) for expression in outside for part in ast.walk(expression))


def _compiles(source: str) -> bool:
    """Whether it still is a function without its indentation and its surroundings."""
    try:
        compile(source, "<function>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True
