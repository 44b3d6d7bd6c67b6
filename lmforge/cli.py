"""The verbs. Each imports its module when it is called, so that `--help` answers before torch could be imported."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lmforge import config as options
from lmforge.cluster.environment import find_place
from lmforge.errors import Mistake, RunFailed
from lmforge.options import describe, parse, read_recipe

Verb = Callable[[list[str]], int]


def main() -> None:
    """Entry of the `lmforge` command: runs a verb and ends the process with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Carry out a command line. Returns its exit status: 0, 1 for a failed run, 2 for bad input, 128 + signal."""
    debug = "--debug" in arguments
    arguments = [word for word in arguments if word != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        from lmforge import __version__

        print(f"lmforge {__version__}")
        return 0
    try:
        verb, rest = arguments[0], arguments[1:]
        if verb not in VERBS:
            raise Mistake(f"{verb}: no such verb{_nearest_verb(verb)}; lmforge --help lists them")
        return VERBS[verb][0](rest)
    except (Mistake, RunFailed) as problem:
        if debug:
            raise
        _tell(str(problem))
        return 2 if isinstance(problem, Mistake) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        if debug or find_place().ranks == 1 or _speaks():
            raise
        return 1


def _speaks() -> bool:
    if "torch" not in sys.modules:
        return find_place().first
    from lmforge.cluster.ranks import speaks_for_all

    return speaks_for_all()


def _tell(line: str) -> None:
    """One line on standard error, from one rank only."""
    if _speaks():
        print("lmforge: " + " ".join(line.split("\n")), file=sys.__stderr__, flush=True)
    else:
        time.sleep(2)  # a launcher ends all ranks when the first one leaves: let the one that speaks finish


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {meaning}" for name, (_, meaning) in VERBS.items())
    return (
        "lmforge: language-model training end to end in plain PyTorch\n\n"
        f"usage: lmforge VERB [ARGUMENTS] [--option value]\n\n{verbs}\n\n"
        "  lmforge VERB --help lists every option of a verb with its default. --debug shows where an error came from."
    )


def _nearest_verb(word: str) -> str:
    import difflib

    close = difflib.get_close_matches(word, VERBS, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _asks_for_help(arguments: list[str], usage: str, tree: type[options.Options], notes: str = "") -> bool:
    if not any(word in ("-h", "--help") for word in arguments):
        return False
    about = (tree.__doc__ or "").strip().splitlines()[0]
    print(f"{about}\n\nusage: {usage}\n{notes}\n{describe(tree)}")
    return True


def _prepare(arguments: list[str]) -> int:
    if _asks_for_help(arguments, "lmforge prepare [SOURCE] [OUT] [--option value]", options.PrepareOptions):
        return 0
    chosen = parse(options.PrepareOptions, arguments)
    from lmforge.data.verbs import run_prepare

    return run_prepare(chosen)


PRETRAIN_NOTES = """
  --dry-run    print the resolved recipe and the batch arithmetic, and stop
  --resume     auto (default: continue the run if it exists), required, or never; the same as --run.resume
"""


def _pretrain(arguments: list[str]) -> int:
    usage = "lmforge pretrain [RECIPE.toml] [--section.option value]"
    if _asks_for_help(arguments, usage, options.Config, PRETRAIN_NOTES):
        return 0
    dry = "--dry-run" in arguments
    words = _with_resume([word for word in arguments if word != "--dry-run"])
    config = load_config(words)
    if dry:
        from lmforge.show import dry_run

        print(dry_run(config))
        return 0
    if config.launch.processes > 1 and not find_place().launched:
        from lmforge.cluster.launch import launch_local

        options.batch_plan(config.train, config.data.length, config.launch.processes)
        return launch_local(config.launch.processes, ["pretrain", *words])
    from lmforge.train.stages import pretrain

    return pretrain(config)


def _with_resume(words: list[str]) -> list[str]:
    """`--resume [VALUE]` as `--run.resume VALUE`; without a value it means required."""
    if "--resume" not in words:
        return words
    at = words.index("--resume")
    if at + 1 < len(words) and words[at + 1] in ("auto", "never", "required"):
        return [*words[:at], "--run.resume", *words[at + 1 :]]
    return [*words[:at], "--run.resume", "required", *words[at + 1 :]]


def load_config(words: list[str]) -> options.Config:
    """A run's options from `[RECIPE.toml] --section.option value …`. Raises Mistake."""
    recipe, rest = (Path(words[0]), words[1:]) if words and not words[0].startswith("-") else (None, words)
    table = read_recipe(recipe) if recipe else {}
    config = parse(options.Config, rest, table, str(recipe or ""))
    return config.with_name(recipe.stem if recipe else "run")


def _evaluate(arguments: list[str]) -> int:
    if _asks_for_help(arguments, "lmforge evaluate MODEL [--option value]", options.EvaluateOptions):
        return 0
    chosen = parse(options.EvaluateOptions, arguments)
    from lmforge.infer.verbs import run_evaluate

    return run_evaluate(chosen)


def _generate(arguments: list[str]) -> int:
    if _asks_for_help(arguments, "lmforge generate MODEL [PROMPT …] [--option value]", options.GenerateOptions):
        return 0
    chosen = parse(options.GenerateOptions, arguments)
    from lmforge.infer.verbs import run_generate

    return run_generate(chosen)


def _show(arguments: list[str]) -> int:
    if _asks_for_help(arguments, "lmforge show THING", options.ShowOptions):
        return 0
    chosen = parse(options.ShowOptions, arguments)
    from lmforge.show import show

    print(show(chosen.thing))
    return 0


def _quickstart(arguments: list[str]) -> int:
    if _asks_for_help(arguments, "lmforge quickstart [--option value]", options.QuickstartOptions):
        return 0
    chosen = parse(options.QuickstartOptions, arguments)
    from lmforge.quickstart import quickstart

    return quickstart(chosen)


VERBS: dict[str, tuple[Verb, str]] = {
    "quickstart": (_quickstart, "the whole way on the Python standard library's source, in minutes"),
    "prepare": (_prepare, "text → tokenizer → token shards"),
    "pretrain": (_pretrain, "train a model on token shards, or continue a run"),
    "evaluate": (_evaluate, "loss and bits per byte on held-out documents"),
    "generate": (_generate, "text from a run, a checkpoint or a Hugging Face folder"),
    "show": (_show, "what a recipe, model, shard folder, run or checkpoint is"),
}
