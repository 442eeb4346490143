"""A worker and a reward service survive failures of all their dependencies; nothing is lost or duplicated."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.bus import Bus
from tests.power import small_disk
from tests.servers import require_package, start_nats, start_s3, wait_for
from tests.system.rollout_and_reward import SMALL, Services, environment_of_clock, fill

OUTAGE_S = float(os.environ.get("PENSTOCK_TEST_OUTAGE_S", "2"))
LIMITS = StreamLimits(max_bytes=SMALL, ack_wait_s=3.0)


@pytest.fixture
def services(
    own_nats: Callable[[], NatsServer], own_s3: Callable[[], S3Server], run_id: str, tmp_path: Path
) -> Iterator[Services]:
    nats = own_nats()
    with Bus.connect(nats.settings, name="test") as bus:
        yield Services(nats, own_s3(), run_id, tmp_path, LIMITS, bus)


def outage(started: float) -> None:
    """Wait until the outage that began at ``started`` has lasted long enough."""
    wait_for(lambda: time.monotonic() - started > OUTAGE_S, "the outage", deadline_s=OUTAGE_S + 30)


@pytest.mark.slow
def test_all_services_wait_for_a_killed_trainer(
    nats_server: NatsServer, s3_server: S3Server, run_id: str, tmp_path: Path
) -> None:
    """The bounded streams fill up, both services name what they wait for, and a later trainer gets every group once."""
    limits = StreamLimits(max_generated=2, max_scored=2)
    with Bus.connect(nats_server.settings, name="test") as bus:
        services = Services(nats_server, s3_server, run_id, tmp_path, limits, bus)
        with services.serve():
            services.issue(8)
            wait_for(
                lambda: services.state("reward", "r0") == "waiting for the trainer", "the reward service's heartbeat"
            )
            wait_for(
                lambda: services.state("rollout", "w0") == "waiting for the reward service", "the worker's heartbeat"
            )
            assert (services.holds("scored"), services.holds("generated")) == (2, 2)
            assert "stream is full, waiting" in services.worker.log_tail()
            assert "stream is full, waiting" in services.reward.output
            services.wait_complete()
            wait_for(
                lambda: not services.state("rollout", "w0").startswith("waiting for the"), "the worker to continue"
            )


@pytest.mark.slow
def test_killed_servers_are_waited_for(services: Services) -> None:
    """NATS, then S3, SIGKILLed with packs in the engine and restarted: services name the server and lose nothing."""

    def away(server: NatsServer | S3Server, logs: Sequence[Path], words: str) -> None:
        services.engine.flow.clear()
        services.issue(2)
        wait_for(lambda: services.engine.num_running > 0, "the engine to be busy")
        server.kill()
        services.engine.flow.set()
        started = time.monotonic()
        wait_for(lambda: all(words in log.read_text() for log in logs), f"{words!r} in {logs}")
        outage(started)
        server.restart()
        services.issue(2)
        services.wait_complete()

    with services.serve():
        away(services.nats, [services.worker.log, services.reward.log], "NATS unreachable")
        away(
            services.s3, [services.worker.log], services.s3.settings.endpoint
        )  # without a stored pack no rewards are requested


@pytest.mark.slow
def test_a_full_disk_below_s3_is_waited_for(own_nats: Callable[[], NatsServer], run_id: str, tmp_path: Path) -> None:
    """While the object store's disk is full, packs are kept; after space is freed they are stored and scored."""
    nats = own_nats()
    with small_disk(tmp_path / "disk", 8 * SMALL) as disk:
        s3 = start_s3(disk)
        try:
            with Bus.connect(nats.settings, name="test") as bus:
                services = Services(nats, s3, run_id, tmp_path, LIMITS, bus)
                with services.serve():
                    ballast = fill(disk)
                    services.issue(4)
                    services.engine.wait_for_requests(2)
                    wait_for(lambda: "store pack pack-" in services.worker.log.read_text(), "the worker to say")
                    assert services.holds("generated") == 0
                    ballast.unlink()
                    services.wait_complete()
        finally:
            s3.kill()


@pytest.mark.slow
def test_a_full_disk_below_nats_is_waited_for(s3_server: S3Server, run_id: str, tmp_path: Path) -> None:
    """A broker with a full disk, restarted after space is freed: both services report it, and every group arrives."""
    with small_disk(tmp_path / "disk", 16 * SMALL) as disk:
        nats = start_nats(disk)
        try:
            with Bus.connect(nats.settings, name="test") as bus:
                services = Services(nats, s3_server, run_id, tmp_path, LIMITS, bus)
                with services.serve():
                    services.engine.flow.clear()
                    services.issue(4)
                    services.engine.wait_for_requests(2)
                    ballast = fill(disk)
                    services.engine.flow.set()
                    words = "is connected but does not answer: check its log, and whether its disk is full"
                    wait_for(lambda: words in services.reward.output, "the reward service to say so")
                    if OUTAGE_S > 15.0:  # a publication is tried for so long
                        wait_for(lambda: words in services.worker.log.read_text(), "the worker to report it")
                    ballast.unlink()
                    nats.kill()
                    nats.restart()
                    services.wait_complete()
        finally:
            nats.kill()


@pytest.mark.slow
def test_a_reached_quota_of_nats_is_waited_for(services: Services) -> None:
    """A broker over its storage quota: both services report that it is full, keep running, and lose nothing."""
    with services.serve():
        services.engine.flow.clear()
        services.issue(4)
        services.engine.wait_for_requests(2)
        services.nats.kill()
        services.nats.resize(max_store_gb=0.001 / 1024)
        services.nats.restart()
        services.engine.flow.set()
        wait_for(lambda: "storage of NATS" in services.worker.log.read_text(), "the worker to say so")
        wait_for(lambda: "its storage is full" in services.reward.output, "the reward service to say so")
        services.nats.kill()
        services.nats.resize(max_store_gb=1.0)
        services.nats.restart()
        services.wait_complete()


@pytest.mark.slow
def test_a_wall_clock_that_steps_back_loses_nothing(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks step ten minutes back in mid-pack, and forward again: nothing expires, is doubled or dead-lettered."""
    library = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
    require_package(str(library), "faketime")
    clock = services.folder / "clock"
    clock.write_text("+0\n")
    for name, value in environment_of_clock(str(library), clock).items():
        monkeypatch.setenv(name, value)
    with services.serve():
        services.issue(2)
        services.wait_complete()
        services.engine.flow.clear()
        services.issue(3)
        services.engine.wait_for_requests(3)
        clock.write_text("-600\n")
        wait_for(lambda: services.beat_at("rollout", "w0") < time.time() - 500, "the worker's clock to step")
        wait_for(lambda: services.beat_at("reward", "r0") < time.time() - 500, "the reward service's clock to step")
        services.engine.flow.set()
        services.wait_complete()
        clock.write_text("+0\n")
        services.issue(2)
        services.wait_complete()
