"""Real text that is available on every test machine: the source of some modules of Python's
standard library.
"""

import sysconfig
from pathlib import Path

# Long ones, with more prose than code.
MODULES = ("difflib", "argparse", "random", "statistics", "textwrap", "heapq")


def corpus() -> str:
    """200,000 characters and more, in paragraphs."""
    library = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)


def write_documents(folder: Path) -> None:
    """A new folder of some 200 short documents, files of four paragraphs each."""
    folder.mkdir()
    paragraphs = corpus()[:200_000].split("\n\n")
    for number in range(0, len(paragraphs), 4):
        (folder / f"{number:05d}.txt").write_text(
            "\n\n".join(paragraphs[number : number + 4]), encoding="utf-8"
        )
