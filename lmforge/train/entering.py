"""How a run directory is entered: begun, continued from the newest checkpoint that can be used, or refused."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from lmforge import checkpoint
from lmforge.checkpoint import Manifest, Unsound
from lmforge.config import StageConfig
from lmforge.errors import Mistake
from lmforge.parallel.engine import Spread
from lmforge.runs import Run
from lmforge.train.material import Material
from lmforge.train.optim import state_by_name

NONE_USABLE = "{run}: none of its checkpoints can be used ({reason}); restore one, or begin again with --run.overwrite"


@dataclass(frozen=True)
class Entry:
    """How a run is entered: the checkpoint it goes on from, if any, and what to tell of that."""

    folder: Path | None
    manifest: Manifest | None
    lines: list[str]


def enter(run: Run, config: StageConfig) -> bool:
    """Decide what becomes of a run directory: begun (False), continued (True) or refused (Mistake). Changes nothing but the
    lock."""
    if run.path.exists() and not run.path.is_dir():
        raise Mistake(f"{run.path}: a file, where the run's directory would be; choose another --run.name")
    if run.foreign():
        raise Mistake(f"{run.path}: not empty and not a run of lmforge; choose another --run.name")
    # Of a run on another machine the checkpoints alone may be at hand.
    there = run.exists() or bool(run.kept_elsewhere and run.steps())
    if not there and config.run.resume == "required":
        raise Mistake(f"{run.path}: there is no such run to resume")
    if there and config.run.resume == "never" and not config.run.overwrite:
        raise Mistake(
            f"{run.path}: this run exists; continue it (leave out --resume never), delete it with --run.overwrite,"
            " or give this one another --run.name"
        )
    run.lock()
    return there and not config.run.overwrite


def find_entry(run: Run, steps: int, before: int | None = None) -> Entry:
    """The newest checkpoint (of a step below `before`) that looks whole and that a run of `steps` can go on from.

    Raises Mistake where there are some and none of them can be used.
    """
    passed_over: list[str] = []
    for folder, manifest in checkpoint.candidates(run, passed_over, before):
        if "optimizer" in manifest.holds or manifest.step >= steps:
            return Entry(folder, manifest, [*passed_over, f"continuing {run.path} from step {manifest.step}"])
        passed_over.append(f"{folder}: holds the model alone; skipped")
    if run.steps() and passed_over:
        reason = passed_over[0].removesuffix("; skipped")
        raise Mistake(NONE_USABLE.format(run=run.path, reason=reason))
    return Entry(None, None, [*passed_over, f"{run.path}: has no checkpoint yet; it begins at step 0"] if run.exists() else [])


def finished(run: Run, entry: Entry, steps: int) -> Entry:
    """The entry of a run that has nothing left to train, read whole; or one to train on from, where it is spoiled."""
    assert entry.folder is not None
    assert entry.manifest is not None
    try:
        checkpoint.verify(entry.folder)
        return entry
    except Unsound as reason:
        older = find_entry(run, steps, before=entry.manifest.step)
        return Entry(older.folder, older.manifest, [f"{entry.folder}: {reason}; skipped", *older.lines])


def load_entry(
    run: Run, entry: Entry, steps: int, trained: Spread, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> Entry:
    """Load the checkpoint of `entry`, or where it turns out to be spoiled the newest one before it that is not.

    Every rank calls it. Returns the entry that was loaded. Raises Mistake where there is none.
    """
    ranks = trained.ranks
    while True:
        assert entry.folder is not None
        assert entry.manifest is not None
        state = trained.state(optimizer, state_by_name)
        try:
            with ranks.agreeing():
                checkpoint.load(entry.folder, state)
            break
        except Unsound as reason:
            spoiled = f"{entry.folder}: {reason}"
            say(f"{spoiled}; skipped")
            entry = ranks.decide(partial(find_entry, run, steps, entry.manifest.step))
            if entry.manifest is None:
                raise Mistake(NONE_USABLE.format(run=run.path, reason=spoiled)) from None
            for line in entry.lines:
                say(line)
    trained.loaded(optimizer, state)
    # Nothing here draws from torch's generators: weights, rows, dropout and samples are functions of seeds and numbers, and
    # no rank has a random state of its own. What is kept is for what else may run in the process.
    checkpoint.set_rng_state(entry.manifest.rng)
    return entry


def check_continues(entry: Entry, config: StageConfig, material: Material) -> None:
    """Raise Mistake where the checkpoint of `entry` is of another run than `config` describes."""
    manifest = entry.manifest
    if manifest is None:
        return
    ways = "use the recipe it was begun with, another --run.name, or --run.overwrite"
    if manifest.model_config != material.shape:
        theirs, ours = asdict(manifest.model_config), asdict(material.shape)
        for described in (theirs, ours):  # a wrapped model is all that its config.json says
            described |= described.pop("content", {})
        differing = [
            f"{name} {theirs.get(name)} there, {ours.get(name)} here"
            for name in ours | theirs
            if theirs.get(name) != ours.get(name)
        ] or [f"computed by {manifest.model_config.family} there, by {material.shape.family} here"]
        raise Mistake(f"{entry.folder}: a model of another shape ({'; '.join(differing[:3])}); {ways}")
    optimizer = manifest.recipe["optimizer"].get("name", "adamw")  # the only one there was, before it had a name
    if optimizer != config.optimizer.name:
        raise Mistake(f"{entry.folder}: saved with optimizer.name = {optimizer}, here it is {config.optimizer.name}; {ways}")
    if manifest.tokenizer_hash != material.tokenizer.hash:
        raise Mistake(f"{entry.folder}: trained with another tokenizer than {material.data} was prepared with; {ways}")
    if manifest.rows != material.plan.rows:
        raise Mistake(f"{entry.folder}: its global batch has {manifest.rows} rows, this recipe's {material.plan.rows}; {ways}")
    if manifest.plan_hash != material.train.plan_hash:
        raise Mistake(f"{entry.folder}: trained on other data, or with another data.length or train.seed; {ways}")


def changes(entry: Entry, config: StageConfig) -> list[str]:
    """A line that names the options that differ from the checkpoint's recipe."""
    if entry.manifest is None:
        return []
    then, now = entry.manifest.recipe, config.model_dump(mode="json")
    changed = [
        f"{section}.{name} {then.get(section, {}).get(name)} → {value}"
        for section, options in now.items()
        for name, value in options.items()
        if section not in ("run", "launch", "watch") and then.get(section, {}).get(name) != value
    ]
    return [f"changed since that checkpoint: {', '.join(changed)}"] if changed else []


def kept(run: Run) -> str:
    steps = run.steps()
    return f"last checkpoint: {run.checkpoint(steps[-1])}" if steps else "no checkpoint had been saved"
