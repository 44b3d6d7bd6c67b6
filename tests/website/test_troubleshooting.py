"""docs/troubleshooting.md quotes messages of the code: each occurs there verbatim."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
# A heading is one message as code, between double backticks where it holds code itself.
MESSAGES = re.findall(r"^### (?:`` | ?`)(.*?)(?: ``|`)$", PAGE.read_text(encoding="utf-8"), re.M)


def quoted(node: ast.AST) -> str | None:
    """A text of the code, with … for what is put into it; None of what is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("{", "…").replace("}", "…") if "{" in node.value else node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return None


@cache
def texts() -> list[str]:
    """All texts of the package; fields of `str.format` are … too."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "lmforge").rglob("*.py"))
    ]
    results = [quoted(node) for tree in trees for node in ast.walk(tree)]
    return [re.sub(r"…\w+…", "…", text) for text in results if text]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_on_the_page_is_one_of_the_code(message: str) -> None:
    """… at its end stands for any rest."""
    assert any(message in text or message.removesuffix("…").rstrip() in text for text in texts())


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 30
