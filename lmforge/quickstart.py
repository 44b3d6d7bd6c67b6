"""The whole way in a few minutes: the standard library's source → tokenizer → shards → a trained model that writes.

It calls the same verbs that a user types, and prints each before it runs, so that it can be repeated by hand.
"""

import shlex
import time
from importlib import resources
from pathlib import Path
from typing import Any

from lmforge.cluster.launch import launch_local
from lmforge.config import Config, EvaluateOptions, GenerateOptions, PrepareOptions, QuickstartOptions
from lmforge.data.verbs import run_prepare
from lmforge.errors import RunFailed
from lmforge.options import parse, read_recipe


def quickstart(options: QuickstartOptions) -> int:
    """Prepare, pretrain, evaluate, draw, generate. Returns the exit status. Called again, it continues where it stopped.

    Raises Mistake and RunFailed as its parts do.
    """
    began = time.perf_counter()
    data, recipe = options.folder / "data" / "stdlib", Path(str(resources.files("lmforge") / "recipes" / "quickstart.toml"))
    words = [
        "--data.folder",
        str(data),
        "--run.folder",
        str(options.folder / "runs"),
        "--launch.processes",
        str(options.processes),
    ]
    words += ["--train.steps", str(options.steps), "--schedule.warmup_steps", str(options.steps // 10)] if options.steps else []
    words += ["--run.overwrite"] if options.overwrite else []
    config = parse(Config, words, read_recipe(recipe), str(recipe)).with_name("quickstart")
    run = config.run.folder / config.run.name

    _title("1 of 4  text → tokenizer → token shards", "prepare", "stdlib", data)
    run_prepare(PrepareOptions(source="stdlib", out=data, overwrite=options.overwrite))

    _title(f"2 of 4  pretraining, {options.processes} local ranks", "pretrain", recipe, *words)
    if options.processes > 1:
        status = launch_local(options.processes, ["pretrain", str(recipe), *words])
    else:
        from lmforge.train.stages import pretrain

        status = pretrain(config)
    if status == 1:
        raise RunFailed(f"{run}: training failed; the lines above say why")
    if status:
        return status

    _title("3 of 4  held-out files", "evaluate", run)
    from lmforge.infer.verbs import run_evaluate, run_generate

    run_evaluate(EvaluateOptions(model=run, batch_rows=8))

    _title("4 of 4  what it writes", "generate", run, options.prompt, "--seed", 0)
    run_generate(GenerateOptions(model=run, prompts=(options.prompt,), max_tokens=160, temperature=0.7, seed=0))

    print(f"\nDone in {_minutes(time.perf_counter() - began)}. The loss curve is {run / 'loss.png'}. Write more with:")
    print(f"  lmforge generate {shlex.quote(str(run))} 'class '")
    return 0


def _title(what: str, *command: Any) -> None:
    print(f"\n── {what}\n$ lmforge {shlex.join(str(word) for word in command)}", flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
