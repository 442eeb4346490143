"""The episodes that a server plays: one world each, which moves once for each step however often the step is sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from penstock.agents.environments.over_http import wire
from penstock.agents.environments.over_http.wire import ProblemCode, Score, Scored, Start, Started, Step, Stepped
from penstock.agents.environments.play import (
    EnvironmentFailed,
    Play,
    Row,
    call,
    checked_messages,
    checked_reply,
    checked_score,
)
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import RequestRefused
from penstock.serving.hosting import drain

Answer = TypeVar("Answer")

log = structlog.get_logger("rollout.hosting")

_THREADS = 64  # plain methods of plays run on these
_GRACE_S = 30.0  # a worker may need that long to say that an episode is over
_SWEEP_S = 1.0


class Refused(Exception):
    def __init__(self, status: int, code: ProblemCode, text: str) -> None:
        super().__init__(text[:1000])
        self.status = status
        self.code: ProblemCode = code


@dataclass(slots=True)
class _Held:
    digest: bytes  # of the body that started it
    starting: asyncio.Task[Started]
    ends: float  # then no worker plays it any more
    used: float  # when it was called last
    play: Play | None = None
    step: int = 0  # the last one that was received
    step_digest: bytes = b""
    stepping: asyncio.Task[Stepped] | None = None
    scoring: asyncio.Task[Scored] | None = None
    is_over: bool = False

    @property
    def is_busy(self) -> bool:
        return not all(task is None or task.done() for task in (self.starting, self.stepping, self.scoring))


class Episodes:
    def __init__(
        self, environment: TurnEnvironment, version: str, *, capacity: int, reply_deadline_s: float, idle_s: float
    ) -> None:
        """Start with none.

        Args:
            environment: Makes the plays.
            version: Of its rules.
            capacity: Episodes that are played at once.
            reply_deadline_s: Seconds that a method of a play may take.
            idle_s: Seconds without a call after which an episode is closed: its worker was killed.
        """
        self.environment, self.version, self.capacity = environment, version, capacity
        self.draining = False
        self._reply_deadline_s, self._idle_s = reply_deadline_s, idle_s
        self._held: dict[str, _Held] = {}
        self._num_closing = 0
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="play")

    @property
    def running(self) -> int:
        return len(self._held) + self._num_closing

    async def start(self, body: Start) -> Started:
        digest = _digest(body)
        held = self._held.get(body.id)
        if held is None:
            if self.draining:
                raise Refused(503, "draining", "this server takes no new episodes; use another one")
            if len(self._held) >= self.capacity:
                raise Refused(503, "full", f"{self.capacity} episodes are played here; try again later")
            now = time.monotonic()
            held = _Held(digest, _task(self._start(body)), ends=now + body.deadline_s + _GRACE_S, used=now)
            self._held[body.id] = held
        elif held.digest != digest:
            raise Refused(409, "step_refused", f"episode {body.id} was started with another body; use a new id")
        try:
            return await _result_of(held.starting)
        except Refused:
            await self.end(body.id)  # its place is free again
            raise

    async def _start(self, body: Start) -> Started:
        if body.version not in ("", self.version):
            raise Refused(409, "wrong_version", f"version {self.version!r} is played here, not {body.version!r}")
        try:
            options = self.environment.options.model_validate(body.options)
            messages = wire.read(body.row.messages).messages if body.row.messages else ()
            row = Row(messages, body.row.ground_truth, body.row.extra_info, body.row.data_source)
            play = self.environment.play(int(body.seed), row, options)
        except (ValidationError, RequestRefused, ValueError) as err:
            raise Refused(422, "row_refused", f"{type(err).__name__}: {err}") from None
        except Exception as err:
            log.exception("play() failed", episode=body.episode)
            raise Refused(500, "environment_failed", f"play(): {type(err).__name__}: {err}") from None
        self._held[body.id].play = play
        first = await self._call(play.start, body.episode)
        with _refusing("start()"):
            messages = checked_messages(first, is_first=True)
            written = [wire.written(message) for message in messages]
            scores = {"scores": True} if type(play).score is not Play.score else {}  # absent: as in `write_reply`
            return Started(messages=written, tools=list(play.tools), version=play.version or self.version, **scores)

    async def step(self, episode_id: str, body: Step) -> Stepped:
        held, digest = self._started(episode_id), _digest(body)
        if body.step == held.step and held.stepping is not None:
            if digest != held.step_digest:
                raise Refused(409, "step_refused", f"step {body.step} was another answer")
            return await _result_of(held.stepping)
        if body.step != held.step + 1 or held.is_busy or held.is_over:
            state = "the episode is over" if held.is_over else f"expected step {held.step + 1}"
            raise Refused(409, "step_refused", f"step {body.step} is out of order: {state}")
        held.step, held.step_digest = body.step, digest
        held.stepping = _task(self._step(held, episode_id, body))
        return await _result_of(held.stepping)

    async def _step(self, held: _Held, episode_id: str, body: Step) -> Stepped:
        assert held.play is not None
        try:
            answer = wire.read([body.message]).messages[0]
        except RequestRefused as err:
            raise Refused(400, "bad_request", f"message: {err}") from None
        held.is_over = True  # also where the environment fails: what became of its world is not known
        returned = await self._call(functools.partial(held.play.step, answer), episode_id)
        with _refusing("step()"):
            reply = checked_reply(returned)
            if not reply.is_done:
                checked_messages(reply.messages, is_first=False)
            stepped = wire.write_reply(reply)
        held.is_over = reply.is_done
        held.used = time.monotonic()
        return stepped

    async def score(self, episode_id: str, body: Score) -> Scored:
        held = self._started(episode_id)
        if held.scoring is None:
            if body.step != held.step or held.is_busy or held.is_over:
                state = "the episode is over" if held.is_over else f"the last step is {held.step}"
                raise Refused(409, "step_refused", f"the score after step {body.step} is out of order: {state}")
            held.is_over = True
            held.scoring = _task(self._score(held, episode_id))
        elif body.step != held.step:
            raise Refused(409, "step_refused", f"the score was asked after step {held.step}, not {body.step}")
        return await _result_of(held.scoring)

    async def _score(self, held: _Held, episode_id: str) -> Scored:
        assert held.play is not None
        returned = await self._call(held.play.score, episode_id)
        held.used = time.monotonic()
        with _refusing("score()"):
            return Scored(reward=checked_score(returned))

    def _started(self, episode_id: str) -> _Held:
        held = self._held.get(episode_id)
        if held is None or not held.starting.done():
            raise Refused(404, "unknown_episode", f"no episode {episode_id} is played here; start another one")
        held.used = time.monotonic()
        return held

    async def _call(self, function: Callable[[], Any], episode: str) -> Any:
        try:
            return await call(function, self._reply_deadline_s, self._executor)
        except EnvironmentFailed as err:
            log.warning("environment failed", episode=episode, problem=str(err), exc_info=err.__cause__)
            raise Refused(500, "environment_failed", str(err)) from None

    async def end(self, episode_id: str) -> None:
        held = self._held.pop(episode_id, None)
        if held is None:
            return
        for task in (held.starting, held.stepping, held.scoring):
            if task is not None and not task.done():
                task.cancel()
        if held.play is not None:
            self._num_closing += 1
            try:
                with contextlib.suppress(Refused):  # logged
                    await self._call(held.play.close, episode_id)
            finally:
                self._num_closing -= 1

    async def sweep(self) -> None:
        """Close, until cancelled, episodes whose worker is gone: it was killed, or lost the connection."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for episode_id, held in list(self._held.items()):
                if now > held.ends or (not held.is_busy and now - held.used > self._idle_s):
                    log.warning("episode closed: no call", episode_id=episode_id, idle_s=round(now - held.used, 1))
                    await self.end(episode_id)

    async def drain(self, deadline_s: float) -> None:
        self.draining = True
        await drain(lambda: self.running, "episodes", deadline_s)

    async def close(self) -> None:
        for episode_id in list(self._held):
            await self.end(episode_id)
        self._executor.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except (EnvironmentFailed, ValidationError) as err:
        raise Refused(500, "environment_failed", f"{what}: {err}") from None


async def _result_of(task: asyncio.Task[Answer]) -> Answer:
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise Refused(404, "unknown_episode", "the episode was ended meanwhile") from None
        raise


def _task(action: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.get_running_loop().create_task(action)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


def _digest(body: Start | Step) -> bytes:
    return hashlib.sha256(body.model_dump_json().encode()).digest()
