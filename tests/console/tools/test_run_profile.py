"""Where the time of a run went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.console.command import penstock
from tests.console.record import recorded_run as recorded

from penstock.console.live import run_snapshot
from penstock.console.tools.profile import OTHER, limits, profile
from penstock.protocol.heartbeats import ENGINE_CPU, THREAD_CPU, apply_figure, thread_cpu_seconds


def line(step: int, at: float, **seconds: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "at": at, "wait_s": 0.1, "step_s": 0.4, "publish_s": 0.05, **seconds}


def test_phases_add_up_to_the_time_of_the_steps():
    rows = [{"kind": "eval", "step": 0, "at": 1.0}, line(1, 10.0), line(2, 11.0, checkpoint_s=0.3), line(3, 11.6)]
    found = profile(rows, None)
    assert found.step_wall_s == pytest.approx(0.5 + 1.6)
    seconds = {phase.name: phase.seconds for phase in found.phases}
    assert (seconds["wait for groups"], seconds["train"], seconds["checkpoint"]) == pytest.approx((0.3, 1.2, 0.3))
    assert seconds[OTHER] == pytest.approx(2.1 - 1.8)
    assert sum(phase.share for phase in found.phases) == pytest.approx(1.0)
    assert found.publish_s == pytest.approx(0.05)
    assert (found.before_s, found.after_s, found.services) == (None, None, ())


def test_a_repeated_step_counts_once_and_a_pause_does_not_count():
    """After a resume the lines of the steps that are made again replace the first ones; the time between sessions is left out."""
    totals = recorded.whole_run().totals()
    services = [service.model_copy(update={"num_starts": 2}) for service in totals.services]
    totals = totals.model_copy(update={"paused_s": 150.0, "services": services})  # 50 s of it before the first step
    rows = [line(1, 10.0), line(2, 10.5), line(3, 11.0, wait_s=9.0), line(2, 110.6), line(3, 111.1)]
    found = profile(rows, totals)
    assert found.steps == 3
    assert found.step_wall_s == pytest.approx(3 * 0.5), "the pause, and no more than it, is left out"
    assert next(phase for phase in found.phases if phase.name == "wait for groups").seconds == pytest.approx(0.3)


def test_services_have_the_times_of_all_their_starts():
    """Working and waiting count from the first step on, CPU from the start; a killed worker's seconds stay in its sum."""
    view = recorded.whole_run()
    found = {service.name: service for service in profile([], view.totals()).services}
    assert list(found) == ["trainer", "rollout-0", "rollout-1", "reward"]
    assert found["trainer"].waiting_share == pytest.approx(0.2)
    assert found["rollout-0"].waiting_share == pytest.approx(0.1)
    assert found["rollout-1"].num_starts == 2
    assert found["rollout-1"].cpu_s == pytest.approx((0.5 + 0.8 * 14) + (0.5 + 0.8 * 11))


def test_the_parts_of_the_cpu_are_threads_and_the_engine():
    """The largest comes first; figures that are not CPU seconds are not among them."""
    beat = recorded.beat("rollout", "w", 5.0, busy_s=1.0, idle_s=1.0, cpu_s=9.0, **{
        f"{THREAD_CPU}main": 2.0, f"{THREAD_CPU}bus": 0.5, ENGINE_CPU: 6.0, "tokens_generated": 70.0,
    })  # fmt: skip
    one = run_snapshot.ServiceTotals(beat=beat, num_starts=1, earlier_cpu_s=0.0, earlier={}, busy_s=1.0, idle_s=1.0)
    (found,) = profile([], run_snapshot.WatchedTotals(until=5.0, services=(one,))).services
    assert list(found.cpu_parts.items()) == [("engine", 6.0), ("main", 2.0), ("bus", 0.5)]


def test_a_version_has_its_stages_at_the_trainer_and_at_a_worker():
    """Means: of the steps that name them, and of the versions that a worker's process applied; older runs have none."""
    beat = recorded.beat(
        "rollout", "w", 5.0, busy_s=1.0, idle_s=1.0, cpu_s=1.0, weights_applied=4.0,
        **{apply_figure("fetch"): 2.0, apply_figure("pause"): 1.0},
    )  # fmt: skip
    one = run_snapshot.ServiceTotals(beat=beat, num_starts=1, earlier_cpu_s=0.0, earlier={}, busy_s=1.0, idle_s=1.0)
    stages = [{"publish_stages_s": {"compare": 0.1 * n, "upload": 0.2}} for n in (1, 3)]
    found = profile(
        [line(n, float(n), **seconds) for n, seconds in enumerate([{}, *stages], start=1)],
        run_snapshot.WatchedTotals(until=5.0, services=(one,)),
    )
    assert found.publish_stages_s == pytest.approx({"compare": 0.2, "upload": 0.2})
    assert found.services[0].apply_s == {"fetch": 0.5, "pause": 0.25}
    assert profile([line(1, 1.0)], None).publish_stages_s == {}


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"wait_s": 0.01}, "the trainer never waits for long"),
        ({"wait_s": 0.4}, "the trainer waits for groups 50% of the time: rollout-0 works 90% of the time"),
        ({"wait_s": 0.01, "checkpoint_s": 0.2}, "checkpoint takes 33% of the time: a larger trainer.checkpoint_every"),
    ],
    ids=["busy", "waits", "checkpoints"],
)
def test_it_says_what_the_run_waits_for(seconds: dict[str, float], says: str):
    """The sentences name the phase, its share and the role that is slower."""
    wall = 0.4 + sum(seconds.values())
    found = profile([line(n, 10.0 + wall * n, **seconds) for n in range(1, 5)], recorded.whole_run().totals())
    assert any(text.startswith(says) for text in limits(found)), limits(found)


def test_threads_of_this_process_are_counted_by_name():
    sum(range(3_000_000))  # longer than a tick of the clock
    found = thread_cpu_seconds()
    assert found[f"{THREAD_CPU}MainThread"] > 0.0
    assert all(name.startswith(THREAD_CPU) for name in found)


def test_the_command_prints_tables_and_json(tmp_path: Path):
    """Steps, services and sentences are printed from the files of the folder alone; an unknown run is refused."""
    folder = tmp_path / "runs" / "sorting"
    recorded.write_metrics(folder)
    run_snapshot.save_totals(folder, recorded.whole_run().totals())
    answer = penstock("profile", "sorting", cwd=tmp_path, code=0)
    assert "run sorting: 60 steps in 30.0 s" in answer.stdout
    assert "wait for groups" in answer.stdout
    assert "rollout-1 (2 starts)" in answer.stdout
    document = json.loads(penstock("profile", "sorting", "--json", cwd=tmp_path).stdout)
    assert document["steps"] == 60
    assert document["services"][0]["waiting_share"] == pytest.approx(0.2)
    assert document["cpu_s"] == pytest.approx(sum(one["cpu_s"] for one in document["services"]))
    assert document["says"]
    unknown = penstock("profile", "sort", cwd=tmp_path, code=1)
    assert "did you mean sorting?" in unknown.stderr


def test_a_run_without_steps_is_refused(tmp_path: Path):
    (tmp_path / "runs" / "new").mkdir(parents=True)
    answer = penstock("profile", "new", cwd=tmp_path, code=1)
    assert "wait for the first one: penstock watch new" in answer.stderr
