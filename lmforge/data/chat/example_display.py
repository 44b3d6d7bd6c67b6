"""An example as a person reads it: every token with its bounds, special ones spelled out, and which are scored."""

import unicodedata

from lmforge.data.packing import TokenizedExample
from lmforge.data.tokenizer import Tokenizer

# Two shades of each by turns, so that the bounds of tokens show: black on green where scored, grey where not.
SCORED_STYLES = ("\x1b[30;42m", "\x1b[30;102m")
UNSCORED_STYLES = ("\x1b[37m", "\x1b[90m")
RESET = "\x1b[0m"


def format_example(example: TokenizedExample, tokenizer: Tokenizer, *, ansi: bool = True) -> str:
    """An example for a terminal, or without `ansi` as text: `|` between tokens, `[` and `]` around what is scored.

    A character of several tokens stands with the last of them. Line ends are shown and made; other characters that a
    terminal would obey are written out.
    """
    stream = tokenizer.stream_decoder()
    pieces = []
    before = False
    for number, (id, scored) in enumerate(zip(example.tokens.tolist(), example.loss_mask.tolist(), strict=True)):
        text = stream.feed(id)
        shown = _escape_control_characters(text or (tokenizer.id_to_token(id) if id in tokenizer.all_special_ids else ""))
        if ansi:
            shade = (SCORED_STYLES if scored else UNSCORED_STYLES)[number % 2]
            # The ground of a colour would go on to the end of the screen where the line ends inside it.
            pieces.append(shade + shown.replace("\n", f"{RESET}\n{shade}") + RESET)
        else:
            bound = "" if number == 0 and not scored else "|" if scored == before else "[" if scored else "]"
            pieces.append(bound + shown)
        before = scored
    rest = _escape_control_characters(stream.finish())
    return "".join(pieces) + rest + ("]" if before and not ansi else "")


def _escape_control_characters(text: str) -> str:
    return "".join(_escape_character(character) for character in text)


def _escape_character(character: str) -> str:
    if character == "\n":
        return "↵\n"
    return character.encode("unicode_escape").decode() if unicodedata.category(character) in ("Cc", "Cf") else character
