"""Leases of endpoints: which are renewed, by the reader's own clock. Pure.

A renewal rewrites the lease's key in the registry bucket, which gives it a new revision. A reader
counts a lease as valid for `lease_s` seconds of its own monotonic clock after it saw the revision change, so
that no two machines need to agree on the time. A lease that it sees for the first time is valid for the full `lease_s`.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.reward_service.endpoints.endpoint import Endpoint


class Leases:
    """When each lease was last seen to be renewed."""

    def __init__(self) -> None:
        """Start with no lease seen."""
        self._seen: dict[str, tuple[int, float]] = {}  # key: revision, when it was first seen

    def saw(self, revisions: Mapping[str, int], now: float) -> None:
        """Record the current revisions of all leases, by key."""
        self._seen = {
            key: self._seen[key] if self._seen.get(key, (None,))[0] == revision else (revision, now)
            for key, revision in revisions.items()
        }

    def renewed(self, endpoint: Endpoint, revision: int, now: float) -> None:
        """Record that this process renewed a lease."""
        self._seen[key(endpoint)] = (revision, now)

    def expired_for_s(self, endpoint: Endpoint, now: float) -> float:
        """Return the seconds since the endpoint's lease expired; 0.0 while it is valid, or when it has none."""
        if endpoint.lease_s is None:
            return 0.0
        seen = self._seen.get(key(endpoint))
        return max(0.0, now - seen[1] - endpoint.lease_s) if seen is not None else now


PREFIX = "lease."


def key(endpoint: Endpoint) -> str:
    """Return the key of an endpoint's lease in the registry bucket; another version or URL has another one."""
    return f"{PREFIX}{endpoint.name}.{endpoint.address_id}"
