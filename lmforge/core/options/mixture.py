"""Sources of data with weights, and the phases of a run that mix them: tables of the recipe's
[data].
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import quoted
from lmforge.core.options.options import POSSIBLE_PATH, Options, is_impossible_path, option
from lmforge.core.options.ranges import COUNT, LENGTH, SCALE

SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FOLDER_MEANING = (
    "token folder, as `lmforge prepare` writes them, or an address such as s3://bucket/tokens"
    " (extra: cloud)"
)
QUARANTINE = option(
    (),
    "damaged parts of shards to train without, as `lmforge prepare --verify` prints them: SHARD or"
    " SHARD:FIRST-LAST",
)


class SourceOptions(Options):
    """What the sources of every stage have in common."""

    name: str | None = option(
        None,
        "name of the source in metrics and messages (default: that of its folder or first file)",
    )
    weight: float = option(
        1.0, "weight of the source in the mixture, relative to the weights of the others", **SCALE
    )

    def label_of(self, location: Path) -> str:
        """The name of the source that lies there, or what stands for it; of a link to itself, its
        own name.
        """
        return (
            self.name
            or re.sub("[^A-Za-z0-9._-]+", "-", Path(os.path.realpath(location)).name)[:64].strip(
                "-._"
            )
            or "source"
        )

    def problems(self) -> Iterator[str]:
        if self.name is not None and not SOURCE_NAME.fullmatch(self.name):
            yield (
                "data.sources: name: expected letters, digits, dots, dashes and underscores, got"
                f" {quoted(self.name)}"
            )


class TokenSourceOptions(SourceOptions):
    """Token shards."""

    folder: str = option(..., FOLDER_MEANING)
    quarantine: tuple[str, ...] = QUARANTINE

    @property
    def label(self) -> str:
        return self.label_of(Path(self.folder))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from folder_problems(self.folder, "data.sources: folder")


class FileSourceOptions(SourceOptions):
    """Files of conversations."""

    files: tuple[Path, ...] = option(..., "files to train on, or folders of them")
    validation_files: tuple[Path, ...] = option(
        (), "files to validate on (default: a fraction of the files)"
    )

    @property
    def label(self) -> str:
        return self.label_of(self.files[0])

    def problems(self) -> Iterator[str]:
        if not self.files:
            yield "data.sources: files: name one or more"
        else:
            yield from super().problems()


AnySourceOptions = TokenSourceOptions | FileSourceOptions


def labels_of_mixture(sources: Sequence[AnySourceOptions]) -> list[str]:
    """The labels of several sources; empty where there is one."""
    return [source.label for source in sources] if len(sources) > 1 else []


class PhaseOptions(Options):
    """A part of the run with a mixture of its own.

    Phases follow each other; later ones may be added while a run goes on.
    """

    steps: int | None = option(
        None, "steps of the phase (default: up to the end of the run)", **COUNT
    )
    sequence_length: int | None = option(
        None,
        "tokens in a sequence (default: data.sequence_length, the maximum); another length begins"
        " new epochs",
        **LENGTH,
    )
    weights: tuple[str, ...] = option(
        (),
        "weights of the sources in this phase, NAME=WEIGHT; sources that are not named are left out"
        " (default: their own)",
    )

    def problems(self) -> Iterator[str]:
        for pair in self.weights:
            if self._weight_of(pair) is None:
                yield (
                    "data.phases: weights: expected NAME=WEIGHT with a weight above 0, such as"
                    f" web=0.7, got {quoted(pair)}"
                )
        names = Counter(pair.partition("=")[0] for pair in self.weights)
        if double := [name for name, count in names.items() if count > 1]:
            yield f"data.phases: weights: {double[0]} twice"

    @staticmethod
    def _weight_of(pair: str) -> Fraction | None:
        name, _, text = pair.partition("=")
        try:
            weight = (
                Fraction(text)
                if len(text) <= 32 and re.fullmatch(r"[0-9.]+(e-?[0-9]{1,2})?", text)
                else None
            )
        except ValueError:
            return None
        return weight if name and weight else None

    @property
    def weight_table(self) -> dict[str, Fraction]:
        """The weights by the name of their source; empty where the sources' own weights are
        used.
        """
        return {
            pair.partition("=")[0]: self._weight_of(pair) or Fraction(0) for pair in self.weights
        }


def is_remote(folder: str) -> bool:
    """Whether a folder in options is an address in a store, such as s3://bucket/tokens;
    file:///tokens is a local path.
    """
    scheme, separator, _ = folder.partition("://")
    return bool(separator) and scheme.lower() not in ("file", "local")


def folder_problems(folder: str, name: str) -> Iterator[str]:
    """The problem of a path that is not an address."""
    if not is_remote(folder) and is_impossible_path(Path(folder)):
        yield f"{name}: {POSSIBLE_PATH}"


def mixture_problems(
    sources: Sequence[AnySourceOptions], phases: Sequence[PhaseOptions], sequence_length: int
) -> Iterator[str]:
    """Problems of sources and phases in combination, as lines for the user."""
    names = Counter(source.label for source in sources)
    if double := [name for name, count in names.items() if count > 1]:
        yield f"data.sources: two sources are called {double[0]}; give each a name"
    for number, phase in enumerate(phases):
        where = f"data.phases: phase {number + 1}"
        is_last = number == len(phases) - 1
        if unknown := [name for name in phase.weight_table if name not in names]:
            yield (
                f"{where}: there is no source {quoted(unknown[0])}; the sources are"
                f" {', '.join(names)}"
            )
        if phase.steps is None and not is_last:
            yield f"{where}: give its steps: only the last phase lasts to the end of the run"
        if phase.sequence_length is not None and phase.sequence_length > sequence_length:
            yield (
                f"{where}: its sequence_length = {phase.sequence_length} is more than"
                f" data.sequence_length = {sequence_length}, the longest of the run, for which"
                " memory and model are checked; raise that"
            )


def tokens_by_length(
    phases: Sequence[PhaseOptions], steps: int, global_batch_size: int, sequence_length: int
) -> list[tuple[int, int]]:
    """(sequence length, tokens) of each phase of a run of so many steps.

    Raises UserError where the phases end before the run.
    """
    left = steps
    parts = []
    for phase in phases or (PhaseOptions(),):
        length = phase.sequence_length or sequence_length
        used = left if phase.steps is None else min(phase.steps, left)
        parts.append((length, used * global_batch_size * length))
        left -= used
    if left:
        way = "leave out the length of the last one, or add another"
        raise UserError(f"data.phases: they end {left} steps before the run; {way}")
    return parts
