"""`lmforge prepare` and `lmforge download`: call them, show how far they are, say what came of it."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lmforge.config_verbs import DownloadOptions, PrepareOptions
from lmforge.data import hub
from lmforge.data.functions import write_function_pairs
from lmforge.data.prepare import prepare

LINE_EVERY_SECONDS = 5.0


def run_prepare(options: PrepareOptions) -> int:
    """Prepare a corpus and print a summary. Raises Mistake."""
    began = time.perf_counter()
    if options.source == "functions":
        counts = write_function_pairs(options.out)
        print(f"{options.out}: {counts['train']:,} requests with functions to learn from, {counts['held_out']:,} held out")
        return 0
    chosen = options.model_dump(exclude={"source", "out"})
    if options.tokenizer is not None:
        chosen["tokenizer"] = hub.local_folder(options.tokenizer, "tokenizer.json")
    with _Shown() as shown:
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


def run_download(options: DownloadOptions) -> int:
    """Fetch a model of the hub, and say what came. Raises Mistake."""
    name, revision = hub.split_name(options.name, options.revision)
    came = hub.download(name, revision, options.folder, say=lambda line: print(line, flush=True))
    sizes = [sum(file.bytes for file in files) for files in (came.fetched, came.present)]
    print(
        f"{came.folder}: {name} at {came.commit}; fetched {len(came.fetched)} files, {sizes[0]:,} bytes;"
        f" {len(came.present)} were there, {sizes[1]:,} bytes"
    )
    return 0


class _Shown:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.fields[size]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, int] = {}
        self._spoke = time.monotonic()

    def __enter__(self) -> "_Shown":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int, text_bytes: int) -> None:
        size = f"{text_bytes / 1e6:,.1f} MB"
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(stage, total=total, size=size)
            self._bar.update(self._tasks[stage], completed=done, total=total, size=size)  # type: ignore[arg-type]
        elif time.monotonic() - self._spoke > LINE_EVERY_SECONDS:
            self._spoke = time.monotonic()
            print(f"{stage}: {done}/{total}, {size}", flush=True)
