"""A reward endpoint that is registered at a run's reward service as long as this process runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.protocol.transport.loop_thread import LoopThread
from penstock.reward_service.hosting import registration
from penstock.reward_service.hosting.registration import Offer, ServiceAddress

_REGISTER_S = 90.0
_LEASE_S = 15.0  # a killed process is out of service after this time


class RegisteredReward:
    """An endpoint under a name; a thread renews its lease."""

    def __init__(self, name: str, url: str, version: str, terms: Mapping[str, Any] | None = None) -> None:
        """``version`` is stored with every group that it scored; ``terms`` are further fields of the registration."""
        self.name = name
        self._offer = Offer(name, url, version, lease_s=_LEASE_S, more=terms or {})
        self._thread: LoopThread | None = None

    @classmethod
    def of_url(cls, url: str) -> RegisteredReward:
        """Return the endpoint at a URL, with a name made of host and path."""
        parts = urlsplit(url)
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{parts.netloc.rpartition('@')[2]}{parts.path}").strip("-")[:100]
        return cls(name, url, "unknown")

    def register(self, service: str) -> None:
        """Register at a reward service and renew the lease from now on; raises NotRegistered."""
        self.close()
        self._thread = LoopThread("reward-lease")
        address = ServiceAddress(service)
        self._thread.start(registration.register(address, self._offer)).result(_REGISTER_S)
        self._thread.start(registration.keep(address, self._offer))

    def close(self) -> None:
        """Stop renewing: the reward is out of service when its lease has expired. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
