"""All services except the trainer, on their own servers: a worker and a reward service process, for tests of faults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol import streams
from penstock.protocol.facts import Heartbeat, decode
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests.groups import make_task
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Service
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached, worker_process
from tests.servers import wait_for

SMALL = 1024 * 1024


class Services:
    """Issues tasks, reads rewards, and reads the heartbeats of the services."""

    def __init__(
        self, nats: NatsServer, s3: S3Server, run_id: str, folder: Path, limits: StreamLimits, bus: Bus
    ) -> None:
        """Bootstrap the run with ``limits`` and publish the first weights; `serve` starts the services."""
        self.nats, self.s3, self.run_id, self.folder = nats, s3, run_id, folder
        blobs = Blobs(s3.settings)
        bootstrap(bus, blobs, run_id, limits)
        self.bus = bus
        self.end = TrainerSide(bus, blobs, run_id, folder)
        self.wire = Wire(bus, blobs, run_id)
        self.end.publish(0)
        self._live = bus.key_value(streams.live_bucket(run_id).bucket).wait()
        self._num_issued = 0

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Run both services; a failed test shows their logs."""
        with FaultyEngine() as engine:
            self.engine = engine
            worker = worker_process(
                self.folder,
                self.run_id,
                "w0",
                self.nats.settings,
                self.s3.settings,
                *attached(engine),
                "worker.packs_in_flight=2",
            )
            reward = Service(self.run_id, self.nats.settings, self.s3.settings, self.folder, ["reward_service.id=r0"])
            try:
                reward.ready()
                self.worker, self.reward = worker, reward
                self.end.wait_applied("w0", 0)
                yield
                assert worker.alive, "the worker died"
                assert reward.alive(), "the reward service died"
            finally:
                worker.kill()
                reward.kill()
                print(f"── worker ──\n{worker.log_tail(60)}\n── reward service ──\n{reward.output[-6000:]}")

    def issue(self, num_packs: int) -> list[str]:
        first, self._num_issued = self._num_issued, self._num_issued + num_packs
        ids = [f"e0.p{number}.a0" for number in range(first, self._num_issued)]
        for group_id in ids:
            self.end.issue(f"pack-{group_id}", [make_task(group_id, group_size=2)])
        return ids

    def holds(self, stage: str) -> int:
        return self.bus.stream_state(f"{self.run_id}-{stage}").wait().num_messages

    def state(self, role: str, service_id: str) -> str:
        """The activity in a service's last heartbeat; empty without one."""
        beat = self._beat(role, service_id)
        return "" if beat is None else beat.state

    def beat_at(self, role: str, service_id: str) -> float:
        """When a service wrote its last heartbeat, by its own clock; 0 when it has none."""
        beat = self._beat(role, service_id)
        return 0.0 if beat is None else beat.at

    def _beat(self, role: str, service_id: str) -> Heartbeat | None:
        entry = self._live.get(streams.heartbeat_key(role, service_id)).wait()
        return None if entry is None else decode(entry.value, Heartbeat)

    def wait_complete(self, deadline_s: float = 60.0) -> None:
        """Wait for the reward of every group issued, and check that each arrived once and none was dead-lettered."""
        ids = [f"e0.p{number}.a0" for number in range(self._num_issued)]
        found = self.wire.wait_scored(*ids, deadline_s=deadline_s)
        wait_for(lambda: self.holds("tasks") == self.holds("generated") == 0, "the queues to be empty", deadline_s)
        found = self.wire.take()
        assert {group_id: len(rewards) for group_id, rewards in found.items()} == dict.fromkeys(ids, 1)
        assert self.wire.dead == []


def fill(disk: Path) -> Path:
    """Write until nothing more fits; returns the file, whose removal frees the space."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


def environment_of_clock(library: str, clock: Path) -> Mapping[str, str]:
    """Return variables that make a process read its wall clock's offset from a file on each call."""
    return {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
