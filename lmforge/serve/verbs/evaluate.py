"""`lmforge evaluate`: loss on documents, or scores of tasks, of a model loaded by name."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lmforge.core.distributed.distributed import DistributedContext, init_distributed
from lmforge.core.files.atomic_files import create_file
from lmforge.core.parallel.precision import decide_dtype
from lmforge.serve.decoding.model_loading import LoadedModel, load_model
from lmforge.serve.evaluate.measure_loss import measure_loss
from lmforge.serve.evaluate.tasks import TaskSettings, run_task
from lmforge.serve.options.models import EvaluateOptions
from lmforge.text.questions import load_task


def run_evaluate(options: EvaluateOptions) -> int:
    """Measure the loss of a model on documents, or its scores on tasks; rank 0 prints.

    Raises UserError.
    """
    measure: Callable[..., Any] = _measure_loss
    print_text: Callable[..., None] = _print_loss
    if options.tasks or options.lm_eval:
        measure = _score_tasks
        print_text = _print_scores
    with init_distributed(options.device) as dist_ctx:
        result = measure(options, dist_ctx)
        if dist_ctx.is_rank0 and options.output == "json":
            print(json.dumps(result, indent=1))
        elif dist_ctx.is_rank0:
            print_text(result)
    return 0


def _load_on_ranks(dist_ctx: DistributedContext, options: EvaluateOptions) -> LoadedModel:
    """The full model on every rank. Raises UserError on all ranks where one cannot open it."""
    dtype, _ = decide_dtype(options.dtype, dist_ctx)
    with dist_ctx.raise_on_all():

        def warn(line: str) -> None:
            if dist_ctx.is_rank0:
                print(line, file=sys.stderr)

        return load_model(options.model, dist_ctx.device, dtype, warn=warn)


def _measure_loss(options: EvaluateOptions, dist_ctx: DistributedContext) -> dict[str, Any]:
    """The result of `measure_loss`, with a progress bar on rank 0."""
    loaded = _load_on_ranks(dist_ctx, options)
    silent = not (dist_ctx.is_rank0 and sys.stderr.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=silent) as bar:
        task = bar.add_task("evaluating", total=None)
        return measure_loss(
            loaded,
            dist_ctx,
            data=options.data,
            split=options.split,
            sequences=options.sequences,
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
            reading={
                name: getattr(options, name)
                for name in ("split_turns", "ignore_media", "skip_invalid")
            },
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _score_tasks(options: EvaluateOptions, dist_ctx: DistributedContext) -> list[dict[str, Any]]:
    """The scores of each task: a dict with `task`, `metrics` and more.

    Answers go to the file `options.answers`, which must not exist; it is created before anything is
    computed.
    """
    with ExitStack() as stack:
        with dist_ctx.raise_on_all():
            file = None
            if options.answers and dist_ctx.is_rank0:
                file = stack.enter_context(create_file(options.answers))
            tasks = [load_task(path) for path in options.tasks]
            examples = load_task(options.fewshot_file) if options.fewshot_file else None
            if options.lm_eval:
                from lmforge.serve.evaluate.lm_eval_model import run_lm_eval
        loaded = _load_on_ranks(dist_ctx, options)
        settings = TaskSettings(
            options.num_fewshot or 0,
            examples,
            options.limit,
            options.batch_size,
            options.max_tokens,
            options.stop,
        )
        results = []
        answers = []
        for task in tasks:
            result = run_task(task, loaded, dist_ctx, settings)
            answers += [{"task": task.name, **answer} for answer in result.pop("answers")]
            results.append({"model": str(loaded.path), **result})
        if options.lm_eval:
            scores = run_lm_eval(
                loaded,
                options.lm_eval,
                dist_ctx,
                include_path=options.lm_eval_include_path,
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                batch_size=options.batch_size,
                apply_chat_template=options.apply_chat_template,
            )
            results += [
                {"model": str(loaded.path), "task": name, "metrics": metrics}
                for name, metrics in scores.items()
            ]
        if file is not None:
            file.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    return results


def _print_loss(result: dict[str, Any]) -> None:
    sources = [name.removeprefix("loss") for name in result if name.startswith("loss/")]
    for source in ["", *sources]:
        tokens, num_bytes, loss, perplexity, bits_per_byte = (
            result[name + source]
            for name in ("tokens", "bytes", "loss", "perplexity", "bits_per_byte")
        )
        if source:
            title = f"  {source[1:]} ("
        else:
            title = f"{result['model']} on {result['data']} ({result['split']}, "
        print(
            f"{title}{tokens:,} tokens, {num_bytes:,} bytes of text): loss {loss:.4f}, perplexity"
            f" {perplexity:.2f}, {bits_per_byte:.4f} bits per byte"
        )


def _print_scores(results: list[dict[str, Any]]) -> None:
    table = Table(
        "task", "metric", "score", "± standard error", "questions", title=results[0]["model"]
    )
    for result in results:
        errors = result.get("standard_errors", {})
        questions = result.get("questions", "")
        for name, score in result["metrics"].items():
            if isinstance(score, int | float):
                error = f"{errors[name]:.4f}" if name in errors else ""
                table.add_row(result["task"], name, f"{score:.4f}", error, f"{questions}")
    Console().print(table)
