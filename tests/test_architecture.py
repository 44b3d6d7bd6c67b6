"""docs/architecture.md is correct: its wings are those of the package, and its files and names
exist.
"""

import ast
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lmforge"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Not part of the structure: the entry points of Python, and the recipes, which are data.
LEFT_OUT = {"__init__", "__main__", "recipes"}


def module_imports() -> dict[str, set[str]]:
    """The modules that each module imports when it runs, also inside functions; not those for type
    checkers alone.
    """
    paths = [path for path in PACKAGE.rglob("*.py") if "recipes" not in path.parts]
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    result: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = [
            each
            for each in ast.walk(tree)
            if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)
        ]
        left_out = {id(node) for each in for_types for node in ast.walk(each)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in left_out:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                result.setdefault(module, set()).update(
                    names & modules.keys() or {str(node.module)} & modules.keys()
                )
    return result


def test_the_page_has_every_wing_and_no_other() -> None:
    diagram = PAGE[PAGE.index("```mermaid") :].partition("```\n")[0]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    wings = (folders | {path.stem for path in PACKAGE.glob("*.py")}) - LEFT_OUT
    assert set(re.findall(r"^ *(\w+)\[", diagram, re.MULTILINE)) == wings
    assert {
        name.removesuffix(".py")
        for name in re.findall(r"^\| `(\w+(?:/|\.py))` \|", PAGE, re.MULTILINE)
    } == {wing if (PACKAGE / f"{wing}.py").exists() else f"{wing}/" for wing in wings}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = module_imports()
    assert len(graph) > 200
    TopologicalSorter({module: sorted(used - {module}) for module, used in graph.items()}).prepare()


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml))`", PAGE)))
)
def test_files_that_the_page_names_exist(name: str) -> None:
    assert (ROOT / name).exists() or (PACKAGE / name).exists()


@pytest.mark.parametrize(
    ("name", "file"), sorted(set(re.findall(r"`(\w+)`\s(?:in\s|\()`([\w/]+\.py)`", PAGE)))
)
def test_what_the_page_places_in_a_file_is_defined_there(name: str, file: str) -> None:
    source = (ROOT / file if file.startswith("tests/") else PACKAGE / file).read_text(
        encoding="utf-8"
    )
    assert re.search(rf"\b(def|class) {name}\b|^{name}\b", source, re.MULTILINE)


def test_the_glossary_has_each_term_once_in_alphabetical_order_and_links_lead_to_it() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    rows = re.findall(
        r"^\| (?!term)([^|-][^|]*) \|", glossary.read_text(encoding="utf-8"), re.MULTILINE
    )
    terms = [term.replace("μP", "mup").casefold() for term in rows]
    assert terms == sorted(set(terms))
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)]*glossary[^)]*)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).resolve() == glossary, page


def test_no_import_of_ours_stands_inside_a_function_of_the_core() -> None:
    """What is needed only when chosen is imported by the registry, by its name."""
    found = []
    for path in (PACKAGE / "core").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        inside = [node for function in functions for node in ast.walk(function)]
        modules = {node.module for node in inside if isinstance(node, ast.ImportFrom)}
        modules |= {
            alias.name for node in inside if isinstance(node, ast.Import) for alias in node.names
        }
        found += [f"{path.name}: {name}" for name in modules if str(name).startswith("lmforge")]
    assert found == []


@pytest.mark.slow
def test_the_digest_by_which_hosts_compare_their_code_is_of_all_wings(tmp_path: Path) -> None:
    digests = []
    for name in ("one", "other"):
        package = tmp_path / name / "lmforge"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if name == "other":
            with (package / "lab" / "plan" / "planning.py").open("a") as file:
                file.write("# another commit\n")
        code = "from lmforge.core.distributed.distributed import code_digest; print(code_digest())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=package.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(done.stdout)
    assert digests[0] != digests[1]
