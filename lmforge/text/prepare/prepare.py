"""Documents → shards, once: in parallel, restartable, with the same bytes after interruptions.

    1. plan       what is requested, written down; a folder holds one plan
    2. tokenizer  trained on a sample of the training documents, or copied
    3. parts      each unit of the source tokenized by whichever process is free, written atomically
                  as one part
    4. shards     the documents of each split in the order of a keyed permutation
    5. manifest   written last
    6. packing    with `best_fit_length`: an index of the shards (pack.py); a finished folder is
                  given one too

A step leaves what an earlier run finished. No result depends on which process or rank did what, or
on how many there were.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lmforge.core.data.best_fit_index import best_fit_lengths, describe_best_fit
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.data.shards.format import SHARDS_MANIFEST
from lmforge.core.data.tokenizer import Tokenizer, byte_tokenizer
from lmforge.core.distributed.launch import check_num_processes
from lmforge.core.errors import UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import expand_home
from lmforge.core.records.manifests import UNFINISHED
from lmforge.text.prepare.decontaminate import EvaluationNgrams
from lmforge.text.prepare.dist_context import DistContext, SingleProcessContext
from lmforge.text.prepare.hook import DocumentHook
from lmforge.text.prepare.output_folder import lock_output_folder
from lmforge.text.prepare.pack import is_packed, write_best_fit_index
from lmforge.text.prepare.steps import (
    CHARACTERS,
    Preparation,
    PreparationPlan,
    ProgressCallback,
    Source,
)
from lmforge.text.sources.folders import content_suffix, list_files
from lmforge.text.sources.hf_dataset import is_dataset, open_dataset_source
from lmforge.text.sources.plugin_unit import NO_READERS, PluginReaders
from lmforge.text.sources.text_sources import known_suffixes, open_text_source
from lmforge.text.sources.token_files import TokenSource, find_token_files, open_token_source

BYTES = "bytes"  # a tokenizer that is built in


@dataclass(frozen=True)
class PreparationSummary:
    """The result of a preparation.

    It has tokens, documents and bytes of text by split, and the files that were left out by suffix
    or split.

    `removed_documents` counts those that were left out, by reason: "hook", "contaminated",
    "unusable", "duplicate"; `special_text` those that spell special tokens, encoded as text.
    `best_fit` describes the best-fit packing for each sequence length that there is one for, or its
    damage.
    """

    folder: Path
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]
    empty_documents: int
    removed_documents: dict[str, int]
    special_text: int
    left_out: tuple[tuple[str, int], ...]
    vocab_size: int
    best_fit: dict[int, str]
    already_done: bool


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """The options of a preparation. Bounds are checked by `PrepareOptions` of the command.

    tokenizer         a tokenizer.json, a folder with one, "bytes", or "characters" (of the
                      documents);
                      by default one of `vocab_size` ids is trained
    hook              FILE.py:FUNCTION that gets each document and returns it, or None to leave it
                      out (see `DocumentHook`)
    deduplicate       "exact" keeps the first of equal documents, "near" also of nearly equal ones
                      (see `near_duplicates`)
    evaluation_texts  documents that contain one of these are left out (see `EvaluationNgrams`)
    validation_ratio  the fraction of documents for validation, from 0 to below 1. Documents are
                      chosen by their content
                      alone, so copies of a text are on one side and another seed changes nothing.
                      Each side has at least one document; of a single document the tail is for
                      validation; 0 sets nothing aside
    shard_tokens      a shard is complete with the document that reaches this, at least 1
    best_fit_length   pack the training documents for sequences of so many tokens, for best-fit
                      packing
    workers           processes of this rank, at least 1; by default as many as it has processors
                      and work for them
    parse_special_tokens  text that spells a special token is this token
    skip_invalid      documents that cannot be read or tokenized are left out, counted and listed,
                      instead of raising
    readers           the plugins that read documents of further kinds, with their options
    """

    tokenizer: str | Path | None = None
    vocab_size: int = 4096
    text_field: str = "text"
    text_suffixes: Sequence[str] = ()
    split: str | None = None
    subset: str | None = None
    separator_id: int | None = None
    hook: str | None = None
    deduplicate: Literal["exact", "near"] | None = None
    evaluation_texts: Sequence[str] = ()
    validation_ratio: float = 0.02
    shard_tokens: int = 100_000_000
    best_fit_length: int | None = None
    seed: int = 0
    workers: int | None = None
    overwrite: bool = False
    parse_special_tokens: bool = False
    skip_invalid: bool = False
    readers: PluginReaders = NO_READERS

    def open(
        self, source: str, out: Path, progress: ProgressCallback, dist_ctx: DistContext
    ) -> Preparation:
        """Open what the corpus and the options name, and write down the plan. Raises UserError."""
        given = _open_tokenizer(self.tokenizer)
        ngrams = EvaluationNgrams.of(self.evaluation_texts) if self.evaluation_texts else None
        document_hook = DocumentHook.open(self.hook, self.text_field) if self.hook else None
        corpus = self.open_source(source, given)
        needs_text = (
            document_hook,
            ngrams,
            self.deduplicate == "near",
            self.parse_special_tokens,
            self.skip_invalid,
        )
        if isinstance(corpus, TokenSource) and any(needs_text):
            raise UserError(
                f"{source}: tokens: a hook, near duplicates, decontamination, parse_special_tokens"
                " and skip_invalid need text; leave them out"
            )
        tokenizer = None
        vocab_size = None
        if given:
            tokenizer = given.hash
        elif self.tokenizer is not None:
            tokenizer = CHARACTERS
        else:
            vocab_size = self.vocab_size
        plan = PreparationPlan(
            files=corpus.fingerprint(),
            text_field=self.text_field,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            validation_ratio=self.validation_ratio,
            shard_tokens=self.shard_tokens,
            seed=self.seed,
            hook=f"{document_hook.function} {document_hook.digest}" if document_hook else None,
            deduplicate=self.deduplicate,
            decontaminate=ngrams.digest if ngrams else None,
            parse_special_tokens=self.parse_special_tokens or None,
            skip_invalid=self.skip_invalid or None,
        )
        check_num_processes(self.workers or 1)
        return Preparation(out, corpus, given, document_hook, ngrams, plan, progress, dist_ctx)

    def open_source(self, spec: str, tokenizer: Tokenizer | None) -> Source:
        """The corpus that `spec` names: text, tokens of other tools, or a Hugging Face dataset.

        Tokens need the tokenizer that made them; without one, .bin files in a folder of text are
        not taken for tokens. Raises UserError if there is nothing to read, or for an option that is
        of no use with this source.
        """
        dataset = is_dataset(spec, self.split, self.subset)
        if not dataset and (self.split or self.subset):
            raise UserError(
                f"{spec}: split and subset are of a Hugging Face dataset, which this is not; leave"
                " them out"
            )
        path = expand_home(spec)
        tokens = [] if dataset else find_token_files(spec, self.readers)
        texts = _find_text(path) if tokens and not path.is_file() else []
        if texts and tokenizer is None:
            tokens = []
        if self.separator_id is not None and not tokens:
            raise UserError(
                f"{spec}: separator_id is of tokens that are imported, and this is text; leave"
                " it out"
            )
        if dataset:
            return open_dataset_source(spec, self.text_field, self.split, self.subset)
        if not tokens:
            return open_text_source(spec, self.text_field, self.text_suffixes, self.readers)
        if tokenizer is None:
            raise UserError(
                f"{spec}: token ids, and nothing says which tokenizer made them; name it with"
                " --tokenizer"
            )
        if texts:
            raise UserError(
                f"{spec}: holds both tokens ({tokens[0].name}) and text ({texts[0].name}); name a"
                " file, or part them"
            )
        return open_token_source(spec, tokens, tokenizer, self.separator_id, self.readers)


def prepare(
    source: str,
    out: str | Path,
    *,
    progress: ProgressCallback | None = None,
    dist_ctx: DistContext | None = None,
    **options: Any,
) -> PreparationSummary:
    """Turn a corpus into a token folder.

    source    see `PreparationOptions.open_source`
    progress  called as progress(step, done, total, bytes of the source done, of how many); the
              steps are "tokenizer",
              "tokens", "shards" and "packing"; bytes are those on the disk, and 0 of 0 where none
              are read
    dist_ctx  the ranks that call this together, on one file system; by default this process is
              alone
    options   those of `PreparationOptions`

    Called again after it was stopped in any way, it continues; called again when done, it does
    nothing but say so. Raises UserError for invalid input, for a folder that holds another plan
    (unless `overwrite`), and for a full disk; RunFailed when one of its processes was killed.
    """
    out = Path(out)
    dist_ctx = dist_ctx or SingleProcessContext()
    chosen = PreparationOptions(**options)
    show = progress if progress and dist_ctx.rank_info.is_rank0 else lambda *step: None
    with dist_ctx.raise_on_all():
        preparation = chosen.open(source, out, show, dist_ctx)
    plans = dist_ctx.all_gather(preparation.plan)
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise UserError(
                f"{source}: rank {rank} has other files or options than rank 0; make them the same"
                " on all ranks"
            )
    with ExitStack() as stack:
        lock = lock_output_folder(out, asdict(preparation.plan), chosen.overwrite)
        finished = dist_ctx.decide_on_rank0(lambda: stack.enter_context(lock))
        if not finished:
            manifest = preparation.write(chosen.workers)

            def write_manifest() -> None:
                assert manifest is not None, "rank 0 has it"
                atomic_write_json(out / SHARDS_MANIFEST, asdict(manifest))

            dist_ctx.decide_on_rank0(write_manifest)
        dist_ctx.decide_on_rank0(lambda: shutil.rmtree(out / UNFINISHED, ignore_errors=True))
        length = chosen.best_fit_length
        if length and not dist_ctx.decide_on_rank0(lambda: is_packed(out, length)):
            write_best_fit_index(
                out, length, workers=chosen.workers, progress=show, dist_ctx=dist_ctx
            )
        return dist_ctx.decide_on_rank0(lambda: _summary(out, finished, preparation.corpus))


def _find_text(folder: Path) -> list[Path]:
    """Text files in a folder, sorted, except the document counts of fms-fsdp."""

    def is_text(path: Path) -> bool:
        if path.parent.name == "meta" and path.name.endswith("counts.csv"):
            return False
        return content_suffix(path.name) in known_suffixes() and path.suffix != ".json"

    return sorted(filter(is_text, list_files(folder)))


def _open_tokenizer(name: str | Path | None) -> Tokenizer | None:
    """The given tokenizer; None if it is made from the documents."""
    if name is None or str(name) == CHARACTERS:
        return None
    return byte_tokenizer() if str(name) == BYTES else Tokenizer.open(name)


def _summary(out: Path, already_done: bool, corpus: Source) -> PreparationSummary:
    folder = TokenFolder.open(out)
    manifest = folder.manifest
    return PreparationSummary(
        folder=out,
        tokens={
            split: sum(entry.tokens for entry in entries)
            for split, entries in manifest.splits.items()
        },
        documents={
            split: sum(entry.documents for entry in entries)
            for split, entries in manifest.splits.items()
        },
        text_bytes={split: manifest.text_bytes.get(split, 0) for split in manifest.splits},
        empty_documents=manifest.empty_documents,
        removed_documents=manifest.removed_documents,
        special_text=manifest.special_text_documents,
        left_out=corpus.left_out,
        vocab_size=manifest.vocab_size,
        best_fit={length: describe_best_fit(folder, length) for length in best_fit_lengths(folder)},
        already_done=already_done,
    )
