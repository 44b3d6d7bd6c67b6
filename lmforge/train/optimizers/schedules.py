"""Schedules of the learning rate: the fraction of the way from the final rate up to the peak, at each step after warm-up.

Each is called as `(step, steps, schedule, options)`: the 0-based step, the steps of the whole run, the section `[schedule]`,
and the schedule's own options, of which these have none. It returns 1 at the peak and 0 at the final rate.
"""

import math

from lmforge.config.sections import ScheduleOptions


def constant(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 1.0


def linear(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 1 - _progress(step, steps, schedule.warmup(steps))


def cosine(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    return 0.5 * (1 + math.cos(math.pi * _progress(step, steps, schedule.warmup(steps))))


def warmup_stable_decay(step: int, steps: int, schedule: ScheduleOptions, options: None = None) -> float:
    """Stays at the peak until `decay_steps` steps are left, then decays linearly."""
    last_at_peak = max(schedule.warmup(steps), steps - 1 - (schedule.decay_steps or max(1, steps // 5)))
    return 1.0 if step <= last_at_peak else 1 - _progress(step, steps, last_at_peak)


def _progress(step: int, steps: int, last_at_peak: int) -> float:
    """The fraction of the way from `last_at_peak` to the last step."""
    return min(1.0, (step - last_at_peak) / max(1, steps - 1 - last_at_peak))
