"""The whole way in a few minutes: the standard library's source → tokenizer → shards → a model that writes → one that answers.

It calls the same verbs that a user types, and prints each before it runs, so that it can be repeated by hand. Each stage is
measured on what it was not trained on, before and after.
"""

import shlex
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmforge.cluster.launch import launch_local
from lmforge.config.load import load_config
from lmforge.config.verbs import EvaluateOptions, GenerateOptions, PrepareOptions, QuickstartOptions
from lmforge.data.chat.library_functions import TRAIN_FILE, VALIDATION_FILE
from lmforge.errors import RunFailed
from lmforge.runs import Run
from lmforge.verbs.prepare import run_prepare
from lmforge.verbs.table import VERBS


@dataclass(frozen=True)
class QuickstartStage:
    """A stage of training: its verb, its recipe in lmforge/recipes, and which validation metric it improves."""

    verb: str
    recipe: str
    metric: str
    description: str
    direction: str  # "lower" or "higher"


TRAINING_STAGES = (
    QuickstartStage("pretrain", "quickstart", "val/bits_per_byte", "bits per byte of validation files", "lower"),
    QuickstartStage("sft", "quickstart-sft", "val/loss", "loss of validation requests for functions", "lower"),
    QuickstartStage(
        "align",
        "quickstart-align",
        "val/reward",
        "reward of validation requests: the code parses, compiles, runs, has the requested signature",
        "higher",
    ),
)


def quickstart(options: QuickstartOptions) -> int:
    """Prepare, pretrain, fine-tune, align, measure. Returns the exit status. Called again, it continues where it stopped.

    Raises UserError and RunFailed as its parts do.
    """
    start = time.perf_counter()
    tokens, functions = options.folder / "data" / "stdlib", options.folder / "data" / "functions"
    _print_title("1 of 6  text → tokenizer → token shards", "prepare", "stdlib", tokens)
    run_prepare(PrepareOptions(source="stdlib", out=tokens, overwrite=options.overwrite))
    _print_title("2 of 6  functions of the standard library → conversations", "prepare", "functions", functions)
    if not (functions / TRAIN_FILE).exists():
        run_prepare(PrepareOptions(source="functions", out=functions))
    runs: list[Path] = []
    for number, stage in enumerate(TRAINING_STAGES, start=3):
        recipe = Path(str(resources.files("lmforge") / "recipes" / f"{stage.recipe}.toml"))
        words = [str(recipe), *_stage_arguments(stage, options, runs)]
        config = load_config(words, stage.verb)
        _print_title(f"{number} of 6  {stage.verb}, {options.processes} local ranks", stage.verb, *words)
        processes = config.launch.processes
        status = launch_local(processes, [stage.verb, *words]) if processes > 1 else VERBS[stage.verb].load()(config)
        if status == 1:
            raise RunFailed(f"{config.run.folder / config.run.name}: training failed; the lines above say why")
        if status:
            return status
        runs.append(config.run.folder / config.run.name)

    base, _, last = runs
    _print_title("6 of 6  what the first model generates, and its loss", "generate", base, options.prompt, "--seed", 0)
    from lmforge.verbs.evaluate import run_evaluate
    from lmforge.verbs.generate import run_generate

    run_evaluate(EvaluateOptions(model=base, batch_size=8))
    run_generate(GenerateOptions(model=base, prompts=(options.prompt,), max_tokens=160, temperature=0.7, seed=0))

    seconds = time.perf_counter() - start
    duration = f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
    print(f"\nDone in {duration}; on data that no stage was trained on:\n")
    Console(highlight=False).print(_results_table(runs))
    print("\nChat with it, or let it continue your code:")
    print(f"  lmforge chat {shlex.quote(str(last))}")
    print(f"  lmforge generate {shlex.quote(str(base))} 'class '")
    return 0


def _stage_arguments(stage: QuickstartStage, options: QuickstartOptions, runs: list[Path]) -> list[str]:
    """What is typed after the recipe of a stage; `runs` are those of the stages before it."""
    data = options.folder / "data"
    functions = data / "functions"
    words: list[Any] = ["--run.folder", options.folder / "runs", "--run.name", stage.recipe]
    words += ["--launch.processes", options.processes]
    if runs:
        words += ["--data.files", functions / TRAIN_FILE, "--data.validation_files", functions / VALIDATION_FILE]
        words += ["--model.source", runs[-1]]
    words += ["--data.folder", data / ("examples" if runs else "stdlib")]
    if options.steps:
        words += ["--train.steps", options.steps]
        words += [] if runs else ["--schedule.warmup_steps", options.steps // 10]
    words += ["--run.overwrite"] if options.overwrite else []
    return [str(word) for word in words]


def _results_table(runs: list[Path]) -> Table:
    """The metric of each stage before it and after it."""
    table = Table("stage", "measured", "before", "after", "")
    for stage, run in zip(TRAINING_STAGES, runs, strict=True):
        values = [record[stage.metric] for record in Run(run).read_metrics() if stage.metric in record]
        before, after = values[0], values[-1]
        improved = after < before if stage.direction == "lower" else after > before
        table.add_row(stage.verb, stage.description, f"{before:.3f}", f"{after:.3f}", "better" if improved else "not better")
    return table


def _print_title(what: str, *command: Any) -> None:
    print(f"\n── {what}\n$ lmforge {shlex.join(str(word) for word in command)}", flush=True)
