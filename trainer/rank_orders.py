"""The same program on every rank: rank 0 calls a method of an object that every rank holds, and all ranks run it.

An order is the name of a method and its arguments as JSON. The other ranks check the arguments against the method's annotations, and
run only methods that are marked as orders; nothing is unpickled.

| order | travels by | on the other ranks | answers |
|---|---|---|---|
| a call of a method with `on_all_ranks` | broadcast | the training thread, in `RankProgram.follow` | none: the method exchanges what it needs |
| `RankOrders.ask`, for a method with `order` | a separate channel | a thread, while training goes on | each rank's result or error |

A rank that hangs without exiting would let the others wait in a collective: `RankWatch` on rank 0 asks every other rank what it does, over a
separate channel, and a thread of each answers. A rank that does not answer, and one that is not asked any more, ends the process that
notices it, so that the launcher starts all ranks again from the newest checkpoint. Not noticed: a rank whose threads answer while its main
thread waits outside a collective for a rank that hangs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints

import msgpack
import structlog
from pydantic import TypeAdapter
from pydantic_core import to_json

from penstock.protocol.errors import PenstockError
from penstock.trainer.errors import RankUnresponsive
from penstock.trainer.ranks import RankChannel, Ranks

watch_log = structlog.get_logger("trainer.rank_watch")

HUNG = 75  # exit code (EX_TEMPFAIL): started again, the run resumes
_ASKED_PER_DEADLINE = 6
_END = b"end"
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Program = TypeVar("Program", bound="RankProgram")
log = structlog.get_logger("trainer.rank_orders")
_NOT_SENT = "not sent"
LeaderOnly = Annotated[T, _NOT_SENT]  # the type of an argument that rank 0 keeps; on the other ranks it has its default
_MARK = "is_rank_order"
_DONE, _FAILED = b"=", b"!"  # first byte of an answer; a JSON value or a message follows


@dataclass(slots=True)
class RankActivity:
    """What the main thread of a rank does; set by it, read by its thread of the watch."""

    phase: str = "loading"
    step: int = 0
    since: float = field(default_factory=time.monotonic)

    def begin(self, phase: str, step: int) -> None:
        self.phase, self.step, self.since = phase, step, time.monotonic()

    def describe(self) -> str:
        return f"`{self.phase}` after step {self.step}, for {time.monotonic() - self.since:.0f} s"


class RankWatch:
    """Asks the other ranks in a thread (rank 0); use as a context manager, whose exit tells them that the watch ends."""

    def __init__(
        self, channel: RankChannel, activity: RankActivity, deadline_s: float, end: Callable[[str], None]
    ) -> None:
        self._channel, self._own, self._deadline_s, self._end_process = channel, activity, deadline_s, end
        self._last: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._deadline_s)

    def _work(self) -> None:
        asked = time.monotonic()
        try:
            while True:
                asked = time.monotonic()
                _, answers = self._channel.ask(b"?", lambda: None, deadline_s=self._deadline_s)
                self._last = [answer.decode() for answer in answers]
                if self._stop.wait(self._deadline_s / _ASKED_PER_DEADLINE):
                    break
            self._channel.ask(_END, lambda: None, deadline_s=self._deadline_s)
        except RankUnresponsive as err:
            _give_time(asked, self._deadline_s)
            if not self._stop.is_set():
                seen = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self._last, start=1))
                self._end_process(f"{err}. Last answers: {seen or 'none'}. Rank 0: {self._own.describe()}")


def answer_watch(channel: RankChannel, activity: RankActivity, deadline_s: float, end: Callable[[str], None]) -> None:
    """Answer rank 0 in a daemon thread; call ``end`` when it has not asked for ``deadline_s`` (all other ranks)."""

    def work() -> None:
        asked, deadline = time.monotonic(), None  # rank 0 begins to ask when it begins to train
        try:
            while channel.answer_one(lambda _: activity.describe().encode(), deadline_s=deadline) != _END:
                asked, deadline = time.monotonic(), deadline_s
        except RankUnresponsive as err:
            _give_time(asked, deadline_s)
            end(f"{err}. This rank: {activity.describe()}")

    threading.Thread(target=work, name="rank-watch", daemon=True).start()


def _give_time(asked: float, deadline_s: float) -> None:
    """Let the main thread end by itself if the other rank exited: its collectives fail at once, and its error says more."""
    if time.monotonic() - asked < 0.9 * deadline_s:
        time.sleep(deadline_s)


def end_process(reason: str) -> None:
    """End this process at once, as a SIGKILL would: its main thread cannot be reached."""
    watch_log.error("a rank hangs: this process ends, so that all ranks are started again", reason=reason)
    sys.stderr.write(f"{reason}\n")
    sys.stderr.flush()
    os._exit(HUNG)


def order(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Mark a method as one that `RankOrders` may ask for. Arguments and result are annotated with types that JSON can hold."""
    setattr(method, _MARK, True)
    return method


def on_all_ranks(method: Callable[Concatenate[Program, P], R]) -> Callable[Concatenate[Program, P], R]:
    """Have all ranks run a method when rank 0 calls it, with the same arguments except those that are `LeaderOnly`.

    Such a method calls no other one that is decorated so.
    """

    @functools.wraps(order(method))
    def lead(self: Program, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.ranks.num_ranks > 1:
            self.activity.begin(method.__name__, self.num_steps_done)
            self.ranks.broadcast(pack_order(method, *args, **kwargs))
        return method(self, *args, **kwargs)

    return lead


class RankProgram:
    """An object that every rank holds. Rank 0 calls its methods; the others run `follow`, which makes the same calls in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.activity = RankActivity()

    @property
    def num_steps_done(self) -> int:
        raise NotImplementedError

    def follow(self) -> None:
        while True:
            self.activity.begin("waiting for rank 0", self.num_steps_done)
            data = self.ranks.broadcast(None)
            if data is None:
                return
            method, arguments = read_order(type(self), data)
            self.activity.begin(method.__name__, self.num_steps_done)
            method(self, **arguments)

    def dismiss(self) -> None:
        self.ranks.broadcast(None)


class RankOrders(Generic[T]):
    """Orders to the objects of one type that all ranks hold, carried out in a thread of each rank while training goes on."""

    def __init__(self, target: T, ranks: Ranks | None, name: str, error: type[Exception]) -> None:
        """Open a channel on every rank, in the same order; the ranks but 0 carry out orders in a daemon thread called ``name``.

        ``target`` is this rank's object. Without ``ranks`` one process is alone.
        """
        self._own, self._error = target, error
        self._channel = ranks.channel() if ranks is not None and ranks.num_ranks > 1 else None
        if self._channel is not None and ranks is not None and not ranks.is_leader:
            threading.Thread(target=self._channel.listen, args=(self._answer,), name=name, daemon=True).start()

    def ask(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a method on all ranks, and return the results in the order of ranks (rank 0).

        Raises what it raises on rank 0, ``error`` that names the other ranks that failed, RankUnresponsive for one that exited.
        """
        if self._channel is None:
            return [method(self._own, *args, **kwargs)]
        data = pack_order(method, *args, **kwargs)
        local_result, answers = self._channel.ask(data, lambda: method(self._own, *args, **kwargs))
        failed = [(rank, answer) for rank, answer in enumerate(answers, start=1) if answer.startswith(_FAILED)]
        if problems := [f"rank {rank}: {answer[1:].decode()}" for rank, answer in failed]:
            raise self._error("; ".join(problems))
        result = _result_type(method)
        return [local_result, *(result.validate_json(answer[1:], strict=True) for answer in answers)]

    def _answer(self, data: bytes) -> bytes:
        try:
            method, arguments = read_order(type(self._own), data)
            return _DONE + to_json(method(self._own, **arguments), inf_nan_mode="constants")
        except Exception as err:  # rank 0 has to receive any error, or it would wait for an answer
            log.exception("an order of rank 0 failed on this rank")
            problem = str(err) if isinstance(err, PenstockError) else f"{type(err).__name__}: {err}"
            return _FAILED + problem.encode()


@functools.cache
def _types(method: Callable[..., Any]) -> Mapping[str, TypeAdapter[Any]]:
    hints = {name: hint for name, hint in get_type_hints(method, include_extras=True).items() if name != "return"}
    return {
        name: TypeAdapter(hint) for name, hint in hints.items() if _NOT_SENT not in getattr(hint, "__metadata__", ())
    }


@functools.cache
def _result_type(method: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(method)["return"])


def pack_order(method: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """Return an order as MessagePack: the method's name, and the arguments that were passed and are sent, by name, as JSON."""
    arguments, types = inspect.signature(method).bind(None, *args, **kwargs).arguments, _types(method)
    absolute = {name: value.absolute() if isinstance(value, Path) else value for name, value in arguments.items()}
    sent = {name: to_json(value, inf_nan_mode="constants") for name, value in absolute.items() if name in types}
    data = msgpack.packb([method.__name__, sent])
    assert data is not None
    return data


def read_order(kind: type, data: bytes) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the method of an order and its arguments; raises ValueError for unmarked ones or wrong types."""
    name, sent = msgpack.unpackb(data)
    attribute = getattr(kind, name, None)
    if attribute is None or not getattr(attribute, _MARK, False):
        raise ValueError(
            f"internal error, please report: rank 0 ordered {name!r}, which is no order of {kind.__name__}"
        )
    method = inspect.unwrap(attribute)
    types = _types(method)
    return method, {key: types[key].validate_json(value, strict=True) for key, value in sent.items()}
