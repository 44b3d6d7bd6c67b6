"""`lmforge run pipeline.toml`: stages in order, each from the last one's run, going on where they stopped.

A stage is a verb with its words, carried out in a process of its own, as if it had been typed. What was finished is
written beside the runs, so that a pipeline that is started again begins with the stage that was not.
"""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import model_validator

from lmforge.atomic_files import atomic_write_text
from lmforge.config.options import Options, option, read_recipe, validate_options
from lmforge.config.post_training import STAGES
from lmforge.errors import EXIT_PEER_LOST, PeerLost, RunFailed, UserError
from lmforge.runs import Run

TRAINING_VERBS = tuple(stage for stage in STAGES if stage is not None)
# Where the run of a stage is: the pipeline's to say, for later stages look for it there.
RESERVED_OPTIONS = ("--run.name", "--run.folder")
# What a stage that goes on is told, whatever its words and recipe say: what was to be deleted has been.
RESUME_ARGUMENTS = ["--run.overwrite", "false", "--run.resume", "auto"]


class PipelineStageOptions(Options):
    """One stage: a verb as it is typed."""

    verb: str = option(..., "the verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(None, "what later stages call its run by, as {NAME} (default: the verb)")
    recipe: Path | None = option(None, "recipe of a verb that trains, relative to the pipeline's file")
    arguments: tuple[str, ...] = option((), "what else is typed; {NAME} stands for the run of an earlier stage")


class PipelineOptions(Options):
    """A pipeline.toml: where its runs are, and [[stages]]."""

    name: str | None = option(None, "its name; runs are FOLDER/NAME-STAGE (default: the file's)")
    folder: Path = option(Path("runs"), "folder that holds the runs")
    stages: tuple[PipelineStageOptions, ...] = option(..., "[[stages]], in order")

    @model_validator(mode="after")
    def _names_differ(self) -> "PipelineOptions":
        names = [stage.name or stage.verb for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"stages: two are called {name}; give each a name of its own")
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"stages: {name!r} is no name; use letters, digits, dots and dashes")
        return self


@dataclass(frozen=True)
class PlannedStage:
    """A stage ready to be carried out: what is typed after `lmforge`, and the run that it trains, if it does."""

    name: str
    arguments: list[str]
    run: Path | None
    recipe: Path | None = None

    @property
    def recipe_digest(self) -> str | None:
        """A hash of what its recipe says."""
        return None if self.recipe is None else xxhash.xxh3_64_hexdigest(self.recipe.read_bytes())


def plan_stages(options: PipelineOptions, file: Path, verbs: Collection[str]) -> list[PlannedStage]:
    """What is typed for each stage; `verbs` are those there are. Raises UserError where one refers to a stage that does not come
    before it."""
    pipeline = options.name or file.stem
    runs: dict[str, Path] = {}
    stages: list[PlannedStage] = []
    for stage in options.stages:
        name = stage.name or stage.verb
        words = [_substitute_runs(word, runs, f"{file}: stage {name}") for word in stage.arguments]
        run = recipe = None
        if stage.verb in TRAINING_VERBS:
            if words and not words[0].startswith("--"):
                raise UserError(f"{file}: stage {name}: {words[0]}: give a recipe as `recipe`, and words as --section.option")
            if placed := [word for word in words if word.partition("=")[0] in RESERVED_OPTIONS]:
                raise UserError(
                    f"{file}: stage {name}: {placed[0]}: the pipeline says where runs are; leave it out, and give the stage a"
                    " `name`, the pipeline a `folder`"
                )
            run = options.folder / f"{pipeline}-{name}"
            last = [stages[at].run for at in range(len(stages)) if stages[at].run]
            recipe = file.parent / stage.recipe if stage.recipe else None
            given = any(word.partition("=")[0] == "--model.source" for word in words)
            model = read_recipe(recipe).get("model", {}) if recipe is not None else {}
            given |= "source" in model
            if last and not given and "preset" in model:
                raise UserError(
                    f"{file}: stage {name}: {recipe} names a model.preset, and it would go on from the stage before it"
                )
            begin = ["--model.source", str(last[-1])] if last and not given else []
            words = [
                *([str(recipe)] if recipe else []),
                "--run.folder",
                str(options.folder),
                "--run.name",
                run.name,
                *begin,
                *words,
            ]
            runs[name] = run
        elif stage.verb not in verbs:
            raise UserError(f"{file}: stage {name}: {stage.verb}: no such verb; lmforge --help lists them")
        elif stage.recipe:
            raise UserError(f"{file}: stage {name}: {stage.verb} takes no recipe; give its words")
        stages.append(PlannedStage(name, [stage.verb, *words], run, recipe))
    return stages


def _substitute_runs(word: str, runs: dict[str, Path], where: str) -> str:
    def run_of(found: re.Match[str]) -> str:
        if found[1] not in runs:
            there = ", ".join(runs) or "none"
            raise UserError(f"{where}: {found[0]}: no stage of this name trains before it; there are: {there}")
        return str(runs[found[1]])

    return re.sub(r"\{([\w.-]+)\}", run_of, word)


def run_pipeline(file: Path, verbs: Collection[str]) -> int:
    """Carry out the stages that are not finished yet.

    Returns 0, or where it was asked to stop what the stage ended with, 128 + signal if that was 0. Raises UserError and
    RunFailed, PeerLost where a stage says that a rank was lost.
    """
    options = validate_options(PipelineOptions, read_recipe(file), str(file))
    stages = plan_stages(options, file, verbs)
    done = _PipelineState(options.folder / f".{options.name or file.stem}.pipeline.json")
    for number, stage in enumerate(stages, start=1):
        title = f"── {number} of {len(stages)}  {stage.name}"
        if done.is_finished(stage):
            print(f"{title}: finished before", flush=True)
            continue
        where = f"{file}: stage {stage.name}"
        changed = done.was_ever_finished(stage)
        goes_on = done.start(stage, stages[number:], where)
        words = [*stage.arguments, *(RESUME_ARGUMENTS if goes_on else [])]
        print(f"\n{title}\n$ lmforge {shlex.join(words)}", flush=True)
        status, asked = _run_command(words)
        if status and not asked:
            again = f"`lmforge run {shlex.quote(str(file))}` goes on with this stage"
            if status == 2 and goes_on and "--run.overwrite" in stage.arguments:
                again = f"what its run was begun with cannot go on: delete {stage.run} to train it anew"
            kind = {2: UserError, EXIT_PEER_LOST: PeerLost}.get(status, RunFailed)
            raise kind(f"{where} ended with status {status}; {again}")
        if not status and changed and _newest_checkpoint(stage.run) == done.previous_checkpoint(stage) is not None:
            raise UserError(
                f"{where}: was finished with other words, and these train nothing; add --run.overwrite to train it anew"
            )
        # Asked to stop, it may have been at its end already; but a server ends by being asked to, and is to serve again.
        if not status and not (asked and stage.arguments[0] == "serve"):
            done.mark_finished(stage)
        if asked:
            return status or 128 + asked
    return 0


def _newest_checkpoint(run: Path | None) -> list[int] | None:
    """The last step that a run has saved, and when; None where it has none."""
    steps = Run.open(run).checkpoint_steps() if run is not None and run.exists() else []
    return [steps[-1], Run(run).checkpoint_path(steps[-1]).stat().st_mtime_ns] if run is not None and steps else None


def _run_command(arguments: list[str]) -> tuple[int, int]:
    """The status of a command line, and the signal that asked this process to stop, or 0. That is handed on, and waited for."""
    child = subprocess.Popen([sys.executable, "-m", "lmforge", *arguments])
    before: dict[signal.Signals, Any] = {}
    asked: list[int] = []

    def hand_on(number: int, frame: Any) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # which the child has too, from a terminal
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        before[number] = signal.signal(number, hand_on)
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status, asked[0] if asked else 0


@dataclass
class _StageRecord:
    """What is known of a stage.

    words, recipe: what it was finished with, and the digest of its recipe; no words where it never was.
    stale: whether what came before it has been made anew since.
    begun: words and digest that it was begun with since; `before`, when its run had last been begun until then, and `newest`,
        what its run had saved last until then.
    """

    arguments: list[str] | None = None
    recipe_digest: str | None = None
    stale: bool = False
    started_with: list[str | None] | None = None
    previous_start_ns: int | None = None
    previous_checkpoint: list[int] | None = None


class _PipelineState:
    """Which stages have been finished, and what with. One that was changed, and those after it, are not finished any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            self._records = {name: _StageRecord(**each) for name, each in table.items()}
        except FileNotFoundError:
            self._records = {}
        except (ValueError, TypeError, AttributeError):
            raise UserError(f"{path}: cannot be read; delete it, and stages tell by themselves what they have done") from None

    def is_finished(self, stage: PlannedStage) -> bool:
        found = self._records.get(stage.name)
        same = found is not None and (found.arguments, found.recipe_digest, found.stale) == (
            stage.arguments,
            stage.recipe_digest,
            False,
        )
        return same and (stage.run is None or stage.run.exists())

    def was_ever_finished(self, stage: PlannedStage) -> bool:
        """Whether it was finished once, with whatever words."""
        return stage.name in self._records and self._records[stage.name].arguments is not None

    def previous_checkpoint(self, stage: PlannedStage) -> list[int] | None:
        """What its run had saved last when it was first begun with the words that it has."""
        return self._records[stage.name].previous_checkpoint

    def start(self, stage: PlannedStage, later: list[PlannedStage], where: str) -> bool:
        """A stage is about to be carried out: what was made from it is out of date. Returns whether it goes on where it was
        stopped, by the same words. Raises UserError where its own run is out of date."""
        found = self._records.setdefault(stage.name, _StageRecord())
        if found.stale and stage.run is not None and stage.run.exists() and "--run.overwrite" not in stage.arguments:
            raise UserError(
                f"{where}: {stage.run} was trained from what has changed since; delete it, or add --run.overwrite to its words"
            )
        begun, since = [stage.recipe_digest, *stage.arguments], Run(stage.run).started_at_ns if stage.run is not None else None
        # Killed before it had begun its run, it has still to delete what an earlier one left.
        goes_on = stage.run is not None and found.started_with == begun and found.previous_start_ns != since
        if not goes_on:
            found.started_with, found.previous_start_ns, found.previous_checkpoint = begun, since, _newest_checkpoint(stage.run)
        for each in later:
            if each.name in self._records:
                self._records[each.name].stale, self._records[each.name].started_with = True, None
        self._save()
        return goes_on

    def mark_finished(self, stage: PlannedStage) -> None:
        self._records[stage.name] = _StageRecord(stage.arguments, stage.recipe_digest)
        self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self._path, json.dumps({name: asdict(each) for name, each in self._records.items()}, indent=1) + "\n")
