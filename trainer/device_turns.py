"""The trainer's turns on GPUs that it shares with engines (``placement.shared = "turns"``).

The trainer decides, since it knows what is ready and what was issued; engines have a device whenever no rank wants it.

| the trainer | changes when                                                                                          |
|-------------|-------------------------------------------------------------------------------------------------------|
| takes it    | a batch is ready, and what is left to sample makes no further one; or no engine has the device        |
| gives it    | no batch is ready, or an evaluation is waited for; and there is something to sample: tasks are issued |
|             | only when their version is published, so that an engine resumes with the weights it is to sample with |

So with ``rollout.max_staleness`` s, engines sample up to s + 1 batches in a turn, and the trainer makes as many steps in the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from penstock.protocol.heartbeats import Activity
from penstock.trainer.rank_device import RankDevice

if TYPE_CHECKING:
    from penstock.trainer.learner.learner import Learner

log = structlog.get_logger("trainer.device_turns")


@dataclass(frozen=True, slots=True)
class TurnFacts:
    has_batch: bool  # scored groups for the next step, fresh enough
    num_to_sample: int  # groups that were issued and not sampled yet, those of evaluations included
    groups_per_step: int
    awaits_engine: bool = False  # the trainer waits for an evaluation
    is_free: bool = False  # no process has the device

    @property
    def trainer_is_due(self) -> bool:
        """Return True if the trainer takes the device from the engines."""
        return self.has_batch and (self.is_free or self.num_to_sample < self.groups_per_step)

    @property
    def engines_are_due(self) -> bool:
        """Return True if the trainer gives the device to the engines."""
        return self.num_to_sample > 0 and (self.awaits_engine or not self.has_batch)


@dataclass(slots=True)
class TrainerTurns:
    """Called by the training thread of rank 0, at the start of which every rank has its device."""

    learner: Learner
    device: RankDevice
    num_to_sample: Callable[[], int]
    groups_per_step: int
    activity: Activity
    num: int = 1  # turns so far
    wait_s: float = 0.0  # for the device, since `take_figures`
    move_s: float = 0.0  # of states between host and device, since then
    _given_at: float = field(default_factory=time.monotonic)

    @property
    def is_held(self) -> bool:
        return self.device.devices.is_held

    def follow(self, should_stop: Callable[[], bool], has_batch: bool, *, awaits_engine: bool = False) -> None:
        """Give the device, or take it, where that is due; called again and again while the trainer waits."""
        is_free = not self.is_held and self.device.devices.is_free
        facts = TurnFacts(has_batch, self.num_to_sample(), self.groups_per_step, awaits_engine, is_free)
        if self.is_held and facts.engines_are_due:
            self._give()
        elif not self.is_held and facts.trainer_is_due:
            self.take(should_stop)

    def take(self, should_stop: Callable[[], bool]) -> bool:
        """Have the engines release the device, and every rank move its states back; return False if ``should_stop`` before."""
        if self.is_held:
            return True
        asked = time.monotonic()
        self.activity.state = "waiting for its turn on the GPU"
        if not self.device.wait(should_stop):
            return False
        started = time.monotonic()
        with self.activity.working("moving states to the GPU"):
            self.learner.enter_device()
        self.num, self.wait_s = self.num + 1, self.wait_s + started - asked
        self.move_s += time.monotonic() - started
        log.info("the trainer's turn", wait_s=round(started - asked, 3), engines_s=round(asked - self._given_at, 3))
        return True

    def _give(self) -> None:
        started = time.monotonic()
        with self.activity.working("moving states to host memory"):
            num_bytes = self.learner.leave_device()
        self._given_at = time.monotonic()
        self.move_s += self._given_at - started
        log.info("the engines' turn", num_bytes=num_bytes, move_s=round(self._given_at - started, 3))

    def take_figures(self) -> dict[str, float]:
        """Return what a step's event says of the turns since the step before."""
        figures = {"turns": float(self.num), "turn_wait_s": self.wait_s, "turn_move_s": self.move_s}
        self.wait_s = self.move_s = 0.0
        return figures
