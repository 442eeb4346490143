"""The progress of a job: one line that is rewritten in place on a terminal, ten log lines elsewhere."""

from __future__ import annotations

import sys
import time

import structlog

progress_log = structlog.get_logger("trainer.progress")

_LINES_PER_JOB = 10


class ProgressLine:
    """Shows steps out of a known number, with values given by the caller."""

    def __init__(self, job: str, num_steps: int) -> None:
        """Show nothing yet."""
        self._job = job
        self._num_steps = num_steps
        self._rewrites = sys.stderr.isatty()
        self._started = time.monotonic()

    def show(self, step: int, **figures: float | str) -> None:
        """Show that ``step`` steps are done, and the ``figures`` by name."""
        last = step == self._num_steps
        if self._rewrites:
            left_s = (time.monotonic() - self._started) / max(step, 1) * (self._num_steps - step)
            shown = figures if last else {**figures, "eta": f"{left_s:.0f} s"}
            text = " ".join(f"{name} {_short(value)}" for name, value in shown.items())
            sys.stderr.write(f"\r\x1b[K{self._job} {step}/{self._num_steps} {text}" + ("\n" if last else ""))
            sys.stderr.flush()
        elif last or step % max(1, self._num_steps // _LINES_PER_JOB) == 0:
            progress_log.info(self._job, step=step, of=self._num_steps, **{k: _rounded(v) for k, v in figures.items()})


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _rounded(value: float | str) -> float | str:
    """Return a number that stays one in a log line of JSON."""
    return value if isinstance(value, str) else float(_short(value))
