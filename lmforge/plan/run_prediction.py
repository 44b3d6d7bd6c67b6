"""What a run logs before its first step: the memory and the speed that `lmforge plan` predicts. Later it logs the measured
values with them. There is no speed for unknown hardware.
"""

from dataclasses import dataclass
from typing import Any

from lmforge.config.stage import StageConfig
from lmforge.errors import UserError, format_bytes
from lmforge.plan.calibration import read_calibration
from lmforge.plan.hardware import data_sheets
from lmforge.plan.planning import Machine, calibrated_gpu, check_dtype, check_predictable, predict_step
from lmforge.plan.prediction.predict import MEMORY_INTERVAL, OVERHEAD, peak_memory
from lmforge.plan.prediction.step_config import StepConfig


@dataclass(frozen=True)
class RunPrediction:
    """The prediction of a step of a run.

    memory_bytes, memory_interval: at the peak of the fullest rank, of what `memory_gib` in metrics.jsonl measures: tensors on
        a GPU, resident memory on a CPU.
    tokens_per_second, speed_interval: of all ranks, padding included; None where it is not predicted.
    speed_source: where its constants are from, or why there is no speed.
    """

    memory_bytes: float
    memory_interval: tuple[float, float]
    tokens_per_second: float | None
    speed_interval: tuple[float, float] | None
    speed_source: str

    def describe(self) -> str:
        """The prediction in one line."""
        speed = f"{self._speed_words} tokens/s" if self.speed_interval else "no speed"
        return f"memory {self._memory_words} per rank; {speed} ({self.speed_source})"

    def as_json(self) -> dict[str, Any]:
        """The fields, with memory in GiB."""
        low, high = (each / 2**30 for each in self.memory_interval)
        return {
            "memory_gib": self.memory_bytes / 2**30,
            "memory_gib_interval": [low, high],
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_interval": None if self.speed_interval is None else list(self.speed_interval),
            "source": self.speed_source,
        }

    def compare(self, memory_bytes: float, tokens_per_second: float | None) -> str:
        """What was measured, and the prediction beside it."""
        words = f"memory {format_bytes(memory_bytes)} (predicted {self._memory_words})"
        if tokens_per_second is not None:
            predicted = f" (predicted {self._speed_words})" if self.speed_interval else ""
            words += f"; {tokens_per_second:,.0f} tokens/s{predicted}"
        return words

    @property
    def _memory_words(self) -> str:
        return " to ".join(map(format_bytes, self.memory_interval))

    @property
    def _speed_words(self) -> str:
        return " to ".join(f"{each:,.0f}" for each in self.speed_interval or ())


def predict_run(
    step_config: StepConfig, config: StageConfig, device_name: str | None, resident: tuple[float, float]
) -> RunPrediction:
    """The prediction of a run.

    Args:
        device_name: of the GPU, as torch gives it; None on a CPU.
        resident: on a CPU the bytes of this process before it builds anything, and the upper end of the interval: libraries
            take more from the first step on, and the C library keeps more than is live.

    Raises UserError, in words for the reader, where nothing can be predicted.
    """
    check_predictable(config)
    kinds = peak_memory(step_config)
    memory = sum(kinds.values()) - kinds[OVERHEAD] - kinds["allocator"]
    interval = memory * MEMORY_INTERVAL[0], memory * MEMORY_INTERVAL[1]
    if not step_config.on_gpu:
        before, most = resident
        memory, interval = memory + before, (interval[0] + before, most)
    try:
        machine = _find_machine(step_config, config, device_name)
    except UserError as problem:
        return RunPrediction(memory, interval, None, None, str(problem))
    prediction, ranks = predict_step(step_config, machine), step_config.world_size
    slow, fast = prediction.speed_interval
    source = machine.describe_constants(step_config.dtype)
    return RunPrediction(memory, interval, prediction.tokens_per_second * ranks, (slow * ranks, fast * ranks), source)


def _find_machine(step_config: StepConfig, config: StageConfig, device_name: str | None) -> Machine:
    """Raises UserError where a constant would be a guess."""
    if len(set(getattr(config.data, "sequence_lengths", ()))) > 1:
        raise UserError("data.phases has several sequence lengths")
    path, per_host = config.log.calibration, step_config.gpus_per_host
    gpu = data_sheets().gpu("cpu") if device_name is None else data_sheets().find(device_name)
    if gpu is None:
        raise UserError(f"{device_name} is not in the hardware file")
    check_dtype(gpu, step_config.dtype)
    calibration = None if path is None else read_calibration(path)
    if calibration is None and gpu.is_cpu:
        raise UserError("no measurements of this CPU; lmforge bench --calibrate makes them, log.calibration names the file")
    if step_config.world_size > per_host and (calibration is None or calibration.hosts == 1):
        raise UserError("no measurements of the network between hosts; lmforge bench --calibrate on several hosts makes them")
    if path is None or calibration is None:
        return Machine(gpu, None, per_host)
    gpu = calibrated_gpu(gpu, calibration, data_sheets(), path, per_host)
    # What was measured takes the place of the data sheet.
    network = data_sheets().network("infiniband-ndr") if step_config.world_size > per_host else None
    return Machine(gpu, network, per_host, calibration)
