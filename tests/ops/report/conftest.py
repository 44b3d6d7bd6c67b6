import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run as command
from lmforge.core.records.runs import Run
from tests.core.data.conftest import (  # noqa: F401 - fixtures
    byte_tokenizer,
    folder_of,
    impatient,
)
from tests.support.browser import browser  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def first(tiny_options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 4 steps that was continued to 6, with samples, some of them hostile."""
    folder = tmp_path_factory.mktemp("runs")
    where = [
        *tiny_options,
        "--run.folder",
        str(folder),
        "--run.name",
        "first",
        "--sample.every_steps",
        "2",
    ]
    samples = [
        "--sample.max_tokens",
        "4",
        "--sample.prompts",
        "def ",
        "--schedule.name",
        "constant",
    ]
    for steps in ("4", "6"):
        assert command(["pretrain", *where, *samples, "--train.steps", steps]) == 0
    return Run.open(folder / "first")


@pytest.fixture(scope="module")
def second(first: Run) -> Run:
    """The first run under another name, with another learning rate."""
    copy = first.path.parent / "second"
    shutil.copytree(first.path, copy)
    recipe = copy / "recipe.toml"
    recipe.write_text(
        recipe.read_text()
        .replace('name = "first"', 'name = "second"')
        .replace("lr = 0.01", "lr = 0.02")
    )
    return Run.open(copy)


def add_event(run: Run, **fields: Any) -> None:
    with open(run.events_path, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": "2026-01-02T03:04:05.678+00:00", **fields}) + "\n")


def copied(run: Run, folder: Path) -> Run:
    shutil.copytree(run.path, folder / run.path.name)
    return Run.open(folder / run.path.name)
