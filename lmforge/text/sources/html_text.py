"""The text of a page of HTML: what a reader sees, a line per block, without scripts, styles and markup."""

import re
from html.parser import HTMLParser

HIDDEN_TAGS = frozenset({"script", "style", "noscript", "template", "svg"})
# fmt: off
BLOCK_TAGS = frozenset({
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "li", "main", "nav",
    "ol", "option", "p", "pre", "section", "summary", "table", "tbody", "td", "tfoot", "th", "thead", "title", "tr", "ul",
})
# fmt: on
PARAGRAPH_TAGS = frozenset({"p", "pre", "blockquote", "table", "ul", "ol", "dl", "h1", "h2", "h3", "h4", "h5", "h6", "title"})


def extract_text(page: str) -> str:
    """The visible text of a page, and its title. Blanks are collapsed except in `pre`; an empty line divides paragraphs."""
    extractor = _TextExtractor()
    extractor.feed(page)
    extractor.close()
    return extractor.text()


class _TextExtractor(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._line_ends = 0  # that the next text begins with
        self._hidden: list[str] = []  # open tags whose content is left out
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in HIDDEN_TAGS:
            self._hidden.append(tag)
        elif tag == "pre":
            self._pre_depth += 1
        self._break_line(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break_line(tag)  # such as <br/>; <script/> hides nothing in XHTML

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            # Whatever was left open inside ends with it.
            del self._hidden[self._hidden.index(tag) :]
        elif tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)
        self._break_line(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._pre_depth:
            data = re.sub(r"\s+", " ", data)
            if self._line_ends or not self._pieces or self._pieces[-1].endswith(" "):
                data = data.removeprefix(" ")
        if data:
            self._pieces += ["\n" * self._line_ends, data]
            self._line_ends = 0

    def _break_line(self, tag: str) -> None:
        if self._hidden or tag not in BLOCK_TAGS:
            return
        # Blocks that end and begin at one place are one break; each <br> is one more.
        self._line_ends = self._line_ends + 1 if tag == "br" else max(self._line_ends, 2 if tag in PARAGRAPH_TAGS else 1)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in "".join(self._pieces).split("\n")).strip("\n")
