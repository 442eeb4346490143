"""The view of a run, folded from messages of its services."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.console.record import recorded_run as recorded
from tests.console.record.recorded_run import folded

from penstock.console.live.run_snapshot import QueueDepths, RewardErrors
from penstock.console.live.run_view import RunView
from penstock.console.live.services import ServiceHistory
from penstock.console.report.run_summary import attention_text
from penstock.protocol.facts import Heartbeat


def view_of(*steps: int, every_s: float = 1.0, **more: Any) -> RunView:
    """A view of a run whose steps were taken in this order, one each second."""
    return folded(
        *(recorded.step(step, recorded.START + every_s * at, **more) for at, step in enumerate(steps, start=1))
    )


def beats_of(*roles: str, at: float = recorded.START) -> list[Heartbeat]:
    return [recorded.beat(role, "x", at, busy_s=1, idle_s=0, cpu_s=1) for role in roles]


def test_a_whole_run_is_summarised():
    """The summary has every metric of the run, from the first evaluation to the last step."""
    summary = recorded.whole_run().summary()
    assert (summary.accuracy_before, summary.accuracy_after, summary.eval_prompts) == (0.55, 0.95, 128)
    assert summary.steps == recorded.STEPS
    assert summary.groups.issued == 48 * 62
    assert summary.groups.trained == 48 * 60
    assert summary.groups.dropped == {"stale": 3}
    assert summary.tokens_trained == sum(summary.staleness_tokens.values()) == 60_000
    assert summary.staleness_max == 2
    assert summary.versions_published == 61
    assert summary.workers["rollout-0"].versions_applied == 60
    assert summary.wall_s == 31.0


def test_totals_include_a_killed_worker():
    """Tokens and CPU seconds before a worker's restart are added to those after it."""
    summary = recorded.whole_run().summary()
    assert summary.tokens_generated == 1100 * 30 + 1100 * (14 + 11)
    assert summary.workers["rollout-1"].num_lives == 2
    first, second, other = 0.5 + 0.8 * 14, 0.5 + 0.8 * 11, 0.5 + 0.8 * 30
    assert abs(summary.cpu_s_per_role["rollout"] - (first + second + other)) < 1e-9


def test_generated_groups_exclude_evaluation():
    """Evaluation is left out; a scored group counts, even if its worker was killed before the next heartbeat."""
    view = folded(recorded.evaluation(0, 0.5, recorded.START))
    worker = recorded.beat("rollout", "worker-0", recorded.START, busy_s=1, idle_s=0, cpu_s=1, groups_generated=628)
    view.fold_heartbeats([worker], recorded.START)
    assert view.summary().groups.generated == 628 - 128
    view.fold_event(recorded.step(1, recorded.START + 1, groups={"issued": 600, "scored": 520, "trained": 48}))
    assert view.summary().groups.generated == 520


def test_a_decreasing_gauge_is_no_restart():
    """Only a decreasing total shows a restart: the trainer's outstanding groups may decrease."""
    view = RunView("r")
    for at, outstanding in ((0.0, 144), (1.0, 0), (2.0, 96)):
        figures = {"busy_s": at, "idle_s": 0.0, "cpu_s": 10.0 + at, "groups_outstanding": outstanding}
        view.fold_heartbeats([recorded.beat("trainer", "trainer", at, **figures)], at)
    assert view.snapshot(2.0).services[0].num_starts == 1
    assert view.summary().cpu_s == 12.0


def test_a_kill_and_a_restart_are_incidents_in_order():
    """A worker whose heartbeat does not change is lost; one whose heartbeat changes again is back."""
    texts = [i.text for i in recorded.whole_run().incidents]
    assert texts == ["killed rollout-1 on purpose", "rollout-1 is lost: no heartbeat for 4 s", "rollout-1 is back"]


def test_a_service_is_lost_after_four_of_the_periods_that_it_announces():
    """A worker of a large run, which writes every ten seconds, is not lost in between."""
    view = folded(recorded.step(1, 0.0))
    beat = recorded.beat("rollout", "w0", 0.0, busy_s=0.0, idle_s=0.0, cpu_s=1.0)
    slow = beat.model_copy(update={"period_s": 10.0})
    for now in range(0, 40, 2):
        view.fold_heartbeats([slow], float(now))
    assert [line.alive for line in view.snapshot(38.0).services] == [True]
    view.fold_heartbeats([slow], 40.0)
    assert [i.text for i in view.snapshot(40.0).incidents if i.kind == "lost"] == [
        "rollout w0 is lost: no heartbeat for 40 s"
    ]


def test_idle_shares_count_from_the_first_step():
    view = RunView(recorded.RUN)
    loading = recorded.beat("trainer", "trainer", recorded.START, busy_s=0.0, idle_s=100.0, cpu_s=1.0)
    view.fold_heartbeats([loading], recorded.START)
    view.fold_event(recorded.step(1, recorded.START + 1))
    later = recorded.beat("trainer", "trainer", recorded.START + 4, busy_s=3.0, idle_s=101.0, cpu_s=4.0)
    view.fold_heartbeats([later], recorded.START + 1)
    assert view.summary().idle_share == {"trainer": 0.25}


def test_the_slots_used_are_weighted_by_time_and_continue_after_a_restart_of_the_console():
    """Of an engine of 8 slots, 6 for three seconds and 2 for one; before the first step nothing counts."""
    view = RunView(recorded.RUN)

    def beat(after: float, running: float) -> None:
        figures = {"busy_s": after, "idle_s": 0.0, "cpu_s": after, "engine_slots": 8.0, "engine_running": running}
        view.fold_heartbeats(
            [recorded.beat("rollout", "w0", recorded.START + after, **figures)], recorded.START + after
        )

    beat(0.0, 8.0)
    assert view.summary().slots_used is None
    view.fold_event(recorded.step(1, recorded.START + 1))
    beat(3.0, 6.0)
    beat(4.0, 2.0)
    assert view.summary().slots_used == view.snapshot(recorded.START + 4).slots_used == 20 / 32
    later = RunView(recorded.RUN)
    later.restore(view.totals())
    assert later.summary().slots_used == 20 / 32


def test_idle_shares_do_not_change_after_the_last_step():
    view = recorded.whole_run()
    before = view.summary().idle_share
    idle = [beat.model_copy(update={"at": beat.at + 60, "idle_s": beat.idle_s + 60}) for beat in recorded.fleet(30)]
    view.fold_heartbeats(idle, recorded.START + 31)
    assert view.summary().idle_share == before
    assert abs(before["trainer"] - 0.2) < 1e-9


def test_overlap_is_at_least_busy_plus_busy_minus_wall():
    overlap = recorded.whole_run().summary().overlap
    assert overlap.trained_stale_share is not None
    assert overlap.trained_stale_share > 0.5
    assert abs(overlap.both_working_s - 0.7 * 29) < 1e-6


def test_a_resumed_run_is_not_finished():
    """A finished run that is resumed with more steps is running again until its trainer reports the end."""
    view = folded(
        recorded.event("state", recorded.START, text="training", total_steps=1),
        recorded.step(1, recorded.START),
        recorded.event("state", recorded.START + 1, text="finished", finished=True),
    )
    assert view.snapshot(recorded.START + 1).finished
    view.fold_event(recorded.event("state", recorded.START + 60, text="training", total_steps=2))
    view.fold_event(recorded.step(2, recorded.START + 61))
    assert not view.snapshot(recorded.START + 61).finished


def test_missing_metrics_are_missing_and_not_zero():
    """An event with only its step number counts as a step; its metrics are unknown, as is a reward of NaN."""
    view = folded(*(recorded.event(kind, recorded.START, step=1) for kind in ("step", "eval", "kind-of-tomorrow")))
    summary, snapshot = view.summary(), view.snapshot(recorded.START + 1)
    assert (summary.steps, summary.accuracy_after, summary.staleness_mean) == (1, None, None)
    assert (snapshot.rewards, snapshot.eta_s) == ((), None)
    view.fold_event(recorded.step(2, recorded.START, reward_mean=float("nan")))
    view.fold_event(recorded.step(3, recorded.START + 1, reward_mean=0.5))
    assert view.summary().reward_last == 0.5


def test_only_the_first_evaluated_split_is_before_and_after():
    splits = ((0, 0.5, "held-out"), (9, 0.7, "held-out"), (9, 0.1, "harder"))
    events = [recorded.evaluation(step, value, recorded.START, split=split) for step, value, split in splits]
    summary = folded(*events).summary()
    assert (summary.accuracy_before, summary.accuracy_after) == (0.5, 0.7)


def test_no_service_is_lost_while_the_watcher_was_disconnected():
    """After NATS was unreachable for half a minute, services with new heartbeats were never lost."""
    view = RunView(recorded.RUN)
    view.fold_heartbeats(recorded.fleet(1), recorded.START + 1)
    view.fold_heartbeats(recorded.fleet(1), recorded.START + 31)
    view.fold_heartbeats(recorded.fleet(32), recorded.START + 32)
    assert not view.incidents


def test_a_service_that_deletes_its_heartbeat_exited_regularly():
    view = RunView(recorded.RUN)
    view.fold_heartbeats(recorded.fleet(1), recorded.START + 1)
    view.fold_heartbeats(recorded.fleet(2)[1:], recorded.START + 2)
    assert not view.incidents
    assert [line.alive for line in view.snapshot(recorded.START + 2).services] == [False, True, True, True]


def test_a_worker_that_joins_during_the_run_is_named():
    """A new service id after the first step is an incident; one that was there when the watching began is none."""
    view = folded(recorded.step(1, recorded.START))
    for second, names in ((0, ["gpu-6"]), (1, ["gpu-6", "gpu-7"])):
        at = recorded.START + second
        beats = [recorded.beat("rollout", name, at, busy_s=1 + second, idle_s=0, cpu_s=1) for name in names]
        view.fold_heartbeats(beats, at)
    assert [i.text for i in view.incidents] == ["rollout gpu-7 joined"]
    assert view.summary().idle_share == {"rollout": 0.0}


def test_a_time_without_steps_and_an_outage_of_nats_are_in_the_report():
    at = [recorded.START + 3.0 * number + (100.0 if number > 8 else 0.0) for number in range(1, 20)]
    view = folded(*(recorded.step(number, seconds) for number, seconds in enumerate(at, start=1)))
    view.fold_connection(0.5, recorded.START + 5)
    view.fold_connection(0.0, recorded.START + 6)
    view.fold_connection(42.0, recorded.START + 70)
    view.fold_connection(0.0, recorded.START + 71)
    incidents = view.summary().incidents
    assert [text.split(" ", 1)[1] for text in incidents] == [
        "no step for 1:43 after step 8",
        "NATS answers again, after 42 s",
    ]


def test_steps_that_were_rolled_back_are_no_time_without_steps():
    view = view_of(*range(1, 41))
    for number in range(11, 31):  # killed at step 40, resumed at step 10
        view.fold_event(recorded.step(number, recorded.START + 35 + number))
    assert view.summary().incidents == ()
    view.fold_event(recorded.step(21, recorded.START + 65 + 25))
    assert [text.split(" ", 1)[1] for text in view.summary().incidents] == ["no step for 0:25 after step 30"]


@pytest.mark.parametrize(
    ("role", "queue", "command"),
    [("rollout", "tasks", "penstock rollout"), ("reward", "generated", "penstock reward service")],
)
def test_work_that_waits_for_a_service_that_does_not_run_is_said(role: str, queue: str, command: str):
    """After a minute, with the command that starts one; not without work, nor of a service that only restarts."""
    view = RunView(recorded.RUN)
    begin = recorded.START

    def keys_at(at: float, *present: str) -> list[str]:
        view.fold_heartbeats(beats_of(*present, at=at), at)
        return [diagnose.key for diagnose in view.snapshot(at).diagnoses]

    other = {"rollout": "reward", "reward": "rollout"}[role]
    assert keys_at(begin, other) == keys_at(begin + 59.0, other) == []
    assert keys_at(begin + 61.0, other) == []  # no work waits
    view.fold_queues(QueueDepths(waiting={queue: 13}))
    assert keys_at(begin + 62.0, other) == [f"no_{role}"]
    found = view.snapshot(begin + 62.0).diagnoses[0]
    assert "13 messages wait" in found.what
    assert command in found.cure
    assert keys_at(begin + 63.0, other, role) == keys_at(begin + 64.0, other) == []
    view.fold_event(recorded.event("state", begin + 65, text="finished", finished=True))
    assert keys_at(begin + 130.0) == []


def test_drops_are_counted_before_the_first_step():
    """Otherwise a run whose rewards are all equal looks as if it waited."""
    view = RunView(recorded.RUN)
    totals = {"issued": 100, "scored": 80, "outstanding": 20, "dropped": {"no_signal": 80}}
    view.fold_event(recorded.event("drop", recorded.START, step=0, groups={"no_signal": 80}, totals=totals))
    view.fold_event(recorded.event("drop", recorded.START, step=0, groups={"no_signal": 80}))  # of an earlier release
    snapshot = view.snapshot(recorded.START)
    assert (snapshot.dropped, [one.key for one in snapshot.diagnoses]) == ({"no_signal": 80}, ["dropped"])
    assert "80 of 100 groups were dropped, 80 of them as no_signal" in snapshot.diagnoses[0].what


def test_a_worker_is_as_far_behind_as_the_trainers_heartbeat_says():
    """Announcements come at once, heartbeats each second: 7 versions a second are not 7 versions of lag."""
    view = RunView(recorded.RUN)
    worker = recorded.beat("rollout", "w", recorded.START, busy_s=1, idle_s=0, cpu_s=1, version=83)
    trainer = recorded.beat("trainer", "trainer", recorded.START, busy_s=1, idle_s=0, cpu_s=1, version=84)
    view.published.update(range(92))
    for beats, expected in (([worker], 8), ([worker, trainer], 1)):
        view.fold_heartbeats(beats, recorded.START)
        shown = view.snapshot(recorded.START)
        assert [shown.versions_behind(line) for line in shown.services if line.role == "rollout"] == [expected]


def test_a_run_that_begins_names_the_service_it_lacks():
    """Until the trainer reports, which waits for a reward service; nothing is said when none of them is there yet."""
    view = RunView(recorded.RUN)

    def lacking(*present: str) -> str:
        view.fold_heartbeats(beats_of(*present), recorded.START)
        return view.snapshot(recorded.START).waiting_for

    assert lacking() == ""
    assert lacking("rollout") == "no reward service yet"
    assert lacking("rollout", "reward") == ""
    assert lacking("rollout", "trainer") == ""


def test_dead_letters_of_one_cause_are_one_incident_with_the_cause():
    """Ids do not make another cause, and a later session does not say it again."""
    view = RunView(recorded.RUN)
    letters = [
        recorded.dead_letter(group).model_copy(update={"detail": f"group {group}: KeyError: 'answer'\nTraceback"})
        for group in (f"e0.p{number}.a0" for number in range(100))
    ]
    for letter in letters:
        view.fold_dead_letter(letter, recorded.START)
    (said,) = view.incidents
    assert "dead-lettered, endpoint_failed: group …: KeyError: 'answer'; `penstock dead-letters list" in said.text
    assert view.summary().groups.dead_lettered == {"endpoint_failed": 100}
    later = RunView(recorded.RUN)
    later.restore(view.totals())
    later.fold_dead_letter(letters[-1], recorded.START)
    assert len(later.incidents) == 1


def test_a_failing_reward_is_one_incident_per_reason_and_counted():
    why = {"source": "reward", "reason": "EndpointTimeout"}
    details = [f"HTTP 50{number % 10}" for number in range(1000)]
    view = folded(*(recorded.event("reward_error", recorded.START, **why, detail=detail) for detail in details))
    view.fold_dead_letter(recorded.dead_letter("a", "b").model_copy(update={"reason": "EndpointTimeout"}), 0.0)
    assert view.incidents[0].text == "rewards fail (EndpointTimeout: HTTP 500); their groups are retried"
    assert view.reward_errors == {"EndpointTimeout": RewardErrors(1000, 2, "500", recorded.START)}


@pytest.mark.parametrize(("after_s", "num_groups", "is_named"), [(25.0, 16, True), (25.0, 15, False), (5.0, 16, False)])
def test_rewards_that_fail_without_a_step_are_named_as_the_cause(after_s: float, num_groups: int, is_named: bool):
    """A failure that is retried and passes is none; nor are old ones, after the next step."""
    view = view_of(1)
    at = view.steps[1].at + after_s
    failure = {"source": "reward", "reason": "EndpointTimeout", "detail": "HTTP 503"}
    view.fold_event(recorded.event("reward_error", at, **failure, group_ids=list(map(str, range(num_groups)))))
    named = [one.what for one in view.snapshot(at).diagnoses]
    assert named == (["No step is made, as rewards fail: EndpointTimeout: HTTP 503"] if is_named else [])
    view.fold_event(recorded.event("step", at + 1.0, step=2, version=2, reward_mean=0.5))
    assert view.snapshot(at + 2.0).diagnoses == ()


def test_the_eta_follows_the_recent_steps():
    """Half a second per step and twenty remaining steps are ten seconds."""
    view = view_of(*range(1, 21), every_s=0.5)
    view.total_steps = 40
    assert view.snapshot(recorded.START + 10).eta_s == 10.0


@given(st.lists(st.integers(1, 12), max_size=40))
def test_totals_belong_to_the_steps_that_count(numbers: list[int]):
    """However often a trainer resumes: a step that is made again ends those from it on."""
    view, counted = view_of(*numbers), list[int]()
    for number in numbers:
        counted = [*(earlier for earlier in counted if earlier < number), number]
    assert [point.number for point in view.points()] == counted
    summary = view.summary()
    assert summary.tokens_trained == sum(summary.staleness_tokens.values()) == 1000 * len(counted)


@pytest.mark.parametrize("kind", ["alarm", "evaluation_lost"])
def test_warnings_of_the_trainer_are_incidents(kind: str) -> None:
    view = folded(recorded.event(kind, recorded.START, text="evaluation lost: version 3: no weights"))
    (incident,) = view.snapshot(recorded.START).incidents
    assert (incident.text, incident.kind) == ("evaluation lost: version 3: no weights", "lost")


def test_what_computes_attention_is_shown() -> None:
    """As the trainer's first event says it; a slow one with what it costs."""
    view = folded(recorded.event("state", 1.0, text="starting", total_steps=20, attention="cpu-flash"))
    assert view.snapshot(2.0).attention == view.summary().attention == "cpu-flash"
    assert attention_text("cpu-flash") == "cpu-flash"
    assert "square of the tokens" in attention_text("dense")
    assert "not packed" in attention_text("padded")
    assert "model.dtype = bfloat16" in attention_text("sdpa")


def _history(*, every_s: int, tokens: int, until_s: int, stalls_at_s: int = 10**6) -> ServiceHistory:
    """Fold one heartbeat a second of a worker that counts ``tokens`` every ``every_s`` seconds, once for each pack."""

    def beat(second: int) -> Heartbeat:
        total = min(second, stalls_at_s) // every_s * tokens
        return recorded.beat(
            "rollout", "w", 1e3 + second, busy_s=second, idle_s=0, cpu_s=second, tokens_generated=total
        )

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
