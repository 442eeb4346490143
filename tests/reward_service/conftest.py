"""Fixtures of the reward service: replicas of it for the test's run, endpoints, and clients on both sides of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, RunEvent
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.reward_service.scores import Outcome
from tests import groups as builders
from tests.reward_service.processes import (
    ROOT,
    Behaviour,
    EndpointServer,
    Serve,
    Served,
    Service,
    StartEndpoint,
    StartService,
)
from tests.servers import wait_for


@pytest.fixture
def start_service(
    run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[StartService]:
    """A factory of replicas of the reward service, killed after the test."""
    started: list[Service] = []

    def start(*overrides: str, replica: str = "r0", environ: dict[str, str] | None = None, cwd: Path = ROOT) -> Service:
        folder = tmp_path / replica
        folder.mkdir(exist_ok=True)
        given = [f"reward_service.id={replica}-{run_streams}", *overrides]
        started.append(Service(run_streams, nats_settings, s3_settings, folder, given, environ, cwd))
        return started[-1].ready()

    yield start
    for service in started:
        service.kill()


@contextlib.contextmanager
def replica_of(run_id: str, nats: NatsSettings, s3: S3Settings, folder: Path, *overrides: str) -> Iterator[Service]:
    """One replica, with the streams of a run that exist as long as it does."""
    with Bus.connect(nats, name="test") as bus:
        bootstrap(bus, Blobs(s3), run_id)
        service = Service(run_id, nats, s3, folder, overrides).ready()
        try:
            yield service
        finally:
            service.kill()
            delete_run(bus, run_id)


@pytest.fixture(scope="module")
def shared_service(
    nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """One replica for the tests of a file that only talk to its API."""
    folder = tmp_path_factory.mktemp("shared-reward")
    with replica_of("shared-reward", nats_server.settings, s3_server.settings, folder) as service:
        yield service


def asking(group_id: str, reward: str, *texts: str, truth: str | None = '"4"', data_source: str = "") -> Group:
    """Return a group with these completions, to be scored by a reward."""
    group = builders.make_group(group_id, size=len(texts), texts=list(texts))
    return replace(group, reward=RewardRequest(name=reward, data_source=data_source, ground_truth=truth))


@pytest.fixture
def start_endpoint() -> Iterator[StartEndpoint]:
    """A factory of HTTP endpoints with a given behaviour, closed after the test."""
    started: list[EndpointServer] = []

    def start(behaviour: Behaviour) -> EndpointServer:
        started.append(EndpointServer(behaviour))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """A factory of commands that serve a reward, such as ``serve``, killed after the test."""
    started: list[Served] = []

    def start(*arguments: str, module: str = "penstock.reward_service") -> Served:
        started.append(Served([module, *arguments], tmp_path / f"serve{len(started)}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()


class Scripted:
    """A reward whose outcomes a test gives: by group, or one for all."""

    slow = False

    def __init__(self, outcomes: Outcome | dict[str, Outcome]) -> None:
        self._outcomes = outcomes

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        outcomes = self._outcomes
        return [outcomes[group.group_id] if isinstance(outcomes, dict) else outcomes for group in groups]


async def delivered(bus: Bus, run_id: str, fact: GroupGenerated, traceparent: str) -> Delivery[GroupGenerated]:
    """Publish the announcement of a pack, and return its first delivery."""
    await bus.publish(subjects.generated(run_id, "train"), fact, msg_id="1", traceparent=traceparent)
    [delivery] = await (await bus.inbox(streams.generated_consumer(run_id), GroupGenerated)).fetch(1, 30.0)
    return delivery


class Wire:
    """The clients of the reward service: a worker that announces packs and a trainer that reads rewards."""

    def __init__(self, bus: Bus, blobs: Blobs, run_id: str) -> None:
        self.bus, self.blobs, self.run_id = bus, blobs, run_id
        self.scored: list[GroupScored] = []
        self.dead: list[DeadLetter] = []
        self.events: list[RunEvent] = []
        self._inboxes: list[Inbox[GroupScored]] = [
            bus.inbox(streams.scored_consumer(run_id, split), GroupScored).wait() for split in ("train", "eval")
        ]
        bus.tail(f"{run_id}-dead", subjects.dead(run_id), DeadLetter, self.dead.append, from_start=True).wait()
        bus.tail(f"{run_id}-events", subjects.events(run_id), RunEvent, self.events.append, from_start=True).wait()

    def announce(self, groups: Sequence[Group], *, pack_id: str = "p0") -> None:
        ref = self.blobs.put(f"runs/{self.run_id}/groups/v0/{pack_id}.parquet", builders.pack_bytes(groups))
        self.publish(builders.make_generated(self.run_id, groups, ref, pack_id=pack_id))

    def publish(self, generated: GroupGenerated) -> None:
        subject = subjects.generated(self.run_id, generated.groups[0].split)
        self.bus.publish(subject, generated, msg_id=f"g:{generated.pack_id}").wait()

    def take(self) -> dict[str, list[ScoredGroup]]:
        """Receive the rewards so far; return every announcement of every group."""
        for inbox in self._inboxes:
            for delivery in inbox.fetch(100, 0.1).wait():
                delivery.ack().wait()
                self.scored.append(delivery.fact)
        found: dict[str, list[ScoredGroup]] = {}
        for fact in self.scored:
            for group in fact.groups:
                found.setdefault(group.generated.group_id, []).append(group)
        return found

    def wait_scored(self, *group_ids: str, deadline_s: float = 180.0) -> dict[str, list[ScoredGroup]]:
        wait_for(lambda: set(group_ids) <= set(self.take()), f"rewards of {', '.join(group_ids)}", deadline_s)
        return self.take()

    def wait_dead(self, *group_ids: str, deadline_s: float = 180.0) -> list[DeadLetter]:
        def buried() -> bool:
            return set(group_ids) <= {group_id for letter in self.dead for group_id in letter.group_ids}

        wait_for(buried, f"dead letters of {', '.join(group_ids)}", deadline_s)
        return self.dead

    def wait_requeued(self) -> RunEvent:
        """Return the first event of a group that waits."""
        wait_for(lambda: any(event.kind == "reward_error" for event in self.events), "the group to wait")
        return next(event for event in self.events if event.kind == "reward_error")

    def wait_idle(self) -> None:
        """Wait until no announced pack is pending or unacknowledged."""
        spec = streams.generated_consumer(self.run_id)

        def idle() -> bool:
            state = self.bus.consumer_state(spec).wait()
            return state.num_pending == 0 and state.num_ack_pending == 0

        wait_for(idle, "the reward service to finish")


@pytest.fixture
def wire(bus: Bus, blobs: Blobs, run_streams: str) -> Wire:
    """Clients on both sides of the reward service."""
    return Wire(bus, blobs, run_streams)
