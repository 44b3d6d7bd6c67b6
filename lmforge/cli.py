"""The verbs. Each imports its module when it is called, so that `--help` answers before torch could be imported."""

import atexit
import difflib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lmforge import __version__
from lmforge import config_verbs as options
from lmforge.cluster.environment import find_place
from lmforge.config import BenchConfig, Config, StageConfig
from lmforge.config_post import STAGES, AlignConfig, RunPipelineOptions, SftConfig
from lmforge.errors import LOST, Mistake, PeerLost, RunFailed
from lmforge.options import Options, describe, parse, read_recipe

Recipe = TypeVar("Recipe", bound=StageConfig)

# Set by --debug, and so handed on to the ranks that a verb starts.
DEBUG = "LMFORGE_DEBUG"


def main() -> None:
    """Entry of the `lmforge` command: runs a verb and ends the process with its status."""
    leave(run(sys.argv[1:]))


def leave(status: int) -> NoReturn:
    """End the process.

    Where ranks have talked to each other, without taking down the interpreter: threads of torch that free a tensor
    meanwhile ask for a lock that is gone, and now and then a rank died of it (SIGABRT) after all was done and saved.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or "RANK" not in os.environ:
        sys.exit(status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def run(arguments: list[str]) -> int:
    """Carry out a command line. Returns its exit status: 0, 1 for a failed run, 2 for bad input, 75 for a lost rank,
    128 + signal."""
    if "--debug" in arguments:
        os.environ[DEBUG] = "1"
    debug = DEBUG in os.environ
    try:
        status = _carry_out([word for word in arguments if word != "--debug"])
        sys.stdout.flush()  # while a reader that has left can still be noticed
        return status
    except (Mistake, RunFailed) as problem:
        if debug:
            raise
        _tell(str(problem))
        if isinstance(problem, PeerLost):
            return LOST
        return 2 if isinstance(problem, Mistake) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone (`| head`), and nothing more can be said: not on leaving either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        if debug or _speaks():
            if sys.__stderr__ is not None:
                sys.stderr = sys.__stderr__  # a rank's own may be its log
            raise
        _let_the_one_that_speaks_finish()
        return 1


def _carry_out(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"lmforge {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f" did you mean {close[0]}?" if close else ""
        raise Mistake(f"{name}: no such verb;{hint} lmforge --help lists them")
    verb = VERBS[name]
    if "-h" in rest or "--help" in rest:
        print(f"{verb.meaning}\n\nusage: lmforge {name} {verb.usage}\n\n{verb.notes}{describe(verb.options)}")
        return 0
    return verb.run(rest)


def _speaks() -> bool:
    """Whether this process is the one of its peers that tells the user what went wrong."""
    try:
        if "torch" not in sys.modules:
            return find_place().first
        from lmforge.cluster.ranks import speaks_for_all

        return speaks_for_all()
    except Mistake:  # what went wrong is that it cannot tell which one it is
        return True


def _tell(line: str) -> None:
    """One line on standard error, from one rank only."""
    if _speaks():
        print("lmforge: " + " ".join(line.split("\n")), file=sys.__stderr__, flush=True)
    else:
        _let_the_one_that_speaks_finish()


def _let_the_one_that_speaks_finish() -> None:
    time.sleep(2)  # a launcher ends all ranks as soon as one has left


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.meaning}" for name, verb in VERBS.items())
    return (
        "lmforge: language-model training end to end in plain PyTorch\n\n"
        f"usage: lmforge VERB [ARGUMENTS] [--option value]\n\n{verbs}\n\n"
        "lmforge VERB --help lists every option of a verb with its default. --debug shows where an error came from."
    )


def _quickstart(words: list[str]) -> int:
    chosen = parse(options.QuickstartOptions, words)
    from lmforge.quickstart import quickstart

    return quickstart(chosen)


def _prepare(words: list[str]) -> int:
    chosen = parse(options.PrepareOptions, words)
    from lmforge.data.verbs import run_prepare

    return run_prepare(chosen)


def _download(words: list[str]) -> int:
    chosen = parse(options.DownloadOptions, words)
    from lmforge.data.verbs import run_download

    return run_download(chosen)


def _pretrain(words: list[str]) -> int:
    return _train("pretrain", words)


def _sft(words: list[str]) -> int:
    return _train("sft", words)


def _align(words: list[str]) -> int:
    return _train("align", words)


def _train(verb: str, words: list[str]) -> int:
    """Carry out a stage of training, here or on ranks that are started for it."""
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    config = load_config(words, verb)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0:
        config = config.again()
    if dry:
        from lmforge.show import dry_run

        print(dry_run(config))
        return 0
    if not find_place().launched and config.launch.processes > 1:
        from lmforge.cluster.launch import launch_local
        from lmforge.parallel.mesh import plan_batches
        from lmforge.runs import Run

        plan_batches(config, config.launch.processes)
        run = Run.of(config)
        before = run.begun_at
        return launch_local(
            config.launch.processes,
            [verb, *words],
            restarts=config.launch.restarts,
            # What was to be deleted has been.
            again=["--run.overwrite", "false", "--run.resume", "auto"],
            begun=lambda: run.begun_at != before,
        )
    from lmforge.train import stages

    carry_out: Callable[[StageConfig], int] = getattr(stages, verb)
    return carry_out(config)


def load_config(words: list[str], verb: str = "pretrain") -> Any:
    """The options of a verb that trains, from `[RECIPE.toml] --section.option value …`. Raises Mistake."""
    if verb == "align":
        words = [re.sub(r"^--method(?==|$)", "--align.method", word) for word in words]
    return _load(STAGES[verb], words)


def _load(tree: type[Recipe], words: list[str]) -> Recipe:
    recipe, rest = (Path(words[0]), words[1:]) if words and not words[0].startswith("-") else (None, words)
    table = read_recipe(recipe) if recipe else {}
    rest = [re.sub(r"^--deterministic(?==|$)", "--train.deterministic", word) for word in _with_resume(rest)]
    config = parse(tree, rest, table, str(recipe or ""))
    return config.with_name(recipe.stem if recipe else "run")


def _with_resume(words: list[str]) -> list[str]:
    """`--resume [VALUE]` spelled out as `--run.resume VALUE`; without a value it means required."""
    for at, word in enumerate(words):
        if word.partition("=")[0] == "--resume":
            bare = word == "--resume" and (at + 1 == len(words) or words[at + 1].startswith("--"))
            spelled = [word.replace("--resume", "--run.resume", 1), *(["required"] if bare else [])]
            return [*words[:at], *spelled, *words[at + 1 :]]
    return words


def _run(words: list[str]) -> int:
    chosen = parse(RunPipelineOptions, words)
    from lmforge.pipeline import run_pipeline

    return run_pipeline(chosen.file, VERBS)


def _evaluate(words: list[str]) -> int:
    chosen = parse(options.EvaluateOptions, words)
    if not find_place().launched and chosen.processes > 1:
        from lmforge.cluster.launch import launch_local

        return launch_local(chosen.processes, ["evaluate", *words])
    from lmforge.infer.verbs import run_evaluate

    return run_evaluate(chosen)


def _generate(words: list[str]) -> int:
    chosen = parse(options.GenerateOptions, words)
    from lmforge.infer.verbs import run_generate

    return run_generate(chosen)


def _chat(words: list[str]) -> int:
    chosen = parse(options.ChatOptions, words)
    from lmforge.infer.chat import run_chat

    return run_chat(chosen)


def _serve(words: list[str]) -> int:
    chosen = parse(options.ServeOptions, words)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise Mistake(f"serve: needs {problem.name}, which is not installed; pip install 'lmforge[serve]'") from None
    from lmforge.infer.serve import run_serve

    return run_serve(chosen)


def _export(words: list[str]) -> int:
    chosen = parse(options.ExportOptions, words)
    from lmforge.infer.export import run_export

    return run_export(chosen)


def _import(words: list[str]) -> int:
    chosen = parse(options.ImportOptions, words)
    from lmforge.infer.convert import run_import

    return run_import(chosen)


def _bench(words: list[str]) -> int:
    words = [re.sub(r"^--(sweep|trace)(?==|$)", r"--bench.\1", word) for word in words]
    config = _load(BenchConfig, words)
    if not find_place().launched and config.launch.processes > 1 and not config.bench.sweep:
        from lmforge.cluster.launch import launch_local
        from lmforge.parallel.mesh import plan_batches

        plan_batches(config, config.launch.processes)

        return launch_local(config.launch.processes, ["bench", *words])
    from lmforge.train.bench import bench

    return bench(config, words)


def _doctor(words: list[str]) -> int:
    chosen = parse(options.DoctorOptions, words)
    if not find_place().launched and chosen.processes > 1:
        from lmforge.cluster.launch import launch_local

        return launch_local(chosen.processes, ["doctor", *words])
    from lmforge.doctor import doctor

    return doctor(chosen)


def _show(words: list[str]) -> int:
    chosen = parse(options.ShowOptions, words)
    of_examples = chosen.model_dump(include={"mask", "format", "fields", "as_chat"}, exclude_defaults=True)
    if of_examples and chosen.tokenizer is None:
        raise Mistake(f"show: --{next(iter(of_examples))} is for `lmforge show data FILE --tokenizer MODEL` alone")
    if chosen.thing == "data" and chosen.of is not None:
        from lmforge.samples import Reader, show_examples, show_samples

        if chosen.tokenizer is not None:
            print(show_examples(chosen.of, chosen.tokenizer, Reader(**of_examples), chosen.samples))
        else:
            print(show_samples(chosen.of, chosen.samples))
        return 0
    if chosen.of is not None or chosen.samples is not None or chosen.tokenizer is not None:
        raise Mistake("show: a second THING, --samples and --tokenizer are for `lmforge show data` alone")
    from lmforge.show import show

    print(show(chosen.thing))
    return 0


@dataclass(frozen=True)
class Verb:
    """What a verb does, how it is called, what it takes and what carries it out."""

    meaning: str
    usage: str
    options: type[Options]
    run: Callable[[list[str]], int]
    notes: str = ""


TRAINING_NOTES = """\
  --dry-run           print the resolved recipe and the batch arithmetic, and stop
  --resume [VALUE]    the same as --run.resume; without a value, required
  --deterministic     the same as --train.deterministic
"""
VERBS = {
    "quickstart": Verb(
        "the whole way on the Python standard library's source, in minutes",
        "[--option value]",
        options.QuickstartOptions,
        _quickstart,
    ),
    "prepare": Verb("text → tokenizer → token shards", "[SOURCE] [OUT] [--option value]", options.PrepareOptions, _prepare),
    "pretrain": Verb(
        "train a model on token shards, or continue a run",
        "[RECIPE.toml] [--section.option value]",
        Config,
        _pretrain,
        TRAINING_NOTES,
    ),
    "sft": Verb(
        "fine-tune a model on conversations, all of it or by adapters",
        "[RECIPE.toml] [--section.option value]",
        SftConfig,
        _sft,
        TRAINING_NOTES,
    ),
    "align": Verb(
        "teach a model what is preferred, by pairs, judgements or rewards",
        "[RECIPE.toml] --method dpo|ipo|kto|orpo|simpo|grpo [--section.option value]",
        AlignConfig,
        _align,
        TRAINING_NOTES,
    ),
    "run": Verb("a pipeline: stages in order, each from the last one's run", "PIPELINE.toml", RunPipelineOptions, _run),
    "evaluate": Verb(
        "loss and bits per byte on held-out documents", "MODEL [--option value]", options.EvaluateOptions, _evaluate
    ),
    "generate": Verb(
        "text from a run, a checkpoint or a Hugging Face folder",
        "MODEL [PROMPT …] [--option value]",
        options.GenerateOptions,
        _generate,
    ),
    "chat": Verb("a conversation with a model, in the terminal", "MODEL [--option value]", options.ChatOptions, _chat),
    "serve": Verb(
        "an OpenAI-compatible API, and a page to chat on",
        "MODEL [MODEL …] [--option value]",
        options.ServeOptions,
        _serve,
    ),
    "export": Verb(
        "a checkpoint as a Hugging Face folder, in bounded memory", "MODEL OUT [--option value]", options.ExportOptions, _export
    ),
    "import": Verb(
        "another trainer's checkpoint as a Hugging Face folder", "SOURCE OUT [--option value]", options.ImportOptions, _import
    ),
    "download": Verb(
        "a model of the Hugging Face hub, for hosts without a network",
        "NAME [FOLDER] [--revision REVISION]",
        options.DownloadOptions,
        _download,
    ),
    "bench": Verb(
        "what a step of a recipe costs: speed, memory, phases; with --sweep, of many",
        "[RECIPE.toml] [--section.option value] [--sweep section.option=value,value …] [--trace FILE]",
        BenchConfig,
        _bench,
    ),
    "doctor": Verb(
        "is this machine fit: every strategy compared with one process",
        "--parity [--processes N]",
        options.DoctorOptions,
        _doctor,
    ),
    "show": Verb("what a recipe, model, shard folder, run or checkpoint is", "THING", options.ShowOptions, _show),
}
