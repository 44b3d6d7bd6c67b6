"""The page of a ladder, one HTML file without scripts, and the same numbers as JSON."""

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lmforge.core.files.atomic_files import atomic_write_json, atomic_write_text
from lmforge.lab.ladder.charts import Curve, chart, short
from lmforge.lab.ladder.frontier import SIZE_RATIOS
from lmforge.lab.ladder.law import Law

PAGE_FILE = "ladder.html"
NUMBERS_FILE = "ladder-fit.json"
WIDE = 1180
NARROW = 560
LINE_POINTS = 60
GREEK = {"alpha": "α", "beta": "β"}


def write_page(
    folder: Path,
    ladders: Sequence[Mapping[str, Any]],
    comparison: Sequence[Mapping[str, Any]] = (),
    title: str = "Ladder",
) -> Path:
    """Write PAGE_FILE and NUMBERS_FILE into a folder. Returns the path of the page. Raises OSError.

    Args:
        ladders: of each mixture `conclusions`, with "name", "curves" ({name of a run: [[tokens,
            loss], …]}), and, where tasks were given, "tasks" (`predict_scores`).
        comparison: what `compare` says.
    """
    numbers = {"title": title, "ladders": ladders, "comparison": comparison}
    atomic_write_json(folder / NUMBERS_FILE, numbers)
    atomic_write_text(folder / PAGE_FILE, render(title, ladders, comparison))
    return folder / PAGE_FILE


def render(
    title: str, ladders: Sequence[Mapping[str, Any]], comparison: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as text; the arguments are those of `write_page`."""
    style = (files("lmforge.ops.report") / "web" / "report.css").read_text("utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = "".join(_ladder(each) for each in ladders)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        f"<title>{html.escape(title)} · lmforge</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{html.escape(title)}</h1></header>\n<main>\n{_comparison(comparison)}{body}</main>\n</body>\n</html>\n"
    )


def check_text(check: Mapping[str, Any]) -> str:
    """A sentence with what the smaller models say of the largest run."""
    off = check["predicted"]["value"] / check["loss"] - 1
    verdict = f"{abs(off):.1%} too {'high' if off > 0 else 'low'}"
    if not check["is_inside"]:
        verdict += ", outside the interval: these runs follow no one law"
    return (
        f"{check['name']} by the smaller models: {interval_text(check['predicted'])}, reached"
        f" {check['loss']:.4f}: {verdict}"
    )


def interval_text(estimate: Mapping[str, float], digits: int = 4) -> str:
    """A value with its interval."""

    def rounded(name: str) -> str:
        return short(float(f"{estimate[name]:.{digits}g}"))

    return f"{rounded('value')} ({rounded('low')} to {rounded('high')})"


def _section(heading: str, *parts: str) -> str:
    return f"<section><h2>{html.escape(heading)}</h2>{''.join(parts)}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{html.escape(word)}</th>' for word in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        "<div"
        f' class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _comparison(pairs: Sequence[Mapping[str, Any]]) -> str:
    if not pairs:
        return ""
    rows = []
    for pair in pairs:
        better = pair["first"] if pair["value"] < 0 else pair["second"]
        words = "not decided: more rungs, or a larger budget, would"
        if pair["decided"]:
            words = f"{better} is better"
        rows.append((pair["first"], pair["second"], interval_text(pair), words))
    return _section(
        "Mixtures at the target", _table(("mixture", "against", "difference of losses", ""), rows)
    )


def _ladder(ladder: Mapping[str, Any]) -> str:
    law = Law(**{name: estimate["value"] for name, estimate in ladder["law"].items()})
    name = f" · {ladder['name']}" if ladder["name"] else ""
    charts = (
        _losses(ladder, law),
        _curves(ladder),
        _residuals(ladder),
        _frontier(ladder),
        _sizes_at(ladder),
        _cost(ladder),
    )
    return (
        _section(f"Prediction{name}", *_verdict(ladder), _tiles(ladder))
        + _section(f"Charts{name}", f'<div class="charts">{"".join(charts)}</div>')
        + _section(f"Other sizes for the same FLOPs{name}", _sizes(ladder))
        + _tasks(ladder, name)
        + _section(f"Law{name}", _law(ladder))
        + _section(f"Runs{name}", _runs(ladder))
    )


def _verdict(ladder: Mapping[str, Any]) -> list[str]:
    target = ladder["target"]
    text = (
        f"A run of {short(target['parameters'])} parameters and {short(target['tokens'])} tokens"
        f" will reach a loss of {interval_text(target['loss'])}, with a probability of"
        f" {ladder['level']:.0%} that it is in the interval."
    )
    lines = [f'<p class="verdict">{html.escape(text)}</p>']
    if ladder["check"]:
        lines.append(f"<p>Check: {html.escape(check_text(ladder['check']))}.</p>")
    lines += [f'<p class="alarm">{html.escape(line)}</p>' for line in ladder["cautions"]]
    return lines


def _tiles(ladder: Mapping[str, Any]) -> str:
    target = ladder["target"]
    best = ladder["best"]
    flat = ladder["flat"]
    facts = {"loss, nats per token": interval_text(target["loss"])}
    if target["bits_per_byte"]:
        facts["bits per byte"] = interval_text(target["bits_per_byte"])
    facts |= {
        "FLOPs of the target": f"{target['flops']:.3g}",
        "best size for as many FLOPs": interval_text(best["parameters"], 3),
        "its tokens": interval_text(best["tokens"], 3),
        "its loss": interval_text(best["loss"]),
        "sizes within 1 % of that": f"{flat['low']:.2g} to {flat['high']:.2g} times the best",
    }
    tiles = (
        f'<div class="tile"><small>{html.escape(name)}</small><b>{html.escape(fact)}</b></div>'
        for name, fact in facts.items()
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _losses(ladder: Mapping[str, Any], law: Law) -> str:
    """Loss over tokens, with a line of the law for each size."""
    target = ladder["target"]

    def line(size: float, points: Sequence[Mapping[str, Any]], most: float) -> list[Any]:
        span = np.geomspace(min(point["tokens"] for point in points), most, LINE_POINTS).tolist()
        return [(tokens, law.loss(size, tokens)) for tokens in span]

    curves = []
    most = max(target["tokens"], *(point["tokens"] for point in ladder["points"]))
    for number, size in enumerate(sorted({point["parameters"] for point in ladder["points"]})):
        points = [point for point in ladder["points"] if point["parameters"] == size]
        curves.append(Curve(f"{short(size)} parameters", number, line(size, points, most)))
        notes = [
            f"{point['name']}: {point['loss']:.4f}, law {point['predicted']:.4f}"
            for point in points
        ]
        dots = [(point["tokens"], point["loss"]) for point in points]
        curves.append(Curve("", number, dots, "dots", notes))
    label = f"{short(target['parameters'])} parameters, the target"
    dashed = line(target["parameters"], ladder["points"], target["tokens"])
    curves += [Curve(label, 7, dashed, "dashed"), *_target_mark(target, target["tokens"])]
    return chart("Losses and the law", curves, "tokens", width=WIDE)


def _target_mark(target: Mapping[str, Any], at: float) -> list[Curve]:
    loss = target["loss"]
    note = f"target: {interval_text(loss)}"
    mark = Curve("target, with its interval", 7, [(at, loss["value"])], "dots", [note])
    return [Curve("", 7, [(at, loss["low"], loss["high"])], "bars"), mark]


def _curves(ladder: Mapping[str, Any]) -> str:
    sizes = sorted({point["parameters"] for point in ladder["points"]})
    curves = [
        Curve(
            f"{short(point['parameters'])} parameters",
            sizes.index(point["parameters"]),
            ladder["curves"].get(point["name"], ()),
        )
        for point in ladder["points"]
    ]
    return chart("Validation loss of the runs", curves, "tokens", width=NARROW)


def _residuals(ladder: Mapping[str, Any]) -> str:
    points = ladder["points"]
    noise = 100 * ladder["noise"]
    dots = [
        (6 * point["parameters"] * point["tokens"], 100 * point["residual"]) for point in points
    ]
    notes = [f"{point['name']}: {100 * point['residual']:+.2f} %" for point in points]
    span = (min(dots)[0], max(dots)[0])
    band = Curve("noise of a run", 7, [(at, -noise, noise) for at in span], "band")
    return chart(
        "Loss above the law, %",
        [band, Curve("run", 0, dots, "dots", notes)],
        "6 × parameters × tokens: FLOPs",
        width=NARROW,
    )


def _frontier(ladder: Mapping[str, Any]) -> str:
    target = ladder["target"]
    scale = target["flops_per_token"] / target["parameters"]
    runs = [
        (scale * point["parameters"] * point["tokens"], point["loss"]) for point in ladder["points"]
    ]
    dots = Curve("runs", 0, runs, "dots", [point["name"] for point in ladder["points"]])
    return _along(ladder, "Frontier: loss", "loss", [dots, *_target_mark(target, target["flops"])])


def _sizes_at(ladder: Mapping[str, Any]) -> str:
    target = ladder["target"]
    mark = Curve("target", 7, [(target["flops"], target["parameters"])], "dots", ["target"])
    return _along(ladder, "Frontier: best size", "parameters", [mark], y_log=True)


def _along(
    ladder: Mapping[str, Any], heading: str, name: str, marks: Sequence[Curve], y_log: bool = False
) -> str:
    """A value of the best run over FLOPs, with its interval."""
    values = [
        (point["flops"], *(point[name][part] for part in ("value", "low", "high")))
        for point in ladder["frontier"]
    ]
    best = Curve(f"best {name}", 2, [(flops, value) for flops, value, _, _ in values])
    band = Curve("", 2, [(flops, low, high) for flops, _, low, high in values], "band")
    return chart(heading, [best, band, *marks], "FLOPs", width=NARROW, y_log=y_log)


def _cost(ladder: Mapping[str, Any]) -> str:
    best = ladder["best"]["loss"]["value"]
    losses = [
        (size["ratio"], 100 * (size["loss"] / best - 1))
        for size in ladder["sizes"]
        if size["ratio"] in SIZE_RATIOS
    ]
    return chart(
        "Loss above the best, %, for the target's FLOPs",
        [Curve("other sizes", 2, losses)],
        "size, times the best",
        width=NARROW,
    )


def _sizes(ladder: Mapping[str, Any]) -> str:
    best = ladder["best"]["loss"]["value"]
    rows = []
    for size in ladder["sizes"]:
        times = "out of reach"
        tokens = ""
        if size["same_loss_flops"] is not None:
            times = f"{size['same_loss_flops']:.2f}"
            tokens = short(size["same_loss_tokens"])
        ratio = f"{size['ratio']:.2g}"
        if size["is_target"]:
            ratio += ", the target"
        rows.append(
            (
                ratio,
                short(size["parameters"]),
                short(size["tokens"]),
                f"{size['loss']:.4f}",
                f"{100 * (size['loss'] / best - 1):+.2f} %",
                times,
                tokens,
            )
        )
    head = (
        "× best size",
        "parameters",
        "tokens",
        "loss",
        "above the best",
        "FLOPs for the best loss, times",
        "tokens for it",
    )
    words = (
        "A smaller model that is trained for longer costs less to use, and more to train: so many"
        " times the FLOPs, for the loss of the best size."
    )
    return f"<p>{words}</p>" + _table(head, rows)


def _tasks(ladder: Mapping[str, Any], name: str) -> str:
    tasks = ladder.get("tasks", ())
    if not tasks:
        return ""
    rows = [(task["name"], interval_text(task["score"]), task["caution"]) for task in tasks]
    return _section(f"Tasks{name}", _table(("score", "at the target", ""), rows))


def _law(ladder: Mapping[str, Any]) -> str:
    formula = (
        "L(N, D) = E + A/N<sup>α</sup> + B/D<sup>β</sup>, in nats per token; N parameters in matrix"
        " products, D tokens."
    )
    rows = [
        (GREEK.get(name, name), f"{each['value']:.4g}", f"{each['low']:.4g} to {each['high']:.4g}")
        for name, each in ladder["law"].items()
    ]
    noise = ("noise of a run", f"{100 * ladder['noise']:.2g} %", "")
    head = ("", "value", f"interval, {ladder['level']:.0%}")
    return f"<p>{formula}</p>" + _table(head, [*rows, noise])


def _runs(ladder: Mapping[str, Any]) -> str:
    rows = [
        (
            point["name"],
            short(point["parameters"]),
            short(point["tokens"]),
            f"{point['loss']:.4f}",
            f"{point['predicted']:.4f}",
            f"{100 * point['residual']:+.2f} %",
        )
        for point in ladder["points"]
    ]
    rows += [
        (each["name"], "", "", "", "", f"left out: {each['reason']}") for each in ladder["left_out"]
    ]
    return _table(("run", "parameters", "tokens", "loss", "law", "above it"), rows)
