"""`lmforge run pipeline.toml`: stages in order, each from the run of the one before it;
interrupted, it resumes.

A stage is a verb with its arguments, carried out in a process of its own, as if it had been typed.
Which stages are finished is written beside the runs, so that a pipeline that is started again
begins with the first that is not.
"""

import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from lmforge.core.distributed.processes import STOP_SIGNALS, handle_signals, restore_signals
from lmforge.core.errors import EXIT_PEER_LOST, PeerLost, RunFailed, UserError
from lmforge.core.files.atomic_files import atomic_write_json
from lmforge.core.files.untrusted import quoted, read_bounded, read_json
from lmforge.core.options.load import RESUME_ARGUMENTS, STAGES
from lmforge.core.options.options import read_recipe, validate_options
from lmforge.core.options.verbs import VERBS
from lmforge.core.records.runs import Run, storage_errors
from lmforge.ops.options.running import PipelineOptions, PipelineStageOptions, RunPipelineOptions

# The pipeline says where the run of a stage is, since later stages look for it there.
RESERVED_OPTIONS = ("--run.name", "--run.folder")


@dataclass(frozen=True)
class PlannedStage:
    """A stage to be carried out: the arguments after `lmforge`, and the run that it trains, if it
    trains.
    """

    name: str
    arguments: list[str]
    run: Path | None
    recipe: Path | None = None

    @property
    def recipe_digest(self) -> str | None:
        """A hash of the recipe's content."""
        if self.recipe is None:
            return None
        return xxhash.xxh3_64_hexdigest(read_bounded(self.recipe))


def plan_stages(options: PipelineOptions, file: Path) -> list[PlannedStage]:
    """The command line of each stage.

    Raises UserError where one refers to a stage that is not before it.
    """
    runs: dict[str, Path] = {}
    stages: list[PlannedStage] = []
    for stage in options.stages:
        name = stage.name or stage.verb
        where = f"{file}: stage {name}"
        words = [_substitute_runs(word, runs, where) for word in stage.arguments]
        if stage.verb in STAGES:
            run = options.folder / f"{options.name or file.stem}-{name}"
            previous = next(reversed(runs.values()), None)
            stages.append(_plan_training(stage, name, words, run, previous, file))
            runs[name] = run
        elif stage.verb not in VERBS:
            raise UserError(f"{where}: {stage.verb}: no such verb; lmforge --help lists them")
        elif stage.recipe:
            raise UserError(f"{where}: {stage.verb} takes no recipe; give its arguments")
        else:
            stages.append(PlannedStage(name, [stage.verb, *words], None))
    return stages


def _plan_training(
    stage: PipelineStageOptions,
    name: str,
    words: list[str],
    run: Path,
    previous: Path | None,
    file: Path,
) -> PlannedStage:
    """A stage that trains: `run` is the run that it makes, `previous` the run it starts from unless
    it names a model.
    """
    where = f"{file}: stage {name}"
    if words and not words[0].startswith("--"):
        raise UserError(
            f"{where}: {words[0]}: give a recipe as `recipe`, and arguments as --section.option"
        )
    if reserved := [word for word in words if word.partition("=")[0] in RESERVED_OPTIONS]:
        raise UserError(
            f"{where}: {reserved[0]}: the pipeline says where runs are; leave it out, and give the"
            " stage a `name`, the pipeline a `folder`"
        )
    recipe = None
    if stage.recipe:
        recipe = file.parent / stage.recipe
    # Read here for its digest and its model, and then by the stage.
    if recipe is not None and recipe.is_fifo():
        raise UserError(
            f"{where}: recipe: expected a file, got a named pipe ({recipe}), which can be read only"
            " once"
        )
    model = {}
    if recipe is not None:
        model = read_recipe(recipe).get("model", {})
    if not isinstance(model, dict):
        raise UserError(f"{recipe}: model: expected a section, got {quoted(model)}")
    named = "source" in model or any(word.partition("=")[0] == "--model.source" for word in words)
    if previous and not named and "preset" in model:
        raise UserError(
            f"{where}: {recipe} sets model.preset, but this stage starts from the run of the stage"
            " before it; leave it out, or set model.source"
        )
    source = []
    if previous and not named:
        source = ["--model.source", str(previous)]
    placed = ["--run.folder", str(run.parent), "--run.name", run.name, *source, *words]
    return PlannedStage(
        name, [stage.verb, *([str(recipe)] if recipe else []), *placed], run, recipe
    )


def _substitute_runs(word: str, runs: dict[str, Path], where: str) -> str:
    def run_of(match: re.Match[str]) -> str:
        if match[1] not in runs:
            raise UserError(
                f"{where}: {match[0]}: no stage of this name trains before it; there are:"
                f" {', '.join(runs) or 'none'}"
            )
        return str(runs[match[1]])

    return re.sub(r"\{([\w.-]+)\}", run_of, word)


def run_pipeline(chosen: RunPipelineOptions) -> int:
    """Carry out the stages that are not finished yet.

    Returns 0. If interrupted, returns the exit status of the stage, or 128 + signal if that is 0.
    Raises UserError and RunFailed, and PeerLost where a stage lost a rank.
    """
    file = chosen.file
    options = validate_options(PipelineOptions, read_recipe(file), str(file))
    stages = plan_stages(options, file)
    state = _PipelineState(options.folder / f".{options.name or file.stem}.pipeline.json")
    for number, stage in enumerate(stages, start=1):
        title = f"── {number} of {len(stages)}  {stage.name}"
        if state.is_finished(stage):
            print(f"{title}: finished before", flush=True)
            continue
        where = f"{file}: stage {stage.name}"
        resumes = state.start(stage, stages[number:], where)
        record = state.records[stage.name]
        words = [*stage.arguments, *(RESUME_ARGUMENTS if resumes else [])]
        print(f"\n{title}\n$ lmforge {shlex.join(words)}", flush=True)
        status, interrupted = _run_command(words)
        if status and not interrupted:
            hint = f"`lmforge run {shlex.quote(str(file))}` continues with this stage"
            if status == 2 and resumes and "--run.overwrite" in stage.arguments:
                hint = (
                    f"its run cannot continue with these arguments; delete {stage.run} to train it"
                    " from the beginning"
                )
            error = {2: UserError, EXIT_PEER_LOST: PeerLost}.get(status, RunFailed)
            raise error(f"{where} ended with status {status}; {hint}")
        was_finished = record.arguments is not None
        if (
            not status
            and was_finished
            and _newest_checkpoint(stage.run) == record.previous_checkpoint is not None
        ):
            raise UserError(
                f"{where}: this stage was finished with other arguments, and with the new ones"
                " there is no step left to train; add --run.overwrite to train it again"
            )
        # An interrupted stage may have been finished already. A server, however, always ends by an
        # interruption, and must serve again.
        if not status and not (interrupted and stage.arguments[0] == "serve"):
            state.mark_finished(stage)
        if interrupted:
            return status or 128 + interrupted
    return 0


def _newest_checkpoint(path: Path | None) -> list[int] | None:
    """The last step that a run has saved, and when; None where it has none."""
    if path is None:
        return None
    run = Run.open(path)
    steps = run.checkpoint_steps()
    if steps:
        return [steps[-1], run.checkpoint_path(steps[-1]).stat().st_mtime_ns]
    return None


def _run_command(arguments: list[str]) -> tuple[int, int]:
    """The status of a command line, and the signal that interrupted this process, or 0.

    The signal is passed on.
    """
    child = subprocess.Popen([sys.executable, "-m", "lmforge", *arguments])
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        if number != signal.SIGINT:  # which the child has too, from a terminal
            child.send_signal(number)

    previous = handle_signals(STOP_SIGNALS, pass_on)
    try:
        status = child.wait()
    finally:
        restore_signals(previous)
    return 128 - status if status < 0 else status, received[0] if received else 0


@dataclass
class _StageRecord:
    """What is known of a stage.

    arguments, recipe_digest  what it was finished with; no arguments where it never was
    stale                     whether a stage before it has been run again since
    started_with              digest and arguments that it was started with since then
    previous_start_ns         when its run had last been started before that
    previous_checkpoint       what its run had saved last before that
    """

    arguments: list[str] | None = None
    recipe_digest: str | None = None
    stale: bool = False
    started_with: list[str | None] | None = None
    previous_start_ns: int | None = None
    previous_checkpoint: list[int] | None = None


class _PipelineState:
    """Which stages are finished, and with which arguments.

    A changed stage and those after it are no longer finished.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.records = read_json(
                path, dict[str, _StageRecord], hint="delete it; stages then see what they have done"
            )
        except FileNotFoundError:
            self.records = {}

    def is_finished(self, stage: PlannedStage) -> bool:
        record = self.records.get(stage.name)
        if record is None or record.stale:
            return False
        same = (record.arguments, record.recipe_digest) == (stage.arguments, stage.recipe_digest)
        return same and (stage.run is None or stage.run.exists())

    def start(self, stage: PlannedStage, later: list[PlannedStage], where: str) -> bool:
        """Record that a stage starts, which makes those after it stale.

        Returns whether it resumes what was interrupted, with the same arguments. Raises UserError
        where its run is stale.
        """
        record = self.records.setdefault(stage.name, _StageRecord())
        if (
            record.stale
            and stage.run is not None
            and stage.run.exists()
            and "--run.overwrite" not in stage.arguments
        ):
            raise UserError(
                f"{where}: what {stage.run} was trained from has changed since; delete this run, or"
                " add --run.overwrite to its arguments"
            )
        starts_with = [stage.recipe_digest, *stage.arguments]
        started_at = None
        if stage.run is not None:
            started_at = Run(stage.run).started_at_ns
        # It was killed before it started its run, so it still has to delete the earlier run.
        resumes = (
            stage.run is not None
            and record.started_with == starts_with
            and record.previous_start_ns != started_at
        )
        if not resumes:
            record.started_with = starts_with
            record.previous_start_ns = started_at
            record.previous_checkpoint = _newest_checkpoint(stage.run)
        for name in {each.name for each in later} & self.records.keys():
            self.records[name].stale = True
            self.records[name].started_with = None
        self._save()
        return resumes

    def mark_finished(self, stage: PlannedStage) -> None:
        self.records[stage.name] = _StageRecord(stage.arguments, stage.recipe_digest)
        self._save()

    def _save(self) -> None:
        with storage_errors(
            self._path.parent, "cannot be made a folder", "choose another `folder` of the pipeline"
        ):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(
            self._path, {name: asdict(record) for name, record in self.records.items()}
        )
