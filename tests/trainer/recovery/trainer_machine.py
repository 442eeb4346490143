"""A state machine that tests the trainer with all a broker may do (repeat, reorder, lose, dead-letter), and with crashes.

The parts under test are the real ones: `Issuer`, `Batcher`, `Dispatch`, `RunGroups`, and the commit (`tests/trainer/recovery/machine_commit.py`). The queues are in memory, with the guarantees of the real ones and no
more: a message is delivered again until it is acknowledged, in any order; message ids are lost whenever a server
restarts. `tests/trainer/recovery/test_exactly_once.py` runs it, and shows that it finds planted bugs.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.trainer.recovery.machine_commit import Commits, DelayedAcks

from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import DeadLetter
from penstock.protocol.groups import BlobRef, GeneratedGroup, ScoredGroup
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import GROUP_DIGITS, STEP_DIGEST, LineageChapter, StepDigest, group_digest
from penstock.protocol.versions import Branch, PolicyVersion, next_version, staleness
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt, PromptSet
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.issue import Issuer, IssuerState
from penstock.trainer.groups.issue_log import IssueLog
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.groups.rolled_back import take_rolled_back
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.settings import DataSettings, RolloutSettings

PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
NO_ROWS: Any = SimpleNamespace(trained_rows=[])
CLOSED: Connections = Connections("machine", None, None)  # type: ignore[arg-type]  # no thread is started: nothing is sent
PICK = st.integers(0, 10_000)  # which of the items available


class CachedPrompts(PromptSet):
    @functools.cache  # noqa: B019  there is one set per process
    def __getitem__(self, index: int) -> Prompt:
        return super().__getitem__(index)


@functools.cache
def prompts() -> PromptSet:
    folder = Path(tempfile.mkdtemp(prefix="trainer-machine-"))  # they are read from it as long as the machine runs
    atexit.register(shutil.rmtree, folder)
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=1, num_train=6, num_eval=1)
    return CachedPrompts(
        [folder / "train.jsonl"],
        data=DataSettings(),
        reward=RewardSettings(name="exact_match"),
        tokenizer=ChatTokenizer.read(folder / "model"),
    )


def scored(group_id: str, version: int) -> ScoredGroup:
    generated = GeneratedGroup(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="r", issued_version=0,
        oldest_version=version, newest_version=version, prompt_tokens=1, completion_tokens=(3,), finish_reasons=("stop",),
    )  # fmt: skip
    return ScoredGroup(generated=generated, rewards=(1.0,), scorer="machine")


@dataclass(slots=True)
class Queue:
    """Messages that are delivered again until they are acknowledged; ids are kept until the server restarts."""

    waiting: dict[int, Any] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    suppressed: set[str] = field(default_factory=set)  # groups of messages that were discarded as duplicates
    sequence: int = 0

    def publish(self, message: Any, msg_id: str) -> None:
        if msg_id in self.known:
            self.suppressed.update(_ids(message))
            return
        self.known.add(msg_id)
        self.sequence += 1
        self.waiting[self.sequence] = message

    def pick(self, number: int) -> tuple[int, Any]:
        sequence = sorted(self.waiting)[number % len(self.waiting)]
        return sequence, self.waiting[sequence]


@dataclass(slots=True)
class Record:
    """The sum of the committed chapters: a group is issued once and closed once."""

    issued: set[str] = field(default_factory=set)
    closed: dict[str, str] = field(default_factory=dict)

    def fold(self, entries: LineageChapter) -> None:
        used = [group.group_id for step in entries.steps for group in step.groups if group.use == 1]
        for group_id in entries.issued.get("train", ()):
            assert group_id not in self.issued, f"{group_id} is issued twice"
            self.issued.add(group_id)
        for group_id in entries.revived:
            assert self.closed.pop(group_id) == "dead", f"{group_id} was reopened, but it was not closed as dead"
        for group_id, how in [*((i, "used") for i in used), *((d.group_id, d.reason) for d in entries.dropped)]:
            assert group_id in self.issued, f"{group_id} is closed as {how} but was never issued"
            assert group_id not in self.closed, f"{group_id} is closed as {self.closed[group_id]} and as {how}"
            self.closed[group_id] = how
        totals = entries.account.totals["train"]
        reasons = Counter(self.closed.values())
        assert self.issued - self.closed.keys() == set(entries.account.in_flight["train"])
        assert totals.issued == len(self.issued)
        assert totals.used == reasons.pop("used", 0)
        assert {reason: n for reason, n in totals.dropped.items() if n} == dict(reasons)


class TrainerMachine(RuleBasedStateMachine):
    """Every rule is one event that can happen next, in any order."""

    record_writer = RunRecordWriter  # planted bugs override these
    issuing = Issuer

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        groups_per_message=st.integers(1, 3),
        max_attempts=st.integers(1, 3),
        uses=st.integers(1, 2),
    )
    def begin(self, groups_per_step, max_staleness, groups_per_message, max_attempts, uses):
        self.rollout = RolloutSettings(
            group_size=1, groups_per_step=groups_per_step, max_staleness=max_staleness, max_attempts=max_attempts,
            groups_per_message=min(groups_per_message, groups_per_step), max_new_tokens=4,
        )  # fmt: skip
        self.uses = uses
        self.tasks, self.scored = Queue(), Queue()
        self.letters: list[tuple[DeadLetter, Any]] = []
        self.num_letters_read = 0
        self.lost: set[str] = set()  # by the broker, not by the trainer
        self.published: set[str] = set()  # every group that any session issued
        self.log: IssueLog | None = None
        self.record = Record()
        self.version = self.head = PolicyVersion(0)
        self.paths: dict[int, tuple[Any, ...]] = {
            0: ()
        }  # the batches that a version was made of: equal ones, equal weights
        self.announced: dict[PolicyVersion, int] = {self.head: 0}  # steps of the versions that workers can sample with
        self.lines: list[dict[str, Any]] = []  # of metrics.jsonl
        self.effect: list[tuple[str, int]] = []  # group, and the version it was trained at
        self.commits = Commits(self.record_writer)
        self.start(None)
        self.checkpoint()

    def start(self, state):
        groups = RunGroups.of(state, max_staleness=self.rollout.max_staleness, max_trained_count=self.uses)
        dispatch = Dispatch(
            prompts(), order=DataOrder(6, seed=1), rollout=self.rollout, stop_token_ids=(2,), groups=groups.train
        )
        if state is not None:
            dispatch.cursor.resume(state.dispatch)
        self.num_letters_read = state.letters_read if state else 0
        self.groups, self.dispatch = groups.train, dispatch
        self.issuer = self.issuing(CLOSED, dispatch, groups, state.unsent if state else ())
        if self.log is not None:
            self.log.close()  # as the kernel does when a process is killed
        self.log = IssueLog(self.commits.folder, dispatch.cursor.order_id, may_arrive=dispatch.cursor.may_arrive)
        self.issuer.keep_log(self.log)
        self.tracker = Batcher(groups.train, self.issuer, self.rollout, AlgorithmSettings(max_trained_count=self.uses))
        self.acks = DelayedAcks(self.tracker, self.covered)
        self.commits.begin(self.version)
        self.fetching: dict[int, list[ScoredGroup]] = {}
        self.issuer.advance(self.head, 1_000)

    # ── what the trainer does ─────────────────────────────────────────────────────────────────

    @rule(sends=st.booleans())
    def issue(self, sends):
        """Tasks are published; or the trainer is killed before all of them are on the stream."""
        before = set(self.issuer.outstanding())
        packs = self.issuer.next_packs()
        if set(self.issuer.outstanding()) - before:
            lag = staleness(self.version, self.head)
            bound = (self.rollout.max_staleness + 1 - lag) * self.rollout.groups_per_step
            assert len(self.issuer.outstanding()) <= bound, "more is issued than the staleness bound admits"
        self.issuer.log_issue(packs)
        self.published.update(task.group_id for pack in packs for task in pack.tasks)
        for pack in packs[: None if sends else len(packs) // 2]:
            self.tasks.publish(tuple(task.group_id for task in pack.tasks), pack.pack_id)
        if sends:
            self.issuer.mark_sent()
        elif packs:
            self.crash()

    @precondition(lambda self: self.scored.waiting)
    @rule(pick=PICK)
    def receive(self, pick):
        """A scored message is delivered; its pack is not fetched yet."""
        sequence, groups = self.scored.pick(pick)
        self.scored.held[sequence] = self.scored.waiting.pop(sequence)
        self.fetching[sequence] = wanted = self.tracker.receive(sequence, groups, PACK)
        foreign = {s.generated.group_id for s in wanted} - self.published
        assert not foreign, f"never issued, and accepted: {foreign}"

    @precondition(lambda self: self.fetching)
    @rule(pick=PICK, readable=st.sampled_from([True, True, True, False]))
    def fetched(self, pick, readable):
        sequence = sorted(self.fetching)[pick % len(self.fetching)]
        wanted = self.fetching.pop(sequence)
        if readable or not wanted:
            self.tracker.offer(ReadyGroup(s, PACK, NO_ROWS) for s in wanted)
            return
        self.tracker.drop_unreadable(sequence, wanted)
        self._dead_letter("scored", [s.generated.group_id for s in wanted], self.scored.held.pop(sequence))

    @rule(waits=st.booleans(), announces=st.sampled_from([True, True, False]))
    def train(self, waits=False, announces=True):
        """Make one step if there is a full batch; its weights are announced at once, or later."""
        if waits and self.tracker.overtakes(self.version):
            return
        batch = self.tracker.take(self.version)
        if not batch:
            if self.tracker.num_to_repeat:  # the groups of a rolled-back step were waited for
                self.tracker.stop_repeating()
                self.rolled_back.forget()
            return
        ids = [group.group_id for group in batch]
        for group in batch:
            age = self.updates_between(self.version, group.scored.generated.oldest_version)
            assert age <= self.rollout.max_staleness, "a stale group is trained on"
        made = next_version(self.version)
        uses = self.issuer.mark_trained(batch, {}, version=self.version, made=made)
        digests = tuple(group_digest(g.scored, g.pack, uses[g.group_id])[:GROUP_DIGITS] for g in batch)
        self.paths[made] = (*self.paths[self.version], digests)
        digest = StepDigest(epoch=0, sha256="0" * 64, groups="".join(digests)).model_dump()
        step = {"kind": "step", "step": self.commits.step + 1, "version": self.version, STEP_DIGEST: digest}
        self.lines.append(step)
        self.effect += [(group_id, self.version) for group_id in ids]
        self.commits.train(batch, self.version, made, uses)
        self.version = made
        if announces:
            self.announce()

    @precondition(lambda self: self.head != self.version)
    @rule()
    def announce(self):
        """The newest version is announced; those between are skipped."""
        self.head = self.version
        self.announced[self.head] = len(self.paths[self.head])
        self.issuer.advance(self.head, 1_000)

    def updates_between(self, version, sampled_by):
        """Return the age of a sample by the paths to both versions, which no part of the trainer knows."""
        shared = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(self.paths[version], self.paths[sampled_by], strict=False)
            )
        )
        return len(self.paths[version]) + len(self.paths[sampled_by]) - 2 * shared

    @rule()
    def checkpoint(self):
        """Commit; the acknowledgements are sent later, if at all."""
        self.begin_checkpoint()
        self.finish_checkpoint()
        if self.acks.unsent:
            self._require_state_is_stored()

    @rule()
    def begin_checkpoint(self):
        """The state is copied in memory; until the commit anything may happen, a kill too."""
        self.finish_checkpoint()
        self.commits.commit(self.issuer, self.version, self.acks)

    @rule()
    def finish_checkpoint(self):
        """The copy is written, committed, and what it covers may be acknowledged."""
        if (chapter := self.commits.finish()) is not None:
            self.record.fold(chapter)

    @rule(what=st.sampled_from(["train", "receive", "fetched", "read_letter"]), pick=PICK)
    def checkpoint_twice(self, what, pick):
        """Make two checkpoints with at most one event in between."""
        self.checkpoint()
        if what == "train":
            self.train()
        elif what == "receive" and self.scored.waiting:
            self.receive(pick)
        elif what == "fetched" and self.fetching:
            self.fetched(pick, readable=True)
        elif what == "read_letter" and self.num_letters_read < len(self.letters):
            self.read_letter()
        self.checkpoint()

    def covered(self):
        """Return the messages that a checkpoint taken now covers; a planted bug overrides this."""
        return self.groups.settled()

    @precondition(lambda self: self.acks.unsent)
    @rule(number=st.integers(1, 3))
    def acknowledge(self, number):
        """Acknowledge some of the messages that the checkpoint covers."""
        done, self.acks.unsent = self.acks.unsent[:number], self.acks.unsent[number:]
        self.groups.forget_messages(done)
        for sequence in done:
            self.scored.held.pop(sequence, None)

    @precondition(lambda self: self.num_letters_read < len(self.letters))
    @rule()
    def read_letter(self):
        self.num_letters_read += 1
        self.tracker.dead_letter(self.letters[self.num_letters_read - 1][0], self.num_letters_read)

    @precondition(lambda self: not (self.tasks.waiting or self.scored.waiting or self.fetching))
    @rule()
    def find_lost(self):
        """Every queue has been empty for long: missing groups are dropped as lost."""
        self.tracker.drop_missing()

    @rule(repeats=st.booleans())
    def crash(self, repeats=True):
        """SIGKILL: only the checkpoint is left, and everything unacknowledged is delivered again; with or without metrics.jsonl."""
        state = self.commits.newest()
        document = json.loads(state.model_dump_json())
        self.effect = list(self.commits.effect(state))
        self.scored.waiting |= self.scored.held
        self.scored.held = {}
        saved_version = PolicyVersion(document["version"])
        self.version = saved_version if self.head == saved_version else PolicyVersion(self.head + 1)
        self.paths[self.version] = self.paths[saved_version]
        self.head = self.version
        steps = {**self.announced, self.version: len(self.paths[self.version])}
        is_branch = self.version != saved_version
        self.announced = steps
        lines, self.lines = [line for line in self.lines if line["step"] > state.step], []
        self.restore(document)
        self.branch_off(steps, Branch(saved_version, self.version) if is_branch else None)
        if not repeats:
            lines = []
        self.rolled_back = take_rolled_back(
            self.commits.folder, b"\n".join(json.dumps(line).encode() for line in lines), state
        )
        self.tracker.repeat(self.rolled_back, self.version)

    def restore(self, document):
        """Start the next session from a checkpoint; a planted bug overrides this."""
        self.start(CheckpointState.model_validate_json(json.dumps(document)))
        counts = self.groups.totals.counts_document()
        assert counts == document["totals"], "a resumed session counts otherwise than its checkpoint"

    def branch_off(self, steps, branch):
        self.groups.versions.begin_session(steps, branch)

    # ── what workers, reward service and broker do ────────────────────────────────────────────

    @precondition(lambda self: self.tasks.waiting)
    @rule(pick=PICK, age=st.integers(0, 5), acknowledges=st.sampled_from([True, True, False]))
    def answer(self, pick, age, acknowledges):
        """A worker samples a pack, by a version that may be old, and may be killed before it acknowledges the task."""
        sequence, ids = self.tasks.pick(pick)
        version = sorted(self.announced)[-min(age + 1, len(self.announced))]
        self.scored.publish([scored(group_id, version) for group_id in ids], f"s:{'+'.join(ids)}")
        if acknowledges:
            del self.tasks.waiting[sequence]

    @precondition(lambda self: self.scored.waiting)
    @rule(pick=PICK)
    def repeat(self, pick):
        """A publisher's late retry is after the duplicate window: the same groups under another sequence number."""
        _, groups = self.scored.pick(pick)
        self.scored.publish(groups, f"late{self.scored.sequence}")

    @rule()
    def forget(self):
        """The server restarts and loses the message ids of consumed messages."""
        self.tasks.known.clear()
        self.scored.known.clear()

    @precondition(lambda self: self.tasks.waiting or self.scored.waiting)
    @rule(pick=PICK, scored_stage=st.booleans())
    def lose(self, pick, scored_stage):
        """A message is lost: a worker acknowledged a task without answering it."""
        queue = self.scored if (scored_stage and self.scored.waiting) or not self.tasks.waiting else self.tasks
        sequence, message = queue.pick(pick)
        del queue.waiting[sequence]
        self.lost.update(_ids(message))

    @precondition(lambda self: self.tasks.waiting)
    @rule(pick=PICK, stage=st.sampled_from(["tasks", "generated"]))
    def dead_letter(self, pick, stage):
        """A pack goes to the dead letters of a worker or of the reward service."""
        sequence, ids = self.tasks.pick(pick)
        del self.tasks.waiting[sequence]
        message = ids
        if stage == "generated":
            message = [scored(group_id, self.head) for group_id in ids]
        self._dead_letter(stage, list(ids), message)

    @rule(epoch=st.integers(0, 2), prompt=st.integers(0, 6), attempt=st.integers(0, 3))
    def forge_group(self, epoch, prompt, attempt):
        """Anybody with the reward service's login announces a group that was not issued."""
        group_id = str(GroupKey(epoch, prompt, attempt))
        if group_id not in self.published:
            self.scored.publish([scored(group_id, self.head)], f"forged{self.scored.sequence}")

    @precondition(lambda self: self.issuer.outstanding())
    @rule(pick=PICK)
    def forge_letter(self, pick):
        """A dead letter names a group that is well and on its way."""
        outstanding = self.issuer.outstanding()
        group_id = outstanding[pick % len(outstanding)]
        self._dead_letter("tasks", [group_id], (group_id,))

    @precondition(lambda self: self.letters)
    @rule(pick=PICK)
    def send_again(self, pick):
        """A dead letter is sent again, in any state of its groups."""
        number = pick % len(self.letters)
        letter, message = self.letters[number]
        queue = self.tasks if letter.stage == "tasks" else self.scored
        queue.publish(message, f"again{number}.{queue.sequence}")

    @rule()
    def flow(self):
        """Without faults: issued groups are answered and delivered, and a step is made."""
        self.announce()
        self.issue(sends=True)
        while self.tasks.waiting:
            self.answer(0, 0, acknowledges=True)
        while self.num_letters_read < len(self.letters):
            self.read_letter()
        while self.scored.waiting:
            self.receive(0)
        while self.fetching:
            self.fetched(0, readable=True)
        self.train()

    def _dead_letter(self, stage, group_ids, message):
        letter = DeadLetter(
            run_id="machine", stage=stage, subject="s", reason="r", detail="d", group_ids=tuple(group_ids),
            num_delivered=1,
        )  # fmt: skip
        self.letters.append((letter, message))

    def _require_state_is_stored(self):
        """An acknowledged group is not redelivered: the next session has it from the checkpoint only."""
        stored, now = self.commits.newest(), self.issuer.take_state()
        assert IssuerState.is_in(now, stored), "acknowledged, but the checkpoint does not hold the present state"
        assert stored.version == self.version, "acknowledged, but the checkpoint is of older weights"

    # ── what must always be true ──────────────────────────────────────────────────────────────

    @invariant()
    def every_group_has_one_effect(self):
        if not hasattr(self, "issuer"):
            return
        uses = Counter(group_id for group_id, _ in self.effect)
        assert all(n <= self.uses for n in uses.values()), f"trained too often: {uses}"
        places = Counter(GroupKey.parse(group_id).place for group_id in uses)
        assert all(n == 1 for n in places.values()), f"two attempts at one prompt were both trained: {places}"

    @invariant()
    def the_accounting_matches_dispatch(self):
        if not hasattr(self, "issuer"):
            return
        totals, in_flight = self.groups.totals.sums, set(self.groups.outstanding())
        assert in_flight == set(self.issuer.outstanding())
        assert totals.issued == totals.used + sum(totals.dropped.values()) + len(in_flight)
        assert all(n >= 0 for n in totals.dropped.values())
        dead, outstanding = ({GroupKey.parse(i).place for i in ids} for ids in (self.groups.dead(), in_flight))
        assert not dead & outstanding

    @invariant()
    def no_prompt_is_passed_over(self):
        """Every prompt before the position was issued, by this session or an earlier one."""
        if not hasattr(self, "issuer"):
            return
        cursor = self.dispatch.cursor
        issued = {GroupKey.parse(group_id).place for group_id in self.published}
        assert {cursor.order.at(position) for position in range(cursor.position)} <= issued

    @invariant()
    def the_ledger_forgets_only_stale_groups(self):
        if not hasattr(self, "issuer"):
            return
        for group_id, version in self.effect:
            if not self.groups.uses(group_id):
                age = self.updates_between(self.version, version)  # no copy of a group trained then can be younger
                assert age > self.rollout.max_staleness, f"{group_id} is forgotten early"

    @invariant()
    def every_outstanding_group_is_somewhere(self):
        """Each outstanding group is in a queue, held by the trainer, dead-lettered, or was lost by the broker."""
        if not hasattr(self, "issuer"):
            return
        unsent = {group_id for pack in self.issuer._unsent for group_id in pack}
        dead = {group_id for letter, _ in self.letters for group_id in letter.group_ids}
        queued = {
            group_id
            for queue in (self.tasks, self.scored)
            for message in (*queue.waiting.values(), *queue.held.values())
            for group_id in _ids(message)
        }
        suppressed = self.tasks.suppressed | self.scored.suppressed
        missing = set(self.issuer.outstanding()) - queued - dead - unsent - self.lost - suppressed
        assert not missing, f"outstanding, but in no place: {missing}"

    def teardown(self):
        """Without further faults, the trainer makes step after step."""
        if not hasattr(self, "issuer"):
            return
        goal = self.version + 3
        for _ in range(40):
            self.forget()
            self.flow()
            self.every_group_has_one_effect()
            self.the_accounting_matches_dispatch()
            self.checkpoint()
            if self.acks.unsent:
                self.acknowledge(len(self.acks.unsent))
            if self.version >= goal:
                self.commits.close()
                return
            self.find_lost()
        raise AssertionError("no step is made although there are no further faults")


def _ids(message):
    return [entry if isinstance(entry, str) else entry.generated.group_id for entry in message]
