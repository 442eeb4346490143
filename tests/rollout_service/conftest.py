"""Fixtures for tests of a worker: an engine with faults on demand, worker processes, and the other services."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.deploy.processes.child import Child
from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from tests.agents.proxy.agent_model import SMOLLM2, write_model
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, WorkerRun, worker_process


@pytest.fixture
def faulty_engine() -> Iterator[FaultyEngine]:
    """An engine without faults until a test sets some."""
    with FaultyEngine() as engine:
        yield engine


@pytest.fixture
def trainer_side(bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path) -> TrainerSide:
    """The trainer's and the reward service's side of a separate run."""
    return TrainerSide(bus, blobs, run_streams, tmp_path)


@pytest.fixture
def start_worker(
    run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[Callable[..., Child]]:
    """Start workers of the run by id, with overrides; a failed test prints their logs."""
    started: list[Child] = []

    def start(worker_id: str, *overrides: str) -> Child:
        started.append(worker_process(tmp_path, run_streams, worker_id, nats_settings, s3_settings, *overrides))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        print(f"── log of {child.name} ──\n{child.log_tail(40)}")


@pytest.fixture
def run(
    bus: Bus,
    blobs: Blobs,
    run_streams: str,
    tmp_path: Path,
    faulty_engine: FaultyEngine,
    start_worker: Callable[..., Child],
) -> WorkerRun:
    return WorkerRun(bus, blobs, run_streams, tmp_path, faulty_engine, start_worker)


_numbers = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SMOLLM2)


@pytest.fixture
def name() -> str:
    """A name that no other test of this process registers an environment under."""
    return f"guess-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def store(bus: Bus) -> Iterator[KeyValue]:
    """The bucket of registered environments, on the session's NATS."""
    bus.ensure_bucket(streams.environments_bucket()).wait()
    bucket = bus.key_value(streams.environments_bucket().bucket).wait()
    yield bucket
    for entry in bucket.entries().wait():
        bucket.delete(entry.key).wait()
