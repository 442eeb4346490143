"""``GET /v1/runs/{run}/events``: the events of a run as server-sent events; ``POST /v1/runs/{run}/metrics``: those of a script.

A script's events are lines of ``log-training/metrics.jsonl`` in the run's folder, which the first of them creates.

The stream of events is resumable by Last-Event-ID.

The id of an event is its number in the run's stream on NATS, so a client continues at any process of the API. Three kinds:

| event | id | data |
|---|---|---|
| `run` | its number | the stored event: `kind`, `source`, `at`, `data` |
| `state` | none | the state of the run, at first and whenever it changes |
| `gap` | none | the events after the client's last one are not stored any more, or the stream was created again |

A stream is bounded: a client that reads too slowly is disconnected, and continues where it was; so are all when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.console.report import curves
from penstock.console.report.event_fields import number, read_object
from penstock.console.tools import runs
from penstock.console.web.access import CALLER, Caller, Role
from penstock.console.web.context import Context, Logger, Reader, RunFolder, RunName, WebContext
from penstock.console.web.jobs import actions, job_file
from penstock.console.web.jobs.job_file import ALIVE
from penstock.console.web.problems import RESPONSES, Problem
from penstock.protocol import streams, subjects
from penstock.protocol.errors import PenstockError
from penstock.protocol.facts import RunEvent
from penstock.protocol.files import atomic_write
from penstock.protocol.record import run_folder
from penstock.protocol.transport.bus import Bus
from penstock.serving import strict_json

router = APIRouter(prefix="/v1", tags=["events"], responses=RESPONSES)
_OWNER = "logged-with.json"  # in the folder of a script: the name of the token that created its run
_MOST_DEPTH = 20  # of a configuration
MAX_STREAMS = 32
MAX_STREAMS_OF_TOKEN = 8  # so that one token leaves places for the others
MAX_WAITING = 200  # events of at most 64 kB that one client may be behind
_SLOW_S = 5.0  # a client that takes none of them for so long is disconnected
_POLL_S = 0.5
_RETRY_S = 2.0  # between tries to reach the NATS of a run that has a process
_IDLE_RETRY_S = 30.0  # of another run, whose NATS may be that of other runs too
_STATE_S = 1.0
_RETRY_MS = 1000
MAX_ID = 2**63 - 1


async def a_stream(request: Request) -> AsyncIterator[None]:
    """Count a stream of a token while it is open; a problem 429 when too many are."""
    open_streams: Counter[str] = request.app.state.event_streams
    caller: Caller | None = request.scope.get(CALLER)
    name = "" if caller is None else caller.name
    if open_streams[name] >= MAX_STREAMS_OF_TOKEN:
        raise Problem(
            429, f"{open_streams[name]} event streams of token {name} are open", fix="close one, or use another token"
        )
    if open_streams.total() >= MAX_STREAMS:
        raise Problem(429, f"{MAX_STREAMS} event streams are open", fix="close one, or try again")
    open_streams[name] += 1
    try:
        yield
    finally:
        open_streams[name] -= 1
        open_streams += Counter()  # without those that are 0


class LoggedEvent(BaseModel):
    """Figures of a step, a checkpoint with its evaluations, a state, or the configuration of a script."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["metrics", "checkpoint", "state", "config"] = "metrics"
    at: float = Field(default_factory=time.time, ge=0, le=2**53, description="Unix seconds.")
    step: int | None = Field(None, ge=0, le=2**53)
    values: dict[Annotated[str, Field(min_length=1, max_length=120)], Any] = Field({}, max_length=300)
    text: str = Field("", max_length=2000, description="The path of a checkpoint, the message of a state.")
    state: Literal["running", "finished", "failed"] = "running"

    @model_validator(mode="after")
    def _figures(self) -> LoggedEvent:
        for name, value in self.values.items() if self.kind in {"metrics", "checkpoint"} else ():
            if number(value) is None or isinstance(value, bool):
                raise ValueError(f"values.{name} = {value!r}: expected a finite number")
        if self.kind == "metrics" and self.step is None:
            raise ValueError("figures have no step; set step")
        if strict_json.is_deeper(self.values, _MOST_DEPTH):
            raise ValueError(f"values are nested more than {_MOST_DEPTH} times; flatten them")
        try:
            self.model_dump_json()
        except ValueError:  # a lone surrogate
            raise ValueError("a text is no Unicode; replace its surrogates") from None
        return self


class LoggedEvents(BaseModel):
    model_config = ConfigDict(extra="forbid")

    events: list[LoggedEvent] = Field(
        [], max_length=1000, description="None: the script only reports that it still runs."
    )


@router.post("/runs/{run}/metrics", status_code=204, response_class=Response)
def log_events(caller: Logger, run: RunName, web: Context, body: LoggedEvents) -> None:
    """Store events of a script; the first creates the run. What is sent again, because an answer was lost, does no harm."""
    folder = web.runs_dir / run
    place = curves.training_folder(folder, curves.LOG)
    if folder.is_symlink() or (folder.exists() and curves.command_of(folder) != curves.LOG):
        detail, fix = f"run {run} is not one of a script", "log to another name, or to this run with: penstock log"
        raise Problem(409, detail, expected="a new name, or a run that POST /metrics created", got=run, fix=fix)
    if not folder.exists():
        actions.refuse_too_many(web)
    run_folder.refuse_links(folder)
    place.mkdir(parents=True, exist_ok=True)
    with job_file.locked(place / "log.lock", f"run {run}"):
        owner = read_object(place / _OWNER)
        if owner is None:
            job_file.write_document(place / _OWNER, {"token": caller.name})
        elif caller.role is Role.LOG and owner.get("token") != caller.name:
            raise Problem(
                403,
                f"run {run} is logged with another token",
                expected=str(owner.get("token")),
                got=caller.name,
                fix="use its token",
            )
        _store(folder, place, body.events)


def _store(folder: Path, place: Path, events: Sequence[LoggedEvent]) -> None:
    """Append events to the files of a script, and flush them to the disk; the caller holds its lock.

    Steps have the form of those of a training on given answers. What it says of its state is a log.
    """
    result, states = place / curves.RESULT, [event for event in events if event.kind == "state"]
    if states and states[-1].state != "running":
        atomic_write(result, states[-1].model_dump_json(include={"state", "text"}), sync=True)
    elif events and events[-1].state == "running":
        result.unlink(missing_ok=True)
    steps, checkpoints, said = [], [], []
    for event in events:
        at = {"step": event.step, "at": event.at}
        if event.kind == "config":
            job_file.write_document(folder / runs.PLANNED, {"settings": {"config": event.values}, "origins": {}})
        elif event.kind == "checkpoint":
            checkpoints.append(json.dumps({**at, "path": event.text, "eval_results": event.values}))
        elif event.kind == "metrics":
            steps.append(json.dumps({**event.values, **at, "kind": "step"}))
        else:
            said.append(f"{time.strftime('%F %T', time.localtime(event.at))} {event.text}")
    for file, lines in (
        (place / "metrics.jsonl", steps),
        (folder / curves.CHECKPOINTS / "metrics.jsonl", checkpoints),
        (folder / "logs" / "script.log", said),
    ):
        file.parent.mkdir(exist_ok=True)
        with file.open("ab") as stored:
            # The empty line, which readers skip, ends what a console wrote when it was killed.
            stored.write("".join(f"{line}\n" for line in ("", *lines)).encode() if lines else b"")
            stored.flush()
            os.fsync(stored.fileno())
    os.utime(place / "metrics.jsonl")


@router.get("/runs/{run}/events", response_class=EventSourceResponse)
async def read_events(
    _: Reader,
    folder: RunFolder,
    web: Context,
    _counted: Annotated[None, Depends(a_stream)],
    after: Annotated[
        int | None,
        Query(ge=0, le=MAX_ID, description="Events after this number; 0: from the first. Default: new ones."),
    ] = None,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream the events of a run as they are written, until the client leaves or the server stops."""
    position = after
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        position = min(int(last_event_id), MAX_ID)
    stream = _Stream(web, folder, position)
    try:
        while not stream.is_over:
            events = await asyncio.to_thread(stream.poll)
            for event in events:
                yield event
            if events:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(web.closing.wait(), _POLL_S)
    finally:
        await asyncio.shield(asyncio.to_thread(stream.close))


class _Reading:
    """The events of one run, read on the bus's thread into a bounded queue."""

    def __init__(self, web: WebContext, folder: Path, position: int | None) -> None:
        self.position = position
        self.gap: dict[str, int] | None = None
        self.is_behind = False
        self._waiting: deque[tuple[int, RunEvent]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        run = folder.name
        self._bus: Bus = web.bus(run, name="console-events")
        try:
            self._start(run)
        except BaseException:
            self._bus.close()
            raise

    def _start(self, run: str) -> None:
        stream = streams.stream_name(run, "events")
        state = self._bus.stream_state(stream).wait()
        first, last = state.first_sequence, state.last_sequence
        if self.position is None:
            self.position = last
        elif self.position > last:
            self.gap, self.position = {"after": self.position, "next": first}, 0
        elif self.position and self.position + 1 < first:
            self.gap, self.position = {"after": self.position, "next": first}, first - 1
        self._bus.follow(stream, subjects.events(run), RunEvent, self._receive, after=self.position).wait()

    def _receive(self, fact: RunEvent, sequence: int, _subject: str) -> None:
        """Add an event; while the queue is full, nothing more is read from NATS."""
        with self._changed:
            has_room = self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING or self._closing, _SLOW_S)
            self.is_behind = self.is_behind or not has_room
            if not self.is_behind:
                self._waiting.append((sequence, fact))

    def take(self) -> list[tuple[int, RunEvent]]:
        with self._changed:
            events = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return events

    @property
    def is_down(self) -> bool:
        return self._bus.down_s > 0.0

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._bus.close()


class _Stream:
    """What one client gets, in order: the state of the run, gaps, and events."""

    def __init__(self, web: WebContext, folder: Path, position: int | None) -> None:
        self._web = web
        self._folder = folder
        self._position = position
        self._state: dict[str, Any] | None = None
        self._reading: _Reading | None = None
        self._next_state = self._next_try = 0.0
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over or self._web.closing.is_set()

    def poll(self) -> list[ServerSentEvent]:
        return [*self._new_state(), *self._begin(), *self._new_events()]

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _new_state(self) -> list[ServerSentEvent]:
        if time.monotonic() < self._next_state:
            return []
        self._next_state = time.monotonic() + _STATE_S
        if not self._folder.is_dir():
            self._is_over = True
            return []
        state = _state(self._folder)
        if state == self._state:
            return []
        self._state = state
        self._next_try = 0.0
        return [ServerSentEvent(event="state", data=state, retry=_RETRY_MS)]

    def _begin(self) -> list[ServerSentEvent]:
        if self._reading is not None or self._is_over or time.monotonic() < self._next_try:
            return []
        with contextlib.suppress(PenstockError):
            self._reading = _Reading(self._web, self._folder, self._position)
        is_alive = self._state is not None and self._state["state"] in ALIVE
        self._next_try = time.monotonic() + (_RETRY_S if is_alive else _IDLE_RETRY_S)
        gap = None if self._reading is None else self._reading.gap
        return [ServerSentEvent(event="gap", data=gap)] if gap else []

    def _new_events(self) -> list[ServerSentEvent]:
        if self._reading is None:
            return []
        events = self._reading.take()
        self._position = events[-1][0] if events else self._position
        if self._reading.is_behind:
            self._is_over = True
        elif self._reading.is_down:
            self._position = self._reading.position if self._position is None else self._position
            self.close()
        return [
            ServerSentEvent(id=str(event_id), event="run", data=_document(event_id, fact)) for event_id, fact in events
        ]


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = actions.read_state(folder, ask=False)
    except PenstockError as err:
        return {"run": folder.name, "state": "unknown", "detail": str(err)}
    return {"run": folder.name, "state": state.state, "detail": state.detail}


def _document(sequence: int, fact: RunEvent) -> dict[str, Any]:
    return {"sequence": sequence, "kind": fact.kind, "source": fact.source, "at": fact.at, "data": fact.data}
