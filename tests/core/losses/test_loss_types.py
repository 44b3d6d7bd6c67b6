"""`align.loss_type`: each value trains from the command line, and invalid combinations are
refused.
"""

import json
import math
import random
from pathlib import Path

import pytest

from lmforge.core.records.runs import Run
from tests.conftest import Command, Refusal

BETA, LABEL_SMOOTHING = 0.1, 0.2
LN2 = math.log(2)
# The loss before the first update, when policy and reference agree and every log-ratio is 0.
FIRST_LOSS = {
    "sigmoid": LN2,
    "ipo": (1 / (2 * BETA)) ** 2,
    "hinge": 1.0,
    "robust": LN2,
    "exo": -LN2 - (math.log(1 - LABEL_SMOOTHING) + math.log(LABEL_SMOOTHING)) / 2,
    "nca": 2 * LN2,
    "apo-zero": 1.0,
    "apo-down": 1.0,
}
SMOOTHED = ("robust", "exo")
IN_MAKE_TEST = ("ipo", "exo")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chooser, path = random.Random(1), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["red", "green", "blue", "one", "two", "three"]
    prompts = [" ".join(chooser.choices(words, k=3)) for _ in range(24)]
    records = [
        {"prompt": prompt, "chosen": " yes indeed", "rejected": " no never"} for prompt in prompts
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    "loss_type",
    [
        name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.slow)
        for name in FIRST_LOSS
    ],
)
def test_every_loss_type_trains_from_its_first_loss_to_a_larger_margin(
    loss_type: str, pairs: Path, tiny_run: Path, lmforge: Command, tmp_path: Path
) -> None:
    options = {
        "align.loss_type": loss_type,
        "align.beta": BETA,
        "model.source": tiny_run,
        "run.folder": tmp_path,
        "run.name": "aligned",
        "data.files": pairs,
        "data.folder": tmp_path / "examples",
        "data.validation_ratio": 0,
        "data.sequence_length": 48,
        "train.steps": 3,
        "train.global_batch_size": 4,
        "train.dtype": "fp32",
        "train.device": "cpu",
        "train.compile": "off",
        "train.threads": 1,
        "optimizer.lr": 2e-3,
        "schedule.name": "constant",
        "log.every_steps": 1,
    }
    options |= {"align.label_smoothing": LABEL_SMOOTHING} if loss_type in SMOOTHED else {}
    done = lmforge(
        "align",
        "--method",
        "dpo",
        *(word for name, value in options.items() for word in (f"--{name}", value)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [record for record in Run(tmp_path / "aligned").read_metrics() if "loss" in record]
    assert records[0]["loss"] == pytest.approx(FIRST_LOSS[loss_type], rel=1e-5)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["rewards/margin"] > records[0]["rewards/margin"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (
                ["--align.loss_type", loss_type, "--align.label_smoothing", "0.1"],
                (
                    f"align.label_smoothing: not with align.loss_type = {loss_type}; it is for"
                    " sigmoid, robust and exo"
                ),
            )
            for loss_type in ("ipo", "hinge", "nca", "apo-zero", "apo-down")
        ),
        (
            ["--align.loss_type", "exo"],
            "align.loss_type = exo: needs align.label_smoothing above 0",
        ),
        (
            ["--align.loss_type", "robust", "--align.label_smoothing", "0.5"],
            "align.label_smoothing: expected a number below 0.5, got 0.5",
        ),
        (
            ["--align.loss_type", "exo_pair"],
            "align.loss_type: expected 'sigmoid', 'ipo', 'hinge', 'robust', 'exo', 'nca'",
        ),
        (
            ["--method", "orpo", "--align.loss_type", "hinge"],
            "align.loss_type: orpo does not read it; it is for dpo",
        ),
        (
            ["--method", "ipo"],
            "align.method: expected 'dpo', 'kto', 'orpo', 'simpo', 'reward' or 'grpo', got \"ipo\"",
        ),
    ],
)
def test_a_loss_type_that_does_not_fit_is_refused_in_one_line(
    words: list[str], message: str, refused: Refusal
) -> None:
    assert message in refused(
        "align", "--model.source", "none", "--data.files", "none.jsonl", *words
    )
