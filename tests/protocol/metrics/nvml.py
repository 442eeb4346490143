"""A stand-in for NVML: the machine of the tests has no GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pynvml


class Nvml:
    """Two GPUs with the functions, units and errors of `pynvml`; the second tells no power."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    UUIDS = ("GPU-aa", "GPU-bb")

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.hangs = threading.Event()
        self.is_hanging = threading.Event()
        self.is_shut_down = False
        self.num_reads = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.has_driver:
            raise self.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.UUIDS)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        if number >= len(self.UUIDS):
            raise self.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in self.UUIDS:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.UUIDS.index(uuid)

    def nvmlDeviceGetUtilizationRates(self, one: int) -> SimpleNamespace:  # noqa: N802
        if self.hangs.is_set():
            self.is_hanging.set()
            threading.Event().wait()
        self.num_reads += 1
        return SimpleNamespace(gpu=(90, 30)[one], memory=5)

    def nvmlDeviceGetMemoryInfo(self, one: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80 * 2**30, used=(40, 20)[one] * 2**30, free=0)

    def nvmlDeviceGetTemperature(self, one: int, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return (60, 50)[one]

    def nvmlDeviceGetPowerUsage(self, one: int) -> int:  # noqa: N802
        if one == 1:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 312_500
