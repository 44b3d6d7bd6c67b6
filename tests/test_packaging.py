"""Release artifacts: wheel and source archive, installed in a clean environment; the container
file; the citation.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import lmforge
from tests.support.tools import hadolint, need

ROOT = Path(__file__).parents[1]
# What is in the package and is no module. Its folder of recipes is a link to that of the
# repository.
WEB = [
    path
    for path in (ROOT / "lmforge").rglob("*")
    if path.suffix in (".html", ".css", ".js", ".typed", ".pyi")
]
RECIPES = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".toml", ".md", ".py")]


def call(*command: object, cwd: Path, status: int = 0) -> str:
    """What a program prints, without the variables that would lead it to this checkout.

    Another status fails the test.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "LMFORGE"))
    }
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == status, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the source archive, and that archive, of a copy of what would be
    committed.
    """
    folder = tmp_path_factory.mktemp("build")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", "runs", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "lmforge", symlinks=True, ignore=left_out)
    call(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "lmforge", cwd=folder)
    [wheel], [archive] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, archive


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_and_source_archive_hold_every_module_recipe_and_web_page(
    built: tuple[Path, Path],
) -> None:
    wheel, archive = built
    files = [
        path.relative_to(ROOT).as_posix() for path in [*(ROOT / "lmforge").rglob("*.py"), *WEB]
    ]
    files += [f"lmforge/{path.relative_to(ROOT).as_posix()}" for path in RECIPES]
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
        metadata = opened.read(f"lmforge-{lmforge.__version__}.dist-info/METADATA").decode()
    with tarfile.open(archive) as opened_archive:
        in_archive = {name.partition("/")[2] for name in opened_archive.getnames()}
    assert len(WEB) >= 5
    assert len(RECIPES) > 10
    assert sorted(set(files) - in_wheel) == []
    assert sorted({*files, "constraints.txt", "LICENSE", "README.md"} - in_archive) == []
    assert not [name for name in in_wheel if name.startswith(("tests/", "website/", "benchmarks/"))]
    assert "Provides-Extra: docs" in metadata


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_in_a_clean_environment_the_wheel_runs_the_quickstart(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, _ = built
    call(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    program = tmp_path / "clean" / "bin"
    call(
        program / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    where = call(program / "python", "-c", "import lmforge; print(lmforge.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "clean")
    assert "usage: lmforge VERB" in call(program / "lmforge", "--help", cwd=tmp_path)
    shown = call(program / "lmforge", "quickstart", "--steps", 2, "--processes", 1, cwd=tmp_path)
    assert re.search(r"(?m)^Done in ", shown), shown[-2000:]
    for name in ("quickstart", "quickstart-sft", "quickstart-align"):
        assert (tmp_path / "runs" / name / "report.html").is_file()
    refused = call(program / "lmforge", "serve", "runs/quickstart", cwd=tmp_path, status=2)
    assert "; pip install 'lmforge[serve]'" in refused


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (lmforge.__version__, "Apache-2.0")


def test_the_container_file_says_that_it_is_not_built_and_passes_the_linter() -> None:
    file = ROOT / "Dockerfile"
    assert "never built" in file.read_text(encoding="utf-8")
    need("hadolint")
    call(hadolint(), file, cwd=ROOT)
