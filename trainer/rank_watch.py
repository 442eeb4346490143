"""Notices a rank that hangs without exiting: the others would wait for it in a collective until the deadline of the day.

A thread of rank 0 asks every other rank what it does, over a channel of its own; a thread of each answers. A rank that is
suspended, or whose interpreter is blocked, does not answer, and one that is not asked any more knows that rank 0 hangs. Either
ends its own process, so that the launcher ends the others and starts all ranks again from the newest checkpoint. What is not
noticed: a rank whose threads answer while its main thread waits for ever outside a collective with a rank that hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.trainer.errors import RankUnresponsive
from penstock.trainer.ranks import RankChannel

watch_log = structlog.get_logger("trainer.rank_watch")

HUNG = 75  # exit code (EX_TEMPFAIL): started again, the run resumes
_ASKED_PER_DEADLINE = 6
_END = b"end"


@dataclass(slots=True)
class RankActivity:
    """What the main thread of a rank does; set by it, read by its thread of the watch."""

    phase: str = "loading"
    step: int = 0
    since: float = field(default_factory=time.monotonic)

    def begin(self, phase: str, step: int) -> None:
        """Take note that a phase begins, after ``step`` steps of the run."""
        self.phase, self.step, self.since = phase, step, time.monotonic()

    def describe(self) -> str:
        """Return it in words."""
        return f"`{self.phase}` after step {self.step}, for {time.monotonic() - self.since:.0f} s"


class RankWatch:
    """Asks the other ranks in a thread (rank 0); use as a context manager, whose exit tells them that the watch ends."""

    def __init__(self, channel: RankChannel, own: RankActivity, deadline_s: float, end: Callable[[str], None]) -> None:
        """Call ``end`` with a reason when a rank has not answered for ``deadline_s``."""
        self._channel, self._own, self._deadline_s, self._end_process = channel, own, deadline_s, end
        self._last: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rank-watch", daemon=True)

    def __enter__(self) -> RankWatch:
        """Start to ask."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop asking."""
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


def answer_watch(channel: RankChannel, own: RankActivity, deadline_s: float, end: Callable[[str], None]) -> None:
    """Answer rank 0 in a daemon thread; call ``end`` when it has not asked for ``deadline_s`` (all other ranks)."""

    def work() -> None:
        asked, deadline = time.monotonic(), None  # rank 0 begins to ask when it begins to train
        try:
            while channel.answer_one(lambda _: own.describe().encode(), deadline_s=deadline) != _END:
                asked, deadline = time.monotonic(), deadline_s
        except RankUnresponsive as err:
            _give_time(asked, deadline_s)
            end(f"{err}. This rank: {own.describe()}")

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
