"""From a step to the whole run: days, GPU-hours, energy, money, checkpoints and the cost of failures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmforge.config.verbs.plan import PlanOptions
from lmforge.plan.hardware import GB, GPU
from lmforge.plan.memory import checkpoint_bytes
from lmforge.plan.prediction.predict import Prediction

# The average fraction of its power limit that a GPU uses in training, and what the rest of a host adds to its GPUs.
POWER_FRACTION, HOST_POWER = 0.9, 1.35


@dataclass(frozen=True)
class RunCost:
    """The cost of a whole run, by the expected speed.

    checkpoint_seconds: until all ranks have written one. checkpoint_every_seconds: the interval by Young and Daly
    (10.1016/j.future.2004.11.016), sqrt(2 · cost · time between failures). goodput: the fraction of the time that trains.
    """

    steps: int
    tokens: int
    days: float
    gpu_hours: float
    kilowatt_hours: float
    price: float
    checkpoint_bytes: int
    checkpoint_seconds: float
    checkpoint_every_seconds: float
    checkpoint_every_steps: int
    failures: float
    goodput: float


def run_cost(phases: Sequence[tuple[int, Prediction]], options: PlanOptions, gpu: GPU, *, async_save: bool) -> RunCost:
    """The cost of a run with these numbers of steps of each kind. An asynchronous save costs the time to copy a rank's part to
    host memory."""
    step_config = phases[0][1].step_config
    steps = sum(count for count, _ in phases)
    step_seconds = sum(count * each.step_seconds for count, each in phases) / steps
    size = checkpoint_bytes(step_config.optimizer, step_config.master_dtype, step_config.parameters)
    writing = size / (options.disk_gb_s * GB)
    cost = writing
    if async_save:
        hosts = math.ceil(step_config.world_size / step_config.gpus_per_host)
        writers = step_config.shards * step_config.tensor * step_config.pipeline if step_config.is_fsdp else 1
        cost = min(writing, size / writers / (gpu.pcie_gb_s * GB) + 0.1 * hosts**0.5)
    between = options.failure_gpu_hours * 3600 / step_config.world_size
    # A save cannot begin before the one before it is written.
    every = max(math.sqrt(2 * cost * between), writing)
    lost = cost / every + (every / 2 + options.restart_minutes * 60 + writing) / between
    goodput = 1 / (1 + lost)
    seconds = steps * step_seconds / goodput
    gpu_hours = seconds / 3600 * step_config.world_size
    watts = gpu.watts * POWER_FRACTION * HOST_POWER
    return RunCost(
        steps,
        sum(count * each.step_config.tokens_per_step for count, each in phases),
        seconds / 86400,
        gpu_hours,
        gpu_hours * watts / 1000,
        gpu_hours * options.price,
        size,
        writing,
        every,
        max(1, round(every / step_seconds)),
        seconds / between,
        goodput,
    )
