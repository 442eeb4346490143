"""Errors of scoring and of the API. Class names of RewardErrors are the reasons of dead letters."""

from __future__ import annotations

from typing import ClassVar

from penstock.protocol.errors import PenstockError


class RewardError(PenstockError):
    """A group got no reward. ``permanent`` errors are dead-lettered at once; others are tried again."""

    permanent: ClassVar[bool] = False
    counts_against_endpoint: bool = False  # a failure for its circuit breaker

    @property
    def reason(self) -> str:
        return type(self).__name__


class UnknownReward(RewardError):
    """No reward has this name."""

    permanent = True


class BadGroundTruth(RewardError):
    """The row's ground truth is missing or not of the kind its reward compares with."""

    permanent = True


class LengthsUnknown(RewardError):
    """The reward counts the policy's tokens, which only generated groups have; this one was sent by hand."""

    permanent = True


class RewardNotGiven(RewardError):
    """The reward is the environment's, and the environment gave none; or the group has no episodes."""

    permanent = True


class NotCalled(RewardError):
    """No endpoint was called. The delivery does not count as an attempt; the group is retried after ``retry_in_s``."""

    has_limit: ClassVar[bool] = True  # the group is dead-lettered after `reward_service.patience_s`

    def __init__(self, text: str, *, retry_in_s: float = 0.0) -> None:
        """``retry_in_s``: seconds before which a retry cannot succeed."""
        super().__init__(text)
        self.retry_in_s = retry_in_s


class RewardUnavailable(NotCalled):
    """The endpoint was unregistered; it registers again when it is started again."""


class LeaseExpired(NotCalled):
    """The endpoint registered itself with a lease and has stopped renewing it."""


class EndpointDrained(NotCalled):
    """The endpoint was drained: it is registered, and not called."""


class BreakerOpen(NotCalled):
    """The endpoint failed so often that its circuit breaker is open."""


class EndpointBusy(NotCalled):
    """The endpoint works and its queue is full; the group waits at the broker."""

    has_limit = False


class EndpointFailed(RewardError):
    """No connection, time-out, or an error status."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        """``refused``: it answered with a status of 400 to 499, which does not count as a failure of the endpoint."""
        super().__init__(text)
        self.counts_against_endpoint = not refused


class EndpointNonsense(RewardError):
    """The endpoint's answer is not JSON, too large, of the wrong shape, not finite or out of range."""

    counts_against_endpoint = True


class ScoreRefused(RewardError):
    """The endpoint or the user's function reported that it could not score a completion of this group."""


class UserCodeFailed(RewardError):
    """The process that runs a user's reward function ended, did not answer in time, or could not load its code."""


class GraderFailed(RewardError):
    """A grader process exited or did not answer, and the completion is not proven to be the cause."""


class SandboxUnavailable(RewardError):
    """This replica runs no programs, because no sandbox works here; the text says why."""


class SandboxFailed(RewardError):
    """The sandbox did not start, exited or did not answer, and the program is not proven to be the cause."""


class RewardCrashed(RewardError):
    """Code of this service raised an unexpected exception: an internal error."""


class EndpointRefused(PenstockError):
    """A registration that breaks a rule; the text names it."""


class NameTaken(EndpointRefused):
    """Another endpoint is registered under the name, and the caller did not set ``replace``."""


class NotAllowed(EndpointRefused):
    """The caller's token is of a lower role, or the endpoint has another owner."""


class UserFileError(PenstockError):
    """A user's file cannot be loaded, or holds no reward function that can be called."""
