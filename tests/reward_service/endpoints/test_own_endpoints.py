"""Users' own endpoints: the kit, the examples in Python and Node, served files with a signing key, draining."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.groups import make_group
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import ROOT, Serve, StartEndpoint, StartService, good
from tests.servers import require_package, secret_file, wait_for

from penstock.reward_service.hosting import endpoint_kit
from penstock.reward_service.hosting.endpoint_kit import Offer, Score, ServiceAddress
from penstock.serving import signature

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(32)).decode()
REQUEST = {"reward": "x", "groups": [{"group_id": "g", "completions": ["a", "b"], "ground_truth": "a"}]}
BODY = json.dumps(REQUEST).encode()


def signed(body: bytes = BODY, secret: str = SECRET, age_s: float = 0.0) -> dict[str, str]:
    return signature.headers([secret], message_id="m1", timestamp=int(time.time() - age_s), body=body)


def test_the_kit_reads_signed_requests_and_writes_valid_answers() -> None:
    """A signed request is parsed for any case of its headers; numbers, scores and None become one answer."""
    request = endpoint_kit.read(BODY, {name.title(): value for name, value in signed().items()}, [OTHER, SECRET])
    assert request.groups[0].completions == ["a", "b"]
    said = json.loads(endpoint_kit.answer(request, [[0.5, None]]))
    assert said["results"][0]["group_id"] == "g"
    assert [score["score"] for score in said["results"][0]["scores"]] == [0.5, None]
    assert said["results"][0]["scores"][1]["error"]
    parts = json.loads(endpoint_kit.answer(request, [[Score(score=1.0, parts={"n": 2.0}), Score(error="no")]]))
    assert parts["results"][0]["scores"][0]["parts"] == {"n": 2.0}


FORGED: dict[str, tuple[Callable[[], dict[str, str]], str]] = {  # headers, made when they are sent; and the reason
    "none": (dict, "not signed"),
    "foreign": (lambda: signed(secret=OTHER), "another secret"),
    "altered": (lambda: signed(body=BODY + b" "), "another secret"),
    "old": (lambda: signed(age_s=400), "not within 300 s"),
    "future": (lambda: signed(age_s=-400), "not within 300 s"),
    "no time": (lambda: {**signed(), "webhook-timestamp": "now"}, "not within 300 s"),
    "400 digits": (lambda: {**signed(), "webhook-timestamp": "1" * 400}, "not within 300 s"),
    "5,000 digits": (lambda: {**signed(), "webhook-timestamp": "1" * 5000}, "not within 300 s"),
    "Arabic digit": (lambda: {**signed(), "webhook-timestamp": "\u0661"}, "not within 300 s"),
    "split elsewhere": (
        lambda: {**signed(), "webhook-timestamp": str(int(time.time()))[:-1] + "7", "webhook-id": "m1.1"},
        "another secret",
    ),
    "5,000 signatures": (lambda: {**signed(), "webhook-signature": " ".join(["v1,AAAA"] * 5000)}, "another secret"),
    "another id": (lambda: {**signed(), "webhook-id": "m2"}, "another secret"),
    "nonsense": (lambda: {**signed(), "webhook-signature": "v1, v1,ü"}, "another secret"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_request_that_was_not_signed_as_it_came_is_refused(name: str) -> None:
    """A missing, foreign, altered, old or future signature is refused, and no text shows the key."""
    sign, text = FORGED[name]
    with pytest.raises(endpoint_kit.BadSignature, match=text) as refused:
        endpoint_kit.read(BODY, sign(), [SECRET])
    assert SECRET not in str(refused.value)


def test_the_kit_refuses_what_the_service_would_refuse() -> None:
    """A wrong body, a wrong count and a number that is not finite are errors in the endpoint's process."""
    with pytest.raises(endpoint_kit.BadRequest, match="groups"):
        endpoint_kit.read(b'{"reward": "x"}', {})
    request = endpoint_kit.read(BODY, {})
    refused = [
        ([], "expected scores for 1 groups, got 0"),
        ([[1.0]], "expected 2 scores, one per completion, got 1"),
        ([[1.0, float("nan")]], "nan"),
    ]
    for scores, text in refused:
        with pytest.raises(ValueError, match=text):
            endpoint_kit.answer(request, scores)


def test_a_registration_lasts_as_long_as_its_block(
    wire: Wire, start_service: StartService, start_endpoint: StartEndpoint
) -> None:
    """The kit registers, renews in its own thread beyond the lease, and unregisters; a refusal is an error."""
    service = start_service()
    endpoint = start_endpoint(good())
    name = f"kit-{wire.run_id}"
    with endpoint_kit.registered(service.url, Offer(name=name, url=endpoint.url, version="1", lease_s=1.0)):
        ends = time.monotonic() + 2.5
        wait_for(lambda: time.monotonic() > ends, "more than two leases to pass")
        assert service.get(f"/v1/endpoints/{name}")["live"]["state"] == "in service"
    assert name not in service.endpoints()
    with (
        pytest.raises(endpoint_kit.NotRegistered, match="built-in"),
        endpoint_kit.registered(ServiceAddress(service.url), Offer(name="gsm8k", url=endpoint.url, version="1")),
    ):
        pass


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A factory of running examples, killed after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **environ: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"example{len(started)}.log").open("wb") as log:
            env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ}
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["python", "node"])
def test_an_example_registers_itself_and_scores_signed_requests(
    language: str, wire: Wire, start_service: StartService, example: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """They score a run with signatures, refuse unsigned requests, and unregister on SIGINT."""
    if language == "node":
        require_package("node", "nodejs")
    service = start_service(f"reward_service.token_file={secret_file('right')}", "reward_service.endpoint_attempts=50")
    commands = {
        "python": (sys.executable, "examples/reward_endpoint.py", service.url),
        "node": ("node", "examples/reward_node/server.mjs", service.url),
    }
    name = {"python": "short_answers", "node": "balanced"}[language]
    process = example(*commands[language], REWARD_TOKEN="right", REWARD_SECRET=SECRET)
    wait_for(lambda: name in service.endpoints("right"), f"{name} to be registered")
    texts = {"python": ["1 2", "3", "1"], "node": ["(a)", "([)]", "((("]}[language]
    wire.announce([make_group("g", size=3, texts=texts, reward_name=name, ground_truth="1")])
    scored = wire.wait_scored("g")["g"][0]
    assert scored.rewards == {"python": (0.5, 0.0, 1.0), "node": (1.0, 0.5, 0.0)}[language]
    assert scored.scorer == f"{name}@1"
    assert set(scored.parts) == {"python": {"right", "num_words"}, "node": {"brackets"}}[language]

    stranger = httpx.post(service.endpoints("right")[name]["url"], json=REQUEST, timeout=60)
    assert stranger.status_code == 401
    asked = {"groups": [{"group_id": "g", "completions": ["no"], "ground_truth": 1}]}
    answer = service.post(f"/v1/endpoints/{name}/test", asked, token="right").json()
    assert {"python": "needs a text", "node": "no brackets"}[language] in answer["results"][0]["error"]["detail"]

    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert name not in service.endpoints("right")


@pytest.mark.slow
def test_a_served_file_checks_signatures_and_ends_when_its_calls_have(
    wire: Wire, start_service: StartService, serve: Serve, tmp_path: Path
) -> None:
    """With --secret-file unsigned requests get 401; Ctrl-C unregisters the endpoint, and its last call is answered."""
    service = start_service(f"reward_service.token_file={secret_file('right')}")
    (tmp_path / "token").write_text("right\n")
    (tmp_path / "secret").write_text(SECRET + "\n")
    entered, may_end = tmp_path / "entered", tmp_path / "may_end"
    (tmp_path / "slow.py").write_text(
        "import asyncio, pathlib\n"
        "async def compute_score(solution_str):\n"
        f"    pathlib.Path({str(entered)!r}).touch()\n"
        f"    while not pathlib.Path({str(may_end)!r}).exists():\n        await asyncio.sleep(0.01)\n"
        "    return len(solution_str)\n"
    )
    name = f"slow-{wire.run_id}"
    files = ["--token-file", str(tmp_path / "token"), "--secret-file", str(tmp_path / "secret")]
    process = serve("serve", str(tmp_path / "slow.py"), "--name", name, "--register", service.url, *files)
    assert httpx.post(process.url, content=BODY, timeout=60).status_code == 401
    answers: list[httpx.Response] = []
    body = {"groups": [{"group_id": "g", "completions": ["abc"]}]}
    calling = threading.Thread(
        target=lambda: answers.append(service.post(f"/v1/endpoints/{name}/test", body, token="right"))
    )
    calling.start()
    wait_for(entered.exists, "the call to arrive")
    process.signal(signal.SIGINT)
    wait_for(lambda: name not in service.endpoints("right"), "the endpoint to unregister")
    assert process.alive()
    wait_for(lambda: "1 calls in progress" in process.output, "the command to say what it waits for")
    may_end.touch()
    calling.join(60)
    assert answers[0].json()["results"][0]["scores"][0]["score"] == 3.0
    assert process.wait(20) == 0, process.output
