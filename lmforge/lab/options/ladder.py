"""The options of `lmforge ladder`: the small runs that predict a big one, and their budget."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from lmforge.core.files.untrusted import quoted
from lmforge.core.options.options import Options, option, section
from lmforge.core.options.ranges import COUNT, RATIO, SCALE
from lmforge.core.options.stage import PretrainConfig
from lmforge.lab.options.plan import SHORT as PLAN_SHORT
from lmforge.lab.options.plan import MachineOptions

BudgetUnit = Literal["share", "FLOPs", "GPU-hours", "price"]
SUFFIXES: dict[str, BudgetUnit] = {"": "FLOPs", "%": "share", "h": "GPU-hours", "$": "price"}


@dataclass(frozen=True)
class Budget:
    """An amount in a unit; a share is a fraction of the big run's FLOPs."""

    amount: float
    unit: BudgetUnit


def parse_budget(value: Any, shares: bool = True) -> Budget:
    """Parse a budget: a share up to 1 (0.1, 10%), FLOPs (1e18), GPU-hours (20h), a price (500$).

    Raises an error of pydantic's for any other, and for a share where these are not allowed.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?([%h$]?)", str(value))
    if match:
        amount = float(f"{match[1]}{match[2] or ''}")
        unit = "share" if not match[3] and amount <= 1 else SUFFIXES[match[3]]
        if amount and (shares or unit != "share"):
            return Budget(amount / 100 if match[3] == "%" else amount, unit)
    share = "a share such as 0.1, " if shares else ""
    raise PydanticCustomError(
        "budget", f"expected {share}FLOPs such as 1e18, GPU-hours such as 20h, or 500$"
    )


class LadderOptions(Options):
    """The rungs of the ladder: small runs, from whose losses that of the big run is predicted."""

    budget: Annotated[Budget, BeforeValidator(parse_budget)] | None = option(
        None,
        "what all rungs together may cost: a share of the big run (0.1), FLOPs (1e18), GPU-hours"
        " (20h), or a price (500$)",
    )
    target: Annotated[Budget, BeforeValidator(partial(parse_budget, shares=False))] | None = option(
        None,
        "what the big run may cost, as FLOPs, GPU-hours or a price: its best size and length are"
        " then chosen (default: the recipe's)",
    )
    runs: tuple[Path, ...] = option(
        (), "finished runs that count as rungs; without ladder.budget no others are trained"
    )
    mixtures: tuple[Path, ...] = option(
        (),
        "recipes with the same sources of data in other weights, which are compared; each has a"
        " ladder of this budget",
    )
    sizes: int = option(
        4, "sizes of models, each with half the parameters of the one before", gt=1, le=64
    )
    tokens_per_parameter: tuple[Annotated[float, Field(**RATIO)], ...] = option(
        (5.0, 10.0, 20.0, 40.0),
        "lengths of the runs of each size; the largest size is not trained for the longest",
    )
    learning_rates: tuple[Annotated[float, Field(**SCALE)], ...] = option(
        (),
        "rates of the big run to try first, on one rung each, beside the budget; the best is used"
        " (default: optimizer.lr)",
    )
    parallel_runs: int = option(1, "rungs that are trained at once", **COUNT)
    dry_run: bool = option(False, "print the rungs and what they cost, and stop")

    def problems(self) -> Iterator[str]:
        if self.learning_rates and (self.mixtures or self.budget is None):
            yield "--ladder.learning_rates: only with a ladder.budget, and for one mixture"
        if self.runs and self.mixtures:
            yield (
                "--ladder.runs: not with --ladder.mixtures, which have rungs of their own; leave"
                " one of them out"
            )
        names = {
            "runs": [str(path.resolve()) for path in self.runs],
            "mixtures": [path.stem for path in self.mixtures],
            "tokens_per_parameter": [f"{each:g}" for each in self.tokens_per_parameter],
            "learning_rates": [f"{each:g}" for each in self.learning_rates],
        }
        for name, given in names.items():
            twice = [each for each in given if given.count(each) > 1]
            if twice:
                way = "rename one, for it names runs" if name == "mixtures" else "leave one out"
                yield f"--ladder.{name}: {quoted(twice[0])} twice; {way}"
        if len(self.tokens_per_parameter) < 2:
            yield "--ladder.tokens_per_parameter: give two numbers or more, such as 5 10 20 40"


class LadderConfig(PretrainConfig):
    """lmforge ladder RECIPE.toml --budget 0.1: predict a big run by a ladder of small ones, before
    it is paid for.
    """

    of_verb: ClassVar[str | None] = "ladder"
    SHORT: ClassVar[Mapping[str, str]] = {
        **PretrainConfig.SHORT,
        **PLAN_SHORT,
        **{name: f"ladder.{name}" for name in ("budget", "dry_run", "mixtures")},
    }
    ESSENTIAL: ClassVar[str] = (
        "ladder.budget ladder.target ladder.runs ladder.mixtures ladder.sizes"
        " ladder.tokens_per_parameter ladder.learning_rates ladder.parallel_runs ladder.dry_run"
        " plan.gpus plan.gpu_type plan.price plan.calibration launch.on launch.processes run.name"
        " run.folder"
    )
    ladder: LadderOptions = section(
        LadderOptions, "small runs, from whose losses that of the big run is predicted"
    )
    plan: MachineOptions = section(
        MachineOptions, "the ranks and the hardware of the big run, for what it costs"
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.train.epochs is not None:
            yield (
                f"train.epochs = {self.train.epochs:g}: a ladder counts tokens; give train.steps"
                " instead"
            )
