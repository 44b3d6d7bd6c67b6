"""`lmforge prepare`: text → tokenizer → token shards, with a progress bar and a summary."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lmforge.config.verbs import PrepareOptions
from lmforge.data.chat.library_functions import write_function_conversations
from lmforge.data.prepare.prepare import ProgressCallback, prepare
from lmforge.errors import UserError
from lmforge.hub import resolve_model_folder
from lmforge.untrusted import cut, describe_os_error

PRINT_EVERY_SECONDS = 5.0
KINDS_SHOWN = 5


def run_prepare(options: PrepareOptions) -> int:
    """Prepare a corpus and print a summary. Raises UserError."""
    began = time.perf_counter()
    if options.source == "functions":
        counts = write_function_conversations(options.out)
        print(f"{options.out}: {counts['train']:,} requests for functions to train on, {counts['validation']:,} for validation")
        return 0
    chosen = options.model_dump(exclude={"source", "out"})
    if options.tokenizer is not None:
        chosen["tokenizer"] = resolve_model_folder(options.tokenizer, "tokenizer.json")
    try:
        with _progress() as progress:
            summary = prepare(options.source, options.out, progress=progress, warn=_warn, **chosen)
    except OSError as problem:  # such as a folder in the place of a file
        raise UserError(f"{describe_os_error(problem, options.out)}; mend that, or name another") from problem
    if summary.already_done:
        print(f"{summary.folder}: prepared already, nothing to do")
    for split, tokens in summary.tokens.items():
        text = summary.text_bytes[split]
        ratio = f", {text / tokens:.2f} bytes a token" if tokens else ""
        print(f"{split:<9} {tokens:>15,} tokens, {summary.documents[split]:,} documents, {text:,} bytes of text{ratio}")
    if summary.empty_documents:
        print(f"left out  {summary.empty_documents:,} empty documents")
    if kinds := summary.skipped_kinds:
        named = ", ".join(f"{cut(suffix)} {count:,}" for suffix, count in islice(kinds.items(), KINDS_SHOWN))
        more = ", …" if len(kinds) > KINDS_SHOWN else ""
        print(f"left out  {sum(kinds.values()):,} files of kinds that are not read ({named}{more})")
    if not summary.already_done:
        print(f"{summary.folder}: ready, vocabulary of {summary.vocab_size:,}, in {time.perf_counter() - began:.0f}s")
    return 0


def _warn(line: str) -> None:
    print(f"lmforge: {line}", file=sys.stderr, flush=True)


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """A bar on a terminal; elsewhere a line now and then. Gives the function that `prepare` calls."""
    console, printed_at = Console(highlight=False), time.monotonic()
    tasks: dict[str, TaskID] = {}
    began: dict[str, tuple[float, int]] = {}  # when a step began, and how much was done before

    def update(step: str, done: int, total: int, read: int, size: int) -> None:
        nonlocal printed_at
        now, amount = time.monotonic(), f"{done} of {total}"
        if size:
            done, total, amount = read, size, f"{read / 1e6:,.1f} of {size / 1e6:,.1f} MB"
        if step not in tasks:
            tasks[step], began[step] = bar.add_task(step, amount=amount), (now, done)
        bar.update(tasks[step], completed=done, total=total, amount=amount)
        if not console.is_terminal and now - printed_at > PRINT_EVERY_SECONDS:
            printed_at, (since, before) = now, began[step]
            left = (total - done) * (now - since) / (done - before) if done > before else None
            remaining = f", {timedelta(seconds=round(left))} left" if left else ""
            print(f"{step}: {done / total:.0%}, {amount}{remaining}", flush=True)

    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[amount]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield update
