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

from lmforge.config_post import STAGES
from lmforge.errors import LOST, Mistake, PeerLost, RunFailed
from lmforge.options import Options, option, read_recipe, validate
from lmforge.runs import Run, write_sealed

TRAINING = tuple(stage for stage in STAGES if stage is not None)
# Where the run of a stage is: the pipeline's to say, for later stages look for it there.
PLACE = ("--run.name", "--run.folder")
# What a stage that goes on is told, whatever its words and recipe say: what was to be deleted has been.
GOES_ON = ["--run.overwrite", "false", "--run.resume", "auto"]


class StageOptions(Options):
    """One stage: a verb as it is typed."""

    verb: str = option(..., "the verb, such as pretrain, sft, align, prepare, evaluate, export")
    name: str | None = option(None, "what later stages call its run by, as {NAME} (default: the verb)")
    recipe: Path | None = option(None, "recipe of a verb that trains, relative to the pipeline's file")
    words: tuple[str, ...] = option((), "what else is typed; {NAME} stands for the run of an earlier stage")


class PipelineOptions(Options):
    """A pipeline.toml: where its runs are, and [[stages]]."""

    name: str | None = option(None, "its name; runs are FOLDER/NAME-STAGE (default: the file's)")
    folder: Path = option(Path("runs"), "folder that holds the runs")
    stages: tuple[StageOptions, ...] = option(..., "[[stages]], in order")

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
class Planned:
    """A stage ready to be carried out: what is typed after `lmforge`, and the run that it trains, if it does."""

    name: str
    words: list[str]
    run: Path | None
    recipe: Path | None = None

    @property
    def digest(self) -> str | None:
        """A hash of what its recipe says."""
        return None if self.recipe is None else xxhash.xxh3_64_hexdigest(self.recipe.read_bytes())


def planned(options: PipelineOptions, file: Path, verbs: Collection[str]) -> list[Planned]:
    """What is typed for each stage; `verbs` are those there are. Raises Mistake where one refers to a stage that does not come
    before it."""
    pipeline = options.name or file.stem
    runs: dict[str, Path] = {}
    stages: list[Planned] = []
    for stage in options.stages:
        name = stage.name or stage.verb
        words = [_filled(word, runs, f"{file}: stage {name}") for word in stage.words]
        run = recipe = None
        if stage.verb in TRAINING:
            if words and not words[0].startswith("--"):
                raise Mistake(f"{file}: stage {name}: {words[0]}: give a recipe as `recipe`, and words as --section.option")
            if placed := [word for word in words if word.partition("=")[0] in PLACE]:
                raise Mistake(
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
                raise Mistake(
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
            raise Mistake(f"{file}: stage {name}: {stage.verb}: no such verb; lmforge --help lists them")
        elif stage.recipe:
            raise Mistake(f"{file}: stage {name}: {stage.verb} takes no recipe; give its words")
        stages.append(Planned(name, [stage.verb, *words], run, recipe))
    return stages


def _filled(word: str, runs: dict[str, Path], where: str) -> str:
    def run_of(found: re.Match[str]) -> str:
        if found[1] not in runs:
            there = ", ".join(runs) or "none"
            raise Mistake(f"{where}: {found[0]}: no stage of this name trains before it; there are: {there}")
        return str(runs[found[1]])

    return re.sub(r"\{([\w.-]+)\}", run_of, word)


def run_pipeline(file: Path, verbs: Collection[str]) -> int:
    """Carry out the stages that are not finished yet.

    Returns 0, or where it was asked to stop what the stage ended with, 128 + signal if that was 0. Raises Mistake and
    RunFailed, PeerLost where a stage says that a rank was lost.
    """
    options = validate(PipelineOptions, read_recipe(file), str(file))
    stages = planned(options, file, verbs)
    done = _Done(options.folder / f".{options.name or file.stem}.pipeline.json")
    for number, stage in enumerate(stages, start=1):
        title = f"── {number} of {len(stages)}  {stage.name}"
        if done.has(stage):
            print(f"{title}: finished before", flush=True)
            continue
        where = f"{file}: stage {stage.name}"
        changed = done.knows(stage)
        goes_on = done.begin(stage, stages[number:], where)
        words = [*stage.words, *(GOES_ON if goes_on else [])]
        print(f"\n{title}\n$ lmforge {shlex.join(words)}", flush=True)
        status, asked = _carried_out(words)
        if status and not asked:
            again = f"`lmforge run {shlex.quote(str(file))}` goes on with this stage"
            if status == 2 and goes_on and "--run.overwrite" in stage.words:
                again = f"what its run was begun with cannot go on: delete {stage.run} to train it anew"
            kind = {2: Mistake, LOST: PeerLost}.get(status, RunFailed)
            raise kind(f"{where} ended with status {status}; {again}")
        if not status and changed and _newest(stage.run) == done.newest(stage) is not None:
            raise Mistake(
                f"{where}: was finished with other words, and these train nothing; add --run.overwrite to train it anew"
            )
        # Asked to stop, it may have been at its end already; but a server ends by being asked to, and is to serve again.
        if not status and not (asked and stage.words[0] == "serve"):
            done.add(stage)
        if asked:
            return status or 128 + asked
    return 0


def _newest(run: Path | None) -> list[int] | None:
    """The last step that a run has saved, and when; None where it has none."""
    steps = Run.open(run).steps() if run is not None and run.exists() else []
    return [steps[-1], Run(run).checkpoint(steps[-1]).stat().st_mtime_ns] if run is not None and steps else None


def _carried_out(words: list[str]) -> tuple[int, int]:
    """The status of a command line, and the signal that asked this process to stop, or 0. That is handed on, and waited for."""
    child = subprocess.Popen([sys.executable, "-m", "lmforge", *words])
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
class _Told:
    """What is known of a stage.

    words, recipe: what it was finished with, and the digest of its recipe; no words where it never was.
    stale: whether what came before it has been made anew since.
    begun: words and digest that it was begun with since; `before`, when its run had last been begun until then, and `newest`,
        what its run had saved last until then.
    """

    words: list[str] | None = None
    recipe: str | None = None
    stale: bool = False
    begun: list[str | None] | None = None
    before: int | None = None
    newest: list[int] | None = None


class _Done:
    """Which stages have been finished, and what with. One that was changed, and those after it, are not finished any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            self._told = {name: _Told(**each) for name, each in table.items()}
        except FileNotFoundError:
            self._told = {}
        except (ValueError, TypeError, AttributeError):
            raise Mistake(f"{path}: cannot be read; delete it, and stages tell by themselves what they have done") from None

    def has(self, stage: Planned) -> bool:
        found = self._told.get(stage.name)
        same = found is not None and (found.words, found.recipe, found.stale) == (stage.words, stage.digest, False)
        return same and (stage.run is None or stage.run.exists())

    def knows(self, stage: Planned) -> bool:
        """Whether it was finished once, with whatever words."""
        return stage.name in self._told and self._told[stage.name].words is not None

    def newest(self, stage: Planned) -> list[int] | None:
        """What its run had saved last when it was first begun with the words that it has."""
        return self._told[stage.name].newest

    def begin(self, stage: Planned, later: list[Planned], where: str) -> bool:
        """A stage is about to be carried out: what was made from it is out of date. Returns whether it goes on where it was
        stopped, by the same words. Raises Mistake where its own run is out of date."""
        found = self._told.setdefault(stage.name, _Told())
        if found.stale and stage.run is not None and stage.run.exists() and "--run.overwrite" not in stage.words:
            raise Mistake(
                f"{where}: {stage.run} was trained from what has changed since; delete it, or add --run.overwrite to its words"
            )
        begun, since = [stage.digest, *stage.words], Run(stage.run).begun_at if stage.run is not None else None
        # Killed before it had begun its run, it has still to delete what an earlier one left.
        goes_on = stage.run is not None and found.begun == begun and found.before != since
        if not goes_on:
            found.begun, found.before, found.newest = begun, since, _newest(stage.run)
        for each in later:
            if each.name in self._told:
                self._told[each.name].stale, self._told[each.name].begun = True, None
        self._write()
        return goes_on

    def add(self, stage: Planned) -> None:
        self._told[stage.name] = _Told(stage.words, stage.digest)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(self._path, json.dumps({name: asdict(each) for name, each in self._told.items()}, indent=1) + "\n")
