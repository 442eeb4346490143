"""Registration at several replicas of a reward service, with real HTTP."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator

import pytest
from tests.servers import wait_for

from penstock.reward_service.hosting import registration
from penstock.reward_service.hosting.registration import NotRegistered, Offer, ServiceAddress

OFFER = Offer(name="mine", url="http://127.0.0.1:9/score", version="1", lease_s=0.15)


class Replica:
    """An API that knows endpoints, shared by all replicas as in a real service."""

    def __init__(self, known: set[str]) -> None:
        self.status: int | None = None  # instead of an answer
        self.asked: list[str] = []
        replica = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                replica.asked.append(self.path)
                code = replica.status or (200 if "name" in body or "mine" in known else 404)
                if code == 200:
                    known.add("mine")
                self.send_response(code)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def kill(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def replicas() -> Iterator[tuple[Replica, Replica]]:
    known = set[str]()
    both = Replica(known), Replica(known)
    yield both
    for one in both:
        if one.thread.is_alive():
            one.kill()


async def test_a_lease_is_renewed_at_the_replica_that_is_left(
    replicas: tuple[Replica, Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward service that is replaced stops no reward: nothing is said while any replica answers."""
    service = ServiceAddress(",".join(replica.url + "/" for replica in replicas))
    await registration.register(service, OFFER)
    assert [replica.asked for replica in replicas] == [["/v1/endpoints"], []]
    keeping = asyncio.create_task(registration.keep(service, OFFER))
    await asyncio.to_thread(replicas[0].kill)
    await asked_again(replicas[1])
    assert set(replicas[1].asked) == {"/v1/endpoints/mine/lease"}
    assert capsys.readouterr().err == ""
    replicas[1].status = 503
    await asked_again(replicas[1])
    said = capsys.readouterr().err
    assert said.count("the lease of reward mine is not renewed") == 1
    assert "HTTP 503" in said
    replicas[1].status = None
    await asked_again(replicas[1])
    keeping.cancel()
    assert capsys.readouterr().err == "the lease of reward mine is renewed again\n"


async def asked_again(replica: Replica) -> None:
    """Wait until a replica was asked four times more: it was told the answers to at least two of them."""
    replica.asked.clear()
    await asyncio.to_thread(wait_for, lambda: len(replica.asked) >= 4, "four more renewals")


async def test_who_is_waited_for_is_said_at_once(
    replicas: tuple[Replica, Replica], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to start; after the deadline the error names the last problem."""
    monkeypatch.setattr("penstock.serving.lease.WAIT_S", 2.0)
    for replica in replicas:
        await asyncio.to_thread(replica.kill)
    with pytest.raises(NotRegistered, match=r"could not be registered at .* no answer .*is the reward service running"):
        await registration.register(ServiceAddress(replicas[0].url), OFFER)
    said = capsys.readouterr().err
    assert said.count("waiting for the reward service at") == 1
    assert "penstock reward service run.toml" in said
