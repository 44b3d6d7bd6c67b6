"""How large the package is, in tokens of Python's own tokenizer without comments and docstrings,
and what an import brings.
"""

import ast
import io
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lmforge"
NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@cache
def modules() -> dict[str, Path]:
    """The files of the package by the names of their modules."""
    paths = [path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        has_docstring = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if has_docstring and ast.get_docstring(node) is not None:
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


@cache
def tokens_of(path: Path) -> int:
    """The tokens of a file."""
    left_out = _docstring_lines(_tree(path))
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return sum(token.type not in NOT_COUNTED and token.start[0] not in left_out for token in tokens)


def tokens_in(names: Iterable[str]) -> int:
    """The tokens of some modules together."""
    return sum(tokens_of(modules()[name]) for name in names)


def _imports(name: str) -> set[str]:
    """The modules of the package that a module imports when it is imported: not within functions,
    nor for type checkers.
    """
    found: set[str] = set()
    pending: list[ast.AST] = [*_tree(modules()[name]).body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        pending += ast.iter_child_nodes(node)
    return found & modules().keys()


def brought_by(name: str) -> set[str]:
    """The modules of the package that an import of a module brings, itself among them."""
    reached: set[str] = set()
    pending = [name]
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        parts = module.split(".")
        pending += [".".join(parts[:depth]) for depth in range(1, len(parts))]
        pending += _imports(module)
    return reached
