"""A run logs its prediction, and after its first steps the measured values; a prediction never ends
or delays it.
"""

from pathlib import Path
from typing import Any

import pytest

from lmforge.cli import run
from lmforge.core.options.load import STAGES, parse_config
from lmforge.core.records.runs import Run
from lmforge.lab.plan import out_of_memory
from lmforge.lab.plan.observer import PREDICTED_STEPS, PredictionCheck
from lmforge.lab.plan.planning import RunPrediction, predict_run
from lmforge.lab.plan.prediction.step_config import StepConfig
from lmforge.ops.report.run_data import read_run
from tests.lab.plan.test_plan import step_config_of
from tests.support.calibrations import calibration, write_calibration

GIB = 2**30
WORDS: dict[str, object] = {
    "data.sequence_length": 32,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 2,
    "train.global_batch_size": 4,
    "train.steps": PREDICTED_STEPS + 5,
    "train.dtype": "fp32",
    "train.device": "cpu",
    "schedule.warmup_steps": 0,
    "train.threads": 1,
    "log.every_steps": 8,
    "log.predict": "true",
    "checkpoint.last_save_model_only": "true",
}


def trained(
    tokens: Path, folder: Path, capfd: pytest.CaptureFixture[str], **changes: object
) -> tuple[Run, list[str]]:
    """A run, and the lines that it printed about predictions."""
    words = WORDS | {"data.folder": tokens, "run.folder": folder, "run.name": "a"} | changes
    assert (
        run(
            [
                "pretrain",
                *(str(part) for name, value in words.items() for part in (f"--{name}", value)),
            ]
        )
        == 0
    )
    printed = capfd.readouterr().out.splitlines()
    return Run(folder / "a"), [
        line.removeprefix("predicted  ") for line in printed if line.startswith("predicted  ")
    ]


@pytest.mark.slow
def test_a_run_logs_its_prediction_and_then_what_it_needed_beside_it(
    tiny_tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The constants are those of another CPU: their prediction is wrong, and that is to be seen."""
    file = write_calibration(tmp_path, calibration())
    done, lines = trained(tiny_tokens, tmp_path, capfd, **{"log.calibration": file})
    before, after = lines
    assert before.startswith("memory ")
    assert "tokens/s (constants measured (A CPU, 1 rank, 2026-11-23): " in before
    assert "; from data sheets" in before or "matrix products" in before
    records = done.read_metrics()
    (compared,) = [record for record in records if "predicted/memory_gib" in record]
    assert compared == next(record for record in records if record["step"] >= PREDICTED_STEPS)
    assert compared["measured/memory_gib"] == compared["memory_gib"]
    for name in ("predicted/tokens_per_second", "measured/tokens_per_second"):
        assert compared[name] > 0
    assert f"{compared['measured/tokens_per_second']:,.0f} tokens/s (predicted " in after
    shown = read_run(done)
    assert shown["prediction"] == {
        name: value for name, value in compared.items() if "/" in name and "ed/" in name
    }
    assert not any(name.startswith(("predicted/", "measured/")) for name in shown["series"])


def test_a_cpu_without_measurements_gets_memory_and_no_speed(
    tiny_tokens: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done, (before, after) = trained(tiny_tokens, tmp_path, capfd, **{"train.steps": 3})
    assert (
        "per rank; no speed (no measurements of this CPU; lmforge bench --calibrate makes them"
        in before
    )
    assert "(predicted " in after
    (compared,) = [record for record in done.read_metrics() if "predicted/memory_gib" in record]
    assert compared["step"] == 3  # the end of a run of fewer than 20 steps
    assert "predicted/tokens_per_second" not in compared
    assert compared["measured/tokens_per_second"] > 0


def test_a_prediction_that_fails_ends_no_run(
    tiny_tokens: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> RunPrediction:
        raise ZeroDivisionError("of a prediction")

    monkeypatch.setattr(out_of_memory, "predict_run", fail)
    done, lines = trained(tiny_tokens, tmp_path, capfd, **{"train.steps": 3})
    assert lines == ["failed, and the run continues: ZeroDivisionError: of a prediction"]
    records = done.read_metrics()
    assert records[-1]["step"] == 3
    assert not any("predicted/memory_gib" in record for record in records)


def test_a_comparison_that_fails_ends_no_run() -> None:
    lines: list[str] = []
    broken = RunPrediction(1.0, (1.0, 2.0), None, (1.0, "x"), "")  # type: ignore[arg-type]
    check = PredictionCheck(broken, 100, 0, lines.append)
    check.add_step(1.0)
    assert check.compare(PREDICTED_STEPS, 1.0, is_last=False) == {}
    assert lines[0].startswith("predicted  failed, and the run continues: ")
    assert check.compare(PREDICTED_STEPS + 1, 1.0, is_last=True) == {}
    assert len(lines) == 1


def prediction(
    step_config: StepConfig,
    *words: object,
    device: str | None = "NVIDIA H100 80GB HBM3",
    stage: str = "pretrain",
) -> Any:
    config = parse_config(STAGES[stage], list(map(str, words)))
    try:
        return predict_run(step_config, config, device, (0.0, 1e12))
    except Exception as problem:
        return str(problem)


@pytest.mark.slow
def test_speed_is_predicted_for_known_hardware_only(tmp_path: Path) -> None:
    step_config, measured = step_config_of(gpus=8), write_calibration(tmp_path, calibration())
    known = prediction(step_config)
    assert known.speed_interval[0] < known.tokens_per_second < known.speed_interval[1]
    assert known.speed_source == "constants from data sheets: NVIDIA H100 data sheet (SXM)"
    assert known.memory_bytes < 80 * GIB
    for other, reason in (
        (
            prediction(step_config, device="NVIDIA GeForce 8800"),
            "NVIDIA GeForce 8800 is not in the hardware file",
        ),
        (prediction(step_config_of(gpus=16)), "no measurements of the network between hosts"),
        (prediction(step_config, "--log.calibration", tmp_path / "none.json"), "none.json"),
        (
            prediction(step_config, "--log.calibration", measured),
            "A CPU, and the plan is for h100-80",
        ),
        (
            prediction(step_config_of(on_gpu=False), "--log.calibration", measured, device=None),
            "1 measured",
        ),
    ):
        assert reason in other.speed_source
        assert other.tokens_per_second is None
        assert "; no speed (" in other.describe()
        assert other.memory_bytes > 0
    lengths = (
        "--data.phases",
        "[{steps = 5, sequence_length = 512}, {}]",
        "--data.sequence_length",
        1024,
    )
    assert (
        prediction(step_config, *lengths).speed_source == "data.phases has several sequence lengths"
    )


@pytest.mark.slow
def test_a_run_of_preferences_is_predicted_and_one_that_samples_is_not() -> None:
    assert prediction(step_config_of(), stage="align").tokens_per_second > 0
    sampled = prediction(step_config_of(), "--align.method", "grpo", stage="align")
    assert sampled.startswith("align.method = grpo is not predicted: ")


@pytest.mark.slow
def test_memory_of_tensors_is_what_a_gpu_counts_as_allocated() -> None:
    result = prediction(step_config_of("124m", gpus=1, sequence_length=512))
    low, high = result.memory_interval
    assert low < result.memory_bytes < high < GIB * 8
