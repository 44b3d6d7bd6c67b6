"""Opens any corpus: text, tokens from other tools, or a Hugging Face dataset."""

from collections.abc import Collection
from pathlib import Path

from lmforge.data.sources.hf_dataset import DatasetSource, is_dataset, open_dataset_source
from lmforge.data.sources.plugin_unit import NO_READERS, PluginReaders
from lmforge.data.sources.records import content_suffix
from lmforge.data.sources.text_sources import TextSource, known_suffixes, list_files, open_text_source
from lmforge.data.sources.token_files import TokenSource, find_token_files, open_token_source
from lmforge.data.tokenizer import Tokenizer
from lmforge.errors import UserError
from lmforge.untrusted import expand_home

# Each has `units()`, all units of work in a fixed order.
Source = TextSource | TokenSource | DatasetSource


def open_source(
    spec: str,
    *,
    text_field: str = "text",
    text_suffixes: Collection[str] = (),
    tokenizer: Tokenizer | None = None,
    separator_id: int | None = None,
    split: str | None = None,
    subset: str | None = None,
    readers: PluginReaders = NO_READERS,
) -> Source:
    """The corpus that `spec` names; see `open_text_source`, `open_token_source` and `open_dataset_source`.

    Tokens need the tokenizer that made them; without a tokenizer, .bin files in a folder of text are not taken for tokens.
    Raises UserError if there is nothing to read, or for an option that is of no use with this source.
    """
    dataset = is_dataset(spec, split, subset)
    if not dataset and (split or subset):
        raise UserError(f"{spec}: split and subset are of a Hugging Face dataset, which this is not; leave them out")
    tokens = [] if dataset else find_token_files(spec)
    texts = [] if not tokens or expand_home(spec).is_file() else _find_text(expand_home(spec))
    if tokens and texts and tokenizer is None:
        tokens = []
    if separator_id is not None and not tokens:
        raise UserError(f"{spec}: separator_id is of tokens that are imported, and this is text; leave it out")
    if dataset:
        return open_dataset_source(spec, text_field, split, subset)
    if not tokens:
        return open_text_source(spec, text_field, text_suffixes, readers)
    if tokenizer is None:
        raise UserError(f"{spec}: token ids, and nothing says which tokenizer made them; name it with --tokenizer")
    if texts:
        raise UserError(f"{spec}: holds both tokens ({tokens[0].name}) and text ({texts[0].name}); name a file, or part them")
    return open_token_source(spec, tokens, tokenizer, separator_id)


def _find_text(folder: Path) -> list[Path]:
    """Text files in a folder, sorted, except the document counts that fms-fsdp stores with its tokens."""
    files = (path for path in list_files(folder) if content_suffix(path.name) in known_suffixes() and path.suffix != ".json")
    return sorted(path for path in files if not (path.parent.name == "meta" and path.name.endswith("counts.csv")))
