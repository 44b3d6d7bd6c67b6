"""Links of the pages, which are right in the repository, as links of the site.

Python and TOML files that they lead to become pages too.
"""

import os
import posixpath
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
# Files and folders of the repository whose page is not named like them.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "recipes/chess/README.md": "chess-recipe.md",
    "LICENSE": "license.md",
    "benchmarks/results": "performance.md",
    "lmforge/core/options": "reference/options.md",
}
LANGUAGES = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^(```+).*?^\1$|`[^`\n]+`", re.M | re.S)


def page_of(target: str) -> str:
    """The page that shows a file or a folder of the repository; both are paths from the top."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target.startswith("lmforge/") and (ROOT / target).is_dir():
        return f"reference/api/{target.removeprefix('lmforge/').replace('/', '.')}.md"
    return f"source/{target}.md"


def in_repository(page: str) -> str:
    """The file that a page of the site was written in."""
    return {shown: written for written, shown in PAGES.items() if written.endswith(".md")}.get(page, f"docs/{page}")


def targets(text: str, written_in: str) -> list[str]:
    """Files and folders of the repository that a page links to."""
    plain = CODE.sub("", text)
    return [_from_top(link[1], written_in) for link in LINK.finditer(plain)]


def for_site(text: str, written_in: str, page: str) -> str:
    """`text`, written in a file of the repository, with the links of the site's page; code is left
    as it is.
    """
    folder = posixpath.dirname(page)

    def outside_code(part: str) -> str:
        return LINK.sub(
            lambda link: os.path.relpath(page_of(_from_top(link[1], written_in)), folder or ".") + (link[2] or ""), part
        )

    result, end = [], 0
    for code in CODE.finditer(text):
        result += [outside_code(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*result, outside_code(text[end:])])


def source_page(target: str) -> str:
    """A page that shows a file of the repository."""
    text = (ROOT / target).read_text(encoding="utf-8")
    return f"# {target}\n\n````{LANGUAGES.get(PurePosixPath(target).suffix, 'text')}\n{text}\n````\n"


def _from_top(link: str, written_in: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(written_in), link))
