"""From tokens that come one by one to text that may be shown: whole characters, and no part of a stop text."""

from collections.abc import Sequence

from lmforge.data.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int], prefix_ids: Sequence[int]) -> list[int]:
    """The ids that a text, or what is ids already, is continued from: after those of `opening`.

    An empty prompt without opening begins with the token that begins a text or, where there is none, the one that ends it.
    """
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return [*prefix_ids, *(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)] or [begin]


class TextStreamer:
    """The text of one completion: whole characters only, and never a piece that may turn out to begin a stop text.

    `tokens` are all that came, `text` is theirs up to the stop text, `reason` is "stop" once the text has ended.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop_strings = stop
        self._num_emitted = 0  # characters of `text` that were given out
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None

    def add(self, token: int, is_stop: bool) -> str:
        """Take the next token; with `ends` it is the last and stands for no text. Returns the text that became certain."""
        self.token_ids.append(token)
        self.text += self._decoder.finish() if is_stop else self._decoder.feed(token)
        found = [place for place in map(self.text.find, self._stop_strings) if place >= 0]
        if found:
            self.text = self.text[: min(found)]
        if is_stop or found:
            self.finish_reason = "stop"
            return self._emit_up_to(len(self.text))
        return self._emit_up_to(len(self.text) - self._partial_stop_length())

    def finish(self) -> str:
        """No more tokens come. Returns the text that was held back."""
        if self.finish_reason is None:
            self.text += self._decoder.finish()
        return self._emit_up_to(len(self.text))

    def _partial_stop_length(self) -> int:
        """Length of the longest tail that begins a stop text."""
        sizes = (size for stop in self._stop_strings for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(sizes, default=0)

    def _emit_up_to(self, end: int) -> str:
        piece = self.text[self._num_emitted : end]
        self._num_emitted += len(piece)
        return piece
