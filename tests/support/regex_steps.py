"""How many steps a regular expression takes on a text, counted on the parsed expression as Python's
engine backtracks.

A step is an attempt to match one part of the expression at one place. Time depends on the machine;
this does not.
"""

import re
from collections.abc import Callable, Iterator
from re import _constants as ops
from re import _parser as parser
from typing import Any

MAX_STEPS = 3_000_000


class TooManySteps(Exception):
    pass


class StepCounter:
    """Counts the steps of `pattern` on `text`."""

    def __init__(self, pattern: str | bytes, flags: int = 0) -> None:
        self.tree = parser.parse(pattern, flags)
        self.flags = self.tree.state.flags

    def count(self, text: str, method: str) -> int:
        """The steps of `match`, `fullmatch` or `search`, or of all matches of `finditer`."""
        self.text, self.steps, self.groups, at = text, 0, {}, 0
        whole = method == "fullmatch"
        if method in ("match", "fullmatch"):
            self._first(
                self.tree, 0, (lambda end: end == len(text)) if whole else (lambda end: True)
            )
            return self.steps
        while at <= len(text):
            end = self._first(self.tree, at, lambda end: True)
            if end is not None and method == "search":
                break
            at = end if end is not None and end > at else at + 1
        return self.steps

    def _first(self, tree: Any, at: int, accepts: Callable[[int], bool]) -> int | None:
        return next((end for end in self._ends(list(tree), at) if accepts(end)), None)

    def _ends(self, items: list[Any], at: int) -> Iterator[int]:
        """Where a sequence of parts may end that begins at `at`, in the order in which the engine
        tries.
        """
        if not items:
            yield at
            return
        for middle in self._item(*items[0], at):
            yield from self._ends(items[1:], middle)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooManySteps

    def _item(self, op: Any, value: Any, at: int) -> Iterator[int]:
        self._step()
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            if at < len(self.text) and self._is_in(op, value, self.text[at]):
                yield at + 1
        elif op is ops.SUBPATTERN:
            for end in self._ends(list(value[3]), at):
                self.groups[value[0]] = (at, end)
                yield end
        elif op is ops.BRANCH:
            for branch in value[1]:
                yield from self._ends(list(branch), at)
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            yield from self._repeat(op, *value, at)
        elif op is ops.ATOMIC_GROUP:
            yield from list(self._ends(list(value), at))[:1]
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            direction, tree = value
            start = at if direction > 0 else at - tree.getwidth()[0]
            found = start >= 0 and next(self._ends(list(tree), start), None) is not None
            if found == (op is ops.ASSERT):
                yield at
        elif op is ops.GROUPREF:
            start, end = self.groups.get(value, (0, 0))
            if self.text.startswith(self.text[start:end], at):
                yield at + end - start
        elif op is ops.AT:
            anchor = {
                "AT_BEGINNING": "^",
                "AT_END": "$",
                "AT_BEGINNING_STRING": r"\A",
                "AT_END_STRING": r"\Z",
            }
            spelled = anchor.get(str(value), r"\b" if "NON" not in str(value) else r"\B")
            if re.compile(spelled, self.flags & re.M).match(self.text, at):
                yield at
        else:
            raise NotImplementedError(op)

    def _repeat(self, op: Any, least: int, most: int, tree: Any, at: int) -> Iterator[int]:
        items, ends = list(tree), [at]
        if op is ops.MIN_REPEAT:
            yield from self._lazily(items, least, most, at)
            return
        if op is not ops.POSSESSIVE_REPEAT and not _is_single(items):
            yield from self._greedily(items, least, most, at)
            return
        while (
            len(ends) <= most
            and (end := next(self._ends(items, ends[-1]), None)) is not None
            and end > ends[-1]
        ):
            ends.append(end)
        kept = ends[least:]
        for end in reversed(kept[-1:] if op is ops.POSSESSIVE_REPEAT else kept):
            self._step()
            yield end

    def _lazily(self, items: list[Any], least: int, most: int, at: int) -> Iterator[int]:
        pending = [(0, iter([at]))]
        while pending:
            count, places = pending[-1]
            place = next(places, None)
            if place is None:
                pending.pop()
                continue
            if count >= least:
                yield place
            if count < most:
                pending.append((count + 1, self._ends(items, place)))

    def _greedily(self, items: list[Any], least: int, most: int, at: int) -> Iterator[int]:
        pending = [(at, iter(self._ends(items, at)))]
        while pending:
            place, places = pending[-1]
            end = next(places, None) if len(pending) <= most else None
            if end is not None and end > place:
                pending.append((end, self._ends(items, end)))
                continue
            pending.pop()
            if len(pending) >= least:
                yield place

    def _is_in(self, op: Any, value: Any, character: str) -> bool:
        if op is ops.ANY:
            return bool(self.flags & re.S) or character != "\n"
        if op is not ops.IN:
            return (ord(character) == value) == (op is ops.LITERAL)
        negated, *rest = value if value[0][0] is ops.NEGATE else [None, *value]
        return any(_is_of(*each, character) for each in rest) != (negated is not None)


def _is_single(items: list[Any]) -> bool:
    return len(items) == 1 and items[0][0] in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)


def _is_of(op: Any, value: Any, character: str) -> bool:
    if op is ops.LITERAL:
        return ord(character) == value
    if op is ops.RANGE:
        return value[0] <= ord(character) <= value[1]
    spelled = {"SPACE": r"\s", "DIGIT": r"\d", "WORD": r"\w"}
    kind = str(value).removeprefix("CATEGORY_").removeprefix("NOT_")
    return (re.match(spelled[kind], character) is not None) != ("NOT_" in str(value))
