"""Mixtures against an independent oracle: every block laid out in lists, counted with exact
fractions.
"""

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import ceil, floor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lmforge.core.data.dataset import PackedDataset, join_datasets
from lmforge.core.data.loader import BatchLoader
from lmforge.core.data.mixture import (
    BlockOrder,
    MixedDataset,
    Phase,
    describe_plan_change,
    proportions_of,
)
from lmforge.core.data.order import permutation
from lmforge.core.data.packing import PackedSequence, Packing
from lmforge.core.errors import UserError
from tests.seeds import fresh_random


class _Numbered(Packing):
    """A packing whose sequence `index` holds its source and its index, the latter also as an extra
    if that has a name.
    """

    extra = ""

    def __init__(self, source: int, num_sequences: int) -> None:
        self.source, self._num_sequences = source, num_sequences

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def extras(self) -> list[str]:
        return [self.extra] if self.extra else []

    def read(self, index: int, out: PackedSequence) -> None:
        out.put_document([self.source, index])
        if self.extra:
            out.extras[self.extra][:] = index


def dataset_of(source: int, num_sequences: int, length: int, seed: int) -> PackedDataset:
    digest = f"digest {source}"
    return PackedDataset(
        _Numbered(source, num_sequences),
        name=digest,
        location=f"source {source}",
        plan=["test", 1, digest, length],
        sequence_length=length,
        seed=seed,
    )


def mixture_of(
    plan: list[tuple[int | None, list[Fraction], int]], tokens: list[int], unit: int, seed: int
) -> MixedDataset:
    """Phases of (samples, weights, sequence length) of sources with so many tokens each."""
    names = [f"s{number}" for number in range(len(tokens))]
    phases = [
        Phase(
            samples,
            proportions_of(dict(zip(names, weights, strict=True))),
            tuple(
                dataset_of(source, -(-count // length), length, seed)
                for source, count in enumerate(tokens)
            ),
        )
        for samples, weights, length in plan
    ]
    return MixedDataset(names, phases, unit=unit, seed=seed)


# --- the oracle -----------------------------------------------------------------------------------


def slow_samples(
    plan: list[tuple[int | None, list[Fraction], int]],
    tokens: list[int],
    unit: int,
    seed: int,
    stop: int,
) -> list[tuple[int, int, int]]:
    """(source, index of its sequence, sequence length) of the first `stop` samples, one at a
    time.
    """

    def key(*parts: object) -> int:
        return xxhash.xxh3_64_intdigest(json.dumps(parts).encode())

    result: list[tuple[int, int, int]] = []
    # Of each source: its epoch, and what of it has been read.
    epoch, read = [0] * len(tokens), [0] * len(tokens)
    last_length = None
    for number, (samples, weights, length) in enumerate(plan):
        total = sum(weights)
        shares = [weight / total for weight in weights]
        if last_length not in (None, length):
            for source in range(len(tokens)):
                epoch[source] += bool(read[source])
                read[source] = 0
        last_length = length
        size = unit * ceil(ceil(1 / min(share for share in shares if share)) / unit)
        block, used = 0, 0
        while len(result) < stop and (samples is None or used < samples):
            quotas = []
            # By digest, which is the number here.
            for source in range(len(tokens)):
                below, above = (
                    sum(shares[:source], Fraction(0)),
                    sum(shares[: source + 1], Fraction(0)),
                )
                at = [
                    floor(n * above) - floor(n * below) for n in (block * size, (block + 1) * size)
                ]
                quotas.append(at[1] - at[0])
            layout = [source for source, quota in enumerate(quotas) for _ in range(quota)]
            order = permutation(size, key(seed, "mixture", number, block))(np.arange(size)).tolist()
            for slot in order:
                if len(result) == stop or used == samples:
                    break
                source = layout[slot]
                count = -(-tokens[source] // length)
                if read[source] == count:
                    epoch[source], read[source] = epoch[source] + 1, 0
                shuffled = permutation(
                    count, key(seed, "source", f"digest {source}", epoch[source])
                )
                result.append((source, int(shuffled(np.array([read[source]]))[0]), length))
                read[source] += 1
                used += 1
            block += 1
    return result


@st.composite
def plans(
    draw: st.DrawFn,
) -> tuple[list[tuple[int | None, list[Fraction], int]], list[int], int, int]:
    tokens = draw(st.lists(st.integers(9, 200), min_size=1, max_size=5))
    unit = draw(st.integers(1, 12))
    weight = st.fractions(Fraction(1, 40), 1, max_denominator=50) | st.just(Fraction(0))
    phases: list[tuple[int | None, list[Fraction], int]] = []
    for number in range(count := draw(st.integers(1, 4))):
        weights = draw(st.lists(weight, min_size=len(tokens), max_size=len(tokens)).filter(any))
        samples = None if number == count - 1 else unit * draw(st.integers(1, 12))
        phases.append((samples, weights, draw(st.sampled_from([4, 8]))))
    return phases, tokens, unit, draw(st.integers(0, 2**60))


# --- claims ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(plan=plans(), start=st.integers(0, 250), size=st.integers(0, 60))
def test_any_samples_of_any_plan_equal_the_slow_oracle(plan: Any, start: int, size: int) -> None:
    dataset = mixture_of(*plan)
    expected = slow_samples(*plan, start + size)[start:]
    sources, indices = dataset.assign(start, start + size)
    assert list(zip(sources.tolist(), indices.tolist(), strict=True)) == [
        (source, index) for source, index, _ in expected
    ]
    unit = plan[2]
    steps = range(start // unit, -(-(start + size) // unit))
    batches = [dataset.sequences(step * unit, (step + 1) * unit) for step in steps]
    read = [
        [*sequence.tokens[:2].tolist(), len(sequence.tokens)]
        for batch in batches
        for sequence in batch
    ]
    assert [tuple(each) for each in read[start % unit :][:size]] == expected
    use = dataset.use_until(start + size)
    every = slow_samples(*plan, start + size)
    assert [each.samples for each in use] == [
        sum(s == number for s, _, _ in every) for number in range(len(plan[1]))
    ]
    assert (
        dataset.tokens_until(start + size)
        == sum(length for _, _, length in every)
        == sum(each.tokens for each in use)
    )


def test_every_source_is_within_one_sample_of_its_weight_at_every_block_end_over_five_phases() -> (
    None
):
    """Up to 200 sources, shares down to a millionth; sources are added with each phase."""
    random_ = fresh_random()
    for count in (2, 3, 17, 200):
        weights: dict[str, Fraction] = {}
        for phase in range(5):
            # Among 200 sources, less than 200 can be a share that is refused.
            weights |= {
                f"{phase}-{number}": Fraction(random_.randint(250, 10**6), 10**6)
                for number in range(-(-count // 5))
            }
            if phase == 4:
                weights["rare"] = sum(weights.values(), Fraction(0)) / random_.randint(
                    1000, 999_999
                )
            shares = proportions_of(weights)
            order = BlockOrder(
                shares, unit=random_.randint(1, 512), seed=random_.getrandbits(40), phase=phase
            )
            for block in [1, 2, *(random_.randint(3, 10**9) for _ in range(5))]:
                n = block * order.block_size
                counts = order.counts(n).tolist()
                assert sum(counts) == n
                assert all(
                    abs(got - n * share) < 1 for got, share in zip(counts, shares, strict=True)
                )


def test_threads_that_need_a_block_at_once_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    order_of_block = BlockOrder._order_of_block

    def counted(order: BlockOrder, block: int) -> tuple[np.ndarray, np.ndarray]:
        computed.append(block)
        time.sleep(0.02)  # time enough for every thread to ask
        return order_of_block(order, block)

    monkeypatch.setattr(BlockOrder, "_order_of_block", counted)
    dataset = mixture_of([(None, [Fraction(1, 2), Fraction(1, 3)], 4)], [400, 300], unit=5, seed=3)
    start = Barrier(8)

    def read(number: int) -> list[int]:
        start.wait()
        return dataset.sequence(number).tokens[:2].tolist()

    with ThreadPoolExecutor(8) as threads:
        read_at_once = list(threads.map(read, range(8)))
    assert sorted(computed) == sorted(set(computed))
    assert read_at_once == [dataset.sequence(number).tokens[:2].tolist() for number in range(8)]


def test_the_samples_of_a_batch_are_assigned_to_sources_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assigned: list[tuple[int, int]] = []
    assign = MixedDataset.assign

    def counted(dataset: MixedDataset, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        assigned.append((start, stop))
        return assign(dataset, start, stop)

    dataset = mixture_of([(None, [Fraction(1, 2), Fraction(1, 3)], 4)], [400, 300], unit=5, seed=3)
    expected = dataset.assign(0, 10)[0]
    monkeypatch.setattr(MixedDataset, "assign", counted)
    with BatchLoader(dataset, global_batch_size=10, micro_batch_size=10) as loader:
        (batch,) = loader.batches(0)
    assert assigned.count((0, 10)) == len([each for each in assigned if each[0] < 10]) == 1
    assert batch.source_ids is not None
    assert batch.source_ids.tolist() == [[source] * 4 for source in expected.tolist()]


def test_datasets_joined_are_read_by_as_many_threads_as_the_one_that_needs_most() -> None:
    datasets = {"local": dataset_of(0, 20, 4, 1), "remote": dataset_of(1, 20, 4, 1)}
    datasets["remote"].read_threads = 8
    assert join_datasets(datasets).read_threads == 8


def test_what_only_one_source_has_of_its_tokens_is_zero_in_the_others() -> None:
    dataset = mixture_of([(None, [Fraction(1, 2), Fraction(1, 2)], 4)], [400, 300], unit=5, seed=3)
    dataset.phases[0].datasets[1].packing.extra = "margins"  # type: ignore[attr-defined]
    sources, indices = dataset.assign(0, 50)
    margins = dataset.sequences(0, 50).extras["margins"]
    assert margins.tolist() == [
        [index * source] * 4
        for source, index in zip(sources.tolist(), indices.tolist(), strict=True)
    ]
    assert indices[sources == 1].any()


def test_samples_of_two_sequence_lengths_are_no_batch() -> None:
    dataset = mixture_of([(10, [Fraction(1)], 4), (None, [Fraction(1)], 8)], [400], unit=5, seed=3)
    with pytest.raises(ValueError, match=r"samples 5 to 15 have sequences of \{8, 4\} tokens"):
        dataset.sequences(5, 15)


def test_every_sequence_of_every_source_is_read_once_before_any_is_read_again() -> None:
    plan: Any = [
        (60, [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)], 4),
        (None, [Fraction(1), Fraction(3), Fraction(0)], 4),
    ]
    dataset = mixture_of(plan, [100, 60, 44], unit=6, seed=fresh_random().getrandbits(40))
    sources, indices = dataset.assign(0, 600)
    for source, tokens in enumerate([100, 60, 44]):
        of_source, count = indices[sources == source], tokens // 4
        whole = len(of_source) // count
        assert whole or source == 2
        for epoch in range(whole):
            assert sorted(of_source[epoch * count : (epoch + 1) * count].tolist()) == list(
                range(count)
            )
        assert max(Counter(of_source[whole * count :].tolist()).values(), default=1) == 1


def test_an_appended_or_cut_phase_changes_no_sample_before_it() -> None:
    random_ = fresh_random()
    one, two = [Fraction(7, 10), Fraction(3, 10)], [Fraction(1, 9), Fraction(8, 9)]
    endless = mixture_of([(None, one, 4)], [400, 300], unit=5, seed=3)
    for _ in range(10):
        cut = 5 * random_.randint(1, 40)
        longer = mixture_of([(cut, one, 4), (None, two, 8)], [400, 300], unit=5, seed=3)
        assert np.array_equal(np.stack(endless.assign(0, cut)), np.stack(longer.assign(0, cut)))
        for n in (0, cut // 2, cut):
            assert endless.plan_hash_at(n) == longer.plan_hash_at(n)
        assert endless.plan_hash_at(cut + 1) != longer.plan_hash_at(cut + 1)


def test_the_order_in_which_sources_are_listed_does_not_matter() -> None:
    """Nor do their names; a run may be continued with both changed."""
    seed = fresh_random().getrandbits(40)

    def mixture(sources: list[int]) -> MixedDataset:
        weights, tokens = [Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)], [400, 300, 200]
        datasets = tuple(dataset_of(source, tokens[source] // 4, 4, seed) for source in sources)
        phase = Phase(None, tuple(weights[source] for source in sources), datasets)
        return MixedDataset([f"name {source}" for source in sources], [phase], unit=5, seed=seed)

    one, other = mixture([0, 1, 2]), mixture([2, 0, 1])
    read = [
        [sequence.tokens[:2].tolist() for sequence in dataset.sequences(0, 200)]
        for dataset in (one, other)
    ]
    assert read[0] == read[1]
    assert one.plan_hash_at(200) == other.plan_hash_at(200)
    assert [use.samples for use in one.use_until(150)] == [
        use.samples for use in sorted_uses(other, 150)
    ]


def sorted_uses(dataset: MixedDataset, n: int) -> list[Any]:
    """What samples use of each source, by the sources' names."""
    return [
        use
        for _, use in sorted(
            zip(dataset.names, dataset.use_until(n), strict=True), key=lambda each: each[0]
        )
    ]


def test_a_changed_past_is_described() -> None:
    def plan(*phases: Any, tokens: tuple[int, ...] = (400, 300), n: int = 100) -> dict[str, Any]:
        weighted = [
            (samples, [Fraction(each) for each in weights], length)
            for samples, weights, length in phases
        ]
        return mixture_of(weighted, list(tokens), unit=5, seed=3).plan_at(n)

    then = plan((None, (3, 1), 4))
    assert describe_plan_change(then, plan((100, (3, 1), 4), (None, (1, 1), 8))) is None
    assert (
        describe_plan_change(then, plan((None, (1, 1), 4)))
        == "phase 1: s0 was 0.75 of its samples, here 0.5 (data.phases keep the weights of the"
        " past)"
    )
    assert (
        describe_plan_change(then, plan((None, (3, 1), 8)))
        == "phase 1: its sequences had 4 tokens, here 8"
    )
    cut = describe_plan_change(then, plan((50, (3, 1), 4), (None, (1, 1), 4)))
    assert cut is not None
    assert cut.startswith(
        "phase 1: 20 steps of it were trained, here it has 10; a phase can only end"
    )
    assert cut.endswith("at step 20 or later")
    other = json.loads(json.dumps(then).replace("digest 1", "digest 9"))
    assert describe_plan_change(other, then) == "source s1 is missing or has other tokens now"


def test_weights_by_tokens_give_sources_their_parts_of_the_tokens() -> None:
    """A sequence of the first source holds 8 tokens, one of the second 2: four times as many of
    those are needed.
    """
    shares = proportions_of({"a": Fraction(1), "b": Fraction(1)}, [Fraction(8), Fraction(2)])
    assert shares == (Fraction(1, 5), Fraction(4, 5))


def test_a_weight_below_a_millionth_is_refused() -> None:
    with pytest.raises(
        UserError, match="rare: its weight gives it less than one sample in a million"
    ):
        proportions_of({"much": Fraction(1), "rare": Fraction(1, 10**7)})


@pytest.mark.parametrize("n", [1, 17, 1000])
def test_a_single_source_is_read_in_its_own_order(n: int) -> None:
    alone, dataset = (
        mixture_of([(None, [Fraction(1)], 4)], [96], unit=7, seed=5),
        dataset_of(0, 24, 4, 5),
    )
    assert alone.assign(n, n + 50)[1].tolist() == dataset.indices(n, n + 50).tolist()


def test_every_block_has_the_proportions_and_the_counts_stay_as_exact() -> None:
    rng = fresh_random()
    for _ in range(20):
        weights = [Fraction(rng.randint(1, 9)) for _ in range(rng.randint(2, 4))]
        proportions = [weight / sum(weights) for weight in weights]
        order = BlockOrder(proportions, rng.randint(10, 60), rng.getrandbits(63), 0)
        size = order.block_size
        sources, ranks = order.assign(0, 5 * size)
        for source, proportion in enumerate(proportions):
            assert ranks[sources == source].tolist() == list(range((sources == source).sum()))
            for block in range(5):
                assert (
                    abs(
                        (sources[: size * (block + 1)] == source).sum()
                        - proportion * size * (block + 1)
                    )
                    < 1
                )
        assert (
            order.counts(3 * size + 7).tolist()
            == np.bincount(sources[: 3 * size + 7], minlength=len(weights)).tolist()
        )


def test_any_weights_have_their_counts_at_every_block_end() -> None:
    rng = fresh_random()
    drawn = [
        (
            [rng.randint(1, 100) for _ in range(rng.randint(3, 6))],
            rng.randint(1, 64),
        )
        for _ in range(100)
    ]
    for weights, unit in [([5, 20, 75], 8), *drawn]:
        proportions = [Fraction(weight, sum(weights)) for weight in weights]
        order = BlockOrder(proportions, unit, rng.getrandbits(63), 0)
        for block in (0, 1, rng.randint(2, 10**6)):
            start, stop = (number * order.block_size for number in (block, block + 1))
            quotas = order.counts(stop) - order.counts(start)
            assert (
                np.bincount(order.assign(start, stop)[0], minlength=len(weights)).tolist()
                == quotas.tolist()
            )
            for got, proportion in zip(order.counts(stop).tolist(), proportions, strict=True):
                assert abs(got - stop * proportion) < 1


def test_a_tiny_weight_makes_a_long_block() -> None:
    proportions = [Fraction(1, 10**6), 1 - Fraction(1, 10**6)]
    assert BlockOrder(proportions, 64, 0, 0).block_size == 10**6
