"""What the benchmarks share: the machine in words, a command that prints JSON, CPU time, the peak memory of a pass."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COMMAND_S = 1800.0


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2].strip()
    return platform.machine()


def machine() -> str:
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}"


def last_json(command: Sequence[str | Path], **environ: str) -> dict[str, Any]:
    """Run a command and return the JSON object of its last line; SystemExit with the end of its stderr if it fails."""
    environment = {**os.environ, **environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def children_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Peak:
    """Samples this process's resident memory every 2 ms, and keeps the largest bytes above the start, by phase."""

    def __init__(self, phase: str = "") -> None:
        self.phase = phase
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._page = resource.getpagesize()
        self.base = self._resident()
        self._thread = threading.Thread(target=self._watch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            phase, held = self.phase, self._resident() - self.base
            if phase == self.phase:  # else the memory may be that of the phase before
                self.peaks[phase] = max(self.peaks.get(phase, 0), held)

    def _resident(self) -> int:
        with open("/proc/self/statm") as held:  # noqa: PTH123
            return int(held.read().split()[1]) * self._page
