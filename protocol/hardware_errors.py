"""Name the error of hardware, driver or memory behind an exception, or behind the end of a process's log; pure.

The texts are in `hardware_errors.toml`, compared as text: a log tells as much as an exception, without torch.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.protocol.errors import PenstockError

_QUOTED_CHARS = 300  # of a line
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_ASKED = rf"[Tt]ried to allocate {_SIZE}"
_CARD = rf"GPU \d+ has a total capacity of {_SIZE} of which {_SIZE} is free"
_TENSORS = rf"Of the allocated memory {_SIZE} is allocated by PyTorch, and {_SIZE} is reserved"
GPU_MEMORY, KILLED = "gpu_memory", "killed"


@functools.cache
def table() -> Any:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class HardwareFault:
    name: str  # in the table
    line: str = ""  # of the library
    rank: int | None = None
    tokens: int | None = None  # of the micro-batch

    @property
    def is_transient(self) -> bool:
        return bool(self._situation.get("transient"))

    @property
    def usable_bytes(self) -> int | None:
        """Of the GPU, what this process's tensors can use: what is free and theirs; else its capacity, or None."""
        card, tensors = self._sizes(_CARD), self._sizes(_TENSORS)
        return card[1] + sum(tensors) if card and tensors else card[0] if card else None

    @property
    def happened(self) -> str:
        asked, card = self._sizes(_ASKED), self._sizes(_CARD)
        others = sum(map(_bytes, re.findall(rf"Process \d+ has {_SIZE} memory in use", self.line)))
        parts = [f"{_size(asked[0])} requested"] if asked else [self.line[:_QUOTED_CHARS]]
        if asked and card:
            parts.append(f"{_size(card[1])} of {_size(card[0])} free")
        if others:
            parts.append(f"{_size(others)} in use by other processes, which `nvidia-smi` lists")
        if self.tokens is not None and self.name.endswith("memory"):
            parts.append(f"in a micro-batch of {self.tokens} tokens")
        device = re.search(r"\b(?:GPU|[Dd]evice) (\d+)\b", self.line)
        places = [f"GPU {device[1]}" if device else "", "" if self.rank is None else f"rank {self.rank}"]
        where, details = ", ".join(filter(None, places)), ", ".join(filter(None, parts))
        return f"{self._situation['what']}{f' on {where}' if where else ''}{f' ({details})' if details else ''}"

    def text(self, process: str = "trainer") -> str:
        """Return one line: what happened, and the fix; ``process`` is trainer, or the kind of an engine."""
        if fix := self._situation.get("fix"):
            return f"{self.happened}; {fix}"
        by_kind, usable = table()["memory_settings"], self.usable_bytes
        kind = next((kind for kind in by_kind if process.startswith(kind)), "trainer")
        settings = by_kind[kind]
        if kind == "trainer" and self.tokens is not None:
            settings = settings.replace("down", f"below {self.tokens}", 1)
        if kind == "trainer" and usable is not None:
            settings += f"; `penstock plan RUN.toml --gpu --rank-memory {usable >> 20}MiB` computes what fits"
        return f"{self.happened}; set {settings}"

    @property
    def _situation(self) -> Any:
        return next(situation for situation in table()["situation"] if situation["name"] == self.name)

    def _sizes(self, pattern: str) -> list[int]:
        match = re.search(pattern, self.line)
        return [] if match is None else [_bytes(size) for size in match.groups()]


def fault_of(err: BaseException, *, rank: int | None = None) -> HardwareFault | None:
    """Return what is wrong with the hardware behind an exception, or behind its cause; None for any other.

    Errors of Penstock say themselves what happened. ``rank`` is that of this process, where there are several.
    """
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    link: BaseException | None = err
    while link is not None and not isinstance(link, PenstockError):
        text = "\n".join([f"{type(link).__name__}: {link}", *getattr(link, "__notes__", ())])
        is_of_libraries = isinstance(link, OSError | RuntimeError | MemoryError | AssertionError)
        if is_of_libraries and (fault := fault_in(text)) is not None:
            return fault if fault.rank is not None else replace(fault, rank=rank)
        link = link.__cause__
    return None


def fault_in(text: str) -> HardwareFault | None:
    """Return what is wrong with the hardware by a log's end: the first cause, not what follows from it."""
    for situation in table()["situation"]:
        if (match := re.search("|".join(situation["texts"]), text)) is not None:
            start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
            line = " ".join(text[start : None if end < 0 else end].split())
            rank = re.search(r"(?:\[rank|\b[Rr]ank |local_rank: )(\d+)[\] ]", line)
            tokens = re.search(r"^micro-batch of (\d+) tokens$", text[start:], re.MULTILINE)
            line = "" if line == "MemoryError:" else line
            return HardwareFault(situation["name"], line, rank and int(rank[1]), tokens and int(tokens[1]))
    return None


def _bytes(size: str) -> int:
    number, unit = size.split()
    return int(float(number) * _UNITS[unit])


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
