"""Usage of GPUs, read from stand-ins for their libraries, with the documented values, gaps and errors."""

from types import SimpleNamespace
from typing import Any

import pytest

from lmforge.monitor.usage.devices import DeviceUsage, read_amd, read_nvidia


class NVMLError(Exception):
    """As in pynvml: an exception with the number of the error."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, GPU_IS_LOST = 3, 15


class Nvml:
    """The functions of pynvml on a host of three GPUs: a healthy one, one that has fallen off the bus, one that says little."""

    NVMLError, NVML_ERROR_NOT_SUPPORTED, NVML_TEMPERATURE_GPU = NVMLError, NOT_SUPPORTED, 0

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle == 1:
            raise NVMLError(GPU_IS_LOST, "GPU is lost")
        return SimpleNamespace(used=60 * 2**30, total=80 * 2**30) if handle == 0 else self._refuse()

    def _refuse(self) -> Any:
        raise NVMLError(NOT_SUPPORTED, "Not Supported")

    def __getattr__(self, name: str) -> Any:
        values = {
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetPowerUsage": 684_250,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04 | 0x20 | 0x40,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4711, usedGpuMemory=None)],
        }
        return lambda handle, *_: values[name] if handle == 0 else self._refuse()


def test_a_lost_gpu_and_one_that_says_little_do_not_hide_the_healthy_one() -> None:
    healthy, lost, silent = read_nvidia(Nvml())
    assert healthy == DeviceUsage(0, "NVIDIA H100 80GB HBM3", 97, 60 * 2**30, 80 * 2**30, 684.25, 700.0, 71.0, "hot", [4711])
    assert lost == DeviceUsage(1, error="GPU is lost")
    assert silent == DeviceUsage(2)


class AmdSmi:
    """The functions of amdsmi with the values that its documentation shows; N/A where a GPU has no such sensor."""

    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, int]:
        if handle == 1:
            raise OSError("AMDSMI_STATUS_NO_DATA")
        return {"vram_used": 283, "vram_total": 196_592}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": "N/A", "average_socket_power": 139, "gfx_voltage": 79, "power_limit": 750}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, int]:
        return {"power_cap": 750_000_000, "default_power_cap": 750_000_000}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X", "vendor_id": 0x1002}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        return {"gfx_activity": 64, "umc_activity": 3, "mm_activity": "N/A"}

    def amdsmi_get_temp_metric(self, handle: int, kind: str, metric: str) -> int:
        return {("hotspot", "current"): 44}[kind, metric]

    def amdsmi_get_gpu_process_list(self, handle: int) -> list[dict[str, Any]]:
        return [{"name": "python", "pid": 4711, "mem": 0}]


def test_an_amd_gpu_is_read_in_the_units_of_its_documentation() -> None:
    good, bad = read_amd(AmdSmi())
    assert good.name == "AMD Instinct MI300X"
    assert (good.utilization_percent, good.temperature_celsius, good.processes) == (64, 44, [4711])
    assert (good.power_watts, good.power_limit_watts) == (139, pytest.approx(750))
    assert (good.memory_used_bytes, good.memory_total_bytes) == (283 * 2**20, 196_592 * 2**20)
    assert bad.error == "AMDSMI_STATUS_NO_DATA"
