"""`lmforge evaluate` and `lmforge generate`: open a model by name, use it, print."""

import json
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from lmforge.cluster.environment import Place, local_threads
from lmforge.cluster.ranks import Ranks, choose_device
from lmforge.config import EvaluateOptions, GenerateOptions
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
    chosen = choose_device(device)
    if chosen.type == "cpu":
        torch.set_num_threads(local_threads(1))
    return open_model(path, chosen, choose_dtype(dtype, chosen)[0], say=lambda line: print(line, file=sys.stderr)), chosen


def run_evaluate(options: EvaluateOptions) -> int:
    """Measure a model on held-out documents and print the result. Raises Mistake."""
    result = measure(options)
    if options.output == "json":
        print(json.dumps(result, indent=1))
    else:
        measured = f"{result['split']}, {result['targets']:,} tokens, {result['bytes']:,} bytes of text"
        print(
            f"{result['model']} on {result['data']} ({measured}): "
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
    alone = Ranks(Place(), device, None)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("evaluating", total=None)
        result = evaluate(
            score,
            stream,
            alone,
            rows=options.rows,
            batch_rows=options.batch_rows,
            on_rows=lambda done, total: bar.update(task, completed=done, total=total),
        )
    about = {"model": str(opened.origin), "data": str(data), "split": options.split, "length": length}
    return {**about, **result, "targets": int(result["targets"]), "bytes": int(result["bytes"])}


def run_generate(options: GenerateOptions) -> int:
    """Write after each prompt and print as it comes. Raises Mistake."""
    prompts = list(options.prompts)
    if not prompts:
        prompts = [_from_standard_input()]
    opened, _ = _open(options.model, options.device, options.dtype)
    seed = options.seed if options.seed is not None else secrets.randbelow(2**31)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    write = partial(
        generate,
        opened.model,
        opened.tokenizer,
        prompts,
        max_tokens=options.max_tokens,
        sampling=sampling,
        seed=seed,
        stop=options.stop,
        opening=opened.opening,
        ends=opened.ends,
    )
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        write(on_text=lambda row, piece: print(piece, end="", flush=True))
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


def _print_in_turn(prompts: list[str], write: Callable[..., list[Completion]]) -> None:
    """Several prompts are written together: the first one's text as it comes, the others' when all are done."""
    print(f"--- 1 ---\n{prompts[0]}", end="", flush=True)
    completions = write(on_text=lambda row, piece: print(piece, end="", flush=True) if row == 0 else None)
    print()
    for row in range(1, len(prompts)):
        print(f"--- {row + 1} ---\n{prompts[row]}{completions[row].text}")
