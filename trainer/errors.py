"""The errors of the trainer, as one tree below `protocol.errors.PenstockError`."""

from __future__ import annotations

from penstock.protocol.errors import (
    MalformedData,  # noqa: F401 - code of the protocol, with which model folders and chats are read, raises these
    PenstockError,
    UnsupportedModel,  # noqa: F401
)


class TrainerError(PenstockError):
    """Base of the trainer's errors."""


class BatchDoesNotFit(TrainerError):
    """A trajectory is longer than ``trainer.micro_batch_tokens``, the most that a micro-batch may have."""


class CollectTimeout(TrainerError):
    """No full batch arrived within the deadline; the text gives queue depths and services alive."""


class TooManyDeadLetters(TrainerError):
    """Consecutive groups were dead-lettered and none arrived: a service upstream fails for every group."""


class EngineMismatch(TrainerError):
    """Engine and trainer disagree about the same tokens of the same version by more than ``trainer.max_mismatch``."""


class EvaluationFailed(TrainerError):
    """An evaluation was incomplete at its deadline, or was sampled by another version."""


class PublicationFailed(TrainerError):
    """A version could not be stored, verified or announced."""


class RankUnresponsive(TrainerError):
    """Another process of this trainer has exited, or has not answered within its deadline."""


class RunIsHeld(TrainerError):
    """Another trainer holds the lease of this run and is alive."""


class LeaseLost(TrainerError):
    """Another trainer took the lease while this one was suspended or disconnected; this one must not write any more."""


class TrainingDiverged(TrainerError):
    """A loss or a gradient is not a finite number any more; the text gives the step."""


class HardwareFailed(TrainerError):
    """Memory ran out, or a GPU, its driver or another rank failed; the text names it and the setting that helps."""


class PolicyCollapsed(TrainerError):
    """The entropy of the sampled tokens is below ``trainer.min_entropy``."""


class GroupStateError(TrainerError, ValueError):
    """A group is in a state that does not allow the event: an internal error; the text names group, state and event."""


class CheckpointError(TrainerError):
    """A checkpoint is incomplete, or belongs to another run or another number of ranks."""


class ExportFailed(TrainerError):
    """The exported model cannot be loaded, or computes something else than the trained one; nothing was replaced."""


class UnknownReward(TrainerError):
    """The run file names a reward that no reward service offers."""


class NoAttentionKernel(TrainerError):
    """No exact attention without [T, T] matrices works for the model's heads on this device, for the given reasons."""


class NotEstimated(TrainerError):
    """The memory of a run cannot be estimated from its settings and its model's config.json."""
