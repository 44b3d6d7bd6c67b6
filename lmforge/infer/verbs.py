"""`lmforge evaluate` and `lmforge generate`: open a model by name, use it, print."""

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lmforge.cluster import ranks as cluster
from lmforge.cluster.ranks import Ranks
from lmforge.config_verbs import EvaluateOptions, GenerateOptions
from lmforge.errors import Mistake
from lmforge.infer.engine import Completion, generate
from lmforge.infer.evaluate import evaluate, scorer
from lmforge.infer.measured import measured_rows
from lmforge.infer.opening import Opened, open_model, settle
from lmforge.infer.sampling import Sampling
from lmforge.infer.tasks import load_tasks, run_task
from lmforge.parallel.precision import choose_dtype

DEFAULT_LENGTH = 1024


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr)


def run_evaluate(options: EvaluateOptions) -> int:
    """Measure a model on held-out documents, or by tasks; the first of the ranks that share this prints. Raises Mistake."""
    ranks = cluster.start(options.device)
    try:
        if options.tasks or options.harness:
            results = score_tasks(options, ranks)
            if ranks.first:
                _print_scores(results, options.output)
        else:
            result = measure(options, ranks)
            if ranks.first:
                _print_measured(result, options)
        return 0
    finally:
        cluster.stop()


def _print_measured(result: dict[str, Any], options: EvaluateOptions) -> None:
    if options.output == "json":
        print(json.dumps(result, indent=1))
    else:
        measured = f"{result['split']}, {result['targets']:,} tokens, {result['bytes']:,} bytes of text"
        print(
            f"{result['model']} on {result['data']} ({measured}): "
            f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}, {result['bits_per_byte']:.4f} bits per byte"
        )


def _open_on(ranks: Ranks, options: EvaluateOptions) -> Opened:
    """The model, whole on every rank; where one cannot open it, none goes on."""
    with ranks.agreeing():
        dtype = choose_dtype(options.dtype, ranks.device)[0]
        return open_model(options.model, ranks.device, dtype, say=_to_standard_error if ranks.first else lambda line: None)


def measure(options: EvaluateOptions, ranks: Ranks) -> dict[str, Any]:
    """What `lmforge evaluate` prints: loss, perplexity, bits_per_byte, targets, bytes, and what was measured on what."""
    opened = _open_on(ranks, options)
    data = options.data or opened.data
    if data is None:
        raise Mistake(f"{options.model}: does not say what it was trained on; name files or token shards with --data")
    length = options.length or (opened.recipe or {}).get("data", {}).get("length") or DEFAULT_LENGTH
    if opened.config.longest_row_tokens is not None:
        length = min(length, opened.config.longest_row_tokens)
    with ranks.agreeing():
        stream, split = measured_rows(opened, data, options.split, length)
    score = scorer(opened.model, torch.from_numpy(opened.tokenizer.token_bytes()).to(ranks.device))
    silent = not (ranks.first and sys.stderr.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=silent) as bar:
        task = bar.add_task("evaluating", total=None)
        result = evaluate(
            score,
            stream,
            ranks,
            rows=options.rows,
            batch_rows=options.batch_rows,
            on_rows=lambda done, total: bar.update(task, completed=done, total=total),
        )
    about = {"model": str(opened.origin), "data": str(data), "split": split, "length": length}
    return {**about, **result, "targets": int(result["targets"]), "bytes": int(result["bytes"])}


def score_tasks(options: EvaluateOptions, ranks: Ranks) -> list[dict[str, Any]]:
    """What `lmforge evaluate` prints of tasks: `task`, `metrics` and what else there is to tell, of each.

    What was answered goes to the file of `options.answers`, which is not to be there yet: it is made first of all.
    """
    with ExitStack() as stack:
        with ranks.agreeing():
            file = stack.enter_context(_new_file(options.answers)) if options.answers and ranks.first else None
        results, answered = _score(options, ranks)
        if file is not None:
            file.writelines(json.dumps(told, ensure_ascii=False) + "\n" for told in answered)
    return results


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A file that was not there, open for writing; it goes again where nothing came of it. Raises Mistake."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                yield file
                file.flush()
            except BaseException:
                path.unlink()
                raise
    except FileExistsError:
        raise Mistake(f"{path}: is there already; name another file") from None
    except OSError as problem:
        raise Mistake(f"{path}: could not be written ({problem.strerror}); choose another file") from None


def _score(options: EvaluateOptions, ranks: Ranks) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of each task the scores, and of each question of theirs what was answered."""
    harness: Callable[..., dict[str, dict[str, Any]]] | None = None
    with ranks.agreeing():
        tasks = [load_tasks(path) for path in options.tasks]
        examples = load_tasks(options.examples) if options.examples else None
        if options.harness:
            from lmforge.infer.harness import run_harness as harness
    opened = _open_on(ranks, options)
    common: dict[str, Any] = {"limit": options.limit, "batch_rows": options.batch_rows}
    results, answered = [], []
    for task in tasks:
        result = run_task(
            task,
            opened,
            ranks,
            few_shot=options.few_shot or 0,
            examples=examples,
            max_tokens=options.max_tokens,
            stop=options.stop,
            **common,
        )
        answered += [{"task": task.name, **told} for told in result.pop("answered")]
        results.append({"model": str(opened.origin), **result})
    if harness is not None:
        scores = harness(opened, options.harness, ranks, folder=options.harness_folder, few_shot=options.few_shot, **common)
        results += [{"model": str(opened.origin), "task": name, "metrics": told} for name, told in scores.items()]
    return results, answered


def _print_scores(results: list[dict[str, Any]], output: str) -> None:
    if output == "json":
        print(json.dumps(results, indent=1))
        return
    table = Table("task", "metric", "score", "± standard error", "questions", title=results[0]["model"])
    for result in results:
        errors, questions = result.get("standard_errors", {}), result.get("questions", "")
        for name, score in result["metrics"].items():
            if isinstance(score, int | float):
                error = f"{errors[name]:.4f}" if name in errors else ""
                table.add_row(result["task"], name, f"{score:.4f}", error, f"{questions}")
    Console().print(table)


def run_generate(options: GenerateOptions) -> int:
    """Write after each prompt and print as it comes. Raises Mistake."""
    prompts = list(options.prompts)
    if not prompts:
        prompts = [_from_standard_input()]
    opened = open_model(options.model, *settle(options.device, options.dtype), say=_to_standard_error)
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
