"""Which faults happen, when, and on which ranks: drawn from a seed, so that the same seed gives the
same faults.
"""

from dataclasses import dataclass
from random import Random

from lmforge.core.distributed.processes import STOP_SIGNALS

ENGINES = {
    "single": [],
    "ddp": ["--parallel.engine", "ddp"],
    "fsdp1": ["--parallel.engine", "fsdp1"],
    "fsdp2 full-shard": ["--parallel.engine", "fsdp2", "--parallel.sharding", "full-shard"],
    "fsdp2 grad-shard": ["--parallel.engine", "fsdp2", "--parallel.sharding", "grad-shard"],
    "fsdp2 no-shard": ["--parallel.engine", "fsdp2", "--parallel.sharding", "no-shard"],
}
PHASES = ("data", "forward", "backward", "reduce", "optimizer", "save", "barrier", "evaluate")
# How often each kind of fault is drawn, and the moments that it may be drawn for. A damaged
# checkpoint comes on top, after a fault that ended the ranks.
ANY_MOMENT = ("start", "step", "phase", "writing", "sealing", "renamed", "deleting")
RUNNING = ("step", "phase", "writing", "renamed")
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "kill a rank": (26, ANY_MOMENT),
    "kill all ranks": (9, ANY_MOMENT),
    "ask to stop": (15, ANY_MOMENT),
    "full disk": (9, ("start", "step", "writing")),
    "file limit": (4, ("start",)),
    "rank sleeps": (12, RUNNING),
    "kill the launcher": (5, RUNNING),
    "kill a launched rank": (4, ANY_MOMENT),
    "ask the launcher": (4, RUNNING),
    "lose the output": (8, ("start", *RUNNING)),
    "lose the launcher's output": (4, ("start", *RUNNING)),
}
BY_COMMAND = ("kill the launcher", "kill a launched rank", "ask the launcher", "lose the launcher's output")
LOSES_OUTPUT = ("lose the output", "lose the launcher's output")
DAMAGE = ("flipped bit", "truncated", "zeroed tail", "missing file", "flipped manifest", "missing manifest", "torn manifest")
DAMAGE_SHARE = 0.4


@dataclass(frozen=True)
class Topology:
    """So many ranks under one engine."""

    ranks: int
    engine: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.ranks}"

    @property
    def words(self) -> list[str]:
        return ENGINES[self.engine]


@dataclass(frozen=True)
class Fault:
    """One thing to go wrong.

    What depends on the run (which ranks there are, which files) is chosen by `chance` when it comes
    to it.

    steps     so many steps are trained before the moment is waited for
    delay     seconds from 0 to 1, of as much as the moment has to spare
    patient   whether ranks that lost a peer are left to notice it, or are ended by their launcher;
              whether a run that lost its
              output is left to end, or is asked to stop
    damage    what is done to the newest checkpoints after it, each in turn
    """

    kind: str
    moment: str
    phase: str
    steps: int
    delay: float
    signal: int
    patient: bool
    damage: tuple[str, ...]
    chance: Random


def topology(chance: Random, least: int = 1) -> Topology:
    """Any that there is, of at least so many ranks."""
    ranks = chance.choice([count for count in (1, 2, 2, 3, 4) if count >= least])
    return Topology(ranks, "single" if ranks == 1 else chance.choice([name for name in ENGINES if name != "single"]))


def fault(seed: int, life: int, number: int) -> Fault:
    """The `number`-th fault of a life."""
    chance = Random(f"{seed} {life} {number}")
    kind = chance.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    damage = []
    if kind != "rank sleeps" and chance.random() < DAMAGE_SHARE:
        damage = [chance.choice(DAMAGE) for _ in range(chance.choice((1, 1, 1, 2)))]
    return Fault(
        kind=kind,
        moment=chance.choice(KINDS[kind][1]),
        phase=chance.choice(PHASES),
        steps=chance.randrange(1, 12),
        delay=chance.random(),
        signal=chance.choice(STOP_SIGNALS),
        patient=chance.random() < 0.5,
        damage=tuple(damage),
        chance=chance,
    )
