"""Shows an example to a person, with the bounds of every token and what is scored."""

import unicodedata

from lmforge.core.data.packing import TokenizedExample
from lmforge.core.data.tokenizer import StreamDecoder, Tokenizer

# Two shades in turn, so that the bounds of tokens are visible: black on green if scored, grey if
# not.
SCORED_STYLES = ("\x1b[30;42m", "\x1b[30;102m")
UNSCORED_STYLES = ("\x1b[37m", "\x1b[90m")
RESET = "\x1b[0m"


def format_example(example: TokenizedExample, tokenizer: Tokenizer, *, ansi: bool = True) -> str:
    """An example for a terminal, or without `ansi` as text.

    The text has `|` between tokens, `[` and `]` around what is scored.

    A character of several tokens is shown with the last of them. Line ends are shown as ↵ and
    written; other control characters are escaped.
    """
    stream = StreamDecoder(tokenizer)
    pieces = []
    before = False
    for number, (id, scored) in enumerate(
        zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True)
    ):
        text = stream.feed(id)
        if not text and id in tokenizer.all_special_ids:
            text = tokenizer.id_to_token(id)
        shown = _escape_control_characters(text)
        if ansi:
            styles = SCORED_STYLES if scored else UNSCORED_STYLES
            shade = styles[number % 2]
            # A background colour that is not reset before a line end would fill the rest of the
            # line.
            pieces.append(shade + shown.replace("\n", f"{RESET}\n{shade}") + RESET)
        else:
            bound = "[" if scored else "]"
            if scored == before:
                bound = "|" if number else ""
            pieces.append(bound + shown)
        before = scored
    pieces.append(_escape_control_characters(stream.finish()))
    if before and not ansi:
        pieces.append("]")
    return "".join(pieces)


def _escape_control_characters(text: str) -> str:
    control = {each for each in text if unicodedata.category(each) in ("Cc", "Cf")}
    escapes = {ord(each): each.encode("unicode_escape").decode() for each in control}
    return text.translate(escapes | {ord("\n"): "↵\n"})
