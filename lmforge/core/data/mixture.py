"""Mixtures of sources in phases: which source each sample comes from, and which of its sequences;
from integers, no state.

A phase has a weight for each source. Its samples are numbered in blocks: the end of a block n
samples into the phase has ⌊n·W_j⌋ − ⌊n·W_(j−1)⌋ samples of source j, W being the cumulative
weights, which are exact fractions. So every source is within one sample of its proportion at every
block end. A keyed permutation orders the samples within a block. The order of a phase does not
depend on where it ends, so that a phase can be cut or lengthened anywhere after the samples that
were used.

The samples of a source are numbered through all phases: nothing is read twice before all of it has
been read. With another sequence length its tokens are other sequences: such a phase begins a new
epoch of every source.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from threading import Lock

import numpy as np

from lmforge.core.data.dataset import PackedDataset
from lmforge.core.data.order import derive_key, permutation
from lmforge.core.data.packing import MapRows, PackedSequence, PackedSequences
from lmforge.core.errors import UserError
from lmforge.core.files.checksums import hash_json
from lmforge.core.records.manifests import DataPlan, PhasePlan

# Incremented whenever the same plan would give other samples.
MIXTURE_VERSION = 1
# A block has at least one sample of every source, and a table of its size is kept.
MIN_PROPORTION = Fraction(1, 1_000_000)
CACHED_BLOCKS = 4


@dataclass(frozen=True)
class Phase:
    """Part of a run with one mixture.

    num_samples  None in the last phase, which has no end
    proportions  of each source, of the samples; they add up to 1, and 0 leaves a source out
    datasets     of each source, in the sequence length of the phase
    """

    num_samples: int | None
    proportions: tuple[Fraction, ...]
    datasets: tuple[PackedDataset, ...]

    @property
    def sequence_length(self) -> int:
        return self.datasets[0].sequence_length


def proportions_of(
    weights: Mapping[str, Fraction], tokens_per_sample: Sequence[Fraction] | None = None
) -> tuple[Fraction, ...]:
    """Proportions of the samples, from weights by source: of the samples, or with
    `tokens_per_sample` of the tokens.

    Raises UserError for a source with less than MIN_PROPORTION.
    """
    sizes = tokens_per_sample or [Fraction(1)] * len(weights)
    of_samples = [weight / size for weight, size in zip(weights.values(), sizes, strict=True)]
    proportions = tuple(each / sum(of_samples) for each in of_samples)
    for name, proportion in zip(weights, proportions, strict=True):
        if 0 < proportion < MIN_PROPORTION:
            raise UserError(
                f"{name}: its weight gives it less than one sample in a million; raise it, or leave"
                " the source out"
            )
    return proportions


class BlockOrder:
    """The order of the sources in one phase, whose samples are numbered from 0: blocks of a
    multiple of `unit` samples, each in the proportions.
    """

    def __init__(self, proportions: Sequence[Fraction], unit: int, seed: int, phase: int) -> None:
        denominator = math.lcm(*(proportion.denominator for proportion in proportions))
        self._bounds = [
            int(bound * denominator) for bound in accumulate(proportions, initial=Fraction(0))
        ]
        self._denominator = denominator
        self._key = (seed, "mixture", phase)
        self._unit = unit
        needed = math.ceil(1 / min(proportion for proportion in proportions if proportion))
        # With fewer samples than `needed` the count of a source could decrease.
        self.block_size = -(-needed // unit) * unit
        self._cached_block = lru_cache(CACHED_BLOCKS)(self._order_of_block)
        self._lock = Lock()

    def assign(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of samples start … stop − 1, start < stop, and how many of that source come
        before each; int64 each.
        """
        size = self.block_size
        blocks = range(start // size, (stop - 1) // size + 1)
        sources, ranks = (
            np.concatenate(arrays) for arrays in zip(*map(self._block, blocks), strict=True)
        )
        inside = slice(start - blocks[0] * size, stop - blocks[0] * size)
        return sources[inside].astype(np.int64), ranks[inside]

    def counts(self, n: int) -> np.ndarray:
        """How many of the first n samples are of each source, int64 [sources]."""
        block, rest = divmod(n, self.block_size)
        counts = self._counts_at(block * self.block_size)
        if rest:
            counts += np.bincount(self._block(block)[0][:rest], minlength=len(counts))
        return counts

    def _counts_at(self, n: int) -> np.ndarray:
        ends = [n * bound // self._denominator for bound in self._bounds]
        return np.array([end - begin for begin, end in pairwise(ends)], np.int64)

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        # Several reading threads need the same block at once, and a large one takes seconds.
        with self._lock:
            return self._cached_block(block)

    def _order_of_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.block_size
        before = self._counts_at(block * size)
        quotas = self._counts_at((block + 1) * size) - before
        order = permutation(size, derive_key(*self._key, block))(np.arange(size))
        sources = np.repeat(np.arange(len(quotas), dtype=np.int16), quotas)[order]
        ranks = np.empty(size, np.int64)
        first = np.repeat(np.cumsum(quotas) - quotas - before, quotas)
        ranks[np.argsort(sources, kind="stable")] = np.arange(size) - first
        return sources, ranks


@dataclass(frozen=True)
class _PhaseStart:
    """Where a phase begins: its first sample, and for each source the samples and epochs before the
    phase.

    `samples` counts from where the sequence length changed last; `epochs` are those begun before
    that.
    """

    sample: int
    samples: np.ndarray
    epochs: np.ndarray


@dataclass(frozen=True)
class SourceUse:
    """What samples up to some number use of a source.

    `epochs` counts in sequences of the length in use then.
    """

    samples: int
    tokens: int
    epochs: float


class MixedDataset:
    """The samples of phases of mixed sources, without end: a pure function of (phases, unit, seed,
    n).

    `names` are those of the sources. `unit` divides the length of every phase but the last: the
    global batch size, so that a batch has one sequence length.
    """

    def __init__(
        self, names: Sequence[str], phases: Sequence[Phase], *, unit: int, seed: int
    ) -> None:
        self.names = tuple(names)
        self.phases = tuple(phases)
        self._unit = unit
        self._seed = seed
        # Blocks are laid out by digest, so that the order in which a recipe lists the sources does
        # not matter.
        digests = [dataset.name for dataset in phases[0].datasets]
        self._by_digest = np.array(sorted(range(len(names)), key=digests.__getitem__), np.int64)
        self._orders = [
            BlockOrder(
                [phase.proportions[source] for source in self._by_digest], unit, seed, number
            )
            for number, phase in enumerate(phases)
        ]
        self._starts = list(self._phase_starts())
        self.location = ", ".join(dataset.location for dataset in phases[0].datasets)

    def _phase_starts(self) -> Iterator[_PhaseStart]:
        none = np.zeros(len(self.names), np.int64)
        start = _PhaseStart(0, none, none)
        yield start
        for (phase, following), order in zip(pairwise(self.phases), self._orders, strict=False):
            assert phase.num_samples is not None
            samples = start.samples + self._counts(order, phase.num_samples)
            epochs = start.epochs
            if following.sequence_length != phase.sequence_length:
                sizes = [dataset.sequences_per_epoch for dataset in phase.datasets]
                samples, epochs = none, epochs + -(-samples // np.array(sizes))
            start = _PhaseStart(start.sample + phase.num_samples, samples, epochs)
            yield start

    def _counts(self, order: BlockOrder, n: int) -> np.ndarray:
        """How many of the first n samples of a phase are of each source, in the order of
        `names`.
        """
        counts = np.empty(len(self.names), np.int64)
        counts[self._by_digest] = order.counts(n)
        return counts

    @property
    def sequence_length(self) -> int:
        """The longest."""
        return max(phase.sequence_length for phase in self.phases)

    @property
    def sequences_per_epoch(self) -> int:
        """The sequences of all sources together, in the first phase's length."""
        return sum(dataset.sequences_per_epoch for dataset in self.phases[0].datasets)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(phase, first sample, sample after the last one) of each phase that samples start … stop
        − 1 touch.
        """
        ends = [begin.sample for begin in self._starts[1:]]
        for number, (begin, end) in enumerate(zip(self._starts, [*ends, stop], strict=True)):
            if (first := max(start, begin.sample)) < (last := min(stop, end)):
                yield number, first, last

    def assign(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of samples start … stop − 1, and the index of the sequence in it; int64
        [samples] each.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"samples {start} to {stop}")
        sources = np.zeros(stop - start, np.int64)
        indices = np.zeros(stop - start, np.int64)
        for number, first, last in self._pieces(start, stop):
            begin = self._starts[number]
            phase = self.phases[number]
            piece = slice(first - start, last - start)
            positions, ranks = self._orders[number].assign(
                first - begin.sample, last - begin.sample
            )
            sources[piece] = self._by_digest[positions]
            ranks += begin.samples[sources[piece]]
            for source in np.unique(sources[piece]):
                of_source = sources[piece] == source
                dataset = phase.datasets[source]
                skipped = int(begin.epochs[source])
                indices[piece][of_source] = dataset.indices_of(
                    ranks[of_source] + skipped * dataset.sequences_per_epoch
                )
        return sources, indices

    def sequences(
        self, start: int, stop: int, *, padding: int = 0, map_rows: MapRows = map
    ) -> PackedSequences:
        """Samples start … stop − 1, all of one sequence length, with their sources.

        See `PackedDataset.read`.
        """
        sources, indices = self.assign(start, stop)
        phases = [
            self.phases[number]
            for number, first, last in self._pieces(start, stop)
            for _ in range(first, last)
        ]
        if len(lengths := {phase.sequence_length for phase in phases}) != 1:
            raise ValueError(f"samples {start} to {stop} have sequences of {lengths} tokens")
        [sequence_length] = lengths
        [datasets, *_] = [phase.datasets for phase in phases]
        extras = sorted(
            {extra for dataset in datasets for extra in dataset.packing.extras}, key=str
        )
        sequences = [
            (phase.datasets[source].packing, index)
            for phase, source, index in zip(phases, sources.tolist(), indices.tolist(), strict=True)
        ]
        out = PackedSequences.empty(
            len(sequences) + padding, sequence_length, extras, with_sources=len(self.names) > 1
        )
        out.fill(range(start, stop), sequences, map_rows)
        if out.source_ids is not None:
            out.source_ids[: len(sequences)] = sources[:, None]
        return out

    def sequence(self, n: int) -> PackedSequence:
        """Sample n. See `sequences`."""
        return self.sequences(n, n + 1)[0]

    @property
    def read_threads(self) -> int:
        """How many sequences to read at once: several for remote shards."""
        return max(dataset.read_threads for phase in self.phases for dataset in phase.datasets)

    def describe_sample(self, n: int) -> str:
        """Where sample n is from, for people."""
        [source], [index] = self.assign(n, n + 1)
        return (
            f"{self.names[source]}, sequence {index}"
            if len(self.names) > 1
            else f"sequence {index}"
        )

    def tokens_until(self, n: int) -> int:
        """The tokens in the samples before n, padding included."""
        return sum(
            (last - first) * self.phases[number].sequence_length
            for number, first, last in self._pieces(0, n)
        )

    def use_until(self, n: int) -> list[SourceUse]:
        """What the samples before n use of each source."""
        samples = tokens = np.zeros(len(self.names), np.int64)
        epochs = np.zeros(len(self.names))
        for number, first, last in self._pieces(0, n):
            phase = self.phases[number]
            begin = self._starts[number]
            counts = self._counts(self._orders[number], last - first)
            samples = samples + counts
            tokens = tokens + counts * phase.sequence_length
            sizes = np.array([dataset.sequences_per_epoch for dataset in phase.datasets])
            epochs = begin.epochs + (begin.samples + counts) / sizes
        return [
            SourceUse(int(a), int(b), float(c))
            for a, b, c in zip(samples, tokens, epochs, strict=True)
        ]

    def describe_phases(self) -> list[str]:
        """A line per phase: its steps, mixture and sequence length, and the tokens that its change
        of length leaves unread.
        """
        lines = []
        for number, (phase, start) in enumerate(zip(self.phases, self._starts, strict=True)):
            first = start.sample // self._unit
            steps = (
                f"from step {first:,}"
                if phase.num_samples is None
                else (f"steps {first:,} to {first + phase.num_samples // self._unit - 1:,}")
            )
            mixture = ", ".join(
                f"{name} {float(each):.4g}"
                for name, each in zip(self.names, phase.proportions, strict=True)
                if each
            )
            words = (
                f"phase {number + 1}, {steps}: sequences of {phase.sequence_length:,} tokens;"
                f" {mixture}"
            )
            lines.append(f"{words}{self._describe_unread(number)}")
        return lines

    def _describe_unread(self, number: int) -> str:
        """What a phase with another sequence length leaves unread of the epochs before it."""
        if (
            number == 0
            or self.phases[number].sequence_length == self.phases[number - 1].sequence_length
        ):
            return ""
        before = self.phases[number - 1]
        start = self._starts[number - 1]
        assert before.num_samples is not None
        read = start.samples + self._counts(self._orders[number - 1], before.num_samples)
        sizes = [dataset.sequences_per_epoch for dataset in before.datasets]
        unread = [
            (name, -int(n) % size, size)
            for name, n, size in zip(self.names, read, sizes, strict=True)
        ]
        listed = ", ".join(f"{name} {left:,} of {size:,}" for name, left, size in unread if left)
        return f"; new epochs begin, sequences left unread: {listed or 'none'}"

    # --- what a checkpoint remembers --------------------------------------------------------------

    def plan_at(self, n: int) -> DataPlan:
        """All that the samples before n depend on, as JSON: their phases, without later ones, and
        the names of sources.
        """
        digests = [dataset.name for dataset in self.phases[0].datasets]
        plan = DataPlan(version=MIXTURE_VERSION, seed=self._seed, unit=self._unit, phases=[])
        for number, first, last in self._pieces(0, n):
            phase = self.phases[number]
            used = {
                name: str(each)
                for name, each in zip(digests, phase.proportions, strict=True)
                if each
            }
            length = phase.sequence_length
            packing = [*phase.datasets[0].plan[:2], *phase.datasets[0].order_plan]
            plan["phases"].append(
                PhasePlan(
                    samples=last - first, sequence_length=length, proportions=used, packing=packing
                )
            )
        return {**plan, "names": dict(zip(digests, self.names, strict=True))}

    def plan_hash_at(self, n: int) -> str:
        """A hash of `plan_at(n)` that does not depend on the names of sources."""
        return hash_json(self.plan_at(n) | {"names": None}, sort_keys=True)


# The part of a plan that cannot change between phases.
FIXED = ("version", "seed", "unit")
# The training data of a stage.
TrainingDataset = PackedDataset | MixedDataset


def describe_plan_change(then: DataPlan, now: DataPlan) -> str | None:
    """How the phases up to a sample differ from an earlier `plan_at` of that sample; None if they
    are the same.
    """
    if (
        "phases" not in then
        or "phases" not in now
        or [then.get(name) for name in FIXED] != [now.get(name) for name in FIXED]
    ):
        return None
    for number, (old, new) in enumerate(zip(then["phases"], now["phases"], strict=False), start=1):
        if gone := [digest for digest in old["proportions"] if digest not in now["names"]]:
            return (
                f"source {then.get('names', {}).get(gone[0], gone[0])} is missing or has other"
                " tokens now"
            )
        for digest in {**old["proportions"], **new["proportions"]}:
            before, after = (Fraction(phase["proportions"].get(digest, 0)) for phase in (old, new))
            if before != after:
                change = (
                    f"{now['names'][digest]} was {float(before):.4g} of its samples, here"
                    f" {float(after):.4g}"
                )
                return f"phase {number}: {change} (data.phases keep the weights of the past)"
        if old["sequence_length"] != new["sequence_length"]:
            return (
                f"phase {number}: its sequences had {old['sequence_length']} tokens, here"
                f" {new['sequence_length']}"
            )
        if old["samples"] != new["samples"]:
            unit = then["unit"]
            used = sum(phase["samples"] for phase in then["phases"])
            was, is_now = (phase["samples"] // unit for phase in (old, new))
            later = f"a phase can only end, and another begin, at step {used // unit} or later"
            return f"phase {number}: {was} steps of it were trained, here it has {is_now}; {later}"
    return None
