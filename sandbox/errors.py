"""What fails where untrusted programs run."""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class SandboxError(PenstockError):
    """A sandbox did not start, exited or did not answer, and the program is not proven to be the cause."""
