"""All stages in a few minutes: text → tokenizer → shards → a pretrained model → one that answers.

The text is the standard library's source. The verbs that a user types are called, and each is
printed before it runs, so that it can be repeated by hand. Each stage is measured on validation
data, before and after. The end of pretraining runs twice from the same checkpoint, in one process
and under FSDP2 on two, and the losses are compared.
"""

import shlex
import shutil
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lmforge.core.distributed.launch import launch_local
from lmforge.core.errors import RunFailed, typed_command
from lmforge.core.files.atomic_files import atomic_folder
from lmforge.core.options.load import STAGES, parse_config
from lmforge.core.options.verbs import VERBS
from lmforge.core.records.runs import Run
from lmforge.lab.bench.bounds import bound_of_splits, relative_difference
from lmforge.ops.options.running import QuickstartOptions
from lmforge.serve.options.models import EvaluateOptions, GenerateOptions
from lmforge.text.chat.library_functions import TRAIN_FILE, VALIDATION_FILE
from lmforge.text.options.prepare import PrepareOptions
from lmforge.text.verbs.prepare import run_prepare


@dataclass(frozen=True)
class QuickstartStage:
    """A stage of training: its verb, its recipe in lmforge/recipes, and the metric it improves."""

    verb: str
    recipe: str
    metric: str
    description: str
    direction: str  # "lower" or "higher"


TRAINING_STAGES = (
    QuickstartStage(
        "pretrain",
        "quickstart",
        "val/bits_per_byte",
        "bits per byte of all validation files",
        "lower",
    ),
    QuickstartStage(
        "sft", "quickstart-sft", "val/loss", "loss of validation requests for functions", "lower"
    ),
    QuickstartStage(
        "align",
        "quickstart-align",
        "val/reward",
        "reward of validation requests: the code parses, compiles, runs, has the requested"
        " signature",
        "higher",
    ),
)


STEPS_CONTINUED = 50
# With so few steps the purpose is to try all stages, so the batches of rollouts and the
# measurements are small.
TRIAL_STEPS = 10
TRIAL_SEQUENCES = 8
TRIAL_SFT_BATCH_SIZE = 2
TRIAL_MAX_TOKENS = 16


def quickstart(options: QuickstartOptions) -> int:
    """Prepare, pretrain, fine-tune, align, measure.

    Returns the exit status. Called again, it continues where it stopped.

    Raises UserError and RunFailed as its parts do.
    """
    start = time.perf_counter()
    tokens = options.folder / "data" / "stdlib"
    functions = options.folder / "data" / "functions"
    _print_title("1 of 7  text → tokenizer → token shards", "prepare", "stdlib", tokens)
    run_prepare(PrepareOptions(source="stdlib", out=tokens, overwrite=options.overwrite))
    _print_title(
        "2 of 7  functions of the standard library → conversations",
        "prepare",
        "functions",
        functions,
    )
    if not (functions / TRAIN_FILE).exists():
        run_prepare(PrepareOptions(source="functions", out=functions))
    # The fastest on one machine: a process for each GPU, or one that uses all cores.
    processes = options.processes or max(1, torch.cuda.device_count())
    runs: list[Path] = []
    number = 3
    for stage in TRAINING_STAGES:
        words = [*_stage_arguments(stage, options, runs), "--launch.processes", str(processes)]
        runs.append(
            _train(f"{number} of 7  {stage.verb}, {_count_processes(processes)}", stage, words)
        )
        if stage.verb == "pretrain":
            number += 1
            sharded, begun = _continue_sharded(
                f"{number} of 7  the same run under FSDP2", stage, options, runs[0]
            )
            print(f"\nThe same run from its checkpoint at step {begun} on:\n")
            Console(highlight=False).print(
                _comparison_table(runs[0], sharded, begun, _count_processes(processes))
            )
        number += 1

    base, _, last = runs
    sequences = None
    max_tokens = 160
    words = []
    if _is_trial(options):
        sequences = TRIAL_SEQUENCES
        max_tokens = TRIAL_MAX_TOKENS
        words = ["--sequences", str(sequences)]
    _print_title(
        "7 of 7  the first model: its loss on validation files, and what it generates",
        "evaluate",
        base,
        *words,
    )
    from lmforge.serve.verbs.evaluate import run_evaluate
    from lmforge.serve.verbs.generate import run_generate

    run_evaluate(EvaluateOptions(model=base, sequences=sequences))
    generated = GenerateOptions(
        model=base, prompts=(options.prompt,), max_tokens=max_tokens, temperature=0.7, seed=0
    )
    _print_command(
        "generate",
        base,
        options.prompt,
        "--max_tokens",
        max_tokens,
        "--temperature",
        0.7,
        "--seed",
        0,
    )
    run_generate(generated)

    seconds = time.perf_counter() - start
    duration = f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
    print(f"\nDone in {duration}; on data that no stage was trained on:\n")
    Console(highlight=False).print(_results_table(runs))
    print("\nChat with it, or let it continue your code:")
    print(f"  {typed_command()} chat {shlex.quote(str(last))}")
    print(f"  {typed_command()} generate {shlex.quote(str(base))} 'class '")
    return 0


def _train(title: str, stage: QuickstartStage, words: list[str]) -> Path:
    """Run a training verb as typed, on ranks that are started for it where it asks for several.

    Returns its run's directory.

    Raises UserError or RunFailed where it did not end well.
    """
    recipe = str(resources.files("lmforge") / "recipes" / f"{stage.recipe}.toml")
    words = [recipe, *words]
    config = parse_config(STAGES[stage.verb], words)
    _print_title(title, stage.verb, *words)
    processes = config.launch.processes
    if processes > 1:
        status = launch_local(processes, [stage.verb, *words])
    else:
        status = VERBS[stage.verb].load()(config)
    path: Path = config.run.folder / config.run.name
    if status:
        reason = "lmforge quickstart continues from here"
        if status < 128:
            reason = "the lines above say why"
        failure = RunFailed(f"{path}: training ended with status {status}; {reason}")
        failure.exit_status = status
        raise failure
    return path


def _continue_sharded(
    title: str, stage: QuickstartStage, options: QuickstartOptions, base: Path
) -> tuple[Path, int]:
    """Copy the run as it was at its last checkpoint but one, and train the copy under FSDP2.

    It is trained to the end. Returns the copy and the step of that checkpoint.
    """
    run = Run(base)
    copy = Run(base.with_name(f"{base.name}-fsdp2"))
    if options.overwrite:
        copy.delete()
    if copy.exists():  # the run may have been trained further since
        begun = copy.checkpoint_steps()[0]
    else:
        begun = run.checkpoint_steps()[-2]
        with atomic_folder(copy.path, replace=True) as folder:
            shutil.copy(run.recipe_path, folder)
            shutil.copytree(run.checkpoint_path(begun), Run(folder).checkpoint_path(begun))
    # NCCL takes no two ranks on one GPU.
    processes = 1 if torch.cuda.device_count() == 1 else 2
    words = _stage_arguments(stage, options, [], name=copy.path.name)
    words += ["--run.resume", "required", "--run.overwrite", "false", "--parallel.engine", "fsdp2"]
    words += ["--launch.processes", str(processes), "--train.compile", "off"]
    return _train(f"{title}, {_count_processes(processes)}, from step {begun}", stage, words), begun


def _stage_arguments(
    stage: QuickstartStage, options: QuickstartOptions, runs: list[Path], name: str = ""
) -> list[str]:
    """The words after the recipe of a stage; `runs` are those of the stages before it."""
    data = options.folder / "data"
    functions = data / "functions"
    words: list[Any] = ["--run.folder", options.folder / "runs", "--run.name", name or stage.recipe]
    if runs:
        words += ["--data.files", functions / TRAIN_FILE]
        words += ["--data.validation_files", functions / VALIDATION_FILE]
        words += ["--model.source", runs[-1], "--data.folder", data / "examples"]
    else:
        words += ["--data.folder", data / "stdlib"]
    if options.steps:
        words += ["--train.steps", options.steps]
    if options.steps and not runs:
        # A checkpoint before the last one, for the comparison.
        every = max(options.steps // 2, options.steps - STEPS_CONTINUED)
        words += ["--schedule.warmup_steps", options.steps // 10]
        words += ["--checkpoint.every_steps", every]
    if _is_trial(options):
        words += ["--validation.sequences", TRIAL_SEQUENCES]
        sizes = {"sft": TRIAL_SFT_BATCH_SIZE, "align": TRIAL_SEQUENCES}
        if stage.verb in sizes:
            words += ["--train.global_batch_size", sizes[stage.verb]]
    if options.overwrite:
        words.append("--run.overwrite")
    return [str(word) for word in words]


def _is_trial(options: QuickstartOptions) -> bool:
    return options.steps is not None and options.steps <= TRIAL_STEPS


def _count_processes(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def _comparison_table(base: Path, sharded: Path, begun: int, processes: str) -> Table:
    """The losses of both runs after their common checkpoint, with a verdict for each.

    It says whether they differ by less than the bound of splits.
    """
    config = Run(base).load_config()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    bound = bound_of_splits(config.train.dtype, device_type).loss
    table = Table("step", "measured", processes, "FSDP2", "difference", "")
    metrics_of_base = {record["step"]: record for record in Run(base).read_metrics()}
    metrics_of_copy = {record["step"]: record for record in Run(sharded).read_metrics()}
    for step, record in metrics_of_base.items():
        if step <= begun or step not in metrics_of_copy:
            continue
        for name in ("loss", "val/loss"):
            if name in record:
                ours = record[name]
                theirs = metrics_of_copy[step][name]
                difference = relative_difference(theirs, ours)
                verdict = f"equal within {bound:g}" if difference <= bound else "NOT EQUAL"
                table.add_row(
                    str(step), name, f"{ours:.6f}", f"{theirs:.6f}", f"{difference:.1e}", verdict
                )
    return table


def _results_table(runs: list[Path]) -> Table:
    """The metric of each stage before it and after it, as its validation measured it."""
    table = Table("stage", "measured", "before", "after", "")
    for stage, run in zip(TRAINING_STAGES, runs, strict=True):
        values = [
            record[stage.metric] for record in Run(run).read_metrics() if stage.metric in record
        ]
        before = values[0]
        after = values[-1]
        improvement = after - before
        if stage.direction == "lower":
            improvement = before - after
        table.add_row(
            stage.verb,
            stage.description,
            f"{before:.3f}",
            f"{after:.3f}",
            "better" if improvement > 0 else "not better",
        )
    return table


def _print_title(what: str, *command: Any) -> None:
    print(f"\n── {what}")
    _print_command(*command)


def _print_command(*command: Any) -> None:
    print(f"$ lmforge {shlex.join(str(word) for word in command)}", flush=True)
