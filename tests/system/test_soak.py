"""What `make soak` accepts as not growing."""

from __future__ import annotations

import pytest

from tests.rigs.soak import Sample, judge


@pytest.mark.parametrize(
    ("name", "grown_mb", "grows"),
    [
        ("trainer", 15.0, False),  # 2.5 %
        ("trainer", 20.0, True),  # 3.3 %
        ("reward", 3.0, False),
        ("reward", 5.0, True),
        ("s3-server", 19.0, False),  # 19 kB a step
        ("s3-server", 21.0, True),
    ],
)
def test_memory_may_grow_by_a_share_and_that_of_the_s3_server_with_the_steps(
    name: str, grown_mb: float, grows: bool
) -> None:
    """Between the medians of the second and the last third, a thousand steps apart."""
    start = {"trainer": 600e6, "reward": 140e6, "s3-server": 90e6}[name]
    samples = [
        Sample(at_s=float(number), step=third * 1000, memory={name: int(start + max(0, third - 1) * grown_mb * 1e6)})
        for third in range(3)
        for number in range(third * 10, third * 10 + 10)
    ]
    (line,) = judge(samples)
    assert line.grows is grows


@pytest.mark.parametrize(("grown_mb", "grows"), [(15.0, False), (20.0, True)])
def test_nats_server_may_grow_with_the_files_that_its_streams_write(grown_mb: float, grows: bool) -> None:
    """Three bytes for each byte of a stream's largest file, until that is full: a smaller next file gives nothing back."""
    samples = []
    for number in range(30):
        third = number // 10
        block = {0: 1e6, 1: 3e6, 2: 8e6 if number % 2 else 1e6}[third]  # 5 MB larger
        memory = 60e6 + max(0, third - 1) * grown_mb * 1e6
        samples.append(
            Sample(
                at_s=float(number), step=number, memory={"nats-server": int(memory)}, blocks={"run-events": int(block)}
            )
        )
    (line,) = judge(samples)
    assert line.grows is grows


@pytest.mark.parametrize(("per_step", "grows"), [(1.0, False), (1.3, True)])
def test_what_is_kept_for_a_time_follows_the_steps_per_second(per_step: float, grows: bool) -> None:
    """The last third is half as fast again: so many more packs are kept; more than that is growth."""
    samples, step = [], 0.0
    for number in range(90):
        rate = 1.0 if number < 60 else 1.5
        step += rate
        packs = 60e6 * rate * (1.0 if number < 60 else per_step)
        samples.append(Sample(at_s=float(number), step=int(step), disk={"objects: packs": int(packs)}))
    (line,) = judge(samples)
    assert line.grows is grows
