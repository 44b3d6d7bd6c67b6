"""Dropout is a function of keys: its masks are statistically random, and the same on every device
and split.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmforge.core.data.order import splitmix64, token_rng_keys
from lmforge.core.model.build import build_model
from lmforge.core.model.config import ModelConfig
from lmforge.core.model.init_weights import init_weights
from lmforge.core.model.rng.splitmix import COUNTER_STEP
from lmforge.core.model.rng.token_rng import (
    _SITE_STEP,
    ADAPTER_SITE,
    NEFTUNE_SITE,
    SITES_PER_BLOCK,
    TokenRng,
    dropout,
)
from lmforge.core.model.setup import ModelSetup
from lmforge.lab.bench.parity import ParityData
from tests.distributed.shapes import SHAPES
from tests.seeds import fresh_seed

# Of a standard normal, further out than this is one in 2 × 10⁹.
FAR = 6.0
GOLDEN_KEYS = [-2518527779507189062, -7472023193839922913]
GOLDEN_MASK = "01010001011100010010010010010100"


def keys_of(seed: int, rows: int = 8, length: int = 64, first: int = 0) -> Tensor:
    return torch.from_numpy(token_rng_keys(seed, first, first + rows, length))


def dropped(keys: Tensor, rate: float, width: int = 64, site: int = 0) -> Tensor:
    """Where numbers are zeroed, bool [rows, length, width]."""
    return dropout(torch.ones(*keys.shape, width), rate, keys, site) == 0


def correlation(ours: Tensor, theirs: Tensor) -> float:
    """Of two sets of draws, in standard deviations of what chance makes of it."""
    a, b = (draws.double().flatten() - draws.double().mean() for draws in (ours, theirs))
    return float((a * b).sum() / (a.norm() * b.norm()) * math.sqrt(a.numel()))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_zeroed_is_the_rate(rate: float) -> None:
    zeroed = dropped(keys_of(fresh_seed(), 32, 128), rate, 257)
    deviation = math.sqrt(zeroed.numel() * rate * (1 - rate))
    assert (
        abs(float(zeroed.sum()) - zeroed.numel() * rate) < FAR * deviation + zeroed.numel() / 2**17
    )
    # Of each feature by itself as well.
    by_feature = (zeroed.flatten(0, 1).sum(0) - 32 * 128 * rate) / math.sqrt(
        32 * 128 * rate * (1 - rate)
    )
    assert float(by_feature.abs().max()) < FAR
    assert float(by_feature.square().mean()) == pytest.approx(1.0, abs=FAR * math.sqrt(2 / 257))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_of_samples_columns_features_sites_and_seeds_are_independent(rate: float) -> None:
    seed = fresh_seed()
    keys = keys_of(seed, 16, 128)
    here = dropped(keys, rate, 256)
    assert abs(correlation(here[1:], here[:-1])) < FAR
    assert abs(correlation(here[:, 1:], here[:, :-1])) < FAR
    for apart in (1, 2, 3, 4, 8, 64):
        assert abs(correlation(here[..., apart:], here[..., :-apart])) < FAR, apart
    for site in (1, 2, 3, 64):
        assert abs(correlation(here, dropped(keys, rate, 256, site))) < FAR, site
    for other in (seed + 1, seed ^ 1 << 40):
        assert abs(correlation(here, dropped(keys_of(other, 16, 128), rate, 256))) < FAR, other
    # Another epoch of the same rows is other samples.
    assert abs(correlation(here, dropped(keys_of(seed, 16, 128, first=1000), rate, 256))) < FAR


def test_patterns_of_neighbouring_features_are_equally_frequent() -> None:
    zeroed = dropped(keys_of(fresh_seed(), 32, 128), 0.5, 256).reshape(-1, 8)
    patterns = (zeroed * (1 << torch.arange(8))).sum(1)
    counts = torch.bincount(patterns, minlength=256).double()
    expected = len(patterns) / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < FAR * math.sqrt(2 * 255)


def test_no_two_places_of_a_token_share_a_draw() -> None:
    """Counters of 8,192 features at NEFTune's site, 1,000 others, and those of 8 adapters in 120
    blocks: no two alike.
    """
    of_adapters = (1 + SITES_PER_BLOCK * np.arange(120)) + ADAPTER_SITE * np.arange(1, 9)[:, None]
    places = np.concatenate([[NEFTUNE_SITE], np.arange(1000), of_adapters.flatten()])
    sites, steps = (
        places.astype(np.int64).view(np.uint64)[:, None],
        np.arange(2048, dtype=np.uint64),
    )
    counters = sites * np.uint64(_SITE_STEP) + steps * np.uint64(COUNTER_STEP)
    ordered = np.sort(counters, axis=None)
    assert (ordered[1:] != ordered[:-1]).all()
    keys = keys_of(fresh_seed())
    noises = [TokenRng(0.5, keys).for_block(block) for block in range(3)]
    masks = [dropped(keys, 0.5)] + [
        dropped(each.rng_keys, 0.5, site=site) for each in noises for site in range(SITES_PER_BLOCK)
    ]
    assert len({mask.numpy().tobytes() for mask in masks}) == 7


def test_a_mask_is_what_integers_say_whatever_computes_them() -> None:
    """Written down once: a run that is continued on another version or device has the same
    masks.
    """
    keys = keys_of(3, 1, 2)
    assert keys.tolist() == [GOLDEN_KEYS]
    assert "".join(str(int(bit)) for bit in dropped(keys, 0.5, 16, 1).flatten()) == GOLDEN_MASK
    keys, width, rate = keys_of(fresh_seed()), 37, 0.3
    counters = keys.numpy().view(np.uint64)[..., None] + np.uint64(5 * _SITE_STEP % 2**64)
    numbers = splitmix64(counters + np.arange(10, dtype=np.uint64) * np.uint64(COUNTER_STEP))
    draws = np.ascontiguousarray(numbers).astype("<u8").view("<i2")[..., :width]
    assert np.array_equal(
        draws < round(rate * 2**16) - 2**15, dropped(keys, rate, width, 5).numpy()
    )


def test_it_is_unbiased_and_so_is_its_gradient() -> None:
    seed, rate = fresh_seed(), 0.3
    x = torch.randn(1, 1, 64, dtype=torch.float64).expand(64, 512, 64).clone().requires_grad_()
    y = dropout(x, rate, keys_of(seed, 64, 512), 0)
    mean = y.detach().mean((0, 1))
    deviation = x[0, 0].abs() * math.sqrt(rate / (1 - rate) / (64 * 512))
    assert float(((mean - x.detach()[0, 0]).abs() / deviation.detach()).max()) < FAR
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient * x, y)
    kept = y != 0
    assert float((y[kept] / x[kept]).detach().min()) == pytest.approx(1 / (1 - rate), rel=1e-4)


def test_none_is_none() -> None:
    x = torch.randn(2, 3, 5)
    assert dropout(x, 0.0, keys_of(0, 2, 3), 0) is x


@pytest.mark.slow
@pytest.mark.needs("a C++ compiler")
def test_compiled_it_has_the_same_bits() -> None:
    seed = fresh_seed()
    compiled = torch.compile(dropout, dynamic=False)
    for width in (18, 64, 71):
        keys = keys_of(seed, 3, 31)
        x = torch.randn(3, 31, width)
        assert torch.equal(compiled(x, 0.2, keys, 1), dropout(x, 0.2, keys, 1))


class Operators(TorchDispatchMode):
    """Names of the operators that ran while it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [SHAPES["llama"], SHAPES["gpt2"]], ids=["llama", "gpt2"])
def test_a_model_drops_only_where_asked_and_keys_are_given(shape: ModelConfig) -> None:
    model = init_weights(build_model(shape), 0)
    batch = ParityData(sequences=2, sequence_length=48, seed=fresh_seed() % 1000).batch(
        0, shape.vocab_size
    )
    plain = batch.tokens, batch.positions, batch.document_ids

    def ran(keys: Tensor | None) -> tuple[Tensor, list[str]]:
        with Operators() as operators:
            return model(*plain, rng_keys=keys), operators.names

    without, operators = ran(None)
    unused, same = ran(batch.rng_keys)
    assert torch.equal(unused, without)
    assert same == operators  # no operator more where there is no dropout
    model.setup = ModelSetup(dropout=0.2)
    assert torch.equal(ran(None)[0], without)
    drawn, more = ran(batch.rng_keys)
    assert not torch.equal(drawn, without)
    # Of the embedding, and twice in a block.
    assert sum("masked_fill" in name for name in more) == 1 + 2 * shape.num_hidden_layers


def test_nothing_is_drawn_from_the_generators_of_torch() -> None:
    """So a checkpoint needs no random state: what is random is a function of seeds and numbers."""
    model = init_weights(build_model(SHAPES["llama"]), 0)
    model.setup = ModelSetup(dropout=0.2)
    batch = ParityData(sequences=2, sequence_length=48).batch(0, 100)
    before = torch.get_rng_state()
    model(
        batch.tokens, batch.positions, batch.document_ids, rng_keys=batch.rng_keys
    ).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
