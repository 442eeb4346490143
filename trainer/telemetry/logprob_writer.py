"""Stores the log-probabilities of each step for people to look at, in a separate thread; training never waits for it.

What cannot be stored is counted, and the first time is an event. Nothing reads these objects to train: after a crash, a step
that is made again stores its object again, under the epoch of its session.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from penstock.protocol import blob_keys
from penstock.protocol.errors import PenstockError
from penstock.protocol.packs import step_logprobs
from penstock.protocol.packs.step_logprobs import KeptGroup, LogprobsHeader, StepLogprobs
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.learner.planning import Learned
from penstock.trainer.learner.step_metrics import KeptRows
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan

log = structlog.get_logger("trainer.telemetry.logprob_writer")

_MAX_WAITING = 2  # steps, 15 MB each at most; a later one is lost while the object store is slow
_CLOSE_S = 20.0


@dataclass(frozen=True, slots=True)
class StepNumbers:
    step: int
    trained_version: int
    made_version: int


class LogprobWriter:
    """Writes one object for each step that kept rows; use as a context manager. For the training thread only."""

    def __init__(self, blobs: Blobs, run_id: str, *, epoch: int, on_first_loss: Callable[[str], None]) -> None:
        self._blobs, self._run_id, self._epoch = blobs, run_id, epoch
        self._on_first_loss = on_first_loss
        self._waiting: queue.Queue[StepLogprobs | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="logprobs", daemon=True)
        self._lock = threading.Lock()
        self._num_lost = 0

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def __enter__(self) -> LogprobWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._waiting.put(None, timeout=_CLOSE_S)
        except queue.Full:
            log.warning("log-probabilities of the last steps not stored: the object store is slow")
            return
        self._thread.join(_CLOSE_S)

    def submit(self, numbers: StepNumbers, batch: Sequence[ReadyGroup], learned: Learned) -> None:
        kept = learned.metrics.kept
        if kept is None or not len(kept.rows):
            return
        try:
            self._waiting.put_nowait(of_step(self._run_id, numbers, batch, learned.plan, kept))
        except queue.Full:
            self._lose(numbers.step, f"{_MAX_WAITING} steps wait for the object store")

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            step = record.header.step
            try:
                data = step_logprobs.encode(record)
                key = blob_keys.step_logprobs(self._run_id, step, self._epoch, hashlib.sha256(data).hexdigest())
                self._blobs.put(key, data)
            except PenstockError as err:
                self._lose(step, str(err))

    def _lose(self, step: int, reason: str) -> None:
        with self._lock:
            self._num_lost += 1
            is_first = self._num_lost == 1
        log.warning("log-probabilities not stored", step=step, error=reason)
        if is_first:
            text = f"log-probabilities of step {step} are not stored for the live page, which does not stop the run: {reason}"
            self._on_first_loss(text)


def of_step(
    run_id: str, numbers: StepNumbers, batch: Sequence[ReadyGroup], plan: StepPlan, kept: KeptRows
) -> StepLogprobs:
    groups = {(group.pack.key, group.scored.generated.row_group): group for group in batch}
    places: dict[tuple[str, int], int] = {}
    rows = []
    for number, count in zip(kept.rows.tolist(), kept.counts.tolist(), strict=True):
        planned = plan.rows[number]
        place = plan.packs[planned.pack].key, planned.row_group
        rows.append((places.setdefault(place, len(places)), planned.trajectory, count))
    header = LogprobsHeader(
        run_id=run_id,
        step=numbers.step,
        trained_version=numbers.trained_version,
        made_version=numbers.made_version,
        groups=tuple(
            KeptGroup(group_id=groups[place].group_id, pack=groups[place].pack.sha256, row_group=place[1])
            for place in places
        ),
    )
    return StepLogprobs(header, np.array(rows, np.int32).reshape(-1, 3), kept.logprobs, kept.outcomes)
