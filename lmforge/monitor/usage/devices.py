"""The usage of this host's GPUs: utilisation, memory, power, temperature, processes.

NVIDIA's are read through NVML, AMD's through AMD SMI.

A value that a library or driver does not report is None, and a device that does not answer has an `error`; the other values are
still reported. The reader for AMD has been tested only with values from its documentation, not on such a GPU.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmforge.errors import how_to_install
from lmforge.run_records import Count, Measure

T = TypeVar("T")
# NVIDIA's reasons for low clocks that indicate a problem, unlike a power cap or an idle GPU.
NVIDIA_SLOWDOWNS = {0x08: "slowed by hardware", 0x20: "hot", 0x40: "hot", 0x80: "power brake"}
NVIDIA_DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia/gpus"), Path("/sys/module/amdgpu/drivers/pci:amdgpu")


@dataclass(frozen=True)
class DeviceUsage:
    """One GPU. None where something is not known; `error` says why nothing is, `slowdown` why its clocks are low."""

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
        self._readers: list[Callable[[], list[DeviceUsage]]] = []
        for name, driver, open_reader in (("pynvml", NVIDIA_DRIVER, _open_nvidia), ("amdsmi", AMD_DRIVER, _open_amd)):
            try:
                self._readers.append(open_reader())
            except ImportError:
                if driver.exists():
                    self.notes.append(f"GPUs are not shown without {name}; {how_to_install('top')}")
            except Exception as problem:  # each library has its own kinds; most often there is no driver
                if driver.exists():
                    self.notes.append(f"GPUs are not shown: {name}: {problem}")

    def __call__(self) -> list[DeviceUsage]:
        return [device for read in self._readers for device in read()]


def _open_nvidia() -> Callable[[], list[DeviceUsage]]:
    import pynvml

    pynvml.nvmlInit()
    return lambda: read_nvidia(pynvml)


def _open_amd() -> Callable[[], list[DeviceUsage]]:
    import amdsmi

    amdsmi.amdsmi_init()
    return lambda: read_amd(amdsmi)


def read_nvidia(nvml: Any) -> list[DeviceUsage]:
    """All GPUs that NVML (the module `pynvml`) knows."""
    return [_read_nvidia_device(nvml, index) for index in range(_or_none(nvml.nvmlDeviceGetCount) or 0)]


def _read_nvidia_device(nvml: Any, index: int) -> DeviceUsage:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as problem:
        if problem.value != nvml.NVML_ERROR_NOT_SUPPORTED:  # such as a GPU that has fallen off the bus
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
        _or_none(lambda: [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]) or [],
    )


def read_amd(amdsmi: Any) -> list[DeviceUsage]:
    """All GPUs that AMD SMI (the module `amdsmi`) knows. Memory is in MB there, power in W, its limit in µW."""
    handles = _or_none(amdsmi.amdsmi_get_processor_handles) or []
    return [_read_amd_device(amdsmi, index, handle) for index, handle in enumerate(handles)]


def _read_amd_device(amdsmi: Any, index: int, handle: Any) -> DeviceUsage:
    try:
        memory = amdsmi.amdsmi_get_gpu_vram_usage(handle)
    except Exception as problem:
        return DeviceUsage(index, error=str(problem))
    power = _or_none(lambda: amdsmi.amdsmi_get_power_info(handle)) or {}
    limit = _number(_or_none(lambda: amdsmi.amdsmi_get_power_cap_info(handle)["power_cap"]))
    watts = (_number(power.get(name)) for name in ("current_socket_power", "average_socket_power"))
    kinds, metrics = amdsmi.AmdSmiTemperatureType, amdsmi.AmdSmiTemperatureMetric
    return DeviceUsage(
        index,
        str(_or_none(lambda: amdsmi.amdsmi_get_gpu_asic_info(handle)["market_name"]) or ""),
        _number(_or_none(lambda: amdsmi.amdsmi_get_gpu_activity(handle)["gfx_activity"])),
        int(memory["vram_used"]) * 2**20,
        int(memory["vram_total"]) * 2**20,
        next((each for each in watts if each is not None), None),
        limit / 1e6 if limit is not None else None,
        _number(_or_none(lambda: amdsmi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metrics.CURRENT))),
        processes=_or_none(lambda: [each["pid"] for each in amdsmi.amdsmi_get_gpu_process_list(handle)]) or [],
    )


def _or_none(read: Callable[[], T]) -> T | None:
    """The result of `read`; None where the library raises, since GPUs and drivers lack different values."""
    with suppress(Exception):
        return read()
    return None


def _number(value: Any) -> float | None:
    """A number, and None for `N/A`."""
    return float(value) if isinstance(value, int | float) else None
