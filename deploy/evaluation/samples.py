"""Have prompts sampled and scored by the workers and reward services of a run, and report each prompt once it is over.

Every task is pinned to version 0, and what arrives is held against its task as in training. A prompt is complete with all
its scored samples; one that is dead-lettered is failed, with the reason. A dead letter counts once the queue of tasks is
empty and nothing has arrived for some seconds, because the same group may still arrive.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from penstock.console.evaluation_results import Outcome
from penstock.deploy.evaluation.target import VERSION
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.errors import BlobCorrupt, BlobMissing, PackError
from penstock.protocol.facts import DeadLetter, GroupScored
from penstock.protocol.groups import Sampling, ScoredGroup, Task
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.trace_context import new_trace
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.delivery import Delivery
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.groups import queue_depths
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.groups.task_packs import make_task, pack_tasks

log = structlog.get_logger("deploy.evaluation.samples")

_SAMPLES_PER_PACK = 64
_FETCH_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    number: int
    source: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class HowToSample:
    num_samples: int
    sampling: Sampling
    environment: str
    deadline_s: float  # without an arrival
    silent_s: float = 5.0


@dataclass(slots=True)
class _DeadLetters:
    """Groups that dead letters name; written on the bus's thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)  # (reason, detail) by group id
    changed_at: float = field(default_factory=time.monotonic)

    def note(self, group_ids: Iterable[str], reason: str, detail: str) -> None:
        with self.lock:
            self.reasons |= dict.fromkeys(group_ids, (reason, detail))
            self.changed_at = time.monotonic()

    def on_letter(self, letter: DeadLetter) -> None:
        self.note(letter.group_ids, f"{letter.stage}: {letter.reason}", letter.detail)

    def of(self, group_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
        with self.lock:
            return {group_id: self.reasons[group_id] for group_id in group_ids if group_id in self.reasons}


class Sampler:
    def __init__(
        self,
        connections: Connections,
        planned: Sequence[PlannedPrompt],
        how: HowToSample,
        reader: PackReader,
        on_outcomes: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._how = how
        self._reader = reader
        self._on_outcomes = on_outcomes
        self._planned: Mapping[str, PlannedPrompt] = {group_id(prompt.number): prompt for prompt in planned}
        self._waiting = dict.fromkeys(self._planned)  # in order
        self._dead = _DeadLetters()
        self._arrived_at = time.monotonic()
        spec = streams.scored_consumer(self._run_id, "eval")
        self._inbox = self._bus.inbox(spec, GroupScored).wait()
        self._bus.tail(f"{self._run_id}-dead", subjects.dead(self._run_id), DeadLetter, self._dead.on_letter).wait()

    def run(self, check: Callable[[], None]) -> str:
        """Sample all prompts; return why some are missing, empty if none is. ``check`` raises when a process has failed."""
        self._issue()
        while self._waiting:
            check()
            for delivery in self._inbox.fetch(16, _FETCH_WAIT_S).wait():
                self._receive(delivery)
            self._fail_dead_lettered()
            silent_s = time.monotonic() - max(self._arrived_at, self._dead.changed_at)
            if self._waiting and silent_s > self._how.deadline_s:
                return (
                    f"{len(self._waiting)} of {len(self._planned)} prompts are missing: nothing arrived for "
                    f"{self._how.deadline_s:.0f} s. {queue_depths.describe_queues(self._bus, self._run_id)}"
                )
        return ""

    def _issue(self) -> None:
        per_pack = max(1, _SAMPLES_PER_PACK // self._how.num_samples)
        pending = []
        ids = iter(self._planned)
        while batch := list(itertools.islice(ids, per_pack)):
            pack = pack_tasks([self._task(planned) for planned in batch])
            key = blob_keys.task_list(self._run_id, pack.pack_id)
            stored = self._blobs.put(key, pack.blob) if pack.blob else None
            message = pack.announced(self._run_id, stored)
            subject = subjects.tasks(self._run_id, "eval")
            pending.append(self._bus.publish(subject, message, msg_id=pack.pack_id, traceparent=new_trace()))
        for publication in pending:
            publication.wait()
        self._arrived_at = time.monotonic()

    def _task(self, of: str) -> Task:
        return make_task(
            self._planned[of].prompt,
            of,
            sampling=self._how.sampling,
            group_size=self._how.num_samples,
            split="eval",
            issued_version=VERSION,
            pinned_version=VERSION,
        ).model_copy(update={"environment": self._how.environment})

    def _receive(self, delivery: Delivery[GroupScored]) -> None:
        wanted = [group for group in delivery.fact.groups if group.generated.group_id in self._waiting]
        try:
            promises = [TaskPromise.of(self._task(group.generated.group_id)) for group in wanted]
            groups = self._reader.read(delivery.fact.pack, wanted, promises) if wanted else []
            self._check_versions(wanted)
        except (BlobMissing, BlobCorrupt, PackError) as err:
            log.warning("pack of an evaluation is unreadable: dead-lettered", error=str(err))
            delivery.dead_letter(type(err).__name__, str(err)).wait()
            return
        outcomes = [self._outcome(scored, group) for scored, group in zip(wanted, groups, strict=True)]
        if outcomes:
            self._close(outcomes)
        Delivery.ack_all([delivery])
        self._arrived_at = time.monotonic()

    def _check_versions(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            generated = group.generated
            if not generated.oldest_version == generated.newest_version == VERSION:
                raise PackError(
                    f"group {generated.group_id} was sampled by versions {generated.oldest_version} to {generated.newest_version}; the "
                    f"worker ignored the pin to version {VERSION}"
                )

    def _outcome(self, scored: ScoredGroup, group: Group) -> Outcome:
        generated = scored.generated
        planned = self._planned[generated.group_id]
        request = planned.prompt.reward
        outcome = Outcome(
            prompt=planned.number, source=planned.source, reward=request.name, data_source=request.data_source
        )
        if "abort" in generated.finish_reasons:
            return outcome.model_copy(update={"failed": "aborted", "detail": "the engine aborted a sample"})
        starts = [0, *itertools.accumulate(generated.rows)][:-1] if generated.rows else range(len(group.trajectories))
        return outcome.model_copy(
            update={
                "rewards": scored.rewards,
                "parts": scored.parts,
                "completions": tuple(group.trajectories[start].completion_text for start in starts),
                "completion_tokens": generated.completion_tokens,
                "finish_reasons": generated.finish_reasons,
                "scorer": scored.scorer,
            }
        )

    def _fail_dead_lettered(self) -> None:
        dead = self._dead.of(self._waiting)
        silent_s = time.monotonic() - max(self._arrived_at, self._dead.changed_at)
        if not dead or len(dead) < len(self._waiting) or silent_s < self._how.silent_s:
            return
        tasks = self._bus.consumer_state(streams.tasks_consumer(self._run_id, "eval")).wait()
        if tasks.num_pending + tasks.num_ack_pending:
            return
        self._close(
            [
                Outcome(
                    prompt=self._planned[group_id].number,
                    source=self._planned[group_id].source,
                    failed=reason,
                    detail=detail[:2000],
                )
                for group_id, (reason, detail) in dead.items()
            ]
        )

    def _close(self, outcomes: Sequence[Outcome]) -> None:
        self._on_outcomes(outcomes)
        for outcome in outcomes:
            self._waiting.pop(group_id(outcome.prompt), None)


def group_id(number: int) -> str:
    return f"eval.v{VERSION}.p{number}"
