"""`lmforge prepare`: text → tokenizer → token shards, with a progress bar and a summary."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lmforge.config.verbs import PrepareOptions
from lmforge.data.chat.library_functions import write_function_conversations
from lmforge.data.prepare.prepare import ProgressCallback, prepare
from lmforge.hub import resolve_model_folder

PRINT_EVERY_SECONDS = 5.0


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
    with _progress() as progress:
        summary = prepare(options.source, options.out, progress=progress, **chosen)
    if summary.already_done:
        print(f"{summary.folder}: prepared already, nothing to do")
    for split, tokens in summary.tokens.items():
        text = summary.text_bytes[split]
        ratio = f", {text / tokens:.2f} bytes a token" if tokens else ""
        print(f"{split:<9} {tokens:>15,} tokens, {summary.documents[split]:,} documents, {text:,} bytes of text{ratio}")
    if summary.empty_documents:
        print(f"left out  {summary.empty_documents:,} empty documents")
    if not summary.already_done:
        print(f"{summary.folder}: ready, vocabulary of {summary.vocab_size:,}, in {time.perf_counter() - began:.0f}s")
    return 0


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """A bar on a terminal; elsewhere a line now and then. Gives the function that `prepare` calls."""
    console, printed_at = Console(highlight=False), time.monotonic()
    tasks: dict[str, TaskID] = {}

    def update(stage: str, done: int, total: int, text_bytes: int) -> None:
        nonlocal printed_at
        size = f"{text_bytes / 1e6:,.1f} MB"
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, size=size)
        bar.update(tasks[stage], completed=done, total=total, size=size)
        if not console.is_terminal and time.monotonic() - printed_at > PRINT_EVERY_SECONDS:
            printed_at = time.monotonic()
            print(f"{stage}: {done}/{total}, {size}", flush=True)

    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[size]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield update
