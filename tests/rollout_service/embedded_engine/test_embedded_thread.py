"""What happens to clients when the embedded engine's thread raises an error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.rollout_service.embedded_engine.caches import PrefixCache
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import EngineStopped
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.rollout_service.embedded_engine.sequence import FinishReason, Job, Sampling, Sequence


class BrokenRunner:
    """A runner whose every computation fails, as a bug or exhausted memory would make it."""

    running: list[Sequence] = []  # noqa: RUF012  (stays empty)
    kept = PrefixCache(0)
    has_weights = True

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def start(self, newcomers: list[Sequence]) -> list[Sequence]:
        raise RuntimeError(f"cannot allocate memory for {len(newcomers)} prompts")

    def remove(self, leaving: list[Sequence]) -> None:
        """Do nothing: no sequence runs."""


def engine_of(runner: Any, on_failure: Callable[[], None] = lambda: None) -> EngineThread:
    limits = Limits(max_running=4, max_total_tokens=100, max_prefill_tokens=100)
    return EngineThread(runner, limits, version="0", model_path="model", on_failure=on_failure)


def test_a_failed_engine_thread_fails_its_jobs() -> None:
    failed, answered = threading.Event(), threading.Event()
    errors: list[Exception | None] = []

    def on_done(error: Exception | None) -> None:
        errors.append(error)
        answered.set()

    engine = engine_of(BrokenRunner(), failed.set)
    engine.start()
    job = Job([Sequence("r", (1, 2), Sampling(max_new_tokens=3))], on_done)
    engine.submit(job)
    assert answered.wait(60)
    assert failed.wait(60)
    assert isinstance(errors[0], EngineStopped)
    assert "cannot allocate" in str(errors[0])
    assert not engine.is_alive
    with pytest.raises(EngineStopped, match="restart the process"):
        engine.submit(job)
    with pytest.raises(EngineStopped):
        engine.pause("abort")


class StuckRunner(BrokenRunner):
    def remove(self, leaving: list[Sequence]) -> None:
        raise RuntimeError(f"cannot move {len(leaving)} rows")


def test_a_failed_command_answers_its_caller() -> None:
    """A control action that fails ends the thread; neither its caller nor that of the next one waits for ever."""
    engine = engine_of(StuckRunner())
    answers = [engine.pause("retract"), engine.flush()]  # queued: the thread takes both at once
    engine.start()
    for answer in answers:
        with pytest.raises(EngineStopped, match="cannot move 0 rows"):
            answer.result(60)


class InstantRunner(BrokenRunner):
    """A runner whose sequences end with their first token."""

    def start(self, newcomers: list[Sequence]) -> list[Sequence]:
        for sequence in newcomers:
            sequence.output_ids.append(1)
            sequence.finish = FinishReason("length")
        return newcomers


def test_finished_sequences_are_freed_without_a_garbage_collection() -> None:
    """Nothing that has ended refers back to its job: thousands of completions would stay until a full collection."""
    answered = threading.Event()
    engine = engine_of(InstantRunner())
    engine.start()
    sequences = [Sequence(str(number), (1, 2), Sampling(max_new_tokens=1)) for number in range(2)]
    engine.submit(Job(sequences, lambda _: answered.set()))
    assert answered.wait(60)
    engine.stop()
    assert [sequence.job for sequence in sequences] == [None, None]
