"""What the embedded engine refuses, and with which HTTP status.

EngineError
├── UnsupportedModel    config.json describes a model this engine cannot compute; the text names those it can
├── CheckpointRefused   a folder of weights or of an adapter is missing, truncated, incomplete, mis-shaped or not finite
├── RequestRefused      a request body asks for something impossible; answered with HTTP 400
├── EngineAtFault       a valid request could not be computed; answered with HTTP 500
└── EngineStopped       the engine thread has ended; answered with HTTP 503
"""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class EngineError(PenstockError):
    """Base of the embedded engine's errors."""


class UnsupportedModel(EngineError):
    """The folder's config.json describes a model this engine cannot compute exactly."""


class CheckpointRefused(EngineError):
    """The weights folder is not a complete, finite checkpoint of the served model; nothing was changed."""


class RequestRefused(EngineError):
    """The request cannot be served as asked."""


class EngineAtFault(EngineError):
    """The engine could not compute a valid request."""


class EngineStopped(EngineError):
    """The engine thread has ended; the process is about to exit and must be restarted."""
