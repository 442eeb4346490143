"""What the reward service publishes about a pack is stored once for its message, whatever other messages state."""

from __future__ import annotations

from penstock.protocol import streams, subjects
from penstock.protocol.facts import BlobRef, GroupGenerated
from penstock.protocol.transport.bus import Bus
from penstock.reward_service.announce import Announcer
from tests.groups import make_generated, make_group, make_scored


async def test_another_message_cannot_take_the_id_of_an_announcement(bus: Bus, run_streams: str):
    """Packs that state one id are both announced, and a repetition of the same message is not."""
    announcer = Announcer(bus, run_id=run_streams, source="r0")
    groups = [make_group()]
    for number, sha256 in enumerate(("a" * 64, "b" * 64)):
        fact = make_generated(run_streams, groups, BlobRef(key="k", size_bytes=1, sha256=sha256), pack_id="p0")
        await bus.publish(subjects.generated(run_streams, "train"), fact, msg_id=str(number))
    inbox = await bus.inbox(streams.generated_consumer(run_streams), GroupGenerated)
    deliveries = []
    while len(deliveries) < 2:
        deliveries += await inbox.fetch(2, 5.0)
    for delivery in (*deliveries, deliveries[0]):
        assert await announcer.scored(delivery, make_scored(delivery.fact).groups) == {}
    assert (await bus.stream_state(f"{run_streams}-scored")).num_messages == 2
