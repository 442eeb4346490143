"""The bytes of all bodies in progress are bounded, whoever sent them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from penstock.serving.request_checks import BodyLimit


async def in_parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_body_that_does_not_fit_beside_the_others_is_answered_503() -> None:
    """It gets Retry-After and reaches no handler; when the others are done it is accepted, also after refusals and errors."""
    started, go_on, seen = asyncio.Event(), asyncio.Event(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        seen.append(len(body))
        started.set()
        await go_on.wait()
        if body == b"raise":
            raise ZeroDivisionError
        await PlainTextResponse(str(len(body)))(scope, receive, send)

    limited = BodyLimit(app, max_bytes=60, max_total_bytes=100, section="reward_service")
    transport = httpx.ASGITransport(limited, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        first = asyncio.create_task(client.post("/", content=b"a" * 60))
        await asyncio.wait_for(started.wait(), 10)
        for content in (b"b" * 41, in_parts(b"b" * 20, b"b" * 21), in_parts(b"b" * 40, b"b", b"b" * 10)):
            refused = await asyncio.wait_for(client.post("/", content=content), 30)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "reward_service.max_requests_bytes" in refused.json()["detail"]
        assert (await client.post("/", content=in_parts(b"c" * 40, b"c" * 30))).status_code in {413, 503}
        assert (await client.post("/", content=b"c" * 61)).status_code == 413
        beside = asyncio.create_task(client.post("/", content=b"d" * 40))
        raising = asyncio.create_task(client.post("/", content=b""))
        go_on.set()
        assert [(await answer).status_code for answer in (first, beside, raising)] == [200, 200, 200]
        assert (await client.post("/", content=b"raise")).status_code == 500
        assert (await client.post("/", content=b"e" * 60)).text == "60"
        both = await asyncio.gather(*(client.post("/", content=b"f" * 50) for _ in range(2)))
    assert [answer.status_code for answer in both] == [200, 200]
    assert seen == [60, 40, 0, 5, 60, 50, 50]
