"""Number of examples per property: a few fixed ones in the suite, new ones on each `make fuzz`.

A failure of the suite is thus caused by a change and not by the random draw, and no example has a deadline.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("PENSTOCK_TEST_EXAMPLES", "1"))
_UNLESS_SAID = 30  # examples of a property that names no number
_BY_THE_CLOCK = [HealthCheck.too_slow]


def take_effect() -> None:
    settings.register_profile(
        "suite",
        max_examples=_UNLESS_SAID * FACTOR,
        deadline=None,
        derandomize=FACTOR == 1,
        suppress_health_check=_BY_THE_CLOCK,
    )
    settings.load_profile("suite")


def examples(number: int, *, without: tuple[HealthCheck, ...] = (), **more: Any) -> settings:
    """The settings of a property that is tried on ``number`` examples in the suite, and on FACTOR times as many in all."""
    return settings(max_examples=number * FACTOR, suppress_health_check=[*_BY_THE_CLOCK, *without], **more)
