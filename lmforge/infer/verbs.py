"""`lmforge evaluate` and `lmforge generate`: open a model by name, use it, print."""

import json
import secrets
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmforge.cluster.environment import Place
from lmforge.cluster.ranks import Ranks, choose_device
from lmforge.config import EvaluateOptions, GenerateOptions, local_threads
from lmforge.data.shards import TokenFolder
from lmforge.data.stream import Stream
from lmforge.errors import Mistake
from lmforge.infer.engine import Completion, generate
from lmforge.infer.evaluate import evaluate, scorer
from lmforge.infer.opening import Opened, open_model
from lmforge.infer.sampling import Sampling
from lmforge.parallel.precision import choose_dtype

DEFAULT_LENGTH = 1024


def _open(path: Path, device: str, dtype: str) -> tuple[Opened, torch.device]:
    place = choose_device(device)
    if place.type == "cpu":
        torch.set_num_threads(local_threads(1))
    return open_model(path, place, choose_dtype(dtype, place)[0], say=lambda line: print(line, file=sys.stderr)), place


def run_evaluate(options: EvaluateOptions) -> int:
    """Measure a model on held-out documents and print the result. Raises Mistake."""
    result = measure(options)
    if options.output == "json":
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{result['model']} on {result['data']} ({result['split']}, {result['targets']:,} tokens, {result['bytes']:,} bytes of text): "
            f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per byte"
        )
    return 0


def measure(options: EvaluateOptions) -> dict[str, Any]:
    """What `lmforge evaluate` prints: loss, perplexity, bits_per_byte, targets, bytes, and what was measured on what."""
    opened, device = _open(options.model, options.device, options.dtype)
    recipe = opened.recipe or {}
    data = options.data or (Path(recipe["data"]["folder"]) if "data" in recipe else None)
    if data is None:
        raise Mistake(f"{options.model}: does not say what it was trained on; name a folder of token shards with --data")
    tokens = TokenFolder.open(data)
    if tokens.tokenizer.hash != opened.tokenizer.hash:
        raise Mistake(f"{data}: prepared with another tokenizer than the model's; prepare it with --tokenizer {opened.origin}")
    length = options.length or recipe.get("data", {}).get("length") or DEFAULT_LENGTH
    if opened.config.longest_row_tokens is not None:
        length = min(length, opened.config.longest_row_tokens)
    stream = Stream(tokens, split=options.split, length=length, shuffle=False)
    score = scorer(opened.model, torch.from_numpy(opened.tokenizer.token_bytes()).to(device))
    with _bar(sys.stderr.isatty()) as on_rows:
        result = evaluate(score, stream, Ranks(Place(), device, None), rows=options.rows, batch_rows=options.batch_rows, on_rows=on_rows)
    about = {"model": str(opened.origin), "data": str(data), "split": options.split, "length": length}
    return {**about, **result, "targets": int(result["targets"]), "bytes": int(result["bytes"])}


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("evaluating", total=None)

    def __enter__(self) -> Any:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *problem: object) -> None:
        self._progress.stop()


def _bar(terminal: bool) -> AbstractContextManager[Any]:
    return _Bar() if terminal else nullcontext(lambda done, total: None)


def run_generate(options: GenerateOptions) -> int:
    """Write after each prompt and print as it comes. Raises Mistake."""
    prompts = list(options.prompts)
    if not prompts:
        prompts = [_from_standard_input()]
    opened, _ = _open(options.model, options.device, options.dtype)
    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    write = partial(generate, opened.model, opened.tokenizer, max_tokens=options.max_tokens, sampling=sampling, seed=seed, stop=options.stop)
    if len(prompts) == 1:
        sys.stdout.write(prompts[0])
        sys.stdout.flush()
        write(prompts, on_text=_as_it_comes)
        print()
    else:
        _print_in_turn(prompts, write)
    if options.temperature > 0 and options.seed is None:
        print(f"(seed {seed})", file=sys.stderr)
    return 0


def _from_standard_input() -> str:
    if sys.stdin.isatty():
        print("prompt, ended with Ctrl-D:", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise Mistake(f"standard input: not UTF-8 text (byte {problem.start})") from None


def _as_it_comes(row: int, piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _print_in_turn(prompts: list[str], write: Any) -> list[Completion]:
    """Several prompts are written together; the text of the first that has not ended streams, the others wait for their turn."""
    waiting = ["" for _ in prompts]
    shown = 0

    def on_text(row: int, piece: str) -> None:
        if row == shown:
            _as_it_comes(row, piece)
        else:
            waiting[row] += piece

    sys.stdout.write(f"--- 1 ---\n{prompts[0]}")
    completions = write(prompts, on_text=on_text)
    for row in range(1, len(prompts)):
        sys.stdout.write(f"\n--- {row + 1} ---\n{prompts[row]}{waiting[row]}")
    print()
    return completions
