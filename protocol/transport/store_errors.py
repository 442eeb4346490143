"""How often NATS and the object store have answered this process with an error, for Prometheus; thread-safe.

A request that is repeated counts each time. Of both stores only what a client is told: a NATS server whose disk has no space at
all switches JetStream off and answers nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Literal

Store = Literal["nats", "s3"]
Reason = Literal["full", "error"]

NO_ERRORS: Mapping[tuple[Store, Reason], int] = {("nats", "full"): 0, ("s3", "full"): 0, ("s3", "error"): 0}
_found: Counter[tuple[Store, Reason]] = Counter()
_lock = threading.Lock()


def count(store: Store, reason: Reason) -> None:
    """Count one answer: ``full`` for want of space, ``error`` for another failure of the server."""
    with _lock:
        _found[store, reason] += 1


def counts() -> Mapping[tuple[Store, Reason], int]:
    """Return the number of answers by store and reason since the process started, zeros included."""
    with _lock:
        return {**NO_ERRORS, **_found}
