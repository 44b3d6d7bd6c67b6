"""`lmforge ladder`: predicts a big run by small ones, which it plans, prices and trains."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite, log
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from lmforge.core.errors import UserError, format_count, typed_command
from lmforge.core.files.atomic_files import atomic_write_json, atomic_write_text
from lmforge.core.files.locks import hold_lock
from lmforge.core.model.config import ModelConfig
from lmforge.core.options.options import read_recipe, to_toml, validate_options
from lmforge.core.options.stage import PretrainConfig
from lmforge.core.records.runs import storage_errors
from lmforge.core.stages.training_data import TokenSources
from lmforge.lab.ladder.charts import short
from lmforge.lab.ladder.costs import Cost, Costs
from lmforge.lab.ladder.downstream import predict_scores
from lmforge.lab.ladder.fit import Fit, fit_points
from lmforge.lab.ladder.frontier import FAR, Target, compare, conclusions
from lmforge.lab.ladder.page import check_text, interval_text, write_page
from lmforge.lab.ladder.prediction import best_shape, candidates, predict_curve
from lmforge.lab.ladder.rungs import (
    Trial,
    best_rate,
    check_target,
    make_rung,
    plan_rungs,
    rate_trials,
    resized,
    with_changes,
    with_rate,
)
from lmforge.lab.ladder.runs import Reached, RungRunner, check_same_text, read_rung
from lmforge.lab.ladder.text import adopt, as_planned, most_epochs, repeated
from lmforge.lab.options.ladder import Budget, LadderConfig
from lmforge.serve.validation import open_validation_tasks

# The FLOPs of ladder.target over the recipe's, or the reverse: proportions are kept from there.
MOST_TIMES = 1000
RECIPES = "recipes"
RECORD = "ladder.json"
TARGET = "target.toml"
PREDICTION = "prediction.json"


@dataclass(frozen=True)
class Fitted:
    """The prediction of a ladder: `numbers` are those of its page."""

    fit: Fit
    target: Target
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Ladder:
    """The ladder of one mixture of data, which is named where several are compared.

    cost: of the target. flops: what ladder.target pays. unused: why much of the budget is left.
    """

    mixture: str
    target: Trial
    rungs: tuple[Trial, ...]
    sources: TokenSources
    cost: Cost
    flops: float | None
    unused: str

    def resized(self, shape: ModelConfig, tokens: float) -> Trial:
        """The target with another model and length."""
        return resized(self.target, shape, tokens, self.sources.tokenizer.vocab_size)


def run_ladder(config: LadderConfig) -> int:
    """Plan, train, fit and write.

    Returns the exit status. Raises UserError where no law can be fitted.
    """
    if config.ladder.budget is None and not config.ladder.runs:
        raise UserError(
            "--ladder.budget: say what the rungs may cost, such as 0.1 of the big run; or name"
            " finished --ladder.runs"
        )
    folder = config.run.folder / f"{config.run.name}-ladder"
    costs = Costs(config.plan, config.train.device)
    ladders = [_plan(name, each, config, folder, costs) for name, each in _mixtures(config)]
    _check_held_out_text(ladders)
    adopted = adopt(config.ladder.runs, ladders[0].rungs)
    for ladder in ladders:
        planned = (as_planned(rung, ladder.sources, rung.name) for rung in ladder.rungs)
        check_same_text([as_planned(ladder.target, ladder.sources), *planned, *adopted])
        if ladder.flops is not None:
            # The smallest and the largest run that ladder.target may choose.
            choices = candidates(ladder.target, ladder.flops)
            for choice in (choices[0], choices[-1]):
                most_epochs(ladder.resized(*choice), ladder.sources)
        _print_plan(ladder, config, costs)
    if config.ladder.dry_run:
        return 0
    with _locked(folder):
        runner = RungRunner(
            folder / RECIPES, config.ladder.parallel_runs, partial(print, "rung      ", flush=True)
        )
        stopped_by = 0
        if config.ladder.learning_rates:
            stopped_by, ladders = _choose_rate(ladders[0], config.ladder.learning_rates, runner)
        stopped_by = stopped_by or runner.run([rung for ladder in ladders for rung in ladder.rungs])
        if stopped_by:
            print(f"stopped by signal {stopped_by}; to go on, repeat the command", flush=True)
            return 128 + stopped_by
        fitted = [_finish(ladder, adopted, folder) for ladder in ladders]
        planned_ladders = [
            {
                "mixture": each.mixture,
                "target": _trial_as_json(each.target),
                "rungs": [_trial_as_json(rung) for rung in each.rungs],
            }
            for each in ladders
        ]
        table = {"command": typed_command(), "ladders": planned_ladders}
        atomic_write_json(folder / RECORD, table)
        _write_page(fitted, config, folder)
    return 0


# --- what is planned ------------------------------------------------------------------------------


def _mixtures(config: LadderConfig) -> Iterator[tuple[str, PretrainConfig]]:
    """(name, recipe of the big run) of each mixture that is compared.

    Where none is compared there is one without a name.
    """
    recipe = with_changes(config, {})
    if not config.ladder.mixtures:
        yield "", recipe
    for path in config.ladder.mixtures:
        data = read_recipe(path).get("data")
        if not isinstance(data, dict):
            raise UserError(
                f"{path}: no [data] section; a mixture is a recipe, of which only that is read"
            )
        table = recipe.model_dump(mode="json")
        table["data"] = {"sequence_length": config.data.sequence_length, **data}
        yield path.stem, validate_options(PretrainConfig, table, str(path))


def _plan(
    mixture: str, recipe: PretrainConfig, config: LadderConfig, folder: Path, costs: Costs
) -> Ladder:
    """The ladder of a mixture. Raises UserError where a budget or the data does not suffice."""
    sources = TokenSources.open(recipe)
    vocab_size = sources.tokenizer.vocab_size
    target = check_target(recipe, vocab_size)
    open_validation_tasks(recipe, sources.tokenizer, target.model)
    options = config.ladder
    rungs = list[Trial]()
    unused = ""
    big = costs.of(target, config.plan.gpus)
    flops = _flops_paid(options.target, costs, big)
    paid = replace(big, flops=flops or big.flops)
    budget = options.budget
    if budget is not None:

        def cost(rung: Trial) -> float:
            return costs.amount(costs.of(rung, config.launch.processes), budget, paid)

        def make(shape: ModelConfig, tokens: float) -> Trial:
            return make_rung(target, shape, tokens, vocab_size, folder, mixture)

        most = budget.amount / (len(options.mixtures) or 1)
        rungs, unused = plan_rungs(
            target, options.sizes, options.tokens_per_parameter, cost, most, make
        )
    by_name = {rung.name: rung for rung in rungs}  # lengths that are nearly the same are one run
    return Ladder(mixture, target, tuple(by_name.values()), sources, big, flops, unused)


def _flops_paid(target: Budget | None, costs: Costs, big: Cost) -> float | None:
    """The FLOPs that ladder.target pays, if it is given.

    Raises UserError where they are far from the recipe's.
    """
    if target is None:
        return None
    flops = costs.flops_for(target, big)
    times = flops / big.flops
    if not 1 / MOST_TIMES <= times <= MOST_TIMES:
        raise UserError(
            f"--ladder.target: it pays {times:.2g} times the recipe's FLOPs; write a recipe that is"
            " nearer to it"
        )
    return flops


def _check_held_out_text(ladders: Sequence[Ladder]) -> None:
    """Raise UserError where mixtures would be validated on different text.

    They are validated on that of their sources, whatever these weigh.
    """

    def held_out(ladder: Ladder) -> list[tuple[Path, Any]]:
        sources = ladder.target.config.data.all_sources
        return [
            (folder.path.resolve(), source.quarantine)
            for folder, source in zip(ladder.sources.folders, sources, strict=True)
        ]

    first = ladders[0]
    length = first.target.config.data.sequence_length
    for ladder in ladders:
        own_length = ladder.target.config.data.sequence_length
        if own_length != length:
            raise UserError(
                f"--ladder.mixtures: {ladder.mixture} has other sequences than {first.mixture}:"
                f" data.sequence_length = {own_length}, not {length}"
            )
        if held_out(ladder) != held_out(first):
            # In another order, other sequences of the same text are taken.
            raise UserError(
                f"--ladder.mixtures: {ladder.mixture} has other sources than {first.mixture}, so"
                " its losses are of other held-out text; give both the same sources in one order;"
                " one that is left out has a weight in no phase of data.phases"
            )


def _choose_rate(
    ladder: Ladder, rates: Sequence[float], runner: RungRunner
) -> tuple[int, list[Ladder]]:
    """(the signal that interrupted it, or 0; the ladder with the best of the learning rates)."""
    trials = rate_trials(ladder.rungs, rates)
    stopped_by = runner.run(trials)
    if stopped_by:
        return stopped_by, [ladder]
    rate, is_outer = best_rate(rates, [read_rung(each).loss for each in trials])
    hint = ", the outermost: try others beyond it" if is_outer else ""
    print(
        f"rate       {rate:g} is the best learning rate on"
        f" {ladder.rungs[len(ladder.rungs) // 2].name}{hint}",
        flush=True,
    )
    rungs = tuple(with_rate(rung, rate) for rung in ladder.rungs)
    return 0, [replace(ladder, target=with_rate(ladder.target, rate), rungs=rungs)]


def _print_plan(ladder: Ladder, config: LadderConfig, costs: Costs) -> None:
    target = ladder.target
    rungs = ladder.rungs
    big = ladder.cost
    flops = ladder.flops or big.flops
    if ladder.mixture:
        print(f"mixture    {ladder.mixture}")
    print(f"target     {_describe(target)}: {costs.describe(big)} ({costs.source})")
    if ladder.flops is not None:
        print(f"           its budget pays {ladder.flops:.3g} FLOPs: the best run for that follows")

    def total_cost(trials: Sequence[Trial]) -> Cost:
        return sum((costs.of(each, config.launch.processes) for each in trials), Cost())

    if rungs:
        total = total_cost(rungs)
        share = f"{total.flops / flops:.2%} of the target's FLOPs"
        print(f"ladder     {format_count(len(rungs), 'rung')}, {costs.describe(total)}: {share}")
        for rung in rungs:
            print(f"           {rung.name}: {_describe(rung)}, {rung.config.train.steps:,} steps")
        if ladder.unused:
            print(f"unused     {ladder.unused}")
        rates = config.ladder.learning_rates
        if rates:
            tried = total_cost(rate_trials(rungs, rates))
            print(f"rates      {len(rates)} are tried first: {costs.describe(tried)} more")
        largest = max(rung.flops for rung in rungs)
        if flops > FAR * largest:
            print(
                f"far        the target has {flops / largest:,.0f} times the FLOPs of the largest"
                " rung: its interval says more than its prediction"
            )
    for line in repeated(target, rungs, ladder.sources):
        print(f"epochs     {line}")
    sys.stdout.flush()


def _describe(trial: Trial) -> str:
    model = trial.model
    shape = f"{model.num_hidden_layers} layers of {model.hidden_size}"
    ratio = trial.tokens / trial.parameters
    return (
        f"{trial.parameters:,} parameters ({shape}), {trial.tokens:,} tokens, {ratio:.3g} for each"
    )


# --- what is written ------------------------------------------------------------------------------


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The ladder's folder, made and locked. Raises UserError."""
    way = "choose another --run.folder or --run.name"
    with storage_errors(folder, "cannot be made a folder", way):
        (folder / RECIPES).mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / ".lock") as is_ours:
            if not is_ours:
                raise UserError(
                    f"{folder}: another lmforge ladder works there; wait for it, or give another"
                    " --run.name"
                )
            yield


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    names = ("name", "parameters", "tokens", "flops")
    return {name: getattr(trial, name) for name in names} | {"steps": trial.config.train.steps}


def _finish(ladder: Ladder, adopted: list[Reached], folder: Path) -> Fitted:
    """Fit the law, print what it predicts, and write it with the recipe of the big run.

    Raises UserError.
    """
    reached = [*(read_rung(rung) for rung in ladder.rungs), *adopted]
    check_same_text([as_planned(ladder.target, ladder.sources), *reached])
    fit = fit_points([each.point for each in reached])
    trial = ladder.target
    if ladder.flops is not None:
        trial = ladder.resized(*best_shape(fit, trial, ladder.flops))
    stem = f"{ladder.mixture}-" if ladder.mixture else ""
    curve = predict_curve(
        fit, trial, [(each.parameters, each.tokens, each.curve) for each in reached]
    )
    prediction = folder / f"{stem}{PREDICTION}"
    atomic_write_json(prediction, {"steps": trial.config.train.steps, "points": curve})
    recipe = with_changes(trial.config, {"log": {"prediction": str(prediction)}})
    recipe_file = folder / f"{stem}{TARGET}"
    atomic_write_text(recipe_file, to_toml(recipe, changed_only=True))
    per_byte = median(each.loss / each.bits_per_byte for each in reached if isfinite(each.loss))
    flops_per_token = trial.flops / trial.tokens
    target = Target(trial.parameters, trial.tokens, flops_per_token, per_byte / log(2))
    curves = {
        each.name: [[part * each.tokens, loss] for part, loss in each.curve] for each in reached
    }
    tasks = predict_scores(fit, {each.name: each.scores for each in reached}, target)
    found = conclusions(fit, target)
    found["cautions"] += repeated(
        trial, ladder.rungs, ladder.sources, best_tokens=found["best"]["tokens"]["value"]
    )
    numbers = {"name": ladder.mixture, "curves": curves, "tasks": tasks, **found}
    fitted = Fitted(fit, target, numbers)
    if ladder.mixture:
        print(f"mixture    {ladder.mixture}")
    _print_prediction(fitted, trial)
    print(f"to start   {typed_command()} pretrain {quote(str(recipe_file))}")
    return fitted


def _write_page(fitted: Sequence[Fitted], config: LadderConfig, folder: Path) -> None:
    """Compare the mixtures at the first one's target, and write the page of all."""
    target = fitted[0].target
    pairs = compare({each.numbers["name"]: each.fit for each in fitted}, target)
    if pairs:
        print(
            f"compared   at {short(target.parameters)} parameters, {short(target.tokens)} tokens:"
        )
    for pair in pairs:
        verdict = "" if pair["decided"] else ", which is not decided"
        difference = f"{pair['value']:+.4f} ({pair['low']:+.4f} to {pair['high']:+.4f})"
        print(
            f"compared   {pair['first']} less {pair['second']}: {difference} nats per"
            f" token{verdict}"
        )
    title = f"Ladder of {config.run.name}"
    print(f"page       {write_page(folder, [each.numbers for each in fitted], pairs, title)}")


def _print_prediction(fitted: Fitted, trial: Trial) -> None:
    numbers = fitted.numbers
    best = fitted.numbers["best"]
    for line in numbers["cautions"]:
        print(f"caution    {line}")
    four_digits = "{value:.4f} ({low:.4f} to {high:.4f})"
    loss = four_digits.format(**numbers["target"]["loss"])
    bits = four_digits.format(**numbers["target"]["bits_per_byte"])
    print(f"predicted  {_describe(trial)}: val/loss {loss}, {bits} bits per byte")
    if numbers["check"]:
        print(f"check      {check_text(numbers['check'])}")
    for task in numbers["tasks"]:
        score = "{value:.3f} ({low:.3f} to {high:.3f})".format(**task["score"])
        caution = f" ({task['caution']})" if task["caution"] else ""
        print(f"score      {task['name']}: {score}{caution}")
    print(
        f"best       for as many FLOPs: {interval_text(best['parameters'], 3)} parameters,"
        f" {short(best['tokens']['value'])} tokens, val/loss {best['loss']['value']:.4f}"
    )
    own = next(size for size in numbers["sizes"] if size["is_target"])
    print(
        f"           {numbers['flat']['low']:.2g} to {numbers['flat']['high']:.2g} times that size"
        " are within 1 %"
    )
    above = own["loss"] / best["loss"]["value"] - 1
    print(
        f"           the predicted run has {own['ratio']:.2g} times that size: {100 * above:+.2f} %"
    )
    kind = trial.config.model.parametrization
    factors = f", with the factors of {kind}" if kind != "standard" else ""
    print(f"           learning rate {trial.config.optimizer.lr:g}{factors}")
