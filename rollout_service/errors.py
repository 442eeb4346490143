"""What can go wrong in a rollout worker, and by which branch it is caught.

PenstockError
├── EngineError               the pack is given back, and comes again to whoever is well
│   ├── EngineUnreachable     no connection, or it broke in the middle of a request
│   ├── EngineTimeout         no answer within worker.request_deadline_s
│   ├── EngineRefused         an HTTP error; the text holds the engine's words
│   ├── EngineAborted         the engine cut the generation short, and not for an update of ours
│   ├── ReplyRefused          lengths, ids, log-probabilities or versions do not fit together
│   ├── EngineDistrusted      sampled while nobody knew by which weights: an update failed, or versions disagree
│   └── WeightsNotApplied     the engine did not confirm the version it was told to load
├── TaskRefused               the task can never be done by this model; dead-lettered at once
├── WeightsUnusable           a version's objects are gone or not what its manifest promised
├── AdapterUnfit              an adapter folder is not what every engine computes alike, or not of this model
├── MirrorFull                no room for the copy of a version; the one before it is served on meanwhile
├── EngineDisagrees           it serves other weights than the other engines; the worker ends with this error
├── EngineMisconfigured       a server at a URL was started in a way the contract does not allow; the worker ends
└── EngineKeepsDying          restarted too often; the worker ends with this error
"""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class EngineError(PenstockError):
    """The engine failed a request; the task itself may be fine."""


class EngineUnreachable(EngineError):
    """No connection to the engine, or it broke in the middle of a request."""


class EngineTimeout(EngineError):
    """The engine gave no answer within the deadline."""


class EngineRefused(EngineError):
    """The engine answered with an HTTP error."""


class EngineAborted(EngineError):
    """The engine cut the generation short."""


class ReplyRefused(EngineError):
    """The engine's answer contradicts itself or the request; nothing of it is used."""


class EngineDistrusted(EngineError):
    """Nobody knows which weights sampled this: an update failed meanwhile, or the engine named another version."""


class WeightsNotApplied(EngineError):
    """The engine did not confirm that it serves the version it was told to load."""


class TaskRefused(PenstockError):
    """The task can never be done here; ``reason`` is the dead letter's."""

    def __init__(self, reason: str, detail: str) -> None:
        """Name the reason in one word and the detail in a sentence."""
        super().__init__(detail)
        self.reason = reason


class WeightsUnusable(PenstockError):
    """A version cannot be loaded: its objects are missing, or are not what its manifest promised."""


class AdapterUnfit(PenstockError):
    """An adapter's configuration or tensors do not fit the model, or say what not every engine computes."""


class MirrorFull(PenstockError):
    """``worker.cache_dir`` has no room for the copy of a version; another attempt may find some."""


class EngineDisagrees(PenstockError):
    """The engine serves other weights than the other engines of the run, under the same version."""


class EngineMisconfigured(PenstockError):
    """A server at a URL was started in a way the contract does not allow."""


class EngineKeepsDying(PenstockError):
    """The engine was restarted too often within a short time."""
