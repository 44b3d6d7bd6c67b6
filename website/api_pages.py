"""The reference of the code: a page for each package, whose docstrings mkdocstrings renders."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What only lmforge itself calls: commands, measurements, and the options, which have pages of their
# own.
LEFT_OUT = {"verbs", "options", "bench", "recipes"}


def api_pages() -> dict[str, str]:
    """Pages by their names in the site, in the order of the navigation."""
    folders = sorted(path.parent.relative_to(ROOT / "lmforge") for path in (ROOT / "lmforge").rglob("__init__.py"))
    pages = {"index": _top_page()}
    pages |= {
        ".".join(each.parts): _page(".".join(("lmforge", *each.parts)))
        for each in folders
        if each.parts and LEFT_OUT.isdisjoint(each.parts)
    }
    return {f"reference/api/{name}.md": text for name, text in sorted(pages.items(), key=lambda item: item[0] != "index")}


def _page(package: str) -> str:
    folder = ROOT / package.replace(".", "/")
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    return "\n\n".join(
        [f"# {package}", _directive(package), *(_module(package, path) for path in modules if _has_public(path))]
    )


def _top_page() -> str:
    """`import lmforge`, then the modules that are in no package."""
    modules = [path for path in sorted((ROOT / "lmforge").glob("*.py")) if path.stem not in ("__init__", "__main__", "cli")]
    return "\n\n".join(
        ["# lmforge", _directive("lmforge"), *(_module("lmforge", path) for path in modules if _has_public(path))]
    )


def _module(package: str, path: Path) -> str:
    return f"## {package}.{path.stem}\n\n{_directive(f'{package}.{path.stem}')}"


def _directive(module: str) -> str:
    return f"::: {module}"


def _has_public(path: Path) -> bool:
    """Whether a module has a public class or function with a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    named = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")]
    return any(ast.get_docstring(node) for node in named)
