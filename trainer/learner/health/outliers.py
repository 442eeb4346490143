"""Which optimizer steps are left out because their gradient norm is far above the recent ones; pure.

The limit is a multiple of the median of the newest `WINDOW` norms. The norm of a step that is left out is among them: if the norms
have risen for good, the median follows, and steps are made again after half a window. The norms are part of every checkpoint, and
every rank has the same, so that a resumed run and a replay leave out the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

WINDOW = 64  # optimizer steps


@dataclass(slots=True)
class Outliers:
    """The rule, and the norms that it compares with."""

    above: float  # multiple of the median
    after: int  # optimizer steps before the first one that may be left out
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def limit(self) -> float | None:
        """The largest norm of a step that is made; None while too few are known."""
        return self.above * median(self.norms) if len(self.norms) >= min(self.after, WINDOW) else None

    def is_outlier(self, norm: float) -> bool:
        """Return True if the step of a gradient of this norm is to be left out, and remember the norm."""
        limit = self.limit
        self.norms.append(norm)
        return limit is not None and norm > limit

    def restore(self, norms: Iterable[float]) -> None:
        """Continue with the norms of a checkpoint."""
        self.norms = deque(norms, maxlen=WINDOW)
