"""When engines and trainer change on a shared GPU, and how a wait for it ends."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from pathlib import Path

import pytest

from penstock.protocol.errors import DeviceNotFreed
from penstock.protocol.shared_device import SharedDevices
from penstock.rollout_service.device_turns import EngineTurns
from penstock.trainer.device_turns import TurnFacts
from penstock.trainer.rank_device import RankDevice


@pytest.mark.parametrize(
    ("has_batch", "num_to_sample", "awaits_engine", "is_free", "trainer", "engines"),
    [
        (False, 8, False, False, False, True),  # nothing to train
        (False, 0, False, False, False, False),  # nothing to sample either: no change costs seconds
        (True, 8, False, False, False, False),  # another whole batch can be sampled, while one waits
        (True, 3, False, False, True, False),  # the rest makes no batch
        (True, 0, False, False, True, False),
        (True, 8, False, True, True, False),  # no engine runs
        (True, 3, True, False, True, True),  # an evaluation is waited for, at the start or the end
    ],
)
def test_the_device_goes_to_whom_it_helps(
    has_batch: bool, num_to_sample: int, awaits_engine: bool, is_free: bool, trainer: bool, engines: bool
) -> None:
    facts = TurnFacts(has_batch, num_to_sample, 4, awaits_engine, is_free)
    assert (facts.trainer_is_due, facts.engines_are_due) == (trainer, engines)


def test_the_device_never_goes_back_and_forth_without_work_in_between() -> None:
    """Whatever the facts, not both are due, unless an evaluation is waited for."""
    for has_batch, to_sample, is_free in itertools.product((False, True), range(12), (False, True)):
        facts = TurnFacts(has_batch, to_sample, 4, is_free=is_free)
        assert not (facts.trainer_is_due and facts.engines_are_due)


@pytest.mark.parametrize("holder", ["engine", "trainer"])
def test_a_wait_for_the_turn_ends_with_the_name_of_who_has_it(tmp_path: Path, holder: str) -> None:
    """And leaves nothing behind: the other's turn can come again."""
    with (
        SharedDevices(["a"], tmp_path, role="engine", run_id="r") as engine,
        SharedDevices(["a"], tmp_path, role="trainer", run_id="r") as rank,
    ):
        most = time.monotonic() + 20
        held = engine if holder == "engine" else rank
        assert held.try_take()

        async def wait() -> object:
            if holder == "engine":
                return RankDevice(rank, 0.05).wait(lambda: time.monotonic() > most)
            return await asyncio.wait_for(EngineTurns(engine, deadline_s=0.05).take(), 20)

        with pytest.raises(DeviceNotFreed, match=rf"turn_deadline_s = 0 s; a: {holder} of run r \(pid {os.getpid()}\)"):
            asyncio.run(wait())
        assert not engine.is_wanted
        held.give()
        assert (rank if holder == "engine" else engine).try_take()


def test_a_rank_that_is_stopped_while_it_waits_wants_the_device_no_more(tmp_path: Path) -> None:
    with (
        SharedDevices(["a"], tmp_path, role="engine", run_id="r") as engine,
        SharedDevices(["a"], tmp_path, role="trainer", run_id="r") as rank,
    ):
        assert engine.try_take()
        assert not RankDevice(rank, 60.0).wait(lambda: True)
        assert not engine.is_wanted
