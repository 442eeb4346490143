"""The engine thread: takes jobs and commands, has the scheduler decide and the runner compute.

Waits for: a job, a command, or new weights. Unblocked by: ``submit``, ``cancel``, ``update`` and the control
methods, callable from any thread.

A weight update is queued with the jobs. Unless the engine is paused it acts as a writer lock: jobs before it finish
on the old weights, jobs after it wait for the new ones. While the engine is paused it applies at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.rollout_service.embedded_engine.errors import EngineStopped
from penstock.rollout_service.embedded_engine.scheduler import Limits, choose_admissions
from penstock.rollout_service.embedded_engine.sequence import FinishReason, Job, Sequence

if TYPE_CHECKING:  # decisions alone: what computes may be another runner, without torch
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter
    from penstock.rollout_service.embedded_engine.model.weights import Weights
    from penstock.rollout_service.embedded_engine.runner import Runner

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    success: bool
    message: str
    num_paused: int = 0


@dataclass(slots=True)
class WeightUpdate:
    weights: Weights
    version: str | None  # None: keep the label, as SGLang does
    model_path: str
    flush_cache: bool
    outcome: Future[UpdateOutcome] = field(default_factory=Future)


@dataclass(slots=True)
class EngineMetrics:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished_sequences: int = 0
    aborted_sequences: int = 0
    retractions: int = 0
    weight_updates: int = 0
    busy_s: float = 0.0


class _Command:
    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.outcome: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.outcome.set_result(self._action())
        except Exception as error:
            self.outcome.set_exception(EngineStopped(f"the engine thread ended: {error}"))
            raise


class EngineThread:
    """Serves jobs with one set of weights at a time; the module's docstring defines their order."""

    def __init__(
        self, runner: Runner, limits: Limits, *, version: str, model_path: str, on_failure: Callable[[], None]
    ) -> None:
        self.version = version
        self.model_path = model_path
        self.limits = limits
        self.paused = False
        self.released: frozenset[str] = frozenset()  # of ``weights`` and ``kv_cache``: not in memory
        self.metrics = EngineMetrics()
        self.failure: Exception | None = None
        self._runner = runner
        self._on_failure = on_failure
        self._waiting: deque[Sequence] = deque()
        self._inbox: deque[Job | WeightUpdate] = deque()
        self._streaming: list[Job] = []
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step under way; unfinished jobs fail with EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def weights_checksum(self) -> str:
        return self._runner.weights.checksum

    @property
    def num_running(self) -> int:
        """Sequences with keys and values in the cache, paused ones included."""
        return len(self._runner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, or for an update before them."""
        queued = sum(len(item.sequences) for item in list(self._inbox) if isinstance(item, Job))
        return len(self._waiting) + queued

    @property
    def num_stored_tokens(self) -> int:
        return self._runner.num_stored_tokens

    @property
    def num_kept_tokens(self) -> int:
        return self._runner.kept.num_tokens

    @property
    def num_evicted_tokens(self) -> int:
        return self._runner.kept.num_evicted

    def submit(self, job: Job) -> None:
        self._append(self._inbox, job)

    def update(self, update: WeightUpdate) -> Future[UpdateOutcome]:
        self._append(self._inbox, update)
        return update.outcome

    def pause(self, mode: str) -> Future[int]:
        """Stop computing; return how many sequences were running.

        ``abort`` ends all sequences with the tokens they have, ``retract`` drops their keys and values (which are
        computed again after ``resume``, with the weights of that moment), ``in_place`` keeps them.
        """

        def command() -> int:
            num = len(self._runner.running)
            self.paused = True
            if mode == "abort":
                self._abort(lambda _: True, "Abort by pause_generation")
            elif mode == "retract":
                self._retract()
            return num

        return self._command(command)

    def resume(self) -> Future[None]:

        def command() -> None:
            self.paused = False

        return self._command(command)

    def abort(self, *, prefix: str, everything: bool) -> Future[int]:
        return self._command(
            lambda: self._abort(lambda item: everything or item.rid.startswith(prefix), "Abort by /abort_request")
        )

    def cancel(self, job: Job) -> Future[int]:
        return self._command(lambda: self._abort(lambda item: item.job is job, "Client disconnected"))

    def flush(self) -> Future[bool]:
        """Drop all kept keys and values; return False, and drop nothing, while sequences run or wait."""

        def command() -> bool:
            is_idle = not self._runner.running and not (self._waiting and not self.paused)
            if is_idle:
                self._runner.kept.clear()
            return is_idle

        return self._command(command)

    def release(self, tags: Collection[str]) -> Future[bool]:
        """Free the memory of ``tags``; return False, and free nothing, while sequences run or wait."""

        def command() -> bool:
            is_idle = not (self._runner.running or self._waiting or self._inbox)
            if is_idle:
                self.released |= frozenset(tags)
                self._runner.release(self.released)
            return is_idle

        return self._command(command)

    def reoccupy(self, tags: Collection[str]) -> Future[None]:
        """Let what was released be used again; weights are there after the next `update`."""

        def command() -> None:
            self.released -= frozenset(tags)

        return self._command(command)

    def drop_adapter(self, adapter: Adapter) -> Future[None]:
        return self._command(lambda: self._runner.drop_adapter(adapter))

    def _command(self, action: Callable[[], T]) -> Future[T]:
        command = _Command(action)
        self._append(self._commands, command)
        return command.outcome

    def _append(self, queue: deque[Any], item: object) -> None:
        with self._changed:
            if self._stopping or self.failure is not None:
                raise EngineStopped(f"the engine thread has ended ({self.failure or 'shutdown'}); restart the process")
            queue.append(item)
            self._changed.notify()

    def _run(self) -> None:
        try:
            with self._runner.computing():
                while self._wait_for_work():
                    self._iterate()
        except Exception as error:  # noqa: BLE001  (whatever the error, no client may wait for a thread that has ended)
            self.failure = error
            self._fail_all(error)
            self._on_failure()
        else:
            self._fail_all(EngineStopped("the engine is shutting down"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._commands or self._inbox or self._can_compute() or self._stopping):
                self._changed.wait()
            num_commands = len(self._commands)
        for _ in range(num_commands):  # one by one: if it raises, `_fail_all` still finds those behind it
            self._commands.popleft().run()
        return not self._stopping

    def _can_compute(self) -> bool:
        can_run = not self.paused and not self.released and self._runner.has_weights
        return can_run and bool(self._runner.running or self._waiting)

    def _iterate(self) -> None:
        started = time.monotonic()
        self._admit_jobs()
        if self._can_compute():
            runner = self._runner
            admitted = choose_admissions(self._waiting, runner.running, self.limits, runner.kept.num_known)
            if admitted:
                finished = runner.start(admitted)
                for _ in admitted:  # after start: if it raises, `_fail_all` still finds their jobs
                    self._waiting.popleft()
                self.metrics.prompt_tokens += sum(len(item.prompt) for item in admitted)
                self.metrics.cached_tokens += sum(item.cached_tokens for item in admitted)
                self.metrics.generated_tokens += len(admitted)
            else:
                self.metrics.generated_tokens += len(runner.running)
                finished = runner.step()
            self._finish(finished)
            self._report_progress()
            self.metrics.busy_s += time.monotonic() - started

    def _admit_jobs(self) -> None:
        """Move jobs to the waiting sequences, in order, up to the first update that must wait for running ones."""
        while self._inbox:
            head = self._inbox[0]
            if isinstance(head, WeightUpdate):
                if not self.paused and (self._runner.running or self._waiting):
                    return
                self._apply(head)
            else:
                self._waiting.extend(item for item in head.sequences if item.finish is None)
                if head.on_step is not None:
                    self._streaming.append(head)
            with self._changed:
                self._inbox.popleft()

    def _apply(self, update: WeightUpdate) -> None:
        running = self._runner.running
        if running and update.flush_cache:
            message = (
                f"{len(running)} sequences are paused in place and their keys and values cannot be flushed; nothing "
                "was changed. Send flush_cache=false to keep them, or pause with mode=retract to compute them again."
            )
            update.outcome.set_result(UpdateOutcome(False, message, len(running)))
            return
        for sequence in (*running, *self._waiting):
            sequence.close_span(self.version)
        self._runner.weights = update.weights
        self.model_path = update.model_path
        if update.version is not None:
            self.version = update.version
        self.metrics.weight_updates += 1
        num_paused = len(running) + len(self._waiting)
        update.outcome.set_result(UpdateOutcome(True, "Succeeded to update model weights.", num_paused))

    def _retract(self) -> None:
        running = list(self._runner.running)
        self._runner.remove(running)
        for sequence in running:
            sequence.num_retractions += 1
        self._waiting.extendleft(reversed(running))
        self.metrics.retractions += len(running)

    def _abort(self, matches: Callable[[Sequence], bool], message: str) -> int:
        jobs = [item for item in list(self._inbox) if isinstance(item, Job)]
        queued = [item for job in jobs for item in job.sequences if item.finish is None]
        ended = [item for item in (*self._runner.running, *self._waiting, *queued) if matches(item)]
        for sequence in ended:
            sequence.finish = FinishReason("abort", message=message)
        self._runner.remove([item for item in self._runner.running if item.finish is not None])
        self._waiting = deque(item for item in self._waiting if item.finish is None)
        self.metrics.aborted_sequences += len(ended)
        self._finish(ended)
        return len(ended)

    def _finish(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            sequence.close_span(self.version)
            sequence.final_version = self.version
            job = sequence.job
            assert job is not None
            sequence.job = None  # else both, with all tokens, stay until a full garbage collection
            job.num_unfinished -= 1
            if job.num_unfinished == 0:
                job.on_done(None)
        self.metrics.finished_sequences += len(ended)

    def _report_progress(self) -> None:
        self._streaming = [job for job in self._streaming if job.num_unfinished]
        for job in self._streaming:
            if job.on_step is not None:
                job.on_step([len(item.output_ids) for item in job.sequences])

    def _fail_all(self, error: Exception) -> None:
        stopped = EngineStopped(f"the engine thread ended: {error}")
        with self._changed:
            self._stopping = True
            inbox, commands = list(self._inbox), list(self._commands)
            self._inbox.clear()
            self._commands.clear()
        jobs = {id(item.job): item.job for item in (*self._runner.running, *self._waiting) if item.job is not None}
        jobs |= {id(item): item for item in inbox if isinstance(item, Job)}
        for command in commands:
            command.outcome.set_exception(stopped)
        for job in jobs.values():
            if job.num_unfinished:
                job.on_done(stopped)
        for item in inbox:
            if isinstance(item, WeightUpdate):
                item.outcome.set_exception(stopped)
