"""Turns a stream of tokens into text to show: complete characters, and no part of a stop string."""

from collections.abc import Sequence

from lmforge.data.tokenizer import StreamDecoder, Tokenizer


class TextStreamer:
    """The text of one completion. It holds back incomplete characters and text that may be the beginning of a stop string.

    `token_ids` are all tokens so far, `text` is their text up to the stop string, `finish_reason` is "stop" once it ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        is_continuation: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`is_continuation`: it continues a text, so that the blank before its first word counts. `shown`: special tokens that
        have a text."""
        self._decoder = StreamDecoder(tokenizer, is_continuation, shown)
        self._stop_strings = stop_strings
        self._num_emitted = 0  # characters of `text` that were returned
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, token: int, is_stop: bool) -> str:
        """Add the next token; with `is_stop` it is the last and has no text. Returns the text that will not change any more."""
        self.token_ids.append(token)
        self.text += self._decoder.finish() if is_stop else self._decoder.feed(token)
        stops = [start for start in map(self.text.find, self._stop_strings) if start >= 0]
        if stops:
            self.text = self.text[: min(stops)]
        if is_stop or stops:
            self.finish_reason = "stop"
            return self._emit_up_to(len(self.text))
        return self._emit_up_to(len(self.text) - self._partial_stop_length())

    def finish(self) -> str:
        """Call it after the last token. Returns the text that was held back."""
        if self.finish_reason is None:
            self.text += self._decoder.finish()
        return self._emit_up_to(len(self.text))

    def _partial_stop_length(self) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        sizes = (size for stop in self._stop_strings for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(sizes, default=0)

    def _emit_up_to(self, end: int) -> str:
        piece = self.text[self._num_emitted : end]
        self._num_emitted += len(piece)
        return piece
