"""Which GPUs a process sees, and what they do: the adapter of NVML (package `nvidia-ml-py`), and its metrics.

A service samples the GPUs that it may use (``CUDA_VISIBLE_DEVICES``) on a separate thread, since a driver may hang;
heartbeat, page and Prometheus get the newest sample. Without GPU, driver or package there are no figures, and no error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import structlog

from penstock.protocol.errors import ConfigError, GpusUnknown
from penstock.protocol.metrics.table import Samples

log = structlog.get_logger("gpu")

PERIOD_S = 5.0
_OLD_S = 3 * PERIOD_S  # a sample that is older is no figure of now
VISIBLE, ORDER, PCI_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"  # the last is NVML's order
_DRIVER_S = 30.0  # for the driver to list its GPUs; without its persistence daemon it first loads, which takes seconds
_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {"min": min, "mean": lambda values: sum(values) / len(values), "max": max}
)
# What is read of each GPU: figure -> its name for Prometheus, and how NVML gives it.
_READ: Mapping[str, tuple[str, Callable[[Any, Any], float]]] = MappingProxyType(
    {
        "utilisation": (
            "penstock_gpu_utilisation_ratio", lambda lib, one: lib.nvmlDeviceGetUtilizationRates(one).gpu / 100
        ),
        "memory": ("penstock_gpu_memory_used_ratio", lambda lib, one: _used(lib.nvmlDeviceGetMemoryInfo(one))),
        "temperature_c": (
            "penstock_gpu_temperature_celsius",
            lambda lib, one: float(lib.nvmlDeviceGetTemperature(one, lib.NVML_TEMPERATURE_GPU)),
        ),
        "power_w": ("penstock_gpu_power_watts", lambda lib, one: lib.nvmlDeviceGetPowerUsage(one) / 1000),
    }
)  # fmt: skip

NAMES = ("gpu_count", *(f"gpu_{name}_{statistic}" for name in _READ for statistic in _STATISTICS))  # of all figures


class GpuSampler:
    def __init__(
        self, nvml: Any | None = None, *, visible: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml if nvml is not None else _package()
        self._visible = os.environ.get(VISIBLE) if visible is None else visible
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
        """Return ``gpu_count``, and least, mean and greatest of each quantity over the GPUs; {} without a new sample.

        ``gpu_utilisation_*`` and ``gpu_memory_*`` are 0 to 1, ``gpu_temperature_c_*`` °C, ``gpu_power_w_*`` watts.
        """
        at, figures = self._newest
        return dict(figures) if figures and self._clock() - at <= _OLD_S else {}

    def _work(self, nvml: Any) -> None:
        try:
            nvml.nvmlInit()
            devices = [handle for _, handle, _ in _found(nvml, self._visible)]
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


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that CUDA shows to this process, or a part of one that MIG made; sizes in bytes."""

    number: int  # its place among those that this process sees, as CUDA counts
    id: str  # for CUDA_VISIBLE_DEVICES: its number here, all that SGLang reads; a UUID where MIG divides a GPU
    name: str
    total: int
    used: int  # by all processes, and by the driver
    is_mig: bool = False
    uuid: str = ""  # by its driver
    is_given: bool = False  # by another command of Penstock on this machine, to its processes

    @property
    def free(self) -> int:
        return self.total - self.used


def visible_gpus(environ: Mapping[str, str], nvml: Any | None = None) -> list[Gpu]:
    """Return the GPUs that CUDA shows a process with these variables; [] without a driver. Waits at most 30 s.

    Without ``CUDA_VISIBLE_DEVICES`` these are all of the machine, and all parts of those that MIG divides. Numbers
    count in the order of the PCI bus: a process that gets some of them needs ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

    Raises:
        GpusUnknown: The driver does not answer, or refuses.
        ConfigError: A GPU is named twice, the first name is of none here, or the order that is set does not say which
            GPU a number means.
    """
    visible = environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1", "none", "NoDevFiles"):  # the last is Slurm's
        return []
    nvml = nvml if nvml is not None else _package(needed=True)
    if nvml is None:
        return []
    gpus = _within_deadline(lambda: _listed(nvml, visible))
    by_number = visible is None or any(name.strip().isdecimal() for name in visible.split(","))
    if by_number and len({gpu.name for gpu in gpus}) > 1 and environ.get(ORDER, PCI_ORDER) != PCI_ORDER:
        raise ConfigError(
            f"{ORDER}={environ[ORDER]} counts GPUs of several kinds in another order than the driver; set it to "
            f"{PCI_ORDER}, or name GPUs in {VISIBLE} by the UUIDs that nvidia-smi -L prints"
        )
    return gpus


def _listed(nvml: Any, visible: str | None) -> list[Gpu]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as err:
        if err.value in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND):
            return []
        raise GpusUnknown(
            f"the NVIDIA driver refuses to list the GPUs ({err}); run nvidia-smi, and repair the driver"
        ) from None
    try:
        gpus, found = [], list(_found(nvml, visible))
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for _, handle, _ in found]
        if visible is not None and len(set(uuids)) < len(found):
            raise ConfigError(f"{VISIBLE}={visible} names a GPU twice, and CUDA shows none then; name each once")
        if not found and nvml.nvmlDeviceGetCount():
            raise ConfigError(
                f"{VISIBLE}={visible}: its first name is that of no GPU here, and CUDA shows none then; nvidia-smi -L "
                "prints their names, and -1 means the CPU"
            )
        for number, ((name, handle, is_mig), uuid) in enumerate(zip(found, uuids, strict=True)):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            kind = str(nvml.nvmlDeviceGetName(handle))
            gpus.append(Gpu(number, name, kind, memory.total, memory.used, is_mig, uuid))
    except nvml.NVMLError as err:
        raise GpusUnknown(
            f"the NVIDIA driver does not describe the GPUs of {VISIBLE}={visible} ({err}); run nvidia-smi, "
            "and leave out a broken one"
        ) from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return gpus


def _within_deadline(call: Callable[[], list[Gpu]]) -> list[Gpu]:
    """Return what a call returns on a thread of its own, which is left behind if the driver hangs."""
    answer: list[list[Gpu] | BaseException] = []

    def work() -> None:
        try:
            answer.append(call())
        except BaseException as err:  # noqa: BLE001 - it is raised by the thread that waits
            answer.append(err)

    thread = threading.Thread(target=work, name="gpus", daemon=True)
    thread.start()
    thread.join(_DRIVER_S)
    if not answer:
        raise GpusUnknown(
            f"the NVIDIA driver did not list its GPUs within {_DRIVER_S:.0f} s; run nvidia-smi, and reset or restart it"
        )
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return answer[0]


def _package(*, needed: bool = False) -> Any | None:
    """Return the package, imported in 50 ms; None without a driver. ``needed``: raise GpusUnknown if it is missing."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError:
        if needed:
            raise GpusUnknown(
                "this machine has an NVIDIA driver, and no package that asks it: pip install nvidia-ml-py"
            ) from None
        return None


def _found(nvml: Any, visible: str | None) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, handle and whether MIG made it, of the GPUs that CUDA shows: up to the first name of no GPU."""
    cards = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    parts = [list(_mig_parts(nvml, card)) for card in cards]
    if visible is None:
        for number, card in enumerate(cards):
            yield from parts[number] or [(str(number), card, False)]
        return
    by_uuid = [(nvml.nvmlDeviceGetUUID(card), card, False) for card in cards] + [
        part for of_card in parts for part in of_card
    ]
    for name in (part.strip() for part in visible.split(",")):
        if name.isdecimal() and int(name) < len(cards):  # of a card that is divided CUDA shows the first part
            number = int(name)
            yield parts[number][0] if parts[number] else (str(number), cards[number], False)
            continue
        matching = [one for one in by_uuid if name.startswith(("GPU-", "MIG-")) and one[0].startswith(name)]
        if len(matching) != 1:  # CUDA takes the beginning of a UUID if one GPU alone has it
            return
        yield matching[0] if any(parts) else (str(cards.index(matching[0][1])), *matching[0][1:])


def _mig_parts(nvml: Any, card: Any) -> Iterator[tuple[str, Any, bool]]:
    with contextlib.suppress(nvml.NVMLError):  # a card that cannot be divided
        if not nvml.nvmlDeviceGetMigMode(card)[0]:
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            with contextlib.suppress(nvml.NVMLError):  # numbers without a part
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
                yield nvml.nvmlDeviceGetUUID(part), part, True


def _used(memory: Any) -> float:
    return memory.used / memory.total if memory.total else 0.0
