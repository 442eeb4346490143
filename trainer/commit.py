"""The order that makes a group's effect exactly-once: chapter, checkpoint, its key in NATS, acknowledgements.

```
what happened ──▶ chapter (S3) ──▶ folder.partial ──fsync──▶ lease confirmed ──rename──▶ key ``checkpoint`` ──▶ acks
                  counts when        counts not               nobody else               a zombie fails here
                  it is named                                 holds the run             and acknowledges nothing
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.recovery import checkpoint

if TYPE_CHECKING:
    from penstock.protocol.facts import GroupScored
    from penstock.protocol.transport.delivery import Delivery
    from penstock.trainer.training import Training

CHECKPOINTS = "checkpoints"


def commit_everything(training: Training) -> None:
    """Commit everything so far; only then acknowledge what it covers.

    What is settled is asked first and what happened second, so that the checkpoint covers every message
    that is acknowledged. Raises LeaseLost, before anything is committed or acknowledged, when another
    trainer holds the run.
    """
    trained = training.collector.settled()
    evaluated = training.evaluator.settled() if training.evaluator else []
    issued = training.issuer.take_state()
    before = training.record_writer.committed
    if training.record_writer.is_empty and before is not None and issued.is_in(before):
        # the checkpoint before tells all that is so now: it covers what was settled or retired meanwhile
        training.lease.confirm()
        _acknowledge(training, trained, evaluated)
        return
    record, chapter, digest = training.record_writer.write(
        issued.entries, step=training.num_steps_done, version=training.version
    )
    crash_points.reach(CrashPoint.RECORDED)
    state = CheckpointState(
        run_id=training.settings.run.id,
        epoch=training.lease.epoch,
        step=training.num_steps_done,
        version=training.version,
        weights_digest=digest,
        weights_dtype=training.published_dtype,
        weights_are="adapter" if training.settings.publishes_adapters else "model",
        ledger=training.ledger.rows(),
        dispatch=issued.dispatch,
        unsent=issued.unsent,
        letters_read=issued.letters_read,
        totals=issued.totals,
        account=issued.entries.account,
        algorithm=training.planner.document(),
        metrics_bytes=training.recorder.num_bytes,
        record=record,
        chapter=chapter,
    )
    data = checkpoint.commit(
        training.settings.run.folder / CHECKPOINTS,
        state,
        training.rank_group.save,
        keep=training.settings.trainer.keep_checkpoints,
        confirm=training.lease.confirm,
    )
    crash_points.reach(CrashPoint.COMMITTED)
    training.record_writer.point(state, data)
    crash_points.reach(CrashPoint.POINTED)
    _acknowledge(training, trained, evaluated)


def _acknowledge(
    training: Training, trained: list[Delivery[GroupScored]], evaluated: list[Delivery[GroupScored]]
) -> None:
    training.collector.acknowledge(trained)
    crash_points.reach(CrashPoint.ACKNOWLEDGING)
    if training.evaluator is not None:
        training.evaluator.acknowledge(evaluated)
    crash_points.reach(CrashPoint.ACKNOWLEDGED)
