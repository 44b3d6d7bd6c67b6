"""The text of a ladder: runs beside the recipe's, and runs that read their data too often."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

from lmforge.core.records.runs import Run
from lmforge.core.stages.training_data import TokenSources
from lmforge.lab.ladder.rungs import Trial, tokens_per_step
from lmforge.lab.ladder.runs import Reached, read_reached, text_of

MOST_EPOCHS = 4  # with more passes over the data it predicts too low a loss (arXiv 2305.16264)


def adopt(paths: Sequence[Path], rungs: Sequence[Trial]) -> list[Reached]:
    """The runs that exist, but not these rungs, which count already; each with a name of its own.

    Raises UserError.
    """
    taken = [rung.name for rung in rungs] + [path.name for path in paths]
    own = {Run.from_config(rung.config).path.resolve() for rung in rungs}
    found = []
    for path in paths:
        if path.resolve() not in own:
            reached = read_reached(path)
            if taken.count(path.name) > 1:
                reached = replace(reached, name=str(path))
            found.append(reached)
    return found


def as_planned(trial: Trial, sources: TokenSources, name: str = "the big run") -> Reached:
    """A run before it has reached anything: all runs of a law must have its text."""
    size = _sequences_per_step(trial)
    plan = (
        TokenSources(trial.config, sources.folders)
        .training(size)
        .plan_at(trial.config.train.steps * size)
    )
    text = text_of(trial.config, sources.tokenizer.hash, plan)
    return Reached(name, trial.parameters, trial.tokens, nan, nan, (), text, {})


def repeated(
    target: Trial, rungs: Sequence[Trial], sources: TokenSources, best_tokens: float | None = None
) -> list[str]:
    """Lines about runs that read a source more than MOST_EPOCHS times.

    The runs are the big one, the rungs, and one of the best size, which has `best_tokens`.
    """
    read = [("the target", *most_epochs(target, sources))]
    read += [(rung.name, *most_epochs(rung, sources)) for rung in rungs]
    if best_tokens is not None:
        _, name, epochs = read[0]
        read.append(("the best run for as many FLOPs", name, epochs * best_tokens / target.tokens))
    return [
        f"{who} reads {name} {epochs:.1f} times: beyond {MOST_EPOCHS} the law predicts too low a"
        " loss"
        for who, name, epochs in read
        if epochs > MOST_EPOCHS
    ]


def most_epochs(trial: Trial, sources: TokenSources) -> tuple[str, float]:
    """The source that a run reads most often, and how often it reads it.

    Raises UserError where its data does not suffice.
    """
    size = _sequences_per_step(trial)
    epochs = dict.fromkeys(sources.names, 0.0)
    left = trial.config.train.steps * size
    for phase in TokenSources(trial.config, sources.folders).training(size).phases:
        samples = left if phase.num_samples is None else min(left, phase.num_samples)
        left -= samples
        for name, proportion, dataset in zip(
            sources.names, phase.proportions, phase.datasets, strict=True
        ):
            epochs[name] += float(proportion) * samples / dataset.sequences_per_epoch
    return max(epochs.items(), key=lambda item: item[1])


def _sequences_per_step(trial: Trial) -> int:
    return tokens_per_step(trial.config) // trial.config.data.sequence_length
