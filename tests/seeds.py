"""What tests draw: every number comes from the one seed of a test run, which is printed and can be
set again.

LMFORGE_TEST_SEED sets the seed: a number, or `fresh` for one that nobody knows. Without it the seed
is `FIXED`, so that a change is never refused for a draw that has nothing to do with it; `make
test-all` draws fresh ones. A seed that fails becomes a parameter of its test. The seed of a draw is
a hash of this seed, of what draws (the test, or the fixture where that is shared by several tests)
and of how often it has drawn: it is the same whichever other tests are run, in whatever order and
in however many processes.
"""

import hashlib
import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "LMFORGE_TEST_SEED"
FIXED = 20_261_122

_drawing: list[str] = [""]
_drawn: Counter[str] = Counter()


def settle() -> str:
    """Give this process and those it starts the seed of the run, as a number, and return where it
    comes from.
    """
    given = os.environ.get(VARIABLE, "")
    if given == "fresh":
        seed, origin = secrets.randbits(32), "fresh"
    elif given:
        try:
            seed, origin = int(given), f"set by {VARIABLE}"
        except ValueError:
            raise ValueError(f"{VARIABLE}={given}: expected a whole number or `fresh`") from None
    else:
        seed = FIXED
        origin = "fixed in tests/seeds.py"
    os.environ[VARIABLE] = str(seed)
    return origin


def run_seed() -> int:
    """The seed of this test run."""
    if not os.environ.get(VARIABLE, "").lstrip("-").isdigit():
        settle()
    return int(os.environ[VARIABLE])


def repetition(first: int, number: int) -> None:
    """Make the seed that of repetition `number` (from 0) of a run whose seed was `first`: 0 has
    that seed itself.
    """
    os.environ[VARIABLE] = str(_hashed(32, first, "repetition", number) if number else first)
    _drawn.clear()


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Within this, `name` is what draws: a test, or a fixture that several tests share."""
    _drawing.append(name)
    try:
        yield
    finally:
        _drawing.pop()


def fresh_seed(bits: int = 31, of: str = "") -> int:
    """A seed of so many bits for the test or fixture that asks, another each time it asks.

    It is printed.

    `of` names what draws where it is made on demand for several tests without being a fixture.
    """
    name = of or _drawing[-1]
    seed = _hashed(bits, run_seed(), name, _drawn[name])
    _drawn[name] += 1
    print(f"seed {seed}")
    return seed


def fresh_random(of: str = "") -> random.Random:
    """A source of random numbers that begins at a fresh seed."""
    return random.Random(fresh_seed(32, of))


def of_test(name: str) -> int:
    """The seed that hypothesis draws the examples of a test from."""
    return _hashed(32, run_seed(), name, "hypothesis")


def _hashed(bits: int, *parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()) >> (256 - bits)
