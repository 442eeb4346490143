"""A stand-in for NVML: the machine of the tests has no GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pynvml

GIB = 2**30


@dataclass(frozen=True)
class Card:
    uuid: str
    used: float = 20  # GiB
    total: float = 80  # GiB
    name: str = "NVIDIA H100 80GB HBM3"
    parts: tuple[Card, ...] = ()  # that MIG made of it
    utilisation: int = 30  # percent


TWO = (Card("GPU-aa", used=40, utilisation=90), Card("GPU-bb"))


class Nvml:
    """Cards with the functions, units and errors of `pynvml`, whose handles they are; all but the first tell no power."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_ERROR_DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

    def __init__(self, cards: Sequence[Card] = TWO, *, init_error: int | None = None) -> None:
        self.cards = list(cards)
        self.init_error = init_error
        self.hangs = threading.Event()
        self.is_hanging = threading.Event()
        self.is_shut_down = False
        self.num_reads = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise self.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> Card:  # noqa: N802
        return self.cards[number]

    def nvmlDeviceGetUUID(self, one: Card) -> str:  # noqa: N802
        return one.uuid

    def nvmlDeviceGetName(self, one: Card) -> str:  # noqa: N802
        return one.name

    def nvmlDeviceGetMigMode(self, one: Card) -> list[int]:  # noqa: N802
        if one.total < 40:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(one.parts))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, one: Card) -> int:  # noqa: N802
        assert one.parts
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, one: Card, number: int) -> Card:  # noqa: N802
        if number >= len(one.parts):
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return one.parts[number]

    def nvmlDeviceGetUtilizationRates(self, one: Card) -> SimpleNamespace:  # noqa: N802
        if self.hangs.is_set():
            self.is_hanging.set()
            threading.Event().wait()
        self.num_reads += 1
        return SimpleNamespace(gpu=one.utilisation, memory=5)

    def nvmlDeviceGetMemoryInfo(self, one: Card) -> SimpleNamespace:  # noqa: N802
        if self.hangs.is_set():
            threading.Event().wait()
        return SimpleNamespace(total=int(one.total * GIB), used=int(one.used * GIB), free=0)

    def nvmlDeviceGetTemperature(self, one: Card, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 60 if one is self.cards[0] else 50

    def nvmlDeviceGetPowerUsage(self, one: Card) -> int:  # noqa: N802
        if one is not self.cards[0]:
            raise self.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 312_500
