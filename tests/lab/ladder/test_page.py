"""The page of a ladder in a real browser, beside its JSON."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from lmforge.lab.ladder.charts import short
from lmforge.lab.ladder.downstream import predict_scores
from lmforge.lab.ladder.fit import fit_points
from lmforge.lab.ladder.frontier import Target, compare, conclusions
from lmforge.lab.ladder.law import Point
from lmforge.lab.ladder.page import check_text, interval_text, write_page
from tests.lab.ladder.ladders import ladder
from tests.support.browser import browser, open_page

__all__ = ["browser"]
HOSTILE = "<script>document.title='taken'</script><b>"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two mixtures; a run of the first has markup in its name, and one has diverged."""
    first = [
        replace(ladder(noise=0.003)[0], name=HOSTILE),
        *ladder(noise=0.003)[1:],
        Point("spiked", 1e6, 1e7, float("inf")),
    ]
    fits = {
        "web": fit_points(first, draws=20),
        "code": fit_points(ladder(noise=0.003, seed=1), draws=20),
    }
    target = Target(3e7, 6e8, 6.6 * 3e7, 4.0)
    curves = {
        each.name: [[each.tokens / 2, 1.1 * each.loss], [each.tokens, each.loss]]
        for each in fits["web"].points
    }
    scores = {each.name: {"val/quiz/acc": 1 / (1 + each.loss)} for each in ladder()}
    tasks = {name: predict_scores(fit, scores, target) for name, fit in fits.items()}
    ladders = [
        {"name": name, "curves": curves, "tasks": tasks[name], **conclusions(fit, target)}
        for name, fit in fits.items()
    ]
    return write_page(tmp_path_factory.mktemp("ladder"), ladders, compare(fits, target), HOSTILE)


@pytest.fixture(scope="module")
def numbers(written: Path) -> dict[str, Any]:
    return json.loads((written.parent / "ladder-fit.json").read_text())


@pytest.fixture(params=[1280, 400])
def page(browser: Browser, written: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Opened as a file; a complaint of the browser, or anything loaded from elsewhere, fails the
    test.
    """
    yield from open_page(
        browser,
        written.as_uri(),
        within=written.as_uri(),
        viewport={"width": request.param, "height": 900},
    )


def test_the_page_has_the_numbers_of_the_json(page: Page, numbers: dict[str, Any]) -> None:
    text = page.locator("main").inner_text()
    for found in numbers["ladders"]:
        assert interval_text(found["target"]["loss"]) in text
        assert interval_text(found["target"]["bits_per_byte"]) in text
        assert interval_text(found["best"]["parameters"], 3) in text
        for each in found["law"].values():
            assert f"{each['low']:.4g} to {each['high']:.4g}" in text
        for point in found["points"]:
            assert (
                f"{point['loss']:.4f}\t{point['predicted']:.4f}\t{100 * point['residual']:+.2f} %"
                in text
            )
        for size in found["sizes"]:
            ratio = f"{size['ratio']:.2g}" + (", the target" if size["is_target"] else "")
            assert (
                f"{ratio}\t{short(size['parameters'])}\t{short(size['tokens'])}\t{size['loss']:.4f}"
                in text
            )
        assert f"val/quiz/acc\t{interval_text(found['tasks'][0]['score'])}" in text
        assert check_text(found["check"]) in text
        for caution in found["cautions"]:
            assert caution in text
    assert interval_text(numbers["comparison"][0]) in text


def test_all_charts_are_drawn_with_a_mark_for_each_run_and_the_target(
    page: Page, numbers: dict[str, Any]
) -> None:
    expect(page.locator(".chart")).to_have_count(2 * 6)
    losses = page.locator(
        ".chart", has=page.get_by_role("heading", name="Losses and the law", exact=True)
    ).first
    runs = len(numbers["ladders"][0]["points"])
    expect(losses.locator("circle")).to_have_count(runs + 1)
    # The sizes, the target, and its interval.
    expect(losses.locator("path.curve")).to_have_count(4 + 1 + 1)
    box = page.locator("main").bounding_box()
    assert box
    for drawing in page.locator("svg").all():
        area = drawing.bounding_box()
        assert area
        assert area["x"] >= box["x"]
        assert area["x"] + area["width"] <= box["x"] + box["width"]


def test_names_are_shown_as_text(page: Page) -> None:
    expect(page.locator("main")).to_contain_text(HOSTILE)
    expect(page).to_have_title(f"{HOSTILE} · lmforge")
    expect(page.locator("main")).to_contain_text("spiked is left out: its loss is inf")


def test_dark_and_light_are_those_of_the_runs_report(browser: Browser, written: Path) -> None:
    grounds = []
    for scheme in ("dark", "light"):
        for page in open_page(
            browser, written.as_uri(), within=written.as_uri(), color_scheme=scheme
        ):
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(25, 24, 23)", "rgb(255, 255, 255)"]
