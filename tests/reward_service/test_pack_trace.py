"""The spans of scoring: one for each group and delivery, below it one for each request that held the group."""

# pyright: reportCallIssue=false  (fields of models that have defaults)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.protocol import streams, trace_context
from penstock.protocol.facts import GroupGenerated
from penstock.protocol.heartbeats import Activity
from penstock.protocol.traces.traces import Span, group_context
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.reward_service import pack_trace
from penstock.reward_service.announce import Announcer
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import EndpointFailed, RewardCrashed
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.pack_progress import PackProgress, ProgressStore
from penstock.reward_service.pack_scoring import Pack, RetryPolicy, ScoringContext, score_pack
from penstock.reward_service.pack_trace import PackTrace
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy
from tests.groups import make_generated, make_group, pack_bytes
from tests.otlp_receiver import recorded
from tests.reward_service.conftest import Scripted, delivered
from tests.reward_service.processes import StartEndpoint, good, raw

TRACEPARENT = "00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"


def by_group(spans: Sequence[Span], name: str) -> dict[Any, Span]:
    return {span.attributes["group_id"]: span for span in spans if span.name == name}


async def test_each_group_of_a_call_has_a_span_below_its_scoring(start_endpoint: StartEndpoint) -> None:
    traces, spans = recorded()
    server, broken = start_endpoint(good(0.5)), start_endpoint(raw("nonsense"))
    groups = [GroupToScore(group_id=name, prompt="secret prompt", completions=["x", "y"]) for name in ("g#0", "g1")]
    trace = PackTrace.start(traces, TRACEPARENT, [group.group_id for group in groups], {"pack_id": "p"})
    pack_trace.CURRENT_TRACE.set(trace)
    try:
        async with EndpointClient(TargetPolicy(PRIVATE_TARGETS), max_response_bytes=100_000) as client:
            for name, one, dialect in (("a", server, "penstock"), ("b", broken, "penstock"), ("c", broken, "verl")):
                await client.queue(Endpoint(name=name, url=one.url, dialect=dialect)).score_groups(groups, attempt=1)
    finally:
        pack_trace.CURRENT_TRACE.set(None)
    for group in groups:
        trace.scored(group.group_id, {"scorer": "a"})
    scores = by_group(spans, "score")
    requests = [span for span in spans if span.name == "reward request"]
    a = [(span.attributes["group_id"], span.error) for span in requests if span.attributes["endpoint"] == "a"]
    assert sorted(a) == [("g#0", ""), ("g1", "")]
    single = [span.attributes["group_id"] for span in requests if span.attributes["endpoint"] == "c"]
    assert sorted(single) == ["g#0", "g#0", "g1", "g1"], "one request for each completion"
    assert {span.error for span in requests if span.attributes["endpoint"] == "b"} == {"EndpointNonsense"}
    for span in requests:
        scoring = scores[span.attributes["group_id"]]
        assert span.parent == scoring.context
        assert span.context.trace_id == scoring.context.trace_id
    for group_id, span in scores.items():
        assert span.parent == group_context(TRACEPARENT, group_id)
    assert "secret prompt" not in repr(spans)


async def test_a_delivery_records_what_became_of_each_group(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    """Scored, requeued and dead-lettered groups of a pack have a span each, with the name of the error and no more."""
    names = ["e0.p0.a0", "e0.p1.a0", "e0.p2.a0"]
    groups = [make_group(name, size=2) for name in names]
    ref = blobs.put(f"runs/{run_streams}/groups/v0/p.parquet", pack_bytes(groups))
    fact = make_generated(run_streams, groups, ref)
    header = trace_context.new_trace()
    delivery = await delivered(bus, run_streams, fact, header)
    traces, spans = recorded()
    found = [GroupScores((0.5, 1.0), "mine"), EndpointFailed("the answer was secret"), RewardCrashed("secret")]
    outcomes: dict[str, Outcome] = dict(zip(names, found, strict=True))
    nothing: Any = None
    context = ScoringContext(
        blobs, RewardRegistry({fact.groups[0].reward_name: Scripted(outcomes)}, nothing, nothing),
        Announcer(bus, run_id=run_streams, source="r0"), RetryPolicy(3, 0.1, 1.0),
        ProgressStore(await bus.key_value(streams.scoring_bucket(run_streams).bucket)), ServiceMetrics(), Activity(),
        traces,
    )  # fmt: skip
    await score_pack(Pack(delivery, PackProgress()), context, lambda: None)
    found = by_group(spans, "score")
    assert {name: (found[name].error, found[name].attributes.get("outcome", "")) for name in names} == {
        names[0]: ("", ""), names[1]: ("EndpointFailed", "requeued"), names[2]: ("RewardCrashed", "requeued"),
    }  # fmt: skip
    assert found[names[0]].attributes["scorer"] == "mine"
    assert all(span.parent == group_context(header, name) for name, span in found.items())
    assert "secret" not in repr(spans)
    [again] = await (await bus.inbox(streams.generated_consumer(run_streams), GroupGenerated)).fetch(1, 30.0)
    assert again.num_delivered == 2
    context = replace(context, retry=RetryPolicy(2, 0.1, 1.0))
    spans.clear()
    progress = await context.progress.load(again.sequence, again.num_delivered)
    await score_pack(Pack(again, progress), context, lambda: None)
    assert {name: span.attributes["outcome"] for name, span in by_group(spans, "score").items()} == {
        names[1]: "dead-lettered", names[2]: "dead-lettered",
    }  # fmt: skip


async def test_without_traces_nothing_is_gathered() -> None:
    trace = PackTrace.start(pack_trace.Traces(), TRACEPARENT, ["g"], {})
    trace.scored("g", {})
    assert trace._groups == {}
