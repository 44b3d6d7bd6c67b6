"""`lmforge prepare`: text → tokenizer → token shards, with a progress bar and a summary.

`--verify` compares every block of a token folder with its checksum.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lmforge.core import registry
from lmforge.core.data.shards.folder import TokenFolder
from lmforge.core.distributed.rank_info import read_rank_info
from lmforge.core.errors import UserError, format_count
from lmforge.core.files.untrusted import describe_os_error
from lmforge.hf.hub import resolve_model_folder
from lmforge.text.chat.library_functions import write_function_conversations
from lmforge.text.options.prepare import PrepareOptions
from lmforge.text.prepare.dist_context import DistContext, SingleProcessContext
from lmforge.text.prepare.pack import pack_folder
from lmforge.text.prepare.prepare import PreparationSummary, prepare
from lmforge.text.prepare.steps import ProgressCallback
from lmforge.text.prepare.verify import verify_best_fit, verify_shards
from lmforge.text.questions import load_texts
from lmforge.text.sources.folders import describe_left_out
from lmforge.text.sources.plugin_unit import PluginReaders
from lmforge.text.sources.records import UNUSABLE, describe_special_text

PRINT_EVERY_SECONDS = 5.0
REASONS = {
    "hook": "by the hook",
    "contaminated": "with a text of the evaluation",
    "unusable": f"that cannot be used, listed in its {UNUSABLE}",
    "duplicate": "copies of earlier ones",
}


def run_prepare(options: PrepareOptions) -> int:
    """Prepare a corpus, on all ranks where a launcher started several; rank 0 prints a summary.

    Raises UserError.
    """
    began = time.perf_counter()
    if options.source == "functions":
        counts = write_function_conversations(options.out)
        print(
            f"{options.out}: {counts['train']:,} requests for functions to train on,"
            f" {counts['validation']:,} for validation"
        )
        return 0
    if options.verify is not None:
        return verify(options.verify)
    if options.pack is not None:
        return _pack(options.pack, options)
    not_ours = {
        entry.option_name
        for entry in registry.entries("document_source")
        if entry.options is not None
    }
    not_ours |= {"source", "out", "verify", "pack", "decontaminate", "environment", "plugins"}
    chosen = options.model_dump(exclude=not_ours)
    chosen["readers"] = PluginReaders.of_options(options)
    with _join_ranks() as dist_ctx:
        with dist_ctx.raise_on_all():
            if options.tokenizer is not None:
                chosen["tokenizer"] = resolve_model_folder(options.tokenizer, "tokenizer.json")
            chosen["evaluation_texts"] = [
                text for path in options.decontaminate for text in load_texts(path)
            ]
        try:
            with _progress() as progress:
                summary = prepare(
                    options.source, options.out, progress=progress, dist_ctx=dist_ctx, **chosen
                )
        except OSError as problem:  # such as a folder in the place of a file
            raise UserError(
                f"{describe_os_error(problem, options.out)}; fix that, or name another"
            ) from problem
        if dist_ctx.rank_info.is_rank0:
            _print_summary(summary, time.perf_counter() - began)
    return 0


def _pack(location: str, options: PrepareOptions) -> int:
    """Pack a folder that was prepared before."""
    assert options.best_fit_length is not None
    with _join_ranks() as dist_ctx, _progress() as progress:
        index = pack_folder(
            location,
            options.best_fit_length,
            workers=options.workers,
            progress=progress,
            dist_ctx=dist_ctx,
        )
        if dist_ctx.rank_info.is_rank0:
            print(f"{location}: packed for best-fit, {index.describe()}")
    return 0


def _join_ranks() -> AbstractContextManager[DistContext]:
    if read_rank_info().world_size == 1:
        return nullcontext(SingleProcessContext())
    # It takes torch, and a lone process does not.
    from lmforge.core.distributed.distributed import init_distributed

    return init_distributed("cpu")


def _print_summary(summary: PreparationSummary, seconds: float) -> None:
    if summary.already_done:
        print(f"{summary.folder}: prepared already, nothing to do")
    for split, tokens in summary.tokens.items():
        text = summary.text_bytes[split]
        ratio = f", {text / tokens:.2f} bytes per token" if tokens else ""
        documents = format_count(summary.documents[split], "document")
        print(f"{split:<9} {tokens:>15,} tokens, {documents}, {text:,} bytes of text{ratio}")
    for packing in summary.best_fit.values():
        print(f"best-fit  {packing}")
    if summary.empty_documents:
        print(f"left out  {format_count(summary.empty_documents, 'empty document')}")
    for reason, count in summary.removed_documents.items():
        print(f"left out  {format_count(count, 'document')}: {REASONS[reason]}")
    total = sum(summary.documents.values())
    words = describe_special_text(summary.special_text, total, "--parse_special_tokens")
    if words:
        print(f"as text   {words.removeprefix('; ')}")
    if summary.left_out:
        print(f"left out  {describe_left_out(summary.left_out)}")
    if not summary.already_done:
        print(f"{summary.folder}: ready, vocabulary of {summary.vocab_size:,}, in {seconds:.0f}s")


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """A bar on a terminal; elsewhere a line now and then.

    Gives the function that `prepare` calls.
    """
    console = Console(highlight=False)
    printed_at = time.monotonic()
    tasks: dict[str, TaskID] = {}
    began: dict[str, tuple[float, int]] = {}  # when a step began, and how much was done before

    def update(step: str, done: int, total: int, read: int, size: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        amount = f"{done} of {total}"
        if size:
            done = read
            total = size
            amount = f"{read / 1e6:,.1f} of {size / 1e6:,.1f} MB"
        if step not in tasks:
            tasks[step] = bar.add_task(step, amount=amount)
            began[step] = (now, done)
        bar.update(tasks[step], completed=done, total=total, amount=amount)
        if not console.is_terminal and now - printed_at > PRINT_EVERY_SECONDS:
            printed_at = now
            since, before = began[step]
            remaining = ""
            if total > done > before:
                left = (total - done) * (now - since) / (done - before)
                remaining = f", {timedelta(seconds=round(left))} left"
            print(f"{step}: {done / total:.0%}, {amount}{remaining}", flush=True)

    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield update


def verify(path: str) -> int:
    """Print a line per damaged shard or index and a summary.

    Returns the exit status: 1 where something is damaged.

    Raises UserError where the folder's manifest or its tokenizer cannot be used.
    """
    folder = TokenFolder.open(path, check_sizes=False)
    _ = folder.tokenizer
    began = printed_at = time.monotonic()
    total = sum(len(shards) for shards in folder.manifest.splits.values())
    damaged = []
    for done, shard in enumerate(verify_shards(folder), start=1):
        if shard is not None:
            damaged.append(shard)
            print(f"{shard.name}: {shard.problem}", flush=True)
        if time.monotonic() - printed_at > PRINT_EVERY_SECONDS:
            printed_at = time.monotonic()
            print(f"{done:,} of {total:,} shards read", flush=True)
    problems = list(verify_best_fit(folder))
    for problem in problems:
        print(problem)
    if not damaged:
        best_fit = f", {len(problems):,} files of best-fit packing damaged" if problems else ""
        words = f"{total:,} shards, every block as it was written{best_fit}"
        print(f"{path}: {words}, in {time.monotonic() - began:.0f}s")
        return 1 if problems else 0
    print(
        f"{path}: {len(damaged):,} of {total:,} shards are damaged: restore them, or train without,"
        " with this under [data]"
    )
    print(f"quarantine = {json.dumps([entry for shard in damaged for entry in shard.quarantine])}")
    return 1
