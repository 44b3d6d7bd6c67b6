"""docs/architecture.md is correct: its packages are complete, its arrows are the imports, and its files and names exist."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lmforge"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DIAGRAMS = re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
# Not part of the structure: the entry points of Python, and the recipes, which are data.
LEFT_OUT = {"__init__", "__main__", "recipes"}

Edges = set[tuple[str, str]]


@cache
def packages() -> set[str]:
    """The packages and single modules directly in lmforge/."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return (folders | {path.stem for path in PACKAGE.glob("*.py")}) - LEFT_OUT


@cache
def imports() -> Edges:
    """(package, package that it imports), from all import statements, also those inside functions."""
    edges: Edges = set()
    for path in PACKAGE.rglob("*.py"):
        importer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module == "lmforge":
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmforge."):
                modules = [str(node.module).split(".")[1]]
            edges |= {(importer, module) for module in modules if module != importer and module in packages()}
    return {edge for edge in edges if edge[0] not in LEFT_OUT}


def module_imports() -> dict[str, set[str]]:
    """The modules that each module imports when it runs, also inside functions; not those for type checkers alone."""
    paths = [path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    result: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = [each for each in ast.walk(tree) if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)]
        left_out = {id(node) for each in for_types for node in ast.walk(each)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in left_out:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                result.setdefault(module, set()).update(names & modules.keys() or {str(node.module)} & modules.keys())
    return result


def drawn() -> Edges:
    return set(re.findall(r"^\s*(\w+) --> (\w+)$", DIAGRAMS[0], re.MULTILINE))


def reachable(edges: Edges) -> Edges:
    """All pairs that a path of edges connects."""
    closure = set(edges)
    while more := {(a, d) for a, b in closure for c, d in closure if b == c} - closure:
        closure |= more
    return closure


def minimal(edges: Edges) -> Edges:
    """The edges that do not follow from others."""
    paths = reachable(edges)
    return {(a, b) for a, b in edges if not any((a, c) in edges and (c, b) in paths for c in packages() - {a, b})}


def test_the_diagram_has_every_package_and_no_other() -> None:
    named = set(re.findall(r"^\s*(\w+)\[", DIAGRAMS[0], re.MULTILINE))
    assert named == packages()


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    assert not {(a, b) for a, b in reachable(imports()) if a == b}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = module_imports()
    assert len(graph) > 200
    TopologicalSorter({module: sorted(used - {module}) for module, used in graph.items()}).prepare()


def test_every_package_says_where_to_begin_reading() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert "egin with" in text or path.parent == PACKAGE, path


def test_the_arrows_of_the_diagram_are_the_imports() -> None:
    assert drawn() == minimal(imports()), "\n".join(f"    {a} --> {b}" for a, b in sorted(minimal(imports())))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml))`", PAGE))))
def test_files_that_the_page_names_exist(name: str) -> None:
    assert (ROOT / name).exists() or (PACKAGE / name).exists()


@pytest.mark.parametrize(("name", "file"), sorted(set(re.findall(r"`(\w+)`\s(?:in\s|\()`([\w/]+\.py)`", PAGE))))
def test_what_the_page_places_in_a_file_is_defined_there(name: str, file: str) -> None:
    source = (ROOT / file if file.startswith("tests/") else PACKAGE / file).read_text(encoding="utf-8")
    assert re.search(rf"\b(def|class) {name}\b|^{name}\b", source, re.MULTILINE)


def test_links_to_the_glossary_lead_to_it() -> None:
    assert "## Glossary" in PAGE
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)]*#glossary)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target.partition("#")[0]).resolve() == ROOT / "docs" / "architecture.md", page
