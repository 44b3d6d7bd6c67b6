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
from lmforge.config import StageConfig
from lmforge.config_post import STAGES
from lmforge.config_verbs import EvaluateOptions, GenerateOptions, PrepareOptions, QuickstartOptions
from lmforge.data.functions import HELD_OUT, TRAIN
from lmforge.data.verbs import run_prepare
from lmforge.errors import RunFailed
from lmforge.options import parse, read_recipe
from lmforge.runs import Run


@dataclass(frozen=True)
class Stage:
    """A stage of training: its verb, its recipe in lmforge/recipes, and which of its held-out metrics it is to improve."""

    verb: str
    recipe: str
    metric: str
    meaning: str
    better: str  # "lower" or "higher"


STAGES_OF_TRAINING = (
    Stage("pretrain", "quickstart", "val/bits_per_byte", "bits per byte of held-out files", "lower"),
    Stage("sft", "quickstart-sft", "val/loss", "loss of held-out functions that are asked for", "lower"),
    Stage(
        "align",
        "quickstart-align",
        "val/reward",
        "reward of held-out requests: it parses, runs, is what was asked",
        "higher",
    ),
)


def quickstart(options: QuickstartOptions) -> int:
    """Prepare, pretrain, fine-tune, align, measure. Returns the exit status. Called again, it continues where it stopped.

    Raises Mistake and RunFailed as its parts do.
    """
    began = time.perf_counter()
    data = options.folder / "data"
    _title("1 of 6  text → tokenizer → token shards", "prepare", "stdlib", data / "stdlib")
    run_prepare(PrepareOptions(source="stdlib", out=data / "stdlib", overwrite=options.overwrite))
    functions = data / "functions"
    _title("2 of 6  functions of the library, to be asked for", "prepare", "functions", functions)
    if not (functions / TRAIN).exists():
        run_prepare(PrepareOptions(source="functions", out=functions))
    words = {
        "pretrain": ["--data.folder", str(data / "stdlib")],
        "sft": ["--data.files", str(functions / TRAIN), "--data.held_out", str(functions / HELD_OUT)],
        "align": ["--data.files", str(functions / TRAIN), "--data.held_out", str(functions / HELD_OUT)],
    }
    runs: list[Path] = []
    for number, stage in enumerate(STAGES_OF_TRAINING, start=3):
        recipe = Path(str(resources.files("lmforge") / "recipes" / f"{stage.recipe}.toml"))
        more = [*words[stage.verb], "--run.folder", str(options.folder / "runs"), "--run.name", stage.recipe]
        more += ["--launch.processes", str(options.processes)]
        if runs:
            more += ["--model.source", str(runs[-1]), "--data.folder", str(data / "examples")]
        more += ["--train.steps", str(options.steps)] if options.steps else []
        more += ["--schedule.warmup_steps", str(options.steps // 10)] if options.steps and not runs else []
        more += ["--run.overwrite"] if options.overwrite else []
        config: StageConfig = parse(STAGES[stage.verb], more, read_recipe(recipe), str(recipe)).with_name(stage.recipe)
        run = config.run.folder / config.run.name
        _title(f"{number} of 6  {stage.verb}, {options.processes} local ranks", stage.verb, recipe, *more)
        if status := _train(stage.verb, config, [str(recipe), *more]):
            return status
        runs.append(run)

    base, _, last = runs
    _title("6 of 6  what the first writes, and what it was worth", "generate", base, options.prompt, "--seed", 0)
    from lmforge.infer.verbs import run_evaluate, run_generate

    run_evaluate(EvaluateOptions(model=base, batch_rows=8))
    run_generate(GenerateOptions(model=base, prompts=(options.prompt,), max_tokens=160, temperature=0.7, seed=0))

    print(f"\nDone in {_minutes(time.perf_counter() - began)}; on what no stage was trained on:\n")
    Console(highlight=False).print(_table(runs))
    print("\nTalk to it, or let it go on with code of yours:")
    print(f"  lmforge chat {shlex.quote(str(last))}")
    print(f"  lmforge generate {shlex.quote(str(base))} 'class '")
    return 0


def _train(verb: str, config: StageConfig, words: list[str]) -> int:
    if config.launch.processes > 1:
        status = launch_local(config.launch.processes, [verb, *words])
    else:
        from lmforge.train import stages

        status = getattr(stages, verb)(config)
    if status == 1:
        raise RunFailed(f"{config.run.folder / config.run.name}: training failed; the lines above say why")
    return int(status)


def _table(runs: list[Path]) -> Table:
    """What each stage was to improve, on held-out items, before it and after it."""
    table = Table("stage", "measured", "before", "after", "")
    for stage, run in zip(STAGES_OF_TRAINING, runs, strict=True):
        measured = [record[stage.metric] for record in Run(run).read_metrics() if stage.metric in record]
        before, after = measured[0], measured[-1]
        improved = after < before if stage.better == "lower" else after > before
        table.add_row(stage.verb, stage.meaning, f"{before:.3f}", f"{after:.3f}", "better" if improved else "not better")
    return table


def _title(what: str, *command: Any) -> None:
    print(f"\n── {what}\n$ lmforge {shlex.join(str(word) for word in command)}", flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
