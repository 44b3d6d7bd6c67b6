"""A text that counts what is gone through of it, for tests that work grows with a text and no
faster.
"""

from typing import Any


class CountedText(str):
    """Counts the characters that its methods go through, and those of its parts."""

    steps = 0


def _counted(name: str) -> Any:
    def method(self: CountedText, *args: Any) -> Any:
        result = getattr(str, name)(self, *args)
        parts = result if isinstance(result, list | tuple) else [result]
        CountedText.steps += sum(
            len(part) if isinstance(part, str) else len(self) for part in parts
        )
        counted = [CountedText(part) if isinstance(part, str) else part for part in parts]
        return counted if isinstance(result, list | tuple) else counted[0]

    return method


for _name in (
    "__getitem__",
    "find",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "rstrip",
    "split",
    "strip",
):
    setattr(CountedText, _name, _counted(_name))
