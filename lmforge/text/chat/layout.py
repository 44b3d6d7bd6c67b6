"""Layouts, which are sequences of texts and special tokens, some of them scored.

Many layouts at once become token ids here. Two pieces of a text of which only one is scored never
share a token, so a prompt has the same ids with its answer as without.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import Tokenizer
from lmforge.core.errors import UserError

# A special token's id, or a text between two of them as one or more pieces; with each, whether it
# is scored.
LayoutPart = tuple[int, bool] | list[tuple[str, bool]]
Layout = list[LayoutPart]
Span = tuple[int, int]


class SpecialToken(NamedTuple):
    """A special token, and whether it absorbs the blanks on its left and right."""

    id: int
    lstrip: bool
    rstrip: bool


class SpecialTokens:
    """The special tokens of a tokenizer by their spelling, and a `pattern` that matches one."""

    def __init__(self, tokenizer: Tokenizer):
        self.by_text = {
            tokenizer.id_to_token(id): SpecialToken(id, False, False) for id in tokenizer.named_ids
        }
        for token in tokenizer.added_tokens:
            if token["special"] or token["id"] in tokenizer.named_ids:
                self.by_text[token["content"]] = SpecialToken(
                    token["id"], token["lstrip"], token["rstrip"]
                )
        longest_first = sorted(self.by_text, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        # With these flags the library may find a token elsewhere than the pattern does.
        flagged = [
            token["content"]
            for token in tokenizer.added_tokens
            if token["single_word"] or token["normalized"]
        ]
        self._misread: set[str] = set()
        self._misread = {
            token
            for token in flagged
            if token in self.by_text and self._is_misread(tokenizer, token)
        }

    def _is_misread(self, tokenizer: Tokenizer, token: str) -> bool:
        samples = [f"a{token}a", f"a {token} a"]
        found = encode_layouts(tokenizer, [self.cut(sample, []) for sample in samples])
        expected = tokenizer.encode_batch(samples, parse_special_tokens=True)
        return [each.tokens.tolist() for each in found] != expected

    def cut(self, text: str, spans: list[Span]) -> Layout:
        """The text cut at special tokens, and between them at the bounds of the scored spans.

        Raises UserError for a token that the tokenizer would not find in every text, as
        transformers would not.
        """
        parts: Layout = []
        # Binary search, because conversations of hundreds of turns have as many spans as parts.
        bounds = sorted({bound for span in spans for bound in span})
        starts = sorted(start for start, _ in spans)
        furthest = list(accumulate((stop for _, stop in sorted(spans)), max))

        def scores(offset: int) -> bool:
            begun = bisect_right(starts, offset)
            return begun > 0 and offset < furthest[begun - 1]

        def section(start: int, stop: int, strips_start: bool, strips_stop: bool) -> None:
            if strips_start:
                start = stop - len(text[start:stop].lstrip())
            if strips_stop:
                stop = start + len(text[start:stop].rstrip())
            cuts = [start, *bounds[bisect_right(bounds, start) : bisect_left(bounds, stop)], stop]
            if start < stop:
                parts.append([(text[a:b], scores(a)) for a, b in pairwise(cuts)])

        at = 0
        strips = False
        for match in self.pattern.finditer(text):
            if match[0] in self._misread:
                raise UserError(
                    f"the tokenizer does not find its special token {match[0]} in every text,"
                    " because of its flag single_word or normalized: set it to false in"
                    " tokenizer.json and tokenizer_config.json"
                )
            special = self.by_text[match[0]]
            section(at, match.start(), strips, special.lstrip)
            parts.append((special.id, scores(match.start())))
            at = match.end()
            strips = special.rstrip
        section(at, len(text), strips, False)
        return parts


def encode_layouts(tokenizer: Tokenizer, layouts: Sequence[Layout]) -> list[TokenizedExample]:
    """The ids and loss mask of each layout.

    All texts are encoded together: a thousand at once is ten times as fast.
    """
    sections = [
        (part, at > 0)
        for layout in layouts
        for at, part in enumerate(layout)
        if isinstance(part, list)
    ]
    known = _encode_unique(
        tokenizer, ((text, inside) for section, inside in sections for text in _prefixes(section))
    )
    piece_ids: dict[int, list[list[int]]] = {}
    pieces_by_section = []
    for section, inside in sections:
        prefixes = [known[text, inside] for text in _prefixes(section)]
        if all(prefixes[-1][: len(prefix)] == prefix for prefix in prefixes):
            bounds = pairwise([0, *map(len, prefixes)])
            piece_ids[id(section)] = [prefixes[-1][start:stop] for start, stop in bounds]
        else:  # a token would go across two pieces
            pieces_by_section.append(
                (section, [(text, inside or at > 0) for at, (text, _) in enumerate(section)])
            )
    known = _encode_unique(
        tokenizer, (piece for _, pieces in pieces_by_section for piece in pieces)
    )
    piece_ids |= {
        id(section): [known[piece] for piece in pieces] for section, pieces in pieces_by_section
    }
    examples = []
    for layout in layouts:
        tokens: list[int] = []
        mask: list[bool] = []
        for part in layout:
            if isinstance(part, tuple):
                pieces = [([part[0]], part[1])]
            else:
                flags = [scored for _, scored in part]
                pieces = [*zip(piece_ids[id(part)], flags, strict=True)]
            for ids, scored in pieces:
                tokens += ids
                mask += [scored] * len(ids)
        if mask:
            mask[0] = False  # no token comes before it to predict it
        examples.append(TokenizedExample(np.array(tokens, np.int32), np.array(mask, bool)))
    return examples


def _encode_unique(
    tokenizer: Tokenizer, texts: Iterable[tuple[str, bool]]
) -> dict[tuple[str, bool], list[int]]:
    """The ids of each (text, whether it continues another), every different one encoded once."""
    unique = list(dict.fromkeys(texts))
    known: dict[tuple[str, bool], list[int]] = {}
    for inside in (False, True):
        chosen = [text for text, is_inside in unique if is_inside == inside]
        encoded = tokenizer.encode_batch(chosen, is_continuation=inside)
        known |= {(text, inside): ids for text, ids in zip(chosen, encoded, strict=True)}
    return known


def _prefixes(section: list[tuple[str, bool]]) -> list[str]:
    """The first piece, the first two together, and so on to the whole text."""
    texts = [text for text, _ in section]
    return ["".join(texts[: count + 1]) for count in range(len(texts))]
