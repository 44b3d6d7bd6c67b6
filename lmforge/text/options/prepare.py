"""The options of `lmforge prepare`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lmforge.core.files.untrusted import cut
from lmforge.core.options.operation import ENVIRONMENT, EnvironmentName
from lmforge.core.options.options import PLUGINS, Options, argument, option
from lmforge.core.options.ranges import (
    LENGTH,
    SEED,
    THREADS,
    TOKEN_ID,
    TOKENS,
)

PACK_OPTIONS = ("pack", "best_fit_length", "workers")


class PrepareOptions(Options):
    """lmforge prepare [SOURCE] [OUT]: text → tokenizer → token shards."""

    source: str = argument(
        "stdlib",
        "stdlib (the Python standard library's source), functions (requests for its functions), a"
        " file or folder of text or of tokens, or a Hugging Face dataset: a name or a folder",
    )
    out: Path = argument(
        Path("data/stdlib"), "folder to write (default: data/stdlib, of stdlib alone)"
    )
    tokenizer: Path | None = option(
        None,
        "tokenizer.json, folder with one, name on the hub, bytes, or characters (default: train"
        " one)",
    )
    vocab_size: int = option(
        4096, "vocabulary size of a tokenizer that is trained here", gt=300, le=1_000_000
    )
    text_field: str = option("text", "field of the text in jsonl, parquet, csv and tsv")
    text_suffixes: tuple[str, ...] = option(
        (), "suffixes of further files that are plain text, such as .log"
    )
    split: str | None = option(None, "split of a Hugging Face dataset (default: train)")
    subset: str | None = option(None, "subset of a Hugging Face dataset, where it has several")
    separator_id: int | None = option(
        None,
        "id between documents of imported tokens (default: the tokenizer's end- and"
        " beginning-of-text ids)",
        **TOKEN_ID,
    )
    parse_special_tokens: bool = option(
        False, "text that spells a special token is this token, as data.parse_special_tokens"
    )
    skip_invalid: bool = option(
        False,
        "leave out documents that cannot be used, with a count and a list, instead of ending at the"
        " first",
    )
    hook: str | None = option(
        None,
        "FILE.py:FUNCTION that is given each document, as a dict, and returns it, or None to leave"
        " it out",
    )
    deduplicate: Literal["exact", "near"] | None = option(
        None, "exact: keep only the first of identical documents; near: of near duplicates too"
    )
    decontaminate: tuple[Path, ...] = option(
        (),
        "files of questions as --tasks of evaluate takes them; documents that contain one are"
        " left out",
    )
    validation_ratio: float = option(
        0.02, "fraction of the documents kept for validation", gt=0, lt=1
    )
    shard_tokens: int = option(100_000_000, "tokens in one shard file", **TOKENS)
    best_fit_length: int | None = option(
        None,
        "pack the training documents for pretrain's data.packing = best-fit, with sequences of N"
        " tokens",
        **LENGTH,
    )
    seed: int = option(0, "seed of the order of documents", **SEED)
    workers: int | None = option(None, "worker processes (default: the number of cores)", **THREADS)
    overwrite: bool = option(False, "delete what another preparation left in OUT")
    environment: EnvironmentName = ENVIRONMENT
    plugins: tuple[str, ...] = PLUGINS
    verify: str | None = option(
        None, "do not prepare: read every block of this token folder, and name the damaged ones"
    )
    pack: str | None = option(
        None, "do not prepare: pack this token folder, prepared before, for --best_fit_length"
    )

    def problems(self) -> Iterator[str]:
        not_for_verify = [name for name in self.changed() if name != "verify"]
        not_for_pack = [name for name in self.changed() if name not in PACK_OPTIONS]
        if self.verify is not None and not_for_verify:
            yield f"--verify: reads a folder and writes none; leave out {not_for_verify[0]}"
        elif self.pack is not None and not_for_pack:
            yield (
                "--pack: reads no source, and writes to the folder that it names; leave out"
                f" {not_for_pack[0]}"
            )
        elif self.pack is not None and self.best_fit_length is None:
            yield "--pack: needs the sequence length, such as --best_fit_length 2048"
        if self.source != "stdlib" and "out" not in self.model_fields_set:
            example = f"data/{Path(self.source).name.partition('.')[0] or 'mine'}"
            yield f"prepare: name the folder to write after the source, such as {cut(example)}"
        for suffix in self.text_suffixes:
            if not re.fullmatch(r"\.[^./\0]{1,20}", suffix):
                yield (
                    f"--text_suffixes: {cut(suffix)!r} is no suffix; write it with its dot, such as"
                    " .log"
                )
