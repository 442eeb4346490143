"""What the GPUs of a service do: the adapter of NVML (package `nvidia-ml-py`, extra `gpu`), and its metrics.

A service samples the GPUs that it may use (``CUDA_VISIBLE_DEVICES``) on a separate thread, since a driver may hang; heartbeat,
page and Prometheus get the newest sample. Without GPU, driver or package there are no figures, and no error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import structlog

from penstock.protocol.metrics.table import Samples

log = structlog.get_logger("gpu")

PERIOD_S = 5.0
_OLD_S = 3 * PERIOD_S  # a sample that is older is no figure of now
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {"min": min, "mean": lambda values: sum(values) / len(values), "max": max}
)
# What is read of each GPU: figure -> its name for Prometheus, and how NVML gives it.
_READ: Mapping[str, tuple[str, Callable[[Any, Any], float]]] = MappingProxyType(
    {
        "utilisation": ("penstock_gpu_utilisation_ratio", lambda nvml, one: nvml.nvmlDeviceGetUtilizationRates(one).gpu / 100),
        "memory": ("penstock_gpu_memory_used_ratio", lambda nvml, one: _used(nvml.nvmlDeviceGetMemoryInfo(one))),
        "temperature_c": ("penstock_gpu_temperature_celsius", lambda nvml, one: float(nvml.nvmlDeviceGetTemperature(one, nvml.NVML_TEMPERATURE_GPU))),
        "power_w": ("penstock_gpu_power_watts", lambda nvml, one: nvml.nvmlDeviceGetPowerUsage(one) / 1000),
    }
)  # fmt: skip

NAMES = ("gpu_count", *(f"gpu_{name}_{statistic}" for name in _READ for statistic in _STATISTICS))  # of all figures


class GpuSampler:
    def __init__(
        self, nvml: Any | None = None, *, visible: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml if nvml is not None else _package()
        self._visible = os.environ.get(_VISIBLE) if visible is None else visible
        self._clock = clock
        self._newest: tuple[float, dict[str, float]] = (0.0, {})
        self._stop = threading.Event()

    def __enter__(self) -> GpuSampler:
        if self._nvml is not None:
            threading.Thread(target=self._work, args=(self._nvml,), name="gpu", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # not joined: a driver that hangs must not keep the service

    def figures(self) -> dict[str, float]:
        """Return ``gpu_count``, and least, mean and greatest over the GPUs of each quantity; {} without a sample of now.

        ``gpu_utilisation_*`` and ``gpu_memory_*`` are 0 to 1, ``gpu_temperature_c_*`` degrees Celsius, ``gpu_power_w_*`` watts.
        """
        at, figures = self._newest
        return dict(figures) if figures and self._clock() - at <= _OLD_S else {}

    def _work(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            devices = _devices(nvml, self._visible)
        except nvml.NVMLError as err:  # no driver, which is no error on a machine without GPUs
            log.debug("no GPU figures", error=str(err))
            return
        while devices and not self._stop.is_set():
            self._newest = (self._clock(), read(nvml, devices))
            self._stop.wait(PERIOD_S)
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def read(nvml: Any, devices: Sequence[Any]) -> dict[str, float]:
    figures = {"gpu_count": float(len(devices))}
    for name, (_, value_of) in _READ.items():
        values: list[float] = []
        for device in devices:
            with contextlib.suppress(nvml.NVMLError):
                values.append(value_of(nvml, device))
        if values:
            figures.update({f"gpu_{name}_{statistic}": of(values) for statistic, of in _STATISTICS.items()})
    return figures


def add_samples(figures: Mapping[str, float], samples: Samples, **who: str) -> None:
    if "gpu_count" in figures:
        samples.add("penstock_gpus", figures["gpu_count"], **who)
    for name, (metric, _) in _READ.items():
        for statistic in _STATISTICS:
            if (value := figures.get(f"gpu_{name}_{statistic}")) is not None:
                samples.add(metric, value, statistic=statistic, **who)


def device_ids(nvml: Any | None = None, visible: str | None = None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA shows to this process, in its order; none without driver or package."""
    nvml = nvml if nvml is not None else _package()
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
        devices = _devices(nvml, os.environ.get(_VISIBLE) if visible is None else visible)
        return tuple(str(nvml.nvmlDeviceGetUUID(device)) for device in devices)
    except nvml.NVMLError:
        return ()


def _package() -> Any | None:
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None


def _devices(nvml: Any, visible: str | None) -> list[Any]:
    """Return the GPUs that CUDA shows to this process: numbers or UUIDs up to the first that does not exist."""
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    devices: list[Any] = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        try:
            if name.isdecimal():
                devices.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
            else:
                devices.append(nvml.nvmlDeviceGetHandleByUUID(name))
        except nvml.NVMLError:
            break
    return devices


def _used(memory: Any) -> float:
    return memory.used / memory.total if memory.total else 0.0
