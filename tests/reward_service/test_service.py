"""The service as a process: packs in, rewards out, whichever process is killed in between."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deploy.processes.servers import S3Server
from penstock.protocol import rewards_offered, streams
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import BlobDenied, BlobMissing
from penstock.protocol.facts import Heartbeat, decode, encode
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry
from penstock.reward_service import pack_progress
from penstock.reward_service.errors import RewardCrashed
from penstock.reward_service.heartbeat import HeartbeatWriter
from penstock.reward_service.pack_scoring import is_permanent
from penstock.reward_service.registry.built_in import BuiltInScorer
from penstock.reward_service.rewards.reward import Verdict
from penstock.reward_service.scores import GroupScores
from tests.groups import make_generated, make_group, make_groups, pack_bytes
from tests.protocol.hostile_packs import HOSTILE
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Service, StartEndpoint, StartService, blocking, good
from tests.servers import wait_for

TEXTS = ["1 2 3", " 1 2 3\n", "3 2 1", ""]


def test_a_pack_is_scored_and_acknowledged(wire: Wire, start_service: StartService) -> None:
    """Each completion gets one reward, by the reward that its task names, and each group is counted in /metrics."""
    service = start_service()
    wire.announce(
        [
            make_group("e0.p0.a0", size=4, texts=TEXTS),
            make_group("e0.p1.a0", size=2, texts=["#### 42", "41"], ground_truth="42", reward_name="gsm8k"),
            make_group(
                "e0.p2.a0", size=1, texts=["\\boxed{4}"], ground_truth=4, reward_name="auto", data_source="math"
            ),
        ]
    )
    found = wire.wait_scored("e0.p0.a0", "e0.p1.a0", "e0.p2.a0")
    assert found["e0.p0.a0"][0].rewards == (1.0, 1.0, 0.0, 0.0)
    assert found["e0.p0.a0"][0].scorer == "exact_match"
    assert found["e0.p1.a0"][0].rewards == (1.0, 0.0)
    assert found["e0.p1.a0"][0].parts == {"has_answer": (1.0, 0.0)}
    assert found["e0.p2.a0"][0].scorer == "math"
    assert len(wire.scored) == 1, "a pack that is scored as a whole is one message"
    counted = httpx.get(f"{service.url}/metrics", timeout=60).text
    assert 'penstock_reward_groups_scored_total{scorer="exact_match"} 1' in counted
    wire.wait_idle()
    assert not wire.dead


def test_groups_of_both_splits_go_to_their_own_readers(wire: Wire, start_service: StartService) -> None:
    start_service()
    wire.announce([make_group("e0.p0.a0", texts=TEXTS, size=4), make_group("eval.v0.p0.s0", split="eval", size=3)])
    wire.wait_scored("e0.p0.a0", "eval.v0.p0.s0")
    assert sorted(len(fact.groups) for fact in wire.scored) == [1, 1]


def test_groups_that_can_never_be_scored_are_dead_lettered_and_others_scored(
    wire: Wire, start_service: StartService
) -> None:
    """An unknown reward and a missing ground truth are dead letters that name only their groups, with the reason."""
    start_service()
    wire.announce(
        [
            make_group("e0.p0.a0", size=4, texts=TEXTS),
            make_group("e0.p1.a0", size=2, reward_name="exact_mach"),
            make_group("e0.p2.a0", size=2, reward_name="gsm8k", ground_truth=None),
            make_group("e0.p3.a0", size=2, reward_name="auto", data_source="unheard/of"),
        ]
    )
    wire.wait_scored("e0.p0.a0")
    letters = {letter.group_ids: letter for letter in wire.wait_dead("e0.p1.a0", "e0.p2.a0", "e0.p3.a0")}
    unknown = letters["e0.p1.a0",]
    assert unknown.reason == "UnknownReward"
    assert "did you mean exact_match" in unknown.detail
    assert unknown.num_delivered == 1
    assert letters["e0.p2.a0",].reason == "BadGroundTruth"
    assert "unheard/of" in letters["e0.p3.a0",].detail
    wire.wait_idle()
    assert set(wire.take()) == {"e0.p0.a0"}
    wait_for(lambda: len([event for event in wire.events if event.kind == "dead"]) == 3, "events of the dead letters")


def test_a_pack_that_cannot_be_read_is_dead_lettered_at_once(wire: Wire, start_service: StartService) -> None:
    """A missing, altered, foreign or hostile object, and a hostile truth, has its reason; the next pack is scored."""
    service, folder = start_service(), f"runs/{wire.run_id}"
    garbage = wire.blobs.put(f"{folder}/garbage", b"PAR1 something else")
    foreign = wire.blobs.put(f"{folder}/foreign", pack_bytes([make_group("e9.p9.a0")]))
    altered = garbage.model_copy(update={"sha256": "0" * 64})
    for name, ref in {"missing": None, "altered": altered, "garbage": garbage, "foreign": foreign}.items():
        wire.publish(make_generated(wire.run_id, [make_group(name)], ref, pack_id=name))
    names = ("token ids are a struct", "a text in a dictionary", "rows of two truths", "described with another reward")
    for number, name in enumerate(names):
        hostile = HOSTILE[name]()
        ref = wire.blobs.put(f"{folder}/hostile{number}", hostile.data)
        group = hostile.described.model_copy(update={"group_id": f"hostile{number}"})
        message = make_generated(wire.run_id, [make_group()], ref, pack_id=f"hostile{number}")
        wire.publish(message.model_copy(update={"groups": (group,)}))
    deep = RewardRequest.model_construct(
        name="exact_match", data_source="", ground_truth="[" * 100_000, extra_info="{}"
    )
    wire.announce([replace(make_group("deep", size=1), reward=deep)], pack_id="deep")
    wire.announce([make_group("good", size=4, texts=TEXTS)], pack_id="good")
    unreadable = ("garbage", "foreign", "deep", *(f"hostile{number}" for number in range(len(names))))
    expected = {"missing": "BlobMissing", "altered": "BlobCorrupt", **dict.fromkeys(unreadable, "PackError")}
    letters = {letter.group_ids[0]: letter for letter in wire.wait_dead(*expected)}
    assert {name: letter.reason for name, letter in letters.items()} == expected
    assert {letter.num_delivered for letter in letters.values()} == {1}
    assert "not JSON" in letters["deep"].detail
    assert set(wire.wait_scored("good")) == {"good"}
    wire.wait_idle()
    assert service.alive()


def test_a_pack_that_may_not_be_read_gets_the_attempts_of_other_failures() -> None:
    assert is_permanent(BlobMissing("no such object"))
    assert not is_permanent(BlobDenied("it may not be read"))


async def test_a_built_in_reward_that_raises_fails_only_its_group() -> None:
    def judge(completions: tuple[str, ...], truth: object) -> list[Verdict]:
        if truth == "bad":
            raise ZeroDivisionError("nobody foresaw this")
        return [Verdict(1.0)] * len(completions)

    groups = [
        GroupTexts(
            group_id=truth,
            prompt_text="",
            completions=("x",),
            finish_reasons=("stop",),
            reward=RewardRequest(name="ours", ground_truth=json.dumps(truth)),
        )
        for truth in ("good", "bad")
    ]
    good, bad = await BuiltInScorer(
        "ours", lambda group: judge(group.completions, json.loads(group.reward.ground_truth or ""))
    ).score(groups, attempt=1)
    assert isinstance(good, GroupScores)
    assert isinstance(bad, RewardCrashed)
    assert "ours raised ZeroDivisionError: nobody foresaw this (group bad)" in str(bad)


def test_a_wall_clock_step_does_not_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait without a call is measured in seconds even while the wall clock is set back an hour."""
    before, wall = pack_progress.now(), time.time()
    monkeypatch.setattr(time, "time", lambda: wall - 3600.0)
    assert before <= pack_progress.now() < before + 60.0


def test_packs_wait_while_s3_is_unreachable(
    bus: Bus, nats_settings: NatsSettings, own_s3: Callable[[], S3Server], run_streams: str, tmp_path: Path
) -> None:
    """An unreachable store is no attempt: the pack waits over any number of deliveries and is scored later."""
    store = own_s3()
    wire = Wire(bus, Blobs(store.settings), run_streams)
    service = Service(
        run_streams, nats_settings, store.settings, tmp_path, ["reward_service.endpoint_attempts=1"]
    ).ready()
    try:
        groups = [make_group("e0.p0.a0", size=4, texts=TEXTS)]
        ref = wire.blobs.put(f"runs/{wire.run_id}/pack", pack_bytes(groups))
        store.kill()
        wire.publish(make_generated(wire.run_id, groups, ref))
        consumer = streams.generated_consumer(wire.run_id)
        wait_for(lambda: bus.consumer_state(consumer).wait().num_ack_pending == 1, "the pack to be taken")
        store.restart()
        assert wire.wait_scored("e0.p0.a0")["e0.p0.a0"][0].rewards == (1.0, 1.0, 0.0, 0.0)
        wire.wait_idle()
        assert not wire.dead
    finally:
        service.kill()


def test_sigterm_finishes_packs_in_progress(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    slow, asked, answer = blocking(0.25)
    service = start_service("reward_service.drain_s=30")
    name = f"slow-{wire.run_id}"
    service.register(name, start_endpoint(slow).url)
    wire.announce([make_group("e0.p0.a0", size=2, reward_name=name)])
    assert asked.wait(60)
    service.signal(signal.SIGTERM)
    wait_for(lambda: "draining" in service.output, "the service to notice SIGTERM")
    answer.set()
    assert service.wait() == 0, service.output
    assert wire.take()["e0.p0.a0"][0].rewards == (0.25, 0.25)
    wire.wait_idle()
    registry = wire.bus.key_value(streams.registry_bucket().bucket).wait().entries(aged=True).wait()
    assert rewards_offered.current_offers(registry, run_id=wire.run_id) == []


@pytest.mark.slow
def test_sigterm_requeues_unfinished_packs(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """A pack that hangs beyond the drain time is requeued at once, for another replica."""
    slow, asked, answer = blocking(0.25)
    service = start_service("reward_service.drain_s=0")
    name = f"slow-{wire.run_id}"
    endpoint = start_endpoint(slow)
    service.register(name, endpoint.url)
    wire.announce([make_group("e0.p0.a0", size=2, reward_name=name)])
    assert asked.wait(60)
    service.signal(signal.SIGTERM)
    assert service.wait() == 0, service.output
    answer.set()
    endpoint.behaviour = good(0.5)
    start_service(replica="r1")
    assert wire.wait_scored("e0.p0.a0")["e0.p0.a0"][0].rewards == (0.5, 0.5)


@pytest.mark.slow
def test_replicas_share_the_work(wire: Wire, start_service: StartService) -> None:
    """Two replicas bound to one consumer score every pack once between them."""
    services = [start_service(replica="r0"), start_service(replica="r1")]
    ids = []
    for number in range(12):
        groups = make_groups(3, size=2, epoch=number)
        ids += [group.group_id for group in groups]
        wire.announce(groups, pack_id=f"p{number}")
    found = wire.wait_scored(*ids)
    wire.wait_idle()
    assert all(len(times) == 1 for times in found.values())
    live = wire.bus.key_value(streams.live_bucket(wire.run_id).bucket).wait()

    def counted() -> bool:
        beats = [decode(entry.value, Heartbeat) for entry in live.entries().wait()]
        return len(beats) == 2 and sum(beat.figures["groups_scored"] for beat in beats) == len(ids)

    wait_for(counted, "heartbeats that add up to every group")
    assert all(service.alive() for service in services)


@pytest.mark.slow
def test_every_replica_offers_its_rewards_in_the_registry(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """The registry bucket has the reward names available to a run, also of endpoints registered at another replica."""
    first, _ = start_service(replica="r0"), start_service(replica="r1")
    name = f"mine-{wire.run_id}"
    first.register(name, start_endpoint(good()).url)
    registry = wire.bus.key_value(streams.registry_bucket().bucket).wait()

    def offers() -> list[rewards_offered.RewardsOffered]:
        return rewards_offered.current_offers(registry.entries(aged=True).wait(), run_id=wire.run_id)

    wait_for(lambda: sum(name in offer.names for offer in offers()) == 2, "both replicas to offer the endpoint")
    assert rewards_offered.names_not_offered({name, "gsm8k", "auto", "exact_match", "typo"}, offers()) == {"typo"}
    assert offers()[0].by_source["openai/gsm8k"] == "gsm8k"


class _Offers:
    """A bucket with the offers of a replica that was killed 700 s ago, and of one that is there."""

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def entries(self, *, aged: bool) -> list[Entry]:
        record = encode(rewards_offered.RewardsOffered(run_id="r", replica="x", at=time.time(), names=("x",)))
        ages = {"dead": 700.0, "there": 1.0} if aged else {}
        return [Entry(rewards_offered.key(name), record, 1, age_s=age_s) for name, age_s in ages.items()]

    async def delete(self, key: str) -> None:
        self.deleted.append(key)


async def test_the_record_of_a_replica_killed_long_ago_is_deleted() -> None:
    """A starting replica deletes the offers of replicas killed long ago, so that the shared bucket stays bounded."""
    offers: Any = _Offers()
    others: dict[str, Any] = dict.fromkeys(
        ("bus", "live", "consumer", "registry", "reward_registry", "metrics", "activity"), _Offers()
    )
    done = asyncio.Event()
    done.set()
    await HeartbeatWriter(offers=offers, replica="own", **others).run(done)
    assert offers.deleted == [rewards_offered.key("dead"), rewards_offered.key("own")]


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(
    wire: Wire, start_service: StartService, tmp_path: Path, nats_settings: NatsSettings, s3_settings: S3Settings
) -> None:
    running = start_service()
    folder = tmp_path / "second"
    folder.mkdir()
    port = running.url.rsplit(":", 1)[1]
    second = Service(wire.run_id, nats_settings, s3_settings, folder, [f"reward_service.port={port}"])
    assert second.wait(60) == 1
    assert "reward_service.port" in second.output
    assert "Traceback" not in second.output


def test_a_run_that_was_not_bootstrapped_is_refused_with_the_fix(
    nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path, run_id: str, wire: Wire
) -> None:
    """Without the run's streams the service exits at once and says how to create them."""
    service = Service(f"{run_id}-absent", nats_settings, s3_settings, tmp_path)
    assert service.wait(60) == 1
    assert "penstock bootstrap" in service.output
    assert "Traceback" not in service.output
