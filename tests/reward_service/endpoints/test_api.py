"""The HTTP API: registering, listing, testing and scoring by hand, and its permissions."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.reward_service.conftest import Wire, replica_of
from tests.reward_service.processes import Service, StartEndpoint, StartService, good, raw
from tests.servers import wait_for

from penstock.deploy.processes.servers import NatsServer
from penstock.protocol.config.connection import NatsSettings, S3Settings


def test_an_endpoint_is_registered_shown_tested_and_unregistered(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service()
    endpoint = start_endpoint(good(0.5))
    name = f"mine-{wire.run_id}"
    answer = service.register(name, endpoint.url, timeout_s=3, version="2")
    assert answer.status_code == 201
    assert answer.json()["endpoint"] == {
        "name": name,
        "url": endpoint.url,
        "dialect": "penstock",
        "options": {},
        "timeout_s": 3.0,
        "retries": 3,
        "concurrency": 8,
        "batch_size": 16,
        "rate_per_s": None,
        "hedge_after_s": None,
        "version": "2",
        "min_score": -1e6,
        "max_score": 1e6,
        "data_sources": [],
        "needs_ground_truth": False,
        "returns_parts": [],
        "health_url": None,
        "lease_s": None,
        "owner": "",
        "secret_id": "",
    }
    tried = service.post(f"/v1/endpoints/{name}/test", {}).json()
    assert tried["ok"] is True
    assert [score["score"] for score in tried["results"][0]["scores"]] == [0.5] * 3
    live = service.get(f"/v1/endpoints/{name}")["live"]
    assert (live["calls"], live["errors"]) == (1, 0)
    assert live["latency_p99_s"] >= live["latency_p50_s"] > 0

    assert service.register(name, endpoint.url, timeout_s=3, version="2").status_code == 201, "the same again is fine"
    taken = service.register(name, "http://127.0.0.1:9/")
    assert taken.status_code == 409
    assert "set replace" in taken.json()["detail"]
    assert service.register(name, "http://127.0.0.1:9/", replace=True).status_code == 201
    assert service.delete(name, url=endpoint.url).status_code == 409, "not ours any more"
    assert [service.delete(name).status_code for _ in range(2)] == [204, 404]
    assert httpx.get(f"{service.url}/v1/endpoints/{name}", timeout=60).status_code == 404
    assert service.post(f"/v1/endpoints/{name}/test", {}).status_code == 404


def test_the_test_of_a_failing_endpoint_shows_the_reason(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    service = start_service()
    name = f"broken-{wire.run_id}"
    service.register(name, start_endpoint(raw("nonsense")).url)
    rows = {"groups": [{"group_id": "g", "prompt": "p", "completions": ["a"], "ground_truth": {"x": [1]}}]}
    tried = service.post(f"/v1/endpoints/{name}/test", rows).json()
    assert tried["ok"] is False
    assert tried["results"][0]["error"]["reason"] == "EndpointNonsense"
    assert name in tried["results"][0]["error"]["detail"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "exact_match"}, "is a built-in reward"), ({"name": "auto"}, "is a built-in reward"),
        ({"name": "a b"}, "body.name"), ({"name": ""}, "body.name"), ({"timeout_s": 0}, "body.timeout_s"),
        ({"timeout_s": "soon"}, "body.timeout_s"), ({"concurrency": 0}, "body.concurrency"),
        ({"batch_size": 0}, "body.batch_size"), ({"min_score": 2, "max_score": 1}, "above max_score"),
        ({"time_out": 3}, "body.time_out"), ({"secrets": [f"whsec_{'a' * 40}"]}, "reward_service.tokens_file"),
    ],
)  # fmt: skip
def test_registrations_that_break_a_rule_are_refused(
    change: dict[str, Any], reason: str, shared_service: Service
) -> None:
    """Without tokens every program of the machine may register: secrets would be for any of them."""
    answer = shared_service.post("/v1/endpoints", {"name": "fine", "url": "http://127.0.0.1:9/", **change})
    assert (answer.status_code, reason in answer.json()["detail"]) == (422, True), answer.text


def test_scoring_by_hand_gives_what_the_run_gets(shared_service: Service) -> None:
    """POST /v1/score scores by any reward, and reports an error where there is no score."""
    groups = [
        {"group_id": "a", "completions": ["#### 42", "x"], "ground_truth": "42"},
        {"group_id": "b", "completions": ["#### 42"]},
    ]
    answer = shared_service.post("/v1/score", {"reward": "gsm8k", "groups": groups}).json()
    assert answer["ok"] is False
    first, second = answer["results"]
    assert first["scorer"] == "gsm8k"
    assert first["scores"] == [
        {"score": 1.0, "parts": {"has_answer": 1.0}},
        {"score": 0.0, "parts": {"has_answer": 0.0}},
    ]
    assert second["scores"] == []
    assert second["error"]["reason"] == "BadGroundTruth"
    assert second["error"]["permanent"] is True
    unknown = shared_service.post("/v1/score", {"reward": "gsm9k", "groups": groups[:1]}).json()
    assert "did you mean gsm8k" in unknown["results"][0]["error"]["detail"]
    for wrong in ({"reward": "a b", "groups": groups}, {"reward": "gsm8k", "groups": []}):
        assert shared_service.post("/v1/score", wrong).status_code == 422


def test_rewards_and_routes_are_listed(shared_service: Service) -> None:
    """Rewards with their data sets, and in the OpenAPI document every route of the API."""
    answer = shared_service.get("/v1/rewards")
    assert {"auto", "exact_match", "format", "gsm8k", "math"} <= {row["name"] for row in answer["rewards"]}
    assert answer["by_source"]["openai/gsm8k"] == "gsm8k"

    routes = {"endpoints", "endpoints/{name}", "endpoints/{name}/test", "score", "rewards"}
    assert {f"/v1/{route}" for route in routes} <= shared_service.get("/openapi.json")["paths"].keys()


@pytest.mark.slow
def test_registrations_at_the_same_moment_are_all_kept(wire: Wire, start_service: StartService) -> None:
    services = [start_service(replica="r0"), start_service(replica="r1")]
    names = [f"many{i}-{wire.run_id}" for i in range(12)]

    def register(number: int) -> int:
        return services[number % 2].register(names[number], f"http://127.0.0.1:{1000 + number}/").status_code

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(register, range(12))) == [201] * 12
    for service in services:
        assert set(names) <= service.endpoints().keys()


def test_health_is_503_while_nats_is_unreachable(
    own_nats: Callable[[], NatsServer], s3_settings: S3Settings, tmp_path: Path, run_id: str
) -> None:
    """/healthz answers 503 while NATS is unreachable and 200 afterwards; the service keeps running."""
    server = own_nats()
    with replica_of(run_id, server.settings, s3_settings, tmp_path) as service:
        server.kill()
        wait_for(lambda: httpx.get(f"{service.url}/healthz", timeout=60).status_code == 503, "health to turn red")
        server.restart()
        wait_for(lambda: httpx.get(f"{service.url}/healthz", timeout=60).status_code == 200, "health to turn green")
        assert service.alive()


def test_the_runs_servers_and_oversized_bodies_are_refused(
    wire: Wire, start_service: StartService, nats_settings: NatsSettings, s3_settings: S3Settings
) -> None:
    """An endpoint at NATS or the object store is refused; a body over the limit too, with or without Content-Length."""
    service = start_service("reward_service.max_request_bytes=2000")
    for url in (nats_settings.url.replace("nats://", "http://"), s3_settings.endpoint):
        answer = service.register(f"own-{wire.run_id}", url + "/score")
        assert answer.status_code == 422
        assert "of this run" in answer.json()["detail"]
    group = {"completions": ["1" * 3000], "ground_truth": "1"}
    body = json.dumps({"reward": "gsm8k", "groups": [group]}).encode()
    headers = {"content-type": "application/json"}
    for content in (body, iter([body[:1000], body[1000:]])):
        answer = httpx.post(service.url + "/v1/score", content=content, headers=headers, timeout=60)
        assert answer.status_code == 413
        assert "max_request_bytes" in answer.json()["detail"]
    small = {"reward": "gsm8k", "groups": [{"completions": ["#### 1"], "ground_truth": "1"}]}
    assert service.post("/v1/score", small).json()["results"][0]["scores"][0]["score"] == 1.0
