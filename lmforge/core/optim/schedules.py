"""The learning rate of a step, and its schedules: the fraction of the way from the final rate up to
the peak, after warm-up.

Each schedule is called as `(step, steps, schedule, options)`: the 0-based step, the steps of the
whole run, the section `[schedule]`, and the schedule's own options, of which these have none. It
returns 1 at the peak and would return 0, the final rate, at step `steps`: as in transformers, so
that no step is taken at a rate of 0.
"""

import math
from collections.abc import Callable

from lmforge.core import registry
from lmforge.core.errors import UserError
from lmforge.core.options.extend import entry_options
from lmforge.core.options.sections import ScheduleOptions


def build_schedule(options: ScheduleOptions, steps: int, peak_lr: float) -> Callable[[int], float]:
    """The learning rate of a step (from 0) in a run of `steps`: linear warm-up, then the schedule's
    shape down to its final ratio.

    The peak is reached after the warm-up. The function raises UserError for a schedule of a plugin
    that returns no finite number from 0 on.
    """
    warmup = options.warmup(steps)
    entry = registry.get("schedule", options.name)
    own_options = entry_options(options, entry)

    def learning_rate(step: int) -> float:
        if step < warmup:
            return peak_lr * (step + 1) / (warmup + 1)
        shape = entry.build(step, steps, options, own_options)
        if not isinstance(shape, int | float) or not 0 <= shape < math.inf:
            raise UserError(
                f"{entry.origin}: schedule {entry.name} returned {shape!r} at step {step}, not a"
                " number from 0 on"
            )
        if shape == 1:
            return peak_lr
        return peak_lr * (options.min_lr_ratio + (1 - options.min_lr_ratio) * shape)

    return learning_rate


def constant(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 1.0


def linear(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 1 - _progress(step, steps, schedule.warmup(steps))


def cosine(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(step, steps, schedule.warmup(steps))))


def warmup_stable_decay(
    step: int, steps: int, schedule: ScheduleOptions, options: None = None
) -> float:
    """Stays at the peak until `decay_steps` steps are left, then decays linearly."""
    last_at_peak = max(schedule.warmup(steps), steps - (schedule.decay_steps or max(1, steps // 5)))
    return 1.0 if step <= last_at_peak else 1 - _progress(step, steps, last_at_peak)


def _progress(step: int, steps: int, last_at_peak: int) -> float:
    """The fraction of the way from `last_at_peak` to the end of the run, where `step` is before
    it.
    """
    return (step - last_at_peak) / (steps - last_at_peak)
