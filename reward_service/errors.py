"""Why a group could not be scored, drawn as one tree.

RewardError                  a group got no reward; the class name is the reason of its dead letter
├── UnknownReward            nobody offers a reward of this name             never gets better
├── BadGroundTruth           the row's ground truth does not fit its reward  never gets better
├── LengthsUnknown           the reward counts tokens, and the group is text sent by hand  never gets better
├── NotAsked                 nobody was asked: no attempt at scoring, but there is a limit to patience
│   ├── RewardUnavailable    the endpoint was unregistered; it may come back
│   ├── LeaseExpired         the endpoint stopped renewing its lease
│   ├── EndpointDrained      somebody took the endpoint out of service for a while
│   ├── BreakerOpen          the endpoint fails too often to be called now
│   └── EndpointBusy         all its places are taken; it works, so there is no limit to this wait
├── EndpointFailed           no connection, time-out, or an error status
├── EndpointNonsense         an answer that is not what the contract says
├── ScoreRefused             the endpoint itself said that it could not score this completion
├── UserCodeFailed           the process of a user's reward ended or did not answer in time
├── GraderFailed             the math grader did not answer and the completion is not to blame
├── SandboxUnavailable       no sandbox works on this machine, so that no program is run
├── SandboxFailed            the sandbox itself broke, the program is not to blame
└── RewardCrashed            a built-in reward raised: a bug of ours
EndpointRefused              a registration that breaks the rules (name taken, target not allowed)
├── NameTaken                another endpoint has the name
└── NotAllowed               the caller's token does not allow it
UserFileError                the file given to ``serve`` holds no reward function we can call
"""

from __future__ import annotations

from typing import ClassVar

from penstock.protocol.errors import PenstockError


class RewardError(PenstockError):
    """A group got no reward. ``permanent`` errors are not tried again."""

    permanent: ClassVar[bool] = False
    blames_endpoint: bool = False  # counts against it in its circuit breaker

    @property
    def reason(self) -> str:
        """The word under which it is counted and dead-lettered."""
        return type(self).__name__


class UnknownReward(RewardError):
    """Nobody offers a reward of this name; the text lists the nearest ones."""

    permanent = True


class BadGroundTruth(RewardError):
    """The row's ground truth is missing or not of the kind its reward compares with."""

    permanent = True


class LengthsUnknown(RewardError):
    """The reward counts the policy's tokens, which only generated groups have; this one was sent by hand."""

    permanent = True


class NotAsked(RewardError):
    """Nobody was asked for these scores. The delivery is no attempt; the group comes again after ``retry_in_s``."""

    has_limit: ClassVar[bool] = True  # after `reward_service.patience_s` of this the group is dead-lettered

    def __init__(self, text: str, *, retry_in_s: float = 0.0) -> None:
        """``retry_in_s``: it makes no sense to come back earlier."""
        super().__init__(text)
        self.retry_in_s = retry_in_s


class RewardUnavailable(NotAsked):
    """The endpoint was unregistered; whoever starts it again registers it again."""


class LeaseExpired(NotAsked):
    """The endpoint registered itself with a lease and has stopped renewing it."""


class EndpointDrained(NotAsked):
    """Somebody took the endpoint out of service; it is registered, and asked nothing."""


class BreakerOpen(NotAsked):
    """The endpoint failed so often that it is left alone for a while."""


class EndpointBusy(NotAsked):
    """The endpoint works and has more to do than it may hold; the group waits at the broker instead of here."""

    has_limit = False


class EndpointFailed(RewardError):
    """The endpoint could not be reached, did not answer in time or answered with an error status."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        """``refused``: it answered with a status of 400 to 499, which says nothing about other calls."""
        super().__init__(text)
        self.blames_endpoint = not refused


class EndpointNonsense(RewardError):
    """The endpoint's answer is not JSON, too large, of the wrong shape, not finite or out of range."""

    blames_endpoint = True


class ScoreRefused(RewardError):
    """The endpoint answered properly, and said that it could not score a completion of this group."""


class UserCodeFailed(RewardError):
    """The process that runs a user's reward function ended, did not answer in time, or could not load its code."""


class GraderFailed(RewardError):
    """The math grader died or did not answer, and the completion is not proven to be the cause."""


class SandboxUnavailable(RewardError):
    """This replica runs no programs, because no sandbox works here; the text says why."""


class SandboxFailed(RewardError):
    """The sandbox did not start, died or did not answer, and the program is not proven to be the cause."""


class RewardCrashed(RewardError):
    """Code of this service raised an exception it should not have raised."""


class EndpointRefused(PenstockError):
    """A registration that breaks a rule; the text says which."""


class NameTaken(EndpointRefused):
    """Another endpoint is registered under the name, and the caller did not say ``replace``."""


class NotAllowed(EndpointRefused):
    """The caller's token is of a lower role, or the endpoint is somebody else's."""


class UserFileError(PenstockError):
    """The file given to ``serve`` cannot be loaded or holds no reward function."""
