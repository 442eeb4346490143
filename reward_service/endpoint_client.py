"""The door to httpx: calling reward endpoints, and believing nothing of what they answer.

One call: at most ``_TRIES`` tries with growing, jittered pauses for what may pass by itself (no
connection, 429, 5xx; ``Retry-After`` is honoured), all within the endpoint's ``timeout_s``. A hang is
not tried again here: it has used up its time, and the group comes again anyway. Redirects are not
followed, environment proxies are not used, and every address is checked after the name was resolved
and then connected to as checked, so that a name cannot change its mind in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel

from protocol.group_pack import GroupTexts
from reward_service.dialects.dialect import BadAnswer, Call
from reward_service.endpoint import Endpoint
from reward_service.errors import EndpointFailed, EndpointNonsense, EndpointRefused, RewardError, ScoreRefused
from reward_service.figures import Timings
from reward_service.rewards.verdict import Verdict
from reward_service.scores import GroupScores, Outcome
from reward_service.target_policy import TargetPolicy
from reward_service.wire import GroupToScore, Score

_TRIES = 4
_PAUSE_S = 0.1  # before the second try; doubled each time
_CONNECT_S = 5.0
_RETRY_STATUS = frozenset({429, 500, 502, 503, 504})
_IDLE_CONNECTIONS = 32
_MAX_TEXT = 300


class LiveFigures(BaseModel):
    """How an endpoint has been doing, as this replica sees it since its start."""

    calls: int
    errors: int
    under_way: int
    latency_p50_s: float
    latency_p99_s: float
    last_error: str


@dataclass(slots=True)
class _Line:
    """What is kept about one endpoint: its semaphore, its timings, its last error."""

    endpoint: Endpoint
    slots: asyncio.Semaphore
    timings: Timings = field(default_factory=Timings)
    under_way: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class EndpointScorer:
    """Scores groups by one registered endpoint, in batches."""

    endpoint: Endpoint
    client: EndpointClient = field(compare=False, repr=False)

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score the groups; on a redelivery one by one, so that one bad group cannot fail the others again."""
        size = self.endpoint.batch_size if attempt == 1 else 1
        wire = [GroupToScore.of(group) for group in groups]
        batches = [wire[start : start + size] for start in range(0, len(wire), size)]
        found = await asyncio.gather(*(self.client.call(self.endpoint, batch, attempt=attempt) for batch in batches))
        return [outcome for outcomes in found for outcome in outcomes]


class EndpointClient:
    """Calls endpoints. Use it as an async context manager; one for the whole process."""

    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int) -> None:
        """``policy`` says which addresses may be called; longer answers than the maximum are not read."""
        self._policy = policy
        self._max_bytes = max_response_bytes
        self._lines: dict[str, _Line] = {}
        self._http = httpx.AsyncClient(
            transport=_CheckedTransport(policy),
            follow_redirects=False,
            trust_env=False,
            timeout=None,  # noqa: S113 every call stands under the endpoint's own deadline
        )

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def scorer(self, endpoint: Endpoint) -> EndpointScorer:
        """Return what scores groups by this endpoint."""
        return EndpointScorer(endpoint, self)

    async def check(self, url: str) -> None:
        """Raise EndpointRefused unless the URL may be called; a host that does not resolve yet is let through."""
        self._policy.check_url(url)
        host = httpx.URL(url).host
        try:
            addresses = await _resolve(host, httpx.URL(url).port or 80)
        except OSError:
            return
        for address in addresses:
            self._policy.check_address(host, address)

    def figures(self, endpoint: Endpoint) -> LiveFigures:
        """Return how an endpoint has been doing."""
        line = self._line(endpoint)
        return LiveFigures(
            calls=line.timings.num_calls,
            errors=line.timings.num_failed,
            under_way=line.under_way,
            latency_p50_s=round(line.timings.quantile(0.5), 6),
            latency_p99_s=round(line.timings.quantile(0.99), 6),
            last_error=line.last_error,
        )

    async def call(self, endpoint: Endpoint, groups: Sequence[GroupToScore], *, attempt: int) -> list[Outcome]:
        """Return an outcome for every group; what fails the call fails all its groups."""
        line = self._line(endpoint)
        async with line.slots:
            line.under_way += 1
            started = time.monotonic()
            outcomes: list[Outcome]
            try:
                outcomes = await self._scored(endpoint, groups, attempt)
            except RewardError as err:
                outcomes = [err] * len(groups)
            finally:
                line.under_way -= 1
            error = next((outcome for outcome in outcomes if isinstance(outcome, RewardError)), None)
            line.timings.record(time.monotonic() - started, failed=error is not None)
            line.last_error = line.last_error if error is None else f"{error.reason}: {error}"
            return outcomes

    def _line(self, endpoint: Endpoint) -> _Line:
        line = self._lines.get(endpoint.name)
        if line is None or line.endpoint != endpoint:
            line = self._lines[endpoint.name] = _Line(endpoint, asyncio.Semaphore(endpoint.concurrency))
        return line

    async def _scored(self, endpoint: Endpoint, groups: Sequence[GroupToScore], attempt: int) -> list[Outcome]:
        """Ask in as many requests as the dialect needs for these groups."""
        pieces = _pieces(endpoint, groups)
        if pieces is None:
            scores = await self._ask(endpoint, groups, attempt)
        else:
            answers = await asyncio.gather(
                *(self._ask(endpoint, [piece], attempt) for of_group in pieces for piece in of_group)
            )
            singles = (answer[0] for answer in answers)
            scores = [[score for _ in of_group for score in next(singles)] for of_group in pieces]
        return [_outcome(endpoint, group, found) for group, found in zip(groups, scores, strict=True)]

    async def _ask(self, endpoint: Endpoint, groups: Sequence[GroupToScore], attempt: int) -> list[list[Score]]:
        call = Call(endpoint.name, _request_id(endpoint, groups, attempt), groups)
        payload = endpoint.speaker.request(call)
        headers = {
            "content-type": payload.content_type,
            "accept": "application/json",
            "accept-encoding": "identity",  # a small answer that unpacks to a large one is not read at all
            "idempotency-key": call.request_id,
        }
        problem = "no try was made"
        try:
            async with asyncio.timeout(endpoint.timeout_s):
                for number in range(1, _TRIES + 1):
                    try:
                        status, answer_headers, answer = await self._post(endpoint, payload.body, headers)
                    except httpx.TransportError as err:
                        problem = f"no answer ({_words(err)})"
                        pause_s = 0.0
                    else:
                        if status == 200:
                            return _read(endpoint, call, answer)
                        problem = f"HTTP {status}: {answer[:_MAX_TEXT].decode('utf-8', 'replace')}"
                        if status not in _RETRY_STATUS:
                            break
                        pause_s = _retry_after_s(answer_headers)
                    if number < _TRIES:
                        await asyncio.sleep(max(pause_s, _PAUSE_S * 2 ** (number - 1) * random.uniform(0.5, 1.5)))  # noqa: S311 jitter
        except TimeoutError:
            earlier = "" if problem.startswith("no try") else f"; before that: {problem}"
            raise EndpointFailed(
                f"endpoint {endpoint.name} ({endpoint.url}) gave no answer within {endpoint.timeout_s:g} s{earlier}"
            ) from None
        raise EndpointFailed(f"endpoint {endpoint.name} ({endpoint.url}): {problem}")

    async def _post(
        self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            async with self._http.stream("POST", endpoint.url, content=body, headers=dict(headers)) as response:
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise EndpointNonsense(f"endpoint {endpoint.name} ({endpoint.url}) compresses its answer unasked")
                answer = bytearray()
                async for chunk in response.aiter_raw():
                    answer += chunk
                    if len(answer) > self._max_bytes:
                        raise EndpointNonsense(
                            f"endpoint {endpoint.name} ({endpoint.url}) answers with more than {self._max_bytes} bytes "
                            "(reward_service.max_response_bytes)"
                        )
                return response.status_code, response.headers, bytes(answer)
        except EndpointRefused as err:
            raise EndpointFailed(f"endpoint {endpoint.name}: {err}") from None


class _CheckedTransport(httpx.AsyncHTTPTransport):
    """Resolves a name once, asks the policy about the addresses, and connects to a checked one."""

    def __init__(self, policy: TargetPolicy) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS))
        self._policy = policy

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._policy.check_url(str(request.url))
        host = request.url.host
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        try:
            async with asyncio.timeout(_CONNECT_S):
                addresses = await _resolve(host, port)
        except (OSError, TimeoutError) as err:
            raise httpx.ConnectError(f"{host} does not resolve: {_words(err)}") from None
        for address in addresses:
            self._policy.check_address(host, address)
        timeouts: dict[str, Any] = {"connect": _CONNECT_S, "read": None, "write": None, "pool": None}
        extensions = {**request.extensions, "sni_hostname": host, "timeout": timeouts}
        failure: httpx.ConnectError | httpx.ConnectTimeout | None = None
        for address in addresses:
            try:
                return await super().handle_async_request(
                    httpx.Request(
                        request.method,
                        request.url.copy_with(host=address),
                        headers=request.headers,  # Host was set from the name already
                        stream=request.stream,
                        extensions=extensions,
                    )
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as err:
                failure = err
        raise failure or httpx.ConnectError(f"{host} has no address")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _request_id(endpoint: Endpoint, groups: Sequence[GroupToScore], attempt: int) -> str:
    """Name a call, so that an endpoint which kept its answer may give it again to a repeated try."""
    digest = hashlib.sha256(f"{endpoint.scorer}\n{attempt}\n".encode())
    for group in groups:
        digest.update(group.model_dump_json().encode())
    return digest.hexdigest()[:32]


def _pieces(endpoint: Endpoint, groups: Sequence[GroupToScore]) -> list[list[GroupToScore]] | None:
    """Cut every group into what fits into one request; None when all groups go together."""
    match endpoint.speaker.carries:
        case "groups":
            return None
        case "group":
            return [[group] for group in groups]
        case "completion":
            return [
                [group.model_copy(update={"completions": [text]}) for text in group.completions] for group in groups
            ]


def _read(endpoint: Endpoint, call: Call, answer: bytes) -> list[list[Score]]:
    try:
        return endpoint.speaker.read(call, answer)
    except BadAnswer as err:
        raise EndpointNonsense(
            f"endpoint {endpoint.name} ({endpoint.url}) {err}; it says {answer[:_MAX_TEXT].decode('utf-8', 'replace')!r}"
        ) from None


def _outcome(endpoint: Endpoint, group: GroupToScore, scores: Sequence[Score]) -> Outcome:
    who = f"endpoint {endpoint.name} ({endpoint.url}), group {group.group_id}"
    if len(scores) != len(group.completions):
        return EndpointNonsense(f"{who}: {len(scores)} scores for {len(group.completions)} completions")
    verdicts = []
    for number, score in enumerate(scores):
        if score.score is None or score.error is not None:
            return ScoreRefused(f"{who}, completion {number}: {(score.error or 'score is null')[:_MAX_TEXT]}")
        if not endpoint.min_score <= score.score <= endpoint.max_score:
            return EndpointNonsense(
                f"{who}, completion {number}: score {score.score:g} is outside "
                f"[{endpoint.min_score:g}, {endpoint.max_score:g}]"
            )
        verdicts.append(Verdict(score.score, score.parts))
    return GroupScores.of(verdicts, endpoint.scorer)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds a server asks us to wait; a date or nonsense counts as nothing."""
    try:
        return max(0.0, float(headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def _words(err: Exception) -> str:
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
