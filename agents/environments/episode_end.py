"""How an episode ended, decided from what happened last; pure. The table of docs/environments.md, one `_ENDS` entry for each of its rows."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.agents.proxy.calls import Spent
from penstock.protocol.episode import EndStatus

Verdict = Literal["done", "truncated", "failed"]
Then = Literal["trained", "restarted", "requeued"]
Spender = Literal["policy", "tools", "engine"]
ENGINE_CODES = ("engine_error", "engine_timeout")
_LOST_SHARE = 0.2  # of an episode's time, without which it might have ended
_SHELL_SIGNALS = range(129, 129 + signal.NSIG)  # exit statuses by which a shell or a sandbox reports a signal


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened in an episode. A refused request counts until a later one is accepted, a failed one until a later one is answered."""

    is_answered: bool = True  # an answer of the policy is trained
    limit: str = ""  # that refused the last request: max_turns, context or max_stored_tokens
    failed_by: str = ""  # error code with which the last request failed through no fault of the agent
    over_time: Spender | None = None  # the deadline passed, and this is whose time it was
    exit_status: int = 0  # of a program, negative: the signal that ended it
    verdict: Verdict = "done"  # the environment's; a program has none but its exit status
    report: Literal["given", "missing", "wrong", "not_needed"] = "not_needed"  # of the program

    @property
    def is_killed(self) -> bool:
        return self.over_time is None and (self.exit_status < 0 or self.exit_status in _SHELL_SIGNALS)

    @property
    def has_failed(self) -> bool:
        return self.over_time is None and self.exit_status != 0 and not self.limit


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    cause: str
    status: EndStatus
    then: Then


_ENDS: tuple[tuple[Callable[[Happened], bool], EpisodeEnd], ...] = (  # the first that applies
    (
        lambda it: it.failed_by in ENGINE_CODES or it.over_time == "engine",
        EpisodeEnd("engine_failed", "failed", "requeued"),
    ),
    (lambda it: it.failed_by != "", EpisodeEnd("request_failed", "failed", "restarted")),
    (lambda it: it.over_time == "tools", EpisodeEnd("over_time", "timeout", "restarted")),
    (lambda it: it.is_killed, EpisodeEnd("crashed", "failed", "restarted")),
    (lambda it: it.has_failed, EpisodeEnd("crashed", "failed", "restarted")),
    (lambda it: it.over_time is None and it.verdict == "failed", EpisodeEnd("environment", "failed", "restarted")),
    (lambda it: not it.is_answered, EpisodeEnd("no_answer", "failed", "restarted")),
    (lambda it: it.report == "wrong", EpisodeEnd("wrong_report", "failed", "restarted")),
    (lambda it: it.over_time == "policy", EpisodeEnd("over_time", "timeout", "trained")),
    (lambda it: it.limit != "", EpisodeEnd("limit", "truncated", "trained")),
    (lambda it: it.verdict == "truncated", EpisodeEnd("limit", "truncated", "trained")),
    (lambda it: it.report == "missing", EpisodeEnd("no_report", "failed", "restarted")),
)


def spender_of(spent: Spent, total_s: float, *, has_result: bool = False) -> Spender:
    """Return whose time a deadline is: the policy's if it spent half of it, and nothing else lost it a fifth.

    An episode with a result is not measured by what it did last.
    """
    if spent.engine_s >= _LOST_SHARE * total_s and spent.policy_s + spent.engine_s >= total_s / 2:
        return "engine"
    is_idle = spent.idle_s >= _LOST_SHARE * total_s and not has_result
    return "tools" if is_idle or spent.policy_s < total_s / 2 else "policy"


def end_of(happened: Happened) -> EpisodeEnd:
    ends = (end for applies, end in _ENDS if applies(happened))
    return next(ends, EpisodeEnd("done", "done", "trained"))
