"""Leases of endpoints that registered themselves: which are renewed, as seen by the reader's own clock. Pure.

A renewal rewrites the lease's key in the registry bucket, which gives it a new revision. A reader
calls a lease alive for `lease_s` seconds of its own monotonic clock after it saw the revision change, so
that no two machines need to agree on the time. What it sees for the first time has its whole time before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.reward_service.endpoints.endpoint import Endpoint


class Leases:
    """When each lease was last seen to be renewed."""

    def __init__(self) -> None:
        """Start with none seen."""
        self._seen: dict[str, tuple[int, float]] = {}  # key: revision, when it was first seen

    def saw(self, revisions: Mapping[str, int], now: float) -> None:
        """Take one look at all leases: revisions by key."""
        self._seen = {
            key: self._seen[key] if self._seen.get(key, (None,))[0] == revision else (revision, now)
            for key, revision in revisions.items()
        }

    def renewed(self, endpoint: Endpoint, revision: int, now: float) -> None:
        """This process itself renewed a lease."""
        self._seen[key(endpoint)] = (revision, now)

    def over_for_s(self, endpoint: Endpoint, now: float) -> float:
        """Return for how long the endpoint's lease is over; 0.0 while it is alive, or when it has none."""
        if endpoint.lease_s is None:
            return 0.0
        seen = self._seen.get(key(endpoint))
        return max(0.0, now - seen[1] - endpoint.lease_s) if seen is not None else now


PREFIX = "lease."


def key(endpoint: Endpoint) -> str:
    """Return the key of an endpoint's lease in the registry bucket; another version or place has another one."""
    return f"{PREFIX}{endpoint.name}.{endpoint.place}"
