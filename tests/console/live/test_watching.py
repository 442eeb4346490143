"""Watching a run on a real nats-server: the panel's source, and `penstock watch` itself."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.console.command import server_arguments
from tests.console.record import recorded_run as recorded
from tests.console.record.recorded_run import Services
from tests.groups import make_task, make_task_issued

from penstock.console.live.panel import LivePanel, has_ended, is_cut_off
from penstock.console.live.run_view import RunView
from penstock.console.live.watcher import Watcher
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import MissingStream
from penstock.protocol.facts import DeadLetter, TaskIssued
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

DEADLINE_S = 20.0


@pytest.fixture
def services(bus: Bus, run_streams: str) -> Services:
    return Services(bus, run_streams)


def task(run_id: str) -> TaskIssued:
    return make_task_issued(run_id, "p", [make_task("e0.p0.a0")])


def until(view: RunView, watcher: Watcher, is_there: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_there():
        assert time.monotonic() < deadline, f"not seen within {DEADLINE_S} s: {view.snapshot(time.time())}"
        watcher.step()
        time.sleep(0.02)


def test_a_watcher_gets_earlier_messages(bus: Bus, run_streams: str, services: Services):
    """Steps, weights, dead letters, heartbeats and queues all reach the view, old and new."""
    services.say(recorded.evaluation(0, 0.5, recorded.START), recorded.step(1, recorded.START + 1))
    services.say(recorded.published(0), recorded.published(1), recorded.applied("rollout-0", 1), task(run_streams))
    view = RunView(run_streams)
    watcher = Watcher(bus, view)
    services.say(recorded.step(2, recorded.START + 2), recorded.dead_letter("e0.p1.a0"))
    services.beat(*recorded.fleet(1))
    until(view, watcher, lambda: len(view.steps) == 2 and view.queues.waiting.get("tasks") == 1)
    until(view, watcher, lambda: len(view.snapshot(0.0).services) == 4 and view.summary().groups.dead_lettered)
    summary = view.summary()
    assert summary.accuracy_before == 0.5
    assert summary.versions_published == 2
    assert summary.workers["rollout-0"].newest_version == 1
    assert view.queues.held == {"tasks": 0, "generated": 0, "scored": 0}


def test_a_watcher_consumes_no_message(bus: Bus, run_streams: str, services: Services):
    services.say(task(run_streams))
    view = RunView(run_streams)
    watcher = Watcher(bus, view)
    until(view, watcher, lambda: view.queues.waiting.get("tasks") == 1)
    inbox = bus.inbox(streams.tasks_consumer(run_streams, "train"), TaskIssued).wait()
    assert len(inbox.fetch(1, 30.0).wait()) == 1


def test_a_run_that_was_never_bootstrapped_is_refused(bus: Bus):
    with pytest.raises(MissingStream, match=r"never-made-events.*penstock bootstrap"), LivePanel("never-made", bus):
        pass


def test_the_panel_ends_with_the_whole_summary(bus: Bus, run_streams: str, services: Services):
    out = io.StringIO()
    with LivePanel(run_streams, bus, total_steps=40, stream=out) as panel:
        panel.note("killed rollout-1 on purpose")
        services.say(recorded.evaluation(0, 0.5, recorded.START))
        services.say(*(recorded.step(n, recorded.START + n) for n in range(1, 41)))
        services.say(recorded.evaluation(40, 0.9, recorded.START + 41))
        services.beat(*recorded.fleet(20))
    summary = panel.summary()
    assert summary.steps == 40
    assert (summary.accuracy_before, summary.accuracy_after) == (0.5, 0.9)
    assert summary.tokens_generated == 2 * 1100 * 20
    assert any("killed rollout-1 on purpose" in text for text in summary.incidents)
    assert "step 40/40" in out.getvalue()
    assert "held-out accuracy 0.900 after step 40" in out.getvalue()


def test_a_resumed_run_is_summed_over_its_sessions(bus: Bus, run_streams: str, services: Services, tmp_path: Path):
    """A panel with the run's folder continues the totals of the one before; heartbeats alone know only one process."""
    services.say(recorded.step(1, recorded.START))
    services.beat(*recorded.fleet(20))
    with LivePanel(run_streams, bus, mode="quiet", folder=tmp_path) as first:
        assert first.wait(lambda s: len(s.services) == 4, deadline_s=DEADLINE_S)
    services.beat(*(beat.model_copy(update={"at": beat.at + 500}) for beat in recorded.fleet(2)))
    with LivePanel(run_streams, bus, mode="quiet", folder=tmp_path) as second:
        pass
    assert first.summary().tokens_generated == 2 * 1100 * 20
    assert second.summary().tokens_generated == 2 * 1100 * (20 + 2)


def test_a_quiet_panel_writes_nothing_and_waits_no_longer_than_its_deadline(
    bus: Bus, run_streams: str, services: Services
):
    out = io.StringIO()
    with LivePanel(run_streams, bus, mode="quiet", stream=out) as panel:
        assert not panel.wait(lambda s: s.step == 1, deadline_s=0.1)
        services.say(recorded.step(1, recorded.START))
        assert panel.wait(lambda s: s.step == 1, deadline_s=DEADLINE_S)
    assert out.getvalue() == ""


def test_the_rich_panel_draws_on_a_terminal(bus: Bus, run_streams: str, services: Services):
    """On a terminal the frame is drawn, and the last frame remains on the screen."""
    out = io.StringIO()
    with LivePanel(run_streams, bus, total_steps=2, mode="rich", stream=out):
        services.say(recorded.step(1, recorded.START), recorded.step(2, recorded.START + 1))
    assert "step 2/2" in out.getvalue()


def test_the_panel_survives_a_restart_of_nats(own_nats: Callable[[], NatsServer], blobs: Blobs):
    """While NATS is down the panel shows it; afterwards the run is shown again and no service was lost."""
    server = own_nats()
    with Bus.connect(server.settings, name="test") as bus:
        bootstrap(bus, blobs, "storm")
        services = Services(bus, "storm")
        services.say(recorded.step(1, recorded.START))
        with LivePanel("storm", bus, mode="quiet") as panel:
            assert panel.wait(lambda s: s.step == 1, deadline_s=DEADLINE_S)
            server.kill()
            assert panel.wait(lambda s: s.disconnected_s > 0, deadline_s=DEADLINE_S)
            server.restart()
            assert panel.wait(lambda s: s.disconnected_s == 0, deadline_s=DEADLINE_S)
            services.say(recorded.step(2, recorded.START + 1))
            assert panel.wait(lambda s: s.step == 2, deadline_s=DEADLINE_S)
        assert panel.summary().incidents == ()


def test_watch_ends_with_the_run_and_prints_one_json_object(
    bus: Bus, run_streams: str, services: Services, nats_settings: NatsSettings
):
    """`penstock watch --json` writes lines to stderr and only the summary to stdout."""
    services.say(recorded.event("state", recorded.START, text="training", total_steps=2))
    services.say(recorded.step(1, recorded.START), recorded.step(2, recorded.START + 1))
    services.say(recorded.event("state", recorded.START + 2, text="finished", finished=True))
    command = [sys.executable, "-m", "penstock", "watch", run_streams, "--json"]
    command += server_arguments(nats_settings)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.strip().splitlines()) == 1
    assert json.loads(answer.stdout)["steps"] == 2
    assert "step 2/2" in answer.stderr


def test_watching_ends_when_there_is_nothing_to_watch():
    """Its ends are the trainer's report of the end, its exit after the last step, and a minute without NATS."""
    snapshot = recorded.whole_run().snapshot(recorded.START + 31)
    exited = tuple(replace(line, alive=False) for line in snapshot.services)
    assert has_ended(replace(snapshot, finished=True))
    assert has_ended(replace(snapshot, services=exited))
    assert not has_ended(snapshot)
    assert not has_ended(replace(snapshot, services=exited, step=59))
    assert is_cut_off(replace(snapshot, disconnected_s=61.0))
    assert not is_cut_off(replace(snapshot, disconnected_s=59.0))


def test_the_summary_counts_dead_letters_of_a_whole_run(bus: Bus, run_streams: str, services: Services):
    spec = streams.generated_consumer(run_streams)
    inbox = bus.inbox(spec, DeadLetter).wait()  # reads the wrong fact on purpose: every message is poison
    bus.publish(subjects.generated(run_streams, "train"), task(run_streams), msg_id="poison").wait()
    assert inbox.fetch(1, 1.0).wait() == []
    with LivePanel(run_streams, bus, mode="quiet") as panel:
        pass
    assert panel.summary().groups.dead_lettered == {"UnknownSchema": 1}
