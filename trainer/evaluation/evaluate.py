"""Evaluates held-out prompts on one published version, while training continues.

Every task is pinned: all its tokens must be sampled by that version, and an answer from another one is refused. An
evaluation needs all its groups: one that is dead-lettered makes it fail, since the accuracy over the groups that
arrived would be biased upwards. Every service may write dead letters, so a group that one names is waited for until the
queue of tasks is empty and nothing has arrived for some seconds. An evaluation that was under way when the trainer
exited continues in its next session, as long as its version is stored; one that ends without a result is reported with
the reason. Messages are acknowledged after a checkpoint that includes the outcome of their groups, as in training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import structlog

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BlobCorrupt, BlobMissing, PackError, ReaderKilled
from penstock.protocol.facts import DeadLetter, GroupScored
from penstock.protocol.groups import SINGLE_TURN, BlobRef, ScoredGroup, Task
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.errors import EvaluationFailed
from penstock.trainer.evaluation.eval_result import (
    EvalResult,
    EvaluatedSource,
    Evaluation,
    LostEvaluation,
    NumberedSources,
    SuccessRules,
    group_id_of,
    index_of,
    summarise,
    version_of,
)
from penstock.trainer.groups import queue_depths
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_totals import Drop, DropReason, claimed_tokens
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.groups.task_packs import Mixture, TaskPublisher, in_environment, make_task, pack_tasks, seeded
from penstock.trainer.publishing.publish import Publisher

log = structlog.get_logger("trainer.evaluation.evaluate")

_SAMPLES_PER_PACK = 64
_FETCH_WAIT_S = 0.5
_UNPUBLISHED_WAIT_S = 0.05  # while a version is being uploaded


class Evaluator:
    def __init__(  # noqa: PLR0913  the parts that it joins
        self,
        connections: Connections,
        *,
        sources: Sequence[EvaluatedSource],
        publisher: Publisher,
        deadline_s: float,
        on_end: Callable[[EvalResult | LostEvaluation], None],
        groups: RunGroups,
        success: SuccessRules,
        reader: PackReader | None = None,
        silent_s: float = 5.0,
        settings_before: Sequence[TaskSettings] = (),
        seed: int | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Bind to the trainer's consumer for evaluations; raises MissingStream.

        The ``publisher`` keeps the weights of versions while they are evaluated, for at most ``deadline_s``. ``on_end`` is called with
        each result on the evaluator's thread, or in `resume` when an evaluation is lost. Dead-lettered groups are no longer waited for
        when nothing has arrived for ``silent_s``. Without a ``reader`` packs are read with no vocabulary and no mark; without a
        ``seed`` (``run.seed``) samples are random. ``settings_before`` are those under which earlier sessions issued evaluations.
        """
        self._run_id, self._bus, self._traced = connections.run_id, connections.bus, connections.traced
        self._tasks = TaskPublisher(connections, "eval")
        self._sources = NumberedSources(sources)
        self._publisher = publisher
        self._deadline_s, self._silent_s = deadline_s, silent_s
        self._on_end, self._groups, self._success = on_end, groups, success
        self._reader = reader or PackReader(connections.blobs.get)
        self._settings_before, self._seed, self._mixture = settings_before, seed, mixture
        self._evaluations: dict[tuple[PolicyVersion, str], Evaluation] = {}
        self.held: dict[int, Delivery[GroupScored]] = {}  # until a checkpoint covers them
        self._changed = threading.Condition()
        self._closing = False
        self._thread_failure: Exception | None = None
        self.num_failed = 0
        spec = streams.scored_consumer(connections.run_id, "eval")
        connections.bus.reset_consumer(spec).wait()
        self._inbox: Inbox[GroupScored] = connections.bus.inbox(spec, GroupScored).wait()
        self._thread = threading.Thread(target=self._guard, name="evaluator", daemon=True)

    def __enter__(self) -> Evaluator:
        stream = f"{self._run_id}-dead"
        self._bus.tail(stream, subjects.dead(self._run_id), DeadLetter, self._on_dead_letter).wait()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(30.0)
        if not self._thread.is_alive():
            self._reader.close()

    def start(self, version: PolicyVersion, step: int, names: Collection[str] | None = None) -> None:
        with self._changed:
            in_flight = self._open_groups()
            for source in self._sources.sources:
                key = (version, source.name)
                if key in self._evaluations or (names is not None and source.name not in names):
                    continue
                ids = self._sources.ids(version, source.name)
                with self._groups.lock:
                    self._groups.held_out.issue(sorted(ids - in_flight))
                is_new = ids.isdisjoint(in_flight)
                self._evaluations[key] = Evaluation(
                    version, source, step, time.monotonic(), set(ids), is_of_session=is_new
                )
                self._changed.notify_all()

    def resume(self, version: PolicyVersion, *, now: PolicyVersion, step: int) -> list[str]:
        """Continue the evaluations of an earlier session; return the sources on which ``version`` is unfinished.

        The weights of ``version`` have the number ``now`` in this session. If that is another number, they are to be
        evaluated under it (`start`) and their old groups are dropped. The evaluation of an older version continues under its number, if
        workers can still fetch it; otherwise it is reported as lost. Raises BusError or BlobError.
        """
        in_flight: dict[PolicyVersion, set[str]] = {}
        for group_id in self._open_groups():
            in_flight.setdefault(version_of(group_id), set()).add(group_id)
        of_version = in_flight.pop(version, set())
        steps = self._publisher.stored_steps(in_flight)  # without the lock, since the bus's thread needs it
        with self._changed:  # all in one change: a group that arrives finds its evaluation
            if of_version and now == version:
                self.start(now, step, self._sources.by_source(of_version))
                self._abandon(of_version - self._sources.all_ids(version))
            elif of_version:
                self._abandon(of_version)
            for older, ids in sorted(in_flight.items()):
                for name, group_ids in self._sources.by_source(ids).items():
                    self._continue(older, name, group_ids, steps.get(older))
            return list(self._sources.by_source(of_version))

    def _continue(self, version: PolicyVersion, name: str, ids: set[str], step: int | None) -> None:
        if step is not None and ids == self._sources.ids(version, name):
            self._publisher.pin(version)
            self.start(version, step, [name])
            return
        self._abandon(ids)
        reason = "it was under way when the trainer exited, and its weights are no longer stored"
        if step is not None:
            reason = (
                f"it was under way when the trainer exited, with {len(ids)} groups in flight, and an evaluation has "
                f"{len(self._sources.ids(version, name))} now: it had failed, or the held-out prompts have changed"
            )
        self._on_end(LostEvaluation(version, step, reason, name))

    def wait_for_all(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        with self._changed:
            self._wait_while(lambda: bool(self._open()), should_stop)

    def _wait_while(self, is_open: Callable[[], bool], should_stop: Callable[[], bool]) -> None:
        while is_open() and not should_stop():
            if self._thread_failure is not None:
                raise self._thread_failure
            self._changed.wait(_FETCH_WAIT_S)

    def settled(self) -> list[Delivery[GroupScored]]:
        with self._changed:
            open_ids = self._open_groups()
            return [
                delivery
                for delivery in self.held.values()
                if open_ids.isdisjoint(group.generated.group_id for group in delivery.fact.groups)
            ]

    def acknowledge(self, deliveries: Sequence[Delivery[GroupScored]]) -> None:
        Delivery.ack_all(deliveries)
        with self._changed:
            for delivery in deliveries:
                self.held.pop(delivery.sequence, None)

    def wait(self, version: PolicyVersion, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until an evaluation has ended, or ``should_stop`` returns True; raises EvaluationFailed."""
        with self._changed:
            evaluations = [e for e in self._evaluations.values() if e.version == version]
            self._wait_while(lambda: not all(e.is_closed for e in evaluations), should_stop)
            for evaluation in evaluations:
                if evaluation.failure:
                    raise EvaluationFailed(evaluation.failure)

    # The methods below run on the evaluator's thread.

    def _guard(self) -> None:
        try:
            self._work()
        except Exception as err:  # noqa: BLE001  `wait` and `wait_for_all` raise it
            log.error("evaluator thread ended: no further evaluation", error=f"{type(err).__name__}: {err}")  # noqa: TRY400
            with self._changed:
                self._thread_failure = err
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._open())
                if self._closing:
                    return
                evaluations = self._open()
            for evaluation in evaluations:
                self._issue_when_published(evaluation)
            wait_s = _FETCH_WAIT_S if all(e.is_issued for e in evaluations) else _UNPUBLISHED_WAIT_S
            for delivery in self._inbox.fetch(16, wait_s).wait():
                self._receive(delivery)
            for evaluation in evaluations:
                self._finish(evaluation)

    def _open(self) -> list[Evaluation]:
        return [e for e in self._evaluations.values() if not e.is_closed]

    def _issue_when_published(self, evaluation: Evaluation) -> None:
        if evaluation.is_issued or not self._publisher.is_published(evaluation.version):
            return
        per_pack = max(1, _SAMPLES_PER_PACK // evaluation.source.settings.samples)
        numbers = self._sources.numbers[evaluation.source.name]
        published = []
        for first in range(numbers.start, numbers.stop, per_pack):
            last = min(first + per_pack, numbers.stop)
            prompts = [(number, self._sources.prompt(evaluation.source, number)) for number in range(first, last)]
            tasks = [self._task(evaluation, number, prompt) for number, prompt in prompts]
            pack = pack_tasks(tasks, (image for _, prompt in prompts for image in prompt.image_files))
            published.append(self._tasks.publish(pack))
        for pending in published:
            pending.wait()
        evaluation.is_issued = True

    def _task(self, evaluation: Evaluation, number: int, prompt: Prompt) -> Task:
        source = evaluation.source
        task = make_task(
            prompt,
            group_id_of(evaluation.version, number),
            sampling=source.sampling,
            group_size=source.settings.samples,
            split="eval",
            issued_version=evaluation.version,
            pinned_version=evaluation.version,
        )
        environment = source.settings.environment or SINGLE_TURN
        if self._mixture is not None:
            position = number - self._sources.numbers[source.name].start
            environment = self._mixture.name(environment, position, prompt.reward.data_source)
        placed = in_environment(task, prompt, environment)
        return placed if self._seed is None else seeded(placed, self._seed)

    def _receive(self, delivery: Delivery[GroupScored]) -> None:
        with self._changed:
            wanted = {g.generated.group_id: awaiting for g in delivery.fact.groups if (awaiting := self._awaiting(g))}
        try:
            self._check(delivery.fact, wanted)
        except (BlobMissing, BlobCorrupt, PackError, ReaderKilled) as err:
            log.warning("pack of an evaluation is unreadable: dead-lettered", error=str(err))
            with self._changed:
                for group_id, evaluation in wanted.items():
                    evaluation.note_dead_letter([group_id], str(err))
            delivery.dead_letter(type(err).__name__, str(err)).wait()
            return
        with self._changed:
            self.held[delivery.sequence] = delivery
            for group in delivery.fact.groups:
                self._accept(group, delivery.fact.pack)
        self._traced.arrived(delivery.traceparent, wanted)
        for group_id in wanted:
            self._traced.ended(group_id, "evaluated")

    def _awaiting(self, group: ScoredGroup) -> Evaluation | None:
        group_id = group.generated.group_id
        return next((e for e in self._open() if group_id in e.waiting_for), None)

    def _check(self, message: GroupScored, wanted: Mapping[str, Evaluation]) -> None:
        groups = [group for group in message.groups if group.generated.group_id in wanted]
        promises = []
        for group in groups:
            summary, evaluation = group.generated, wanted[group.generated.group_id]
            if not summary.oldest_version == summary.newest_version == evaluation.version:
                raise PackError(
                    f"evaluation of version {evaluation.version}: group {summary.group_id} was sampled by versions "
                    f"{summary.oldest_version} to {summary.newest_version}; the worker ignored the pin"
                )
            number = index_of(summary.group_id)
            task = self._task(evaluation, number, self._sources.prompt(evaluation.source, number))
            promises.append(TaskPromise.of(task, self._settings(task, evaluation)))
        if groups:
            self._reader.read(message.pack, groups, promises)

    def _settings(self, task: Task, evaluation: Evaluation) -> tuple[TaskSettings, ...]:
        """Return the settings under which a task may have been issued; empty if those of an earlier session are not known."""
        current = TaskSettings.of(task)
        if evaluation.is_of_session:
            return (current,)
        return (current, *self._settings_before) if self._settings_before else ()

    def _accept(self, group: ScoredGroup, pack: BlobRef) -> None:
        summary, evaluation = group.generated, self._awaiting(group)
        if evaluation is None:
            with self._groups.lock:
                refused = Drop(summary.group_id, DropReason.DUPLICATE, claimed_tokens(group))
                self._groups.held_out.totals.refuse(refused)
        else:
            evaluation.waiting_for.discard(summary.group_id)
            evaluation.changed_at = time.monotonic()
            evaluation.groups[summary.group_id] = group
            evaluation.packs[summary.group_id] = pack

    def _finish(self, evaluation: Evaluation) -> None:
        elapsed_s = time.monotonic() - evaluation.started
        if not evaluation.is_over and elapsed_s > self._deadline_s:
            queues = queue_depths.describe_queues(
                self._bus, self._run_id
            )  # without the lock, since the bus's thread needs it
            evaluation.failure = f"{evaluation.missing} did not arrive within {self._deadline_s:.0f} s. {queues}"
        if not evaluation.is_over and self._is_lost(evaluation):
            group_id = min(evaluation.waiting_for)
            reason = evaluation.dead_lettered[group_id]
            evaluation.failure = f"{evaluation.missing} were dead-lettered, such as {group_id}: {reason}"
        if not evaluation.is_over:
            return
        version, step, source = evaluation.version, evaluation.step, evaluation.source
        if evaluation.failure:
            self.num_failed += 1
            log.warning("evaluation failed", policy_version=version, reason=evaluation.failure)
            self._abandon({*evaluation.waiting_for, *evaluation.groups}, evaluation)
            self._on_end(LostEvaluation(version, step, evaluation.failure, source.name))
        else:
            groups = list(evaluation.groups.values())
            rules = {
                group_id: self._success.rule(self._sources.prompt(source, index_of(group_id)).reward)
                for group_id in evaluation.groups
            }
            result = summarise(groups, rules, step=step, version=version, eval_s=elapsed_s)
            self._on_end(replace(result, split=source.name))
            tokens = {group.generated.group_id: claimed_tokens(group) for group in groups}
            with self._groups.lock:
                self._groups.held_out.evaluate(tokens, evaluation.packs)
        if not any(e.version == version and e is not evaluation for e in self._open()):
            self._publisher.unpin(version)
        with self._changed:
            evaluation.groups.clear()
            evaluation.packs.clear()
            evaluation.is_closed = True
            self._changed.notify_all()

    def _is_lost(self, evaluation: Evaluation) -> bool:
        with self._changed:
            silent_s = time.monotonic() - evaluation.changed_at
            if not evaluation.is_issued or not evaluation.only_dead_lettered_are_missing or silent_s < self._silent_s:
                return False
        tasks = self._bus.consumer_state(streams.tasks_consumer(self._run_id, "eval")).wait()
        return tasks.num_pending + tasks.num_ack_pending == 0

    def _abandon(self, group_ids: Iterable[str], evaluation: Evaluation | None = None) -> None:
        for group_id in sorted(group_ids):
            group = evaluation.groups.get(group_id) if evaluation else None
            pack = evaluation.packs.get(group_id) if evaluation else None
            num_tokens = claimed_tokens(group) if group else 0
            with self._groups.lock:
                self._groups.held_out.drop(Drop(group_id, DropReason.ABANDONED, num_tokens, pack))

    def _open_groups(self) -> frozenset[str]:
        with self._groups.lock:
            return frozenset(self._groups.held_out.outstanding())

    def _on_dead_letter(self, letter: DeadLetter) -> None:
        """Note the dead letters of an evaluation (called on the bus's thread)."""
        reason = f"at stage {letter.stage}: {letter.reason}: {letter.detail}"
        with self._changed:
            for evaluation in self._evaluations.values():
                evaluation.note_dead_letter(letter.group_ids, reason)
            self._changed.notify_all()
