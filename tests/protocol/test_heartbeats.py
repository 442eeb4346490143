"""How often heartbeats are written, and when their absence means that a service is gone."""

from __future__ import annotations

import pytest

from penstock.protocol import heartbeats, streams
from penstock.protocol.facts import Heartbeat


@pytest.mark.parametrize(
    ("num_services", "period_s"), [(0, 1.0), (3, 1.0), (100, 1.0), (250, 2.5), (1000, 10.0), (50_000, 10.0)]
)
def test_the_more_workers_there_are_the_less_often_each_writes(num_services: int, period_s: float) -> None:
    """All of them together write about a hundred a second, each at least every ten seconds."""
    assert heartbeats.worker_period_s(num_services, heartbeats.LIVE_TTL_S) == period_s


def test_the_period_fits_into_the_bucket_of_an_older_run() -> None:
    """A bucket whose keys expire after 10 s gets six heartbeats in that time from each worker, however many there are."""
    assert heartbeats.worker_period_s(1000, 10.0) == pytest.approx(10.0 / 6)
    assert heartbeats.worker_period_s(1000, 0.0) == 1.0


@pytest.mark.parametrize("period_s", [1.0, 2.5, 10.0])
def test_a_service_is_reported_as_lost_before_its_key_expires(period_s: float) -> None:
    """A watching reader sees the old heartbeat for two more periods, so that an expired key is a known loss."""
    beat = Heartbeat(role="rollout", service_id="w", at=0.0, state="idle", period_s=period_s)
    assert heartbeats.lost_after_s(beat) == 4 * period_s
    assert heartbeats.lost_after_s(beat) + 2 * period_s <= heartbeats.expires_after_s(period_s) <= heartbeats.LIVE_TTL_S


def test_a_heartbeat_without_a_period_is_one_of_each_second() -> None:
    assert heartbeats.lost_after_s(Heartbeat(role="rollout", service_id="w", at=0.0, state="idle")) == 4.0
    assert heartbeats.expires_after_s(heartbeats.PERIOD_S) == 10.0
    assert streams.live_bucket("r").ttl_s == heartbeats.LIVE_TTL_S
