"""What the reward service publishes about a pack is stored once for its message, whatever other messages state."""

from __future__ import annotations

from penstock.protocol import streams, subjects, trace_context
from penstock.protocol.facts import GroupGenerated
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.bus import Bus
from penstock.reward_service.announce import Announcer, hash_of
from tests.groups import make_generated, make_group, make_scored
from tests.reward_service.conftest import delivered


async def test_another_message_cannot_take_the_id_of_an_announcement(bus: Bus, run_streams: str):
    announcer = Announcer(bus, run_id=run_streams, source="r0")
    groups = [make_group()]
    for number, sha256 in enumerate(("a" * 64, "b" * 64)):
        fact = make_generated(run_streams, groups, BlobRef(key="k", size_bytes=1, sha256=sha256), pack_id="p0")
        await bus.publish(subjects.generated(run_streams, "train"), fact, msg_id=str(number))
    inbox = await bus.inbox(streams.generated_consumer(run_streams), GroupGenerated)
    deliveries = []
    while len(deliveries) < 2:
        deliveries += await inbox.fetch(2, 30.0)
    for delivery in (*deliveries, deliveries[0]):
        assert await announcer.scored(delivery, make_scored(delivery.fact).groups) == {}
    assert (await bus.stream_state(f"{run_streams}-scored")).num_messages == 2


async def test_the_ids_of_what_is_published_cannot_be_taken_beforehand(bus: Bus, run_streams: str):
    """Who knows pack, groups and number in the stream still takes the id of neither the scores nor the dead letter."""
    announcer = Announcer(bus, run_id=run_streams, source="r0")
    fact = make_generated(run_streams, [make_group()], BlobRef(key="k", size_bytes=1, sha256="a" * 64), pack_id="p0")
    delivery = await delivered(bus, run_streams, fact, trace_context.new_trace())
    ids = hash_of([group.group_id for group in fact.groups])
    guesses = (f"{delivery.sequence}", f"{delivery.sequence}:", f"{delivery.sequence}:{'0' * 32}")
    for guess in guesses:
        await bus.publish(subjects.dead(run_streams, "tasks"), fact, msg_id=f"dead:{guess}:{ids}")
        await bus.publish(subjects.dead(run_streams, "tasks"), fact, msg_id=f"{run_streams}-generated:{guess}")
        await bus.publish(subjects.scored(run_streams, "eval"), fact, msg_id=f"s:{guess}:p0:{ids}")
    before = (await bus.stream_state(f"{run_streams}-dead")).num_messages
    await announcer.dead(delivery, fact.groups, reason="r", detail="d")
    await announcer.scored(delivery, make_scored(fact).groups)
    assert (await bus.stream_state(f"{run_streams}-dead")).num_messages == before + 1
    assert (await bus.stream_state(f"{run_streams}-scored")).num_messages == len(guesses) + 1
    await delivery.dead_letter("r", "d")
    assert (await bus.stream_state(f"{run_streams}-dead")).num_messages == before + 2
