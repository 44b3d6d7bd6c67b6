"""From tokens that come one by one to text that may be shown: whole characters, and no part of a stop text."""

from collections.abc import Sequence

from lmforge.data.tokenizer import Tokenizer


def prompt_ids(tokenizer: Tokenizer, prompt: str | Sequence[int], opening: Sequence[int]) -> list[int]:
    """The ids that a text, or what is ids already, is continued from: after those of `opening`.

    An empty prompt without opening begins with the token that begins a text or, where there is none, the one that ends it.
    """
    begin = tokenizer.separator_id if tokenizer.bos_id is None else tokenizer.bos_id
    return [*opening, *(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)] or [begin]


class Writer:
    """The text of one completion: whole characters only, and never a piece that may turn out to begin a stop text.

    `tokens` are all that came, `text` is theirs up to the stop text, `reason` is "stop" once the text has ended.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop = stop
        self._certain = 0  # characters of `text` that were given out
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None

    def add(self, token: int, ends: bool) -> str:
        """Take the next token; with `ends` it is the last and stands for no text. Returns the text that became certain."""
        self.tokens.append(token)
        self.text += self._decoder.finish() if ends else self._decoder.feed(token)
        found = [place for place in map(self.text.find, self._stop) if place >= 0]
        if found:
            self.text = self.text[: min(found)]
        if ends or found:
            self.reason = "stop"
            return self._upto(len(self.text))
        return self._upto(len(self.text) - self._held_back())

    def finish(self) -> str:
        """No more tokens come. Returns the text that was held back."""
        if self.reason is None:
            self.text += self._decoder.finish()
        return self._upto(len(self.text))

    def _held_back(self) -> int:
        """Length of the longest tail that begins a stop text."""
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if self.text.endswith(stop[:size]))
        return max(sizes, default=0)

    def _upto(self, place: int) -> str:
        piece = self.text[self._certain : place]
        self._certain += len(piece)
        return piece
