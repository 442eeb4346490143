"""Fixtures for all tests: real servers, a run id for each test, connections to NATS and S3."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol import seals
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests import examples, forked, rewritten, servers

_numbers = itertools.count(1)
examples.take_effect()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other by spinning: slow on a busy machine
_state = tempfile.TemporaryDirectory(prefix="penstock-state-")  # of this process of pytest and its children
os.environ.setdefault(seals.KEY_FILE, f"{_state.name}/seal.key")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the hundreds of processes compiles every module again


def pytest_configure() -> None:
    """Handle SIGINT even in the background job of a script, whose shell ignores it for all its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    structlog.configure = functools.partial(_configure_uncached, structlog.configure)
    # Else every traceback that is logged unconfigured is drawn with the values of all variables: most of the time of some tests.
    structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback


def _configure_uncached(configure: Callable[..., None], **settings: Any) -> None:
    """Configure logging so that it can be reset: a cached logger would keep the level that one test has set."""
    configure(**settings | {"cache_logger_on_first_use": False})


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage while the tests are imported: what is made stays, and looking through it takes a fifth of the time."""
    gc.disable()
    try:
        rewritten.rewrite_ahead(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# What takes longest by far, the longest first; the many files after them are short.
_LONGEST = (
    "tests/contracts/test_client_contract.py",
    "tests/trainer/algorithm/test_every_preset.py",
    "tests/zoo/test_zoo.py",
    "tests/rollout_service/embedded_engine/test_embedded_engine.py",
    "tests/trainer/learner/test_attention.py",
    "tests/fine_tuning/test_fine_tuning.py",
    "tests/reward_service/test_service.py",
    "tests/trainer/publishing/test_publish.py",
    "tests/trainer/test_trainer_loop.py",
    "tests/rollout_service/weights/test_worker_mid_generation.py",
    "tests/reward_service/user_code/test_user_rewards.py",
    "tests/reward_service/endpoints/test_endpoint_lifecycle.py",
    "tests/system/test_killed_readers.py",
    "tests/trainer/recovery/test_exactly_once.py",
    "tests/rollout_service/weights/test_weight_follower.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist, start with the longest files and those that have slow tests, so that none is left for the end."""
    if hasattr(config, "workerinput"):
        first = {file: place for place, file in enumerate(_LONGEST)}
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (first.get(item.nodeid.partition("::")[0], len(first)), item.path not in slow))


# Files that share what takes long to make, a trained run or an engine: one process of pytest-xdist gets them all.
_TOGETHER = {
    "tests/forensics/test_offline.py": "tests/forensics/replay/test_replay.py",
    **{
        f"tests/contracts/test_{name}_contract.py": "tests/contracts"
        for name in ("adapter", "client", "engine", "teacher")
    },
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """With ``--dist loadfile``, treat files that share a fixture of the session as one."""
    from xdist.scheduler import LoadFileScheduling  # tests run without pytest-xdist, too

    class ByFixture(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _TOGETHER.get(file, file)

    return ByFixture(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the command that installs what skipped tests need."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    needed = [set(re.findall(r"apt(?:-get)? install ([\w.-]+)", reason)) for reason in reasons]
    packages = sorted(set().union(*needed))
    if packages:
        count = sum(map(bool, needed))
        terminalreporter.write_line(f"to run {count} of the skipped tests: apt-get install {' '.join(packages)}")


# Files whose tests start whole runs, services or verbs, and prove nothing about how a new Python interpreter starts.
_FORKED = {
    "tests/client/test_notebook.py",
    "tests/client/test_remote.py",
    "tests/console/tools/test_chat.py",
    "tests/console/web/control/test_fine_tuning_jobs.py",
    "tests/deploy/test_local.py",
    "tests/deploy/test_local_run.py",
    "tests/deploy/test_nats_rights.py",
    "tests/deploy/test_scoring.py",
    "tests/system/test_misfortunes.py",
    "tests/trainer/recovery/test_finished_run.py",
}


@pytest.fixture(scope="module", autouse=True)
def processes_are_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with forked.children() if str(request.path.relative_to(forked.ROOT)) in _FORKED else contextlib.nullcontext():
        yield


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of ``_FORKED``: start the processes of this test as a user does."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen.__base__)


@pytest.fixture(autouse=True)
def leaks_are_reported_in_their_own_test() -> Iterator[None]:
    """Collect garbage after each test, so that an unclosed socket fails the test that left it and not a later one.

    What exists when a test begins is frozen: only what the test made is looked through.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def commands_leave_nothing_behind() -> Iterator[None]:
    """Undo what a command that was called in this process configured: its log, and variables for its children."""
    before = dict(os.environ)
    yield
    structlog.reset_defaults()
    if os.environ != before:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The nats-server of the session (with pytest-xdist, of each worker's); never kill it, see ``own_nats``."""
    server = servers.start_nats(tmp_path_factory.mktemp("nats"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The S3 server of the whole session, with its bucket; never kill it, see ``own_s3``."""
    server = servers.start_s3(tmp_path_factory.mktemp("s3"))
    Blobs(server.settings).ensure_bucket()
    yield server
    server.stop()


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[Callable[[], NatsServer]]:
    """A factory of nats-servers that a test may kill and restart."""
    started: list[NatsServer] = []

    def start() -> NatsServer:
        started.append(servers.start_nats(tmp_path / f"nats-{len(started)}"))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[Callable[[], S3Server]]:
    """A factory of S3 servers, with bucket, that a test may kill and restart."""
    started: list[S3Server] = []

    def start() -> S3Server:
        started.append(servers.start_s3(tmp_path / f"s3-{len(started)}"))
        Blobs(started[-1].settings).ensure_bucket()
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def run_id() -> str:
    """Return a name that no other process of the tests has: runs of one name share a folder of /dev/shm, whatever servers they are on."""
    return f"t{next(_numbers)}{os.environ.get('PYTEST_XDIST_WORKER', '')}"


@pytest.fixture
def nats_settings(nats_server: NatsServer) -> NatsSettings:
    return nats_server.settings


@pytest.fixture
def s3_settings(s3_server: S3Server) -> S3Settings:
    """How to reach the session's S3 server; its bucket exists."""
    return s3_server.settings


@pytest.fixture
def bus(nats_settings: NatsSettings) -> Iterator[Bus]:
    """A connection to the session's nats-server, closed after the test."""
    with Bus.connect(nats_settings, name="test") as connected:
        yield connected


@pytest.fixture
def blobs(s3_settings: S3Settings) -> Blobs:
    """The session's bucket; keep to keys below ``runs/<run_id>/``."""
    return Blobs(s3_settings)


@pytest.fixture
def run_streams(bus: Bus, blobs: Blobs, run_id: str) -> Iterator[str]:
    """Streams, consumers and buckets of ``run_id``, which it returns; deleted after the test."""
    bootstrap(bus, blobs, run_id)
    yield run_id
    delete_run(bus, run_id)
