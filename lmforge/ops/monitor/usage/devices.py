"""The usage of this host's GPUs: utilisation, memory, power, temperature, processes.

NVIDIA's are read through NVML; those of other makes are not.

A value that the library or driver does not report is None, and a device that does not answer has an
`error`; the other values are still reported.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmforge.core.errors import how_to_install
from lmforge.core.records.run_records import Count, Measure

T = TypeVar("T")
# NVIDIA's reasons for low clocks that indicate a problem, unlike a power cap or an idle GPU.
NVIDIA_SLOWDOWNS = {0x08: "slowed by hardware", 0x20: "hot", 0x40: "hot", 0x80: "power brake"}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class DeviceUsage:
    """One GPU. None where something is not known; `error` says why nothing is, `slowdown` why its
    clocks are low.
    """

    index: Count
    name: str = ""
    utilization_percent: Measure | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_watts: Measure | None = None
    power_limit_watts: Measure | None = None
    temperature_celsius: Measure | None = None
    slowdown: str = ""
    processes: list[Count] = field(default_factory=list)
    error: str = ""


class DeviceReader:
    """Reads the GPUs of this host each time it is called. `notes` says why GPUs cannot be read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            if NVIDIA_DRIVER.exists():
                self.notes.append(f"GPUs are not shown without pynvml; {how_to_install('top')}")
        except Exception as problem:  # most often there is no driver
            if NVIDIA_DRIVER.exists():
                self.notes.append(f"GPUs are not shown: pynvml: {problem}")

    def __call__(self) -> list[DeviceUsage]:
        if self._nvml:
            return read_nvidia(self._nvml)
        return []


def read_nvidia(nvml: Any) -> list[DeviceUsage]:
    """All GPUs that NVML (the module `pynvml`) knows."""
    return [
        _read_nvidia_device(nvml, index) for index in range(_or_none(nvml.nvmlDeviceGetCount) or 0)
    ]


def _read_nvidia_device(nvml: Any, index: int) -> DeviceUsage:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as problem:
        # Such as a GPU that has fallen off the bus.
        if problem.value != nvml.NVML_ERROR_NOT_SUPPORTED:
            return DeviceUsage(index, error=str(problem))
        memory = None  # a GPU that shares its memory with the host
    utilization = _or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    reasons = _or_none(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    name = _or_none(lambda: nvml.nvmlDeviceGetName(handle)) or ""
    return DeviceUsage(
        index,
        name.decode(errors="replace") if isinstance(name, bytes) else name,
        utilization,
        memory and memory.used,
        memory and memory.total,
        _or_none(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        _or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        _or_none(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        ", ".join(dict.fromkeys(words for bit, words in NVIDIA_SLOWDOWNS.items() if reasons & bit)),
        _or_none(lambda: [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)])
        or [],
    )


def _or_none(read: Callable[[], T]) -> T | None:
    """The result of `read`; None where the library raises, since GPUs and drivers lack different
    values.
    """
    with suppress(Exception):
        return read()
    return None
