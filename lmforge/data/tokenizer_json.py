"""What the tokenizers library would not survive in a tokenizer.json, or what would make a short text huge: checked before it
is opened. How it is opened is in `tokenizer.py`."""

import math
from collections.abc import Iterator
from typing import Any

from lmforge.untrusted import quoted

MAX_GROWTH = 1000  # of a text in its normalizer and decoder


def tokenizer_problem(content: dict[str, Any]) -> str | None:
    """Why the library must not open this tokenizer.json; None if it may."""
    if (growth := math.prod(_growths(content))) > MAX_GROWTH:
        return f"makes {growth:.3g} characters of one: expected at most {MAX_GROWTH:,}"
    return _prefix_problem(content.get("model"))


def _growths(part: Any) -> Iterator[float]:
    """The maximum factor by which each step of a tokenizer.json can lengthen a text."""
    if isinstance(part, dict) and part.get("type") in ("Replace", "Prepend"):
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        yield max(1.0, len(str(part.get("content", part.get("prepend")))) / max(1, len(str(replaced or ""))))
    elif isinstance(part, dict | list):
        for name, inner in part.items() if isinstance(part, dict) else enumerate(part):
            if name not in ("vocab", "merges", "added_tokens"):
                yield from _growths(inner)


def _prefix_problem(model: Any) -> str | None:
    """Why the library would end the process over this model: it cuts the continuing_subword_prefix off the second token of each
    merge, in bytes and whether or not the token begins with it. None where it would not."""
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if prefix else None
    for index, merge in enumerate(merges if isinstance(merges, list) else ()):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        second = pair[-1] if isinstance(pair, list) and pair else None
        if isinstance(second, str) and not second.startswith(str(prefix)):
            return (
                f"model.merges[{index}]: expected a second token that begins with the continuing_subword_prefix"
                f" {quoted(prefix)}, got {quoted(merge)}"
            )
    return None
