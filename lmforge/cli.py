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
from lmforge.cluster.rank_info import read_rank_info
from lmforge.config import verbs as options
from lmforge.config.options import Options, format_help, parse_options, read_recipe
from lmforge.config.post_training import STAGES, AlignConfig, RunPipelineOptions, SftConfig
from lmforge.config.run import BenchConfig, Config, StageConfig
from lmforge.errors import EXIT_PEER_LOST, PeerLost, RunFailed, UserError

StageConfigT = TypeVar("StageConfigT", bound=StageConfig)

# Set by --debug, and so handed on to the ranks that a verb starts.
DEBUG_VARIABLE = "LMFORGE_DEBUG"


def main() -> None:
    """Entry of the `lmforge` command: runs a verb and ends the process with its status."""
    exit_process(run(sys.argv[1:]))


def exit_process(status: int) -> NoReturn:
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
        os.environ[DEBUG_VARIABLE] = "1"
    debug = DEBUG_VARIABLE in os.environ
    try:
        status = _dispatch([word for word in arguments if word != "--debug"])
        sys.stdout.flush()  # while a reader that has left can still be noticed
        return status
    except (UserError, RunFailed) as problem:
        if debug:
            raise
        _print_error(str(problem))
        if isinstance(problem, PeerLost):
            return EXIT_PEER_LOST
        return 2 if isinstance(problem, UserError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone (`| head`), and nothing more can be said: not on leaving either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        if debug or _reports_errors():
            if sys.__stderr__ is not None:
                sys.stderr = sys.__stderr__  # a rank's own may be its log
            raise
        _wait_for_reporting_rank()
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"lmforge {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in VERBS:
        close = difflib.get_close_matches(name, VERBS, n=1)
        hint = f" did you mean {close[0]}?" if close else ""
        raise UserError(f"{name}: no such verb;{hint} lmforge --help lists them")
    verb = VERBS[name]
    if "-h" in rest or "--help" in rest:
        print(f"{verb.summary}\n\nusage: lmforge {name} {verb.usage}\n\n{verb.notes}{format_help(verb.options)}")
        return 0
    return verb.run(rest)


def _reports_errors() -> bool:
    """Whether this process is the one of its peers that tells the user what went wrong."""
    try:
        if "torch" not in sys.modules:
            return read_rank_info().is_rank0
        from lmforge.cluster.distributed import claim_error_reporting

        return claim_error_reporting()
    except UserError:  # what went wrong is that it cannot tell which one it is
        return True


def _print_error(line: str) -> None:
    """One line on standard error, from one rank only."""
    if _reports_errors():
        print("lmforge: " + " ".join(line.split("\n")), file=sys.__stderr__, flush=True)
    else:
        _wait_for_reporting_rank()


def _wait_for_reporting_rank() -> None:
    time.sleep(2)  # a launcher ends all ranks as soon as one has left


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "lmforge: language-model training end to end in plain PyTorch\n\n"
        f"usage: lmforge VERB [ARGUMENTS] [--option value]\n\n{verbs}\n\n"
        "lmforge VERB --help lists every option of a verb with its default. --debug shows where an error came from."
    )


def _quickstart(arguments: list[str]) -> int:
    chosen = parse_options(options.QuickstartOptions, arguments)
    from lmforge.verbs.quickstart import quickstart

    return quickstart(chosen)


def _prepare(arguments: list[str]) -> int:
    chosen = parse_options(options.PrepareOptions, arguments)
    from lmforge.verbs.prepare import run_prepare

    return run_prepare(chosen)


def _download(arguments: list[str]) -> int:
    chosen = parse_options(options.DownloadOptions, arguments)
    from lmforge.verbs.prepare import run_download

    return run_download(chosen)


def _pretrain(arguments: list[str]) -> int:
    return _train("pretrain", arguments)


def _sft(arguments: list[str]) -> int:
    return _train("sft", arguments)


def _align(arguments: list[str]) -> int:
    return _train("align", arguments)


def _train(verb: str, arguments: list[str]) -> int:
    """Carry out a stage of training, here or on ranks that are started for it."""
    dry = "--dry-run" in arguments
    arguments = [word for word in arguments if word != "--dry-run"]
    config = load_config(arguments, verb)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0:
        config = config.again()
    if dry:
        from lmforge.verbs.show import dry_run

        print(dry_run(config))
        return 0
    if not read_rank_info().launched and config.launch.processes > 1:
        from lmforge.cluster.launch import launch_local
        from lmforge.parallel.dims import plan_batches
        from lmforge.runs import Run

        plan_batches(config, config.launch.processes)
        run = Run.from_config(config)
        before = run.started_at_ns
        return launch_local(
            config.launch.processes,
            [verb, *arguments],
            max_restarts=config.launch.max_restarts,
            # What was to be deleted has been.
            restart_arguments=["--run.overwrite", "false", "--run.resume", "auto"],
            has_begun=lambda: run.started_at_ns != before,
        )
    from lmforge.stages import run as stages

    carry_out: Callable[[StageConfig], int] = getattr(stages, verb)
    return carry_out(config)


def load_config(arguments: list[str], verb: str = "pretrain") -> Any:
    """The options of a verb that trains, from `[RECIPE.toml] --section.option value …`. Raises UserError."""
    if verb == "align":
        arguments = [re.sub(r"^--method(?==|$)", "--align.method", word) for word in arguments]
    return _parse_config(STAGES[verb], arguments)


def _parse_config(config_class: type[StageConfigT], arguments: list[str]) -> StageConfigT:
    recipe, rest = (Path(arguments[0]), arguments[1:]) if arguments and not arguments[0].startswith("-") else (None, arguments)
    table = read_recipe(recipe) if recipe else {}
    rest = [re.sub(r"^--deterministic(?==|$)", "--train.deterministic", word) for word in _expand_resume(rest)]
    config = parse_options(config_class, rest, table, str(recipe or ""))
    return config.with_name(recipe.stem if recipe else "run")


def _expand_resume(arguments: list[str]) -> list[str]:
    """`--resume [VALUE]` spelled out as `--run.resume VALUE`; without a value it means required."""
    for at, word in enumerate(arguments):
        if word.partition("=")[0] == "--resume":
            bare = word == "--resume" and (at + 1 == len(arguments) or arguments[at + 1].startswith("--"))
            spelled = [word.replace("--resume", "--run.resume", 1), *(["required"] if bare else [])]
            return [*arguments[:at], *spelled, *arguments[at + 1 :]]
    return arguments


def _run(arguments: list[str]) -> int:
    chosen = parse_options(RunPipelineOptions, arguments)
    from lmforge.verbs.pipeline import run_pipeline

    return run_pipeline(chosen.file, VERBS)


def _evaluate(arguments: list[str]) -> int:
    chosen = parse_options(options.EvaluateOptions, arguments)
    if not read_rank_info().launched and chosen.processes > 1:
        from lmforge.cluster.launch import launch_local

        return launch_local(chosen.processes, ["evaluate", *arguments])
    from lmforge.verbs.evaluate import run_evaluate

    return run_evaluate(chosen)


def _generate(arguments: list[str]) -> int:
    chosen = parse_options(options.GenerateOptions, arguments)
    from lmforge.verbs.evaluate import run_generate

    return run_generate(chosen)


def _chat(arguments: list[str]) -> int:
    chosen = parse_options(options.ChatOptions, arguments)
    from lmforge.verbs.chat import run_chat

    return run_chat(chosen)


def _serve(arguments: list[str]) -> int:
    chosen = parse_options(options.ServeOptions, arguments)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise UserError(f"serve: needs {problem.name}, which is not installed; pip install 'lmforge[serve]'") from None
    from lmforge.verbs.serve import run_serve

    return run_serve(chosen)


def _export(arguments: list[str]) -> int:
    chosen = parse_options(options.ExportOptions, arguments)
    from lmforge.verbs.export import run_export

    return run_export(chosen)


def _import(arguments: list[str]) -> int:
    chosen = parse_options(options.ImportOptions, arguments)
    from lmforge.verbs.import_model import run_import

    return run_import(chosen)


def _bench(arguments: list[str]) -> int:
    arguments = [re.sub(r"^--(sweep|trace)(?==|$)", r"--bench.\1", word) for word in arguments]
    config = _parse_config(BenchConfig, arguments)
    if not read_rank_info().launched and config.launch.processes > 1 and not config.bench.sweep:
        from lmforge.cluster.launch import launch_local
        from lmforge.parallel.dims import plan_batches

        plan_batches(config, config.launch.processes)

        return launch_local(config.launch.processes, ["bench", *arguments])
    from lmforge.bench.step_timing import bench

    return bench(config, arguments)


def _doctor(arguments: list[str]) -> int:
    chosen = parse_options(options.DoctorOptions, arguments)
    if not read_rank_info().launched and chosen.processes > 1:
        from lmforge.cluster.launch import launch_local

        return launch_local(chosen.processes, ["doctor", *arguments])
    from lmforge.bench.doctor import doctor

    return doctor(chosen)


def _show(arguments: list[str]) -> int:
    chosen = parse_options(options.ShowOptions, arguments)
    of_examples = chosen.model_dump(include={"mask", "format", "fields", "apply_chat_template"}, exclude_defaults=True)
    if of_examples and chosen.tokenizer is None:
        raise UserError(f"show: --{next(iter(of_examples))} is for `lmforge show data FILE --tokenizer MODEL` alone")
    if chosen.thing == "data" and chosen.of is not None:
        from lmforge.verbs.show_data import ExampleReader, show_examples, show_samples

        if chosen.tokenizer is not None:
            print(show_examples(chosen.of, chosen.tokenizer, ExampleReader(**of_examples), chosen.samples))
        else:
            print(show_samples(chosen.of, chosen.samples))
        return 0
    if chosen.of is not None or chosen.samples is not None or chosen.tokenizer is not None:
        raise UserError("show: a second THING, --samples and --tokenizer are for `lmforge show data` alone")
    from lmforge.verbs.show import show

    print(show(chosen.thing))
    return 0


@dataclass(frozen=True)
class Verb:
    """What a verb does, how it is called, what it takes and what carries it out."""

    summary: str
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
