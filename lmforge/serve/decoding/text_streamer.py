"""Turns a stream of tokens into text to show: complete characters, and no part of a stop string."""

from collections.abc import Sequence

from lmforge.core.data.tokenizer import StreamDecoder, Tokenizer


class TextStreamer:
    """The text of one completion.

    It holds back incomplete characters and text that may be the beginning of a stop string.

    `token_ids` are all tokens so far, `text` is their text up to the stop string, `finish_reason`
    is "stop" once it ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        is_continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Begin without a token.

        is_continuation: it continues a text, so that the blank before its first word counts. shown:
        special tokens that have a text.
        """
        self._decoder = StreamDecoder(tokenizer, is_continuation, shown)
        self._stops = [(stop, _border_lengths(stop)) for stop in stop_strings if stop]
        # Characters of each stop string with which `text` ends.
        self._num_matched = [0] * len(self._stops)
        self._num_emitted = 0  # characters of `text` that were returned
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, token: int, is_stop: bool) -> str:
        """Add the next token; with `is_stop` it is the last and has no text.

        Returns the text that will not change any more.
        """
        self.token_ids.append(token)
        piece = self._decoder.finish() if is_stop else self._decoder.feed(token)
        stops = self._find_stops(piece)
        self.text += piece
        if stops:
            self.text = self.text[: min(stops)]
        if is_stop or stops:
            self.finish_reason = "stop"
            return self._emit_up_to(len(self.text))
        return self._emit_up_to(len(self.text) - max(self._num_matched, default=0))

    def finish(self) -> str:
        """Call it after the last token. Returns the text that was held back."""
        if self.finish_reason is None:
            self.text += self._decoder.finish()
        return self._emit_up_to(len(self.text))

    def _find_stops(self, piece: str) -> list[int]:
        """The offsets of the stop strings that end in `piece`, the next of the text.

        Each character is read once (Knuth, Morris and Pratt 1977), however long text and stop
        strings are.
        """
        starts = []
        for index, (stop, borders) in enumerate(self._stops):
            length = self._num_matched[index]
            for end, character in enumerate(piece, start=len(self.text) + 1):
                length = _extend(length, character, stop, borders)
                if length == len(stop):
                    starts.append(end - length)
                    break
            self._num_matched[index] = length
        return starts

    def _emit_up_to(self, end: int) -> str:
        piece = self.text[self._num_emitted : end]
        self._num_emitted += len(piece)
        return piece


def _border_lengths(stop: str) -> list[int]:
    """The length of the longest shorter beginning with which each beginning of `stop` ends."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_extend(borders[-1], character, stop, borders))
    return borders


def _extend(length: int, character: str, stop: str, borders: list[int]) -> int:
    """The number of first characters of `stop` that a text ends with after `character`.

    Before it ended with `length` of them.
    """
    while length and stop[length] != character:
        length = borders[length - 1]
    return length + (stop[length] == character)
