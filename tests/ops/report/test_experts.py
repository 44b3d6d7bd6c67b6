"""The map of a mixture's experts: what a run records, and how the report draws it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from lmforge.cli import run as command
from lmforge.core.model.config import ModelConfig
from lmforge.core.records.runs import Run
from lmforge.ops.monitor.expert_load import MAX_RECORDS, ExpertLoad
from lmforge.ops.report import run_data
from lmforge.ops.report.run_data import read_run
from tests.conftest import without_shape
from tests.core.model.conftest import built
from tests.core.model.test_expert_load import ALONE
from tests.ops.report.test_page import chart, opened
from tests.seeds import fresh_random
from tests.support.browser import browser  # noqa: F401 - a fixture

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def runs(tiny_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run of 6 steps, and one of 4 that was continued to 6."""
    folder = tmp_path_factory.mktemp("mixtures")
    shape = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]
    words = [
        *without_shape(tiny_options),
        "--model.preset",
        "nano-moe",
        *shape,
        "--schedule.name",
        "constant",
    ]
    words += ["--run.folder", str(folder), "--schedule.warmup_steps", "1"]
    for name, steps in (("uncut", 6), ("continued", 4), ("continued", 6)):
        assert command(["pretrain", *words, "--run.name", name, "--train.steps", str(steps)]) == 0
    return Run.open(folder / "uncut"), Run.open(folder / "continued")


def records_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.experts_path.read_text().splitlines()]


def test_the_tokens_of_each_expert_are_recorded_exactly_also_over_a_resume(
    runs: tuple[Run, Run],
) -> None:
    uncut, continued = map(records_of, runs)
    assert continued == uncut
    assert [each["step"] for each in uncut] == [1, 2, 3, 4, 5, 6]
    config = runs[0].load_config()
    tokens = config.train.global_batch_size * config.data.sequence_length
    for record in uncut:
        assert record["layers"] == [0, 1, 2]
        assert [sum(counts) for counts in record["counts"]] == [2 * tokens] * 3
    largest = max(uncut[-1]["counts"][1]) / tokens
    assert runs[0].read_metrics()[-1]["experts/fullest/1"] == pytest.approx(largest)


@pytest.mark.slow
def test_a_long_run_has_at_most_as_many_records_as_before_wherever_it_is_continued() -> None:
    model = built(
        ModelConfig(50, 16, 1, 2, 24, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=1)
    )

    def recorded(begin: int, end: int) -> list[int]:
        load, steps = ExpertLoad(model, ALONE, begin), []
        for step in range(begin + 10, end + 1, 10):
            model.blocks[0].mlp.counts += step
            load.take(step)
            if record := load.record(100_000):
                assert record["counts"] == [[step] * 4]
                steps.append(record["step"])
        return steps

    uncut = recorded(0, 100_000)
    assert len(uncut) == MAX_RECORDS
    assert uncut[-1] == 100_000
    cut = 10 * fresh_random().randrange(1, 10_000)
    assert recorded(0, cut) + recorded(cut, 100_000) == uncut


def test_steps_made_again_after_a_rollback_are_counted_once() -> None:
    model = built(
        ModelConfig(50, 16, 1, 2, 24, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=1)
    )
    load = ExpertLoad(model, ALONE)
    model.blocks[0].mlp.counts += 7
    load.discard(0)
    model.blocks[0].mlp.counts += 5
    load.take(10)
    assert load.record(10) == {"step": 10, "layers": [0], "counts": [[5] * 4]}


def test_damaged_and_repeated_records_are_replaced(runs: tuple[Run, Run], tmp_path: Path) -> None:
    shutil.copytree(runs[0].path, tmp_path / "a")
    run = Run.open(tmp_path / "a")
    assert read_run(run)["experts"]["edges"] == [0, 1, 2, 3, 4, 5, 6]
    line = {"step": 4, "layers": [0, 1, 2], "counts": [[0, 3, 0, 0, 0, 0, 0, 1]] * 3}
    odd = [
        line | {"counts": [[1], [1, 2], [3]]},
        line | {"counts": [[-1] * 8] * 3},
        line | {"layers": [0]},
        line | {"counts": []},
    ]
    texts = [*map(json.dumps, [line, *odd]), "[" * 9000, "half a li"]
    with open(run.experts_path, "a") as file:
        file.write("\n".join(texts))
    shown = read_run(run)["experts"]
    assert shown["edges"] == [0, 1, 2, 3, 4]
    assert shown["loads"][-1] == [[0, 600, 0, 0, 0, 0, 0, 200]] * 3
    run.experts_path.unlink()
    assert read_run(run)["experts"] is None


def test_a_large_map_is_thinned(runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_data, "MAX_CELLS", 3 * 3 * 8)
    shown = read_run(runs[0])["experts"]
    assert (len(shown["loads"]), shown["edges"][0], shown["edges"][-1]) == (3, 0, 6)


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, runs: tuple[Run, Run], request: pytest.FixtureRequest) -> Iterator[Page]:  # noqa: F811
    assert command(["report", str(runs[0].path)]) == 0
    yield from opened(
        browser,
        runs[0].path / "report.html",
        viewport={"width": 1280, "height": 900},
        color_scheme=request.param,
    )


def test_the_load_under_the_pointer_is_that_of_the_layer_and_step(
    page: Page, runs: tuple[Run, Run]
) -> None:
    loads = read_run(runs[0])["experts"]["loads"]
    over_time = chart(page, "Experts over time")
    page.get_by_label("layer", exact=True).select_option("1")
    svg = over_time.locator("svg")
    svg.scroll_into_view_if_needed()
    area = svg.bounding_box()
    assert area
    # The first of the columns, the third of the rows.
    page.mouse.move(area["x"] + 60, area["y"] + 6 + 18 * 2.5)
    text = f"layer 1, step 1, expert 2: {float(f'{loads[0][1][2] / 100:.4g}'):g}"
    expect(over_time.locator(".legend")).to_contain_text(text)
    page.get_by_label("step of the experts").fill("2")
    expect(page.locator("#experts")).to_contain_text("up to step 3")
    layers = chart(page, "Layers and experts")
    area = layers.locator("svg").bounding_box()
    assert area
    page.mouse.move(area["x"] + area["width"] - 20, area["y"] + 6 + 18 * 2.5)
    expect(layers.locator(".legend")).to_contain_text(
        f"expert 7, layer 2: {float(f'{loads[2][2][7] / 100:.4g}'):g}"
    )


def test_an_expert_without_tokens_has_a_colour_of_its_own_in_light_and_dark(page: Page) -> None:
    names = [f"--load{kind}" for kind in range(8)]
    colours = page.evaluate(
        """(names) => names.map((name) => {
            const each = document.createElement("i");
            each.style.background = `var(${name})`;
            document.body.append(each);
            return getComputedStyle(each).backgroundColor;
        })""",
        names,
    )
    assert len(set(colours)) == 8
    assert (
        page.evaluate("[0, 1, 24, 25, 79, 80, 125, 126, 200, 400, 401].map(colourOf).join('')")
        == "01123445567"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
