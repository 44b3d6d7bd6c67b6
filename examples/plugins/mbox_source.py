"""A document source: mail in .mbox files, one document per message.

`lmforge prepare mail.mbox data/mail --plugins mbox_source.py`.

Nothing here imports torch. The file arrives open, and decompressed: mail.mbox.gz is read too.
"""

import email
import email.policy
from collections.abc import Iterator
from typing import Any, BinaryIO

import lmforge


class MboxOptions(lmforge.Options):
    """The parts of a message that are read."""

    headers: bool = lmforge.option(True, "put From, Date and Subject before the text")
    quotes: bool = lmforge.option(False, "keep lines that quote another message, which begin with >")


@lmforge.register("document_source", "mbox", options=MboxOptions)
def read_mbox(file: BinaryIO, options: MboxOptions) -> Iterator[dict[str, Any]]:
    """A record of each message: the text, and its subject, which --hook sees."""
    lines: list[bytes] = []
    for line in file:
        # A line of a text that begins so is written with a > before it.
        if line.startswith(b"From ") and lines:
            yield from _documents(lines, options)
            lines = []
        lines.append(line)
    yield from _documents(lines, options)


def _documents(lines: list[bytes], options: MboxOptions) -> Iterator[dict[str, Any]]:
    if not lines or not lines[0].startswith(b"From "):
        raise lmforge.UserError("no mbox file: it does not begin with a line From …")
    message = email.message_from_bytes(b"".join(lines[1:]), policy=email.policy.default)
    body = message.get_body(("plain",))
    if body is None:  # such as a message with nothing but a picture
        return
    text = body.get_content().replace("\n>From ", "\nFrom ")
    if not options.quotes:
        text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(">"))
    if options.headers:
        text = "".join(f"{name}: {message[name]}\n" for name in ("From", "Date", "Subject") if message[name]) + f"\n{text}"
    yield {"text": text, "subject": str(message["Subject"] or "")}
