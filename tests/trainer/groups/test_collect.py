"""Issuing and collecting over real streams: every group is trained once, or dropped once with a reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import wait_for
from tests.trainer.producer import Answer, ScriptedProducer, recite

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import streams, subjects
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import BlobStoreUnreachable
from penstock.protocol.facts import DeadLetter, GroupScored, TaskIssued
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.record.lineage import AccountState
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.errors import CollectTimeout, TooManyDeadLetters
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.collect import Collector, OvertakeBackoff
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.group_totals import MAX_CLAIMED_TOKENS, Drop, DropReason, GroupTotals
from penstock.trainer.groups.issue import Issuer, IssuerState
from penstock.trainer.groups.issue_log import IssueLog
from penstock.trainer.groups.pack_reader import CompletionTexts, PackReader
from penstock.trainer.settings import DataSettings, RolloutSettings

ROLLOUT = RolloutSettings(group_size=2, groups_per_step=4, groups_per_message=2, max_staleness=1, max_new_tokens=8)
V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> PromptSet:
    """Forty prompts of the quickstart's task."""
    folder = tmp_path_factory.mktemp("data")
    write_prompts(folder)
    return read_prompts(folder)


def write_prompts(folder: Path) -> None:
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=40, num_eval=1)


def read_prompts(folder: Path) -> PromptSet:
    return PromptSet(
        [folder / "train.jsonl"],
        data=DataSettings(),
        reward=RewardSettings(name="exact_match"),
        tokenizer=ChatTokenizer.read(folder / "model"),
    )


class Session:
    """One session of the trainer's group handling: issuer, collector, and what they share."""

    def __init__(self, connections: Connections, prompts: PromptSet, saved: IssuerState | None = None,
        *, log: Path | None = None, dynamic_sampling: bool = False, max_dead: int = 100, **options: Any,
    ) -> None:  # fmt: skip
        order = DataOrder(len(prompts), seed=0, shuffle=False)
        account = saved.entries.account if saved else AccountState()
        groups = GroupStates(
            max_staleness=ROLLOUT.max_staleness, ledger=saved.ledger if saved else (),
            totals=GroupTotals(account.totals.get("train")),  # uses and ages start at zero, sums are those of the run
            outstanding=account.in_flight.get("train", ()), dead=saved.dispatch["dead"] if saved else (),
        )  # fmt: skip
        groups.letters_read = saved.letters_read if saved else 0
        self.counters, run_groups = groups.totals, RunGroups(groups)
        self.dispatch = Dispatch(prompts, order=order, rollout=ROLLOUT, stop_token_ids=(2,), groups=groups)
        if saved is not None:
            self.dispatch.cursor.resume(saved.dispatch)
        self.issuer = Issuer(connections, self.dispatch, run_groups, saved.unsent if saved else ())
        if log is not None:
            cursor = self.dispatch.cursor
            self.issuer.keep_log(IssueLog(log, cursor.order_id, may_arrive=cursor.may_arrive))
        algorithm = AlgorithmSettings(dynamic_sampling=dynamic_sampling)
        batcher = Batcher(groups, self.issuer, ROLLOUT, algorithm, max_dead=max_dead)
        settings: dict[str, Any] = {"deadline_s": 20.0, "silent_s": 30.0, **options}
        self.collector = Collector(connections, groups=run_groups, batcher=batcher, issuer=self.issuer, **settings)

    def __enter__(self) -> Session:
        self.collector.__enter__()
        self.issuer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.issuer.__exit__()
        self.collector.__exit__()

    def train(self, version: PolicyVersion, *, overtake_wait_s: float = 0.0) -> list[str]:
        """Take a batch, after waiting for the oldest groups, and mark it as trained."""
        batch = self.collector.collect(version, overtake_wait_s=overtake_wait_s)
        ids = [group.group_id for group in batch]
        ages = {0: sum(group.num_tokens for group in batch)}
        self.issuer.mark_trained(batch, ages, version=version, made=next_version(version))
        return ids


class Run:
    """A bootstrapped run, whose tasks a test answers when it wants to."""

    def __init__(self, connections: Connections, prompts: PromptSet, producer: ScriptedProducer) -> None:
        self.connections, self.id, self._prompts, self.producer = connections, connections.run_id, prompts, producer
        self.inbox = connections.bus.inbox(streams.tasks_consumer(self.id, "train"), TaskIssued).wait()

    def session(self, saved: IssuerState | None = None, **options: Any) -> Session:
        return Session(self.connections, self._prompts, saved, **options)

    def num_messages(self, stage: str) -> int:
        return self.connections.bus.stream_state(f"{self.id}-{stage}").wait().num_messages

    def tasks(self, num_packs: int) -> list[TaskIssued]:
        taken: list[TaskIssued] = []

        def are_taken() -> bool:
            for delivery in self.inbox.fetch(num_packs - len(taken), 0.2).wait():
                taken.append(delivery.fact)
                delivery.ack().wait()
            return len(taken) >= num_packs

        wait_for(are_taken, f"{num_packs} task packs")
        return taken

    def scored(self, message: TaskIssued, version: PolicyVersion = V0) -> GroupScored:
        return self.store(message, [recite(task, version) for task in message.tasks], version)

    def store(self, message: TaskIssued, answers: Sequence[Answer], version: PolicyVersion = V0) -> GroupScored:
        return self.producer.store(message, list(answers), version)

    def announce(self, scored: GroupScored, msg_id: str = "", **changed: object) -> None:
        self.producer.announce(scored.model_copy(update=changed), msg_id=msg_id)

    def answer(self, *messages: TaskIssued, version: PolicyVersion = V0) -> None:
        for message in messages:
            self.announce(self.scored(message, version))

    def dead_letter(self, group_ids: TaskIssued | Sequence[str], msg_id: str, **changed: object) -> None:
        """Publish a dead letter of the reward service for all groups of a message, with other fields as ``changed``."""
        ids = tuple(t.group_id for t in group_ids.tasks) if isinstance(group_ids, TaskIssued) else tuple(group_ids)
        letter = DeadLetter(
            run_id=self.id,
            stage="generated",
            subject="x",
            reason="RewardFailed",
            detail="500",
            group_ids=ids,
            num_delivered=5,
        ).model_copy(update=changed)
        stage = "tasks" if "stage" in changed else "generated"
        self.connections.bus.publish(subjects.dead(self.id, stage), letter, msg_id=msg_id).wait()

    def letters(self) -> list[DeadLetter]:
        """Return a list that each dead letter is added to from now on."""
        letters: list[DeadLetter] = []
        self.connections.bus.tail(f"{self.id}-dead", subjects.dead(self.id), DeadLetter, letters.append).wait()
        return letters


def renamed(scored: GroupScored, names: Sequence[str], **changed: object) -> tuple[ScoredGroup, ...]:
    """Return the groups of a message under other ids."""
    return tuple(
        group.model_copy(update={"generated": group.generated.model_copy(update={"group_id": name, **changed})})
        for group, name in zip(scored.groups, names, strict=True)
    )


def firsts(start: int, stop: int) -> list[str]:
    """Return the ids of the first attempts at these prompts."""
    return [f"e0.p{i}.a0" for i in range(start, stop)]


@pytest.fixture
def run(
    bus: Bus, blobs: Blobs, run_streams: str, prompts: PromptSet, nats_settings: NatsSettings, s3_settings: S3Settings
) -> Iterator[Run]:
    producer = ScriptedProducer(nats_settings, s3_settings, run_streams)
    yield Run(Connections(run_streams, bus, blobs), prompts, producer)
    producer.close()


def test_groups_are_issued_as_soon_as_the_bound_admits_them(run: Run) -> None:
    """At most two steps' groups are outstanding; the next are issued once the version of a batch is announced."""
    with run.session() as session:
        session.issuer.advance(V0, 100)
        first = run.tasks(4)
        assert len(session.issuer.outstanding()) == 8
        run.answer(*first)
        assert session.train(V0) == firsts(0, 4)
        session.issuer.advance(V1, 100)
        second = run.tasks(2)
        assert {task.issued_version for message in second for task in message.tasks} == {1}
        assert session.issuer.groups()["outstanding"] == 8


def test_a_drop_near_the_end_issues_one_group_again_and_no_other(run: Run) -> None:
    with run.session() as session:
        session.issuer.advance(V0, 8)  # two steps to go
        run.answer(*run.tasks(4))
        session.train(V0)
        session.issuer.drop(Drop("e0.p4.a0", DropReason.STALE, 3))
        (again,) = run.tasks(1)
        assert [task.group_id for task in again.tasks] == ["e0.p4.a1"]
        assert len(session.issuer.outstanding()) == 4
        assert run.num_messages("tasks") == 0


def test_messages_are_acknowledged_only_when_a_checkpoint_covers_them(run: Run) -> None:
    """Until then a restarted trainer receives them again, and refuses by id what its ledger holds."""
    with run.session() as session:
        session.issuer.advance(V0, 100)
        run.answer(*run.tasks(4))
        session.train(V0)
        covered = session.collector.settled()
        assert len(covered) == 2
        assert run.num_messages("scored") == 4
        saved = session.issuer.take_state()  # the checkpoint; then the crash
    with run.session(saved) as resumed:
        resumed.issuer.advance(V1, 100)
        assert resumed.train(V1) == firsts(4, 8)
        wait_for(lambda: resumed.counters.dropped_groups["duplicate"] == 4, "the trained groups to be refused")
        resumed.collector.acknowledge(resumed.collector.settled())
        assert run.num_messages("scored") == 0


def younger_batch(run: Run, session: Session) -> list[TaskIssued]:
    """Train one step and have a full batch for the next; return the messages of older groups that have not arrived."""
    session.issuer.advance(V0, 100)
    first = run.tasks(4)
    run.answer(*first[:2])
    session.train(V0)
    session.issuer.advance(V1, 100)
    run.answer(*run.tasks(2), version=V1)
    wait_for(lambda: session.counters.num_scored == 8, "a full batch of the younger groups")
    return first[2:]


def test_a_full_batch_waits_for_groups_that_would_be_too_old_after_it(run: Run) -> None:
    """Younger groups make a full batch; it waits for the oldest, for which this step is the last, and trains them."""
    with run.session() as session:
        late = younger_batch(run, session)
        num_calls = 0

        def answer_the_others() -> bool:  # called once per check: the batch was full at the first, and was not taken
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                run.answer(*late)
            return False

        batch = session.collector.collect(V1, answer_the_others, overtake_wait_s=60.0)
        assert [group.group_id for group in batch] == firsts(4, 8)
        assert not session.counters.dropped_groups


def test_the_wait_for_the_oldest_groups_ends(run: Run) -> None:
    """When they do not arrive in time, the younger groups are trained; late ones are dropped and issued again."""
    with run.session() as session:
        late = younger_batch(run, session)
        assert set(session.train(V1, overtake_wait_s=0.2)) == set(firsts(8, 12))
        session.issuer.advance(V2, 100)
        run.answer(*late)
        session.collector.collect(V2, lambda: session.counters.dropped_groups["stale"] == 4, overtake_wait_s=60.0)


Forge = Callable[[Run, TaskIssued], GroupScored]


def of_groups(change: Callable[[Group], Group]) -> Forge:
    """Store the groups of a message, each changed."""

    def forge(run: Run, message: TaskIssued) -> GroupScored:
        answers = [recite(task, V0) for task in message.tasks]
        changed = [change(group) for group, _ in answers]
        rewards = [values[: len(group.trajectories)] for group, (_, values) in zip(changed, answers, strict=True)]
        return run.store(message, list(zip(changed, rewards, strict=True)))

    return forge


def of_rows(change: Callable[[Trajectory], Trajectory]) -> Forge:
    return of_groups(lambda group: replace(group, trajectories=tuple(map(change, group.trajectories))))


def _with_token(row: Trajectory, token: int) -> Trajectory:
    ids = row.token_ids.copy()
    ids[-1] = token
    return replace(row, token_ids=ids)


def _with_structs(run: Run, message: TaskIssued) -> GroupScored:
    scored = run.scored(message)
    table = pq.read_table(pa.BufferReader(run.connections.blobs.get(scored.pack)))
    structs = pa.array([{"element": 1}] * len(table), pa.struct([pa.field("element", pa.int32(), nullable=False)]))
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(6, pa.field("token_ids", structs.type), structs), sink, row_group_size=2)
    ref = run.connections.blobs.put(f"runs/{run.id}/hostile", sink.getvalue().to_pybytes())
    return scored.model_copy(update={"pack": ref})


def _of_another_hash(run: Run, message: TaskIssued) -> GroupScored:
    scored = run.scored(message)
    return scored.model_copy(update={"pack": scored.pack.model_copy(update={"sha256": "f" * 64})})


def _of_other_groups(run: Run, message: TaskIssued) -> GroupScored:
    other = of_groups(lambda group: replace(group, group_id=f"{group.group_id}0"))(run, message)
    return run.scored(message).model_copy(update={"pack": other.pack})


UNREADABLE: dict[str, tuple[Forge, str]] = {
    "other bytes than its message says": (_of_another_hash, "BlobCorrupt"),
    "other groups": (_of_other_groups, "PackError"),
    "structs for token ids": (_with_structs, "PackError"),
    "another ground truth": (
        of_groups(lambda group: replace(group, reward=RewardRequest(name="exact_match", ground_truth='"text"'))),
        "PackError",
    ),
    "half a group": (of_groups(lambda group: replace(group, trajectories=group.trajectories[:1])), "PackError"),
    "an id beyond the vocabulary": (of_rows(lambda row: _with_token(row, 60)), "PackError"),
    "a text that its tokens do not say": (of_rows(lambda row: replace(row, completion_text="right")), "TextMismatch"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_pack_that_cannot_be_trained_on_is_dead_lettered_and_its_groups_are_issued_again(run: Run, name: str) -> None:
    """They are trained at the next attempt, and the rest of the batch as it is."""
    forge, reason = UNREADABLE[name]
    letters = run.letters()
    texts = CompletionTexts(lambda rows, _: ["said"] * len(rows), rows=1)
    with run.session(reader=PackReader(run.connections.blobs.get, vocab_size=60, texts=texts)) as session:
        session.issuer.advance(V0, 4)
        hostile, other = run.tasks(2)
        run.announce(forge(run, hostile))
        wait_for(lambda: letters, "the dead letter")
        assert [letter.reason for letter in letters] == [reason]
        assert session.counters.dropped_groups["unreadable"] == 2
        run.answer(other, *run.tasks(1))
        assert session.train(V0) == ["e0.p0.a1", "e0.p1.a1", "e0.p2.a0", "e0.p3.a0"]
        totals = session.issuer.take_state().entries.account.totals["train"]
        assert (totals.issued, totals.used, sum(totals.dropped.values())) == (6, 4, 2)


def test_groups_that_never_arrive_are_issued_again(run: Run) -> None:
    """When every queue is empty and groups are outstanding, they are counted as lost and issued again."""
    with run.session(silent_s=0.5) as session:
        session.issuer.advance(V0, 4)
        messages = run.tasks(2)  # received, acknowledged, and never answered
        run.answer(messages[0])
        again = run.tasks(1)
        assert [task.group_id for task in again[0].tasks] == ["e0.p2.a1", "e0.p3.a1"]
        assert session.counters.dropped_groups["lost"] == 2
        run.answer(again[0])
        assert session.train(V0) == ["e0.p0.a0", "e0.p1.a0", "e0.p2.a1", "e0.p3.a1"]


def test_dead_lettered_groups_are_replaced_and_too_many_end_the_run(run: Run) -> None:
    """Dead-lettered groups are no longer outstanding; when no other is on its way, the error gives the last reason."""
    with run.session(max_dead=4, silent_s=0.5) as session:
        session.issuer.advance(V0, 100)
        messages = run.tasks(4)
        for number, message in enumerate(messages[:2]):
            run.dead_letter(message, f"d{number}", detail="endpoint answered 500")
        wait_for(lambda: session.counters.dropped_groups["dead"] == 4, "the dead letters")
        run.tasks(2)  # new prompts are issued in their place
        with pytest.raises(TooManyDeadLetters, match="RewardFailed: endpoint answered 500"):
            session.collector.collect(V0)


def test_untrue_dead_letters_end_no_run_while_groups_arrive(run: Run) -> None:
    """Letters name all issued groups: no more than twice the bound is issued, and each that arrives is trained."""
    held: dict[str, Delivery[TaskIssued]] = {}  # by a worker: not acknowledged, and may be delivered again

    def num_held(wait_s: float = 0.05) -> int:
        held.update({one.fact.pack_id: one for one in run.inbox.fetch(8, wait_s).wait()})
        return len(held)

    with run.session(max_dead=8, silent_s=0.3) as session:
        session.issuer.advance(V0, 100)
        for number in range(8):  # the issue stops when more than 8 groups are dead
            wait_for(lambda number=number: num_held() > number, "another task pack")
            run.dead_letter(list(held.values())[number].fact, f"forged{number}")
        wait_for(lambda: session.counters.dropped_groups["dead"] == 16, "the forged letters")
        end = time.monotonic() + 1.2  # four times as long as empty queues would take
        assert session.collector.collect(V0, lambda: time.monotonic() > end) == []
        assert num_held(0.2) == 8
        for delivery in held.values():
            run.answer(delivery.fact)
            delivery.ack().wait()
        assert session.train(V0) == firsts(0, 4)
        wait_for(lambda: session.counters.dropped_groups["dead"] == 0, "the late groups")
        assert session.counters.num_scored == 16
        assert not session.issuer._paused


def test_dead_letters_that_were_true_stop_the_issue_until_the_queues_are_empty(run: Run) -> None:
    """A service that fails for most groups slows the run down and does not end it: some arrive, and issue goes on."""
    with run.session(max_dead=2, silent_s=0.3) as session:
        session.issuer.advance(V0, 8)
        first = run.tasks(4)
        run.dead_letter(first[0], "d0")
        messages = [*first[1:], *run.tasks(1)]  # one pack in place of the first; then the issue stops
        for number in (0, 1, 3):
            run.dead_letter(messages[number], f"later{number}")
        wait_for(lambda: session.counters.dropped_groups["dead"] == 8, "the dead letters")
        assert session.issuer._paused
        run.answer(messages[2])  # all others are dead: no further group is on its way
        run.answer(*run.tasks(3))
        assert len(session.train(V0)) == 4
        assert not session.issuer._paused


def test_a_dead_letter_of_another_stage_or_run_closes_nothing(run: Run) -> None:
    """A login may write letters of its own stage only; the trainer's would have its groups issued again."""
    with run.session() as session:
        session.issuer.advance(V0, 4)
        messages = run.tasks(2)
        ids = tuple(task.group_id for message in messages for task in message.tasks)
        run.dead_letter(ids, "d0", stage="scored")
        run.dead_letter(ids, "d1", stage="tasks", run_id="other")
        run.dead_letter(ids[:1], "d2", stage="tasks")
        wait_for(lambda: session.counters.dropped_groups["dead"] == 1, "the letter that may be true")
        assert session.issuer.take_state().letters_read == 3
        assert not session.counters.dropped_groups["unreadable"]
        wait_for(lambda: len(session.issuer.outstanding()) == 4, "the issue in place of it")  # by the issuer's thread


def test_a_dead_letter_in_the_checkpoint_is_not_read_twice(run: Run) -> None:
    """A group that was dead-lettered, sent again and ready at the checkpoint stays outstanding in the next session."""
    with run.session() as session:
        session.issuer.advance(V0, 4)
        messages = run.tasks(2)
        run.dead_letter(messages[0], "d0")
        wait_for(lambda: session.counters.dropped_groups["dead"] == 2, "the dead letter")
        session.issuer.take_state()  # a chapter that includes the drop
        run.answer(messages[0])
        wait_for(lambda: session.counters.num_scored == 2, "the groups that were sent again")
        saved = session.issuer.take_state()
    assert saved.entries.reopened == ("e0.p0.a0", "e0.p1.a0")
    with run.session(saved) as resumed:
        run.answer(messages[1])
        assert resumed.train(V0) == firsts(0, 4)
        assert resumed.issuer.take_state().entries.dropped == ()


def test_the_deadline_of_a_batch_names_what_is_missing(run: Run) -> None:
    """The error names what is ready and outstanding, the queue depths, and that no worker sends heartbeats."""
    with run.session(deadline_s=0.5) as session:
        session.issuer.advance(V0, 100)
        wait_for(lambda: run.num_messages("tasks") == 4, "tasks")
        with pytest.raises(CollectTimeout) as caught:
            session.collector.collect(V0)
    text = str(caught.value)
    assert "0 groups ready, 8 outstanding" in text
    assert "tasks: 4 messages waiting, 0 in work" in text
    assert "rollout workers alive: NONE" in text


def test_the_deadline_of_a_batch_names_the_groups_dropped_without_signal(run: Run) -> None:
    """With dynamic sampling and a reward that never differs: the number, the reason, and what to do."""
    with run.session(deadline_s=0.5, dynamic_sampling=True) as session:
        session.issuer.advance(V0, 4)
        for message in run.tasks(2):
            scored = run.scored(message)
            equal = tuple(g.model_copy(update={"rewards": (1.0,) * len(g.rewards)}) for g in scored.groups)
            run.announce(scored, groups=equal)
        wait_for(lambda: session.counters.dropped_groups["no_signal"] == 4, "the drops")
        with pytest.raises(
            CollectTimeout, match=r"Groups dropped since the last batch: 4 no_signal \(all rewards of each"
        ) as caught:
            session.collector.collect(V0)
    assert "algorithm.dynamic_sampling = false" in str(caught.value)


def test_token_counts_of_refused_messages_keep_the_checkpoint_readable(run: Run) -> None:
    """A refused message states any number of tokens; the totals of the checkpoint stay within the range of a count."""
    with run.session() as session:
        session.issuer.advance(V0, 100)
        scored = run.scored(run.tasks(1)[0])
        run.announce(scored, groups=renamed(scored, ["x0", "x1"], completion_tokens=(2**53,) * 2))
        wait_for(lambda: session.counters.dropped_groups["foreign"] == 2, "the refusal")
        account = session.issuer.take_state().entries.account
        assert account.totals["train"].refused_tokens == {"foreign": 2 * MAX_CLAIMED_TOKENS}
        assert AccountState.model_validate_json(account.model_dump_json()) == account


def test_an_unreachable_object_store_ends_the_wait_with_its_endpoint(
    run: Run, prompts: PromptSet, own_s3: Callable
) -> None:
    """When packs cannot be fetched, the training thread gets the object store's error, not a timeout."""
    storage = own_s3()
    unreachable = Connections(run.id, run.connections.bus, Blobs(storage.settings, deadline_s=0.5))
    with Session(unreachable, prompts) as session:
        session.issuer.advance(V0, 100)
        messages = run.tasks(1)
        storage.kill()
        run.answer(messages[0])
        with pytest.raises(BlobStoreUnreachable, match=storage.settings.endpoint):
            session.collector.collect(V0)


# ── servers that are unreachable for a while ──────────────────────────────────────────────────────

OUTAGE_S = float(os.environ.get("PENSTOCK_TEST_OUTAGE_S", "2"))


@pytest.fixture
def own_run(
    own_nats: Callable, own_s3: Callable, run_id: str, prompts: PromptSet
) -> Iterator[tuple[Run, NatsServer, S3Server]]:
    """A bootstrapped run on servers that may be killed, with connections that wait for them."""
    nats, storage = own_nats(), own_s3()
    with Bus.connect(nats.settings, name="trainer") as bus:
        blobs = Blobs(storage.settings, deadline_s=120.0)
        bootstrap(bus, blobs, run_id)
        producer = ScriptedProducer(nats.settings, storage.settings, run_id)
        yield Run(Connections(run_id, bus, blobs), prompts, producer), nats, storage
        producer.close()


def test_an_outage_of_nats_delays_groups_and_loses_none(
    own_run: tuple[Run, NatsServer, S3Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed with messages held and packs unsent, restarted on its store: every group is trained once."""
    run, nats, _ = own_run
    with run.session(deadline_s=300.0) as session:
        session.issuer.advance(V0, 100)
        messages = run.tasks(4)
        run.answer(messages[0])
        wait_for(lambda: session.counters.num_scored == 2, "the first pack")
        nats.kill()
        wait_for(lambda: run.connections.bus.down_s > OUTAGE_S, "the outage", deadline_s=OUTAGE_S + 30)
        nats.restart()
        run.answer(*messages[1:])
        assert session.train(V0) == firsts(0, 4)
        session.issuer.advance(V1, 100)
        assert len(run.tasks(2)) == 2
        assert session.train(V1) == firsts(4, 8)
        session.collector.acknowledge(session.collector.settled())
        assert not session.counters.dropped_groups
        assert run.num_messages("scored") == 0
    said = capsys.readouterr()
    assert "NATS unreachable" in said.out + said.err


def test_an_outage_of_s3_delays_groups_and_loses_none(own_run: tuple[Run, NatsServer, S3Server]) -> None:
    """Killed before the packs are fetched, restarted on the same store: the collector continues with the same packs."""
    run, _, storage = own_run
    with run.session(deadline_s=300.0) as session:
        session.issuer.advance(V0, 100)
        answers = [run.scored(message) for message in run.tasks(4)]
        storage.kill()
        started = time.monotonic()
        for answer in answers:
            run.announce(answer)
        wait_for(lambda: time.monotonic() - started > OUTAGE_S, "the outage", deadline_s=OUTAGE_S + 30)
        assert session.counters.sums.used == 0
        assert session.collector.settled() == []
        storage.restart()
        assert session.train(V0) == firsts(0, 4)
        assert session.train(V1) == firsts(4, 8)
        assert not session.counters.dropped_groups


def test_a_run_that_drains_trains_what_is_under_way_and_issues_nothing(run: Run) -> None:
    """Two steps' groups are under way: both are trained, in full batches, and then `collect` returns an empty batch."""
    with run.session() as session:
        session.issuer.advance(V0, 100)
        messages = run.tasks(4)
        session.issuer.drain()
        session.collector.drain()
        run.answer(*messages)
        assert len(session.train(V0)) == 4
        session.issuer.advance(V1, 96)  # its version is announced: this would admit more
        assert len(session.train(V1)) == 4
        assert session.collector.collect(V2) == []
        assert session.issuer.outstanding() == ()
        assert session.issuer.groups()["issued"] == 8
        assert run.num_messages("tasks") == 0


def test_what_is_no_full_batch_stays_for_the_session_that_resumes(run: Run) -> None:
    """Three scored groups and one to be issued again wait; the next session trains all four, and every group once."""
    with run.session() as session:
        session.issuer.advance(V0, 100)
        messages = run.tasks(4)
        session.issuer.drain()
        session.collector.drain()
        run.answer(*messages[:3])
        assert len(session.train(V0)) == 4
        session.collector.acknowledge(session.collector.settled())
        session.issuer.drop(Drop("e0.p6.a0", DropReason.STALE, 3))
        session.issuer.drop(Drop("e0.p7.a0", DropReason.STALE, 3))
        assert session.collector.collect(V1) == []
        assert session.issuer.outstanding() == ("e0.p4.a0", "e0.p5.a0")
        saved = session.issuer.take_state()
    with run.session(saved) as resumed:
        resumed.issuer.advance(V1, 4)
        (again,) = run.tasks(1)
        assert [task.group_id for task in again.tasks] == ["e0.p6.a1", "e0.p7.a1"]
        run.answer(again, version=V1)
        assert sorted(resumed.train(V1)) == ["e0.p4.a0", "e0.p5.a0", "e0.p6.a1", "e0.p7.a1"]


def test_draining_waits_for_a_group_under_way_but_not_without_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are gone deliver nothing: what they had stays in the queues, and outstanding."""
    with run.session() as session:
        session.issuer.advance(V0, 4)
        run.tasks(2)
        session.issuer.drain()
        session.collector.drain()
        stops = iter([False, False, True])
        assert session.collector.collect(V0, lambda: next(stops)) == []  # it waited until the stop
        monkeypatch.setattr("penstock.trainer.groups.collect._DRAIN_S", 0.1)
        assert session.collector.collect(V0) == []
        assert len(session.issuer.outstanding()) == 4


def test_waits_halve_while_groups_are_overtaken_and_are_restored_after() -> None:
    backoff = OvertakeBackoff()
    waits = []
    for overtook in (True, True, False, True):
        waits.append(backoff.scale(8.0))
        backoff.record(overtook=overtook)
    assert waits == [8.0, 4.0, 2.0, 8.0]
    assert backoff.scale(8.0) == 4.0


@given(st.lists(st.booleans(), max_size=200))
def test_consecutive_waits_without_result_cost_less_than_two_full_ones(outcomes: list[bool]) -> None:
    """However long groups are late, the waits between two batches that overtake none add up to under two."""
    backoff, spent = OvertakeBackoff(), 0.0
    for overtook in outcomes:
        spent = spent + backoff.scale(1.0) if overtook else 0.0
        backoff.record(overtook=overtook)
        assert spent < 2.0
