"""How often the intervals of a ladder's fit hold the truth, on losses drawn from known laws with
noise; and a published fit.

Each ladder has as many runs as one of `lmforge ladder`. The interval of each parameter, and of the
loss of runs with 10 and 100 times the FLOPs of the largest one, should hold the truth in LEVEL of
the draws. A bootstrap over runs, and one over residuals that are corrected for their leverage, are
measured beside it.

`--points FILE` fits the points that Besiroglu et al. (arXiv 2404.10102) read off a figure of
Hoffmann et al.: data/svg_extracted_data.csv of github.com/epoch-research/analyzing-chinchilla,
commit 92258837. The file is not part of lmforge.
"""

import csv
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import exp, sqrt
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from setting import benchmark_parser, machine, machine_lines, write_result

from lmforge.lab.ladder.fit import LEVEL, Fit, fit_points
from lmforge.lab.ladder.frontier import predicted_loss
from lmforge.lab.ladder.law import FIRST_HUBER, NUM_FITTED, Law, Losses, Point, best_law

# One of small models, at the loss of text in small vocabularies; that of Besiroglu et al. with runs
# of such size; and one whose exponents differ. Each with the parameters of its largest run.
LAWS = {
    "small models": (Law(E=1.2, A=32.0, alpha=0.3, B=180.0, beta=0.35), 5e5),
    "published size": (Law(E=1.82, A=482.0, alpha=0.348, B=2085.0, beta=0.366), 1.6e8),
    "unequal": (Law(E=1.6, A=10.0, alpha=0.2, B=900.0, beta=0.5), 5e5),
}
# (sizes, each twice the one before; tokens for each parameter; standard deviation of the logarithm
# of a loss)
LADDERS = {
    "9 runs, 0.3 %": (3, (5, 12, 30), 0.003),
    "16 runs, 0.3 %": (4, (5, 10, 20, 40), 0.003),
    "16 runs, 1 %": (4, (5, 10, 20, 40), 0.01),
}
VALUES = ("E", "A", "alpha", "B", "beta", "10 times", "100 times", "run, 10 times")
BOOTSTRAPS = 100
ENDS = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
EXCLUDED = 5  # points with the highest losses, which Besiroglu et al. leave out


def shapes(kind: str, largest: float) -> list[tuple[float, float]]:
    sizes, ratios, _ = LADDERS[kind]
    return [(largest / 2**number, ratio * largest / 2**number) for number, ratio in product(range(sizes), ratios)]


def targets(kind: str, largest: float) -> list[tuple[float, float]]:
    """Runs of 10 and 100 times the FLOPs of the largest one, with 20 tokens for each parameter."""
    flops = max(size * tokens for size, tokens in shapes(kind, largest))
    return [(sqrt(times * flops / 20), sqrt(20 * times * flops)) for times in (10, 100)]


def values_of(law: Law, runs: list[tuple[float, float]]) -> list[float]:
    return [*asdict(law).values(), *(law.loss(*run) for run in runs)]


def held(kind: str, name: str, draws: int, bootstraps: bool) -> dict[str, Any]:
    """The fraction of draws whose intervals hold each of VALUES, the median width over the truth,
    and seconds of a fit.
    """
    law, largest = LAWS[name]
    noise, runs = LADDERS[kind][2], targets(kind, largest)
    truth = np.array(values_of(law, runs))
    hits: dict[str, list[Any]] = {"drawn by likelihood": []}
    widths, seconds = [], 0.0
    for seed in range(draws):
        chance = np.random.default_rng(seed)
        points = [
            Point(str(number), *shape, law.loss(*shape) * exp(noise * chance.standard_normal()))
            for number, shape in enumerate(shapes(kind, largest))
        ]
        began = time.perf_counter()
        fit = fit_points(points, seed=seed)
        seconds += time.perf_counter() - began
        bounds = np.quantile([values_of(each, runs) for each in fit.draws], ENDS, axis=0).T
        inside = ((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])).tolist()
        hits["drawn by likelihood"].append([*inside, run_is_held(fit, law, runs[0], noise, chance)])
        widths.append((bounds[:, 1] - bounds[:, 0]) / truth)
        if bootstraps:
            for method, again in (("bootstrap over runs", over_runs), ("bootstrap over residuals", over_residuals)):
                found = np.array([values_of(each, runs) for each in again(points, chance)])
                low, high = np.quantile(found, ENDS, axis=0)
                hits.setdefault(method, []).append(((low <= truth) & (truth <= high)).tolist())
    return {
        "ladder": kind,
        "law": name,
        "draws": draws,
        "held": {method: np.mean(each, axis=0).round(4).tolist() for method, each in hits.items()},
        "median_width": np.median(widths, axis=0).round(4).tolist(),
        "seconds_of_fit": round(seconds / draws, 3),
    }


def held_of(which: tuple[str, str], draws: int) -> dict[str, Any]:
    return held(*which, draws, False)


def run_is_held(fit: Fit, law: Law, run: tuple[float, float], noise: float, chance: np.random.Generator) -> bool:
    """Whether the interval of a run, which has noise of its own, holds it."""
    predicted = predicted_loss(fit, *run)
    return predicted.low <= law.loss(*run) * exp(noise * chance.standard_normal()) <= predicted.high


def over_runs(points: list[Point], chance: np.random.Generator) -> list[Law]:
    """Laws of as many runs, drawn with repetition; draws that fix no law are drawn again."""
    laws, huber = list[Law](), best_law(points)[1]
    while len(laws) < BOOTSTRAPS:
        chosen = [points[number] for number in chance.integers(len(points), size=len(points))]
        if len({each.name for each in chosen}) >= NUM_FITTED and len({each.parameters for each in chosen}) > 1:
            laws.append(best_law(chosen, huber)[0])
    return laws


def over_residuals(points: list[Point], chance: np.random.Generator) -> list[Law]:
    """Laws of the fitted losses with residuals drawn with repetition, each divided by the root of 1
    − its leverage.
    """
    law, huber = best_law(points)
    fitted = np.array([law.loss(each.parameters, each.tokens) for each in points])
    sizes = Losses(points).sizes
    powers = np.exp(-np.array([law.alpha, law.beta]) * sizes)
    slopes = np.concatenate([np.ones((len(points), 1)), powers, powers * sizes], 1) / fitted[:, None]
    basis, _ = np.linalg.qr(slopes)
    residuals = np.log([each.loss for each in points]) - np.log(fitted)
    residuals /= np.sqrt(np.maximum(1 - (basis**2).sum(1), 0.05))
    residuals -= residuals.mean()
    drawn = fitted * np.exp(chance.choice(residuals, (BOOTSTRAPS, len(points))))
    return [
        best_law([replace(each, loss=loss) for each, loss in zip(points, row, strict=True)], huber)[0] for row in drawn.tolist()
    ]


def published(path: Path) -> dict[str, Any]:
    """The fits of the published points, of all but those with the highest losses."""
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    sizes = [float(row["Model Size"]) for row in rows]
    tokens = [float(row["Training FLOP"]) / 6 / size for row, size in zip(rows, sizes, strict=True)]
    points = [Point(str(number), size, tokens[number], float(rows[number]["loss"])) for number, size in enumerate(sizes)]
    used = sorted(points, key=lambda point: point.loss)[:-EXCLUDED]
    fit = fit_points(used)
    return {
        "points": len(used),
        "huber 0.001, as published": asdict(best_law(used, FIRST_HUBER)[0]),
        "default": asdict(fit.law),
        "intervals": {name: fit.interval(attrgetter(name)) for name in asdict(fit.law)},
    }


def main() -> int:
    parser = benchmark_parser(__doc__ or "", 200, "draws of each law and ladder")
    parser.add_argument("--bootstraps", type=int, default=0, help="draws for which bootstraps are measured too (default: 0)")
    parser.add_argument("--points", type=Path, help="the published points, as a CSV file")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the draws (default: 2)")
    options = parser.parse_args()
    environment = machine()
    with ProcessPoolExecutor(options.processes) as pool:
        rows = []
        for row in pool.map(partial(held_of, draws=options.rounds), product(LADDERS, LAWS)):
            rows.append(row)
            print(row, flush=True)
    beside = [held(kind, "small models", options.bootstraps, True) for kind in tuple(LADDERS)[:1] if options.bootstraps]
    result: dict[str, Any] = {"benchmark": "ladder_law", "machine": environment, "level": LEVEL, "values": VALUES, "rows": rows}
    result |= {"bootstraps": beside, "published": published(options.points) if options.points else None}
    table = "\n".join(report(result, options.rounds))
    print(table)
    print(f"\n{write_result('ladder_law', result, table, options.out)}")
    return 0


def report(result: dict[str, Any], draws: int) -> list[str]:
    head: Callable[[str], list[str]] = lambda first: [f"| {first} | {' | '.join(VALUES)} |", f"|{'---|' * (len(VALUES) + 2)}"]  # noqa: E731
    lines = ["# The fit of a ladder, on known laws", "", *machine_lines(result["machine"]), ""]
    lines += [
        f"Fraction of {draws} draws whose {LEVEL:.0%} interval holds the truth (standard error {sqrt(0.09 / draws):.3f}).",
        "",
    ]
    lines += head("ladder | law")
    for row in result["rows"]:
        cells = (f"{each:.2f}" for each in row["held"]["drawn by likelihood"])
        lines.append(f"| {row['ladder']} | {row['law']} | {' | '.join(cells)} |")
    lines += ["", "Median width of the interval over the truth.", "", *head("ladder | law")]
    for row in result["rows"]:
        lines.append(f"| {row['ladder']} | {row['law']} | {' | '.join(f'{each:.3f}' for each in row['median_width'])} | |")
    for beside in result["bootstraps"]:
        lines += [
            "",
            f"Beside bootstraps: {beside['ladder']}, {beside['law']}, {beside['draws']} draws.",
            "",
            *head("method |"),
        ]
        for method, each in beside["held"].items():
            row_of = [f"{value:.2f}" for value in each] + [""] * (len(VALUES) - len(each))
            lines.append(f"| {method} | | {' | '.join(row_of)} |")
    if result["published"]:
        lines += [
            "",
            f"Published points: {result['published']['points']}, of which Besiroglu et al. find E 1.82, α 0.35, β 0.37.",
            "",
        ]
        for name in ("huber 0.001, as published", "default"):
            law = result["published"][name]
            lines.append(f"- {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in law.items()))
        bounds = result["published"]["intervals"].items()
        lines.append(
            f"- {LEVEL:.0%} intervals of the default: "
            + ", ".join(f"{key} {low:.4g}–{high:.4g}" for key, (low, high) in bounds)
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
