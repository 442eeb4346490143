"""The errors of a rollout worker, and what each one leads to.

PenstockError
├── EngineError               the pack is requeued, for this worker or another one
│   ├── EngineUnreachable     no connection, or it broke in the middle of a request
│   ├── EngineTimeout         no answer within worker.request_deadline_s
│   ├── EngineRefused         an HTTP error; the text quotes the engine
│   ├── EngineAborted         the engine aborted the generation, and not for an update of this worker
│   ├── ReplyRefused          lengths, ids, log-probabilities or versions contradict each other
│   ├── TeacherFailed         a teacher gave no usable log-probabilities of a group; the text names group and URL
│   ├── WeightsUnverified      sampled with unknown weights: an update failed, or versions disagree
│   └── WeightsNotApplied     the engine did not confirm the version it was asked to load
├── TaskRefused               no attempt at the task can succeed with this model; dead-lettered at once
├── WeightsUnusable           a version's objects are missing, or differ from its manifest
├── MirrorFull                no space for the copy of a version; the previous version is served meanwhile
├── TeacherUnfit              the teacher has another vocabulary than the policy; the worker ends with this error
├── EngineDisagrees           it serves other weights than the other engines; the worker ends with this error
├── EngineMisconfigured       a server was started with flags that the contract does not allow; the worker ends
└── EngineRestartLimit         restarted too often; the worker ends with this error
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
    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineAborted(EngineError):
    """The engine aborted the generation."""


class ReplyRefused(EngineError):
    """The engine's reply contradicts itself or the request; no part of it is used."""


class TeacherFailed(EngineError):
    """A teacher gave no usable log-probabilities of a group in as many attempts as are allowed."""


class WeightsUnverified(EngineError):
    """The weights that sampled this are unknown: an update failed meanwhile, or the engine named another version."""


class WeightsNotApplied(EngineError):
    """The engine did not confirm that it serves the version it was asked to load."""


class TaskRefused(PenstockError):
    def __init__(self, reason: str, detail: str) -> None:
        """``reason`` is one word, ``detail`` a sentence."""
        super().__init__(detail)
        self.reason = reason


class WeightsUnusable(PenstockError):
    """A version cannot be loaded: its objects are missing, or differ from its manifest."""


class MirrorFull(PenstockError):
    """``worker.cache_dir`` has no space for the copy of a version; a later attempt may succeed."""


class TeacherUnfit(PenstockError):
    """The teacher has another vocabulary than the policy, or one that cannot be compared."""


class EngineDisagrees(PenstockError):
    """The engine serves other weights than the other engines of the run, under the same version."""


class EngineMisconfigured(PenstockError):
    """A server was started with flags that the contract does not allow."""


class EngineRestartLimit(PenstockError):
    """The engine was restarted too often within a short time."""
