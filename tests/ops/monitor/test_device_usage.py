"""Usage of GPUs, read from a stand-in for NVML, with the documented values, gaps and errors."""

from types import SimpleNamespace
from typing import Any

from lmforge.ops.monitor.usage.devices import DeviceUsage, read_nvidia


class NVMLError(Exception):
    """As in pynvml: an exception with the number of the error."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, GPU_IS_LOST = 3, 15


class Nvml:
    """The functions of pynvml on a host of three GPUs: a healthy one, one that has fallen off the
    bus, one that says little.
    """

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
    assert healthy == DeviceUsage(
        0, "NVIDIA H100 80GB HBM3", 97, 60 * 2**30, 80 * 2**30, 684.25, 700.0, 71.0, "hot", [4711]
    )
    assert lost == DeviceUsage(1, error="GPU is lost")
    assert silent == DeviceUsage(2)
