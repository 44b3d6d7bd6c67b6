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

from lmforge.data.documents import open_source
from lmforge.data.sealing import sealing
from lmforge.errors import Mistake

TRAIN, HELD_OUT = "train.jsonl", "held-out.jsonl"
LONGEST_SOURCE_CHARACTERS = 2000
LONGEST_DOCSTRING_CHARACTERS = 1000
FEWEST_DOCSTRING_WORDS = 4
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Function:
    """A function of the library: `source` has no docstring and no indentation, `documentation` is the docstring alone."""

    module: str
    name: str
    owner: str  # the class of a method, or ""
    header: str
    parameters: tuple[str, ...]
    documentation: str
    source: str
    body: str  # what makes two functions the same, whatever they are called and however they are laid out

    @property
    def held_out(self) -> bool:
        """The same for a package's modules, and for ever: by a hash of the package's name."""
        package = self.module.partition(".")[0]
        return xxhash.xxh3_64_intdigest(package.encode()) / 2**64 < HELD_OUT_SHARE


def write_function_pairs(out: Path) -> dict[str, int]:
    """Write `out`/train.jsonl and `out`/held-out.jsonl, and say how many functions each has: {"train": …, "held_out": …}.

    A line is {"messages": [user, assistant], "checks": [statement, …], "module": …, "name": …}: a request made of signature
    and docstring, the function that answers it, and statements that hold after any answer to it has run: they call nothing,
    as most functions of a library do nothing without the rest of it. Raises Mistake where `out` holds such files already.
    """
    for name in (TRAIN, HELD_OUT):
        if (out / name).exists():
            raise Mistake(f"{out / name}: exists; name another folder, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "held_out": 0}
    # What all runs learn from comes last: where it is, both are.
    with sealing(out / TRAIN) as train, sealing(out / HELD_OUT) as held_out:
        for function in library_functions():
            file, split = (held_out, "held_out") if function.held_out else (train, "train")
            file.write((json.dumps(conversation(function), ensure_ascii=False) + "\n").encode())
            counts[split] += 1
    return counts


def conversation(function: Function) -> dict[str, Any]:
    """A function as a line of JSON: see `write_function_pairs`."""
    what = (
        f"the method `{function.name}` of a class `{function.owner}`" if function.owner else f"the function `{function.name}`"
    )
    request = f"Write {what} in Python.\n\n```python\n{function.header}\n```\n\n{function.documentation}"
    answer = f"```python\n{function.source}\n```"
    messages = [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "checks": checks(function), "module": function.module, "name": function.name}


def checks(function: Function) -> list[str]:
    """Statements for a reward of code: the name is that of a function, and it takes what it was asked to take."""
    return [
        f"assert callable({function.name})",
        f"import inspect; assert list(inspect.signature({function.name}).parameters) == {list(function.parameters)!r}",
    ]


def library_functions() -> Iterator[Function]:
    """The functions and methods of the standard library that are documented, short and whole by themselves, each once.

    In the order of their files. Of functions with the same body the first is given, so none is in both splits.
    """
    seen: set[str] = set()
    for file in open_source("stdlib").files:
        module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in old strings are not ours to mend
            functions = list(_of_file(Path(file.path), module))
        for function in functions:
            if function.body not in seen:
                seen.add(function.body)
                yield function


def _of_file(path: Path, module: str) -> Iterator[Function]:
    try:
        with tokenize.open(path) as file:
            text = file.read()
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return  # a test of Python's own
    lines = text.splitlines()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            yield from _function(statement, lines, module, "")
        elif isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from _function(inner, lines, module, statement.name)


def _function(node: ast.FunctionDef, lines: list[str], module: str, owner: str) -> Iterator[Function]:
    """It, if it is worth learning from."""
    documentation = ast.get_docstring(node)
    # A decorator or a default may name what only its module has, and would not run where the answer is tried.
    if documentation is None or len(node.body) < 2 or node.decorator_list or not _plain_defaults(node):
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
        len(documentation.split()) >= FEWEST_DOCSTRING_WORDS
        and len(documentation) <= LONGEST_DOCSTRING_CHARACTERS
        and len(source) <= LONGEST_SOURCE_CHARACTERS
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
    yield Function(module, node.name, owner, header, tuple(parameters), documentation, source, body)


def _plain_defaults(node: ast.FunctionDef) -> bool:
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
