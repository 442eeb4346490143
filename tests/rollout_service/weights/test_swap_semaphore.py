"""Permits to swap: only a fraction of the engines pauses concurrently, and no worker waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from penstock.protocol import streams
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry
from penstock.rollout_service.weights.weight_swap import SwapSemaphore, num_permits


def beat(bus: Bus, run_id: str, *workers: str) -> None:
    live = bus.key_value(streams.live_bucket(run_id).bucket).wait()
    for worker in workers:
        fact = Heartbeat(role="rollout", service_id=worker, at=0.0, state="")
        live.put(streams.heartbeat_key("rollout", worker), encode(fact)).wait()


def leases(bus: Bus, run_id: str) -> list[str]:
    return [entry.key for entry in bus.key_value(streams.lease_bucket(run_id).bucket).wait().entries().wait()]


@pytest.mark.parametrize(("workers", "share", "expected"), [(1, 1.0, 0), (2, 0.5, 1), (3, 0.01, 1), (8, 0.25, 2)])
def test_a_share_of_the_workers_but_at_least_one(workers: int, share: float, expected: int):
    assert num_permits(workers, share) == expected


async def test_permits_are_limited_and_released(bus: Bus, run_streams: str):
    """Of six workers with a fraction of a third, at most two hold a permit, and each gets one."""
    workers = [f"w{number}" for number in range(6)]
    await asyncio.to_thread(beat, bus, run_streams, *workers)
    holding, most, had, both = 0, 0, [], asyncio.Event()

    async def swap(worker: str) -> None:
        nonlocal holding, most
        async with SwapSemaphore(bus, run_id=run_streams, worker_id=worker, max_share=0.34).permit():
            holding += 1
            most = max(most, holding)
            had.append(worker)
            if len(had) == 2:
                both.set()
            await both.wait()  # the first holds its permit until a second one has one too
            holding -= 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(swap(worker))
    assert (most, sorted(had)) == (2, workers)
    assert await asyncio.to_thread(leases, bus, run_streams) == []


async def test_a_paused_worker_does_not_delete_the_permit_of_another(
    bus: Bus, run_streams: str, monkeypatch: pytest.MonkeyPatch
):
    await asyncio.to_thread(beat, bus, run_streams, "w0", "w1")
    semaphore = SwapSemaphore(bus, run_id=run_streams, worker_id="w0", max_share=0.5)
    async with semaphore.permit():
        store = semaphore._leases
        assert store is not None
        read = store.get

        async def get(key: str, **how: bool) -> Entry | None:
            entry = await read(key, **how)
            await store.put(key, b"w1")  # the worker is paused here, and its permit expires
            return entry

        monkeypatch.setattr(store, "get", get)
    assert await asyncio.to_thread(leases, bus, run_streams) == [streams.swap_permit_key(0)]


async def test_a_worker_swaps_without_a_permit_after_the_deadline(bus: Bus, run_streams: str):
    await asyncio.to_thread(beat, bus, run_streams, "w0", "w1")
    async with SwapSemaphore(bus, run_id=run_streams, worker_id="w0", max_share=0.5).permit():
        async with SwapSemaphore(bus, run_id=run_streams, worker_id="w1", max_share=0.5, deadline_s=0.1).permit():
            assert await asyncio.to_thread(leases, bus, run_streams) == [streams.swap_permit_key(0)]
        assert await asyncio.to_thread(leases, bus, run_streams) == [streams.swap_permit_key(0)]
