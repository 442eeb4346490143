"""What can go wrong in the trainer, drawn as one tree below `protocol.errors.PenstockError`.

```
PenstockError
└── TrainerError
    ├── UnsupportedModel      the model folder is missing, unreadable or of a kind we would train wrongly
    ├── MalformedData         rows of a data file are not what they should be; each with file, line and column
    ├── BatchDoesNotFit       a trajectory is longer than a micro-batch may be
    ├── CollectTimeout        no full batch within the deadline; says whom the trainer waited for
    ├── TooManyDead           group after group goes to the dead letters
    ├── EngineMismatch        engine and trainer give the same tokens of one version other log-probabilities
    ├── EvaluationFailed      an evaluation did not come back whole, or came from another version
    ├── PublicationFailed     the weights could not be stored, verified or announced
    ├── RankSilent            another process of this trainer has ended, or does not answer
    ├── RunIsHeld             another trainer leads this run and is alive
    ├── LeaseLost             another trainer took the run over while this one was away
    ├── CheckpointError       a checkpoint is incomplete, or belongs to another run or world size
    └── UnknownReward         the run file names a reward that no service offers
```
"""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class TrainerError(PenstockError):
    """Base of everything that goes wrong inside the trainer."""


class UnsupportedModel(TrainerError):
    """The model folder is missing, unreadable, or of a kind that would be trained wrongly."""


class MalformedData(TrainerError):
    """Rows of a data file are not what they should be; the text gives file, line and column of each."""


class BatchDoesNotFit(TrainerError):
    """A trajectory is longer than ``trainer.micro_batch_tokens``."""


class CollectTimeout(TrainerError):
    """No full batch arrived within the deadline; the text says whom the trainer waited for."""


class TooManyDead(TrainerError):
    """Group after group went to the dead letters: something upstream fails for every group."""


class EngineMismatch(TrainerError):
    """Engine and trainer disagree about the same tokens of the same version by more than ``trainer.max_mismatch``."""


class EvaluationFailed(TrainerError):
    """An evaluation did not come back whole within its deadline, or came from another version."""


class PublicationFailed(TrainerError):
    """A version could not be stored, verified or announced."""


class RankSilent(TrainerError):
    """Another process of this trainer has ended, or has not answered within its deadline."""


class RunIsHeld(TrainerError):
    """Another trainer leads this run and is alive."""


class LeaseLost(TrainerError):
    """Another trainer took the run over while this one was suspended or cut off; it must not write any more."""


class CheckpointError(TrainerError):
    """A checkpoint is incomplete, or belongs to another run or another number of ranks."""


class UnknownReward(TrainerError):
    """The run file names a reward that no reward service offers."""
