"""The embedded engine as a child process (``embedded``); the engine itself is `rollout_service.embedded_engine`."""

from penstock.rollout_service.engines.embedded.kind import EMBEDDED

__all__ = ["EMBEDDED"]
