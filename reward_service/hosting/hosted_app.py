"""The HTTP app of a served reward: requests arrive in the server's thread and are scored on the main thread.

`HostedFunction` is user code as `reward serve FILE.py` and the Python client serve it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from penstock.reward_service.endpoints.wire import (
    ERROR_HEADER,
    GroupScore,
    GroupToScore,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from penstock.reward_service.user_code.user_function import UserReward
from penstock.serving.request_checks import StrictRequest, check_signature, guard

if TYPE_CHECKING:
    from penstock.reward_service.hosting.served_reward import Hosted


@dataclass(frozen=True, slots=True)
class HostedFunction:
    reward: UserReward
    version: str  # a hash of the source that was loaded, whatever its file holds later
    terms: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.reward.file.name}: {self.reward.name}"

    @property
    def batched(self) -> bool:
        return self.reward.batched

    @property
    def figures(self) -> Mapping[str, float]:
        return {}

    async def open(self) -> None:
        await self.reward.open()

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Call the function; what it raises is the error of the score."""
        return await self.reward.score_all(groups)

    async def close(self) -> None:
        await self.reward.close()


_MAX_REQUEST_BYTES = 256 * 1024 * 1024


class Calls:
    """Count the calls in progress, on the event loop where the reward runs."""

    def __init__(self, home: asyncio.AbstractEventLoop) -> None:
        self.home = home
        self.num_in_progress = 0
        self._none = asyncio.Event()
        self._none.set()

    async def wait_for_none(self) -> None:
        await self._none.wait()

    async def score(self, reward: Hosted, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        """Score groups on the main thread; called in the server's thread."""
        work = asyncio.run_coroutine_threadsafe(self._counted(reward, groups), self.home)
        return await asyncio.wrap_future(work)

    async def _counted(self, reward: Hosted, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        self.num_in_progress += 1
        self._none.clear()
        try:
            return await reward.score(groups)
        finally:
            self.num_in_progress -= 1
            if not self.num_in_progress:
                self.home.call_later(0.1, self._maybe_none)  # the response is not written yet

    def _maybe_none(self) -> None:
        if not self.num_in_progress:
            self._none.set()


def build(reward: Hosted, calls: Calls, *, secrets: Sequence[str], hosts: Sequence[str] | None = None) -> FastAPI:
    """Return the endpoint's app.

    With ``secrets``, a request without a valid signature is refused with 401. A Host header must be one of ``hosts`` or of the
    loopback, unless it is None.
    """
    app = FastAPI(title=f"Penstock reward: {reward.title}", version="1")

    async def signed(request: StrictRequest) -> None:
        if secrets and request.method == "POST":
            await check_signature(secrets, request)

    guard(app, signed, max_bytes=_MAX_REQUEST_BYTES, hosts=hosts)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, err: HTTPException) -> JSONResponse:
        """Give the reason in a header too: the reward service quotes nothing of a body."""
        reason = "".join(letter if " " <= letter <= "~" else "?" for letter in str(err.detail))
        return JSONResponse({"detail": err.detail}, err.status_code, headers={ERROR_HEADER: reason})

    @app.post("/score")
    async def score(wanted: ScoreRequest, request: Request) -> ScoreResponse:
        """Score groups; a completion that cannot be scored has an error instead of a score."""
        if reward.batched:
            found = await calls.score(reward, wanted.groups)
        else:
            found = []
            for group in wanted.groups:
                if await request.is_disconnected():  # do not compute scores that no client waits for
                    raise HTTPException(499, "the client closed the connection")
                found += await calls.score(reward, [group])
        named = zip(wanted.groups, found, strict=True)
        return ScoreResponse(results=[GroupScore(group_id=group.group_id, scores=scores) for group, scores in named])

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """Return 200 and a description of the served reward."""
        about = {"reward": reward.title, "version": reward.version, "calls": calls.num_in_progress}
        return {"ok": True, **about, "figures": dict(reward.figures)}

    return app
