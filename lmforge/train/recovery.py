"""What a run does about its bad steps: names the samples of each, and after some in a row goes back to a checkpoint."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lmforge.checkpoint import Saver
from lmforge.config import StageConfig
from lmforge.config_post import AlignConfig, TunedConfig
from lmforge.errors import RunFailed
from lmforge.parallel.engine import Spread
from lmforge.runs import Run, remove, write_sealed
from lmforge.train.completions import place_of
from lmforge.train.entering import find_entry, load_entry
from lmforge.train.guard import Bad, Guard
from lmforge.train.material import Material


@dataclass(frozen=True)
class Recovery:
    """Every rank has one, and calls `go_back` at the same step. `say` gets a line for people, on the first rank."""

    run: Run
    config: StageConfig
    material: Material
    trained: Spread
    optimizer: torch.optim.Optimizer
    guard: Guard
    saver: Saver
    say: Callable[[str], None]

    def tell(self, bad: Bad) -> None:
        """Say that a step was left out, and record which samples or answers it was given, for `lmforge show data` to open."""
        if not self.trained.ranks.first:
            return
        folder = self.run.path / "bad"
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{bad.step:08d}-batch-{bad.batch}.json"
        record = {
            "step": bad.step,
            "reason": bad.reason,
            "loss": repr(bad.loss),
            "grad_norm": repr(bad.grad_norm),
        }
        if isinstance(self.config, AlignConfig) and self.config.kind == "prompts":
            place = place_of(bad.batch, self.config.rollout, self.trained.ranks.count)
            record |= place
            told = "its answers were not written (rollout.table_every)"
            if place["answers"] is not None:
                told = f"its answers are in {self.run.path / place['answers']}"
        else:
            record |= self._samples(bad.batch)
            told = f"its samples are named in {path}"
        write_sealed(path, json.dumps(record, indent=1) + "\n")
        self.say(f"step {bad.step}: {bad.reason}; not used, and {told}")

    def _samples(self, batch: int) -> dict[str, Any]:
        rows = self.material.plan.rows
        record = {
            "samples": [batch * rows, (batch + 1) * rows],
            "data": self.material.data,
            "length": self.config.data.length,
            "seed": self.config.train.seed,
            "plan_hash": self.material.train.plan_hash,
        }
        if isinstance(self.config, TunedConfig):
            record["fit"] = self.config.data.packing == "best-fit"
        return record

    def go_back(self, done: int) -> int:
        """Load the newest checkpoint of `done` steps or fewer, and drop those after it. Returns its step.

        Raises RunFailed where there is none, or the run has gone back too often.
        """
        run, guard, ranks, steps = self.run, self.guard, self.trained.ranks, self.config.train.steps
        cause = f"step {done + guard.in_a_row}: {guard.in_a_row} bad steps in a row"
        if guard.rollbacks >= self.config.faults.rollbacks:
            times = f"after going back {guard.rollbacks} times" if guard.rollbacks else "and faults.rollbacks = 0"
            raise RunFailed(f"{cause}, {times}; a lower optimizer.lr or a longer warm-up may help")
        self.saver.wait()
        found = ranks.decide(partial(find_entry, run, steps, done + 1))
        if found.manifest is None:
            raise RunFailed(f"{cause}, and no checkpoint from before them to go back to")
        found = load_entry(run, found, steps, self.trained, self.optimizer, self.say)
        assert found.manifest is not None
        back = found.manifest.step
        # They lie on a road that was left: whoever resumed from them would be on it again.
        for later in [step for step in run.steps() if step > back] if ranks.first else []:
            try:
                remove(run.checkpoint(later))
            except Exception as problem:
                self.say(f"{run.checkpoint(later)}: could not be deleted: {problem}")
        guard.remember(found.manifest.guard)
        self.say(f"{cause}: back to step {back}, and on with the batches after them")
        return back
