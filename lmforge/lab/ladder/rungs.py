"""The recipes of rungs, made from the recipe of a big run.

They have models of the same proportions, run lengths on both sides of the optimum, all that changes
with them, and the best of several learning rates, which transfers. What rungs cost is in costs.py;
who trains them, in runs.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.core.errors import UserError
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.flops import flops_per_token, parameter_count
from lmforge.core.options.batch_plan import batch_plan
from lmforge.core.options.options import validate_options
from lmforge.core.options.sections import ParallelOptions, ScheduleOptions
from lmforge.core.options.stage import PretrainConfig
from lmforge.hf.resolve import model_config_from_options
from lmforge.lab.ladder.law import Point, too_short
from lmforge.lab.proportions import in_proportion

# A shorter run has no schedule worth the name.
LEAST_STEPS = 100
LEAST_RUNGS = 5
LEAST_USED = 2 / 3  # of a budget: where a ladder costs less, a line says why
# Where a model has fewer heads, those of its rungs are narrower, down to LEAST_HEAD_DIM: widths
# would be too far apart.
FEW_HEADS = 8
LEAST_HEAD_DIM = 16
# Validations of a rung. They show how the loss of the big run falls before its learning rate has
# decayed.
VALIDATIONS = 5
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
)


@dataclass(frozen=True)
class Trial:
    """A run that is trained or predicted: its recipe, and its model."""

    config: PretrainConfig
    model: ModelConfig

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def parameters(self) -> int:
        return scaled_parameters(self.model)

    @property
    def tokens(self) -> int:
        return self.config.train.steps * tokens_per_step(self.config)

    @property
    def flops(self) -> float:
        return float(flops_per_token(self.model, self.config.data.sequence_length)) * self.tokens


def scaled_parameters(model: ModelConfig) -> int:
    """The N of the law: the parameters in matrix products with each token.

    They include the head, but not the input embedding.
    """
    return parameter_count(model).active_matmul


def tokens_per_step(config: PretrainConfig) -> int:
    return batch_plan(config.train, config.data.sequence_length, 1).tokens


def check_target(config: PretrainConfig, vocab_size: int) -> Trial:
    """The big run. Raises UserError where no ladder leads to it."""
    has_weights = config.model.source and config.model.load_weights
    if config.model.implementation != "lmforge" or has_weights:
        raise UserError(
            "model.source: a ladder trains lmforge's models from random weights; add"
            " --model.load_weights false"
        )
    return Trial(config, model_config_from_options(config.model, vocab_size))


def shapes(model: ModelConfig, times: float = 1.0) -> list[ModelConfig]:
    """Models in the proportions of this one, up to `times` its width.

    Each has more parameters than the one before.
    """
    heads = model.num_attention_heads
    head_dim = model.head_dim
    while heads < FEW_HEADS and head_dim >= 2 * LEAST_HEAD_DIM and model.family.grouped_heads:
        heads *= 2
        head_dim //= 2
    found: dict[int, ModelConfig] = {}
    for count in range(1, math.floor(heads * times) + 1):
        width = round(model.hidden_size * count / heads)
        layers = round(model.num_hidden_layers * count / heads)
        layers = max(min(2, model.num_hidden_layers), layers)
        try:
            shape = in_proportion(model, width, count, head_dim, layers)
        except UserError:  # such as a width that the family's heads do not divide
            continue
        found.setdefault(scaled_parameters(shape), shape)
    return [found[size] for size in sorted(found)]


def reshape(
    target: Trial, shape: ModelConfig, steps: int, vocab_size: int, **changes: dict[str, Any]
) -> Trial:
    """The run with another model and length; learning rates and first values follow.

    `changes`: further options by section.
    """
    big = target.model
    model = target.config.model
    options = {name: getattr(shape, name) for name in SHAPE if getattr(shape, name)}
    if not big.family.grouped_heads:
        options.pop("num_key_value_heads", None)
        options.pop("head_dim", None)
    if model.parametrization == "standard":  # the recipe's settings are for its own model
        options |= {
            "parametrization": "completep",
            "base_width": big.hidden_size,
            "base_depth": big.num_hidden_layers,
        }
    if shape.head_dim != big.head_dim:
        options["base_head_dim"] = model.base_head_dim or big.head_dim
    trial = with_changes(
        target.config,
        {**changes, "model": options, "train": {"steps": steps, **changes.get("train", {})}},
    )
    if model_config_from_options(trial.model, vocab_size) != shape:
        way = "train smaller models yourself, and name them as --ladder.runs"
        raise UserError(
            f"model: options of a recipe do not give a {big.model_type} model of another size;"
            f" {way}"
        )
    return Trial(trial, shape)


def with_changes(config: PretrainConfig, changes: dict[str, dict[str, Any]]) -> PretrainConfig:
    """The recipe of `lmforge pretrain` with other values of some options, by section.

    Raises UserError.
    """
    table = config.model_dump(mode="json", exclude={"ladder", "plan"})
    for section, values in changes.items():
        table[section] = {**table[section], **values}
    return validate_options(PretrainConfig, table)


def in_length(config: PretrainConfig, steps: int) -> dict[str, dict[str, Any]]:
    """Options, by section, that keep their proportions to a run of another length.

    They are those of warm-up, decay, phases and validation.
    """
    share = steps / config.train.steps

    def scaled(count: int | None) -> int | None:
        """A number of steps in proportion."""
        return count and max(1, round(count * share))

    phases = config.data.model_dump(mode="json")["phases"]
    for phase in phases:
        phase["steps"] = scaled(phase["steps"])
    if phases:  # what is rounded need not add up to the run
        phases[-1]["steps"] = None
    return {
        "data": {"phases": phases},
        "schedule": {
            "warmup_steps": ScheduleOptions().warmup_steps,  # instead of which the ratio holds
            "warmup_ratio": config.schedule.warmup(config.train.steps) / config.train.steps,
            "decay_steps": scaled(config.schedule.decay_steps),
        },
        "validation": {"every_steps": scaled(config.validation.every_steps)},
    }


def resized(target: Trial, shape: ModelConfig, tokens: float, vocab_size: int) -> Trial:
    """The big run with another model and length, and all else in proportion.

    Raises UserError where it is no run.
    """
    steps = max(1, round(tokens / tokens_per_step(target.config)))
    return reshape(target, shape, steps, vocab_size, **in_length(target.config, steps))


def make_rung(
    target: Trial,
    shape: ModelConfig,
    tokens: float,
    vocab_size: int,
    folder: Path,
    prefix: str = "",
) -> Trial:
    """A rung, which is a run in `folder`: this model, trained on so many tokens.

    It has a schedule of its own to its end.
    """
    config = target.config
    steps = math.ceil(tokens / tokens_per_step(config))
    counts = (scaled_parameters(shape), steps * tokens_per_step(config))
    name = "-".join(f"{round(count / 1e6, 3):g}M" for count in counts)
    if prefix:
        name = f"{prefix}-{name}"
    options = in_length(config, steps)
    options["validation"] = {"every_steps": math.ceil(steps / VALIDATIONS), "at_start": False}
    return reshape(
        target,
        shape,
        steps,
        vocab_size,
        **options,
        run={"name": name, "folder": str(folder), "overwrite": False},
        # What the big model needs does not suit small ones.
        parallel=ParallelOptions().model_dump(mode="json"),
        train={"micro_batch_size": None},
        sample={"every_steps": None},
        checkpoint={
            "every_steps": None,
            "keep_last": 1,
            "keep_every_steps": None,
            "keep_best": 0,
            "folder": None,
        },
        log={"prediction": None, "profile_steps": None},
    )


def plan_rungs(
    target: Trial,
    sizes: int,
    tokens_per_parameter: Sequence[float],
    cost: Callable[[Trial], float],
    most: float,
    make: Callable[[ModelConfig, float], Trial],
) -> tuple[list[Trial], str]:
    """The rungs of the largest ladder whose cost is at most `most`, the cheapest first.

    They come with a line that says why the ladder costs much less, if so. Sizes are halves of each
    other, as far as there are models between; each is trained for every length, but the largest not
    for the longest, which would cost as much as the others together. Raises UserError where no
    ladder is so cheap.
    """
    models = [each for each in shapes(target.model) if scaled_parameters(each) < target.parameters]
    known: dict[tuple[ModelConfig, float], Trial] = {}
    costs: dict[str, float] = {}
    cheapest = math.inf
    for largest in range(len(models), 0, -1):
        rungs = []
        for shape, lengths in _grid(models[:largest], sizes, sorted(tokens_per_parameter)):
            for length in lengths:
                if (shape, length) not in known:
                    known[shape, length] = make(shape, length * scaled_parameters(shape))
                rungs.append(known[shape, length])
        rungs = _without_short([rung for rung in rungs if rung.config.train.steps >= LEAST_STEPS])
        if len(rungs) < LEAST_RUNGS or len({rung.parameters for rung in rungs}) < 2:
            continue
        for rung in rungs:
            costs.setdefault(rung.name, cost(rung))
        total = sum(costs[rung.name] for rung in rungs)
        if total <= most:
            rungs.sort(key=lambda rung: rung.flops)
            return rungs, _unused(total / most, cheapest / most)
        cheapest = min(cheapest, total)
    if cheapest < math.inf:
        raise UserError(
            f"--ladder.budget: the smallest ladder of this recipe takes {cheapest / most:.2g} times"
            " that; raise it, or give fewer --ladder.tokens_per_parameter"
        )
    raise UserError(
        f"--ladder.budget: rungs of this recipe would have fewer than {LEAST_STEPS} steps of"
        f" {tokens_per_step(target.config):,} tokens, or there are no two sizes of smaller models;"
        " lower train.global_batch_size, or raise tokens_per_parameter"
    )


def _without_short(rungs: Sequence[Trial]) -> list[Trial]:
    """The rungs but for those that a fit would leave out for their few steps."""
    points = [
        Point(rung.name, rung.parameters, rung.tokens, math.nan, rung.config.train.steps)
        for rung in rungs
    ]
    short = dict(too_short(points))
    return [rung for rung in rungs if rung.name not in short]


def _unused(used: float, larger: float) -> str:
    """A line that says why much of a budget stays unused.

    larger: the part of it that the next larger ladder takes, if there is one.
    """
    if used > LEAST_USED:
        return ""
    reason = "no larger size is below it"
    if larger < math.inf:
        reason = f"the next larger size takes {larger:.2g} times the budget"
    way = "more --ladder.tokens_per_parameter or --ladder.sizes use more"
    return f"{1 - used:.0%} of the budget: {reason}; {way}"


def _grid(
    models: Sequence[ModelConfig], sizes: int, lengths: Sequence[float]
) -> Iterator[tuple[ModelConfig, Sequence[float]]]:
    """(model, tokens per parameter) of the models of a ladder.

    They are the largest, and those with about a half, a quarter, … of its size.
    """
    largest = models[-1]
    left = list(models[:-1])
    yield largest, lengths[:-1]
    for number in range(1, sizes):
        wanted = math.log(scaled_parameters(largest)) - number * math.log(2)
        if not left:
            return
        nearest = min(left, key=lambda each: abs(math.log(scaled_parameters(each)) - wanted))
        left = [each for each in left if scaled_parameters(each) < scaled_parameters(nearest)]
        yield nearest, lengths


def with_rate(rung: Trial, rate: float, name: str | None = None) -> Trial:
    """The rung with another learning rate; with a name it is another run."""
    run = {} if name is None else {"run": {"name": name}}
    return Trial(with_changes(rung.config, {"optimizer": {"lr": rate}, **run}), rung.model)


def rate_trials(rungs: Sequence[Trial], rates: Sequence[float]) -> list[Trial]:
    """A run of the rung in the middle with each rate."""
    rung = rungs[len(rungs) // 2]
    return [with_rate(rung, rate, f"{rung.name}-lr-{rate:g}") for rate in rates]


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """(the rate with the lowest loss, whether it is one of the outer ones).

    Between three rates loss is taken for a parabola of the rate's logarithm. Raises UserError where
    no run has a loss.
    """
    pairs = sorted(zip(rates, losses, strict=True))
    finite = [loss if math.isfinite(loss) else math.inf for _, loss in pairs]
    lowest = finite.index(min(finite))
    if finite[lowest] == math.inf:
        raise UserError("--ladder.learning_rates: every run diverged; give lower ones")
    around = pairs[max(0, lowest - 1) : lowest + 2]
    if len(around) < 3 or not all(math.isfinite(loss) for _, loss in around):
        return pairs[lowest][0], len(around) < 3
    square, slope, _ = np.polyfit(
        [math.log(rate) for rate, _ in around], [loss for _, loss in around], 2
    )
    if square <= 0:
        return pairs[lowest][0], False
    return float(f"{math.exp(-slope / (2 * square)):.3g}"), False
