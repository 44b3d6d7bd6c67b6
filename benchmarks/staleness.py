"""Steps per hour of GRPO that samples while it trains, beside GRPO that waits; stages are simulated
by sleeping.

The durations are those that verl published for a large model (generation 178 s, log-probabilities
54 s, update 114 s), a thousand times shorter. A server decodes as many completions at a time as a
step has; the slowest takes 4 times as long as the median. What is measured is lmforge's own
scheduling.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from setting import benchmark_parser, machine, machine_lines, summarize, write_result

from lmforge.post.rl.sets import SetSchedule

GENERATION, LOGPROBS, UPDATE = 0.178, 0.054, 0.114  # seconds
COMPLETIONS = 64  # of a step
TAIL = 4.0  # the slowest completion, in medians
STALENESS = (0, 1, 2)
GOAL_RATIO, GOAL_STEP = 1.7, 1.1


def durations(steps: int, seed: int) -> list[list[float]]:
    """Seconds of each completion of each step: log-normal up to TAIL medians, so that a step alone
    takes GENERATION at the median.
    """
    chance = random.Random(seed)
    sigma = math.log(TAIL) / statistics.NormalDist().inv_cdf(1 - 1 / COMPLETIONS)
    drawn = [
        [min(TAIL, chance.lognormvariate(0, sigma)) for _ in range(COMPLETIONS)]
        for _ in range(steps)
    ]
    scale = GENERATION / statistics.median(map(max, drawn))
    return [[scale * each for each in step] for step in drawn]


def train(max_staleness: int, samples: list[list[float]]) -> list[float]:
    """Seconds of each step."""
    seconds = []
    with ThreadPoolExecutor(COMPLETIONS) as server:

        def sample(set_index: int, first_version: int, on_step: Callable[[], None]) -> int:
            wait([server.submit(time.sleep, each) for each in samples[set_index]])
            return set_index

        ahead = SetSchedule(sample, lambda version: None, max_staleness)
        for step in range(len(samples)):
            began = time.perf_counter()
            ahead.advance(step, len(samples))
            assert ahead.take(step, lambda: None) == step
            time.sleep(LOGPROBS)
            time.sleep(UPDATE)
            seconds.append(time.perf_counter() - began)
        ahead.close()
    return seconds


def main() -> int:
    parser = benchmark_parser(__doc__ or "", 3, "times that each staleness is measured, in turns")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default: 60)")
    options = parser.parse_args()
    environment = machine()
    per_hour: dict[int, list[float]] = {each: [] for each in STALENESS}
    median_step: dict[int, list[float]] = {each: [] for each in STALENESS}
    for number in range(options.rounds):
        samples = durations(options.steps, number)
        for each in STALENESS:
            seconds = train(each, samples)
            per_hour[each].append(3600 * len(seconds) / sum(seconds))
            median_step[each].append(1000 * statistics.median(seconds))
    ratios = {
        each: [a / b for a, b in zip(per_hour[each], per_hour[0], strict=True)]
        for each in STALENESS
    }
    result: dict[str, Any] = {
        "benchmark": "staleness",
        "machine": environment,
        "setting": {
            "generation_ms": 178,
            "logprobs_ms": 54,
            "update_ms": 114,
            "completions": COMPLETIONS,
            "tail": TAIL,
        },
        "steps": options.steps,
        "steps_per_hour": {each: summarize(values) for each, values in per_hour.items()},
        "median_step_ms": {each: summarize(values) for each, values in median_step.items()},
        "ratio": {each: summarize(values) for each, values in ratios.items()},
    }
    limit = 1000 * GOAL_STEP * max(GENERATION, LOGPROBS + UPDATE)
    lines = [
        "# Sampling while training",
        "",
        *machine_lines(environment),
        (
            f"- stages sleep: generation alone {1000 * GENERATION:g} ms at the median, with"
            f" {COMPLETIONS} completions at a time,"
        ),
        (
            f"  the slowest {TAIL:g} medians; log-probabilities {1000 * LOGPROBS:g} ms, update"
            f" {1000 * UPDATE:g} ms"
        ),
        f"- {options.steps} steps, {options.rounds} interleaved rounds; median (low–high)",
        "",
        "| max_staleness | steps per hour | ÷ staleness 0 | goal | median step, ms | goal |",
        "|---|---|---|---|---|---|",
    ]
    for each in STALENESS:
        goals = (f"≥ {GOAL_RATIO}", f"≤ {limit:.0f}") if each == STALENESS[-1] else ("", "")
        cells = [per_hour[each], ratios[each], median_step[each]]
        speed, ratio, step = (
            f"{statistics.median(values):,.{digits}f}"
            f" ({min(values):,.{digits}f}–{max(values):,.{digits}f})"
            for values, digits in zip(cells, (0, 2, 0), strict=True)
        )
        lines.append(f"| {each} | {speed} | {ratio} | {goals[0]} | {step} | {goals[1]} |")
    table = "\n".join(lines)
    print(table)
    print(f"\n{write_result('staleness', result, table, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
