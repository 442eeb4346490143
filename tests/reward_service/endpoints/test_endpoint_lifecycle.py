"""Endpoints are registered, hang, are replaced, drained and lost during a run: no group is lost or scored twice."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.groups import make_group, make_groups
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Answer, StartEndpoint, StartService, blocking, good, raw
from tests.servers import wait_for

from penstock.protocol import streams
from penstock.protocol.streams import StreamLimits


def test_a_hung_endpoint_slows_no_other_pack(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service("reward_service.concurrency=1")
    behave, asked, release = blocking(0.5)
    stuck, fine = f"stuck-{wire.run_id}", f"fine-{wire.run_id}"
    service.register(stuck, start_endpoint(behave).url, timeout_s=60)
    service.register(fine, start_endpoint(good(1.0)).url)
    names = [f"stuck{i}" for i in range(12)]
    for name in names:
        wire.announce([make_group(name, size=2, reward_name=stuck)], pack_id=name)
    assert asked.wait(20)
    for number in range(5):
        pack = [
            make_group(f"fine{number}", size=2, reward_name=fine),
            make_group(f"built-in{number}", size=1, texts=["1 2 3"]),
        ]
        wire.announce(pack, pack_id=f"fine{number}")
    found = wire.wait_scored(*(f"{kind}{i}" for kind in ("fine", "built-in") for i in range(5)))
    assert not set(names) & set(found)
    release.set()
    found = wire.wait_scored(*names)
    wire.wait_idle()
    assert {len(times) for times in found.values()} == {1}
    assert not wire.dead


def test_a_new_version_in_the_middle_of_a_run_scores_what_the_old_one_did_not(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Calls in progress finish at the old version, waiting groups go to the new; each is scored once."""
    service = start_service()
    behave, asked, release = blocking(0.25)
    name = f"mine-{wire.run_id}"
    limits: dict[str, Any] = {"concurrency": 1, "batch_size": 1, "timeout_s": 60}
    service.register(name, start_endpoint(behave).url, version="1", **limits)
    wire.announce([make_group("first", size=1, reward_name=name)], pack_id="first")
    assert asked.wait(20)
    wire.announce([make_group("second", size=1, reward_name=name)], pack_id="second")

    def live() -> dict[str, Any]:
        return service.get(f"/v1/endpoints/{name}")["live"]

    wait_for(lambda: live()["waiting"] == 1, "the second group to stand in line")
    new = start_endpoint(good(0.75))
    assert service.register(name, new.url, version="2", **limits).status_code == 409
    assert service.register(name, new.url, version="2", replace=True, **limits).status_code == 201
    wire.announce([make_group("third", size=1, reward_name=name)], pack_id="third")
    wire.wait_scored("second", "third")
    assert live()["finishing"] == {f"{name}@1": 1}
    release.set()
    found = wire.wait_scored("first", "second", "third")
    wire.wait_idle()
    said = {group_id: [(times.scorer, times.rewards) for times in found[group_id]] for group_id in found}
    assert said == {
        "first": [(f"{name}@1", (0.25,))],
        "second": [(f"{name}@2", (0.75,))],
        "third": [(f"{name}@2", (0.75,))],
    }
    assert live()["finishing"] == {}


def test_an_endpoint_is_in_service_while_its_lease_is_renewed(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Not renewed, it is out of service and not offered, and its groups wait; renewed, it scores them."""
    service = start_service("reward_service.endpoint_attempts=1")
    endpoint, name = start_endpoint(good(0.5)), f"leased-{wire.run_id}"
    service.register(name, endpoint.url, lease_s=1)

    def state() -> str:
        return service.get(f"/v1/endpoints/{name}")["live"]["state"]

    assert state() == "in service"
    wait_for(lambda: state() == "LeaseExpired", "the lease to end")
    wire.announce([make_group("g", size=1, reward_name=name)])
    assert wire.wait_requeued().data["reason"] == "LeaseExpired"
    assert not endpoint.requests

    def renewed() -> bool:
        answer = service.post(f"/v1/endpoints/{name}/lease", {"version": "1", "url": endpoint.url})
        assert answer.json() == {"lease_s": 1.0}
        return "g" in wire.take()

    wait_for(renewed, "the group to be scored")
    assert not wire.dead, "a delivery at which nobody was asked is no attempt"
    other = {"version": "2", "url": endpoint.url}
    assert service.post(f"/v1/endpoints/{name}/lease", other).status_code == 409
    assert service.post(f"/v1/endpoints/absent-{wire.run_id}/lease", other).status_code == 404


def test_a_drained_endpoint_gets_no_calls_until_it_is_resumed(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Drained at one replica it is drained at all; its groups wait, for a bounded time; resumed, they are scored."""
    service = start_service("reward_service.patience_s=10")
    endpoint, name = start_endpoint(good(0.5)), f"drained-{wire.run_id}"
    service.register(name, endpoint.url)
    assert service.post(f"/v1/endpoints/{name}/drain").json()["live"]["state"] == "EndpointDrained"
    wire.announce([make_group("g", size=1, reward_name=name)], pack_id="a")
    wire.wait_requeued()
    assert service.post(f"/v1/endpoints/{name}/resume").json()["live"]["state"] == "in service"
    wire.wait_scored("g")
    service.post(f"/v1/endpoints/{name}/drain")
    wire.announce([make_group("late", size=1, reward_name=name)], pack_id="b")
    (letter,) = wire.wait_dead("late", deadline_s=60)
    assert letter.reason == "EndpointDrained"
    assert [request["groups"][0]["group_id"] for request in endpoint.requests] == ["g"]
    assert service.post(f"/v1/endpoints/absent-{wire.run_id}/drain").status_code == 404


@pytest.mark.slow
def test_a_pack_that_one_replica_scored_in_part_is_not_scored_again_by_another(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Packs with a failing group alternate between two replicas: the other groups are scored and announced once."""
    services = [start_service("reward_service.endpoint_attempts=1000", replica=f"r{i}") for i in range(2)]
    sick, fine = start_endpoint(raw("starting", 400)), start_endpoint(good(0.5))
    services[0].register(f"sick-{wire.run_id}", sick.url)
    services[0].register(f"fine-{wire.run_id}", fine.url)
    ids = []
    for number in range(6):
        pack = [make_group(f"{kind}{number}", size=1, reward_name=f"{kind}-{wire.run_id}") for kind in ("sick", "fine")]
        ids += [group.group_id for group in pack]
        wire.announce(pack, pack_id=f"p{number}")

    def passed_around() -> bool:
        sources = {event.source for event in wire.events if event.kind == "reward_error"}
        return len(sources) == 2 and len(sick.requests) >= 18

    wait_for(passed_around, "both replicas to have met failing groups")
    sick.behaviour = good(0.75)
    found = wire.wait_scored(*ids, deadline_s=90)
    wire.wait_idle()
    assert {len(times) for times in found.values()} == {1}
    assert len([group for request in fine.requests for group in request["groups"]]) == 6
    assert not wire.dead


def test_of_two_replicas_one_is_killed_and_nothing_is_lost(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """SIGKILL while scoring: every group is scored; a duplicate has the same id, so a trainer drops it."""
    wire.bus.ensure_consumer(streams.generated_consumer(wire.run_id, StreamLimits(ack_wait_s=1.0))).wait()
    victim, survivor = start_service(replica="r0"), start_service(replica="r1")
    asked, release = threading.Event(), threading.Event()

    def slow(request: dict[str, Any]) -> Answer:
        asked.set()
        release.wait(0.2)
        return good(0.5)(request)

    name = f"slow-{wire.run_id}"
    victim.register(name, start_endpoint(slow).url, concurrency=2, batch_size=3)
    ids = []
    for number in range(20):
        pack = [make_group(f"s{number}-{i}", size=2, reward_name=name) for i in range(2)]
        pack += make_groups(2, size=2, epoch=number)
        ids += [group.group_id for group in pack]
        wire.announce(pack, pack_id=f"p{number}")
    assert asked.wait(20)
    wait_for(lambda: len(wire.take()) >= 8, "some groups to be scored")
    victim.kill()
    release.set()
    found = wire.wait_scored(*ids, deadline_s=90)
    wire.wait_idle()
    assert set(found) == set(ids)
    assert survivor.alive()
    assert not wire.dead
    for times in found.values():
        assert len({scored.generated.group_id for scored in times}) == 1


@pytest.mark.slow
def test_secrets_are_used_and_never_shown(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint, tmp_path: Path
) -> None:
    """A registration's secrets are used by each replica, after a restart too, and shown by no call, log or registry."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"boss admin {'a' * 16}\nlab register {'b' * 16}\n")
    given = f"reward_service.tokens_file={tokens}"
    first = start_service(given, replica="r0")
    endpoint, name = start_endpoint(good(0.5)), f"secret-{wire.run_id}"
    key, api_key = "whsec_" + base64.b64encode(b"s" * 32).decode(), "sk-very-secret"
    boss, lab = "a" * 16, "b" * 16
    mine: dict[str, Any] = {"name": name, "url": endpoint.url, "secrets": [key], "api_key": api_key}
    registered = first.post("/v1/endpoints", mine, token=lab)
    assert registered.status_code == 201, registered.text
    refused = first.post("/v1/endpoints", {**mine, "secrets": [key, "whsec_bad"]}, token=lab)
    assert refused.status_code == 422

    first.kill()
    second = start_service(given, replica="r1")
    wire.announce([make_group("g", size=1, reward_name=name)])
    wire.wait_scored("g")
    assert endpoint.headers[0]["authorization"] == f"Bearer {api_key}"
    assert endpoint.headers[0]["webhook-signature"].startswith("v1,")

    headers = {"authorization": f"Bearer {boss}"}
    shown = [registered.text, refused.text, first.output, second.output]
    for path in ("/v1/endpoints", f"/v1/endpoints/{name}", "/v1/rewards", "/metrics", "/openapi.json"):
        shown.append(httpx.get(second.url + path, headers=headers, timeout=60).text)
    registry = wire.bus.key_value(streams.registry_bucket().bucket).wait().entries().wait()
    shown.append(json.dumps([entry.value.decode("utf-8", "replace") for entry in registry]))
    assert name in shown[-1]
    for text in shown:
        assert key not in text
        assert key.removeprefix("whsec_") not in text
        assert api_key not in text
    assert second.delete(name, token=boss).status_code == 204
    assert wire.bus.key_value(streams.secrets_bucket().bucket).wait().get(f"endpoint.{name}").wait() is None
