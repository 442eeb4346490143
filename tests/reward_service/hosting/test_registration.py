"""Registration at several replicas of a reward service, with real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.json_server import JsonServer
from tests.servers import wait_for

from penstock.reward_service.hosting.registration import NotRegistered, Offer, RewardRegistration, ServiceAddress

OFFER = Offer(name="mine", url="http://127.0.0.1:9/score", version="1", lease_s=0.15)


class Replica(JsonServer):
    """An API that knows endpoints, shared by all replicas as in a real service."""

    def __init__(self, known: set[str]) -> None:
        self.known = known
        self.status: int | None = None  # instead of an answer
        self.asked: list[str] = []
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        self.asked.append(path)
        code = self.status or (200 if "name" in body or self.known else 404)
        if code == 200:
            self.known.add("mine")
        return code, b""


@pytest.fixture
def replicas() -> Iterator[tuple[Replica, Replica]]:
    known = set[str]()
    with Replica(known) as first, Replica(known) as second:
        yield first, second


async def test_a_lease_is_renewed_at_the_replica_that_is_left(
    replicas: tuple[Replica, Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward service that is replaced stops no reward: nothing is said while any replica answers."""
    registration = RewardRegistration(ServiceAddress(",".join(replica.url + "/" for replica in replicas)), OFFER)
    await registration.register()
    assert [replica.asked for replica in replicas] == [["/v1/endpoints"], []]
    await asyncio.to_thread(replicas[0].close)
    keeping = asyncio.create_task(registration.keep())
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
    monkeypatch.setattr("penstock.serving.hosting.WAIT_S", 2.0)
    for replica in replicas:
        await asyncio.to_thread(replica.close)
    with pytest.raises(NotRegistered, match=r"could not be registered at .* no answer .*is the reward service running"):
        await RewardRegistration(ServiceAddress(replicas[0].url), OFFER).register()
    said = capsys.readouterr().err
    assert said.count("waiting for the reward service at") == 1
    assert "penstock reward service run.toml" in said
