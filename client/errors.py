"""Errors of the Python client."""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class RunFailed(PenstockError):
    """A run or a training ended with an error; the text has the last lines of its log."""
