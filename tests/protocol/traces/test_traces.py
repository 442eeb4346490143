"""Traces of groups: off by default, exact when they arrive, and never a reason for a service to wait or to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from tests import otlp_receiver
from tests.deadline import ends_within
from tests.groups import make_task
from tests.otlp_receiver import Receiver, attributes, recorded

from penstock.protocol import trace_context
from penstock.protocol.traces import traces as recorder_module
from penstock.protocol.traces.traces import (
    MAX_TEXT,
    NO_TRACES,
    HeldGroups,
    Span,
    SpanContext,
    SpanRecorder,
    group_context,
    new_context,
    recording,
)

receiver = pytest.fixture(otlp_receiver.running)
TRACEPARENT = "00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"
HOSTILE = [
    "", "x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", TRACEPARENT.upper(), TRACEPARENT + "\n", TRACEPARENT + "-more",
    "ff" + TRACEPARENT[2:], TRACEPARENT[:-2] + "00", "00-" + "٣" * 32 + "-" + "2b" * 8 + "-01", "x" * 99_999, "\0" * 55,
]  # fmt: skip


@pytest.mark.parametrize("header", HOSTILE)
def test_hostile_and_missing_headers_are_harmless(header: str) -> None:
    """A header that is missing, malformed or not sampled makes no span; what follows it gets a valid header."""
    assert group_context(header, "g") is None
    assert (
        group_context(trace_context.child(header or "x"), "g") is not None
        or header.endswith("-00")
        or "0" * 32 in header
    )
    traces, spans = recorded()
    held = HeldGroups(traces)
    held.issued(header, [make_task("e0.p0.a0")], pack_id="p", started=1.0)
    held.arrived(header, ["g"])
    held.ended("g", "dropped", reason="stale")
    held.trained(["g"], 1.0, {"step": 1})
    assert [span.name for span in spans] == ["train step"]
    assert spans[0].links == ()


def test_a_group_has_one_trace_in_every_service_and_no_other_group_has_it() -> None:
    """The trace follows from the pack's trace id and the group's id, whatever span id the header has."""
    onward = trace_context.child(TRACEPARENT)
    assert onward != TRACEPARENT
    given = SpanContext("720745ec8902e714640278ec5321e7dd", "33a3695bcd0a55f5")
    assert group_context(TRACEPARENT, "a") == group_context(onward, "a") == given
    headers = TRACEPARENT, trace_context.new_trace()
    assert len({group_context(header, name) for header in headers for name in "abc"}) == 6


def test_a_step_links_to_its_groups_and_each_group_says_what_became_of_it() -> None:
    """Issued, admitted and trained, or dropped with the reason; the step's own trace has a link to each group."""
    traces, spans = recorded()
    held = HeldGroups(traces)
    held.issued(TRACEPARENT, [make_task(f"e0.p{n}.a0") for n in range(3)], pack_id="p", started=time.time())
    held.arrived(trace_context.child(TRACEPARENT), [f"e0.p{n}.a0" for n in range(3)])
    held.ended("e0.p2.a0", "dropped", reason="stale")
    held.ended("never-arrived", "dropped", reason="lost")
    held.trained(["e0.p0.a0", "e0.p1.a0", "old"], time.time(), {"step": 4, "version": 3})
    first = {span.attributes["group_id"]: span.context for span in spans if span.name == "issue"}
    (dropped,) = [span for span in spans if span.name == "dropped"]
    assert (dropped.parent, dropped.attributes["reason"]) == (first["e0.p2.a0"], "stale")
    (step,) = [span for span in spans if span.name == "train step"]
    assert step.links == (first["e0.p0.a0"], first["e0.p1.a0"])
    assert step.context.trace_id not in {context.trace_id for context in first.values()}
    for name in ("admitted", "train"):
        assert {span.parent for span in spans if span.name == name} == set(step.links)
    assert all(span.end >= span.start for span in spans)


def test_spans_arrive_at_a_collector_as_they_were_recorded(receiver: Receiver) -> None:
    """Ids, parent, times, attributes, links and error survive OTLP; the resource names service, instance and run."""
    group, other = group_context(TRACEPARENT, "a"), new_context()
    with recording(os.environ, "rollout", service_id="w0", run_id="r1") as traces:
        assert traces.is_on
        own = new_context(group.trace_id if group else "")
        traces.record(
            "generate", own, group, 10.0, {"n": 3, "t": "x" * 999, "ok": True}, ended=12.5, links=(other,), error="E"
        )
    (span,) = receiver.spans
    assert group is not None
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == (
        group.trace_id, own.span_id, group.span_id,
    )  # fmt: skip
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10 * 10**9, 12_500_000_000)
    assert attributes(span) == {"n": 3, "t": "x" * MAX_TEXT, "ok": True}
    assert [link.trace_id.hex() for link in span.links] == [other.trace_id]
    assert (span.status.code, span.status.message) == (2, "E")
    assert receiver.services == ["penstock-rollout"]
    assert b"penstock.run_id" in receiver.bodies[0]
    assert traces.counts() == {"exported": 1, "failed": 0, "dropped": 0}


def test_a_collector_that_refuses_or_hangs_costs_spans_and_no_time(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`put` returns at once with a full queue; each span is counted once as exported, failed or dropped; close ends."""
    monkeypatch.setattr(recorder_module, "_CLOSE_S", 0.2)
    receiver.status = 400
    with recording(os.environ, "reward", service_id="r0", run_id="r") as traces:
        traces.record("score", new_context(), None, 1.0, {})
    assert traces.counts() == {"exported": 0, "failed": 1, "dropped": 0}
    receiver.status, receiver.delay_s = 200, 6.0
    with ends_within(60), recording(os.environ, "reward", service_id="r0", run_id="r") as traces:
        for _ in range(20_000):  # not one waits for the collector, nor does the close for the 16 batches that are left
            traces.record("score", new_context(), None, 1.0, {})
        assert traces.counts()["dropped"] >= 20_000 - recorder_module.QUEUE_SPANS - 2 * 512


def test_an_exporter_that_raises_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the exporter counts its spans as failed; later spans are exported."""
    release, seen = threading.Event(), []

    def export(batch: Any) -> bool:
        seen.append(len(batch))
        if len(seen) == 1:
            release.set()
            raise RuntimeError("broken")
        return True

    recorder = SpanRecorder(export, lambda: None)
    recorder.put(Span("a", new_context(), None, 0.0, 1.0))
    assert release.wait(60.0)
    recorder.put(Span("b", new_context(), None, 0.0, 1.0))
    recorder.close()
    assert recorder.counts() == {"exported": 1, "failed": 1, "dropped": 0}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_without_a_collector_there_are_no_traces(environ: dict[str, str]) -> None:
    """No endpoint, a disabled SDK or a protocol that is not there: the service runs without traces."""
    with recording(environ, "trainer", service_id="t", run_id="r") as traces:
        assert not traces.is_on
        assert traces.group(TRACEPARENT, "g") is None
        assert traces.counts() == {}


def test_without_the_extra_there_are_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that is set for other programs does not stop a service that lacks the library."""
    monkeypatch.delitem(sys.modules, "penstock.protocol.traces.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with recording(
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "trainer", service_id="t", run_id="r"
    ) as traces:
        assert traces is NO_TRACES


@pytest.mark.slow
def test_a_service_without_a_collector_imports_neither_library() -> None:
    """OpenTelemetry's SDK and prometheus-client are loaded where they are used (FastAPI imports the API itself)."""
    program = (
        "import sys\n"
        "LIBRARIES = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto', 'prometheus_client')\n"
        "import penstock.rollout_service.__main__, penstock.trainer.preflight\n"
        "import penstock.trainer.telemetry.trainer_metrics, penstock.reward_service.service\n"
        "from penstock.protocol.traces.traces import recording\n"
        "with recording({}, 'reward', service_id='r', run_id='r'): pass\n"
        "print(sorted(name for name in sys.modules if name.startswith(LIBRARIES)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
