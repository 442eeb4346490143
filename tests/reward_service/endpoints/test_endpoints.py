"""Endpoints that fail: a group waits, is retried, and is scored once or dead-lettered with its reason; never a 0."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from tests.groups import make_group
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Answer, Behaviour, StartEndpoint, StartService, good, raw
from tests.servers import wait_for


def _results(scores: list[Any], **more: Any) -> Behaviour:
    def behave(request: dict[str, Any]) -> Answer:
        results = [{"group_id": group["group_id"], "scores": scores, **more} for group in request["groups"]]
        return 200, {}, json.dumps({"results": results}).encode()

    return behave


BAD: dict[str, tuple[Behaviour, str, str]] = {
    "error500": (raw("out of order", 500), "EndpointFailed", "HTTP 500, 12 bytes"),
    "error404": (raw("who?", 404), "EndpointFailed", "HTTP 404, 4 bytes"),
    "redirect": (raw("", 307, location="http://127.0.0.1:1/"), "EndpointFailed", "HTTP 307"),
    "not-json": (raw("<html>hello</html>"), "EndpointNonsense", "it is not JSON"),
    "empty": (raw(""), "EndpointNonsense", "does not answer as agreed"),
    "huge": (raw(b"[" + b" " * 400_000 + b"]"), "EndpointNonsense", "more than 100000 bytes"),
    "packed": (raw(b"\x1f\x8b", **{"content-encoding": "gzip"}), "EndpointNonsense", "compresses its answer"),
    "no-results": (raw('{"scores": [1, 2]}'), "EndpointNonsense", "results"),
    "other-group": (
        raw('{"results": [{"group_id": "x", "scores": []}]}'),
        "EndpointNonsense",
        "results are missing for other-group",
    ),
    "twice": (
        raw('{"results": [{"group_id": "twice", "scores": []}, {"group_id": "twice", "scores": []}]}'),
        "EndpointNonsense",
        "1 are for other groups or come twice",
    ),
    "wrong-count": (_results([{"score": 1.0}]), "EndpointNonsense", "1 scores for 2 completions"),
    "nan": (_results([{"score": float("nan")}] * 2), "EndpointNonsense", "NaN is not a JSON number"),
    "infinite": (_results([{"score": float("inf")}] * 2), "EndpointNonsense", "Infinity is not a JSON number"),
    "a-string": (_results([{"score": "1.0"}] * 2), "EndpointNonsense", "valid number"),
    "a-bool": (_results([{"score": True}] * 2), "EndpointNonsense", "valid number"),
    "bad-part": (
        _results([{"score": 1.0, "parts": {"a": float("nan")}}] * 2),
        "EndpointNonsense",
        "NaN is not a JSON number",
    ),
    "out-of-range": (_results([{"score": 0.5}, {"score": 7.0}]), "EndpointNonsense", "score 7 is outside [0, 1]"),
    "null": (_results([{"score": 0.5}, {"score": None}]), "ScoreRefused", "completion 1: score is null"),
    "a-key-twice": (raw('{"results": [], "results": []}'), "EndpointNonsense", "'results' twice"),
    "an-error": (_results([{"score": 0.5, "error": "no idea"}, {"score": 1.0}]), "ScoreRefused", "no idea"),
}


@pytest.mark.slow
def test_no_failure_of_an_endpoint_becomes_a_reward(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Every kind of failure is retried and then dead-lettered with a reason that names the endpoint."""
    service = start_service("reward_service.endpoint_attempts=2", "reward_service.max_response_bytes=100000")
    hanging = threading.Event()

    def hang(request: dict[str, Any]) -> Answer:
        hanging.wait(60)
        return good()(request)

    behaviours = {name: behaviour for name, (behaviour, _, _) in BAD.items()} | {"hang": hang}
    expected = {name: (reason, text) for name, (_, reason, text) in BAD.items()}
    expected["hang"] = ("EndpointFailed", "gave no answer within 1 s")
    groups = [make_group("good", size=2, texts=["1 2 3", "x"])]
    for name, behaviour in behaviours.items():
        endpoint = start_endpoint(behaviour)
        limits: dict[str, Any] = {"timeout_s": 1 if name == "hang" else 10, "min_score": 0, "max_score": 1}
        answer = service.register(f"{name}-{wire.run_id}", endpoint.url, **limits)
        assert answer.status_code == 201, answer.text
        groups.append(make_group(name, size=2, reward_name=f"{name}-{wire.run_id}"))
    nowhere = start_endpoint(good())
    nowhere.close()
    service.register(f"nobody-{wire.run_id}", nowhere.url)
    groups.append(make_group("nobody", size=2, reward_name=f"nobody-{wire.run_id}"))
    expected["nobody"] = ("EndpointFailed", "no answer (ClientConnectorError")

    wire.announce(groups)
    assert wire.wait_scored("good")["good"][0].rewards == (1.0, 0.0)
    letters = wire.wait_dead(*expected, deadline_s=60)
    hanging.set()
    for name, (reason, text) in expected.items():
        (letter,) = [letter for letter in letters if name in letter.group_ids]
        assert letter.group_ids == (name,)
        assert letter.reason == reason, name
        assert text in letter.detail, name
        assert f"{name}-{wire.run_id}" in letter.detail, "the reason names the endpoint"
        assert letter.num_delivered == 2
    wire.wait_idle()
    found = wire.take()
    assert set(found) == {"good"}, "a failure is never a reward"
    assert len(found["good"]) == 1, "a redelivery scores only what is missing"
    waits = [event for event in wire.events if event.kind == "reward_error"]
    assert waits[0].data["num_delivered"] == 1
    live = {row["endpoint"]["name"]: row["live"] for row in service.get("/v1/endpoints")}
    assert live[f"wrong-count-{wire.run_id}"]["errors"] == 2
    assert "1 scores for 2 completions" in live[f"wrong-count-{wire.run_id}"]["last_error"]


def test_a_group_waits_for_its_endpoint_and_is_scored_once(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service("reward_service.endpoint_attempts=50")
    endpoint = start_endpoint(raw("starting", 400))
    name = f"flaky-{wire.run_id}"
    service.register(name, endpoint.url, version="7")
    wire.announce([make_group("waits", size=2, reward_name=name), make_group("good", size=1, texts=["1 2 3"])])
    wire.wait_scored("good")
    wait_for(lambda: len(endpoint.requests) >= 2, "a second delivery")
    assert set(wire.take()) == {"good"}
    endpoint.behaviour = good(0.5)
    found = wire.wait_scored("waits")
    wire.wait_idle()
    assert found["waits"][0].rewards == (0.5, 0.5)
    assert found["waits"][0].scorer == f"{name}@7"
    assert set(found["waits"][0].parts) == {"length"}
    assert [len(times) for times in found.values()] == [1, 1]
    assert not wire.dead
    assert len(set(endpoint.keys)) == len(endpoint.requests), "another delivery is another call"


def test_transient_failures_are_retried_within_one_delivery(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """429 and 5xx are retried immediately with the same idempotency key, without a redelivery."""
    service = start_service("reward_service.endpoint_attempts=1")
    answers = [raw("busy", 429, **{"retry-after": "0.1"}), raw("sorry", 503), good(1.0)]

    def get_better(request: dict[str, Any]) -> Answer:
        return answers.pop(0)(request)

    endpoint = start_endpoint(get_better)
    name = f"busy-{wire.run_id}"
    service.register(name, endpoint.url)
    group = make_group("g", size=2, reward_name=name, extra_info={"level": 3}, ground_truth=[1, "a"], data_source="ds")
    wire.announce([group])
    assert wire.wait_scored("g")["g"][0].rewards == (1.0, 1.0)
    assert len(endpoint.keys) == 3
    assert len(set(endpoint.keys)) == 1
    sent = endpoint.requests[0]
    assert sent["reward"] == name
    assert sent["request_id"] == endpoint.keys[0]
    assert sent["groups"] == [
        {
            "group_id": "g",
            "prompt": "sort: 3 1 2",
            "completions": ["completion 0 of g", "completion 1 of g"],
            "data_source": "ds",
            "ground_truth": [1, "a"],
            "extra_info": {"level": 3},
        }
    ]


def test_one_bad_group_of_a_batch_finally_fails_alone(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """A batch that fails as a whole is sent group by group on redelivery, so that the other groups are scored."""

    def picky(request: dict[str, Any]) -> Answer:
        if any(group["group_id"] == "bad" for group in request["groups"]):
            return raw("cannot read group bad", 400)(request)
        return good(0.5)(request)

    service = start_service("reward_service.endpoint_attempts=3")
    endpoint = start_endpoint(picky)
    name = f"picky-{wire.run_id}"
    service.register(name, endpoint.url, batch_size=8)
    wire.announce([make_group(group_id, size=1, reward_name=name) for group_id in ("a", "bad", "b", "c")])
    found = wire.wait_scored("a", "b", "c")
    (letter,) = wire.wait_dead("bad")
    wire.wait_idle()
    assert letter.group_ids == ("bad",)
    assert set(found) == {"a", "b", "c"}
    assert len(endpoint.requests[0]["groups"]) == 4
    assert {len(request["groups"]) for request in endpoint.requests[1:]} == {1}


def test_an_unregistered_endpoint_may_come_back(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service("reward_service.endpoint_attempts=50")
    endpoint = start_endpoint(good(0.5))
    name = f"gone-{wire.run_id}"
    service.register(name, endpoint.url)
    assert service.delete(name).status_code == 204
    wire.announce([make_group("g", size=1, reward_name=name)])
    assert "unregistered" in wire.wait_requeued().data["detail"]
    service.register(name, endpoint.url)
    wire.wait_scored("g")
    assert not wire.dead


def test_a_reward_with_too_many_parts_is_dead_lettered_and_others_are_scored(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """Rewards too large for any message are dead letters; a pack that is too large is announced in pieces."""

    def wordy(request: dict[str, Any]) -> Answer:
        score = {"score": 1.0, "parts": {f"part-{i}": 0.1 for i in range(30)}}
        results = [{"group_id": g["group_id"], "scores": [score] * len(g["completions"])} for g in request["groups"]]
        return 200, {}, json.dumps({"results": results}).encode()

    service = start_service()
    name = f"wordy-{wire.run_id}"
    service.register(name, start_endpoint(wordy).url)
    small = [make_group(f"small{i}", size=100, reward_name=name) for i in range(4)]
    wire.announce([*small, make_group("large", size=400, reward_name=name)])
    wire.wait_scored(*(group.group_id for group in small))
    (letter,) = wire.wait_dead("large")
    assert letter.reason == "MessageTooLarge"
    assert letter.group_ids == ("large",)
    wire.wait_idle()
    assert {len(times) for times in wire.take().values()} == {1}


def test_an_endpoint_is_resolved_by_name_and_gets_its_host_header(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service('reward_service.allowed_targets=["localhost"]')
    endpoint = start_endpoint(good(0.5))
    name = f"named-{wire.run_id}"
    url = endpoint.url.replace("127.0.0.1", "localhost")
    assert service.register(name, endpoint.url).status_code == 422, "the address itself is not on the list"
    assert service.register(name, url).status_code == 201
    wire.announce([make_group("g", size=1, reward_name=name)])
    assert wire.wait_scored("g")["g"][0].rewards == (0.5,)
    assert endpoint.hosts == [url.split("/")[2]]
