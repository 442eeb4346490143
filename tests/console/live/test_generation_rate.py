"""The rate of generated tokens: a worker counts them once for each pack, and a large model's pack takes a minute."""

from __future__ import annotations

import pytest

from penstock.console.live.fleet import ServiceHistory
from penstock.protocol.facts import Heartbeat


def _history(*, every_s: int, tokens: int, until_s: int, stalls_at_s: int = 10**6) -> ServiceHistory:
    """Fold one heartbeat a second of a worker that counts ``tokens`` every ``every_s`` seconds."""

    def beat(second: int) -> Heartbeat:
        figures = {"tokens_generated": float(min(second, stalls_at_s) // every_s * tokens)}
        return Heartbeat(
            role="rollout", service_id="w", at=1000.0 + second, state="working", busy_s=float(second), idle_s=0.0,
            cpu_s=float(second), figures=figures,
        )  # fmt: skip

    history = ServiceHistory(beat(0), 1000.0, in_window=True)
    for second in range(1, until_s):
        history.fold(beat(second), 1000.0 + second)
    return history


@pytest.mark.parametrize("until_s", [400, 415, 439])
def test_packs_that_take_a_minute_are_a_rate_and_not_zero(until_s: int) -> None:
    """The window goes back over several packs, wherever in a pack the reader looks."""
    assert _history(every_s=60, tokens=6000, until_s=until_s).tokens_per_s == pytest.approx(100.0, rel=0.35)


def test_the_rate_of_a_fast_worker_is_that_of_the_last_seconds() -> None:
    """It changes within seconds, and a worker that generates nothing for minutes has the rate 0."""
    assert _history(every_s=1, tokens=50, until_s=60).tokens_per_s == pytest.approx(50.0)
    assert _history(every_s=1, tokens=50, until_s=1000, stalls_at_s=500).tokens_per_s == 0.0
