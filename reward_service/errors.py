"""Why a group could not be scored, drawn as one tree.

RewardError                  a group got no reward; the class name is the reason of its dead letter
├── UnknownReward            nobody offers a reward of this name             never gets better
├── BadGroundTruth           the row's ground truth does not fit its reward  never gets better
├── RewardUnavailable        the endpoint was unregistered; it may come back
├── EndpointFailed           no connection, time-out, or an error status
├── EndpointNonsense         an answer that is not what the contract says
├── ScoreRefused             the endpoint itself said that it could not score this completion
├── GraderFailed             the math grader did not answer and the completion is not to blame
└── RewardCrashed            a built-in reward raised: a bug of ours
EndpointRefused              a registration that breaks the rules (name taken, target not allowed)
UserFileError                the file given to ``serve`` holds no reward function we can call
"""

from __future__ import annotations

from typing import ClassVar

from protocol.errors import PenstockError


class RewardError(PenstockError):
    """A group got no reward. ``permanent`` errors are not tried again."""

    permanent: ClassVar[bool] = False

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


class RewardUnavailable(RewardError):
    """The endpoint was unregistered; whoever starts it again registers it again."""


class EndpointFailed(RewardError):
    """The endpoint could not be reached, did not answer in time or answered with an error status."""


class EndpointNonsense(RewardError):
    """The endpoint's answer is not JSON, too large, of the wrong shape, not finite or out of range."""


class ScoreRefused(RewardError):
    """The endpoint answered properly, and said that it could not score a completion of this group."""


class GraderFailed(RewardError):
    """The math grader died or did not answer, and the completion is not proven to be the cause."""


class RewardCrashed(RewardError):
    """Code of this service raised an exception it should not have raised."""


class EndpointRefused(PenstockError):
    """A registration that breaks a rule; the text says which."""


class NameTaken(EndpointRefused):
    """Another endpoint is registered under the name, and the caller did not say ``replace``."""


class UserFileError(PenstockError):
    """The file given to ``serve`` cannot be loaded or holds no reward function."""
