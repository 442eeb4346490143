"""Calls to one engine, whose failures are EngineErrors; and what all clients of engines over HTTP share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import adapter_name, version_of
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion, Resumption, read_version, shorten
from penstock.rollout_service.engines.completion_sampler import (
    AdapterTable,
    CompletionSampler,
    RequestDeadline,
    SampleRequest,
)
from penstock.rollout_service.engines.engine_client import UpdateMode, refuse_images
from penstock.rollout_service.errors import (
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ReplyRefused,
    WeightsNotApplied,
)
from penstock.serving.http_connections import AnswerRefused, ConnectionFailed, HttpConnections

LOAD_S = 600.0  # to read the weights of a folder
PROBE_S = 10.0  # a request that generates nothing, such as one for the served version
_KEEP_S = 3.0  # less than the 5 s after which uvicorn, which all engines use, closes an idle connection


class EngineHttp:
    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = HttpConnections(keep_s=_KEEP_S, headers=headers)

    async def close(self) -> None:
        await self._connections.close()

    async def call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        """Return the engine's answer, read as JSON or as text.

        Raises EngineTimeout, EngineUnreachable, EngineRefused for an HTTP error, ReplyRefused for what is not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._connections.send(method, f"{self.url}{path}", data)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except ConnectionFailed as err:
            raise EngineUnreachable(str(err)) from None
        except AnswerRefused as err:
            raise ReplyRefused(str(err)) from None
        if answer.status != HTTPStatus.OK:
            raise EngineRefused(
                f"{self.url}{path} answered {answer.status}: {shorten(answer.body.decode('utf-8', 'replace'))}",
                status=answer.status,
            )
        if not parse:
            return answer.body.decode("utf-8", "replace")
        try:
            return json.loads(answer.body)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {shorten(answer.body.decode('utf-8', 'replace'))}"
            ) from None


class AdapterCalls(ABC):
    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    @abstractmethod
    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter; raises WeightsNotApplied when the server refuses it, or does not confirm it."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Unload an adapter; raises EngineRefused when the server refuses."""

    async def list_names(self) -> list[object]:
        answer = await self._http.call("GET", "/v1/models", None, PROBE_S)
        cards = answer.get("data") if isinstance(answer, dict) else None
        return [card.get("id") for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


@dataclass(eq=False)
class AdapterLoader:
    """The adapters of one server. Loads and unloads run one at a time; requests continue meanwhile."""

    url: str
    calls: AdapterCalls
    served_version: Callable[[], Awaitable[PolicyVersion | None]]
    deadline: RequestDeadline

    def __post_init__(self) -> None:
        self.table = AdapterTable()
        self.turn = asyncio.Lock()  # also held while base weights are loaded

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        async with self.turn:
            if version in self.table:
                return
            base = await self.served_version()
            if base is None:
                raise WeightsNotApplied(
                    f"{self.url} serves weights without a policy version; load weights before adapter {version}"
                )
            await self.calls.load(adapter_name(version), folder)
            self.table.confirm(version, base)

    async def unload(self, version: PolicyVersion) -> None:
        if version not in self.table:
            return
        await self.table.leave(version, self.deadline.seconds(0) + self.deadline.decoding_s)
        async with self.turn:
            if version in self.table:
                await self.calls.unload(adapter_name(version))
                self.table.forget(version)

    async def drop_all(self) -> None:
        for version in self.table.versions:
            await self.table.leave(version, self.deadline.seconds(0) + self.deadline.decoding_s)
        async with self.turn:
            for version in await self.listed():
                await self.calls.unload(adapter_name(version))
            for version in self.table.versions:
                self.table.forget(version)

    async def forget_lost(self) -> None:
        async with self.turn:
            have = await self.listed()
            for version in self.table.versions:
                if version not in have:
                    self.table.forget(version)

    async def listed(self) -> set[PolicyVersion]:
        return {version for name in await self.calls.list_names() if (version := version_of(name)) is not None}


class HttpEngineClient(ABC):
    """What the clients of all engines over HTTP share; see `EngineClient` and `ReleasesMemory`."""

    adapter_calls: ClassVar[type[AdapterCalls]]
    version_page: ClassVar[str]  # whose ``weight_version`` is the served version
    returns_text: ClassVar[bool] = True  # False: token ids only, which the worker decodes
    without_images: ClassVar[str] = ""  # the name of an engine whose client sends no images

    def __init__(self, url: str, *, api_key: str = "", request_deadline_s: float = 600.0) -> None:
        self.url = url
        self.limits = ModelLimits(None, None)
        self._http = EngineHttp(url, api_key=api_key)
        self._deadline = RequestDeadline(request_deadline_s)
        self._weights_turn = asyncio.Lock()
        self._adapters = AdapterLoader(url, self.adapter_calls(self._http), self.served_version, self._deadline)
        self._sampler = CompletionSampler(
            url, self._sample, self._adapters.table, self._deadline, returns_text=self.returns_text
        )
        self._released = False  # its weights, keys and values are not in the device's memory
        self._aborting = False  # an update that aborts running requests is under way
        self._num_aborts = 0  # incremented when such an update begins and when it ends

    @property
    def _load_s(self) -> float:
        """Seconds that an update may take, which may wait for running sequences before it reads the weights."""
        return LOAD_S + self._deadline.decoding_s

    @abstractmethod
    async def _sample(self, sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        """Sample the next part of each sequence; see `SampleParts`."""

    async def close(self) -> None:
        await self._http.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        if self.without_images:
            refuse_images(prompts, self.without_images)
        return await self._sampler.generate(prompts, sampling, n, adapter, self.limits, seeds)

    def mark_unverified(self, reason: str) -> None:
        self._sampler.mark_unverified(reason)

    def mark_verified(self) -> None:
        self._sampler.mark_verified()

    async def served_version(self) -> PolicyVersion | None:
        async with self._weights_turn:
            return await self._read_version()

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        await self._adapters.load(folder, version)

    async def unload_adapter(self, version: PolicyVersion) -> None:
        await self._adapters.unload(version)

    async def drop_adapters(self) -> None:
        await self._adapters.drop_all()

    async def forget_lost_adapters(self) -> None:
        await self._adapters.forget_lost()

    async def _prepare_load(self, version: PolicyVersion) -> None:
        """Unload the adapters that were loaded on other weights than those of ``version``."""
        bases = self._adapters.table.bases
        if not bases or (
            self._released and bases == {version}
        ):  # loaded again as they were, they stay what adapters change
            return
        if self._released:  # what waits for the load names an adapter that it will not find
            self._sampler.mark_unverified("its base weights changed while its memory was released")
            self._sampler.may_send.clear()
            await asyncio.sleep(0)
        await self._adapters.drop_all()

    async def _read_version(self) -> PolicyVersion | None:
        info = await self._http.call("GET", self.version_page, None, PROBE_S)
        return read_version(info.get("weight_version") if isinstance(info, dict) else None)

    def _was_interrupted(self, num_aborts: int) -> bool:
        """Return True if requests are being aborted, or were since there had been ``num_aborts`` of these."""
        return self._aborting or num_aborts != self._num_aborts

    @contextlib.contextmanager
    def _pausing(self, mode: UpdateMode) -> Iterator[None]:
        """Count the block as an abort of running requests, if that is what ``mode`` does."""
        self._aborting = mode == "abort"
        self._num_aborts += self._aborting
        try:
            yield
        finally:
            self._num_aborts += self._aborting
            self._aborting = False

    async def release(self, mode: UpdateMode) -> None:
        """Free the memory of weights, keys and values; see `ReleasesMemory.release`."""
        self._sampler.may_send.clear()
        async with self._adapters.turn, self._weights_turn:
            if mode != "drain":
                with self._pausing("abort"):
                    await self._end_requests()
                    await self._sampler.wait_until_answered(self._load_s)
            await self._sampler.wait_until_answered(self._load_s)
            await self._release()
            self._released = True

    @abstractmethod
    async def _end_requests(self) -> None:
        """Have the server return what its running requests have sampled."""

    @abstractmethod
    async def _release(self) -> None:
        """Free the memory of an idle server."""
