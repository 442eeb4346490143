"""Issuing and collecting over real streams: every group is trained once, or dropped once with a reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
from tests.servers import wait_for
from tests.trainer.producer import ScriptedProducer, recite

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.deploy.servers import NatsServer, S3Server
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import BlobStoreUnreachable
from penstock.protocol.facts import DeadLetter, GroupScored, TaskIssued
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer.algorithm.filters import Reuse
from penstock.trainer.connections import Connections
from penstock.trainer.data.chat_template import ChatTokenizer
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.errors import CollectTimeout, TooManyDead
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.batcher import Batcher, Drop
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.drops import DropReason
from penstock.trainer.groups.issue import Issuer, IssuerState
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.settings import DataSettings, RolloutSettings

ROLLOUT = RolloutSettings(group_size=2, groups_per_step=4, groups_per_message=2, max_staleness=1, max_new_tokens=8)
V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    """Forty prompts of the quickstart's task."""
    folder = tmp_path_factory.mktemp("data")
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=40, num_eval=1)
    return PromptSet.open(
        [folder / "train.jsonl"],
        data=DataSettings(),
        reward=RewardSettings(name="exact_match"),
        tokenizer=ChatTokenizer.read(folder / "model"),
    )


class DeliveryTracker:
    """One life of the trainer's intake: issuer, collector, and what they share."""

    def __init__(self, connections: Connections, prompts: PromptSet, ledger: Ledger | None = None, saved: IssuerState | None = None,
        *, uses: int = 1, **options: float,
    ) -> None:  # fmt: skip
        order = DataOrder(len(prompts), seed=0, shuffle=False)
        self.counters = Counters()
        self.ledger = ledger or Ledger()
        self.dispatch = Dispatch(prompts, order=order, rollout=ROLLOUT, stop_token_ids=(2,))
        if saved is not None:
            self.dispatch.resume(saved.dispatch)
        account = Accounting(saved.entries.account if saved else None)
        letters_read = saved.letters_read if saved else 0
        self.issuer = Issuer(
            connections, self.dispatch, self.counters, account, saved.unsent if saved else (), letters_read
        )
        batcher = Batcher(
            groups_per_step=ROLLOUT.groups_per_step, max_staleness=ROLLOUT.max_staleness, ledger=self.ledger,
            reuse=Reuse(uses),
        )  # fmt: skip
        settings = {
            "deadline_s": 20.0, "max_dead": 100, "silent_s": 30.0, "letters_read": letters_read, **options
        }  # fmt: skip
        self.collector = Collector(connections, batcher=batcher, issued=self.issuer, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> DeliveryTracker:
        self.collector.__enter__()
        self.issuer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.issuer.__exit__()
        self.collector.__exit__()

    def train(self, version: PolicyVersion, *, patience_s: float = 0.0) -> list[str]:
        """Take a batch, after some patience with the oldest groups, and say that it was trained."""
        batch = self.collector.collect(version, patience_s=patience_s)
        ids = [group.group_id for group in batch]
        new = [group_id for group_id in ids if group_id not in self.ledger]
        self.ledger.record(version, ids, max_staleness=ROLLOUT.max_staleness)
        tokens = {group.group_id: group.num_tokens for group in batch}
        used = {i: tokens[i] for i in new}
        ages = {0: sum(tokens.values())}
        self.issuer.trained(used, ages, made=next_version(version), num_reused=len(ids) - len(new))
        self.collector.trained(ids)
        return ids


@pytest.fixture
def connections(bus: Bus, blobs: Blobs, ring_streams: str) -> Connections:
    """A bootstrapped run."""
    return Connections(ring_streams, bus, blobs)


class Answering:
    """Answers tasks of a run by hand."""

    def __init__(self, connections: Connections, producer: ScriptedProducer) -> None:
        self._inbox = connections.bus.inbox(streams.tasks_consumer(connections.run_id, "train"), TaskIssued).wait()
        self._producer = producer

    def tasks(self, num_packs: int) -> list[TaskIssued]:
        """Take so many task messages."""
        taken: list[TaskIssued] = []

        def enough() -> bool:
            for delivery in self._inbox.fetch(num_packs - len(taken), 0.2).wait():
                taken.append(delivery.fact)
                delivery.ack().wait()
            return len(taken) >= num_packs

        wait_for(enough, f"{num_packs} task packs")
        return taken

    def scored(self, message: TaskIssued, version: PolicyVersion = V0) -> GroupScored:
        """Store the answer of one message, unannounced."""
        return self._producer.store(message, [recite(task, version) for task in message.tasks], version)

    def answer(self, message: TaskIssued, version: PolicyVersion = V0) -> None:
        """Store and announce the answer of one message."""
        self._producer.announce(self.scored(message, version))


@pytest.fixture
def hand(connections: Connections, nats_settings: NatsSettings, s3_settings: S3Settings) -> Iterator[Answering]:
    """Answers by hand."""
    producer = ScriptedProducer(nats_settings, s3_settings, connections.run_id)
    yield Answering(connections, producer)
    producer.close()


def test_room_is_used_as_soon_as_it_is_there(connections: Connections, prompts: PromptSet, hand: Answering) -> None:
    """No more than two steps' groups are out; training a batch lets the next one out once its version is announced."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        first = hand.tasks(4)
        assert len(tracker.issuer.outstanding()) == 8
        for message in first:
            hand.answer(message)
        trained = tracker.train(V0)
        assert trained == [f"e0.p{i}.a0" for i in range(4)]
        tracker.issuer.advance(V1, 100)
        second = hand.tasks(2)
        assert {task.issued_version for message in second for task in message.tasks} == {1}
        assert tracker.issuer.groups()["outstanding"] == 8


def test_towards_the_end_nothing_is_issued_in_vain(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """With one step to go, only one step's groups are issued although there is room for two."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 4)
        hand.tasks(2)
        assert len(tracker.issuer.outstanding()) == 4
        assert connections.bus.stream_state(f"{connections.run_id}-tasks").wait().num_messages == 0


def test_a_drop_towards_the_end_lets_nothing_out_in_vain(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Dropped between a step and the announcement of its version, a group is issued again, and nothing beside it."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 8)  # two steps to go
        for message in hand.tasks(4):
            hand.answer(message)
        tracker.train(V0)
        tracker.issuer.dropped(Drop("e0.p4.a0", DropReason.STALE, 3))
        (again,) = hand.tasks(1)
        assert [task.group_id for task in again.tasks] == ["e0.p4.a1"]
        assert len(tracker.issuer.outstanding()) == 4


def test_messages_are_acknowledged_only_when_a_checkpoint_covers_them(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Until then a restarted trainer gets them again, and drops by id what its ledger knows."""
    spec = streams.scored_consumer(connections.run_id, "train")
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        for message in hand.tasks(4):
            hand.answer(message)
        tracker.train(V0)
        covered = tracker.collector.settled()
        assert len(covered) == 2
        assert connections.bus.stream_state(spec.stream).wait().num_messages == 4
        rows, saved = tracker.ledger.rows(), tracker.issuer.take_state()  # the checkpoint; then the crash
    with DeliveryTracker(connections, prompts, Ledger(rows), saved) as resumed:
        resumed.issuer.advance(V1, 100)
        assert resumed.train(V1) == [f"e0.p{i}.a0" for i in range(4, 8)]
        wait_for(lambda: resumed.counters.dropped_groups["duplicate"] == 4, "the trained groups to be refused")
        resumed.collector.acknowledge(resumed.collector.settled())
        assert connections.bus.stream_state(spec.stream).wait().num_messages == 0


def test_a_group_kept_for_another_use_stays_unacknowledged_and_survives_a_crash(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Trained once and killed, it comes again, is trained the second time, and only then is done; counted as reuse."""
    with DeliveryTracker(connections, prompts, uses=2) as tracker:
        tracker.issuer.advance(V0, 4)
        for message in hand.tasks(2):
            hand.answer(message)
        first = tracker.train(V0)
        assert tracker.collector.settled() == []
        rows, saved = tracker.ledger.rows(), tracker.issuer.take_state()  # the checkpoint; then the crash
    with DeliveryTracker(connections, prompts, Ledger(rows), saved, uses=2) as resumed:
        assert resumed.train(V1) == first
        assert len(resumed.collector.settled()) == 2
        assert (resumed.counters.groups_trained, resumed.counters.groups_reused) == (0, 4)  # of this life
        assert resumed.counters.groups_scored == 0
        assert not resumed.counters.dropped_groups
        assert resumed.issuer.take_state().entries.account.totals["train"].used == 4


def test_at_the_end_nothing_waits_for_another_use(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Kept groups are settled without one more use; what a later life gets of them again is a duplicate, settled at once."""
    spec = streams.scored_consumer(connections.run_id, "train")
    with DeliveryTracker(connections, prompts, uses=3) as tracker:
        tracker.issuer.advance(V0, 4)
        for message in hand.tasks(2):
            hand.answer(message)
        tracker.train(V0)
        assert tracker.collector.settled() == []
        tracker.collector.close()
        assert len(tracker.collector.settled()) == 2
        rows, saved = (
            tracker.ledger.rows(),
            tracker.issuer.take_state(),
        )  # the checkpoint; the crash before it acknowledges
    with DeliveryTracker(connections, prompts, Ledger(rows), saved, uses=3) as resumed:
        resumed.collector.close()
        wait_for(lambda: len(resumed.collector.settled()) == 2, "the messages to come again")
        resumed.collector.acknowledge(resumed.collector.settled())
        assert connections.bus.stream_state(spec.stream).wait().num_messages == 0


def test_a_group_that_comes_twice_is_trained_once(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """A second message about a waiting group is counted as a duplicate, and does not end the first one's hold."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(4)
        scored = hand.scored(messages[0])
        hand._producer.announce(scored)
        hand._producer.announce(scored, msg_id="late-retry")
        wait_for(lambda: tracker.counters.dropped_groups["duplicate"] == 2, "the duplicates")
        assert len(tracker.collector.settled()) == 1  # the copy alone
        hand.answer(messages[1])
        assert len(tracker.train(V0)) == 4
        assert len(tracker.collector.settled()) == 3


def test_stale_groups_are_dropped_and_their_prompts_issued_again(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """What is too old at the moment of use is counted in groups and tokens, and comes again as the next attempt."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(4)
        for message in messages[:2]:
            hand.answer(message, V0)
        wait_for(lambda: tracker.counters.groups_scored == 4, "four scored groups")
        assert tracker.collector.collect(V2, lambda: tracker.counters.dropped_groups["stale"] == 4) == []
        assert tracker.counters.dropped_tokens["stale"] > 0
        again = hand.tasks(2)
        assert [task.group_id for message in again for task in message.tasks] == [f"e0.p{i}.a1" for i in range(4)]
        for message in again:
            hand.answer(message, V2)
        assert tracker.train(V2) == [f"e0.p{i}.a1" for i in range(4)]


def test_a_full_batch_waits_for_groups_that_it_would_overtake_for_good(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Younger groups make a full batch, and the oldest, for which this step is the last, are still waited for and trained."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        first = hand.tasks(4)
        for message in first[:2]:
            hand.answer(message)
        tracker.train(V0)
        tracker.issuer.advance(V1, 100)
        for message in hand.tasks(2):
            hand.answer(message, V1)
        wait_for(lambda: tracker.counters.groups_scored == 8, "a full batch of the younger groups")
        looks: list[str] = []

        def the_others_come_now() -> bool:  # asked once a look: the batch was full at the first, and was not taken
            looks.append("")
            if len(looks) == 2:
                for message in first[2:]:
                    hand.answer(message)
            return False

        batch = tracker.collector.collect(V1, the_others_come_now, patience_s=60.0)
        assert [group.group_id for group in batch] == [f"e0.p{i}.a0" for i in range(4, 8)]
        assert not tracker.counters.dropped_groups


def test_patience_with_the_oldest_groups_ends(connections: Connections, prompts: PromptSet, hand: Answering) -> None:
    """When they do not come in time, the younger groups are trained; what comes too late is dropped, and issued again."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        first = hand.tasks(4)
        for message in first[:2]:
            hand.answer(message)
        tracker.train(V0)
        tracker.issuer.advance(V1, 100)
        for message in hand.tasks(2):
            hand.answer(message, V1)
        wait_for(lambda: tracker.counters.groups_scored == 8, "a full batch of the younger groups")
        assert set(tracker.train(V1, patience_s=0.2)) == {f"e0.p{i}.a0" for i in range(8, 12)}
        tracker.issuer.advance(V2, 100)
        for message in first[2:]:
            hand.answer(message)
        tracker.collector.collect(V2, lambda: tracker.counters.dropped_groups["stale"] == 4, patience_s=60.0)


def test_a_prompt_that_is_always_stale_is_given_up(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """After max_attempts the prompt is not issued again, and counted."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 4)
        for attempt in range(ROLLOUT.max_attempts):
            for message in hand.tasks(2):
                hand.answer(message, V0)
            wait_for(lambda attempt=attempt: tracker.counters.groups_scored == 4 * (attempt + 1), "scored groups")
            stale = 4 * (attempt + 1)
            tracker.collector.collect(V2, lambda stale=stale: tracker.counters.dropped_groups["stale"] == stale)
        assert tracker.issuer.groups()["given_up"] == 4


def test_a_corrupt_pack_goes_to_the_dead_letters_and_its_groups_come_again(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """An object that is not what its message promised is never trained on; the rest of the batch is."""
    letters: list[DeadLetter] = []
    connections.bus.tail(
        f"{connections.run_id}-dead", subjects.dead(connections.run_id), DeadLetter, letters.append
    ).wait()
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(4)
        good = hand.scored(messages[0])
        corrupt = good.pack.model_copy(update={"sha256": "f" * 64})
        hand._producer.announce(good.model_copy(update={"pack": corrupt}))
        other = hand.scored(messages[1])  # the object holds other groups than the message says
        hand._producer.announce(other.model_copy(update={"pack": hand.scored(messages[2]).pack}))
        wait_for(lambda: len(letters) == 2, "the dead letters")
        assert {letter.reason for letter in letters} == {"BlobCorrupt", "PackError"}
        assert tracker.counters.dropped_groups["unreadable"] == 4
        for message in [messages[2], *hand.tasks(2)]:
            hand.answer(message)
        assert tracker.train(V0) == ["e0.p0.a1", "e0.p1.a1", "e0.p4.a0", "e0.p5.a0"]


def test_groups_that_vanish_are_issued_again(connections: Connections, prompts: PromptSet, hand: Answering) -> None:
    """When every queue is empty and groups are still out, they are counted as lost and come again."""
    with DeliveryTracker(connections, prompts, silent_s=0.5) as tracker:
        tracker.issuer.advance(V0, 4)
        messages = hand.tasks(2)  # taken, acknowledged, and never answered: a worker that broke its promise
        hand.answer(messages[0])
        again = hand.tasks(1)
        assert [task.group_id for task in again[0].tasks] == ["e0.p2.a1", "e0.p3.a1"]
        assert tracker.counters.dropped_groups["lost"] == 2
        hand.answer(again[0])
        assert tracker.train(V0) == ["e0.p0.a0", "e0.p1.a0", "e0.p2.a1", "e0.p3.a1"]


def test_dead_groups_make_room_and_too_many_end_the_run(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Dead groups leave what is outstanding; when nothing else comes back, the error gives the last reason."""
    with DeliveryTracker(connections, prompts, max_dead=4) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(4)
        for number, message in enumerate(messages[:2]):
            letter = DeadLetter(
                run_id=connections.run_id, stage="generated", subject="x", reason="RewardFailed",
                detail="endpoint answered 500", group_ids=tuple(t.group_id for t in message.tasks), num_delivered=5,
            )  # fmt: skip
            connections.bus.publish(subjects.dead(connections.run_id, "generated"), letter, msg_id=f"d{number}").wait()
        with pytest.raises(TooManyDead, match="RewardFailed: endpoint answered 500"):
            tracker.collector.collect(V0)
        assert tracker.counters.dropped_groups["dead"] == 4
        hand.tasks(2)  # their places are taken by new prompts


def bury(connections: Connections, message: TaskIssued, msg_id: str) -> None:
    """Put all groups of a message among the dead letters of the reward service."""
    letter = DeadLetter(
        run_id=connections.run_id, stage="generated", subject="x", reason="RewardFailed", detail="500",
        group_ids=tuple(t.group_id for t in message.tasks), num_delivered=5,
    )  # fmt: skip
    connections.bus.publish(subjects.dead(connections.run_id, "generated"), letter, msg_id=msg_id).wait()


def test_a_dead_group_that_comes_after_all_is_alive_again(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """Its dead letter was sent again: it is trained under its own id, and the account takes its death back."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 4)
        messages = hand.tasks(2)
        bury(connections, messages[0], "d0")
        wait_for(lambda: tracker.counters.dropped_groups["dead"] == 2, "the dead letter")
        for message in messages:
            hand.answer(message)
        assert tracker.train(V0) == [f"e0.p{i}.a0" for i in range(4)]
        entries = tracker.issuer.take_state().entries
    assert tracker.counters.dropped_groups["dead"] == 0
    assert (entries.account.totals["train"].used, entries.dropped, entries.revived) == (4, (), ())


def test_a_letter_that_the_checkpoint_knows_is_not_read_twice(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """A group that died, came back and waits at the checkpoint is waited for by the next life, not buried again."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 4)
        messages = hand.tasks(2)
        bury(connections, messages[0], "d0")
        wait_for(lambda: tracker.counters.dropped_groups["dead"] == 2, "the dead letter")
        tracker.issuer.take_state()  # a chapter that tells of the death
        hand.answer(messages[0])
        wait_for(lambda: tracker.counters.groups_scored == 2, "the groups that are alive again")
        saved = tracker.issuer.take_state()
    assert saved.entries.revived == ("e0.p0.a0", "e0.p1.a0")
    with DeliveryTracker(connections, prompts, saved=saved) as resumed:
        hand.answer(messages[1])
        assert resumed.train(V0) == [f"e0.p{i}.a0" for i in range(4)]
        assert resumed.issuer.take_state().entries.dropped == ()


def test_waiting_too_long_says_for_whom(connections: Connections, prompts: PromptSet) -> None:
    """The error names what is ready, what is out, where it waits, and that no worker is alive."""
    with DeliveryTracker(connections, prompts, deadline_s=0.5) as tracker:
        tracker.issuer.advance(V0, 100)
        wait_for(lambda: connections.bus.stream_state(f"{connections.run_id}-tasks").wait().num_messages == 4, "tasks")
        with pytest.raises(CollectTimeout) as caught:
            tracker.collector.collect(V0)
    text = str(caught.value)
    assert "0 groups ready, 8 outstanding" in text
    assert "tasks: 4 messages waiting, 0 in work" in text
    assert "rollout workers alive: NONE" in text


def test_a_foreign_group_is_counted_and_left_alone(
    connections: Connections, prompts: PromptSet, hand: Answering
) -> None:
    """A group whose id is not one of this run's data is refused with a reason."""
    with DeliveryTracker(connections, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        scored = hand.scored(hand.tasks(1)[0])
        renamed = tuple(
            g.model_copy(update={"generated": g.generated.model_copy(update={"group_id": f"stranger{i}"})})
            for i, g in enumerate(scored.groups)
        )
        hand._producer.announce(scored.model_copy(update={"groups": renamed}))
        wait_for(lambda: tracker.counters.dropped_groups["foreign"] == 2, "the refusal")


def test_storage_that_is_away_ends_the_wait_with_its_name(
    connections: Connections, prompts: PromptSet, hand: Answering, own_s3: Callable
) -> None:
    """When packs cannot be fetched, the training thread gets the object store's error, not a timeout."""
    storage = own_s3()
    away = Connections(connections.run_id, connections.bus, Blobs(storage.settings, deadline_s=0.5))
    with DeliveryTracker(away, prompts) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(1)
        storage.kill()
        hand.answer(messages[0])
        with pytest.raises(BlobStoreUnreachable, match=storage.settings.endpoint):
            tracker.collector.collect(V0)


# ── servers that are away for a while ─────────────────────────────────────────────────────────────

OUTAGE_S = float(os.environ.get("PENSTOCK_TEST_OUTAGE_S", "2"))


@pytest.fixture
def own_doors(own_nats: Callable, own_s3: Callable, run_id: str) -> Iterator[tuple[Connections, NatsServer, S3Server]]:
    """A bootstrapped run on servers that may be killed, with doors that wait for them."""
    nats, storage = own_nats(), own_s3()
    with Bus.connect(nats.settings, name="trainer") as bus:
        blobs = Blobs(storage.settings, deadline_s=120.0)
        bootstrap(bus, blobs, run_id)
        yield Connections(run_id, bus, blobs), nats, storage


def test_nats_away_for_a_while_is_waited_for_and_loses_nothing(
    own_doors: tuple[Connections, NatsServer, S3Server], prompts: PromptSet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed with messages held and packs unsent, back on the same store: every group is trained once, acknowledged after."""
    connections, nats, storage = own_doors
    producer = ScriptedProducer(nats.settings, storage.settings, connections.run_id)
    hand = Answering(connections, producer)
    with DeliveryTracker(connections, prompts, deadline_s=300.0) as tracker:
        tracker.issuer.advance(V0, 100)
        messages = hand.tasks(4)
        hand.answer(messages[0])
        wait_for(lambda: tracker.counters.groups_scored == 2, "the first pack")
        nats.kill()
        wait_for(lambda: connections.bus.down_s > OUTAGE_S, "the outage", deadline_s=OUTAGE_S + 30)
        nats.restart()
        for message in messages[1:]:
            hand.answer(message)
        assert tracker.train(V0) == [f"e0.p{i}.a0" for i in range(4)]
        tracker.issuer.advance(V1, 100)
        assert len(hand.tasks(2)) == 2
        assert tracker.train(V1) == [f"e0.p{i}.a0" for i in range(4, 8)]
        tracker.collector.acknowledge(tracker.collector.settled())
        assert not tracker.counters.dropped_groups
        assert connections.bus.stream_state(f"{connections.run_id}-scored").wait().num_messages == 0
    producer.close()
    said = capsys.readouterr()
    assert "NATS unreachable" in said.out + said.err  # where logs go, an earlier test may have decided


def test_s3_away_for_a_while_is_waited_for_and_loses_nothing(
    own_doors: tuple[Connections, NatsServer, S3Server], prompts: PromptSet
) -> None:
    """Killed before the packs are fetched, back on the same store: the collector goes on with the very same packs."""
    connections, nats, storage = own_doors
    producer = ScriptedProducer(nats.settings, storage.settings, connections.run_id)
    hand = Answering(connections, producer)
    with DeliveryTracker(connections, prompts, deadline_s=300.0) as tracker:
        tracker.issuer.advance(V0, 100)
        answers = [hand.scored(message) for message in hand.tasks(4)]
        storage.kill()
        started = time.monotonic()
        for answer in answers:
            producer.announce(answer)
        wait_for(lambda: time.monotonic() - started > OUTAGE_S, "the outage", deadline_s=OUTAGE_S + 30)
        assert tracker.counters.groups_trained == 0
        assert tracker.collector.settled() == []
        storage.restart()
        assert tracker.train(V0) == [f"e0.p{i}.a0" for i in range(4)]
        assert tracker.train(V1) == [f"e0.p{i}.a0" for i in range(4, 8)]
        assert not tracker.counters.dropped_groups
    producer.close()
