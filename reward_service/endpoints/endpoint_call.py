"""One call of an endpoint (tries, an optional hedged one, one deadline, a check of the answer), and its breaker.

No connection, 429 and 5xx are tried again (`Retries`). A time-out is not tried again here, because the group is
delivered again anyway. All tries of a call carry the same idempotency key.

A group is cut into what one request of the endpoint's dialect carries, and its scores are joined again.

An endpoint that mostly fails is not called for a while, then tried with one call. `Breaker` is pure:

closed ──(of the last calls, at least `MIN_CALLS`, half or more failed)──▶ open
open ──(its pause is over)──▶ half-open: one call at a time goes through
half-open ──(it succeeds)──▶ closed            half-open ──(it fails)──▶ open, for twice as long
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from pydantic import BaseModel

from penstock.protocol.errors import TargetRefused
from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_registry import EndpointSecrets
from penstock.reward_service.endpoints.wire import CALL_HEADER, ERROR_HEADER, GroupToScore, Score
from penstock.reward_service.errors import EndpointFailed, EndpointNonsense, RewardError, ScoreRefused
from penstock.reward_service.rewards.reward import Verdict
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.serving import signature
from penstock.serving.http_connections import Answer, AnswerRefused, ConnectionFailed, HttpConnections, Retries

WINDOW = 20  # most recent calls that are looked at
MIN_CALLS = 5  # fewer do not open the breaker
FAILED_SHARE = 0.5
FIRST_PAUSE_S = 1.0  # a restart of a small server
LONGEST_PAUSE_S = 30.0
_RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_TEXT = 1200  # of a score's error: a reason, and a traceback of some frames
_MAX_REASON = 300  # characters of `ERROR_HEADER`
_MEDIA_TYPE = re.compile(r"[a-z]{1,20}/[a-z0-9.+-]{1,40}")


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._open_until: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._probing = False
        self.num_opened = 0

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admit(self, now: float) -> bool:
        state = self.state(now)
        if state is BreakerState.CLOSED:
            return True
        if state is BreakerState.OPEN or self._probing:
            return False
        self._probing = True
        return True

    def withdraw(self) -> None:
        self._probing = False

    def retry_in_s(self, now: float) -> float:
        if self._open_until is None:
            return 0.0
        return max(self._open_until - now, FIRST_PAUSE_S / 2)

    def record(self, now: float, *, failed: bool) -> bool:
        """Record how a call ended; returns True when this opened the breaker."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return False  # a call that began before it opened
        if state is BreakerState.HALF_OPEN:
            self._probing = False
            if failed:
                self._open(now, min(2 * self._pause_s, LONGEST_PAUSE_S))
                return True
            self.close()
            return False
        self._recent.append(failed)
        if len(self._recent) >= MIN_CALLS and sum(self._recent) >= FAILED_SHARE * len(self._recent):
            self._open(now, FIRST_PAUSE_S)
            return True
        return False

    def close(self) -> None:
        self._open_until, self._probing, self._pause_s = None, False, FIRST_PAUSE_S
        self._recent.clear()

    def trip(self, now: float) -> None:
        self._open(now, min(2 * self._pause_s, LONGEST_PAUSE_S) if self._open_until is not None else FIRST_PAUSE_S)

    def _open(self, now: float, pause_s: float) -> None:
        self._pause_s, self._open_until, self._probing = pause_s, now + pause_s, False
        self._recent.clear()
        self.num_opened += 1


class TokenBucket:
    """Tokens that are refilled at ``rate_per_s``; None means no limit. Clock readings are monotonic seconds."""

    def __init__(self, rate_per_s: float | None, now: float) -> None:
        """Start full: a second's worth of tokens, at least one."""
        self._rate = rate_per_s
        self._size = max(1.0, rate_per_s or 0.0)
        self._tokens = self._size
        self._at = now

    def take(self, now: float) -> float:
        if self._rate is None:
            return 0.0
        self._tokens = min(self._size, self._tokens + max(now - self._at, 0.0) * self._rate)
        self._at = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._rate


class EndpointMetrics(BaseModel):
    """Counters and latencies of one endpoint in this replica since its start; times in seconds."""

    state: str = "ok"
    calls: int = 0
    errors: int = 0
    error_rate: float = 0.0
    under_way: int = 0  # groups (single completions, where the dialect sends them so) in calls
    waiting: int = 0
    turned_away: int = 0
    retries: int = 0
    hedges: int = 0
    batch_limit: int = 0
    breaker: BreakerState = BreakerState.CLOSED
    breaker_opened: int = 0
    retry_in_s: float = 0.0
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    last_error: str = ""
    finishing: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class EndpointCaller:
    endpoint: Endpoint
    secrets: EndpointSecrets
    http: HttpConnections
    counts: EndpointMetrics

    async def call(self, groups: Sequence[GroupToScore], *, attempt: int) -> list[Outcome]:
        """Return an outcome for every group; raises RewardError when the whole call failed."""
        endpoint = self.endpoint
        call = Call(endpoint.name, request_id(endpoint, groups, attempt), groups)
        answer = await self._within_deadline(call, endpoint.speaker.request(call))
        try:
            scores = endpoint.speaker.read(call, answer)
        except BadAnswer as err:
            raise EndpointNonsense(
                f"{self._who} {err} (dialect {endpoint.dialect}); it sent {len(answer)} bytes, see its own log"
            ) from None
        return [outcome(endpoint, group, group_scores) for group, group_scores in zip(groups, scores, strict=True)]

    @property
    def _who(self) -> str:
        return f"endpoint {self.endpoint.name} ({self.endpoint.url})"

    async def _within_deadline(self, call: Call, body: bytes) -> bytes:
        problem = ""
        retries = Retries(first_s=0.2, longest_s=10.0, most=self.endpoint.retries, statuses=_RETRY_STATUS)

        def failed(last: Answer | ConnectionFailed, _pause_s: float) -> None:
            nonlocal problem
            problem = describe(last)
            self.counts.retries += 1

        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                answer = await retries.send(partial(self._maybe_hedged, call, body), failed)
        except TimeoutError:
            earlier = f"; before that: {problem}" if problem else ""
            raise EndpointFailed(f"{self._who} gave no answer within {self.endpoint.timeout_s:g} s{earlier}") from None
        except ConnectionFailed as err:
            raise EndpointFailed(f"{self._who}: {describe(err)}") from None
        except EndpointNonsense as err:
            raise EndpointNonsense(f"endpoint {self.endpoint.name}: {err}") from None
        if answer.status == 200:
            return answer.body
        is_refusal = 400 <= answer.status < 500 and answer.status not in _RETRY_STATUS
        raise EndpointFailed(f"{self._who}: {describe(answer)}", refused=is_refusal)

    async def _maybe_hedged(self, call: Call, body: bytes) -> Answer:
        """Send once; without an answer after ``hedge_after_s``, send again and take the first good answer."""
        if self.endpoint.hedge_after_s is None:
            return await self._post(call, body)
        asked = {asyncio.create_task(self._post(call, body))}
        try:
            done, asked = await asyncio.wait(asked, timeout=self.endpoint.hedge_after_s)
            if not done:
                self.counts.hedges += 1
                asked.add(asyncio.create_task(self._post(call, body)))
            while asked:
                more, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                done |= more
                if any(task.exception() is None and task.result().status == 200 for task in more):
                    break
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        good = [task for task in done if task.exception() is None]
        best = next((task for task in good if task.result().status == 200), good[0] if good else done.pop())
        return best.result()

    async def _post(self, call: Call, body: bytes) -> Answer:
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "idempotency-key": call.request_id,
            CALL_HEADER: "1",
        }
        if self.secrets.api_key:
            headers["authorization"] = f"Bearer {self.secrets.api_key}"
        headers |= signature.headers(self.secrets.signing, message_id=call.request_id, body=body)
        try:
            return await self.http.send("POST", self.endpoint.url, body, headers)
        except TargetRefused as err:
            raise EndpointFailed(f"{self.endpoint.url} may not be called: {err}") from None
        except AnswerRefused as err:
            raise EndpointNonsense(str(err)) from None


def describe(answer: Answer | ConnectionFailed) -> str:
    """Return its status, size and type, and the reason that an endpoint gives in `ERROR_HEADER`; never its body."""
    if isinstance(answer, ConnectionFailed):
        return f"no answer ({answer.reason})"
    media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    kind = f" of {media_type}" if _MEDIA_TYPE.fullmatch(media_type) else ""
    reason = "".join(c if c.isprintable() else "?" for c in answer.headers.get(ERROR_HEADER, "")[:_MAX_REASON])
    return f"HTTP {answer.status}, {len(answer.body)} bytes{kind}" + (f": {reason}" if reason else "")


def request_id(endpoint: Endpoint, groups: Sequence[GroupToScore], attempt: int) -> str:
    digest = hashlib.sha256(f"{endpoint.scorer}\n{attempt}\n".encode())
    for group in groups:
        digest.update(group.model_dump_json().encode())
    return digest.hexdigest()[:32]


def outcome(endpoint: Endpoint, group: GroupToScore, scores: Sequence[Score]) -> Outcome:
    who = f"endpoint {endpoint.name} ({endpoint.url}), group {group.group_id}"
    try:
        verdicts = verdicts_of(who, group, scores, EndpointNonsense, partial(_wrong_with, endpoint))
    except RewardError as err:
        return err
    return GroupScores.of(verdicts, endpoint.scorer)


def verdicts_of(
    who: str, group: GroupToScore, scores: Sequence[Score], malformed: type[RewardError],
    wrong_with: Callable[[Verdict], str] = lambda _: "",
) -> list[Verdict]:  # fmt: skip
    """Return the scores of a group's completions; raises an error of the first that is none.

    It is ``malformed`` for another number of scores and where ``wrong_with`` names a problem, ScoreRefused for none.
    """
    if len(scores) != len(group.completions):
        raise malformed(f"{who}: {len(scores)} scores for {len(group.completions)} completions")
    verdicts = []
    for number, score in enumerate(scores):
        if score.score is None or score.error is not None:
            raise ScoreRefused(f"{who}, completion {number}: {(score.error or 'score is null')[:_MAX_TEXT]}")
        verdicts.append(Verdict(score.score, score.parts))
        if problem := wrong_with(verdicts[-1]):
            raise malformed(f"{who}, completion {number}: {problem}")
    return verdicts


def _wrong_with(endpoint: Endpoint, verdict: Verdict) -> str:
    if not endpoint.min_score <= verdict.reward <= endpoint.max_score:
        return f"score {verdict.reward:g} is outside [{endpoint.min_score:g}, {endpoint.max_score:g}]"
    if missing := [part for part in endpoint.returns_parts if part not in verdict.parts]:
        return (
            f"it was registered to return the parts {', '.join(endpoint.returns_parts)}; missing: {', '.join(missing)}"
        )
    return ""


def cut_group(endpoint: Endpoint, group: GroupToScore) -> list[GroupToScore]:
    if endpoint.speaker.carries == "completion":
        return [
            group.model_copy(update={"group_id": f"{group.group_id}#{number}", "completions": [text]})
            for number, text in enumerate(group.completions)
        ]
    return [group]


def join_pieces(pieces: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a group from those of its pieces, of one completion each where there are several."""
    if len(pieces) == 1:
        return pieces[0]
    error = next((piece for piece in pieces if isinstance(piece, RewardError)), None)
    if error is not None:
        return error
    scored = [piece for piece in pieces if isinstance(piece, GroupScores)]
    verdicts = [
        Verdict(piece.rewards[0], {name: values[0] for name, values in piece.parts.items()}) for piece in scored
    ]
    return GroupScores.of(verdicts, scored[0].scorer)
