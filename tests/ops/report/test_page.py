"""The report in a real browser: opened as a file, used with a pointer, at the widths of a desk and
of a phone.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from tests.ops.report.conftest import add_event, copied
from tests.support.browser import open_page

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><!-- <b>bold</b> \u2028"


def opened(browser: Browser, path: Path, **looks: object) -> Iterator[Page]:
    yield from open_page(browser, path.as_uri(), within=path.as_uri(), **looks)


@pytest.fixture(scope="module")
def single(first: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of one run, to which samples and completions with markup were added."""
    run = copied(first, tmp_path_factory.mktemp("shown"))
    add_event(run, kind="sample", step=6, prompt="def ", text=HOSTILE)
    add_event(run, kind="bad step", step=5, reason="the loss is NaN")
    (run.path / "completions").mkdir()
    row = {
        "prompt": [{"role": "user", "content": HOSTILE}],
        "completion": HOSTILE,
        "reward": 0.5,
        "tokens": 3,
        "ended": True,
    }
    (run.path / "completions" / "set-000000-rank-0.jsonl").write_text(json.dumps(row) + "\n")
    (run.path / "completions" / "set-000001-rank-0.jsonl").write_text(
        json.dumps(row | {"reward": 0.75}) + "\n"
    )
    assert command(["report", str(run.path)]) == 0
    return run.path / "report.html"


@pytest.fixture
def page(browser: Browser, single: Path) -> Iterator[Page]:
    yield from opened(browser, single, viewport={"width": 1280, "height": 900})


def four_digits(value: float) -> str:
    return f"{float(f'{value:.4g}'):g}"


def chart(page: Page, heading: str) -> Locator:
    return page.locator(".chart").filter(has=page.get_by_role("heading", name=heading, exact=True))


def test_all_sections_of_a_run_are_there_and_the_values_are_those_of_the_files(
    page: Page, first: Run
) -> None:
    names = [
        "Summary",
        "Curves",
        "What happened",
        "Samples",
        "Completions",
        "Data",
        "Checkpoints",
        "Configuration",
    ]
    assert page.get_by_role("navigation").get_by_role("link").all_inner_texts() == [
        *names,
        "Environment",
    ]
    last = first.read_metrics()[-1]
    legend = chart(page, "Loss").locator(".legend")
    expect(legend).to_contain_text(f"training {four_digits(last['loss'])}")
    expect(legend).to_contain_text(f"validation {four_digits(last['val/loss'])}")
    expect(page.locator("#events")).to_contain_text("the loss is NaN")
    expect(page.locator("#summary")).to_contain_text("1 bad step, 1 restart")


def test_the_value_under_the_pointer_is_shown_and_dragging_zooms_all_charts(
    page: Page, first: Run
) -> None:
    losses = {record["step"]: record["loss"] for record in first.read_metrics() if "loss" in record}
    plot = chart(page, "Loss").locator("svg")
    area = plot.bounding_box()
    assert area
    page.mouse.move(area["x"] + 60, area["y"] + 100)  # near the left end of the axis
    legend = chart(page, "Loss").locator(".legend")
    expect(legend).to_contain_text(f"training {four_digits(losses[1])}")
    whole = chart(page, "Gradient norm").locator("path.curve").get_attribute("d")
    page.mouse.down()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + 100)
    page.mouse.up()
    back = page.get_by_role("button", name="whole run")
    expect(back).to_be_visible()
    assert chart(page, "Gradient norm").locator("path.curve").get_attribute("d") != whole
    back.click()
    expect(back).to_be_hidden()
    assert chart(page, "Gradient norm").locator("path.curve").get_attribute("d") == whole


def test_the_pointer_changes_the_legend_and_redraws_no_curve(page: Page) -> None:
    plot = chart(page, "Loss").locator("svg")
    plot.evaluate(
        "svg => { for (const each of svg.querySelectorAll('path, text')) each.kept = true }"
    )
    area = plot.bounding_box()
    assert area
    page.mouse.move(area["x"] + 60, area["y"] + 100)
    expect(chart(page, "Loss").locator("line.cursor")).to_have_count(1)
    expect(chart(page, "Loss").locator(".legend")).to_contain_text("step ")
    assert plot.evaluate(
        "svg => [...svg.querySelectorAll('path, text')].every((each) => each.kept)"
    )
    page.mouse.move(5, 5)
    expect(chart(page, "Loss").locator("line.cursor")).to_have_count(0)


def test_steps_and_points_are_found_between_others(page: Page) -> None:
    result = page.evaluate("""() => {
        axis = "tokens";
        const run = { axis: { step: [10, 20, 40], tokens: [100, 200, 800] } };
        const places = [5, 10, 15, 20, 30, 40, 50].map((step) => along(run, step));
        axis = "step";
        const points = [[1, "a"], [2, "b"], [4, "c"]];
        return [places, [0, 1.4, 1.6, 2.9, 3.1, 9].map((x) => nearest(points, x)[1]).join("")];
    }""")
    assert result == [[100, 100, 150, 200, 500, 800, 1100], "aabbcc"]


def test_a_stall_is_marked_and_what_each_rank_was_doing_is_a_table(
    browser: Browser, first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    add_event(
        run,
        kind="stall",
        step=5,
        reason="no progress for 30 s at step 5: rank 1 is stuck, rank 0 waits for it",
    )
    beat = json.loads((run.health_folder / "rank-0.json").read_text())
    for rank, phase in ((0, "reduce"), (1, "data"), (2, "failed")):
        text = json.dumps(
            beat | {"rank": rank, "phase": phase, "host": "elsewhere", "world_size": 4, "step": 5}
        )
        (run.health_folder / f"rank-{rank}.json").write_text(text)
    assert command(["report", str(run.path)]) == 0
    for page in opened(browser, run.path / "report.html", viewport={"width": 390, "height": 844}):
        expect(page.locator("#summary")).to_contain_text("1 stall")
        expect(page.locator("#events")).to_contain_text("rank 1 is stuck, rank 0 waits for it")
        expect(chart(page, "Loss").locator("text", has_text="■")).to_have_count(1)
        expect(page.locator("#ranks")).to_contain_text("4 ranks, by phase:")
        rows = [row.split("\t") for row in page.locator("#ranks tbody tr").all_inner_texts()]
        assert {row[0]: row[2] for row in rows} == {
            "0": "reduce",
            "1": "data",
            "2": "failed",
            "3": "",
        }
        assert next(row for row in rows if row[0] == "3")[-1] == "no heartbeat: it never joined"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_curves_are_drawn_over_tokens_and_time_and_on_a_logarithmic_scale(page: Page) -> None:
    page.mouse.move(5, 5)
    texts = chart(page, "Loss").locator("svg text")
    over_steps = texts.all_inner_texts()
    page.get_by_label("over").select_option("tokens")
    assert texts.all_inner_texts() != over_steps
    page.get_by_label("over").select_option("seconds")
    expect(texts.filter(has_text=" s").first).to_be_visible()
    page.get_by_label("over").select_option("step")
    before = chart(page, "Loss").locator("path.curve").first.get_attribute("d")
    page.get_by_role("button", name="logarithmic").click()
    assert chart(page, "Loss").locator("path.curve").first.get_attribute("d") != before


def test_what_a_model_wrote_is_shown_as_text(page: Page) -> None:
    expect(page.locator("#samples pre").last).to_contain_text("<b>bold</b>")
    assert page.title() == "first · lmforge"
    assert page.locator("img").count() == 0
    slider = page.get_by_role("slider", name="step")
    slider.fill("0")
    expect(page.locator("#samples")).to_contain_text("after step 2")
    page.get_by_label("table").select_option("1")
    expect(page.locator("#completions")).to_contain_text("0.75")
    expect(page.locator("#completions pre").first).to_contain_text("user: </script><img")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    browser: Browser, single: Path, scheme: str
) -> None:
    for page in opened(
        browser, single, viewport={"width": 390, "height": 844}, color_scheme=scheme
    ):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        ground, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.body).color]"
        )
        assert (sum(map(int, ground[4:-1].split(", "))) < sum(map(int, ink[4:-1].split(", ")))) == (
            scheme == "dark"
        )


def test_scores_of_held_out_tasks_are_one_chart_for_each_metric(
    browser: Browser, first: Run, tmp_path: Path
) -> None:
    run = copied(first, tmp_path)
    recipe = run.path / "recipe.toml"
    recipe.write_text(
        recipe.read_text().replace("tasks = []", 'tasks = ["sums.jsonl", "facts.jsonl"]')
    )
    with open(run.metrics_path, "a") as file:
        for step, score in ((7, 0.25), (8, 0.5)):
            scores = {
                "val/sums/accuracy": score,
                "val/facts/accuracy": score + 0.125,
                "val/other/accuracy": 1.0,
            }
            file.write(json.dumps({"step": step, "tokens": 9, **scores}) + "\n")
    assert command(["report", str(run.path)]) == 0
    for page in opened(browser, run.path / "report.html", viewport={"width": 1280, "height": 900}):
        tasks = chart(page, "Validation tasks: accuracy")
        expect(tasks.locator(".legend")).to_contain_text("sums 0.5")
        expect(tasks.locator(".legend")).to_contain_text("facts 0.625")
        expect(tasks.locator("path.curve")).to_have_count(2)
        tasks.locator("svg").dispatch_event(
            "pointerup", {"pointerType": "touch", "clientX": 300, "clientY": 500}
        )
        tasks.locator("svg").dispatch_event("dblclick", {"clientX": 300, "clientY": 500})
        expect(page.get_by_role("button", name="whole run")).to_be_visible()


def test_runs_side_by_side_have_their_curves_in_one_chart_and_a_table_of_what_differs(
    browser: Browser, first: Run, second: Run, tmp_path: Path
) -> None:
    assert (
        command(["report", str(first.path), str(second.path), "--out", str(tmp_path / "both.html")])
        == 0
    )
    for page in opened(browser, tmp_path / "both.html", viewport={"width": 1280, "height": 900}):
        rows = page.locator("#differences tbody tr").all_inner_texts()
        assert [row.split("\t") for row in rows] == [["optimizer.lr", "0.01", "0.02"]]
        expect(chart(page, "Loss").locator("path.curve")).to_have_count(4)
        expect(chart(page, "Loss").locator(".legend")).to_contain_text("second, validation")


def test_the_stages_of_a_pipeline_are_in_one_report(
    browser: Browser, first: Run, second: Run, tmp_path: Path
) -> None:
    stages = "".join(
        f'[[stages]]\nverb = "pretrain"\nname = "{name}"\n' for name in ("a", "b", "later")
    )
    (tmp_path / "p.toml").write_text(f'folder = "{tmp_path}"\n{stages}')
    for run, name in ((first, "p-a"), (second, "p-b")):
        copied(run, tmp_path).path.rename(tmp_path / name)
    assert command(["report", str(tmp_path / "p.toml"), "--out", str(tmp_path / "all.html")]) == 0
    for page in opened(browser, tmp_path / "all.html"):
        assert page.locator("h1").inner_text() == "p"
        assert page.locator("#summary summary").all_inner_texts() == ["p-a", "p-b"]


def test_bad_input_is_one_line(
    first: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.toml").write_text(f'folder = "{tmp_path}"\n[[stages]]\nverb = "pretrain"\n')
    cases = {
        "a folder of no known kind; give a run or the file of a pipeline": [str(tmp_path)],
        "none of its stages has begun": [str(tmp_path / "p.toml")],
        "No such file or directory; name another file": [
            str(first.path),
            "--out",
            str(tmp_path / "nowhere" / "a.html"),
        ],
        "expected a name that ends with .html": [str(first.path), "--out", str(tmp_path / "a.pdf")],
    }
    for message, words in cases.items():
        capfd.readouterr()
        assert command(["report", *words]) == 2
        err = capfd.readouterr().err
        assert message in err
        assert err.count("\n") == 1
