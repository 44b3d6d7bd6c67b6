"""`lmforge prepare`: text → tokenizer → token shards, with a progress bar and a summary."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lmforge.config.verbs import PrepareOptions
from lmforge.data.chat.library_functions import write_function_conversations
from lmforge.data.prepare.prepare import prepare
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
    with _PreparationProgress() as shown:
        summary = prepare(options.source, options.out, progress=shown.update, **chosen)
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


class _PreparationProgress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress_bar = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[size]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, int] = {}
        self._last_printed = time.monotonic()

    def __enter__(self) -> "_PreparationProgress":
        if self._console.is_terminal:
            self._progress_bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress_bar.stop()

    def update(self, stage: str, done: int, total: int, text_bytes: int) -> None:
        size = f"{text_bytes / 1e6:,.1f} MB"
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress_bar.add_task(stage, total=total, size=size)
            self._progress_bar.update(self._tasks[stage], completed=done, total=total, size=size)  # type: ignore[arg-type]
        elif time.monotonic() - self._last_printed > PRINT_EVERY_SECONDS:
            self._last_printed = time.monotonic()
            print(f"{stage}: {done}/{total}, {size}", flush=True)
